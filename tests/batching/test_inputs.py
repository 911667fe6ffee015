"""What each microbatch reads: every token sees exactly what it sees unsplit, through views and stable buffers."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dbo_greenlet.batching import (
    BatchError,
    StepInput,
    UBatchBuffers,
    UBatchSlice,
    check_step,
    idle_step,
    pad_step,
    slice_all,
    slice_step,
    split_step,
)
from dbo_greenlet.errors import ConfigurationError

requests_strategy = st.lists(st.tuples(st.integers(0, 12), st.integers(0, 30)), max_size=6)
PER_TOKEN = ("input_ids", "positions", "slot_mapping")


def microbatches(step: StepInput, n: int) -> list[StepInput]:
    return slice_all(step, split_step(step, n), UBatchBuffers(max(step.num_padded_requests, 1), n))


@settings(deadline=None, max_examples=200)
@given(requests_strategy, st.integers(0, 10), st.integers(0, 3), st.integers(1, 5))
def test_every_token_sees_what_it_sees_unsplit(make_step, token_view, requests, padding, request_padding, n):
    step = make_step(requests, padding, request_padding)
    split = []
    for microbatch in microbatches(step, n):
        for id_, *rest in token_view(microbatch):
            split.append((id_, *rest))
    assert split == token_view(step)


@settings(deadline=None, max_examples=200)
@given(requests_strategy, st.integers(0, 10), st.integers(1, 5))
def test_microbatches_partition_the_tokens_and_stay_well_formed(make_step, requests, padding, n):
    step = make_step(requests, padding)
    parts = microbatches(step, n)
    for part in parts:
        check_step(part)
    assert sum(part.num_tokens for part in parts) == step.num_tokens
    assert sum(part.num_padded_tokens for part in parts) == step.num_padded_tokens
    for name in PER_TOKEN:
        assert torch.equal(torch.cat([getattr(part, name) for part in parts]), getattr(step, name)), name


@settings(deadline=None, max_examples=100)
@given(requests_strategy, st.integers(0, 10), st.integers(1, 5))
def test_a_microbatch_reads_no_kv_that_a_later_one_writes(make_step, requests, padding, n):
    """Its own context ends with its own last token, so nothing past the boundary is ever attended to."""
    for part in microbatches(make_step(requests, padding), n):
        offsets = part.query_start_loc.tolist()
        for request in range(part.num_requests):
            start, stop = offsets[request], offsets[request + 1]
            if stop > start:
                assert int(part.seq_lens[request]) == int(part.positions[stop - 1]) + 1


def test_only_the_tokens_past_the_end_are_cut_from_a_straddling_request(make_step):
    parts = microbatches(make_step([(9, 4)]), 3)
    assert [part.query_start_loc.tolist() for part in parts] == [[0, 3]] * 3
    assert [part.seq_lens.tolist() for part in parts] == [[7], [10], [13]]


def test_a_microbatch_inside_the_padding_has_a_request_without_query_tokens(make_step):
    last = microbatches(make_step([(2, 0), (2, 6)], padding=8), 2)[1]
    assert (last.num_tokens, last.num_padded_tokens, last.num_requests) == (0, 6, 1)
    assert last.query_start_loc.tolist() == [0, 0]
    assert last.seq_lens.tolist() == [8]
    assert last.slot_mapping.tolist() == [-1] * 6
    assert last.max_query_len == 0


def test_padding_requests_come_with_the_last_microbatch_and_are_no_real_ones(make_step):
    first, last = microbatches(make_step([(2, 0), (4, 1)], request_padding=2), 2)
    assert (first.num_requests, first.num_padded_requests) == (2, 2)
    assert (last.num_requests, last.num_padded_requests) == (1, 3)
    assert last.query_start_loc.tolist() == [0, 3, 3, 3]
    assert last.seq_lens.tolist() == [5, 0, 0]


def test_the_step_itself_is_left_alone(make_step):
    step = make_step([(5, 2), (6, 0)], padding=3)
    before = [tensor.clone() for tensor in (step.query_start_loc, step.seq_lens)]
    microbatches(step, 3)
    assert torch.equal(step.query_start_loc, before[0])
    assert torch.equal(step.seq_lens, before[1])


def test_everything_but_offsets_and_lengths_is_a_view(make_step):
    embeds = torch.randn(10, 4)
    sent = {"hidden_states": torch.randn(10, 4), "residual": torch.randn(10, 4)}
    step = make_step(
        [(4, 0), (6, 0)], inputs_embeds=embeds, intermediate_tensors=sent, positions=torch.ones(3, 10).long()
    )
    for part, start in zip(microbatches(step, 2), (0, 5), strict=True):
        owned = {
            "input_ids": (part.input_ids, step.input_ids),
            "slot_mapping": (part.slot_mapping, step.slot_mapping),
            "inputs_embeds": (part.inputs_embeds, embeds),
            **{name: (part.intermediate_tensors[name], tensor) for name, tensor in sent.items()},
        }
        for name, (piece, whole) in owned.items():
            assert piece.data_ptr() == whole[start].data_ptr(), name
            assert torch.equal(piece, whole[start : start + 5]), name
        assert part.positions.data_ptr() == step.positions[:, start].data_ptr()
        assert torch.equal(part.positions, step.positions[:, start : start + 5])
        first_request = 0 if start == 0 else 1
        assert part.request_rows.data_ptr() == step.request_rows[first_request].data_ptr()


def test_mrope_positions_keep_their_three_sections(make_step):
    positions = torch.arange(30).reshape(3, 10)
    parts = microbatches(make_step([(10, 0)], positions=positions), 3)
    assert torch.equal(torch.cat([part.positions for part in parts], dim=1), positions)


def test_absent_inputs_stay_absent(make_step):
    for part in microbatches(make_step([(6, 0)], input_ids=None, inputs_embeds=torch.zeros(6, 2)), 2):
        assert part.input_ids is None
        assert part.intermediate_tensors is None
        assert part.inputs_embeds.shape == (3, 2)


@settings(deadline=None, max_examples=50)
@given(st.lists(st.tuples(requests_strategy, st.integers(0, 10)), min_size=2, max_size=5), st.integers(1, 4))
def test_buffer_addresses_are_the_same_in_every_step(make_step, steps, n):
    buffers = UBatchBuffers(8, n)
    seen = [set() for _ in range(n)]
    for requests, padding in steps:
        step = make_step(requests, padding)
        for i, part in enumerate(slice_all(step, split_step(step, n), buffers)):
            seen[i].add(part.query_start_loc.data_ptr())
            # An idle rank's sequence lengths hold nothing, and an empty tensor has no address.
            if part.seq_lens.numel():
                seen[i].add(part.seq_lens.data_ptr())
    own = [{buffers[i].query_start_loc.data_ptr(), buffers[i].seq_lens.data_ptr()} for i in range(n)]
    assert all(found <= expected for found, expected in zip(seen, own, strict=True))
    assert len(set.union(*own)) == 2 * n


def test_slicing_again_overwrites_what_a_longer_step_left(make_step):
    buffers = UBatchBuffers(8, 2)
    long_step = make_step([(3, 9)] * 8)
    slice_all(long_step, split_step(long_step, 2), buffers)
    short_step = make_step([(5, 1)])
    parts = slice_all(short_step, split_step(short_step, 2), buffers)
    assert [part.query_start_loc.tolist() for part in parts] == [[0, 2], [0, 3]]
    assert [part.seq_lens.tolist() for part in parts] == [[3], [6]]


def test_host_copies_equal_the_device_tensors(make_step):
    for part in microbatches(make_step([(3, 1), (7, 2)], padding=2), 3):
        assert torch.equal(part.query_start_loc_cpu, part.query_start_loc)
        assert torch.equal(part.seq_lens_cpu, part.seq_lens)
        assert part.max_seq_len == int(part.seq_lens.max())
        assert part.max_query_len == int(part.query_start_loc.diff().max())


def test_host_copies_come_from_the_host_when_the_device_is_another(make_step):
    """The meta device has no values: what is right on the host was computed there, without asking the device."""
    step = make_step([(3, 1), (7, 2)])
    on_device = {
        name: getattr(step, name).to("meta")
        for name in ("positions", "query_start_loc", "seq_lens", "slot_mapping", "request_rows", "input_ids")
    }
    remote = StepInput(
        **on_device,
        num_tokens=step.num_tokens,
        num_padded_tokens=step.num_padded_tokens,
        query_start_loc_cpu=step.query_start_loc_cpu,
        seq_lens_cpu=step.seq_lens_cpu,
    )
    parts = slice_all(remote, split_step(remote, 2), UBatchBuffers(2, 2, "meta"))
    assert [part.query_start_loc_cpu.tolist() for part in parts] == [[0, 3, 5], [0, 5]]
    assert [part.seq_lens_cpu.tolist() for part in parts] == [[4, 4], [9]]
    assert all(part.seq_lens.device.type == "meta" for part in parts)


# --- padding and idle ranks ---------------------------------------------------------------------------------------


def test_padding_tokens_write_no_kv_and_belong_to_no_request(make_step, token_view):
    step = make_step([(2, 3), (1, 0)], inputs_embeds=torch.ones(3, 2), intermediate_tensors={"h": torch.ones(3, 2)})
    padded = pad_step(step, 5)
    check_step(padded)
    assert token_view(padded) == token_view(step)
    assert padded.slot_mapping.tolist() == [*step.slot_mapping.tolist(), -1, -1]
    assert padded.input_ids.tolist() == [100, 101, 102, 0, 0]
    assert padded.positions.tolist() == [3, 4, 0, 0, 0]
    assert padded.inputs_embeds.sum() == 6
    assert padded.intermediate_tensors["h"].shape == (5, 2)


def test_mrope_positions_are_padded_along_the_tokens(make_step):
    padded = pad_step(make_step([(2, 0)], positions=torch.ones(3, 2).long()), 3)
    assert padded.positions.tolist() == [[1, 1, 0]] * 3


def test_padding_to_the_same_length_is_the_same_step_and_to_less_an_error(make_step):
    step = make_step([(4, 0)])
    assert pad_step(step, 4) is step
    with pytest.raises(BatchError, match="4 tokens cannot be padded to 3"):
        pad_step(step, 3)


def test_an_idle_rank_can_be_padded_and_split_like_the_others():
    parts = microbatches(pad_step(idle_step(), 6), 2)
    assert [(part.num_tokens, part.num_padded_tokens, part.num_requests) for part in parts] == [(0, 3, 0)] * 2
    assert idle_step().max_query_len == idle_step().max_seq_len == idle_step().uniform_query_len == 0


@pytest.mark.parametrize(("lengths", "uniform"), [([1, 1, 1], 1), ([3, 3], 3), ([1, 2], 0), ([2, 1, 1], 0), ([4], 4)])
def test_uniform_query_length(make_step, lengths, uniform):
    assert make_step([(length, 0) for length in lengths], padding=1, request_padding=1).uniform_query_len == uniform


# --- errors -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"positions": torch.zeros(2, 4).long()}, r"positions has shape \[2, 4\], expected \[4\] or \[3, 4\]"),
        ({"query_start_loc": torch.zeros(4).int()}, r"query_start_loc has shape \[4\], expected \[3\]"),
        ({"query_start_loc_cpu": torch.zeros(2).int()}, r"query_start_loc_cpu has shape \[2\], expected \[3\]"),
        ({"seq_lens": torch.zeros(2, 1).int()}, r"seq_lens has shape \[2, 1\], expected \[requests\]"),
        ({"seq_lens_cpu": torch.zeros(1).int()}, r"seq_lens_cpu has shape \[1\], expected \[2\]"),
        ({"request_rows": torch.zeros(3).long()}, r"request_rows has shape \[3\], expected \[2\]"),
        ({"slot_mapping": torch.zeros(3).long()}, r"slot_mapping has shape \[3\], expected \[4\]"),
        ({"input_ids": torch.zeros(5).long()}, r"input_ids has shape \[5\], expected \[4\]"),
        ({"inputs_embeds": torch.zeros(5, 2)}, r"inputs_embeds has shape \[5, 2\], expected \[4, \.\.\.\]"),
        ({"intermediate_tensors": {"h": torch.tensor(0)}}, r"intermediate_tensors\['h'\] has shape \[\]"),
        ({"num_tokens": 5}, "num_tokens 5 but num_padded_tokens 4"),
        ({"num_requests": 3}, "num_requests 3 but seq_lens of 2 requests"),
    ],
)
def test_shapes_that_do_not_fit_are_named(make_step, wrong, message):
    with pytest.raises(BatchError, match=message):
        make_step([(1, 0), (3, 0)], **wrong)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"query_start_loc": torch.tensor([0, 1, 3]).int()}, "from 0 to num_tokens 4, it runs from 0 to 3"),
        ({"query_start_loc": torch.tensor([1, 1, 4]).int()}, "it runs from 1 to 4"),
        ({"query_start_loc": torch.tensor([0, 5, 4]).int()}, "descends at request 1: 5, 4"),
        ({"seq_lens": torch.tensor([1, 2]).int()}, "request 1 has 3 new tokens but seq_lens says 2"),
        (
            {"query_start_loc": torch.tensor([0, 4, 4]).int(), "num_requests": 1, "num_tokens": 4},
            None,
        ),
        ({"num_requests": 1, "num_tokens": 1}, "padding request 1 owns tokens: its offsets are 1, 4"),
    ],
)
def test_values_that_do_not_fit_are_named(make_step, wrong, message):
    wrong = {"seq_lens": torch.tensor([9, 9]).int(), **wrong}
    step = make_step([(1, 0), (3, 0)], **wrong)
    if message is None:
        check_step(step)
        return
    with pytest.raises(BatchError, match=message):
        check_step(step)


def test_too_many_requests_for_the_buffers_is_an_error(make_step):
    step = make_step([(2, 0)] * 4)
    with pytest.raises(BatchError, match="2 requests does not fit UBatchBuffers of max_requests 1"):
        slice_all(step, split_step(step, 2), UBatchBuffers(1, 2))
    with pytest.raises(BatchError, match="3 microbatches but UBatchBuffers for 2"):
        slice_all(step, split_step(step, 3), UBatchBuffers(4, 2))


def test_a_slice_of_another_step_is_an_error(make_step):
    foreign = UBatchSlice(slice(0, 1), slice(0, 9))
    with pytest.raises(BatchError, match="was not made for this step of 8 tokens and 4 requests"):
        slice_step(make_step([(2, 0)] * 4), foreign, UBatchBuffers(4, 1)[0])


@pytest.mark.parametrize(("max_requests", "n", "name"), [(0, 2, "max_requests"), (4, 0, "n")])
def test_buffers_for_nothing_are_refused(max_requests, n, name):
    with pytest.raises(ConfigurationError, match=f"{name} is 0; use 1 or more"):
        UBatchBuffers(max_requests, n)
