"""The plugin: what it does at load, when it engages, what it says, and that it stops no server that would start."""

from __future__ import annotations

import logging
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

pytest.importorskip("vllm", reason="needs vLLM: make test-vllm")

from vllm.config import CUDAGraphMode
from vllm.engine.arg_utils import EngineArgs
from vllm.v1.worker import ubatching as host
from vllm.v1.worker.gpu import ubatch_utils
from vllm.v1.worker.gpu_ubatch_wrapper import UBatchWrapper

from dbo_greenlet.errors import ConfigurationError, NotEngagedError
from dbo_greenlet.selftest import SelfTestCase, SelfTestResult
from dbo_greenlet.vllm import checks, decisions, engagement, patching, plugin, selftest_cache, step
from dbo_greenlet.vllm.counters import counters
from tests.vllm_dropin import drive
from tests.vllm_dropin.drive import Case

pytestmark = pytest.mark.vllm

ENGAGED = "_dbo_greenlet_engaged"
LEFT = "Microbatches are left to vLLM's own implementation, not run as greenlets: "


@pytest.fixture(autouse=True)
def as_it_was(monkeypatch, tmp_path):
    """Every test starts with an untouched vLLM and ends with one, and has a cache of its own."""
    create = EngineArgs.create_engine_config
    for name in ("DBO_GREENLET", "DBO_GREENLET_TRACE", plugin._SAID):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    patching.uninstall()
    yield
    patching.uninstall()
    decisions.uninstall()
    step.record_to(None)
    EngineArgs.create_engine_config = create


class Lines(logging.Handler):
    """What the drop-in logs, whatever vLLM's and pytest's handlers make of it."""

    def __init__(self) -> None:
        super().__init__()
        self.records: list[logging.LogRecord] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.records.append(record)


@pytest.fixture
def log():
    lines = Lines()
    engagement.logger.addHandler(lines)
    level = engagement.logger.level
    engagement.logger.setLevel(logging.DEBUG)
    yield lines
    engagement.logger.removeHandler(lines)
    engagement.logger.setLevel(level)


@pytest.fixture
def gpu(monkeypatch):
    """What decides on a machine with a GPU, where vLLM would not have switched DBO off."""
    monkeypatch.setattr(checks, "platform_name", lambda platform: "cuda")
    make = drive.vllm_config

    def with_backend(*args, **kwargs):
        config = make(*args, **kwargs)
        config.parallel_config.all2all_backend = "deepep_low_latency"
        return config

    monkeypatch.setattr(drive, "vllm_config", with_backend)


@pytest.fixture
def passing_selftest(monkeypatch):
    runs = []

    def run(timeout):
        runs.append(timeout)
        return SelfTestResult(True, (SelfTestCase("ping-pong", "ok", "", 0.1),))

    monkeypatch.setattr(selftest_cache, "run_selftest", run)
    return runs


def said(log) -> list[str]:
    return [r.getMessage() for r in log.records if r.levelno >= logging.INFO]


def wrapper_of(config_change=lambda parallel: None, kind=UBatchWrapper):
    """A real `UBatchWrapper`, constructed as vLLM's model runner does."""
    with drive.harness() as recorder:
        config = drive.vllm_config()
        config_change(config.parallel_config)
        model = drive.Drive(Case(), recorder).model
        return kind(model, config, CUDAGraphMode.NONE, drive.torch.device("cpu"))


# -- at load ---------------------------------------------------------------------------------------------------------


def test_loading_touches_nothing_but_what_is_imported(log):
    plugin.register()
    assert patching.is_installed()  # this process has imported vLLM's runners
    assert "_dbo_greenlet_traced" in host.__dict__
    assert "torch.cuda" in sys.modules and not drive.torch.cuda.is_initialized()
    assert said(log) == []


def test_switched_off(monkeypatch, log):
    monkeypatch.setenv("DBO_GREENLET", "0")
    run = UBatchWrapper._run_ubatches
    plugin.register()
    assert not patching.is_installed()
    assert UBatchWrapper._run_ubatches is run
    assert said(log) == []


def test_a_variable_that_means_nothing_switches_off_and_says_so_once(monkeypatch, log):
    monkeypatch.setenv("DBO_GREENLET", "maybe")
    plugin.register()
    plugin.register()
    assert not patching.is_installed()
    (line,) = said(log)
    assert line.startswith("dbo_greenlet is off: DBO_GREENLET='maybe' means nothing")


def test_a_vllm_whose_functions_changed_is_left_alone(monkeypatch, log):
    """Its `dbo_yield` closes over something else: the new code does not fit. Who builds a runner reads that."""

    def other(*args):
        return None

    monkeypatch.setattr(host, "dbo_yield", other)
    enabled, run = host.dbo_enabled.__code__, UBatchWrapper._run_ubatches
    plugin.register()
    assert not patching.is_installed()
    assert host.dbo_enabled.__code__ is enabled and UBatchWrapper._run_ubatches is run
    assert "_dbo_greenlet_traced" not in host.__dict__
    assert said(log) == []
    wrapper = wrapper_of()
    assert ENGAGED not in wrapper.__dict__
    (line,) = said(log)
    assert line.startswith(LEFT) and "ValueError" in line


def test_require_makes_that_an_error(monkeypatch):
    monkeypatch.setattr(host, "dbo_yield", lambda: None)
    monkeypatch.setenv("DBO_GREENLET", "require")
    plugin.register()
    with pytest.raises(NotEngagedError, match="DBO_GREENLET=require is set, but vLLM cannot be taken over: ValueError"):
        wrapper_of()


def test_a_v2_runner_that_changed_does_not_keep_v1_from_engaging(gpu, passing_selftest, monkeypatch, log):
    monkeypatch.setenv("DBO_GREENLET", "require")
    monkeypatch.delattr(ubatch_utils.UBatchRunner, "abort_pending_run")
    monkeypatch.delitem(sys.modules, "dbo_greenlet.vllm.ubatch_runner", raising=False)
    plugin.register()
    assert ENGAGED in wrapper_of().__dict__


def test_a_mistake_in_the_traces_settings_does_not_switch_off(gpu, passing_selftest, monkeypatch, log):
    monkeypatch.setenv("DBO_GREENLET", "require")
    monkeypatch.setenv("DBO_GREENLET_TRACE", "somewhere")
    monkeypatch.setenv("DBO_GREENLET_TRACE_EVERY", "ten")
    plugin.register()
    assert ENGAGED in wrapper_of().__dict__
    assert said(log)[0] == "no step is recorded: DBO_GREENLET_TRACE_EVERY='ten' is not a whole number of 1 or more"
    assert step.recorded_to() is None


# -- where a runner is constructed -----------------------------------------------------------------------------------


def test_a_runner_engages_and_says_so_in_one_line(gpu, passing_selftest, log):
    plugin.register()
    wrapper = wrapper_of()
    assert ENGAGED in wrapper.__dict__
    lines = said(log)
    assert len(lines) == 2  # two runners: `wrapper_of` makes one for its model, too
    for part in ("dbo_greenlet", "vLLM", "V1 runner", "greenlets", "policy round-robin", "rank 0 of 2"):
        assert part in lines[-1]


def test_the_selftest_runs_once_for_a_machine(gpu, passing_selftest):
    plugin.register()
    wrapper_of()
    assert len(passing_selftest) == 1
    wrapper_of()
    assert len(passing_selftest) == 1
    assert selftest_cache.cache_file().is_file()


def test_a_cache_that_cannot_be_written_costs_another_run(gpu, passing_selftest, monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    plugin.register()
    assert ENGAGED in wrapper_of().__dict__
    assert len(passing_selftest) == 2


def test_a_failed_selftest_leaves_it_to_vllm(gpu, monkeypatch, log):
    case = SelfTestCase("ping-pong", "failed", "the process died of SIGABRT", 0.1)
    monkeypatch.setattr(selftest_cache, "run_selftest", lambda timeout: SelfTestResult(False, (case,)))
    plugin.register()
    wrapper = wrapper_of()
    assert ENGAGED not in wrapper.__dict__
    assert any(line.startswith(LEFT) and "the process died of SIGABRT" in line for line in said(log))
    assert not selftest_cache.cache_file().exists()


def test_on_the_cpu_platform_the_runner_is_vllms(passing_selftest, log):
    plugin.register()
    wrapper = wrapper_of()
    assert ENGAGED not in wrapper.__dict__
    assert passing_selftest == []
    assert any("CPU platform switches DBO off" in line for line in said(log))


def test_require_makes_not_engaging_an_error(monkeypatch):
    monkeypatch.setenv("DBO_GREENLET", "require")
    plugin.register()
    with pytest.raises(NotEngagedError, match="CPU platform"):
        wrapper_of()


def test_operators_that_cannot_be_called_directly_leave_it_to_vllm(gpu, passing_selftest, monkeypatch, log):
    from dbo_greenlet import direct_ops

    def other_parameters(hidden_states):
        return hidden_states

    monkeypatch.setitem(direct_ops.KNOWN_IMPLEMENTATIONS, "vllm::moe_forward", f"{__name__}:other_parameters")
    monkeypatch.setattr(sys.modules[__name__], "other_parameters", other_parameters, raising=False)
    plugin.register()
    assert ENGAGED not in wrapper_of().__dict__
    assert any("cannot be called directly: operator 'vllm::moe_forward'" in line for line in said(log))


def test_a_cache_that_may_not_be_looked_into_costs_a_run(gpu, passing_selftest, monkeypatch):
    def locked(path):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "is_file", locked)
    assert selftest_cache.selftest_problem() is None
    assert len(passing_selftest) == 1


def test_what_goes_wrong_in_here_does_not_stop_the_server(gpu, monkeypatch, log):
    def broken(timeout=0):
        raise OSError("no process could be started")

    monkeypatch.setattr(selftest_cache, "run_selftest", broken)
    plugin.register()
    assert ENGAGED not in wrapper_of().__dict__
    assert any("OSError: no process could be started" in line for line in said(log))


@pytest.mark.parametrize(
    ("change", "part"),
    [
        ({"enable_dbo": False, "ubatch_size": 2}, "--ubatch-size 2 without --enable-dbo"),
        ({"enable_dbo": False, "ubatch_size": 3}, "room for two"),
    ],
)
def test_what_vllm_breaks_on_is_refused(gpu, passing_selftest, change, part):
    plugin.register()
    good = wrapper_of()
    assert ENGAGED in good.__dict__

    def set_flags(parallel):
        for name, value in change.items():
            setattr(parallel, name, value)

    with pytest.raises(ConfigurationError, match=part):
        wrapper_of(set_flags)


def test_what_vllm_can_do_without_splitting_is_not_refused(gpu, passing_selftest, log):
    """With one data-parallel rank vLLM never splits, so nothing breaks."""

    def alone(parallel):
        parallel.data_parallel_size, parallel.enable_dbo, parallel.ubatch_size = 1, False, 3

    plugin.register()
    assert ENGAGED not in wrapper_of(alone).__dict__
    assert any(line.startswith(LEFT) for line in said(log))


class Inherits(UBatchWrapper):
    pass


class RunsByItself(UBatchWrapper):
    def _run_ubatches(self, ubatch_metadata, model):
        return super()._run_ubatches(ubatch_metadata, model)


def test_a_subclass_that_keeps_the_methods_engages_and_another_does_not(gpu, passing_selftest, log):
    plugin.register()
    assert ENGAGED in wrapper_of(kind=Inherits).__dict__
    assert ENGAGED not in wrapper_of(kind=RunsByItself).__dict__
    assert any("RunsByItself" in line for line in said(log))


def test_a_trace_is_recorded_where_the_environment_says_so(gpu, passing_selftest, monkeypatch, tmp_path):
    from vllm.platforms import current_platform

    from dbo_greenlet.trace import read_trace

    folder = tmp_path / "traces"
    monkeypatch.setenv("DBO_GREENLET_TRACE", str(folder))
    monkeypatch.setenv("DBO_GREENLET_TRACE_EVERY", "2")
    plugin.register()
    counters.reset()
    with drive.harness() as recorder:
        driver = drive.Drive(Case(layers=2), recorder)
        for _ in range(4):
            driver.step()
    step.record_to(None)
    assert counters.snapshot()["executed"]["eager"] == 4
    (file,) = Path(folder).glob("*.jsonl")
    assert read_trace(file).header.settings["processor"] == current_platform.get_device_name()
    steps = [s for s in read_trace(file).steps.values() if s.record is not None and s.record.split]
    assert len(steps) == 2
    for each in steps:
        assert [s.site for s in each.slices if s.ubatch == 0] == [
            "layer0.dispatch", "layer0.combine", "layer1.dispatch", "layer1.combine", ""
        ]  # fmt: skip


def test_a_driver_that_cannot_name_its_gpu_stops_nobody(monkeypatch):
    from vllm.platforms import current_platform

    unnamed = classmethod(lambda cls, device_id=0: 1 / 0)  # a driver's library raises errors of its own kind
    monkeypatch.setattr(type(current_platform), "get_device_name", unnamed)
    assert engagement._processor() == ""


# -- the front end ---------------------------------------------------------------------------------------------------


def test_flags_that_will_not_engage_are_named_in_the_front_end(log):
    config = drive.vllm_config()
    engagement.look_at_flags(config, enable_dbo=True, ubatch_size=0)
    (line,) = said(log)
    assert line.startswith(LEFT) and "CPU platform" in line


def test_without_those_flags_nothing_is_said(log):
    engagement.look_at_flags(drive.vllm_config(), enable_dbo=False, ubatch_size=0)
    assert said(log) == []


def test_the_front_end_refuses_as_the_worker_does(gpu):
    config = drive.vllm_config()
    with pytest.raises(ConfigurationError, match="without --enable-dbo"):
        engagement.look_at_flags(config, enable_dbo=False, ubatch_size=2)


@pytest.mark.parametrize("ubatch_size", [2, 3])
def test_the_front_end_does_not_refuse_a_dense_model(gpu, log, ubatch_size):
    """vLLM makes independent engines of its ranks, which split nothing and start."""
    config = drive.vllm_config()
    config.model_config = SimpleNamespace(is_moe=False)
    engagement.look_at_flags(config, enable_dbo=False, ubatch_size=ubatch_size)
    assert any(line.startswith(LEFT) for line in said(log))
    config.model_config = SimpleNamespace(is_moe=True)
    with pytest.raises(ConfigurationError):
        engagement.look_at_flags(config, enable_dbo=False, ubatch_size=ubatch_size)


def test_a_vllm_without_those_flags_starts(monkeypatch):
    """`create_engine_config` is watched; what it asks of the arguments may not be there in another version."""
    made = drive.vllm_config()
    monkeypatch.setattr(EngineArgs, "create_engine_config", lambda self: made)
    plugin._watch_flags()
    assert EngineArgs.create_engine_config(object()) is made


def test_what_cannot_be_told_of_the_flags_stops_nobody(monkeypatch, log):
    def broken(config, **kwargs):
        raise AttributeError("a platform of somebody else's")

    monkeypatch.setattr(checks.Facts, "of_config", broken)
    engagement.look_at_flags(drive.vllm_config(), enable_dbo=True, ubatch_size=0)
    assert said(log) == []
