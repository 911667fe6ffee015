"""Ambient state that is not torch's own: registered as a pair of functions, kept apart per microbatch.

Code under a model reads things that nobody passes to it: the forward context of a serving engine, a "current layer", a
module-level flag. On one thread with several microbatches each needs its own value, so the owner registers how to read
it and how to put a value back, and every step started from then on treats it as part of the thread's state.

    handle = register_ambient_state("forward context", get_forward_context, set_forward_context)

A value that lives in a `contextvars.ContextVar` needs none of this: each microbatch runs in a context of its own.

This is for microbatches that share a thread. With `carrier="thread"` nothing is saved and restored: what is per thread
is apart anyway, and a process-wide value is shared.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from .errors import ConfigurationError

__all__ = ["AmbientHandle", "ambient_pairs", "register_ambient_state"]

Pair = tuple[Callable[[], Any], Callable[[Any], Any]]

_lock = threading.Lock()
_registered: dict[str, Pair] = {}
# What steps read: replaced as a whole, so that a step keeps the pairs it started with.
_pairs: tuple[Pair, ...] = ()


class AmbientHandle:
    """What `register_ambient_state` returns; `remove()` takes the registration back (twice is harmless)."""

    __slots__ = ("_pair", "name")

    def __init__(self, name: str, pair: Pair) -> None:
        self.name = name
        self._pair = pair

    def remove(self) -> None:
        """Steps started from now on no longer keep this state apart; a running step goes on as it began."""
        with _lock:
            if _registered.get(self.name) is self._pair:
                del _registered[self.name]
                _publish()

    def __repr__(self) -> str:
        return f"AmbientHandle({self.name!r})"


def register_ambient_state(name: str, save: Callable[[], Any], restore: Callable[[Any], Any]) -> AmbientHandle:
    """Keep a piece of ambient state apart for each microbatch.

    Args:
        name: what it is, for messages; one registration per name.
        save: returns the current value. Called at step begin and after every slice: it should cost next to nothing.
        restore: makes a value that `save` returned the current one.

    Two values are taken as the same state if they are the same object or compare equal; `restore` is not called then.
    It is called between slices, with the state of the step's caller on but for the current stream, which is the one of
    the slice before or after, and must not yield. What either of them raises comes out of the step.

    Raises:
        ConfigurationError: `name` is registered already, or one of the two is not callable.
    """
    if not callable(save) or not callable(restore):
        raise ConfigurationError(f"ambient state {name!r}: save and restore must be callables")
    pair = (save, restore)
    with _lock:
        if name in _registered:
            raise ConfigurationError(f"ambient state {name!r} is registered already; remove() its handle first")
        _registered[name] = pair
        _publish()
    return AmbientHandle(name, pair)


def ambient_pairs() -> tuple[Pair, ...]:
    """The registered (save, restore) pairs, in order of registration."""
    return _pairs


def _publish() -> None:
    global _pairs
    _pairs = tuple(_registered.values())
