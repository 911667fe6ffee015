"""vLLM's V2 runner, `UBatchRunner`: who runs is replaced, what runs is not.

vLLM starts and parks its threads in `begin_capturable_run`, so that a capture can begin between that and the call of
what it returns. Nothing has to be parked here: the step begins when the returned function is called, and one that is
never called costs nothing and runs nothing.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial, update_wrapper
from typing import Any

import torch
from vllm.forward_context import override_forward_context
from vllm.v1.worker.gpu import ubatch_utils as host
from vllm.v1.worker.gpu.ubatch_utils import UBatchRunner

from ..errors import ConfigurationError
from .capture import captures_tolerate_other_threads, make_blas_handles
from .step import run_step
from .ubatching import current_stream

__all__ = ["is_engaged", "replace", "restore"]

_METHODS = ("__init__", "begin_capturable_run", "abort_pending_run")
_original: dict[str, Callable[..., Any]] = {name: UBatchRunner.__dict__[name] for name in _METHODS}
# Since vLLM 0.33: the first token of each microbatch.
_TAKES_OFFSETS = "token_offsets" in inspect.signature(host.make_ubatch_contexts).parameters

_ENGAGED = "_dbo_greenlet_engaged"
_decide: Callable[[Any, Any], bool] | None = None


def is_engaged(runner: UBatchRunner) -> bool:
    """Whether this runner's microbatches run as greenlets."""
    return _ENGAGED in runner.__dict__


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


def _init(self: UBatchRunner, *args: Any, **kwargs: Any) -> None:
    _original["__init__"](self, *args, **kwargs)
    if _decide is not None and _decide(self.vllm_config, self):
        self.__dict__[_ENGAGED] = True


def _begin_capturable_run(
    self: UBatchRunner,
    model: Any,
    model_inputs: dict[str, Any],
    ubatch_state: Any,
    for_capture: bool = False,
) -> Callable[[], Any]:
    if _ENGAGED not in self.__dict__:
        return _original["begin_capturable_run"](self, model, model_inputs, ubatch_state, for_capture)
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
    if _ENGAGED not in self.__dict__:
        _original["abort_pending_run"](self)
        return
    pending = self._pending_finish
    if isinstance(pending, PendingRun):
        pending.drop()


_REPLACEMENTS = dict(zip(_METHODS, (_init, _begin_capturable_run, _abort_pending_run), strict=True))
for _name, _method in _REPLACEMENTS.items():
    update_wrapper(_method, _original[_name])  # signature and text stay vLLM's


def replace(decide: Callable[[Any, Any], bool]) -> None:
    """Put the replacements in; `decide(vllm_config, runner)` says whether a new runner engages."""
    global _decide
    _decide = decide
    for name, method in _REPLACEMENTS.items():
        setattr(UBatchRunner, name, method)


def restore() -> None:
    """Put vLLM's own methods back; runners that were engaged go on with threads."""
    global _decide
    _decide = None
    for name, method in _original.items():
        setattr(UBatchRunner, name, method)
