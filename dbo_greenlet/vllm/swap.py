"""Methods of one of vLLM's runners, and what stands in their place."""

from __future__ import annotations

from collections.abc import Callable
from functools import update_wrapper
from typing import Any

__all__ = ["Swap", "is_engaged"]

# Set on a runner that engages. In its __dict__, so that `UBatchWrapper.__getattr__` never asks the model for it.
_ENGAGED = "_dbo_greenlet_engaged"


def is_engaged(runner: Any) -> bool:
    """Whether this runner's microbatches run as greenlets."""
    return _ENGAGED in runner.__dict__


class Swap:
    """Replaces methods in place. Each replacement asks `is_engaged` and otherwise calls the `original`.

    Args:
        kind: vLLM's class. Its constructor is replaced, too: there it is decided whether an object engages.
        methods: name and replacement of each method.

    Raises:
        KeyError: the class itself has no such method.
    """

    def __init__(self, kind: type, **methods: Callable[..., Any]) -> None:
        self._kind = kind
        self._decide: Callable[[Any, Any], bool] | None = None
        self._methods = {"__init__": self._constructor(), **methods}
        self.original: dict[str, Callable[..., Any]] = {name: kind.__dict__[name] for name in self._methods}
        for name, method in self._methods.items():
            update_wrapper(method, self.original[name])  # signature and text stay vLLM's

    def _constructor(self) -> Callable[..., None]:
        def __init__(runner: Any, *args: Any, **kwargs: Any) -> None:
            self.original["__init__"](runner, *args, **kwargs)
            if self._decide is not None and self._decide(runner.vllm_config, runner):
                runner.__dict__[_ENGAGED] = True

        return __init__

    def replace(self, decide: Callable[[Any, Any], bool]) -> None:
        """Put the replacements in; `decide(vllm_config, runner)` says whether a new runner engages."""
        self._decide = decide
        for name, method in self._methods.items():
            setattr(self._kind, name, method)

    def restore(self) -> None:
        """Put vLLM's own methods back; runners that were engaged go on with threads."""
        self._decide = None
        for name, method in self.original.items():
            setattr(self._kind, name, method)
