"""The entry point that vLLM calls in each of its processes (group `vllm.general_plugins`).

It runs in the front end, in the subprocess that inspects models, in the engine core and in the workers, before any of
them has imported what is replaced here. It therefore only puts methods in place; whether they do anything is decided
where a runner is constructed (`engagement`). It raises nothing unless DBO_GREENLET=require asks for it.
"""

from __future__ import annotations

import functools
import os
from functools import partial
from typing import Any

from .. import record_notes
from ..errors import ConfigurationError, NotEngagedError
from .engagement import decide, logger, look_at_flags
from .settings import Settings

__all__ = ["register"]

# Set for child processes, so that one server says it once.
_SAID = "_DBO_GREENLET_SAID"


def register() -> None:
    """Make this process's vLLM run microbatches as greenlets wherever it can.

    Raises:
        NotEngagedError: DBO_GREENLET=require, and the installed vLLM cannot be taken over.
    """
    record_notes.leave("vllm")
    try:
        settings = Settings.from_environment()
    except ConfigurationError as error:
        _say_once(f"dbo_greenlet is off: {error}")
        return
    if settings.mode == "off":
        logger.debug("dbo_greenlet is switched off by DBO_GREENLET")
        record_notes.leave("left", "it is switched off (DBO_GREENLET)")
        return
    if settings.problem is not None:
        _say_once(settings.problem)
    try:
        from .patching import install_when_imported
        from .prometheus import announce

        install_when_imported(decide, partial(_cannot, settings))
        _watch_flags()
        announce()
    except NotEngagedError:
        raise
    except Exception as error:
        _cannot(settings, f"{type(error).__name__}: {error}")
        return
    logger.debug("dbo_greenlet is ready in process %d", os.getpid())


def _cannot(settings: Settings, why: str) -> None:
    if settings.mode == "require":
        raise NotEngagedError(f"DBO_GREENLET=require is set, but vLLM cannot be taken over: {why}")
    _say_once(f"Microbatches are left to vLLM's own implementation, not run as greenlets: {why}")


def _say_once(sentence: str) -> None:
    record_notes.leave("left", sentence)
    if os.environ.get(_SAID) != sentence:
        os.environ[_SAID] = sentence
        logger.warning(sentence)


def _watch_flags() -> None:
    """Look at the flags once vLLM has made its configuration of them."""
    from vllm.engine.arg_utils import EngineArgs

    original = EngineArgs.create_engine_config
    if hasattr(original, "_dbo_greenlet"):
        return

    @functools.wraps(original)
    def create_engine_config(self: EngineArgs, *args: Any, **kwargs: Any) -> Any:
        config = original(self, *args, **kwargs)
        look_at_flags(config, bool(getattr(self, "enable_dbo", False)), int(getattr(self, "ubatch_size", 0) or 0))
        return config

    create_engine_config._dbo_greenlet = True  # type: ignore[attr-defined]
    EngineArgs.create_engine_config = create_engine_config  # type: ignore[method-assign]
