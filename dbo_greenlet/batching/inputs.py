"""What one forward reads: a step's flattened batch, and the part of it that one microbatch runs on.

A `StepInput` describes R requests whose T new tokens lie one after the other, followed by padding up to P tokens.
Request r owns the tokens [query_start_loc[r], query_start_loc[r + 1]); seq_lens[r] counts its whole context, those
tokens included, so token j of its q new ones sees the first seq_lens[r] - q + j + 1 positions.

`slice_step` makes the StepInput of one microbatch. Everything per token or per request is a view of the step's
tensors. Only the query offsets and the sequence lengths differ in value; they are written into `UBatchBuffers`, which
are allocated once, so that a captured graph finds them at the same address in every step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from dbo_greenlet.batching.slices import BatchError, UBatchSlice
from dbo_greenlet.errors import ConfigurationError

__all__ = [
    "MicrobatchBuffers",
    "StepInput",
    "UBatchBuffers",
    "check_step",
    "idle_step",
    "pad_step",
    "slice_all",
    "slice_step",
]

PADDING_SLOT = -1  # the KV slot of a token that must not be written


@dataclass(frozen=True, eq=False)
class StepInput:
    """The flattened batch of one step, or of one microbatch of it. R requests, T tokens padded to P.

    Attributes:
        positions: int64 [P], or [3, P] for M-RoPE (temporal, height, width). 0 for padding.
        query_start_loc: int32 [R + 1], first token of each request; the last entry is T.
        seq_lens: int32 [R], context length of each request, this step's tokens included.
        slot_mapping: int64 [P], the KV cache slot each token is written to; -1 for padding.
        request_rows: int64 [R], the KV cache row (or block table row) of each request.
        num_tokens, num_padded_tokens: T and P.
        input_ids: int64 [P], or None where embeddings or intermediate tensors come in instead.
        inputs_embeds: [P, H] or None.
        intermediate_tensors: name -> [P, ...], what the previous pipeline rank sent, or None.
        num_requests: the real requests; left out, all R. A graph's batch can be padded by requests too: those come
            last, own no token (their query offsets are T) and are counted by `num_padded_requests`.
        query_start_loc_cpu, seq_lens_cpu: the same values in host memory. Left out they are copied from the device,
            which waits for it: a caller whose tensors are on an accelerator has them on the host anyway, so pass them.

    Raises BatchError on construction if the shapes do not fit each other; `check_step` also looks at the values.
    """

    positions: Tensor
    query_start_loc: Tensor
    seq_lens: Tensor
    slot_mapping: Tensor
    request_rows: Tensor
    num_tokens: int
    num_padded_tokens: int
    input_ids: Tensor | None = None
    inputs_embeds: Tensor | None = None
    intermediate_tensors: dict[str, Tensor] | None = None
    num_requests: int = -1
    query_start_loc_cpu: Tensor = None  # type: ignore[assignment]  # never None once constructed
    seq_lens_cpu: Tensor = None  # type: ignore[assignment]

    def __post_init__(self) -> None:
        if self.num_requests < 0:
            object.__setattr__(self, "num_requests", self.seq_lens.shape[0])
        if self.query_start_loc_cpu is None:
            object.__setattr__(self, "query_start_loc_cpu", self.query_start_loc.cpu())
        if self.seq_lens_cpu is None:
            object.__setattr__(self, "seq_lens_cpu", self.seq_lens.cpu())
        _check_shapes(self)

    @property
    def num_padded_requests(self) -> int:
        """R: the requests that the per-request tensors hold, padding requests included."""
        return int(self.seq_lens.shape[0])

    @property
    def max_query_len(self) -> int:
        """The longest run of new tokens of one request; 0 without requests. Reads host memory only."""
        if self.num_padded_requests == 0:
            return 0
        return int(self.query_start_loc_cpu.diff().max())

    @property
    def max_seq_len(self) -> int:
        """The longest context; 0 without requests. Reads host memory only."""
        if self.num_padded_requests == 0:
            return 0
        return int(self.seq_lens_cpu.max())

    @property
    def uniform_query_len(self) -> int:
        """The number of new tokens that every real request has, 0 where they differ or there is no request."""
        lengths = self.query_start_loc_cpu[: self.num_requests + 1].diff()
        if lengths.numel() == 0 or bool((lengths != lengths[0]).any()):
            return 0
        return int(lengths[0])


def _check_shapes(step: StepInput) -> None:
    # Runs for every microbatch of every step: shapes only, no values, so it never waits for a device; and no message
    # is put together before there is something to complain about.
    padded = step.num_padded_tokens
    if not 0 <= step.num_tokens <= padded:
        raise BatchError(f"StepInput has num_tokens {step.num_tokens} but num_padded_tokens {padded}")
    if step.seq_lens.ndim != 1:
        raise _wrong_shape("seq_lens", step.seq_lens, "[requests]")
    requests = step.seq_lens.shape[0]
    if step.num_requests > requests:
        raise BatchError(f"StepInput has num_requests {step.num_requests} but seq_lens of {requests} requests")
    if step.positions.shape not in ((padded,), (3, padded)):
        raise _wrong_shape("positions", step.positions, f"[{padded}] or [3, {padded}]")
    exact = (
        ("query_start_loc", step.query_start_loc, requests + 1),
        ("query_start_loc_cpu", step.query_start_loc_cpu, requests + 1),
        ("seq_lens_cpu", step.seq_lens_cpu, requests),
        ("request_rows", step.request_rows, requests),
        ("slot_mapping", step.slot_mapping, padded),
        ("input_ids", step.input_ids, padded),
    )
    for name, tensor, length in exact:
        if tensor is not None and tensor.shape != (length,):
            raise _wrong_shape(name, tensor, f"[{length}] for {requests} requests and {padded} tokens")
    if step.inputs_embeds is not None:
        _check_rows("inputs_embeds", step.inputs_embeds, padded)
    for key, tensor in (step.intermediate_tensors or {}).items():
        _check_rows(f"intermediate_tensors[{key!r}]", tensor, padded)


def _check_rows(name: str, tensor: Tensor, rows: int) -> None:
    if tensor.ndim == 0 or tensor.shape[0] != rows:
        raise _wrong_shape(name, tensor, f"[{rows}, ...]")


def _wrong_shape(name: str, tensor: Tensor, wanted: str) -> BatchError:
    return BatchError(f"StepInput.{name} has shape {list(tensor.shape)}, expected {wanted}")


def check_step(step: StepInput) -> None:
    """Check the values that shapes cannot tell: offsets that ascend from 0 to T, contexts that hold the new tokens.

    Reads host memory only. For the edge where a batch comes in from outside; slicing keeps these properties.

    Raises:
        BatchError: naming the request whose numbers do not fit.
    """
    offsets = step.query_start_loc_cpu.tolist()
    lengths = step.seq_lens_cpu.tolist()
    if offsets[0] != 0 or offsets[step.num_requests] != step.num_tokens:
        raise BatchError(
            f"query_start_loc must run from 0 to num_tokens {step.num_tokens}, "
            f"it runs from {offsets[0]} to {offsets[step.num_requests]}"
        )
    for request, (start, stop) in enumerate(pairwise(offsets)):
        if stop < start:
            raise BatchError(f"query_start_loc descends at request {request}: {start}, {stop}")
        if request >= step.num_requests and stop != step.num_tokens:
            raise BatchError(f"padding request {request} owns tokens: its offsets are {start}, {stop}")
        if request < step.num_requests and lengths[request] < stop - start:
            raise BatchError(f"request {request} has {stop - start} new tokens but seq_lens says {lengths[request]}")


class MicrobatchBuffers:
    """The two tensors of one microbatch that are not views: query offsets int32 [max_requests + 1] and sequence
    lengths int32 [max_requests], on the device and in host memory (the same storage where the device is the CPU).
    """

    def __init__(self, max_requests: int, device: torch.device) -> None:
        self.max_requests = max_requests
        self.query_start_loc = torch.zeros(max_requests + 1, dtype=torch.int32, device=device)
        self.seq_lens = torch.zeros(max_requests, dtype=torch.int32, device=device)
        if device.type == "cpu":
            self.query_start_loc_cpu = self.query_start_loc
            self.seq_lens_cpu = self.seq_lens
        else:
            self.query_start_loc_cpu = torch.zeros(max_requests + 1, dtype=torch.int32)
            self.seq_lens_cpu = torch.zeros(max_requests, dtype=torch.int32)


class UBatchBuffers:
    """The persistent buffers of a runner: `buffers[i]` belongs to microbatch i and stays where it is.

    Each microbatch has its own pair because all microbatches of a step are alive at once, and a straddling request
    has different numbers in each. What was sliced into them is valid until the next step is sliced.

    Args:
        max_requests: the most requests (padding requests included) that a step may have.
        n: microbatches.
        device: where the model runs.

    Raises:
        ConfigurationError: max_requests or n below 1.
    """

    def __init__(self, max_requests: int, n: int, device: torch.device | str = "cpu") -> None:
        for name, value in (("max_requests", max_requests), ("n", n)):
            if value < 1:
                raise ConfigurationError(f"UBatchBuffers: {name} is {value}; use 1 or more")
        self.max_requests = max_requests
        self._per_microbatch = [MicrobatchBuffers(max_requests, torch.device(device)) for _ in range(n)]

    def __getitem__(self, index: int) -> MicrobatchBuffers:
        return self._per_microbatch[index]

    def __len__(self) -> int:
        return len(self._per_microbatch)


def _write_offsets(source: Tensor, requests: slice, tokens: slice, out: Tensor) -> Tensor:
    """Query offsets counted from the microbatch's first token; a request that is cut keeps only its tokens inside."""
    view = out[: requests.stop - requests.start + 1]
    torch.sub(source[requests.start : requests.stop + 1], tokens.start, out=view)
    return view.clamp_(0, tokens.stop - tokens.start)


def _write_seq_lens(seq_lens: Tensor, offsets: Tensor, requests: slice, tokens: slice, out: Tensor) -> Tensor:
    """Sequence lengths without the tokens *past the end* of the microbatch.

    Tokens before its beginning count: the earlier microbatch writes their KV before this one reads it (law 6). Hence
    the cut is not "context minus the tokens that are not here": that would lose them. Only the last request can reach
    past the end, but the subtraction runs over all: no indexing by a host number, no temporary, so it can be captured.
    """
    view = out[: requests.stop - requests.start]
    torch.sub(offsets[requests.start + 1 : requests.stop + 1], tokens.stop, out=view)
    view.clamp_(min=0)
    return torch.sub(seq_lens[requests.start : requests.stop], view, out=view)


def slice_step(step: StepInput, ubatch_slice: UBatchSlice, buffers: MicrobatchBuffers) -> StepInput:
    """The input of one microbatch: views of the step, and offsets and lengths written into its buffers.

    Args:
        step: the whole step.
        ubatch_slice: one of `split_step(step, n)`.
        buffers: the microbatch's own, `UBatchBuffers[i]`; what they held before is overwritten.

    Returns:
        A StepInput whose tokens are numbered from 0. Its num_tokens is 0 for a microbatch inside the padding.

    Raises:
        BatchError: the slice has more requests than the buffers, or reaches past the step.
    """
    requests, tokens = ubatch_slice.request_slice, ubatch_slice.token_slice
    if ubatch_slice.num_requests > buffers.max_requests:
        raise BatchError(
            f"a microbatch of {ubatch_slice.num_requests} requests does not fit UBatchBuffers of "
            f"max_requests {buffers.max_requests}; make them for the most requests a step can have"
        )
    if tokens.stop > step.num_padded_tokens or requests.stop > step.num_padded_requests:
        raise BatchError(
            f"{ubatch_slice} was not made for this step of {step.num_padded_tokens} tokens "
            f"and {step.num_padded_requests} requests"
        )
    query_start_loc = _write_offsets(step.query_start_loc, requests, tokens, buffers.query_start_loc)
    seq_lens = _write_seq_lens(step.seq_lens, step.query_start_loc, requests, tokens, buffers.seq_lens)
    query_start_loc_cpu, seq_lens_cpu = query_start_loc, seq_lens
    if buffers.query_start_loc_cpu is not buffers.query_start_loc:
        host_offsets = step.query_start_loc_cpu
        query_start_loc_cpu = _write_offsets(host_offsets, requests, tokens, buffers.query_start_loc_cpu)
        seq_lens_cpu = _write_seq_lens(step.seq_lens_cpu, host_offsets, requests, tokens, buffers.seq_lens_cpu)
    intermediate = step.intermediate_tensors
    return StepInput(
        positions=step.positions[..., tokens],
        query_start_loc=query_start_loc,
        seq_lens=seq_lens,
        slot_mapping=step.slot_mapping[tokens],
        request_rows=step.request_rows[requests],
        num_tokens=max(0, min(tokens.stop, step.num_tokens) - tokens.start),
        num_padded_tokens=ubatch_slice.num_tokens,
        input_ids=None if step.input_ids is None else step.input_ids[tokens],
        inputs_embeds=None if step.inputs_embeds is None else step.inputs_embeds[tokens],
        intermediate_tensors=None if intermediate is None else {k: v[tokens] for k, v in intermediate.items()},
        num_requests=min(requests.stop, step.num_requests) - requests.start,
        query_start_loc_cpu=query_start_loc_cpu,
        seq_lens_cpu=seq_lens_cpu,
    )


def slice_all(step: StepInput, slices: Sequence[UBatchSlice], buffers: UBatchBuffers) -> list[StepInput]:
    """`slice_step` for every microbatch of the step, microbatch i into `buffers[i]`.

    Raises:
        BatchError: more slices than buffers, or what `slice_step` raises.
    """
    if len(slices) > len(buffers):
        raise BatchError(f"{len(slices)} microbatches but UBatchBuffers for {len(buffers)}")
    return [slice_step(step, ubatch_slice, buffers[i]) for i, ubatch_slice in enumerate(slices)]


def _pad_tokens(tensor: Tensor, num_padded_tokens: int, fill: int, dim: int = 0) -> Tensor:
    shape = list(tensor.shape)
    shape[dim] = num_padded_tokens - shape[dim]
    return torch.cat([tensor, tensor.new_full(shape, fill)], dim=dim)


def pad_step(step: StepInput, num_padded_tokens: int) -> StepInput:
    """The step with its per-token tensors extended to `num_padded_tokens`; the step itself if it has that many.

    Padding tokens have id 0, position 0, zero embeddings and slot -1: they run through the model, belong to no
    request and write no KV.

    Raises:
        BatchError: the step is longer already.
    """
    if num_padded_tokens == step.num_padded_tokens:
        return step
    if num_padded_tokens < step.num_padded_tokens:
        raise BatchError(f"a step of {step.num_padded_tokens} tokens cannot be padded to {num_padded_tokens}")
    intermediate = step.intermediate_tensors
    if intermediate is not None:
        intermediate = {key: _pad_tokens(tensor, num_padded_tokens, 0) for key, tensor in intermediate.items()}
    return StepInput(
        positions=_pad_tokens(step.positions, num_padded_tokens, 0, dim=-1),
        query_start_loc=step.query_start_loc,
        seq_lens=step.seq_lens,
        slot_mapping=_pad_tokens(step.slot_mapping, num_padded_tokens, PADDING_SLOT),
        request_rows=step.request_rows,
        num_tokens=step.num_tokens,
        num_padded_tokens=num_padded_tokens,
        input_ids=None if step.input_ids is None else _pad_tokens(step.input_ids, num_padded_tokens, 0),
        inputs_embeds=None if step.inputs_embeds is None else _pad_tokens(step.inputs_embeds, num_padded_tokens, 0),
        intermediate_tensors=intermediate,
        num_requests=step.num_requests,
        query_start_loc_cpu=step.query_start_loc_cpu,
        seq_lens_cpu=step.seq_lens_cpu,
    )


def idle_step(device: torch.device | str = "cpu") -> StepInput:
    """The step of a rank without work: no request, no token. It still votes, and still joins every all-to-all."""
    empty = torch.zeros(0, dtype=torch.int64, device=device)
    return StepInput(
        positions=empty,
        query_start_loc=torch.zeros(1, dtype=torch.int32, device=device),
        seq_lens=torch.zeros(0, dtype=torch.int32, device=device),
        slot_mapping=empty,
        request_rows=empty,
        num_tokens=0,
        num_padded_tokens=0,
        input_ids=empty,
    )
