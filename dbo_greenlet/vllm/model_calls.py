"""When vLLM's newer runner runs a model: counts replays of microbatches, and times what the trace wants timed.

The older runner calls everything through `UBatchWrapper`, where `ubatch_wrapper` looks. The newer one calls its model
itself, eagerly or in pieces of a graph inside a forward context, and whole graphs by a manager of graphs; these two are
what is watched here. `decisions` puts the functions round them and takes them off.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

__all__ = ["around_forward_context", "around_replay"]


def around_replay(original: Callable[..., Any], on: Callable[[], bool]) -> Callable[..., Any]:
    """Of the method that replays a whole graph; `on` says whether it is still watched."""

    @functools.wraps(original)
    def run_fullgraph(self: Any, desc: Any, *args: Any, **kwargs: Any) -> Any:
        output = original(self, desc, *args, **kwargs)
        if on():
            # Not imported above: it brings vLLM, which the votes alone can be read without.
            from .step import count_replay, recorded_to

            if getattr(desc, "num_ubatches", 1) > 1:
                count_replay()
            elif (trace := recorded_to()) is not None and trace.awaits_model:
                trace.model_graph(captured=False)
        return output

    return run_fullgraph


def around_forward_context(original: Callable[..., Any], on: Callable[[], bool]) -> Callable[..., Any]:
    """Of `set_forward_context`: in a step that is to be timed, the context is timed, too."""

    @functools.wraps(original)
    def set_forward_context(*args: Any, **kwargs: Any) -> Any:
        context = original(*args, **kwargs)
        if on():
            from .step import recorded_to

            if (trace := recorded_to()) is not None and trace.awaits_model:
                return _inside(context, trace.model_call())
        return context

    return set_forward_context


@contextmanager
def _inside(outer: Any, inner: Any) -> Iterator[Any]:
    with outer as value, inner:
        yield value
