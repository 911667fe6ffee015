"""Putting the drop-in's methods in the place of vLLM's, and taking them out again.

Classes keep their identity and their names: `isinstance`, subclasses, `__getattr__`, `unwrap` and every `from ...
import` that somebody made go on working. (Replacing whole modules or classes was rejected: it depends on who imported
what first, and hides what later versions of vLLM add to them.)
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from functools import partial, wraps
from typing import Any

from ..errors import ConfigurationError, IncompatibleHostError
from ..step import running
from .after_import import after_import, forget

__all__ = [
    "REPLACED",
    "install",
    "install_when_imported",
    "is_installed",
    "make_operators_direct",
    "uninstall",
]

# What is replaced, for whoever wants to know.
REPLACED: tuple[str, ...] = (
    "vllm.v1.worker.ubatching.UBatchContext._cpu_yield",
    "vllm.v1.worker.ubatching.UBatchContext.recv_hook",
    "vllm.v1.worker.ubatching.dbo_* (their code)",
    "vllm.v1.worker.gpu_ubatch_wrapper.UBatchWrapper._run_ubatches",
    "vllm.v1.worker.gpu_ubatch_wrapper.UBatchWrapper._capture_ubatches",
    "vllm.v1.worker.gpu.ubatch_utils.UBatchRunner.begin_capturable_run",
    "vllm.v1.worker.gpu.ubatch_utils.UBatchRunner.abort_pending_run",
    "torch.ops.vllm.moe_forward (called directly while a microbatch runs)",
    "torch.ops.vllm.moe_forward_shared (the same)",
    "torch.ops.vllm.transformers_moe_forward (the same)",
)

# vLLM registers its MoE operators when these modules are imported.
_OPERATORS = ("vllm::moe_forward", "vllm::moe_forward_shared", "vllm::transformers_moe_forward")

# vLLM's module -> what of ours replaces methods in it.
_ROOMS = {
    "vllm.v1.worker.gpu_ubatch_wrapper": "ubatch_wrapper",
    "vllm.v1.worker.gpu.ubatch_utils": "ubatch_runner",
}

Decide = Callable[[Any, Any], bool]

# Our modules that have replaced something, in that order.
_installed: list[Any] = []
# Runners that could not be taken over, and their constructors.
_given_up: list[tuple[Any, Any]] = []


def is_installed() -> bool:
    """Whether anything of vLLM is replaced in this process."""
    return bool(_installed)


def install(decide: Callable[[Any], bool] | None = None) -> None:
    """Import vLLM's runners and replace their methods, now. Twice is harmless; the first `decide` stays.

    Args:
        decide: takes the vLLM configuration of a runner that is being constructed and says whether its microbatches
            run as greenlets. None decides as `engagement.decide` does: by versions, flags and the self-test.

    Raises:
        IncompatibleHostError: vLLM lacks something that is relied on. Nothing is replaced then.
    """
    from .compat import problems_installed

    if problems := problems_installed():
        raise IncompatibleHostError("the installed vLLM is not as expected: " + "; ".join(problems))
    if decide is None:
        from .engagement import decide as chosen
    else:

        def chosen(config: Any, runner: Any) -> bool:
            if not decide(config):
                return False
            make_operators_direct()
            return True

    for module in _ROOMS:
        if _has_runner(module):
            _replace_in(module, chosen)


def install_when_imported(decide: Decide, tell: Callable[[str], None]) -> None:
    """Replace the methods of each runner once vLLM imports it; in a process that never does, nothing happens.

    What vLLM lacks is found out later, by `decide`. Where even the methods of a runner are missing or cannot be
    replaced, that runner is left as it is, and `tell` hears why when one is constructed: a process may import a runner
    that it never uses. `tell` may raise.
    """

    def act(module: str) -> None:
        try:
            if _has_runner(module):
                _replace_in(module, decide)
        except Exception as error:
            _give_up(module, error, tell)

    for module in _ROOMS:
        after_import(module, partial(act, module))


def uninstall() -> None:
    """Put everything back as vLLM made it.

    Raises:
        ConfigurationError: a step is running, whose next yield would find nobody to hand over to.
    """
    if running:
        raise ConfigurationError("a step is running; take the drop-in out between two steps")
    for module in _ROOMS:
        forget(module)
    while _given_up:
        kind, original = _given_up.pop()
        kind.__init__ = original
    while _installed:
        _installed.pop().restore()


def _give_up(module: str, error: Exception, tell: Callable[[str], None]) -> None:
    rooms = [room for room in _installed if room.__name__.endswith("." + _ROOMS[module])]
    for room in rooms:
        _installed.remove(room)
        room.restore()
    if all(room.__name__.endswith(".ubatching") for room in _installed):
        while _installed:
            _installed.pop().restore()
    found = importlib.import_module(module)
    kind = getattr(found, "UBatchWrapper", None) or getattr(found, "UBatchRunner", None)
    if kind is None:
        return
    original, why = kind.__init__, f"{type(error).__name__}: {error}"

    @wraps(original)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        tell(why)

    kind.__init__ = __init__
    _given_up.append((kind, original))


def _has_runner(module: str) -> bool:
    """Whether the installed vLLM has microbatches there: V2's module is older than its runner (0.30)."""
    try:
        found = importlib.import_module(module)
    except ImportError:
        return False
    return hasattr(found, "UBatchWrapper") or hasattr(found, "UBatchRunner")


def _replace_in(module: str, decide: Decide) -> None:
    from . import ubatching

    room = importlib.import_module(f".{_ROOMS[module]}", __package__)
    if room in _installed:
        return
    if ubatching not in _installed:
        _installed.append(ubatching)  # first: half-done work is undone
        ubatching.replace()
    _installed.append(room)
    room.replace(decide)


def make_operators_direct() -> list[str]:
    """Let vLLM's MoE operators be called without a C++ frame while a microbatch runs; returns those that were found.

    The operators exist once the model is loaded, which is before a runner is constructed.

    Raises:
        ConfigurationError: the MoE layer's own operators were found and cannot be called directly.
    """
    from ..direct_ops import KNOWN_IMPLEMENTATIONS, register_direct_op

    found = []
    for name in _OPERATORS:
        module = KNOWN_IMPLEMENTATIONS[name].partition(":")[0]
        try:
            importlib.import_module(module)
            register_direct_op(name)
        except (ImportError, ConfigurationError):
            # The transformers backend is optional, and its operator with it. Without the other two nothing works.
            if name == "vllm::transformers_moe_forward":
                continue
            raise
        found.append(name)
    return found
