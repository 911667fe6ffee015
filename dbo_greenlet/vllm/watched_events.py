"""The events of vLLM's contexts, told to a recorder while a step is recorded.

vLLM's `UBatchContext` records and waits in four methods of its own. For a step that is recorded, and for no other, each
of its contexts gets the same methods with a note behind them as attributes of its own; a step that is not recorded pays
one test.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

__all__ = ["watched_events"]

# method -> whether it records (and does not wait), the event, the stream
_METHODS = {
    "_signal_comm_done": (True, "gpu_comm_done_event", "comm_stream"),
    "_signal_compute_done": (True, "gpu_compute_done_event", "compute_stream"),
    "_wait_comm_done": (False, "gpu_comm_done_event", "compute_stream"),
    "_wait_compute_done": (False, "gpu_compute_done_event", "comm_stream"),
}


@contextmanager
def watched_events(contexts: Sequence[Any], recorder: Any) -> Iterator[None]:
    """Inside, what the contexts record and wait for is noted by `recorder` (a `StepRecorder`).

    A method that this vLLM does not have is not watched.
    """
    for context in contexts:
        for name, (recorded, event, stream) in _METHODS.items():
            if hasattr(context, name):
                context.__dict__[name] = _noting(context, getattr(context, name), recorder, recorded, event, stream)
    try:
        yield
    finally:
        for context in contexts:
            for name in _METHODS:
                context.__dict__.pop(name, None)


def _noting(
    context: Any, method: Callable[[], None], recorder: Any, recorded: bool, event: str, stream: str
) -> Callable[[], None]:
    def call() -> None:
        method()
        recorder.note_event(getattr(context, event), getattr(context, stream), recorded)

    return call
