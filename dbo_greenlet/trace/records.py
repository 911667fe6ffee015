"""The record kinds of a trace, as dataclasses. How they become lines of a file is `schema`.

    header   once a rank: versions, machine, model and settings of the run
    prompt   a request as it came in
    step     one forward of the whole batch: the batch, the vote, the schedule, a checksum of the output
    slice    what one microbatch ran between two yield points, in the order in which they ran
    recv     one in-flight window: from a send to the moment its receive was complete
    gpu      one slice on one stream of the GPU, in the order in which the slices were enqueued; where it was measured
    op       one operation that a slice issued: an event recorded or waited for, a transfer sent or received, memory
             read, written, freed or held; where somebody asked for it
    end      once a rank, last: how the run ended

A step is identified by (run, step, rank); `run` names what carried it: "dbo" (greenlets), "thread" or "unsplit", with
"-graph" behind it where decode steps were replayed from graphs. Times are microseconds since the rank's origin on the
host's monotonic clock, with three decimals (it counts nanoseconds).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar

__all__ = [
    "KINDS",
    "SCHEMA_VERSION",
    "EndRecord",
    "GpuRecord",
    "HeaderRecord",
    "OpRecord",
    "PromptRecord",
    "Record",
    "RecvRecord",
    "SliceRecord",
    "StepRecord",
]

SCHEMA_VERSION = 1


@dataclass(frozen=True)
class HeaderRecord:
    """The run as one rank saw it start.

    Attributes:
        schema: version of this format.
        package, torch, python, platform: versions; torch is "" where it is not installed.
        versions: of other packages that carry a step, by name, where they are installed; "cuda" is that of torch.
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
    versions: dict[str, str] = field(default_factory=dict)


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
        slices: one [first token, end token, first request, end request] per microbatch; of a step that was not split
            none, or the one of the whole batch.
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
        policy, seed: who chose what ran next, as `--policy` takes it ("round_robin", "pct:7,depth=2,length=100"), or
            the policy's name where there is no such text ("scripted"); and the seed it has. "" and None where nobody
            says.
        vote_begin, vote_end: microseconds around the vote. No rank leaves a vote before every rank has come to it,
            which is what puts the clocks of ranks on one axis (`clocks.offsets`).
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
    policy: str = ""
    seed: int | None = None
    vote_begin: float | None = None
    vote_end: float | None = None


@dataclass(frozen=True)
class SliceRecord:
    """What one microbatch ran between two yield points. In the file, slices stand in the order in which they ran.

    Attributes:
        step, rank, run: the step.
        ubatch, slice: the microbatch, and the how-manieth of its slices this is (0-based).
        site: the yield site at which it ended, "" where the microbatch returned.
        begin, end: microseconds on the host: from the hub's hand-over to the hub's getting the thread back.
        stream: the stream that was current at its end: "compute" and "comm" are those of the step's contexts, others
            are called as the device calls them. None where the step had no contexts, and so no streams.
        failed: the microbatch raised in it. `site` is then the one it had passed last, and the slice is no decision of
            the schedule.
        layer: the layer that its site names; None where it names none.
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
    layer: int | None = None


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
        bytes: what this rank sent to other ranks; None where nobody says.
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
    bytes: int | None = None


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
class OpRecord:
    """One operation, in the order in which the host issued them: an entry of the stream program (`stream_program`).

    A kind of its own, and not lists in the slice record, because most slices have none, and a reader that wants one
    kind of operation finds it with grep.

    Attributes:
        step, rank, run: the step.
        number: its place among the operations of the step, from 0.
        op: "record" (an event, behind what the stream holds), "wait" (the stream, for an event's latest record),
            "send", "receive", "work" (anything that reads or writes memory), "host_wait" (the host waits for the
            stream, None: for all), "free" (memory goes back to the allocator, where its stream may have it again),
            "hold" (memory is kept for a stream it was not made on: `record_stream`, or tensors that an event holds).
        ubatch, slice: who issued it, and in which of its slices; None outside microbatches.
        stream: the stream's name, as in the slices. Of "free" the one that may have the memory again, and None where
            nobody saw it being made; of "hold" the one that it is kept for.
        at: microseconds on the host at which it began; None where nobody measured.
        name: what it is, for people.
        event: number of the event, within the step.
        of: the `number` of the record that a wait waits for, of the send that a receive receives; None where it was
            recorded or sent before the step, or never.
        owner: the microbatch whose data it handles, where that is another one: a receive that a sibling runs.
        bytes: what a send sends to other ranks.
        memory: what is read, written, freed or held: ["read" or "write", buffer, begin, end] each, the buffer an
            address or a name, begin and end in bytes from there, end null for the whole of it. Accesses to a part of
            these bytes have more elements (`op_records`). "free" has its memory as written, "hold" as read.
    """

    kind: ClassVar[str] = "op"
    step: int
    rank: int
    run: str
    number: int
    op: str
    ubatch: int | None = None
    slice: int | None = None
    stream: str | None = None
    at: float | None = None
    name: str = ""
    event: int | None = None
    of: int | None = None
    owner: int | None = None
    bytes: int | None = None
    memory: list[Any] = field(default_factory=list)


@dataclass(frozen=True)
class EndRecord:
    """How the run ended on one rank. A trace without one is of a run that still goes on or was killed."""

    kind: ClassVar[str] = "end"
    ok: bool
    rank: int
    error: str | None = None


Record = HeaderRecord | PromptRecord | StepRecord | SliceRecord | RecvRecord | GpuRecord | OpRecord | EndRecord

KINDS: dict[str, type[Any]] = {
    cls.kind: cls
    for cls in (HeaderRecord, PromptRecord, StepRecord, SliceRecord, RecvRecord, GpuRecord, OpRecord, EndRecord)
}
