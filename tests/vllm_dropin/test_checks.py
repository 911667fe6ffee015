"""The rules by which a runner engages or not: each one triggered and nearly triggered, and what is said then."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dbo_greenlet._version import __version__
from dbo_greenlet.vllm.checks import BACKENDS, OLDEST_GREENLET, RULES, Facts, Verdict, _about_runner, examine
from dbo_greenlet.vllm.compat import CHECKED_VERSIONS, installed_version, release_of
from dbo_greenlet.vllm.settings import Settings

# A server that engages; every row below changes it.
SERVER = Facts(
    vllm="0.32.0",
    torch="2.13.0",
    greenlet="3.5.6",
    python="3.11.9",
    platform="cuda",
    enable_dbo=True,
    num_ubatches=2,
    data_parallel_size=2,
    all2all_backend="deepep_low_latency",
    enable_expert_parallel=True,
    v2_runner=False,
    selftest=True,
)
ON = Settings()


def verdict(**changes: Any) -> Verdict:
    return examine(replace(SERVER, **changes), ON)


TRIGGERED = [
    ("no vLLM", {"vllm": None}, "vLLM is not installed here; install dbo-greenlet[vllm]"),
    ("plugin", {"plugin_problem": "VLLM_PLUGINS='x' does not list it"}, "VLLM_PLUGINS='x' does not list it"),
    ("platform", {"platform": "cpu"}, "CPU platform switches DBO off; dbo_greenlet engages on CUDA and ROCm"),
    ("platform", {"platform": "cpu", "enable_dbo": False, "num_ubatches": 0}, "CPU platform switches DBO off"),
    ("platform", {"platform": "xpu"}, "its platform 'xpu'"),
    ("platform", {"platform": "tpu"}, "its platform 'tpu'"),
    ("platform", {"platform": "npu"}, "its platform 'npu'"),
    ("platform", {"platform": "none"}, "no device on this machine; ask on the machine that serves"),
    (
        "more than two microbatches",
        {"enable_dbo": False, "ubatch_size": 3, "num_ubatches": 3},
        "--ubatch-size 3 asks for 3 microbatches, but vLLM's all-to-all classes have room for two; use --enable-dbo",
    ),
    (
        "ubatch size without DBO",
        {"enable_dbo": False, "ubatch_size": 2, "num_ubatches": 2},
        "--ubatch-size 2 without --enable-dbo",
    ),
    ("DBO off", {"enable_dbo": False, "num_ubatches": 0}, "DBO is not enabled; add --enable-dbo"),
    ("DBO off", {"enable_dbo": False, "ubatch_size": 1, "num_ubatches": 1}, "DBO is not enabled"),
    ("greenlet too old", {"greenlet": "3.0.3"}, "greenlet 3.0.3 is too old; install greenlet 3.1 or later"),
    ("vLLM too old", {"vllm": "0.19.1"}, "vLLM 0.19.1 is too old; dbo_greenlet knows vLLM 0.20 and later"),
    ("V2 runner too old", {"vllm": "0.29.0", "v2_runner": True}, "the V2 model runner of vLLM 0.29.0 has no DBO"),
    (
        "flags that V2 refuses",
        {"v2_runner": True, "v2_refuses": ("--enable-lora", "--pipeline-parallel-size")},
        "the V2 model runner of vLLM 0.32.0 does not take DBO together with --enable-lora and --pipeline-parallel-size",
    ),
    (
        "vLLM changed",
        {"compat_problems": ("vllm.a is missing",)},
        f"vLLM 0.32.0 is not as dbo_greenlet {__version__} expects it (vllm.a is missing); a newer dbo_greenlet",
    ),
    (
        "vLLM changed",
        {"compat_problems": tuple(f"vllm.{name} is missing" for name in "abcde")},
        "(vllm.a is missing; vllm.b is missing; vllm.c is missing, and 2 more)",
    ),
    (
        "all-to-all backend",
        {"all2all_backend": "pplx"},
        "refuses DBO with --all2all-backend pplx; use deepep_low_latency, deepep_high_throughput or nixl_ep",
    ),
    (
        "all-to-all backend",
        {"all2all_backend": "nixl_ep", "vllm": "0.22.0"},
        "use deepep_low_latency or deepep_high_throughput",
    ),
    ("all-to-all backend", {"all2all_backend": "allgather_reducescatter", "vllm": "0.33.0"}, "or nixl_ep"),
    (
        "all-to-all backend",
        {"all2all_backend": "allgather_reducescatter", "asked_backend": "pplx"},
        "refuses DBO with --all2all-backend pplx, which it takes for allgather_reducescatter; use deepep_low_latency,",
    ),
    (
        "all-to-all backend",
        {"all2all_backend": "allgather_reducescatter", "asked_backend": "allgather_reducescatter"},
        "refuses DBO with --all2all-backend allgather_reducescatter; use deepep_low_latency,",
    ),
    ("one data-parallel rank", {"data_parallel_size": 1}, "the data-parallel size is 1, and vLLM splits no step then"),
    (
        "custom runner",
        {"custom_runner": "afd.Wrapper", "custom_overrides": ("_run_ubatches", "_capture_ubatches")},
        "the runner afd.Wrapper has its own _run_ubatches and _capture_ubatches, which stays as it is",
    ),
    (
        "self-test",
        {"selftest": "ping-pong, eager: the process died of SIGABRT"},
        "the self-test failed with torch 2.13.0 (ping-pong, eager: the process died of SIGABRT); `dbo-greenlet",
    ),
    ("self-test", {"selftest": False}, "the self-test failed with torch 2.13.0 (no reason given)"),
]

# What looks like one of the above and is none.
NEARLY = [
    ("plugin", {"plugin_problem": None}),
    ("platform", {"platform": "rocm"}),
    ("more than two microbatches", {"ubatch_size": 3}),  # --enable-dbo counts, and makes two
    ("ubatch size without DBO", {"ubatch_size": 2}),
    ("greenlet too old", {"greenlet": "3.1.0"}),
    ("vLLM too old", {"vllm": "0.20.0"}),
    ("vLLM too old", {"vllm": "0.1.dev123+g0a1b2c3"}),  # built without tags: the number says nothing
    ("V2 runner too old", {"vllm": "0.30.0", "v2_runner": True}),
    ("V2 runner too old", {"vllm": "0.29.0"}),
    ("flags that V2 refuses", {"v2_runner": False, "v2_refuses": ("--enable-lora",)}),
    ("flags that V2 refuses", {"v2_runner": True, "v2_refuses": ()}),
    ("all-to-all backend", {"all2all_backend": "nixl_ep", "vllm": "0.24.0"}),
    ("all-to-all backend", {"all2all_backend": "allgather_reducescatter", "vllm": "0.33.0", "platform": "rocm"}),
    ("all-to-all backend", {"all2all_backend": "of_tomorrow", "vllm": "0.40.0"}),
    ("custom runner", {"custom_runner": "afd.Wrapper"}),
    ("self-test", {"selftest": None}),
]


@pytest.mark.parametrize(("rule", "changes", "words"), TRIGGERED)
def test_a_rule_that_applies_says_so_with_the_remedy(rule: str, changes: dict[str, Any], words: str) -> None:
    found = verdict(**changes)
    assert (found.engages, found.rule) == (False, rule)
    assert words in found.reason
    assert "\n" not in found.reason and not found.reason.endswith(".")


@pytest.mark.parametrize(("rule", "changes"), NEARLY)
def test_what_is_nearly_so_engages(rule: str, changes: dict[str, Any]) -> None:
    found = verdict(**changes)
    assert found.engages and not found.refuse, found.reason
    assert rule in {each.name for each in RULES}


def test_every_rule_has_a_row() -> None:
    assert {row[0] for row in TRIGGERED} == {rule.name for rule in RULES}


def test_off_is_off_whatever_else_is_wrong() -> None:
    broken = replace(SERVER, vllm=None, platform="cpu", enable_dbo=False, ubatch_size=3, num_ubatches=3)
    found = examine(broken, Settings(mode="off"))
    assert found == Verdict(False, "V1", "DBO_GREENLET=0 switches it off; unset it to engage", False, "switched off")
    assert examine(SERVER, Settings(mode="require")).engages


@pytest.mark.parametrize(("ubatch_size", "words"), [(2, "without --enable-dbo"), (3, "room for two")])
def test_what_vllm_breaks_on_is_refused_and_nothing_else(ubatch_size: int, words: str) -> None:
    flags = {"enable_dbo": False, "ubatch_size": ubatch_size, "num_ubatches": ubatch_size}
    for version in CHECKED_VERSIONS:
        assert verdict(vllm=version, **flags).refuse
    assert words in verdict(**flags).reason
    assert verdict(**flags, has_experts=True).refuse
    # Started fine without us: one rank never splits, nor do the ranks of a dense model, a CPU has no such runner, and
    # nobody has looked at later and at much older versions.
    unknown = ({"vllm": "0.40.0"}, {"vllm": "0.1.dev7"}, {"vllm": "0.19.1"}, {"has_experts": False})
    for harmless in ({"data_parallel_size": 1}, {"platform": "cpu"}, *unknown):
        found = verdict(**flags, **harmless)
        assert not found.engages and not found.refuse, harmless
    others = [changes for rule, changes, _ in TRIGGERED if "ubatch_size" not in changes or changes["ubatch_size"] < 2]
    assert len(others) > 15 and not any(verdict(**changes).refuse for changes in others)


def test_the_runner_is_named() -> None:
    assert verdict().runner == "V1" and "V1 runner" in verdict().reason
    assert verdict(v2_runner=True).runner == "V2" and "V2 runner" in verdict(v2_runner=True).reason
    assert verdict(v2_runner=None).runner is None
    assert verdict(v2_runner=None, vllm="0.26.0").runner == "V1"


def test_an_engaged_runner_says_what_to_know_about_it() -> None:
    plain = verdict().reason
    assert plain == "microbatches run as greenlets in vLLM's V1 runner"
    newer = verdict(vllm="0.34.1").reason
    assert f"vLLM 0.34.1 has not been checked yet (the newest checked version is {CHECKED_VERSIONS[-1]})" in newer
    assert "not been checked" not in verdict(vllm=CHECKED_VERSIONS[-1]).reason
    assert "afd.Wrapper keeps the methods that are replaced" in verdict(custom_runner="afd.Wrapper").reason
    assert "the self-test was not run" in verdict(selftest=None).reason
    assert "add it" in verdict(enable_expert_parallel=False).reason
    assert verdict(enable_expert_parallel=None).reason == plain
    # There the all-to-all of experts that are not spread over ranks yields, too.
    rocm = {"vllm": "0.33.0", "platform": "rocm", "all2all_backend": "allgather_reducescatter"}
    assert verdict(enable_expert_parallel=False, **rocm).reason == plain


def test_the_backends_are_those_that_vllm_names() -> None:
    assert [verdict(all2all_backend=name).engages for name in BACKENDS] == [True, True, True, False]
    assert verdict(all2all_backend=None).engages


def test_versions_are_read_as_numbers() -> None:
    assert release_of("0.32.0+cpu") == (0, 32, 0)
    assert release_of("0.33.1rc2.dev5+g1234") == (0, 33, 1)
    assert release_of("0.1.dev17+g1234") is release_of("unknown") is release_of(None) is None


def test_the_oldest_greenlet_is_the_one_that_the_package_asks_for() -> None:
    project = (Path(__file__).parents[2] / "pyproject.toml").read_text(encoding="utf-8")
    match = re.search(r'"greenlet>=([\d.]+)"', project)
    assert match is not None and release_of(match.group(1)) == OLDEST_GREENLET


def test_the_facts_of_this_machine() -> None:
    facts = Facts.of_machine(compat_problems=["x is missing"])
    assert facts.vllm == installed_version()
    assert (release_of(facts.greenlet) or ()) >= OLDEST_GREENLET
    assert facts.compat_problems == ("x is missing",) and facts.selftest is None


def _subclass(name: str, module: str, **members: Any) -> type:
    base = type(name, (), {"__module__": module, **dict.fromkeys(("_run_ubatches", "begin_capturable_run"), len)})
    return type("Own", (base,), {"__module__": "afd", **members})


def test_a_subclass_is_known_by_what_it_overrides() -> None:
    plain = _subclass("UBatchWrapper", "vllm.v1.worker.gpu_ubatch_wrapper", __call__=len)
    assert _about_runner(plain) == ("UBatchWrapper", "afd.Own", ())
    assert _about_runner(plain.__mro__[1]) == ("UBatchWrapper", None, ())
    own = _subclass("UBatchWrapper", "vllm.v1.worker.gpu_ubatch_wrapper", _run_ubatches=max)
    assert _about_runner(own) == ("UBatchWrapper", "afd.Own", ("_run_ubatches",))
    v2 = _subclass("UBatchRunner", "vllm.v1.worker.gpu.ubatch_utils", begin_capturable_run=max)
    assert _about_runner(v2) == ("UBatchRunner", "afd.Own", ("begin_capturable_run",))
    # A class of the same name that is not vLLM's is nobody's we know.
    assert _about_runner(_subclass("UBatchWrapper", "elsewhere")) == (None, "afd.Own", ())


@pytest.mark.vllm
def test_the_facts_of_a_configuration() -> None:
    from vllm.config import ParallelConfig
    from vllm.platforms import current_platform
    from vllm.v1.worker.gpu_ubatch_wrapper import UBatchWrapper

    class Own(UBatchWrapper):
        def _capture_ubatches(self, ubatch_metadata: Any, model: Any) -> Any: ...

    config = SimpleNamespace(
        parallel_config=ParallelConfig(
            enable_dbo=True, data_parallel_size=4, all2all_backend="nixl_ep", enable_expert_parallel=True
        )
    )
    facts = Facts.of_config(config, runner=object.__new__(Own), selftest=True)
    assert facts.platform == current_platform.device_type
    assert (facts.enable_dbo, facts.num_ubatches, facts.ubatch_size, facts.data_parallel_size) == (True, 2, 0, 4)
    assert (facts.all2all_backend, facts.enable_expert_parallel, facts.v2_runner) == ("nixl_ep", True, False)
    assert (facts.custom_overrides, facts.selftest, facts.has_experts) == (("_capture_ubatches",), True, None)
    assert str(facts.custom_runner).endswith("Own")
    assert examine(replace(facts, platform="cuda"), ON).rule == "custom runner"

    facts = Facts.of_config(config, v2_runner=True)
    assert (facts.v2_runner, facts.custom_runner, facts.custom_overrides) == (True, None, ())
    assert examine(replace(facts, platform="cuda"), ON).engages

    dense = SimpleNamespace(parallel_config=config.parallel_config, model_config=SimpleNamespace(is_moe=False))
    assert Facts.of_config(dense).has_experts is False

    three = SimpleNamespace(parallel_config=ParallelConfig(ubatch_size=3, all2all_backend="nixl_ep"))
    assert examine(replace(Facts.of_config(three), platform="cuda"), ON).rule == "more than two microbatches"
