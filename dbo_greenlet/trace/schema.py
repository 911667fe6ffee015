"""What stands in a trace: the record kinds of schema 1, as dataclasses and as JSON.

A trace is JSON Lines: one object a line, its kind under the key "t". The first record is a header. One file may hold
the records of several ranks; every line names its rank.

    header   once a rank: versions, machine, model and settings of the run
    prompt   a request as it came in
    step     one forward of the whole batch: the batch, the vote, the schedule, a checksum of the output
    slice    what one microbatch ran between two yield points, in the order in which they ran
    recv     one in-flight window: from a send to the moment its receive was complete
    gpu      one slice on one stream of the GPU, in the order in which the slices were enqueued; where it was measured
    end      once a rank, last: how the run ended

A step is identified by (run, step, rank); `run` names what carried it: "dbo" (greenlets), "thread" or "unsplit", with
"-graph" behind it where decode steps were replayed from graphs. Times are microseconds since the rank's origin on the
host's monotonic clock, with three decimals (it counts nanoseconds).

Versions: a reader takes every older schema (`UPGRADES`) and refuses a newer one. Within a version, keys and kinds it
does not know are passed over, so a later version of the package may add both without a new number; a number changes
only when the meaning of something that stood there changes.

JSON Lines was taken over one JSON document because a run that dies leaves a file that can be read up to its last line,
and over a binary format because people look at traces with grep.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar

from ..errors import TraceFileError

__all__ = [
    "KINDS",
    "SCHEMA_VERSION",
    "EndRecord",
    "GpuRecord",
    "HeaderRecord",
    "PromptRecord",
    "Record",
    "RecvRecord",
    "SliceRecord",
    "StepRecord",
    "check_version",
    "from_json",
    "to_json",
]

SCHEMA_VERSION = 1
OLDEST_VERSION = 1

# version -> what turns an object of that version into one of the next. Applied in turn, so each one only knows its own
# change. An entry is added together with the new number.
UPGRADES: dict[int, Callable[[dict[str, Any]], dict[str, Any]]] = {}


@dataclass(frozen=True)
class HeaderRecord:
    """The run as one rank saw it start.

    Attributes:
        schema: version of this format.
        package, torch, python, platform: versions; torch is "" where it is not installed.
        threads: torch's intra-op threads.
        rank, world: this rank and the number of ranks.
        model: what was loaded, for example {"path": ..., "sha256": ...}.
        settings: N, policy, carrier, voting rule, thresholds: what must be equal for a replay.
        env: the environment variables that change a run, by name.
        started: wall-clock time, ISO 8601 with time zone.
        origin_ns: `time.perf_counter_ns()` at microsecond 0. Ranks of one host share that clock, so the difference of
            two origins puts their times on one axis; between hosts it means nothing.
    """

    kind: ClassVar[str] = "header"
    package: str
    rank: int
    world: int
    schema: int = SCHEMA_VERSION
    torch: str = ""
    python: str = ""
    platform: str = ""
    threads: int = 0
    model: dict[str, Any] = field(default_factory=dict)
    settings: dict[str, Any] = field(default_factory=dict)
    env: dict[str, str] = field(default_factory=dict)
    started: str = ""
    origin_ns: int = 0


@dataclass(frozen=True)
class PromptRecord:
    """One request.

    Attributes:
        request: its number, unique in the run.
        arrival: the step at which it entered the batch.
        text, ids: the prompt and its token ids.
        answer: the generated text. None in what `dbo-greenlet run` writes: the record is written before the first step,
            and the answer follows from the sampled tokens of the steps.
    """

    kind: ClassVar[str] = "prompt"
    request: int
    rank: int
    arrival: int
    text: str
    ids: list[int]
    answer: str | None = None


@dataclass(frozen=True)
class StepRecord:
    """One forward of the whole batch.

    Attributes:
        step, rank, run: its identity.
        tokens, padded: tokens of the batch, without and with padding.
        votes: the ranks' votes, in rank order, as JSON values.
        split, reason: whether it ran as microbatches, and why (not).
        slices: one [first token, end token, first request, end request] per microbatch.
        schedule, hash, yields: `Schedule.encode()`, `Schedule.hash` and the number of yields of each microbatch; "" and
            [] where nothing was split.
        output: checksum of the merged output.
        requests: numbers of the requests in the batch, in batch order.
        sampled: the token sampled for each of these requests.
        begin, end: microseconds around the whole step, scheduler included; None where nobody measured.
        error: what made the step fail, None where it did not. `dbo-greenlet run` leaves it None: a step that fails ends
            its run before the record is made, and the end record then says why.
        execution: how a server ran it: "eager", "captured" (run once, into a graph), "replayed" (from its graph, so
            without slices); "" where nobody says.
    """

    kind: ClassVar[str] = "step"
    step: int
    rank: int
    run: str
    tokens: int
    padded: int
    split: bool
    reason: str
    votes: list[Any] = field(default_factory=list)
    slices: list[list[int]] = field(default_factory=list)
    schedule: str = ""
    hash: str = ""
    yields: list[int] = field(default_factory=list)
    output: str = ""
    requests: list[int] = field(default_factory=list)
    sampled: list[int] = field(default_factory=list)
    begin: float | None = None
    end: float | None = None
    error: str | None = None
    execution: str = ""


@dataclass(frozen=True)
class SliceRecord:
    """What one microbatch ran between two yield points. In the file, slices stand in the order in which they ran.

    Attributes:
        step, rank, run: the step.
        ubatch, slice: the microbatch, and the how-manieth of its slices this is (0-based).
        site: the yield site at which it ended, "" where the microbatch returned.
        begin, end: microseconds on the host: from the hub's hand-over to the hub's getting the thread back.
        stream: the stream it issued work to. None in what `StepRecorder` makes: an instrument cannot ask afterwards,
            for by then the thread's current stream is the hub's again.
        failed: the microbatch raised in it. `site` is then the one it had passed last, and the slice is no decision of
            the schedule.
    """

    kind: ClassVar[str] = "slice"
    step: int
    rank: int
    run: str
    ubatch: int
    slice: int
    site: str
    begin: float
    end: float
    stream: str | None = None
    failed: bool = False


@dataclass(frozen=True)
class RecvRecord:
    """One in-flight window: a send, and who completed its receive.

    Attributes:
        step, rank, run: the step.
        ubatch: the microbatch that sent, and that waits for the receive.
        site: the yield site that follows the send.
        sent: microseconds at which the receive was registered, right after the send.
        by: the microbatch that ran the receive; None where no sibling did, and it ran when its owner was resumed.
        at: microseconds at which the receive was complete; None where it never was (the step failed).
        decision: index, in the step's schedule, of the slice during which it ran; None where it never did.
        sent_decision: index of the slice during which it was sent.
    """

    kind: ClassVar[str] = "recv"
    step: int
    rank: int
    run: str
    ubatch: int
    site: str
    sent: float
    by: int | None = None
    at: float | None = None
    decision: int | None = None
    sent_decision: int | None = None


@dataclass(frozen=True)
class GpuRecord:
    """One slice on one stream of the GPU, by timing events (`gpu_timeline`).

    A kind of its own, and not keys of the slice record, because a step that is replayed from its graph has these and
    no slices on the host, and a slice may use two streams.

    Attributes:
        step, rank, run: the step.
        ubatch, slice, site: as in `SliceRecord`.
        stream: "compute" or "comm".
        begin, end: microseconds on the trace's axis at which the stream came to the slice and was done with it.
        waited: how much of that, from `begin` on, the stream waited for another one.
        after: the yield site that the slice goes on from, "" where the microbatch starts.
        error: microseconds by which the whole step may lie to either side of its place on that axis. Within the step
            times are exact to the GPU's tick, at most half a microsecond; but each event takes about 2 us itself, which
            are part of the slice that it ends.
    """

    kind: ClassVar[str] = "gpu"
    step: int
    rank: int
    run: str
    ubatch: int
    slice: int
    site: str
    stream: str
    begin: float
    end: float
    waited: float = 0.0
    after: str = ""
    error: float = 0.0


@dataclass(frozen=True)
class EndRecord:
    """How the run ended on one rank. A trace without one is of a run that still goes on or was killed."""

    kind: ClassVar[str] = "end"
    ok: bool
    rank: int
    error: str | None = None


Record = HeaderRecord | PromptRecord | StepRecord | SliceRecord | RecvRecord | GpuRecord | EndRecord

KINDS: dict[str, type[Any]] = {
    cls.kind: cls for cls in (HeaderRecord, PromptRecord, StepRecord, SliceRecord, RecvRecord, GpuRecord, EndRecord)
}


def _is_int(value: object) -> bool:
    # JSON's true is a bool, and in Python a bool is an int.
    return type(value) is int


def _is_number(value: object) -> bool:
    return type(value) in (int, float)


def _is_ints(value: object) -> bool:
    return isinstance(value, list) and all(map(_is_int, value))


# What a field's annotation asks of its JSON value. The annotations are the only place where types are written down.
_CHECKS: dict[str, Callable[[Any], bool]] = {
    "bool": lambda value: isinstance(value, bool),
    "int": _is_int,
    "int | None": lambda value: value is None or _is_int(value),
    "float": _is_number,
    "float | None": lambda value: value is None or _is_number(value),
    "str": lambda value: isinstance(value, str),
    "str | None": lambda value: value is None or isinstance(value, str),
    "dict[str, Any]": lambda value: isinstance(value, dict),
    "dict[str, str]": lambda value: isinstance(value, dict) and all(isinstance(v, str) for v in value.values()),
    "list[Any]": lambda value: isinstance(value, list),
    "list[int]": _is_ints,
    "list[list[int]]": lambda value: isinstance(value, list) and all(map(_is_ints, value)),
}

# kind -> (name, annotation, check, required) of each field.
_FIELDS: dict[str, tuple[tuple[str, str, Callable[[Any], bool], bool], ...]] = {
    name: tuple(
        (
            f.name,
            str(f.type),
            _CHECKS[str(f.type)],
            f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING,
        )
        for f in dataclasses.fields(cls)
    )
    for name, cls in KINDS.items()
}


def to_json(record: Record) -> str:
    """One line without its newline, pure ASCII.

    Raises:
        TypeError, ValueError: a field holds something that JSON cannot say (an object, NaN).
    """
    data: dict[str, Any] = {"t": record.kind}
    for name, _, _, _ in _FIELDS[record.kind]:
        data[name] = getattr(record, name)
    return json.dumps(data, separators=(",", ":"), allow_nan=False)


def from_json(data: object, version: int = SCHEMA_VERSION) -> Record | None:
    """The record that one parsed line stands for; None for a kind that this version does not know.

    Args:
        data: the parsed line.
        version: the schema of the file, from its header.

    Raises:
        TraceFileError: no object, no kind, a missing key or a value of the wrong type. The message names no file: the
            reader adds it.
    """
    if not isinstance(data, dict):
        raise TraceFileError(f"a record is a JSON object, not {_json_name(data)}")
    for older in range(version, SCHEMA_VERSION):
        if upgrade := UPGRADES.get(older):
            data = upgrade(data)
    kind = data.get("t")
    if not isinstance(kind, str):
        raise TraceFileError('the record has no kind (the key "t")')
    fields = _FIELDS.get(kind)
    if fields is None:
        return None
    arguments: dict[str, Any] = {}
    for name, annotation, check, required in fields:
        if name in data:
            value = data[name]
            if not check(value):
                raise TraceFileError(f'"{name}" of {_a(kind)} record is {_json_name(value)}, expected {annotation}')
            arguments[name] = value
        elif required:
            raise TraceFileError(f'{_a(kind)} record needs the key "{name}"')
    record: Record = KINDS[kind](**arguments)
    return record


def check_version(data: object) -> int:
    """The schema version that a parsed header line states.

    Raises:
        TraceFileError: it is no header, or of a schema that this package does not read. The message names no file.
    """
    if not isinstance(data, dict) or data.get("t") != "header":
        raise TraceFileError("the first record is no header; this is not a trace of dbo_greenlet")
    version: Any = data.get("schema")
    if not _is_int(version):
        raise TraceFileError(f'"schema" of the header is {_json_name(version)}, expected int')
    if version > SCHEMA_VERSION:
        raise TraceFileError(
            f"the trace has schema {version}, this version of dbo_greenlet reads up to {SCHEMA_VERSION}; "
            f"it was written by {data.get('package', 'a newer version')}: read it with that one or a later one"
        )
    if version < OLDEST_VERSION:
        raise TraceFileError(
            f"the trace states schema {version}, which never existed; this version of dbo_greenlet reads "
            f"{OLDEST_VERSION} to {SCHEMA_VERSION}"
        )
    return int(version)


def _a(kind: str) -> str:
    return f"an {kind}" if kind[0] in "aeiou" else f"a {kind}"


def _json_name(value: object) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, (dict, list)):
        return "an object" if isinstance(value, dict) else "an array"
    text = json.dumps(value)
    return text if len(text) <= 40 else text[:37] + "..."
