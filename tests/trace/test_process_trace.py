"""The trace that the environment asks for: picked up by schedulers, told by runners, and nothing where nobody asks."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest

from dbo_greenlet import dbo_yield
from dbo_greenlet.devices import cpu_device
from dbo_greenlet.devices.virtual import VirtualDevice
from dbo_greenlet.errors import ConfigurationError
from dbo_greenlet.gpu_timeline import GpuTimeline
from dbo_greenlet.microbatch import UBatchContext, make_ubatch_contexts
from dbo_greenlet.policies import Pct
from dbo_greenlet.scheduler import Scheduler
from dbo_greenlet.trace import StepTrace, read_trace
from dbo_greenlet.trace import process_trace as module
from dbo_greenlet.trace.process_trace import ProcessTrace, StepDetails
from dbo_greenlet.trace_settings import TraceSettings


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder that this process records every step to, until the test ends."""
    monkeypatch.setenv("DBO_GREENLET_TRACE", str(tmp_path / "traces"))
    monkeypatch.setenv("DBO_GREENLET_TRACE_EVERY", "1")
    monkeypatch.setattr(module, "_process_trace", None)
    yield tmp_path / "traces"
    module.end_process_trace()


def model() -> int:
    for layer in range(2):
        dbo_yield(f"layer{layer}.dispatch")
        dbo_yield(f"layer{layer}.combine")
    return 1


def steps(folder: Path) -> list[StepTrace]:
    module.end_process_trace()
    (file,) = folder.iterdir()
    return list(read_trace(file).steps.values())


def details(*, split: bool = True, tokens: int = 24, voted: tuple[int, int] | None = None) -> StepDetails:
    return StepDetails(3, 8, tokens, 32, split, "split" if split else "idle", [[1, 2]], [[0, 12, 0, 1]], voted)


def test_nothing_where_nobody_asks() -> None:
    code = (
        "import sys\nfrom dbo_greenlet.scheduler import Scheduler\n"
        "s = Scheduler()\ns.run([lambda: 1])\n"
        "print(s.recording, [n for n in sys.modules if n.startswith('dbo_greenlet.trace')])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (done.stdout, done.stderr) == ("None []\n", "")


def test_all_schedulers_record_into_one_file(folder: Path) -> None:
    one, two = Scheduler(), Scheduler(Pct(7, 2, 50), carrier="thread")
    assert one.recording is two.recording is not None
    for scheduler in (one, two, one):
        scheduler.run([model, model])
    found = steps(folder)
    assert [(each.run, each.step) for each in found] == [("dbo", 0), ("thread", 1), ("dbo", 2)]
    records = [each.record for each in found]
    plain = ("round_robin", None)
    assert [(r.policy, r.seed) for r in records if r] == [plain, ("pct:7,depth=2,length=50", 7), plain]
    assert all(len(each.slices) == 10 for each in found)
    assert all(a.end <= b.begin for a, b in pairwise(records) if a and b), "one clock for all"


def test_what_a_runner_tells_is_in_the_step(folder: Path) -> None:
    scheduler = Scheduler()
    origin = scheduler.recording.origin_ns
    scheduler.recording.describe(details(voted=(origin + 5_000, origin + 9_000)))
    scheduler.run([model, model])
    scheduler.recording.step_over()
    scheduler.recording.describe(details(split=False, tokens=5))
    scheduler.run([model, model])  # of somebody who tells nothing
    told, unsplit, plain = steps(folder)
    assert told.record is not None and unsplit.record is not None and plain.record is not None
    assert (told.rank, told.record.tokens, told.record.padded, told.record.votes) == (3, 24, 32, [[1, 2]])
    assert (told.record.vote_begin, told.record.vote_end, told.record.slices) == (5.0, 9.0, [[0, 12, 0, 1]])
    assert (unsplit.record.split, unsplit.record.reason, unsplit.record.tokens, unsplit.slices) == (
        False,
        "idle",
        5,
        [],
    )
    assert (plain.record.tokens, plain.record.vote_begin, plain.step) == (0, None, 2)


def test_kinds_of_steps_are_counted_apart(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DBO_GREENLET_TRACE_EVERY", "3")
    scheduler = Scheduler()
    for number in range(9):
        scheduler.recording.describe(details(split=number % 4 == 2))
        if number % 4 == 2:
            scheduler.run([model, model])
            scheduler.recording.step_over()
    # Split are 2 and 6, unsplit the others: each kind's first and every third.
    assert [(each.step, each.record.split) for each in steps(folder) if each.record] == [
        (0, False), (2, True), (4, False), (8, False)
    ]  # fmt: skip


def test_a_step_that_no_scheduler_ran_is_forgotten(folder: Path) -> None:
    scheduler = Scheduler()
    scheduler.recording.describe(details(tokens=1))  # run in turn, or replayed from a graph
    scheduler.recording.describe(details(tokens=2))
    scheduler.run([model, model])
    (only,) = steps(folder)
    assert only.record is not None and only.record.tokens == 2


def joining(scheduler: Scheduler, contexts: list[UBatchContext]) -> None:
    """A step as a runner runs it."""
    scheduler.recording.describe(details())
    scheduler.run([model, model], contexts)
    device = contexts[0].device
    event = device.new_event()
    device.record(event, contexts[0].comm_stream)
    device.wait(contexts[0].compute_stream, event)
    scheduler.recording.step_over()


def test_events_up_to_the_join_are_recorded_of_a_runners_steps(folder: Path) -> None:
    device = cpu_device()
    contexts = make_ubatch_contexts(2, device=device)
    scheduler = Scheduler()
    joining(scheduler, contexts)
    assert all(each.device is device for each in contexts), "the contexts have their own device again"
    scheduler.run([model, model], contexts)
    told, plain = steps(folder)
    assert [(op.op, op.stream, op.ubatch, op.of) for op in told.ops] == [
        ("record", "comm", None, None), ("wait", "compute", None, 0)
    ]  # fmt: skip
    assert [each.stream for each in told.slices] == ["compute"] * 10
    assert plain.ops == [], "who joins the streams of this one, nobody knows"


def test_a_failed_step_is_written_at_once(folder: Path) -> None:
    def failing() -> None:
        dbo_yield("layer0.dispatch")
        raise ValueError("broke")

    contexts = make_ubatch_contexts(2, device=cpu_device())
    device = contexts[0].device
    scheduler = Scheduler()
    scheduler.recording.describe(details())
    with pytest.raises(RuntimeError, match="broke"):
        scheduler.run([failing, failing], contexts)
    (file,) = folder.iterdir()
    (failed,) = read_trace(file).steps.values()
    assert failed.record is not None and "ValueError: broke" in str(failed.record.error)
    assert contexts[0].device is device
    scheduler.run([model, model], contexts)
    assert [each.record.error is None for each in steps(folder) if each.record] == [False, True]


def test_a_step_that_is_not_over_is_written_with_the_next_or_the_last(folder: Path) -> None:
    scheduler = Scheduler()
    for tokens in (1, 2):
        scheduler.recording.describe(details(tokens=tokens))
        scheduler.run([model, model])
    (file,) = folder.iterdir()
    assert len(read_trace(file).steps) == 1
    assert [each.record.tokens for each in steps(folder) if each.record] == [1, 2]


def test_a_runner_is_recorded(folder: Path) -> None:
    pytest.importorskip("torch")
    from dbo_greenlet.batching import VoteSettings
    from dbo_greenlet.runner import Runner
    from tests.runner.tiny import tiny_cache, tiny_model, tiny_step

    runner = Runner(tiny_model(), kv_cache=tiny_cache(), settings=VoteSettings(2, 4, 4))
    batch = tiny_step([(row, 0, 1) for row in range(6)])
    out = runner.step(batch)
    runner.step(batch, mode="never")
    split, unsplit = steps(folder)
    assert split.record is not None and unsplit.record is not None and out.schedule is not None
    assert (split.record.hash, split.record.tokens, split.record.split) == (out.schedule.hash, 6, True)
    assert split.record.slices == [[0, 3, 0, 3], [3, 6, 3, 6]]
    assert [op.op for op in split.ops][-2:] == ["record", "wait"]
    assert (unsplit.record.split, unsplit.record.tokens) == (False, 6)


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
    folder: Path,
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
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
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
    assert len(steps(folder)) == 1


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


def test_slices_are_timed_where_the_device_can(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
    for each in steps(folder):
        times = [(g.ubatch, g.slice, g.site, round(g.end - g.begin)) for g in each.gpu]
        # The first slice begins with the launch of its work; behind the last yields nothing runs.
        assert times[1:] == [
            (1, 0, "layer0.dispatch", 100), (0, 1, "layer1.dispatch", 30), (1, 1, "layer1.dispatch", 30),
            (0, 2, "", 0), (1, 2, "", 0),
        ]  # fmt: skip
        assert times[0] == (0, 0, "layer0.dispatch", 101)


def test_a_step_with_a_bracket_of_its_own_keeps_it(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DBO_GREENLET_TRACE_GPU", "1")
    device = VirtualDevice(launch=1)
    contexts = make_ubatch_contexts(2, device=device)
    theirs = GpuTimeline(device, capturing=device.capturing).eager(contexts)

    def work() -> None:
        device.work("attention", 10)
        dbo_yield("layer0.dispatch")

    Scheduler().run([work, work], contexts, bracket=theirs)
    assert len(theirs.read()) == 4
    (only,) = steps(folder)
    assert only.gpu == [] and len(only.slices) == 4


@pytest.mark.gpu
def test_slices_are_timed_on_the_gpu(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
    for each in steps(folder):
        assert [(g.ubatch, g.slice) for g in each.gpu if g.stream == "compute"] == [
            (s.ubatch, s.slice) for s in each.slices
        ]
        assert all(g.end >= g.begin for g in each.gpu)
