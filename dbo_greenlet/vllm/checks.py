"""Whether a runner's microbatches can run as greenlets here, and the reason in plain words when not.

The log line of a server, a refusal at its start and `dbo-greenlet doctor` all say what `examine` says. It goes through
a table of rules; the first one that applies decides. vLLM is never kept from what it can do by itself: where the
drop-in does not engage, vLLM's own implementation stays in place. Only what vLLM accepts and is known to break on is
refused.

Nothing here imports torch or vLLM, but for `Facts.of_config`, which is called where they are loaded.
"""

from __future__ import annotations

import platform as python_platform
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import metadata
from typing import TYPE_CHECKING, Any

from .._version import __version__
from .compat import CHECKED_VERSIONS, OLDEST_V1, OLDEST_V2, installed_version, release_of

if TYPE_CHECKING:
    from .settings import Settings

__all__ = ["BACKENDS", "OLDEST_GREENLET", "RULES", "Facts", "Rule", "Verdict", "examine"]

# The oldest version for which there are builds for every supported Python, and the one that the package asks for.
OLDEST_GREENLET = (3, 1)
_NEWEST_CHECKED = release_of(CHECKED_VERSIONS[-1]) or ()
_GPU_PLATFORMS = ("cuda", "rocm")

# All-to-all backends that vLLM accepts together with microbatches: since which version, and on which platforms.
BACKENDS: dict[str, tuple[tuple[int, ...], tuple[str, ...]]] = {
    "deepep_low_latency": ((0, 20), _GPU_PLATFORMS),
    "deepep_high_throughput": ((0, 20), _GPU_PLATFORMS),
    "nixl_ep": ((0, 24), _GPU_PLATFORMS),
    "allgather_reducescatter": ((0, 33), ("rocm",)),
}

# What the drop-in replaces in a runner; a subclass that has its own keeps it, and then there is nothing to engage.
_REPLACED_METHODS = {
    "UBatchWrapper": ("_run_ubatches", "_capture_ubatches"),
    "UBatchRunner": ("begin_capturable_run", "abort_pending_run"),
}


@dataclass(frozen=True)
class Facts:
    """What decides whether the drop-in engages. None where it is not known.

    Attributes:
        package, vllm, torch, greenlet, python: versions; `vllm` and `torch` are None where not installed.
        platform: vLLM's: "cuda", "rocm", "cpu", "xpu", "tpu", the name of another one, or "none" if it found no device.
        enable_dbo, ubatch_size, data_parallel_size, all2all_backend, enable_expert_parallel: vLLM's flags.
        asked_backend: the all-to-all backend that was typed, where vLLM has put `all2all_backend` in its place.
        num_ubatches: how many microbatches vLLM makes of them.
        has_experts: whether the model is a Mixture of Experts. vLLM serves the data-parallel ranks of another one as
            independent engines, each with a data-parallel size of 1.
        v2_runner: True for vLLM's V2 model runner, False for V1.
        compat_problems: what the installed vLLM lacks of what the drop-in relies on (`compat.problems_installed`).
        selftest: True if the self-test passed, None if it was not run, else why it failed.
        custom_runner: the name of the user's own subclass of vLLM's runner.
        custom_overrides: the methods that this subclass has in place of those the drop-in replaces.
        v2_refuses: flags that were given and that vLLM's V2 runner does not take together with DBO.
        plugin_problem: why vLLM would not load the plugin.
    """

    package: str = __version__
    vllm: str | None = None
    torch: str | None = None
    greenlet: str | None = None
    python: str = ""
    platform: str = "none"
    enable_dbo: bool = False
    ubatch_size: int = 0
    num_ubatches: int = 0
    data_parallel_size: int = 1
    all2all_backend: str | None = None
    asked_backend: str | None = None
    enable_expert_parallel: bool | None = None
    has_experts: bool | None = None
    v2_runner: bool | None = None
    compat_problems: tuple[str, ...] = ()
    selftest: bool | str | None = None
    custom_runner: str | None = None
    custom_overrides: tuple[str, ...] = ()
    v2_refuses: tuple[str, ...] = ()
    plugin_problem: str | None = None

    @classmethod
    def of_machine(cls, *, compat_problems: Sequence[str] = (), selftest: bool | str | None = None) -> Facts:
        """The versions; nothing about a configuration. Imports nothing."""
        return cls(
            vllm=installed_version(),
            torch=_version("torch"),
            greenlet=_version("greenlet"),
            python=python_platform.python_version(),
            compat_problems=tuple(compat_problems),
            selftest=selftest,
        )

    @classmethod
    def of_config(
        cls,
        vllm_config: Any,
        *,
        runner: Any = None,
        v2_runner: bool | None = None,
        compat_problems: Sequence[str] = (),
        selftest: bool | str | None = None,
    ) -> Facts:
        """The facts of a vLLM configuration, in a process that has vLLM loaded.

        Args:
            vllm_config: vLLM's `VllmConfig`, or anything with its `parallel_config`.
            runner: the `UBatchWrapper` or `UBatchRunner` that asks; it says itself which runner it is, and whether it
                is somebody's subclass.
            v2_runner: which runner, where there is no such object yet.
            compat_problems, selftest: as the attributes.
        """
        from vllm.platforms import current_platform

        machine = cls.of_machine(compat_problems=compat_problems, selftest=selftest)
        parallel = vllm_config.parallel_config
        custom: str | None = None
        overrides: tuple[str, ...] = ()
        if runner is not None:
            base, custom, overrides = _about_runner(type(runner))
            v2_runner = base == "UBatchRunner"
        return cls(
            **{
                **machine.__dict__,
                "platform": platform_name(current_platform),
                "enable_dbo": bool(getattr(parallel, "enable_dbo", False)),
                "ubatch_size": int(getattr(parallel, "ubatch_size", 0) or 0),
                "num_ubatches": int(getattr(parallel, "num_ubatches", 0) or 0),
                "data_parallel_size": int(getattr(parallel, "data_parallel_size", 1)),
                "all2all_backend": getattr(parallel, "all2all_backend", None),
                "enable_expert_parallel": getattr(parallel, "enable_expert_parallel", None),
                "has_experts": getattr(getattr(vllm_config, "model_config", None), "is_moe", None),
                "v2_runner": v2_runner,
                "custom_runner": custom,
                "custom_overrides": overrides,
            }
        )

    @property
    def release(self) -> tuple[int, ...] | None:
        """vLLM's version in numbers, None if it says nothing."""
        return release_of(self.vllm)

    @property
    def not_checked_yet(self) -> bool:
        """vLLM is newer than every version that was checked."""
        return self.release is None or self.release[: len(_NEWEST_CHECKED)] > _NEWEST_CHECKED

    @property
    def on_gpu(self) -> bool:
        return self.platform in _GPU_PLATFORMS


def platform_name(current_platform: Any) -> str:
    """vLLM's platform in one word. (ROCm's device type is "cuda", as torch has it.)"""
    if current_platform.is_rocm():
        return "rocm"
    return str(getattr(current_platform, "device_type", "") or "none")


def _about_runner(kind: type) -> tuple[str | None, str | None, tuple[str, ...]]:
    """Name of vLLM's class, name of the subclass (None if it is vLLM's own), and what it overrides."""
    for base in kind.__mro__:
        methods = _REPLACED_METHODS.get(base.__name__)
        if methods is not None and base.__module__.startswith("vllm."):
            if kind is base:
                return base.__name__, None, ()
            own = tuple(name for name in methods if getattr(kind, name, None) is not getattr(base, name, None))
            return base.__name__, f"{kind.__module__}.{kind.__qualname__}", own
    return None, f"{kind.__module__}.{kind.__qualname__}", ()


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


@dataclass(frozen=True)
class Verdict:
    """Whether microbatches run as greenlets.

    Attributes:
        engages: they do.
        runner: "V1", "V2", or None where it is not known.
        reason: plain words, the remedy included; also for an engaged runner, what to know about it.
        refuse: vLLM would accept this configuration and break on it, so starting it is refused with the reason.
        rule: which rule decided; "engages" if none did.
    """

    engages: bool
    runner: str | None
    reason: str
    refuse: bool = False
    rule: str = "engages"


@dataclass(frozen=True)
class Rule:
    """One reason not to engage: when it applies, what is said then, and whether vLLM is known to break on it."""

    name: str
    applies: Callable[[Facts], bool]
    say: Callable[[Facts], str]
    refuse: Callable[[Facts], bool] = lambda facts: False


def _known_to_break(facts: Facts) -> bool:
    # A version that nobody has looked at, older or newer, may well do it right.
    looked_at = not facts.not_checked_yet and facts.release is not None and facts.release >= OLDEST_V1
    return looked_at and facts.on_gpu and facts.data_parallel_size > 1 and facts.has_experts is not False


def _dotted(numbers: tuple[int, ...]) -> str:
    return ".".join(map(str, numbers))


def _backends(facts: Facts) -> list[str]:
    """What the installed vLLM accepts on this platform."""
    release = facts.release or _NEWEST_CHECKED
    return [name for name, (since, where) in BACKENDS.items() if release >= since and facts.platform in where]


def _listed(words: Sequence[str], last: str = "or") -> str:
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} {last} {words[-1]}"


def _say_backend(facts: Facts) -> str:
    name = facts.all2all_backend
    if facts.asked_backend is not None and facts.asked_backend != name:
        name = f"{facts.asked_backend}, which it takes for {name}"
    return f"vLLM {facts.vllm} refuses DBO with --all2all-backend {name}; use {_listed(_backends(facts))}"


def _say_problems(facts: Facts) -> str:
    problems = facts.compat_problems
    more = f", and {len(problems) - 3} more" if len(problems) > 3 else ""
    return (
        f"vLLM {facts.vllm} is not as dbo_greenlet {facts.package} expects it ({'; '.join(problems[:3])}{more}); "
        "a newer dbo_greenlet may know this version"
    )


def _say_platform(facts: Facts) -> str:
    if facts.platform == "cpu":
        return "vLLM's CPU platform switches DBO off; dbo_greenlet engages on CUDA and ROCm"
    if facts.platform == "none":
        return "vLLM finds no device on this machine; ask on the machine that serves"
    return f"vLLM has DBO on CUDA and ROCm only, and this is its platform {facts.platform!r}; nothing is replaced"


def _v2_too_early(facts: Facts) -> bool:
    return bool(facts.v2_runner) and facts.release is not None and facts.release < OLDEST_V2


RULES: tuple[Rule, ...] = (
    Rule("no vLLM", lambda f: f.vllm is None, lambda f: "vLLM is not installed here; install dbo-greenlet[vllm]"),
    Rule("plugin", lambda f: f.plugin_problem is not None, lambda f: str(f.plugin_problem)),
    Rule("platform", lambda f: not f.on_gpu, _say_platform),
    Rule(
        "more than two microbatches",
        lambda f: f.num_ubatches > 2,
        lambda f: (
            f"--ubatch-size {f.ubatch_size} asks for {f.num_ubatches} microbatches, but vLLM's all-to-all classes have "
            "room for two; use --enable-dbo without --ubatch-size"
        ),
        refuse=_known_to_break,
    ),
    Rule(
        "ubatch size without DBO",
        lambda f: not f.enable_dbo and f.ubatch_size > 1,
        lambda f: (
            f"--ubatch-size {f.ubatch_size} without --enable-dbo splits steps with one workspace for all microbatches; "
            "use --enable-dbo without --ubatch-size"
        ),
        refuse=_known_to_break,
    ),
    Rule("DBO off", lambda f: not f.enable_dbo, lambda f: "DBO is not enabled; add --enable-dbo to vLLM's flags"),
    Rule(
        "greenlet too old",
        lambda f: f.greenlet is not None and (release_of(f.greenlet) or ()) < OLDEST_GREENLET,
        lambda f: f"greenlet {f.greenlet} is too old; install greenlet {_dotted(OLDEST_GREENLET)} or later",
    ),
    Rule(
        "vLLM too old",
        lambda f: f.release is not None and f.release < OLDEST_V1,
        lambda f: f"vLLM {f.vllm} is too old; dbo_greenlet knows vLLM {_dotted(OLDEST_V1)} and later",
    ),
    Rule(
        "V2 runner too old",
        _v2_too_early,
        lambda f: (
            f"the V2 model runner of vLLM {f.vllm} has no DBO; use vLLM {_dotted(OLDEST_V2)} or later, or "
            "VLLM_USE_V2_MODEL_RUNNER=0"
        ),
    ),
    Rule(
        "flags that V2 refuses",
        lambda f: bool(f.v2_runner) and bool(f.v2_refuses),
        lambda f: (
            f"the V2 model runner of vLLM {f.vllm} does not take DBO together with {_listed(f.v2_refuses, 'and')}; "
            "leave that out, or set VLLM_USE_V2_MODEL_RUNNER=0"
        ),
    ),
    Rule("vLLM changed", lambda f: bool(f.compat_problems), _say_problems),
    Rule(
        "all-to-all backend",
        lambda f: not f.not_checked_yet and f.all2all_backend is not None and f.all2all_backend not in _backends(f),
        _say_backend,
    ),
    Rule(
        "one data-parallel rank",
        lambda f: f.data_parallel_size <= 1,
        lambda f: (
            f"the data-parallel size is {f.data_parallel_size}, and vLLM splits no step then; serve a "
            "Mixture-of-Experts model with --data-parallel-size 2 or more and --enable-expert-parallel"
        ),
    ),
    Rule(
        "custom runner",
        lambda f: bool(f.custom_overrides),
        lambda f: (
            f"the runner {f.custom_runner} has its own {_listed(f.custom_overrides, 'and')}, which stays as it is; "
            "only vLLM's own is replaced"
        ),
    ),
    Rule(
        "self-test",
        lambda f: isinstance(f.selftest, str) or f.selftest is False,
        lambda f: (
            f"the self-test failed with torch {f.torch} ({f.selftest or 'no reason given'}); `dbo-greenlet selftest` "
            "shows the cases"
        ),
    ),
)


def examine(facts: Facts, settings: Settings) -> Verdict:
    """What becomes of a runner with these facts. Looks at nothing else, so it is the same everywhere.

    A self-test that was not run does not stand in the way: the caller may ask first and run it only if it matters.
    """
    runner = None if facts.v2_runner is None else "V2" if facts.v2_runner else "V1"
    if runner is None and facts.release is not None and facts.release < OLDEST_V2:
        runner = "V1"
    if settings.mode == "off":
        reason = "DBO_GREENLET=0 switches it off; unset it to engage"
        return Verdict(False, runner, reason, rule="switched off")
    for rule in RULES:
        if rule.applies(facts):
            return Verdict(False, runner, rule.say(facts), rule.refuse(facts), rule.name)
    return Verdict(True, runner, _say_engaged(facts, runner))


def _overlaps_without_experts(facts: Facts) -> bool:
    """vLLM's all-to-all for experts that are not spread over ranks can yield, or nobody has looked."""
    return facts.not_checked_yet or (facts.platform == "rocm" and (facts.release or ()) >= (0, 33))


def _say_engaged(facts: Facts, runner: str | None) -> str:
    """What there is to know about an engaged runner, in one sentence for each thing."""
    sentences = [f"microbatches run as greenlets in vLLM's {f'{runner} ' if runner else ''}runner"]
    if facts.custom_runner is not None:
        sentences.append(f"{facts.custom_runner} keeps the methods that are replaced, so it engages too")
    if facts.not_checked_yet:
        sentences.append(
            f"vLLM {facts.vllm} has not been checked yet (the newest checked version is {CHECKED_VERSIONS[-1]}), but "
            "everything that is relied on was found"
        )
    if facts.enable_expert_parallel is False and not _overlaps_without_experts(facts):
        sentences.append(
            "without --enable-expert-parallel vLLM's MoE layers do not use this backend, and fail in the first step "
            "that is split: add it"
        )
    if facts.selftest is None:
        sentences.append("the self-test was not run")
    return "; ".join(sentences)
