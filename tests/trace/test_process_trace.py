"""The trace that the environment asks for: picked up by schedulers, told by runners, and nothing where nobody asks."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest

from dbo_greenlet import dbo_yield
from dbo_greenlet.devices import cpu_device
from dbo_greenlet.devices.virtual import VirtualDevice
from dbo_greenlet.errors import ConfigurationError
from dbo_greenlet.gpu_timeline import GpuTimeline
from dbo_greenlet.microbatch import make_ubatch_contexts
from dbo_greenlet.policies import Pct
from dbo_greenlet.scheduler import Scheduler
from dbo_greenlet.trace import read_trace
from dbo_greenlet.trace.process_trace import ProcessTrace
from dbo_greenlet.trace_settings import TraceSettings
from tests.trace.process_traces import model, steps


def test_nothing_where_nobody_asks() -> None:
    code = (
        "import sys\nfrom dbo_greenlet.scheduler import Scheduler\n"
        "s = Scheduler()\ns.run([lambda: 1])\n"
        "print(s.recording, [n for n in sys.modules if n.startswith('dbo_greenlet.trace')])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (done.stdout, done.stderr) == ("None []\n", "")


def test_all_schedulers_record_into_one_file(recorded_to: Path) -> None:
    one, two = Scheduler(), Scheduler(Pct(7, 2, 50), carrier="thread")
    assert one.recording is two.recording is not None
    for scheduler in (one, two, one):
        scheduler.run([model, model])
    found = steps(recorded_to)
    assert [(each.run, each.step) for each in found] == [("dbo", 0), ("thread", 1), ("dbo", 2)]
    records = [each.record for each in found]
    plain = ("round_robin", None)
    assert [(r.policy, r.seed) for r in records if r] == [plain, ("pct:7,depth=2,length=50", 7), plain]
    assert all(len(each.slices) == 10 for each in found)
    assert all(a.end <= b.begin for a, b in pairwise(records) if a and b), "one clock for all"


def test_a_step_of_one_microbatch_is_not_split(recorded_to: Path) -> None:
    Scheduler().run([model])
    assert [each.record.split for each in steps(recorded_to) if each.record] == [False]


def test_an_error_that_somebody_went_on_from_is_not_what_ends_the_program(recorded_to: Path) -> None:
    lines = "from dbo_greenlet.scheduler import Scheduler\n1 / 0\nScheduler().run([lambda: 1] * 2) and None\n"
    subprocess.run([sys.executable, "-i", "-q"], input=lines, capture_output=True, text=True, timeout=60, check=True)
    (file,) = recorded_to.iterdir()
    assert [(end.ok, end.error) for end in read_trace(file).ends.values()] == [(True, None)]


def test_settings_of_the_environment() -> None:
    names = {
        "DBO_GREENLET_TRACE": "there", "DBO_GREENLET_TRACE_EVERY": "7", "DBO_GREENLET_TRACE_MB": "1.5",
        "DBO_GREENLET_TRACE_GPU": "1",
    }  # fmt: skip
    assert TraceSettings.from_environment(names) == TraceSettings("there", 7, 1.5, True)
    assert (
        TraceSettings.from_environment({"DBO_GREENLET_TRACE": "", "DBO_GREENLET_TRACE_GPU": "off"}) == TraceSettings()
    )
    with pytest.raises(ConfigurationError, match="DBO_GREENLET_TRACE_MB='nan' is not a positive number"):
        TraceSettings.from_environment({"DBO_GREENLET_TRACE_MB": "nan"})


@pytest.mark.parametrize(
    ("name", "value", "sentence"),
    [
        ("DBO_GREENLET_TRACE_EVERY", "1O", "no step is recorded: DBO_GREENLET_TRACE_EVERY='1O' is not a whole number"),
        ("DBO_GREENLET_TRACE_MB", "0.001", "a limit of 1000 bytes is too small"),
        ("DBO_GREENLET_TRACE", __file__, "is not written: "),
    ],
)
def test_what_keeps_it_from_recording_is_logged_once(
    recorded_to: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    name: str,
    value: str,
    sentence: str,
) -> None:
    monkeypatch.setenv(name, value)
    with caplog.at_level(logging.WARNING, logger="dbo_greenlet"):
        scheduler = Scheduler()
        for _ in range(3):
            assert scheduler.run([model, model]).outputs == [1, 1]
    assert len(caplog.messages) == 1 and sentence in caplog.messages[0]


def test_a_fault_in_the_recording_does_not_reach_the_step(
    recorded_to: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    scheduler = Scheduler()
    scheduler.run([model, model])

    def broken(*args: object, **named: object) -> bytes:
        raise KeyError("a fault of ours")

    monkeypatch.setattr("dbo_greenlet.trace.recorded_step.RecordedStep._lines", broken)
    contexts = make_ubatch_contexts(2, device=cpu_device())
    device = contexts[0].device
    assert scheduler.run([model, model], contexts).outputs == [1, 1]
    assert scheduler.recording.problem == "The trace of this process ends here: KeyError: 'a fault of ours'"
    assert contexts[0].device is device and scheduler.run([model, model]).outputs == [1, 1]
    assert len(caplog.messages) == 1
    assert len(steps(recorded_to)) == 1


def test_in_the_long_run_it_is_bounded(tmp_path: Path) -> None:
    trace = ProcessTrace(TraceSettings(str(tmp_path), 1, 0.2))
    scheduler = Scheduler()
    scheduler.recording = trace
    for _ in range(200):
        scheduler.run([model, model])
    trace.close()
    names = sorted(path.name.partition(".")[2] for path in tmp_path.iterdir())
    assert names == ["jsonl", "older.jsonl"]
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) <= 200_000
    newest = read_trace(trace.path or "")
    assert max(step for _, step, _ in newest.steps) == 199 and newest.ends[0].ok
    assert json.loads(Path(trace.path or "").read_text().partition("\n")[0])["settings"]["trace"]["part"] > 0


def test_slices_are_timed_where_the_device_can(recorded_to: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DBO_GREENLET_TRACE_GPU", "1")
    device = VirtualDevice(launch=1)
    contexts = make_ubatch_contexts(2, device=device)

    def work() -> None:
        for layer, us in enumerate((100, 30)):
            device.work("attention", us)
            dbo_yield(f"layer{layer}.dispatch")

    scheduler = Scheduler()
    for _ in range(2):
        scheduler.run([work, work], contexts)
    assert all(each.device is device for each in contexts)
    for each in steps(recorded_to):
        times = [(g.ubatch, g.slice, g.site, round(g.end - g.begin)) for g in each.gpu]
        # The first slice begins with the launch of its work; behind the last yields nothing runs.
        assert times[1:] == [
            (1, 0, "layer0.dispatch", 100), (0, 1, "layer1.dispatch", 30), (1, 1, "layer1.dispatch", 30),
            (0, 2, "", 0), (1, 2, "", 0),
        ]  # fmt: skip
        assert times[0] == (0, 0, "layer0.dispatch", 101)


def test_a_step_with_a_bracket_of_its_own_keeps_it(recorded_to: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DBO_GREENLET_TRACE_GPU", "1")
    device = VirtualDevice(launch=1)
    contexts = make_ubatch_contexts(2, device=device)
    theirs = GpuTimeline(device, capturing=device.capturing).eager(contexts)

    def work() -> None:
        device.work("attention", 10)
        dbo_yield("layer0.dispatch")

    Scheduler().run([work, work], contexts, bracket=theirs)
    assert len(theirs.read()) == 4
    (only,) = steps(recorded_to)
    assert only.gpu == [] and len(only.slices) == 4


@pytest.mark.gpu
def test_slices_are_timed_on_the_gpu(recorded_to: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    from dbo_greenlet.devices.cuda import CudaDevice

    monkeypatch.setenv("DBO_GREENLET_TRACE_GPU", "1")
    contexts = make_ubatch_contexts(2, device=CudaDevice())
    data = torch.ones(1 << 20, device="cuda")

    def work() -> None:
        for layer in range(2):
            data.mul_(1.0)
            dbo_yield(f"layer{layer}.dispatch")
            data.mul_(1.0)
            dbo_yield(f"layer{layer}.combine")

    scheduler = Scheduler()
    for _ in range(2):
        scheduler.run([work, work], contexts)
    for each in steps(recorded_to):
        assert [(g.ubatch, g.slice) for g in each.gpu if g.stream == "compute"] == [
            (s.ubatch, s.slice) for s in each.slices
        ]
        assert all(g.end >= g.begin for g in each.gpu)
