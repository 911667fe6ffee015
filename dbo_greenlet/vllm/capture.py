"""Capturing a split step as a CUDA graph, on the thread that runs it.

vLLM's threads have to be started, given their cuBLAS handles and parked before a capture begins, because making a
handle inside one is an error. Here the capture, the hub and the microbatches are one thread, and a handle for each of
the two streams is all there is to prepare.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

__all__ = ["captures_tolerate_other_threads", "graph_capture", "make_blas_handles"]

# Work that another thread enqueues on its own streams (an asynchronous copy, a KV connector) is no part of the capture
# and does not harm it; in torch's default mode, "global", it invalidates it.
CAPTURE_MODE = "thread_local"

_tolerant: list[None] = []
_changed: list[tuple[Any, Any]] = []


def make_blas_handles(*streams: Any) -> None:
    """Make this thread's cuBLAS handle and its workspace on each stream, which cannot be done inside a capture."""
    for stream in streams:
        with torch.cuda.stream(stream):
            torch.cuda.current_blas_handle()


@contextmanager
def graph_capture(graph: Any, *, stream: Any, pool: Any) -> Iterator[None]:
    """Capture what is enqueued on `stream`, and on streams forked from it, into `graph`.

    What the block raises comes out as it is. The end of a broken capture usually raises as well, and would hide it.
    """
    failure: BaseException | None = None
    try:
        with torch.cuda.graph(graph, stream=stream, pool=pool, capture_error_mode=CAPTURE_MODE):
            try:
                yield
            except BaseException as error:
                failure = error
                raise
    except BaseException as error:
        if failure is None or error is failure:
            raise
        raise failure from failure.__cause__
    finally:
        failure = None


@contextmanager
def captures_tolerate_other_threads() -> Iterator[None]:
    """Inside, `torch.cuda.graph` without a `capture_error_mode` captures in thread-local mode.

    For captures that vLLM begins and ends itself. Its default is changed and not the class, which others may have
    imported by name; a caller that states a mode keeps it.
    """
    # Counted, because two such captures may be prepared at once and end in any order.
    if not _tolerant:
        init = torch.cuda.graph.__init__
        defaults = init.__defaults__
        init.__defaults__ = tuple(CAPTURE_MODE if value == "global" else value for value in defaults or ()) or None
        _changed.append((init, defaults))
    _tolerant.append(None)
    try:
        yield
    finally:
        _tolerant.pop()
        if not _tolerant:
            init, defaults = _changed.pop()
            init.__defaults__ = defaults
