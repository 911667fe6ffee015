"""The lint's rules for profiles: each with a profile that triggers it and one that nearly does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("msgspec", reason="msgspec is not installed")

from dbo_greenlet.trace.importers import read_profile
from dbo_greenlet.trace.lint import RULES, Report, choose_rules
from dbo_greenlet.trace.lint.profile_rules import PROFILE_RULES, lint_profile
from dbo_greenlet.trace.profile import Profile
from tests.trace.lint_runs import missing
from tests.trace.profiles import COMBINE, DISPATCH, FLASH, GEMM, LOW_LATENCY_DISPATCH, ChromeProfile, NsysProfile
from tests.trace.test_overlap_published import GOLDEN, needs_golden

COMPUTE, COMM = 7, 21
SEND_RECV = "ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)"


def look(profile: Profile, *only: str, **options: Any) -> Report:
    return lint_profile(profile, rules=choose_rules(only), **options)


def found(report: Report) -> list[tuple[Any, ...]]:
    """(rule, count, microbatch, layer, begin) of each finding, begins since the profile's first event."""
    return [
        (each.rule.id, each.count, each.place.microbatch, each.place.layer, each.place.at) for each in report.findings
    ]


class Layer:
    """Two microbatches, in ranges that name them. The first launch is at 0.5, so that its range begins the profile."""

    def __init__(self, *, names: bool = True, threads: tuple[int, int] = (100, 100)) -> None:
        self.made = ChromeProfile()
        self.names = names
        self.threads = threads

    def kernel(self, microbatch: int, name: str, begin: float, end: float, *, stream: int, launch: float) -> None:
        thread = self.threads[microbatch]
        if self.names:
            self.made.range(f"ubatch {microbatch}, layer 3", launch - 0.5, launch + 1.5, thread=thread)
        self.made.kernel(name, begin, end, stream=stream, launch=launch, thread=thread)

    def profile(self, path: Path) -> Profile:
        return read_profile(self.made.write(path / "p.json"))


def overlapping(comm: int = COMM, dispatch: str = DISPATCH, **settings: Any) -> Layer:
    """Attention of both, and the dispatch of each while the other computes; on one stream one after the other."""
    layer = Layer(**settings)
    later = 30 if comm == COMPUTE else 0
    layer.kernel(0, FLASH, 10, 30, stream=COMPUTE, launch=0.5)
    layer.kernel(1, FLASH, 30, 60, stream=COMPUTE, launch=5)
    layer.kernel(0, dispatch, 30 + later, 60 + later, stream=comm, launch=8)
    layer.kernel(0, GEMM, 60 + later, 90 + later, stream=COMPUTE, launch=12)
    layer.kernel(1, dispatch, 60 + 2 * later, 90 + 2 * later, stream=comm, launch=15)
    layer.kernel(1, GEMM, 90 + 2 * later, 120 + 2 * later, stream=COMPUTE, launch=20)
    return layer


def test_every_rule_looks_at_profiles_or_says_why_not() -> None:
    for rule in RULES:
        assert (rule.id in PROFILE_RULES) == (not rule.on_profiles), rule.id
    assert set(PROFILE_RULES) <= {rule.id for rule in RULES}


def test_nothing_is_found_in_a_profile_that_overlaps(tmp_path: Path) -> None:
    report = look(overlapping().profile(tmp_path))
    assert found(report) == []
    assert [rule.id for rule in report.checked] == ["comm-on-compute", "no-overlap"]
    assert missing(report)["race"] == "a profile does not say what kernels read and write"
    assert report.about == "6 GPU events; rank 0"


@needs_golden
def test_nothing_is_found_in_the_published_profile() -> None:
    """Its two threads launch a forward and a backward, which overlap."""
    report = look(read_profile(GOLDEN))
    assert found(report) == []
    assert [rule.id for rule in report.checked] == ["comm-on-compute", "no-overlap"]


# -- comm-on-compute ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("settings", [{}, {"names": False, "threads": (100, 200)}], ids=["ranges", "threads"])
def test_communication_on_the_stream_that_computes(tmp_path: Path, settings: dict[str, Any]) -> None:
    report = look(overlapping(comm=COMPUTE, **settings).profile(tmp_path), "comm-on-compute")
    microbatch, layer = (0, 3) if not settings else (None, None)
    assert found(report) == [("comm-on-compute", 2, microbatch, layer, 60.0 if not settings else 59.5)]
    assert report.findings[0].what == (
        f"{DISPATCH} runs on stream 7, which computes: the other microbatch's work there waits behind it"
    )


def test_a_little_compute_on_the_stream_that_communicates(tmp_path: Path) -> None:
    """A quantisation before the dispatch does not make it the stream that computes."""
    layer = overlapping()
    layer.kernel(0, GEMM, 90, 98, stream=COMM, launch=16)
    report = look(layer.profile(tmp_path), "comm-on-compute")
    assert found(report) == [] and len(report.checked) == 1


def test_the_halves_of_a_low_latency_dispatch_belong_on_the_compute_stream(tmp_path: Path) -> None:
    report = look(overlapping(comm=COMPUTE, dispatch=LOW_LATENCY_DISPATCH).profile(tmp_path), "comm-on-compute")
    assert found(report) == [] and len(report.checked) == 1


def test_a_step_that_was_not_split_is_not_judged(tmp_path: Path) -> None:
    """One thread, and ranges that name no microbatch."""
    profile = overlapping(comm=COMPUTE, names=False).profile(tmp_path)
    report = look(profile, "comm-on-compute", "no-overlap")
    assert found(report) == [] and report.checked == []
    assert set(missing(report).values()) == {
        "nothing in the profile says that microbatches ran: no range names one, and one thread launches the compute; "
        "put each microbatch's layers into ranges, as record_function('ubatch 0 layer 3 attention')"
    }


# -- no-overlap --------------------------------------------------------------------------------------------------------


def one_after_the_other(first_end: float) -> Layer:
    """The dispatch of 0 runs from 30 to `first_end`, and the compute of 1 begins at 70."""
    layer = Layer()
    layer.kernel(0, FLASH, 10, 30, stream=COMPUTE, launch=0.5)
    layer.kernel(0, DISPATCH, 30, first_end, stream=COMM, launch=8)
    layer.kernel(1, FLASH, 70, 110, stream=COMPUTE, launch=12)
    layer.kernel(1, COMBINE, 110, 130, stream=COMM, launch=16)
    return layer


@pytest.mark.parametrize("first_end, expected", [(70, 1), (72, 1), (74, 0)])
def test_communication_that_nothing_hides(tmp_path: Path, first_end: float, expected: int) -> None:
    """0 of 60 us, 2 of 62 (3.2 %), and 4 of 64 (6.3 %): the last is enough."""
    report = look(one_after_the_other(first_end).profile(tmp_path), "no-overlap")
    assert found(report) == [("no-overlap", 1, 0, 3, 30.0)] * expected
    assert len(report.checked) == 1
    if first_end == 72:
        assert report.findings[0].what == "of 0.062 ms of communication compute hides 3.2 %"


def test_what_is_not_known_to_be_hidden_is_not_judged(tmp_path: Path) -> None:
    """Low-latency launches that do not come in pairs: when the bytes flew nobody knows."""
    layer = overlapping(comm=COMPUTE, dispatch=LOW_LATENCY_DISPATCH)
    layer.kernel(0, LOW_LATENCY_DISPATCH, 190, 191, stream=COMPUTE, launch=22)
    report = look(layer.profile(tmp_path), "no-overlap")
    assert found(report) == [] and report.checked == []
    assert "do not come in pairs" in missing(report)["no-overlap"]


def test_a_profile_without_communication_is_not_judged(tmp_path: Path) -> None:
    layer = Layer()
    layer.kernel(0, FLASH, 10, 30, stream=COMPUTE, launch=0.5)
    layer.kernel(1, FLASH, 30, 60, stream=COMPUTE, launch=5)
    assert missing(look(layer.profile(tmp_path), "no-overlap")) == {"no-overlap": "no communication in the profile"}


# -- event-after-yield -------------------------------------------------------------------------------------------------


def waiting(recorded: float, *, dispatch_begin: float, sync_events: bool = True) -> Layer:
    """Attention of 0 launched at 0.5 and run to 30, of 1 launched at 5 and run to 60; an event of the compute stream is
    recorded at `recorded`, for which the dispatch of 0 waits that is launched at 8."""
    layer = Layer()
    layer.kernel(0, FLASH, 10, 30, stream=COMPUTE, launch=0.5)
    layer.kernel(1, FLASH, 30, 60, stream=COMPUTE, launch=5)
    record = layer.made.call("cudaEventRecord", recorded, recorded + 0.5)
    wait = layer.made.call("cudaStreamWaitEvent", 7.0, 7.5)
    if sync_events:
        layer.made.add(
            "cuda_sync", "Stream Wait Event", 7.25, 0.1, 0, COMM, stream=COMM, device=0, correlation=wait,
            wait_on_stream=COMPUTE, wait_on_cuda_event_record_corr_id=record, wait_on_cuda_event_id=1,
        )  # fmt: skip
    layer.kernel(0, DISPATCH, dispatch_begin, 90, stream=COMM, launch=8)
    return layer


def test_an_event_recorded_behind_the_siblings_work(tmp_path: Path) -> None:
    report = look(waiting(6.0, dispatch_begin=60).profile(tmp_path), "event-after-yield")
    assert found(report) == [("event-after-yield", 1, 0, 3, 60.0)]
    assert report.findings[0].what == (
        f"{DISPATCH} on stream 21 waits 30.0 us for the other microbatch's {FLASH}: its event was recorded on stream 7 "
        "behind that, and not behind the work of its own microbatch"
    )


@pytest.mark.parametrize("recorded, begin", [(2.0, 30), (6.0, 30)], ids=["before the switch", "without a wait"])
def test_an_event_that_holds_nobody_up(tmp_path: Path, recorded: float, begin: float) -> None:
    """Recorded before the sibling's launch; or behind it, and the dispatch ran all the same (a wait for another)."""
    report = look(waiting(recorded, dispatch_begin=begin).profile(tmp_path), "event-after-yield")
    assert found(report) == [] and len(report.checked) == 1


def test_a_microbatch_that_wants_its_siblings_work(tmp_path: Path) -> None:
    """It has nothing of its own on the stream that it waits for, so it does not wait for that by mistake."""
    layer = waiting(6.0, dispatch_begin=60)
    layer.made.events = [each for each in layer.made.events if each["ts"] not in (0.0, 0.5, 10)]
    profile = layer.profile(tmp_path)
    assert len(profile.activities) == 2 and len(profile.waits) == 1
    report = look(profile, "event-after-yield")
    assert found(report) == [] and len(report.checked) == 1


def test_events_need_a_profiler_that_was_asked_for_them(tmp_path: Path) -> None:
    report = look(waiting(6.0, dispatch_begin=60, sync_events=False).profile(tmp_path), "event-after-yield")
    assert report.checked == []
    assert missing(report)["event-after-yield"].startswith(
        "needs streams that wait for events: torch.profiler has them"
    )


# -- small-message -----------------------------------------------------------------------------------------------------


def sized(elements: int | None) -> Layer:
    """The communication of `overlapping`, of this many bfloat16 elements."""
    layer = overlapping(dispatch=SEND_RECV)
    for each in layer.made.events:
        if each["name"] == SEND_RECV and elements is not None:
            each["args"] |= {"In msg nelems": elements, "dtype": "BFloat16"}
    return layer


@pytest.mark.parametrize("elements, expected", [(65535, 1), (65536, 0), (32768, 1), (32767, 0)])
def test_messages_below_a_cutoff(tmp_path: Path, elements: int, expected: int) -> None:
    """Below it, and unsplit not below it."""
    report = look(sized(elements).profile(tmp_path), "small-message", cutoff=131072)
    assert found(report) == [("small-message", 2, 0, 3, 30.0)] * expected and len(report.checked) == 1
    if elements == 32768:
        assert report.findings[0].what == (
            f"{SEND_RECV} carries 64 KiB; below 128 KiB a message counts as small (--cutoff), and unsplit it would be "
            "128 KiB"
        )


def test_messages_without_a_size_or_a_cutoff(tmp_path: Path) -> None:
    assert missing(look(sized(32768).profile(tmp_path), "small-message")) == {
        "small-message": "no size is known in a profile below which a message goes another way; give one with "
        "--cutoff BYTES"
    }
    assert missing(look(sized(None).profile(tmp_path), "small-message", cutoff=131072)) == {
        "small-message": "needs communication of microbatches that ranges name, with the size of its messages"
    }


# -- other profilers ---------------------------------------------------------------------------------------------------


def test_nsight_systems(tmp_path: Path) -> None:
    made = NsysProfile(tmp_path / "p.sqlite")
    for microbatch, (name, begin, end, stream, launch) in enumerate(
        [(FLASH, 10, 30, COMPUTE, 0.5), (GEMM, 30, 60, COMPUTE, 5)]
    ):
        made.range(f"ubatch {microbatch}", launch - 0.5, launch + 1.5)
        made.kernel(name, begin, end, stream=stream, launch=launch)
    made.range("ubatch 0", 7.5, 9.5)
    made.kernel(DISPATCH, 60, 80, stream=COMPUTE, launch=8)
    report = look(read_profile(made.done()), "comm-on-compute", "no-overlap")
    assert [each[:3] for each in found(report)] == [("comm-on-compute", 1, 0), ("no-overlap", 1, 0)]
