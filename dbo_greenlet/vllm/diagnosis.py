"""What `dbo-greenlet doctor` finds out: everything that decides whether the drop-in engages for given vLLM flags.

The flags are read by vLLM's own parser of `vllm serve`, so names, abbreviations, defaults and configuration files are
those of the installed version. No model is loaded, so what vLLM derives from one is not known here: it serves a dense
model's data-parallel ranks as independent engines, and microbatches nothing then.
"""

from __future__ import annotations

import contextlib
import io
import logging
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from importlib import import_module, metadata
from types import SimpleNamespace
from typing import Any

from ..errors import ConfigurationError
from .checks import Facts, Verdict, examine
from .compat import CHECKED_VERSIONS, installed_version, problems_installed, release_of
from .settings import Settings

__all__ = ["ENTRY_POINT", "ENTRY_POINT_GROUP", "Diagnosis", "diagnose", "plugin_problem"]

ENTRY_POINT_GROUP = "vllm.general_plugins"
ENTRY_POINT = "dbo_greenlet"

_VARIABLES = ("DBO_GREENLET", "VLLM_PLUGINS", "VLLM_USE_V2_MODEL_RUNNER", "VLLM_DBO_COMM_SMS", "VLLM_ALL2ALL_BACKEND")
_DEEP_EP_NAMES = ("deep_ep", "tokenspeed-deepep")
# Of vLLM's flags, those that decide whether steps are split.
_FLAGS = (
    "enable_dbo",
    "ubatch_size",
    "dbo_decode_token_threshold",
    "dbo_prefill_token_threshold",
    "data_parallel_size",
    "enable_expert_parallel",
    "all2all_backend",
)


def _more_than_one(name: str) -> Callable[[Any], bool]:
    return lambda arguments: (getattr(arguments, name, None) or 1) > 1


# What the V2 runner does not take together with DBO, as far as flags tell it (some of it depends on the model).
_REFUSED_BY_V2: dict[str, Callable[[Any], bool]] = {
    "--enable-lora": lambda arguments: bool(getattr(arguments, "enable_lora", False)),
    "--speculative-config": lambda arguments: bool(getattr(arguments, "speculative_config", None)),
    "--pipeline-parallel-size": _more_than_one("pipeline_parallel_size"),
    "--decode-context-parallel-size": _more_than_one("decode_context_parallel_size"),
    "--prefill-context-parallel-size": _more_than_one("prefill_context_parallel_size"),
}


@dataclass(frozen=True)
class Diagnosis:
    """What was found.

    Attributes:
        facts, verdict: what decides, and what is decided.
        settings: what the environment says about the drop-in.
        deep_ep: the version of DeepEP, None where it is not installed.
        environment: the variables that matter and are set.
        flags: vLLM's flags as they were given.
    """

    facts: Facts
    verdict: Verdict
    settings: Settings
    deep_ep: str | None
    environment: dict[str, str]
    flags: tuple[str, ...]


def diagnose(flags: Sequence[str] = (), *, platform: str | None = None, selftest: bool = True) -> Diagnosis:
    """Find out whether microbatches would run as greenlets with these flags of `vllm serve`.

    Args:
        flags: as on vLLM's command line; a leading "vllm serve" may stay.
        platform: judge for this platform ("cuda", "rocm") instead of the machine's own.
        selftest: run the self-test (in a subprocess, some ten seconds, remembered when it passed).

    Raises:
        ConfigurationError: vLLM does not take the flags, or a variable of ours means nothing.
    """
    settings = Settings.from_environment()
    words = _without_command(flags)
    facts = Facts.of_machine()
    if facts.vllm is not None:
        facts = _with_vllm(facts, words)
        facts = replace(facts, plugin_problem=facts.plugin_problem or plugin_problem())
        if platform is not None:
            facts = replace(facts, platform=platform)
    if selftest:  # last, because it takes longest, and a mistyped flag should be told before
        facts = replace(facts, selftest=_selftest())
    environment = {name: value for name, value in sorted(os.environ.items()) if name.startswith(_VARIABLES)}
    return Diagnosis(facts, examine(facts, settings), settings, _deep_ep(), environment, tuple(words))


def plugin_problem() -> str | None:
    """Why vLLM would not load the plugin of the installed package; None if it would."""
    names = {each.name for each in metadata.entry_points(group=ENTRY_POINT_GROUP)}
    if ENTRY_POINT not in names:
        return f"the entry point {ENTRY_POINT} of {ENTRY_POINT_GROUP} is not installed; install dbo-greenlet with pip"
    allowed = os.environ.get("VLLM_PLUGINS")
    if allowed is not None and ENTRY_POINT not in allowed.split(","):
        return f"VLLM_PLUGINS={allowed!r} does not list {ENTRY_POINT}; add it, or unset the variable"
    return None


def _without_command(flags: Sequence[str]) -> list[str]:
    words = list(flags)
    for word in ("vllm", "serve"):
        if words[:1] == [word]:
            del words[0]
    return words


def _selftest() -> bool | str | None:
    if _version("torch") is None:
        return None
    from .selftest_cache import selftest_problem

    return selftest_problem() or True


def _deep_ep() -> str | None:
    return next(filter(None, map(_version, _DEEP_EP_NAMES)), None)


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


# -- with vLLM ---------------------------------------------------------------------------------------------------------


def _with_vllm(facts: Facts, words: list[str]) -> Facts:
    with _quiet():
        try:
            import_module("vllm")
        except Exception as error:
            # Of any kind: this runs the code of many packages, and which of them is broken is what the user asks.
            return replace(facts, plugin_problem=f"vLLM cannot be imported: {type(error).__name__}: {error}")
        problems = problems_installed()  # before flags are read, because that lets plugins change vLLM
        arguments = _parse(words)
        parallel = _parallel_config(arguments)
        facts = Facts.of_config(
            SimpleNamespace(parallel_config=parallel),
            v2_runner=_v2_runner(),
            compat_problems=problems,
        )
        refused = tuple(flag for flag, given in _REFUSED_BY_V2.items() if given(arguments))
        return replace(facts, v2_refuses=refused, asked_backend=getattr(arguments, "all2all_backend", None))


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """vLLM logs nothing but errors, prints nothing to standard output, and does not load the drop-in's own plugin."""
    before = os.environ.get("DBO_GREENLET")
    os.environ["DBO_GREENLET"] = "0"
    level = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with contextlib.redirect_stdout(sys.stderr):
            yield
    finally:
        logging.disable(level)
        os.environ.pop("DBO_GREENLET")
        if before is not None:
            os.environ["DBO_GREENLET"] = before


def _parallel_config(arguments: Any) -> Any:
    """vLLM's `ParallelConfig` with these flags; its own checks of them are part of making one."""
    from vllm.config import ParallelConfig

    known = {each.name for each in fields(ParallelConfig)}
    given = {name: getattr(arguments, name, None) for name in _FLAGS if name in known}
    try:
        return ParallelConfig(**{name: value for name, value in given.items() if value is not None})
    except (ValueError, AssertionError) as error:
        # Pydantic's message has the sentence in its middle; its list of errors has it alone.
        details = getattr(error, "errors", list)()
        sentence = details[0].get("msg", "") if details else str(error)
        raise ConfigurationError(f"vLLM refuses these flags: {sentence.removeprefix('Value error, ')}") from error


def _parse(words: list[str]) -> Any:
    try:
        from vllm.entrypoints.cli.serve import ServeSubcommand
        from vllm.utils.argparse_utils import FlexibleArgumentParser
    except ImportError as error:
        raise ConfigurationError(
            f"vLLM {installed_version()} cannot read flags here: {type(error).__name__}: {error}"
        ) from error

    parser = FlexibleArgumentParser(prog="vllm")
    ServeSubcommand().subparser_init(parser.add_subparsers(dest="subparser"))
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said), contextlib.redirect_stdout(said):
            try:
                return parser.parse_args(["serve", *words])
            except ValueError as error:
                # Where flags come from a file, vLLM asks for a model before it reads them. None is needed here.
                if not str(error).startswith("No model specified"):
                    raise
                return parser.parse_args(["serve", "model", *words])
    except SystemExit as left:
        if left.code in (0, None):
            raise ConfigurationError("give the flags of a server, and ask vllm serve itself for its help") from None
        sentence = said.getvalue().strip().rpartition("error: ")[2].partition("\n")[0]
        raise ConfigurationError(f"vLLM does not take these flags: {sentence}") from None
    except (ValueError, OSError) as error:  # a configuration file (--config) that cannot be read
        raise ConfigurationError(f"vLLM does not take these flags: {error}") from error


def _v2_runner() -> bool | None:
    """Which model runner vLLM takes for DBO; None where a version that nobody has looked at decides by itself."""
    from vllm import envs

    variable = "VLLM_USE_V2_MODEL_RUNNER"
    try:
        asked = getattr(envs, variable, None)  # vLLM reads the variable at this moment
    except ValueError as error:
        value = os.environ.get(variable)
        raise ConfigurationError(f"vLLM does not start with {variable}={value!r}; use 0 or 1") from error
    if asked is not None:
        return bool(asked)
    release, newest = release_of(installed_version()), release_of(CHECKED_VERSIONS[-1])
    return None if release is None or newest is None or release > newest else False
