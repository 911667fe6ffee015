"""The cut, the microbatches' inputs and the merge, field by field against vLLM 0.32's own functions."""

from __future__ import annotations

import dataclasses
import itertools

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

pytest.importorskip("vllm", reason="needs vLLM, whose functions are the reference here (make test-vllm)")

from vllm.sequence import IntermediateTensors
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.worker import ubatch_utils as v1_slices
from vllm.v1.worker.gpu import ubatch_utils as v2_slices
from vllm.v1.worker.gpu.input_batch import InputBatch

from dbo_greenlet.batching import StepInput, UBatchBuffers, merge_outputs, slice_step, split_step

HAS_GRAPH_FLAG = "decode_graph_eligible" in {each.name for each in dataclasses.fields(InputBatch)}  # since 0.31

pytestmark = pytest.mark.vllm

requests_strategy = st.lists(st.tuples(st.integers(1, 12), st.integers(0, 30)), min_size=1, max_size=6)


def make_both(requests, padding, request_padding=0) -> tuple[StepInput, InputBatch]:
    """The same batch as our step and as vLLM's; (new tokens, cached tokens) per request."""
    lengths = np.array([new for new, _ in requests], dtype=np.int32)
    tokens, count = int(lengths.sum()), len(requests)
    padded, padded_requests = tokens + padding, count + request_padding
    offsets = np.full(padded_requests + 1, tokens, dtype=np.int32)
    offsets[: count + 1] = np.concatenate([[0], np.cumsum(lengths)])
    seq_lens = torch.tensor([sum(r) for r in requests] + [0] * request_padding, dtype=torch.int32)
    rows = torch.arange(7, 7 + padded_requests)
    ids = torch.arange(100, 100 + padded)
    positions = torch.arange(1000, 1000 + padded)
    step = StepInput(
        positions=positions,
        query_start_loc=torch.from_numpy(offsets),
        seq_lens=seq_lens,
        slot_mapping=torch.arange(padded),
        request_rows=rows,
        num_tokens=tokens,
        num_padded_tokens=padded,
        input_ids=ids,
        num_requests=count,
    )
    per_request = np.zeros(padded_requests, dtype=np.int32)
    theirs = InputBatch(
        req_ids=[f"request{r}" for r in range(count)],
        num_reqs=count,
        num_reqs_after_padding=padded_requests,
        idx_mapping=rows,
        idx_mapping_np=rows.numpy(),
        expanded_idx_mapping=rows,
        expanded_local_pos=torch.zeros(padded_requests, dtype=torch.int32),
        num_scheduled_tokens=lengths,
        num_tokens=tokens,
        num_tokens_after_padding=padded,
        num_draft_tokens=0,
        num_draft_tokens_per_req=None,
        query_start_loc=torch.from_numpy(offsets.copy()),
        query_start_loc_np=offsets.copy(),
        seq_lens=seq_lens.clone(),
        seq_lens_cpu_upper_bound=seq_lens.clone(),
        dcp_local_seq_lens=None,
        num_computed_tokens_np=per_request,
        prefill_len_np=per_request,
        num_computed_prefill_tokens_np=per_request,
        is_prefilling_np=per_request.astype(bool),
        has_prefill=False,
        **({"decode_graph_eligible": True} if HAS_GRAPH_FLAG else {}),
        input_ids=ids,
        positions=positions,
        is_padding=torch.arange(padded) >= tokens,
        logits_indices=torch.zeros(count, dtype=torch.int64),
        cu_num_logits=torch.zeros(count + 1, dtype=torch.int32),
        cu_num_logits_np=np.zeros(count + 1, dtype=np.int32),
        has_structured_output_reqs=False,
        prompt_lens=None,
    )
    return step, theirs


def flat(slices) -> list[tuple[int, int, int, int]]:
    return [
        (s.request_slice.start, s.request_slice.stop, int(s.token_slice.start), int(s.token_slice.stop)) for s in slices
    ]


# --- the cut ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [2, 3, 4])
@pytest.mark.parametrize("request_padding", [0, 1, 3])
def test_every_small_batch_is_cut_alike(n, request_padding):
    for count in (1, 2, 3):
        for lengths in itertools.product((1, 2, 5), repeat=count):
            for padding in range(max(0, n - sum(lengths)), 12):
                step, theirs = make_both([(length, 3) for length in lengths], padding, request_padding)
                expected = v2_slices.create_ubatch_slices(theirs, n)
                assert flat(split_step(step, n)) == flat(expected), (lengths, padding)


@settings(deadline=None)
@given(requests_strategy, st.integers(0, 4), st.integers(0, 3), st.integers(2, 5))
def test_the_older_runner_cuts_alike_wherever_it_may_split(requests, padding, request_padding, n):
    step, _ = make_both(requests, padding, request_padding)
    assume(step.num_tokens >= n)
    assume(not v1_slices.is_last_ubatch_empty(step.num_tokens, step.num_padded_tokens, n))
    _, expected = v1_slices.maybe_create_ubatch_slices(
        True,
        np.array([new for new, _ in requests]),
        step.num_padded_tokens,
        step.num_padded_requests,
        n,
    )
    assert flat(split_step(step, n)) == flat(expected)


# --- a microbatch's inputs ----------------------------------------------------------------------------------------


@settings(deadline=None, max_examples=200)
@given(requests_strategy, st.integers(0, 20), st.integers(0, 3), st.integers(2, 5))
def test_each_microbatch_has_the_same_inputs(requests, padding, request_padding, n):
    step, batch = make_both(requests, max(padding, n - sum(new for new, _ in requests)), request_padding)
    buffers = UBatchBuffers(step.num_padded_requests, n)
    their_offsets = [torch.full((step.num_padded_requests + 1,), -9, dtype=torch.int32) for _ in range(n)]
    their_lengths = [torch.full((step.num_padded_requests,), -9, dtype=torch.int32) for _ in range(n)]
    for i, ubatch_slice in enumerate(split_step(step, n)):
        ours = slice_step(step, ubatch_slice, buffers[i])
        theirs = v2_slices._slice_input_batch(batch, ubatch_slice, their_offsets[i], their_lengths[i])
        pairs = {
            "input_ids": (ours.input_ids, theirs.input_ids),
            "positions": (ours.positions, theirs.positions),
            "query_start_loc": (ours.query_start_loc, theirs.query_start_loc),
            "query_start_loc on the host": (ours.query_start_loc_cpu, torch.from_numpy(theirs.query_start_loc_np)),
            "seq_lens": (ours.seq_lens, theirs.seq_lens),
            "seq_lens on the host": (ours.seq_lens_cpu, theirs.seq_lens_cpu_upper_bound),
            "rows": (ours.request_rows, theirs.idx_mapping),
            "padding": (torch.arange(ours.num_padded_tokens) >= ours.num_tokens, theirs.is_padding),
            "slots": (ours.slot_mapping, step.slot_mapping[ubatch_slice.token_slice]),
            "query lengths": (
                ours.query_start_loc_cpu.diff()[: ours.num_requests],
                torch.from_numpy(theirs.num_scheduled_tokens),
            ),
        }
        for name, (mine, reference) in pairs.items():
            assert mine.dtype == reference.dtype, name
            assert torch.equal(mine, reference), (name, i)
        numbers = (ours.num_tokens, ours.num_padded_tokens, ours.num_requests, ours.num_padded_requests)
        assert numbers == (
            theirs.num_tokens,
            theirs.num_tokens_after_padding,
            theirs.num_reqs,
            theirs.num_reqs_after_padding,
        )


@settings(deadline=None)
@given(requests_strategy, st.integers(2, 5))
def test_the_older_runner_slices_the_attention_metadata_alike(requests, n):
    step, _ = make_both(requests, 0)
    assume(step.num_tokens >= n)
    metadata = CommonAttentionMetadata(
        query_start_loc=step.query_start_loc.clone(),
        query_start_loc_cpu=step.query_start_loc.clone(),
        seq_lens=step.seq_lens.clone(),
        num_reqs=step.num_requests,
        num_actual_tokens=step.num_tokens,
        max_query_len=step.max_query_len,
        max_seq_len=0,
        block_table_tensor=step.request_rows[:, None],
        slot_mapping=step.slot_mapping,
        seq_lens_cpu_upper_bound=step.seq_lens.clone(),
    )
    slices = split_step(step, n)
    buffers = UBatchBuffers(step.num_requests, n)
    for i, theirs in enumerate(v1_slices.split_attn_metadata(slices, metadata)):
        ours = slice_step(step, slices[i], buffers[i])
        assert torch.equal(ours.query_start_loc, theirs.query_start_loc)
        assert torch.equal(ours.seq_lens, theirs.seq_lens)
        assert torch.equal(ours.slot_mapping, theirs.slot_mapping)
        assert torch.equal(ours.request_rows, theirs.block_table_tensor[:, 0])
        assert (ours.num_requests, ours.num_tokens) == (theirs.num_reqs, theirs.num_actual_tokens)
        assert (ours.max_query_len, ours.max_seq_len) == (theirs.max_query_len, theirs.max_seq_len)


@pytest.mark.parametrize("mrope", [False, True])
@pytest.mark.parametrize("absent", [None, "input_ids", "inputs_embeds", "intermediate_tensors"])
def test_the_models_per_token_inputs_are_narrowed_alike(mrope, absent):
    step, _ = make_both([(4, 0), (7, 3)], 2)
    extra = {
        "input_ids": step.input_ids,
        "inputs_embeds": torch.randn(13, 4),
        "intermediate_tensors": {"hidden_states": torch.randn(13, 4), "residual": torch.randn(13, 4)},
    }
    if absent is not None:
        extra[absent] = None
    positions = torch.arange(39).reshape(3, 13) if mrope else step.positions
    step = StepInput(
        positions=positions,
        query_start_loc=step.query_start_loc,
        seq_lens=step.seq_lens,
        slot_mapping=step.slot_mapping,
        request_rows=step.request_rows,
        num_tokens=step.num_tokens,
        num_padded_tokens=step.num_padded_tokens,
        **extra,
    )
    given_to_vllm = {"positions": positions, **extra}
    if extra["intermediate_tensors"] is not None:
        given_to_vllm["intermediate_tensors"] = IntermediateTensors(extra["intermediate_tensors"])
    buffers = UBatchBuffers(2, 3)
    for i, ubatch_slice in enumerate(split_step(step, 3)):
        ours = slice_step(step, ubatch_slice, buffers[i])
        theirs = v2_slices.slice_model_inputs(given_to_vllm, ubatch_slice.token_slice)
        for name in ("positions", "input_ids", "inputs_embeds"):
            mine, reference = getattr(ours, name), theirs[name]
            assert (mine is None) == (reference is None), name
            assert mine is None or (torch.equal(mine, reference) and mine.data_ptr() == reference.data_ptr()), name
        if extra["intermediate_tensors"] is None:
            assert ours.intermediate_tensors is None and theirs["intermediate_tensors"] is None
        else:
            sent = theirs["intermediate_tensors"].tensors
            assert list(ours.intermediate_tensors) == list(sent)
            assert all(torch.equal(ours.intermediate_tensors[key], sent[key]) for key in sent)


# --- merging ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [1, 2, 3])
def test_outputs_are_merged_alike(n):
    def part(rows: int) -> torch.Tensor:
        return torch.randn(rows, 4)

    tensors = [part(rows + 1) for rows in range(n)]
    assert torch.equal(merge_outputs(tensors), v2_slices.merge_ubatch_outputs(tensors))

    with_auxiliary = [(part(rows + 1), part(rows + 1)) for rows in range(n)]
    ours, theirs = merge_outputs(with_auxiliary), v2_slices.merge_ubatch_outputs(with_auxiliary)
    assert type(ours) is type(theirs) is tuple
    assert all(torch.equal(mine, reference) for mine, reference in zip(ours, theirs, strict=True))

    sent = [IntermediateTensors({"hidden_states": part(rows + 1), "residual": part(rows + 1)}) for rows in range(n)]
    ours, theirs = merge_outputs(sent), v2_slices.merge_ubatch_outputs(sent)
    assert type(ours) is IntermediateTensors
    assert list(ours.tensors) == list(theirs.tensors)
    assert all(torch.equal(ours.tensors[key], theirs.tensors[key]) for key in theirs.tensors)
