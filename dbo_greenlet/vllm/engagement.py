"""Whether, and how, a runner of vLLM's runs its microbatches as greenlets.

The question is asked once for each runner, where vLLM constructs it: in a worker, with microbatching switched on, after
the model is loaded. Until then nothing has been tried and nothing has been paid for; the front end, the registry's
subprocess and servers without DBO never get here.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any

from .. import record_notes
from ..errors import ConfigurationError, NotEngagedError
from .settings import Settings

__all__ = ["NO_MEMORY", "decide", "logger", "look_at_flags"]

NO_MEMORY = (
    "what operations do to memory is not recorded of vLLM's steps: many of its kernels (Triton's, compiled graphs) are "
    "no operators of torch, so nobody sees what they read and write"
)

# Under vLLM's own logger, so that its handlers, format and level apply.
logger = logging.getLogger("vllm.plugins.dbo_greenlet")


def decide(vllm_config: Any, runner: Any) -> bool:
    """Whether `runner`, an instance of vLLM's V1 or V2 runner, engages. Logs one line either way.

    Raises:
        ConfigurationError: vLLM has accepted flags on which it would break; the message says which and what to do.
        NotEngagedError: DBO_GREENLET=require, and it does not engage.
    """
    settings = Settings.from_environment()
    try:
        reason = _engage(vllm_config, runner, settings)
    except ConfigurationError:
        raise
    except Exception as error:
        # Whatever goes wrong in here, the server would have started without us, and does.
        logger.debug("dbo_greenlet could not engage", exc_info=True)
        reason = f"unexpected {type(error).__name__}: {error}"
    if reason is None:
        return True
    _leave(reason, settings)
    return False


def look_at_flags(vllm_config: Any, enable_dbo: bool, ubatch_size: int) -> None:
    """In the front end: one line where flags ask for microbatches and greenlets will not carry them.

    Args:
        vllm_config: what vLLM made of the flags.
        enable_dbo, ubatch_size: the flags as the user gave them; a platform may have switched them off since.

    Raises:
        ConfigurationError, NotEngagedError: as `decide`.
    """
    if not (enable_dbo or ubatch_size > 1):
        return
    from .checks import Facts, examine

    settings = Settings.from_environment()
    try:
        count = 2 if enable_dbo else ubatch_size
        facts = Facts.of_config(vllm_config)
        facts = replace(facts, enable_dbo=enable_dbo, ubatch_size=ubatch_size, num_ubatches=count)
        verdict = examine(facts, settings)
    except Exception:
        # Whatever cannot be told here: the question comes again where a runner is constructed.
        logger.debug("dbo_greenlet could not look at the flags", exc_info=True)
        return
    if verdict.refuse:
        raise ConfigurationError(verdict.reason)
    if not verdict.engages:
        _leave(verdict.reason, settings)


def _leave(reason: str, settings: Settings) -> None:
    if settings.mode == "require":
        raise NotEngagedError(f"DBO_GREENLET=require is set, but microbatches cannot run as greenlets: {reason}")
    logger.warning("Microbatches are left to vLLM's own implementation, not run as greenlets: %s", reason)
    record_notes.leave("left", reason)


def _engage(vllm_config: Any, runner: Any, settings: Settings) -> str | None:
    """Make everything ready for `runner`; returns why not, or None."""
    from .checks import Facts, examine
    from .compat import problems_installed

    facts = Facts.of_config(vllm_config, runner=runner)
    version = "V2" if facts.v2_runner else "V1"
    facts = replace(facts, compat_problems=tuple(problems_installed(version)))
    verdict = examine(facts, settings)
    if verdict.refuse:
        raise ConfigurationError(verdict.reason)
    if not verdict.engages:
        return verdict.reason
    from .selftest_cache import selftest_problem

    verdict = examine(replace(facts, selftest=selftest_problem() or True), settings)
    if not verdict.engages:
        return verdict.reason
    from .patching import make_operators_direct

    try:
        make_operators_direct()
    except ConfigurationError as error:
        return f"vLLM's MoE operators cannot be called directly: {error}"
    rank, world = vllm_config.parallel_config.data_parallel_rank, vllm_config.parallel_config.data_parallel_size
    trace = _observe(vllm_config, settings, rank, world, version, facts.vllm)
    logger.info(
        "%s: dbo_greenlet %s, vLLM %s, policy round-robin, rank %d of %d%s",
        verdict.reason[:1].upper() + verdict.reason[1:],
        facts.package,
        facts.vllm,
        rank,
        world,
        f", one step in {settings.trace_every} is recorded to {trace}" if trace else "",
    )
    return None


def _observe(
    vllm_config: Any, settings: Settings, rank: int, world: int, version: str, vllm_version: str | None
) -> str | None:
    """Start counting and, if asked for, recording; returns the trace's path."""
    from . import decisions
    from .counters import counters
    from .prometheus import publish

    decisions.install()
    publish(counters)
    if settings.trace_dir is None:
        return None
    from .recording import ServerTrace
    from .step import record_to, recorded_to

    if (running := recorded_to()) is not None:
        return running.path  # a second runner in this process
    if settings.trace_memory:
        logger.warning("%s", NO_MEMORY)
        record_notes.leave("partial", NO_MEMORY)
    parallel = vllm_config.parallel_config
    trace = ServerTrace(
        settings.trace_dir,
        every=settings.trace_every,
        megabytes=settings.trace_megabytes,
        rank=rank,
        world=world,
        settings={
            "engine": "vllm",
            "vllm": vllm_version,
            "runner": version,
            "policy": "round-robin",
            "carrier": "greenlet",
            "microbatches": parallel.num_ubatches,
            "decode_threshold": parallel.dbo_decode_token_threshold,
            "prefill_threshold": parallel.dbo_prefill_token_threshold,
            "all2all_backend": parallel.all2all_backend,
            "model": str(getattr(vllm_config.model_config, "model", "")),
            "processor": _processor(),
        },
    )
    record_to(trace)
    decisions.listeners.append(lambda decision: None if decision.split else trace.unsplit_step(decision))
    return None if trace.problem is not None else trace.path


def _processor() -> str:
    """What the model runs on, for people and for estimates; "" where vLLM does not know."""
    from vllm.platforms import current_platform

    try:
        return str(current_platform.get_device_name())
    except Exception:
        # Whatever its driver's library raises: a name is no reason to leave the microbatches alone.
        return ""
