"""The instrument that writes down what the scheduler does.

    recorder = StepRecorder()
    contexts = make_ubatch_contexts(2, device=recorder.device(device))
    scheduler = Scheduler(instruments=[recorder])
    result = scheduler.run(entries, contexts)
    writer.write(step_record, *recorder.records(step=0, rank=0, run="dbo"))

While a step runs it only appends to lists: 0.6 us a slice, 0.8 us for an in-flight window (its send and its receive),
0.35 us for each event that a stream records or waits for, on a processor that takes 4.3 us for a bare slice
(scripts/bench_trace.py). Records are made of them afterwards, outside the step, when somebody asks. A scheduler without
it pays nothing, and 0.1 us for an event where its device could tell. What operations do to memory costs far more to
know, and is noted by `memory_recorder.MemoryRecorder` instead.
"""

from __future__ import annotations

import copy
import re
from collections import deque
from collections.abc import Callable, Iterator
from json.encoder import encode_basestring_ascii as _quoted
from threading import get_ident
from time import perf_counter_ns
from types import MethodType
from typing import TYPE_CHECKING, Any, NamedTuple

from ..step import running
from .notation import parse_site
from .records import OpRecord, RecvRecord, SliceRecord
from .run_header import make_header

if TYPE_CHECKING:
    from ..step import Microbatch, Step

__all__ = ["StepRecorder", "make_header"]

# In a site that is none of a dispatch or a combine: "layer3.attention", "model.layers.3.mlp".
_LAYER = re.compile(r"(?<![^\W_])layers?[._]?(\d+)(?![^\W_])")
_COMBINE = "finish_combine"  # the receive part of a combine, by the name that `all2all.Dispatch` gives it


class StepRecorder:
    """Records the slices, the in-flight windows and the events of one step at a time.

    One recorder belongs to one scheduler that runs one step at a time; a step inside a step, or steps in two threads at
    once, need a recorder each.

    Args:
        clock: nanoseconds, monotonic.

    Attributes, all about the step that ran last:
        origin_ns: the clock's value at microsecond 0; fixed when the recorder is made.
        begin, end: microseconds around the step.
        error: what made it fail, as "Type: message", or None.
    """

    # Its listeners are called without a guard: see `StepHooks.teller`.
    never_raises = True

    def __init__(self, *, clock: Callable[[], int] = perf_counter_ns) -> None:
        self.origin_ns = clock()
        self.begin = self.end = 0.0
        self.error: str | None = None
        self._clock = clock
        self._streams: dict[Any, str] = {}  # the key of a stream -> what it is called
        # Each of these is a row after the other in one flat list: tuples that are kept for many events would be looked
        # through by the garbage collector, again and again, while the step runs.
        # Microbatch, slice number, site, begin, end, whether it failed, key of the stream.
        self._slices: list[Any] = []
        # Microbatch, slices ended so far, time, bytes that its dispatch has sent so far, name of the receive part.
        self._sends: list[Any] = []
        # Owner, by, slices ended so far, time.
        self._receives: list[Any] = []
        # Name, whether recorded (and not waited for), event, stream, slices ended so far or (microbatch, slice), time.
        self._operations: list[Any] = []
        # From the step's begin until its records are made: what joins the streams comes after the step.
        self._noting = False
        self._make_listeners()

    def device(self, device: Any) -> Any:
        """A twin of `device`, sharing everything with it, that tells which events are recorded and waited for.

        To be used for the contexts of the steps that are recorded, and for what joins their streams. Between steps, and
        in steps that the scheduler runs without this recorder, it costs a test.
        """
        twin = copy.copy(device)
        record, wait, note = device.record, device.wait, self.note_event

        def record_and_note(event: Any, stream: Any) -> None:
            record(event, stream)
            if self._noting:
                note(event, stream, True)

        def wait_and_note(stream: Any, event: Any) -> None:
            wait(stream, event)
            if self._noting:
                note(event, stream, False)

        twin.record, twin.wait = record_and_note, wait_and_note
        # For whoever records events that are no part of the program: a timeline.
        twin.plain = getattr(device, "plain", device)
        return twin

    # -- what the scheduler calls ------------------------------------------------------------------------------------

    def _make_listeners(self) -> None:
        """The listeners of the scheduler's events, as closures.

        Four of them run in each slice, and what they read and write are variables of this function: as methods, with
        attributes, they took a third longer.
        """
        clock = self._clock
        slices, sends, receives, operations = self._slices, self._sends, self._receives, self._operations
        add_slice, add_send, add_receive = slices.extend, sends.extend, receives.extend
        add_operation = operations.extend
        at_work: Microbatch | None = None
        unwinding: Any = _NO_STEP
        step_begin = slice_begin = ended = 0

        def before_step(step: Step) -> None:
            nonlocal at_work, ended, step_begin, unwinding
            for rows in (slices, sends, receives, operations):
                rows.clear()
            self._noting = True
            at_work, ended, unwinding = None, 0, step
            self._streams = _names_of_streams(step.microbatches[0].context)
            step_begin = clock()

        def before_slice(microbatch: Microbatch) -> None:
            nonlocal at_work, slice_begin
            at_work = microbatch
            slice_begin = clock()

        def after_slice(microbatch: Microbatch) -> None:
            nonlocal at_work, ended
            now = clock()
            at_work = None
            ended += 1
            stream = microbatch.stream
            if stream is None and microbatch.context is not None:
                stream = _current_stream(microbatch.context)
            number = microbatch.slice_number - 1
            add_slice((microbatch.index, number, microbatch.site, slice_begin, now, False, stream))

        def recv_registered(microbatch: Microbatch) -> None:
            # The receive part of a `Dispatch`, as a rule; it knows what was sent, and must not be kept alive for it.
            hook: Any = microbatch.outstanding[-1].hook
            sent = None
            if hook.__class__ is MethodType:
                dispatch: Any = hook.__self__
                try:
                    sent = dispatch.bytes_sent
                except Exception:
                    # Whatever somebody else's object does when it is asked, it must not fail the step.
                    sent = None
            add_send((microbatch.index, ended, clock(), sent, "" if sent is None else hook.__name__))

        def recv_ran(owner: Microbatch, by: int | None) -> None:
            add_receive((owner.index, by, ended, clock()))

        def note_event(event: Any, stream: Any, recorded: bool, name: str = "") -> None:
            # Whose it is tells the slice that runs; but siblings that are unwound run in none.
            if not unwinding.aborting:
                add_operation((name, recorded, event, stream, ended, clock()))
            elif self._noting:
                it = running.get(get_ident())
                who = (None, None) if it is None else (it.index, it.slice_number)
                add_operation((name, recorded, event, stream, who, clock()))

        def after_step(step: Step, error: BaseException | None) -> None:
            nonlocal at_work, unwinding
            now = clock()
            unwinding = _NO_STEP
            failed, at_work = at_work, None
            if failed is not None and error is not None:
                # The slice that raised never ended. Where the failure came from is what a reader looks for first.
                add_slice((failed.index, failed.slice_number, failed.site, slice_begin, now, True, failed.stream))
            self.begin = self._microseconds(step_begin)
            self.end = self._microseconds(now)
            self.error = None if error is None else f"{type(error).__name__}: {error}"

        self.before_step, self.after_step = before_step, after_step
        self.before_slice, self.after_slice = before_slice, after_slice
        self.recv_registered, self.recv_ran = recv_registered, recv_ran
        # Note that an event was recorded on a stream, or waited for by it, by other means than a device of ours.
        self.note_event = note_event

    def event_captured(self, microbatch: Microbatch, event: Any) -> None:
        """A library has recorded an event of its own; what waits for it is inside the library."""
        if event is not None and self._noting:
            stream = getattr(getattr(microbatch.context, "host", microbatch.context), "compute_stream", None)
            self.note_event(event, stream, True, "previous_event")

    # -- what the run asks for ---------------------------------------------------------------------------------------

    def records(self, *, step: int, rank: int = 0, run: str = "dbo") -> list[SliceRecord | RecvRecord | OpRecord]:
        """The step that ran last, as records: the slices as they ran, the windows as they were sent, the events."""
        us, names, layers = self._microseconds, self._names(), _Layers()
        out: list[SliceRecord | RecvRecord | OpRecord] = [
            SliceRecord(step, rank, run, index, number, site, us(begin), us(end), names[stream], failed, layers[site])
            for index, number, site, begin, end, failed, stream in _rows(self._slices, 7)
        ]
        out += [RecvRecord(step, rank, run, *window) for window in self._windows()]
        out += [
            OpRecord(step, rank, run, number, op, ubatch, slice, stream, us(at), name, event, of)
            for number, (name, op, ubatch, slice, stream, at, event, of) in enumerate(self._events(names))
        ]
        return out

    def json_lines(self, *, step: int, rank: int = 0, run: str = "dbo") -> bytes:
        """What `to_json` makes of these `records`, each line with its newline, several times faster.

        A server writes hundreds of them between two steps of its model; making a record for each line took nine times
        as long (scripts/bench_trace.py).
        """
        origin, names, layers = self.origin_ns, self._names(), _Layers()
        same = f'"step":{step},"rank":{rank},"run":{_quoted(run)},'
        slice_head, recv_head = f'{{"t":"slice",{same}"ubatch":', f'{{"t":"recv",{same}"ubatch":'
        op_head = f'{{"t":"op",{same}"number":'
        sites: dict[str, str] = {}
        tails: dict[Any, str] = {}
        lines: list[str] = []
        for index, number, site, begin, end, failed, stream in _rows(self._slices, 7):
            if (quoted := sites.get(site)) is None:
                quoted = sites[site] = _quoted(site)
            if (tail := tails.get((site, stream, failed))) is None:
                tail = tails[site, stream, failed] = (
                    f'"stream":{_or_null(names[stream])},"failed":{"true" if failed else "false"},'
                    f'"layer":{_or_null(layers[site])}}}\n'
                )
            lines.append(
                f'{slice_head}{index},"slice":{number},"site":{quoted},"begin":{(begin - origin) / 1000!r},'
                f'"end":{(end - origin) / 1000!r},{tail}'
            )
        for owner, site, sent, by, at, decision, sent_in, size in self._windows():
            lines.append(
                f'{recv_head}{owner},"site":{sites.get(site) or _quoted(site)},"sent":{sent!r},'
                f'"by":{"null" if by is None else by},"at":{"null" if at is None else repr(at)},'
                f'"decision":{"null" if decision is None else decision},"sent_decision":{sent_in},'
                f'"bytes":{"null" if size is None else size}}}\n'
            )
        whose: dict[Any, str] = {}
        for number, (name, op, ubatch, slice, stream, at, event, of) in enumerate(self._events(names)):
            if (who := whose.get((ubatch, slice, stream))) is None:
                keys = (("ubatch", ubatch), ("slice", slice), ("stream", stream))
                who = whose[ubatch, slice, stream] = "".join(
                    f',"{key}":{_or_null(value)}' for key, value in keys if value is not None
                )
            label = f',"name":"{name}"' if name else ""
            lines.append(
                f'{op_head}{number},"op":"{op}"{who},"at":{(at - origin) / 1000!r}{label},"event":{event}'
                + ("}\n" if of is None else f',"of":{of}}}\n')
            )
        return "".join(lines).encode("ascii")

    def _windows(self) -> Iterator[_Window]:
        """Each window, in the order in which they were sent."""
        us = self._microseconds
        waiting: dict[int, deque[tuple[int | None, int, int]]] = {}
        for owner, by, decision, at in _rows(self._receives, 4):
            waiting.setdefault(owner, deque()).append((by, decision, at))
        dispatched: dict[int, int] = {}  # microbatch -> what the dispatch sent that its combine answers
        sites = self._slices[2::7]
        for owner, sent_in, sent, total, part in _rows(self._sends, 5):
            site = sites[sent_in] if sent_in < len(sites) else ""
            size = total if type(total) is int else None
            if size is not None and part == _COMBINE:
                size -= dispatched.get(owner, 0)
            elif size is not None:
                dispatched[owner] = size
            # A microbatch's receives run in the order in which it registered them.
            if ran := waiting.get(owner):
                by, decision, at = ran.popleft()
                yield _Window(owner, site, us(sent), by, us(at), decision, sent_in, size)
            else:
                yield _Window(owner, site, us(sent), None, None, None, sent_in, size)

    def _events(
        self, names: _Names
    ) -> Iterator[tuple[str, str, int | None, int | None, str | None, int, int, int | None]]:
        """(name, op, microbatch, slice, stream, time, event, of) of each, in the order of the host."""
        self._noting = False
        slices = list(_rows(self._slices, 7))
        events: dict[int, int] = {}  # by identity: the list keeps them alive
        recorded: dict[int, int] = {}  # event -> number of its latest record
        for number, (name, is_record, event, stream, who, at) in enumerate(_rows(self._operations, 6)):
            known = events.setdefault(id(event), len(events))
            of = None
            if is_record:
                recorded[known] = number
            else:
                of = recorded.get(known)
            if who.__class__ is int:
                # Behind the last slice it is nobody's.
                who = slices[who][:2] if who < len(slices) else (None, None)
            yield name, "record" if is_record else "wait", *who, names[stream], at, known, of

    def _names(self) -> _Names:
        return _Names(self._streams)

    def _microseconds(self, clock: int) -> float:
        return (clock - self.origin_ns) / 1000


class _NoStep:
    aborting = False


_NO_STEP = _NoStep()


class _Window(NamedTuple):
    """A `RecvRecord`, but for the step."""

    owner: int
    site: str
    sent: float
    by: int | None
    at: float | None
    decision: int | None
    sent_decision: int
    bytes: int | None


class _Names(dict[Any, "str | None"]):
    """Streams and their keys -> names."""

    def __missing__(self, stream: Any) -> str | None:
        if stream is None:
            return None
        name = self.get(getattr(stream, "key", None)) or getattr(stream, "name", None)
        if not isinstance(name, str):
            name = f"stream {stream:#x}" if isinstance(stream, int) else str(stream)
        self[stream] = name
        return name


class _Layers(dict[str, "int | None"]):
    """Sites -> the layer that they name."""

    def __missing__(self, site: str) -> int | None:
        parsed = parse_site(site)
        named = None if parsed is not None else _LAYER.search(site)
        layer = self[site] = parsed.layer if parsed is not None else int(named[1]) if named is not None else None
        return layer


def _names_of_streams(context: Any) -> dict[Any, str]:
    """The streams of a step by what they are for, whatever the device calls them."""
    names: dict[Any, str] = {}
    host = getattr(context, "host", context)  # a context that stands before another framework's
    for name in ("comm", "compute"):
        stream = getattr(host, f"{name}_stream", None)
        if stream is not None:
            names[stream] = names[getattr(stream, "key", stream)] = name
    return names


def _current_stream(context: Any) -> Any:
    """The stream of a microbatch whose carrier does not keep one: what its thread, or its framework, says now."""
    device = getattr(context, "device", None)
    if device is not None:
        key = getattr(device, "stream_key", None)
        return device.current_stream() if key is None else key()
    return getattr(getattr(context, "host", None), "current_stream", None)


def _rows(flat: list[Any], width: int) -> Iterator[tuple[Any, ...]]:
    return zip(*[iter(flat)] * width, strict=True)


def _or_null(value: str | int | None) -> str:
    return "null" if value is None else str(value) if isinstance(value, int) else _quoted(value)
