"""vLLM's V1 runner, `UBatchWrapper`: who runs is replaced, what runs is not.

Slicing, metadata, forward contexts, SM control, the decision which graph serves a step, the replay: all of it stays
vLLM's. Two methods start threads, and those two are replaced; `__call__` is watched to count replays and to time
unsplit steps that are recorded, and `__init__` to decide, once for each wrapper, whether it engages.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from vllm.config import CUDAGraphMode
from vllm.forward_context import get_forward_context, is_forward_context_available, override_forward_context
from vllm.v1.worker import gpu_ubatch_wrapper as host
from vllm.v1.worker.gpu_ubatch_wrapper import UBatchWrapper

from .capture import graph_capture, make_blas_handles
from .step import count_replay, recorded_to, run_step
from .swap import Swap, is_engaged

__all__ = ["replace", "restore"]


def _call(self: UBatchWrapper, *args: Any, **kwargs: Any) -> Any:
    if is_engaged(self):
        context = get_forward_context()
        slices = context.ubatch_slices
        full = context.cudagraph_runtime_mode is CUDAGraphMode.FULL
        if slices is not None:
            if full and sum(each.num_tokens for each in slices) in self.cudagraphs:
                count_replay()
        elif (trace := recorded_to()) is not None and trace.awaits_model:
            # vLLM runs a batch eagerly for which it has a graph of microbatches.
            if full and context.batch_descriptor.num_tokens not in self.cudagraphs:
                trace.model_graph(captured=_is_new(self, context.batch_descriptor))
            else:
                with trace.model_call():
                    return _swap.original["__call__"](self, *args, **kwargs)
    return _swap.original["__call__"](self, *args, **kwargs)


def _is_new(self: UBatchWrapper, descriptor: Any) -> bool:
    """Whether there is no graph yet for an unsplit batch: vLLM captures one then."""
    entry = getattr(self.cudagraph_wrapper, "concrete_cudagraph_entries", {}).get(descriptor)
    return getattr(entry, "cudagraph", None) is None


def _run_ubatches(self: UBatchWrapper, ubatch_metadata: list[Any], model: Callable[..., Any]) -> Any:
    if not is_engaged(self):
        return _swap.original["_run_ubatches"](self, ubatch_metadata, model)
    # The microbatches put their own forward contexts on; this gives the caller's back.
    slices = _slices()
    with override_forward_context(None):
        outputs = _run(ubatch_metadata, model, "eager", slices)
    return _join(outputs)


def _capture_ubatches(self: UBatchWrapper, ubatch_metadata: list[Any], model: Callable[..., Any]) -> Any:
    if not is_engaged(self):
        return _swap.original["_capture_ubatches"](self, ubatch_metadata, model)
    first = ubatch_metadata[0].context
    slices = _slices()
    with override_forward_context(None):
        # On this thread and outside the capture: a handle made inside one is an error.
        make_blas_handles(first.compute_stream, first.comm_stream)
        captured = host.CUDAGraphMetaData(cudagraph=torch.cuda.CUDAGraph(), ubatch_metadata=ubatch_metadata)
        pool = self.graph_pool
        host.set_graph_pool_id(host.current_platform.graph_pool_handle() if pool is None else pool)
        offloader = host.get_offloader()
        offloader.sync_prev_onload()
        with graph_capture(captured.cudagraph, stream=first.compute_stream, pool=pool):
            captured.outputs = _join(_run(ubatch_metadata, model, "captured", slices))
            # The last layer's prefetch forks a stream that has to be joined before the capture ends.
            offloader.join_after_forward()
        # Only now: a capture that failed leaves no entry that a later step would replay.
        self.cudagraphs[sum(each.num_tokens for each in ubatch_metadata)] = captured
    return captured.outputs


def _slices() -> Any:
    # The caller's forward context knows them; a subclass may run microbatches without one.
    return get_forward_context().ubatch_slices if is_forward_context_available() else None


def _run(ubatch_metadata: list[Any], model: Callable[..., Any], kind: str, slices: Any) -> list[Any]:
    calls = [
        partial(
            model,
            input_ids=each.input_ids,
            positions=each.positions,
            intermediate_tensors=each.intermediate_tensors,
            inputs_embeds=each.inputs_embeds,
        )
        for each in ubatch_metadata
    ]
    return run_step([each.context for each in ubatch_metadata], calls, kind=kind, slices=slices)


def _join(outputs: list[Any]) -> Any:
    # Versions before 0.24 know one kind of output.
    join = getattr(host, "_cat_ubatch_outputs", None)
    return torch.cat(outputs, dim=0) if join is None else join(outputs)


_swap = Swap(UBatchWrapper, __call__=_call, _run_ubatches=_run_ubatches, _capture_ubatches=_capture_ubatches)
replace, restore = _swap.replace, _swap.restore
