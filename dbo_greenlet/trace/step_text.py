"""One recorded step as text: what it was, its timetable, and where there is none, why and its slices one by one."""

from __future__ import annotations

import textwrap
from collections.abc import Collection

from ..errors import ScheduleDecodeError
from ..schedule import Schedule
from .notation import Receive, is_high_throughput, order, why_no_notation
from .reader import StepTrace
from .timetable import render_order

__all__ = ["LEGEND", "StepTexts", "render_step"]

LEGEND = (
    "A0 attention projections, A1 attention + output projection + gate, MLP routed experts, S shared expert, "
    "D dispatch, C combine; _i microbatch; in, L, out layers without yields; * no sibling ran the receive before its "
    "owner was resumed"
)

HIGH_THROUGHPUT = (
    "high throughput: send is the event that a dispatch or combine waits for, recv the compute stream's wait for it; "
    "what is in flight at once, the communication stream runs in turn"
)

GPU_ONLY = (
    "no slices on the host: the order is that of its slices on the GPU, with the receives where the rule of the ring "
    "has them"
)


def render_step(
    step: StepTrace, *, layers: Collection[int] | None = None, width: int = 100, shared_expert: bool = True
) -> str:
    """A recorded step as text: a heading, the timetable, the legend.

    A step that was not split says why, and how long it took; one whose sites are no dispatches and combines is listed
    slice by slice, with the reason. What a growing or cut trace does not hold (yet) is said; without slices there are
    no sites to draw a timetable from, and then the microbatches are listed in the order of the recorded schedule.

    Args:
        step: from `read_trace`.
        layers: layers to show; None shows all.
        width: characters a line, at least 40.
        shared_expert: whether the model has one (S in the timetable).

    Raises:
        ConfigurationError: none of `layers` is in the step.
    """
    body = _body(step, layers, width, shared_expert)
    return "\n".join([_heading(step), *body])


class StepTexts:
    """`render_step` for many steps: those that ran alike share the drawing, which is nearly all of the work.

    A server's trace has thousands of steps and a handful of schedules.
    """

    def __init__(self, *, width: int = 100) -> None:
        self._width = width
        self._bodies: dict[tuple[object, ...], list[str]] = {}

    def render(self, step: StepTrace) -> tuple[str, str]:
        """The heading, and what comes below it."""
        if not step.slices and not step.gpu:
            return _heading(step), "\n".join(_body(step, None, self._width, True))
        record = step.record
        key = (
            step.decisions,
            step.sites,
            bool(step.slices),
            tuple((r.ubatch, r.by, r.decision, r.site) for r in step.receives_as_run),
            tuple((s.ubatch, s.slice) for s in step.slices if s.failed),
            None if record is None else (record.error, sum(record.yields) + len(record.yields)),
        )
        body = self._bodies.get(key)
        if body is None:
            body = self._bodies[key] = _body(step, None, self._width, True)
        return _heading(step), "\n".join(body)


def _body(step: StepTrace, layers: Collection[int] | None, width: int, shared_expert: bool) -> list[str]:
    lines = []
    if step.record is not None and step.record.error:
        lines.append(f"failed: {step.record.error}")
    lines += [f"microbatch {s.ubatch} failed in its slice {s.slice}" for s in step.slices if s.failed]
    decisions, sites = step.decisions, step.sites
    if not step.slices and not step.gpu:
        return lines + _without_slices(step, width)
    lines += _what_is_missing(step)
    receives: list[Receive] | None = None
    if step.slices:
        receives = [Receive(r.ubatch, r.by, r.decision) for r in step.receives_as_run if r.decision is not None]
    else:
        lines += _wrapped(GPU_ONLY, width)
    if why := why_no_notation(decisions, sites):
        lines.append(f"no timetable: {why}; its slices, in the order in which they ran:")
        lines += _slice_list(step)
    else:
        lines += [
            "",
            render_order(order(decisions, sites, receives, shared_expert=shared_expert), layers=layers, width=width),
            "",
            *_wrapped(LEGEND, width),
            *(_wrapped(HIGH_THROUGHPUT, width) if is_high_throughput(sites) else ()),
        ]
    return lines


def _length(step: StepTrace) -> list[str]:
    """How long a step took of which nothing else was timed."""
    record = step.record
    if record is None or record.begin is None or record.end is None:
        return []
    return [f"took {(record.end - record.begin) / 1000:.3f} ms"]


def _without_slices(step: StepTrace, width: int) -> list[str]:
    record = step.record
    if record is None:
        return ["its record and its slices are not in the trace (yet)"]
    reason = f": {record.reason}" if record.reason else ""
    if not record.split:
        return [f"not split{reason}", *_length(step)]
    if record.execution == "replayed":
        return [f"split{reason}; replayed from its graph, which runs no slices on the host"]
    lines = [f"split{reason}; its slices are not in the trace (yet)"]
    if record.schedule:
        try:
            turns = " ".join(map(str, Schedule.decode(record.schedule).decisions))
        except ScheduleDecodeError as error:
            return [*lines, f"its schedule cannot be read: {error}"]
        head = "microbatches in the order in which they ran: "
        lines += textwrap.wrap(head + turns, max(width, 40), subsequent_indent="  ")
    return lines


def _what_is_missing(step: StepTrace) -> list[str]:
    """A step's slices stand behind its record and its receives behind these, so a cut trace lacks the last of them."""
    record = step.record
    if record is None or record.error is not None:
        return []  # A failed step stopped anywhere: nothing says how much of it there should be.
    slices = sum(record.yields) + len(record.yields)
    if len(step.decisions) < slices:
        return [f"only {len(step.decisions)} of its {slices} slices are in the trace (yet)"]
    return []


def _heading(step: StepTrace) -> str:
    text = f"step {step.step}, rank {step.rank}, run {step.run}"
    if step.record is not None:
        # Of a bare Scheduler nobody says how many.
        text += f": {step.record.tokens} tokens" if step.record.tokens else ": tokens not known"
    if step.slices or step.gpu:
        text += f"{',' if step.record is not None else ':'} {step.count} microbatches, {len(step.decisions)} slices"
    if step.record is not None and step.record.hash:
        text += f", schedule hash {step.record.hash}"
    if step.record is not None and step.record.execution:
        text += f", {step.record.execution}"
    return text


def _wrapped(text: str, width: int) -> list[str]:
    lines: list[str] = []
    line = ""
    for word in text.split(" "):
        if line and len(line) + 1 + len(word) > max(width, 40):
            lines.append(line)
            line = word
        else:
            line = f"{line} {word}" if line else word
    return [*lines, line]


def _slice_list(step: StepTrace) -> list[str]:
    received: dict[int, list[str]] = {}
    for receive in step.receives_as_run:
        if receive.decision is not None:
            whose = "its own receive" if receive.by is None else f"the receive of microbatch {receive.ubatch}"
            received.setdefault(receive.decision, []).append(f"{whose} ({receive.site})")
    ran = [(s.ubatch, s.slice, s.site, s.failed) for s in step.slices]
    if not ran:
        ran = [(s.ubatch, s.slice, s.site, False) for s in step.gpu if s.stream == "compute"]
    lines = []
    for position, (index, number, site, failed) in enumerate(ran):
        ending = "failed" if failed else f"to {site}" if site else "returned"
        runs = "".join(f", ran {what}" for what in received.get(position, ()))
        lines.append(f"{position:5}  microbatch {index}  slice {number:3}  {ending}{runs}")
    return lines
