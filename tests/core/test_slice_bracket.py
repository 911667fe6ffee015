"""What is put round each slice: order, sites, streams and errors, the same with either carrier."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest

from dbo_greenlet import Scheduler, dbo_yield, make_ubatch_contexts
from dbo_greenlet import yields as y
from dbo_greenlet.devices import CpuDevice
from dbo_greenlet.errors import MicrobatchFailed
from dbo_greenlet.slice_bracket import Slice

CARRIERS = ["greenlet", "thread"]


class Notes:
    """A bracket that writes down what it sees, and on which stream."""

    def __init__(self, device: CpuDevice | None = None) -> None:
        self.device = device
        self.seen: list[tuple[Any, ...]] = []
        self.slices: list[Slice] = []

    def _stream(self) -> str:
        return "" if self.device is None else self.device.current_stream().name

    def begin(self, slice: Slice) -> None:
        assert slice.end_site is None
        self.slices.append(slice)
        self.seen.append(("begin", slice.microbatch, slice.number, slice.decision, slice.begin_site, self._stream()))

    def end(self, slice: Slice) -> None:
        assert slice is self.slices[-1]
        self.seen.append(("end", slice.microbatch, slice.number, slice.decision, slice.end_site, self._stream()))


def two_sites() -> str:
    dbo_yield("a")
    dbo_yield("b")
    return "done"


@pytest.mark.parametrize("carrier", CARRIERS)
def test_every_slice_is_bracketed_and_nothing_else_runs_in_between(carrier: str) -> None:
    notes = Notes()
    result = Scheduler(carrier=carrier).run([two_sites, two_sites], bracket=notes)
    expected = []
    for decision in range(6):
        number, microbatch = divmod(decision, 2)
        begin, end = ["", "a", "b"][number], ["a", "b", ""][number]
        expected.append(("begin", microbatch, number, decision, begin, ""))
        expected.append(("end", microbatch, number, decision, end, ""))
    assert notes.seen == expected
    assert [s.microbatch for s in notes.slices] == list(result.schedule.decisions)
    assert [s.end_site for s in notes.slices] == list(result.schedule.sites)


def test_a_bracket_runs_on_the_stream_of_its_slice() -> None:
    device = CpuDevice()
    notes = Notes(device)

    def entry() -> None:
        y.dbo_yield_and_switch_from_compute_to_comm("out")
        y.dbo_yield_and_switch_from_comm_to_compute("back")

    Scheduler().run([entry, entry], make_ubatch_contexts(2, device=device), bracket=notes)
    streams = [(what, microbatch, stream) for what, microbatch, *_, stream in notes.seen]
    assert streams == [
        *[(what, i, "compute") for i in (0, 1) for what in ("begin", "end")],
        # It goes on where it left the thread, and leaves it on the comm stream.
        *[(what, i, stream) for i in (0, 1) for what, stream in (("begin", "compute"), ("end", "comm"))],
        *[(what, i, stream) for i in (0, 1) for what, stream in (("begin", "comm"), ("end", "compute"))],
    ]
    assert device.current_stream() is device.default_stream


def test_the_stream_is_changed_only_where_the_next_slice_wants_another_one() -> None:
    changes: list[str] = []

    class Counting(CpuDevice):
        def put_stream(self, key: Any) -> None:
            changes.append(key.name)
            super().put_stream(key)

    device = Counting()
    comm = device.new_stream("comm")

    def entry(stays: bool) -> None:
        with device.stream_scope(comm):
            for _ in range(5):
                dbo_yield("on comm")
        for _ in range(5 if stays else 0):
            dbo_yield("on compute")

    Scheduler().run([lambda: entry(True)] * 2, make_ubatch_contexts(2, comm_stream=comm, device=device))
    # Each starts on compute and goes on on comm: the second one's start and end are all that differs from its sibling.
    assert changes == ["compute", "comm"]


@pytest.mark.parametrize("carrier", CARRIERS)
@pytest.mark.parametrize("when", ["begin", "end"])
def test_what_a_bracket_raises_fails_the_step_as_it_is(carrier: str, when: str) -> None:
    """Also where the model swallows every error that comes out of a yield."""
    unwound: list[int] = []

    class Bad(Notes):
        def begin(self, slice: Slice) -> None:
            super().begin(slice)
            self.complain("begin", slice)

        def end(self, slice: Slice) -> None:
            self.complain("end", slice)

        def complain(self, at: str, slice: Slice) -> None:
            if at == when and slice.decision == 3:
                raise RuntimeError("no room for an event")

    def entry(i: int) -> None:
        try:
            dbo_yield("a")
            with contextlib.suppress(Exception):
                dbo_yield("b")
        finally:
            unwound.append(i)

    scheduler = Scheduler(carrier=carrier)
    with pytest.raises(RuntimeError, match="^no room for an event$"):
        scheduler.run([lambda: entry(0), lambda: entry(1)], bracket=Bad())
    assert sorted(unwound) == [0, 1]
    assert scheduler.run([two_sites, two_sites], bracket=Notes()).outputs == ["done", "done"]


def test_a_microbatch_that_a_bracket_stops_is_unwound_on_the_stream_that_it_left() -> None:
    device = CpuDevice()
    comm = device.new_stream("comm")
    seen: list[str] = []

    class Bad(Notes):
        def end(self, slice: Slice) -> None:
            raise RuntimeError("no")

    def entry() -> None:
        with device.stream_scope(comm):
            try:
                dbo_yield("on comm")
            finally:
                seen.append(device.current_stream().name)

    with pytest.raises(RuntimeError, match="^no$"):
        Scheduler().run([entry, entry], make_ubatch_contexts(2, device=device), bracket=Bad())
    assert seen == ["comm"] and device.current_stream() is device.default_stream


def test_a_device_whose_streams_are_kept_elsewhere_is_asked_and_told_there() -> None:
    class Elsewhere(CpuDevice):
        def __init__(self) -> None:
            super().__init__()
            self.now = self.default_stream

        def current_stream(self) -> Any:
            return self.now

        def set_stream(self, stream: Any) -> None:
            self.now = stream

    device = Elsewhere()
    comm = device.new_stream("comm")
    seen: list[tuple[int, str]] = []

    def entry(i: int) -> None:
        if i == 0:
            device.set_stream(comm)
        dbo_yield("a")
        seen.append((i, device.current_stream().name))

    Scheduler().run([lambda: entry(0), lambda: entry(1)], make_ubatch_contexts(2, device=device))
    assert seen == [(0, "comm"), (1, "compute")] and device.now is device.default_stream


@pytest.mark.parametrize("carrier", CARRIERS)
def test_a_slice_that_fails_ends_too(carrier: str) -> None:
    notes = Notes()

    def entry() -> None:
        dbo_yield("a")
        raise ValueError("the reason")

    with pytest.raises(MicrobatchFailed, match="the reason"):
        Scheduler(carrier=carrier).run([entry, entry], bracket=notes)
    assert [what for what, *_ in notes.seen] == ["begin", "end"] * 3
    assert all(s.end_site is not None for s in notes.slices)


@pytest.mark.parametrize("carrier", CARRIERS)
def test_the_error_of_a_microbatch_is_not_hidden_by_its_bracket(carrier: str) -> None:
    class Bad(Notes):
        def end(self, slice: Slice) -> None:
            if slice.number == 1:
                raise RuntimeError("half a slice")

    def entry() -> None:
        dbo_yield("a")
        raise ValueError("the reason")

    with pytest.raises(MicrobatchFailed, match="the reason") as caught:
        Scheduler(carrier=carrier).run([entry, entry], bracket=Bad())
    assert isinstance(caught.value.__cause__, ValueError)
