"""`dbo-greenlet doctor`: would vLLM's microbatches run as greenlets here, and if not, why?"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from ..vllm.diagnosis import Diagnosis

__all__ = ["CONTEXT_SETTINGS", "doctor"]

# vLLM's flags are taken also where the "--" before them was forgotten.
CONTEXT_SETTINGS = {"ignore_unknown_options": True}
_PLATFORMS = ("cuda", "rocm")


def doctor(
    flags: Annotated[
        list[str] | None,
        typer.Argument(metavar="-- VLLM FLAGS", help="Flags of vllm serve to judge; no model is needed."),
    ] = None,
    platform: Annotated[
        str | None, typer.Option(help="Judge for cuda or rocm, where this machine is not the one that serves.")
    ] = None,
    no_selftest: Annotated[bool, typer.Option("--no-selftest", help="Skip the self-test (some ten seconds).")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print what was found as JSON.")] = False,
) -> int:
    """Say whether the vLLM plugin would engage for these flags, which runner, what it replaces, or why it would not.

    Exit code 0 where it would engage, 1 where not.

    Example: dbo-greenlet doctor -- --enable-dbo --data-parallel-size 2 --enable-expert-parallel
    --all2all-backend deepep_low_latency
    """
    from ..errors import ConfigurationError
    from ..vllm.diagnosis import diagnose

    if platform is not None and platform not in _PLATFORMS:
        raise ConfigurationError(f"--platform is {platform!r}; use one of {', '.join(_PLATFORMS)}")
    found = diagnose(flags or (), platform=platform, selftest=not no_selftest)
    print(json.dumps(_as_json(found), indent=2) if as_json else _as_text(found))
    return 0 if found.verdict.engages else 1


def _as_json(found: Diagnosis) -> dict[str, Any]:
    import dataclasses

    from ..vllm.patching import REPLACED

    return {
        **dataclasses.asdict(found.verdict),
        "facts": dataclasses.asdict(found.facts),
        "settings": dataclasses.asdict(found.settings),
        "deep_ep": found.deep_ep,
        "environment": found.environment,
        "flags": list(found.flags),
        "replaces": list(REPLACED),
    }


def _as_text(found: Diagnosis) -> str:
    from ..vllm.compat import EXPECTED
    from ..vllm.patching import REPLACED

    facts, verdict = found.facts, found.verdict
    absent = "not installed"
    rows = [
        ("dbo_greenlet", facts.package),
        ("vllm", absent if facts.vllm is None else facts.vllm + (", not checked yet" if facts.not_checked_yet else "")),
        ("torch", facts.torch or absent),
        ("greenlet", facts.greenlet or absent),
        ("python", facts.python),
        ("deep_ep", found.deep_ep or absent),
        ("environment", " ".join(f"{name}={value}" for name, value in found.environment.items()) or "nothing set"),
        ("trace", found.settings.problem or found.settings.trace_dir or "none asked for"),
        ("self-test", {True: "passed", None: "not run"}.get(facts.selftest, f"failed: {facts.selftest}")),
    ]
    if facts.vllm is not None:
        problems = facts.compat_problems
        names = [f"all {len(EXPECTED)} that are relied on are there"] if not problems else list(problems)
        rows += [
            ("platform", facts.platform),
            ("plugin", facts.plugin_problem or "installed, and vLLM loads it"),
            ("flags", " ".join(found.flags) or "none given"),
            ("runner", verdict.runner or "not known"),
            *_block("vLLM's names", names),
            *_block("replaces", list(REPLACED)),
        ]
    width = max(len(name) for name, _ in rows)
    lines = [f"{name:<{width}}  {value}".rstrip() for name, value in rows]
    return "\n".join([*lines, "", _conclusion(verdict.engages, verdict.refuse, verdict.reason)])


def _block(name: str, values: list[str]) -> list[tuple[str, str]]:
    return [(name if number == 0 else "", value) for number, value in enumerate(values)]


def _conclusion(engages: bool, refuse: bool, reason: str) -> str:
    start = "It would engage" if engages else "It would refuse to start" if refuse else "It would not engage"
    return f"{start}: {reason}."
