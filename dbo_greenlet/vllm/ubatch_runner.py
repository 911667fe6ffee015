"""vLLM's V2 runner, `UBatchRunner`: who runs is replaced, what runs is not.

vLLM starts and parks its threads in `begin_capturable_run`, so that a capture can begin between that and the call of
what it returns. Nothing has to be parked here: the step begins when the returned function is called, and one that is
never called costs nothing and runs nothing.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from vllm.forward_context import override_forward_context
from vllm.v1.worker.gpu import ubatch_utils as host
from vllm.v1.worker.gpu.ubatch_utils import UBatchRunner

from ..errors import ConfigurationError
from .capture import captures_tolerate_other_threads, make_blas_handles
from .host_microbatch import current_stream
from .step import run_step
from .swap import Swap, is_engaged

__all__ = ["replace", "restore"]

# Since vLLM 0.33: the first token of each microbatch.
_TAKES_OFFSETS = "token_offsets" in inspect.signature(host.make_ubatch_contexts).parameters


class PendingRun:
    """A step that is prepared: vLLM's forward context is cleared and SMs are reserved until it ran or is dropped."""

    def __init__(self, runner: UBatchRunner, stack: ExitStack, run: Callable[[], list[Any]]) -> None:
        self._runner = runner
        self._stack = stack
        self._run: Callable[[], list[Any]] | None = run

    def __call__(self) -> Any:
        """Run the step and return the merged output.

        Raises:
            MicrobatchFailed: see `run_step`.
            ConfigurationError: it ran already, or was aborted.
        """
        run, self._run = self._run, None
        if run is None:
            raise ConfigurationError("a capturable run can be finished once; begin another one")
        try:
            outputs = run()
        finally:
            self.drop()
        # With the caller's forward context on and all SMs given back, as vLLM merges.
        return host.merge_ubatch_outputs(outputs)

    def drop(self) -> None:
        """Give back what was reserved, without running the model."""
        self._run = None
        if self._runner._pending_finish is self:
            self._runner._pending_finish = None
        self._stack.close()


def _begin_capturable_run(
    self: UBatchRunner,
    model: Any,
    model_inputs: dict[str, Any],
    ubatch_state: Any,
    for_capture: bool = False,
) -> Callable[[], Any]:
    if not is_engaged(self):
        return _swap.original["begin_capturable_run"](self, model, model_inputs, ubatch_state, for_capture)
    slices = ubatch_state.slices
    if not len(slices) == len(ubatch_state.forward_contexts) == self.num_ubatches:
        raise ConfigurationError(
            f"the step has {len(slices)} slices and {len(ubatch_state.forward_contexts)} forward contexts for "
            f"{self.num_ubatches} microbatches"
        )
    _abort_pending_run(self)
    compute_stream = self.capture_stream if for_capture else current_stream()
    contexts = host.make_ubatch_contexts(
        num_micro_batches=self.num_ubatches,
        comm_stream=self.comm_stream,
        compute_stream=compute_stream,
        forward_contexts=ubatch_state.forward_contexts,
        ready_barrier=self.ready_barrier,
        **({"token_offsets": [each.token_slice.start for each in slices]} if _TAKES_OFFSETS else {}),
    )
    calls = [partial(model, **host.slice_model_inputs(model_inputs, each.token_slice)) for each in slices]
    with ExitStack() as entered:
        entered.enter_context(override_forward_context(None))
        entered.enter_context(self.sm_control)
        if for_capture:
            make_blas_handles(compute_stream, self.comm_stream)
            entered.enter_context(captures_tolerate_other_threads())
        stack = entered.pop_all()

    def run() -> list[Any]:
        # vLLM runs what it is about to capture once outside a graph, to warm up.
        captured = for_capture and torch.cuda.is_current_stream_capturing()
        return run_step(contexts, calls, kind="captured" if captured else "eager", slices=slices)

    self._pending_finish = pending = PendingRun(self, stack, run)
    return pending


def _abort_pending_run(self: UBatchRunner) -> None:
    if not is_engaged(self):
        _swap.original["abort_pending_run"](self)
        return
    pending = self._pending_finish
    if isinstance(pending, PendingRun):
        pending.drop()


_swap = Swap(UBatchRunner, begin_capturable_run=_begin_capturable_run, abort_pending_run=_abort_pending_run)
replace, restore = _swap.replace, _swap.restore
