"""The same job again, from its first step, by the decisions of its trace; and whether they were met.

Prompts, arrivals and settings come from the trace. The ranks vote as they did, and every split step is run by its
recorded schedule, site for site. A step that was replayed from its graph has no slices: it is replayed again, from a
graph that is captured here, and compared by its output. What was sampled then is taken over, so that a step whose
output differs (another processor, another torch) does not change the steps after it: each step is judged by itself.

Checksums of outputs are compared bit for bit, which is fair only on an equal torch, processor and number of threads;
elsewhere they are "not comparable".
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from ..errors import ReplayMismatch, TraceFileError
from ..schedule import Schedule
from ..trace.reader import StepTrace, Trace, read_trace
from ..trace.schema import HeaderRecord, StepRecord
from .launch import JobResult, run_job
from .messages import Lines, Message
from .process import rank_main
from .requests import Request
from .spec import GRAPH_RUNS, PACKAGED_MODEL, RUN_OF_CARRIER, JobSpec, Pass, RecordedStep, Settings

__all__ = ["ReplayPlan", "ReplayReport", "plan_replay", "replay"]

NOT_SAMPLED = -1  # as in `engine`, which needs torch: a request in whose prefill no token was sampled yet
SHOWN = 5  # differences of a kind that are written out


@dataclass(frozen=True)
class ReplayPlan:
    """A trace made ready to be replayed.

    Attributes:
        trace: what was recorded.
        run: which of its runs.
        spec: the job, without what is only one rank's.
        specs: the job as each rank gets it.
        recorded: (step, rank) -> the record to meet.
    """

    trace: Trace
    run: str
    spec: JobSpec
    specs: list[JobSpec]
    recorded: dict[tuple[int, int], StepRecord]


@dataclass
class ReplayReport:
    """What a replay met.

    Attributes:
        path, run, ranks, steps: what was replayed; steps as the trace has them on every rank.
        decisions: differences in votes, in split or not, or in a schedule; one sentence each.
        outputs, tokens: differences in checksums and in sampled tokens.
        not_comparable: why checksums say nothing here; "" where they do.
        not_reached: steps that were not run, because a schedule could not be met before.
    """

    path: str
    run: str
    ranks: int
    steps: int
    decisions: list[str] = field(default_factory=list)
    outputs: list[str] = field(default_factory=list)
    tokens: list[str] = field(default_factory=list)
    not_comparable: str = ""
    not_reached: int = 0

    @property
    def met(self) -> bool:
        """Whether every decision was met and, where that can be judged, every checksum and token."""
        differ = bool(self.outputs or self.tokens) and not self.not_comparable
        return not (self.decisions or self.not_reached or differ)

    def as_json(self) -> dict[str, Any]:
        return {"met": self.met, **dataclasses.asdict(self)}

    def render(self) -> str:
        """The report for people."""
        lines = [f"Replay of {self.path}: run {self.run}, {self.steps} steps on {self.ranks} rank(s)."]
        lines += _verdict("Decisions", self.decisions, "met on every rank and step")
        if self.not_reached:
            lines.append(f"  {self.not_reached} steps were not reached.")
        if self.not_comparable:
            lines.append(f"Output checksums: not comparable: {self.not_comparable}.")
        elif not self.not_reached:
            lines += _verdict("Output checksums", self.outputs, "met on every rank and step")
            lines += _verdict("Tokens", self.tokens, "equal to the recorded ones")
        return "\n".join(lines)


def _verdict(what: str, differences: list[str], fine: str) -> list[str]:
    if not differences:
        return [f"{what}: {fine}."]
    more = [f"  and {len(differences) - SHOWN} more"] if len(differences) > SHOWN else []
    return [f"{what}: NOT met, {len(differences)} differ:", *(f"  {text}" for text in differences[:SHOWN]), *more]


def plan_replay(path: str | Path, *, model: str | Path | None = None, run: str | None = None) -> ReplayPlan:
    """Read a trace and make the job that repeats one of its runs.

    Args:
        path: the trace; it may be of a run that was interrupted.
        model: checkpoint folder; default: where the trace found it, or the packaged one if that is gone.
        run: "dbo", "thread", "unsplit", "dbo-graph" or "unsplit-graph"; default: the run with the recorded carrier.

    Raises:
        TraceFileError: not a trace of `dbo-greenlet run`, without the steps that are asked for, or with a prompt, an
            arrival, a sampled token or a model path that no run writes.
        ScheduleDecodeError: a schedule in it is mistyped.
    """
    trace = read_trace(path)
    # A replay writes no trace, so it has no use for a timeline.
    settings = dataclasses.replace(_settings(trace), gpu_timeline=False, memory=False)
    requests = _requests(trace)
    run = RUN_OF_CARRIER[settings.carrier] if run is None else run
    ranks = range(settings.ranks)
    numbers = sorted({step for name, step, _ in trace.steps if name == run})
    whole = [n for n in numbers if all(_is_complete(trace.steps.get((run, n, rank))) for rank in ranks)]
    # A run that died leaves a last step that only some ranks finished.
    if not whole:
        names = ", ".join(trace.runs)
        held = f"it holds run{'s' if len(trace.runs) > 1 else ''} {names}" if names else "it holds none"
        raise TraceFileError(f"{path} has no step of run {run} that all {len(ranks)} ranks recorded; {held}")
    carrier = next((c for c, name in RUN_OF_CARRIER.items() if name == run), settings.carrier)
    if run in GRAPH_RUNS and (why := settings.no_graphs):
        raise TraceFileError(f"{path}: run {run} has graphs, and its settings rule them out: {why}")
    mode = "never" if run in ("unsplit", "unsplit-graph") else "auto"
    only = Pass(run, mode, carrier, last_step=whole[-1], graphs=run in GRAPH_RUNS)
    spec = JobSpec(
        settings,
        _model_folder(trace, model),
        str(path),
        requests,
        (only,),
        model_sha256=str(trace.header.model.get("sha256", "")),
    )
    recorded = {(n, rank): _record(trace.steps[run, n, rank]) for n in whole for rank in ranks}
    _check_sampled(trace.path, recorded.values(), spec.model)
    specs = [
        dataclasses.replace(spec, recorded={n: _recorded_step(trace.steps[run, n, rank]) for n in whole})
        for rank in ranks
    ]
    return ReplayPlan(trace, run, spec, specs, recorded)


def replay(
    plan: ReplayPlan,
    follow: Callable[[int, Message], None] | None = None,
    *,
    rank_main: Callable[[JobSpec, int, Connection, str], None] = rank_main,
) -> ReplayReport:
    """Run the plan and compare. Raises what `run_job` raises, but for `ReplayMismatch`, which becomes a finding.

    Args: `follow` and `rank_main` as `run_job` has them.
    """
    steps = sorted({step for step, _ in plan.recorded})
    report = ReplayReport(plan.trace.path, plan.run, plan.spec.settings.ranks, len(steps))
    found = JobResult(plan.spec)

    def take(rank: int, message: Message) -> None:
        found.take(rank, message)
        if isinstance(message, Lines) and rank == 0:
            report.not_comparable = _why_not_comparable(plan.trace.header, message)
        if follow is not None:
            follow(rank, message)

    try:
        run_job(plan.spec, specs=plan.specs, follow=take, rank_main=rank_main)
    except ReplayMismatch as error:
        report.decisions.append(str(error))
    now = {(record.step, record.rank): record for record in found.steps}
    for key, record in plan.recorded.items():
        if key in now:
            _compare(record, now[key], report)
    report.decisions += [
        f"step {step}, rank {rank}: it took place, and the recorded run had no such step"
        for step, rank in sorted(now.keys() - plan.recorded.keys())
    ]
    report.not_reached = len({step for step, _ in plan.recorded.keys() - now.keys()})
    return report


def _compare(then: StepRecord, now: StepRecord, report: ReplayReport) -> None:
    where = f"step {then.step}, rank {then.rank}"
    if then.votes != now.votes:
        report.decisions.append(f"{where}: the votes were {json.dumps(then.votes)}, they are {json.dumps(now.votes)}")
    if (then.split, then.reason) != (now.split, now.reason):
        report.decisions.append(f"{where}: recorded {_decision(then)}, now {_decision(now)}")
    elif then.slices != now.slices:
        report.decisions.append(f"{where}: recorded slices {then.slices}, now {now.slices}")
    elif then.schedule != now.schedule:
        report.decisions.append(f"{where}: recorded schedule {then.schedule}, now {now.schedule}")
    elif then.hash != now.hash:
        report.decisions.append(f"{where}: recorded schedule hash {then.hash}, now {now.hash}")
    if then.execution and then.execution != now.execution:
        report.decisions.append(f"{where}: recorded as {then.execution}, now {now.execution or 'eager'}")
    if then.output != now.output:
        report.outputs.append(f"{where}: recorded {then.output}, now {now.output}")
    if then.sampled != now.sampled:
        report.tokens.append(f"{where}: recorded {then.sampled}, now {now.sampled}")


def _decision(record: StepRecord) -> str:
    return f"{'split' if record.split else 'not split'} ({record.reason})"


def _why_not_comparable(then: HeaderRecord, message: Lines) -> str:
    now = json.loads(message.lines.split(b"\n", 1)[0])
    differences = []
    for name, old, new in (
        ("dbo_greenlet", then.package, now["package"]),
        ("torch", then.torch, now["torch"]),
        ("processor", then.settings.get("processor"), now["settings"].get("processor")),
        ("threads", then.threads, now["threads"]),
    ):
        if old != new:
            differences.append(f"{name} was {old}, here it is {new}")
    return ", ".join(differences)


# -- out of the trace --------------------------------------------------------------------------------------------------


def _settings(trace: Trace) -> Settings:
    if "program" in trace.header.settings:
        raise TraceFileError(
            f"{trace.path}: of a process that was recorded (`dbo-greenlet record`, or a server), which keeps no "
            "prompts, so there is nothing to replay it from; `dbo-greenlet run --trace` writes what can be replayed"
        )
    try:
        settings = Settings.from_json(trace.header.settings)
    except TraceFileError as error:
        raise TraceFileError(f"{trace.path} is no trace of dbo-greenlet run that can be replayed: {error}") from None
    settings.check()
    missing = sorted(set(range(settings.ranks)) - set(trace.headers))
    if missing:
        raise TraceFileError(f"{trace.path} lacks the header of rank {', '.join(map(str, missing))}")
    return settings


def _requests(trace: Trace) -> tuple[Request, ...]:
    prompts = sorted(trace.prompts, key=lambda prompt: prompt.request)
    if not prompts or [prompt.request for prompt in prompts] != list(range(len(prompts))):
        raise TraceFileError(f"{trace.path} does not hold all prompts of its run; it cannot be replayed")
    for prompt in prompts:
        if not prompt.text:
            raise TraceFileError(f"{trace.path}: the text of prompt {prompt.request} is empty")
        if prompt.arrival < 0:
            raise TraceFileError(
                f"{trace.path}: prompt {prompt.request} arrives at step {prompt.arrival}, expected a step: 0 or more"
            )
    return tuple(
        Request(prompt.request, prompt.request + 1, str(prompt.request), prompt.text, None, prompt.arrival)
        for prompt in prompts
    )


def _model_folder(trace: Trace, given: str | Path | None) -> str:
    if given is not None:
        return str(given)
    recorded = trace.header.model.get("path")
    if not isinstance(recorded, str) or not recorded:
        # An empty path would be the current folder.
        raise TraceFileError(
            f'{trace.path}: the model in the header has no "path"; name the checkpoint\'s folder with --model'
        )
    # The hash is checked either way, so trying the packaged one can do no harm.
    return recorded if Path(recorded).is_dir() else str(PACKAGED_MODEL)


def _check_sampled(path: str, records: Iterable[StepRecord], model: str) -> None:
    """Sampled tokens become the input of the next step, so each must be one of the model's."""
    size = _vocabulary(model)
    for record in records:
        for token in record.sampled:
            if token < NOT_SAMPLED or (size is not None and token >= size):
                known = "0 or more" if size is None else f"0 to {size - 1}, the tokens of the model in {model}"
                raise TraceFileError(
                    f"{path}: step {record.step} of run {record.run} on rank {record.rank} sampled token {token}, "
                    f"expected {known}"
                )


def _vocabulary(model: str) -> int | None:
    """Number of token ids; None where config.json does not tell: the ranks then say what is wrong with the model."""
    try:
        config = json.loads((Path(model) / "config.json").read_bytes())
    except (OSError, ValueError, RecursionError):
        return None
    size = config.get("vocab_size") if isinstance(config, dict) else None
    return size if type(size) is int else None


def _is_complete(step: StepTrace | None) -> bool:
    return step is not None and step.record is not None and step.record.error is None


def _record(step: StepTrace) -> StepRecord:
    if step.record is None:
        raise TraceFileError(f"step {step.step} of rank {step.rank} has no record")
    return step.record


def _recorded_step(step: StepTrace) -> RecordedStep:
    record = _record(step)
    if not record.schedule or record.execution == "replayed":
        return RecordedStep(None, record.sampled)
    schedule = Schedule.decode(record.schedule)
    sites = step.sites if len(step.sites) == len(schedule) else ()
    return RecordedStep(dataclasses.replace(schedule, sites=sites), record.sampled)
