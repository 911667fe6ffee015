"""The instrument that writes down what the scheduler does.

    recorder = StepRecorder()
    scheduler = Scheduler(instruments=[recorder])
    result = scheduler.run(entries)
    writer.write(step_record, *recorder.records(step=0, rank=0, run="dbo"))

While a step runs it only appends tuples (half a microsecond a slice); records are made of them afterwards, outside the
step, when somebody asks. A scheduler without it pays nothing.
"""

from __future__ import annotations

import os
import platform
import sys
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from datetime import datetime, timezone
from importlib import metadata
from json.encoder import encode_basestring_ascii as _quoted
from time import perf_counter_ns
from typing import TYPE_CHECKING, Any

from .._version import __version__
from .schema import HeaderRecord, RecvRecord, SliceRecord

if TYPE_CHECKING:
    from ..step import Microbatch, Step

__all__ = ["StepRecorder", "make_header"]

# Environment variables that change how a run behaves. Never the whole environment: it holds secrets.
_ENVIRONMENT = (
    "CUDA_DEVICE_MAX_CONNECTIONS",
    "CUDA_VISIBLE_DEVICES",
    "PYTHONHASHSEED",
    "VLLM_DBO_COMM_SMS",
    "VLLM_USE_V2_MODEL_RUNNER",
)
_ENVIRONMENT_PREFIXES = ("DBO_GREENLET_", "MKL_", "NCCL_", "OMP_")


class StepRecorder:
    """Records the slices and the in-flight windows of one step at a time.

    One recorder belongs to one scheduler that runs one step at a time; a step inside a step, or steps in two threads at
    once, need a recorder each.

    Args:
        clock: nanoseconds, monotonic.

    Attributes, all about the step that ran last:
        origin_ns: the clock's value at microsecond 0; fixed when the recorder is made.
        begin, end: microseconds around the step.
        error: what made it fail, as "Type: message", or None.
    """

    def __init__(self, *, clock: Callable[[], int] = perf_counter_ns) -> None:
        self.origin_ns = clock()
        self.begin = self.end = 0.0
        self.error: str | None = None
        self._clock = clock
        self._step_begin = 0
        self._slice_begin = 0
        self._running: Microbatch | None = None
        # (microbatch, slice number, site, begin, end, failed)
        self._slices: list[tuple[int, int, str, int, int, bool]] = []
        # (microbatch, slices ended so far, time)
        self._sends: list[tuple[int, int, int]] = []
        # (owner, by, slices ended so far, time)
        self._receives: list[tuple[int, int | None, int, int]] = []

    # -- what the scheduler calls ------------------------------------------------------------------------------------

    def before_step(self, step: Step) -> None:
        self._slices = []
        self._sends = []
        self._receives = []
        self._running = None
        self._step_begin = self._clock()

    def before_slice(self, microbatch: Microbatch) -> None:
        self._running = microbatch
        self._slice_begin = self._clock()

    def after_slice(self, microbatch: Microbatch) -> None:
        now = self._clock()
        self._running = None
        self._slices.append(
            (microbatch.index, microbatch.slice_number - 1, microbatch.site, self._slice_begin, now, False)
        )

    def recv_registered(self, microbatch: Microbatch) -> None:
        self._sends.append((microbatch.index, len(self._slices), self._clock()))

    def recv_ran(self, owner: Microbatch, by: int | None) -> None:
        self._receives.append((owner.index, by, len(self._slices), self._clock()))

    def after_step(self, step: Step, error: BaseException | None) -> None:
        now = self._clock()
        failed, self._running = self._running, None
        if failed is not None and error is not None:
            # The slice that raised never ended. Where the failure came from is what a reader looks for first.
            self._slices.append((failed.index, failed.slice_number, failed.site, self._slice_begin, now, True))
        self.begin = self._microseconds(self._step_begin)
        self.end = self._microseconds(now)
        self.error = None if error is None else f"{type(error).__name__}: {error}"

    # -- what the run asks for ---------------------------------------------------------------------------------------

    def records(self, *, step: int, rank: int = 0, run: str = "dbo") -> list[SliceRecord | RecvRecord]:
        """The step that ran last, as records: the slices as they ran, then the windows as they were sent."""
        us = self._microseconds
        out: list[SliceRecord | RecvRecord] = [
            SliceRecord(step, rank, run, index, number, site, us(begin), us(end), failed=failed)
            for index, number, site, begin, end, failed in self._slices
        ]
        out += [RecvRecord(step, rank, run, *window) for window in self._windows()]
        return out

    def json_lines(self, *, step: int, rank: int = 0, run: str = "dbo") -> bytes:
        """What `to_json` makes of these `records`, each line with its newline, several times faster.

        A server writes hundreds of them between two steps of its model; making a record for each line took nine times
        as long (scripts/bench_trace.py).
        """
        origin = self.origin_ns
        same = f'"step":{step},"rank":{rank},"run":{_quoted(run)},"ubatch":'
        slice_head, recv_head = f'{{"t":"slice",{same}', f'{{"t":"recv",{same}'
        sites: dict[str, str] = {}
        lines: list[str] = []
        for index, number, site, begin, end, failed in self._slices:
            quoted = sites.get(site)
            if quoted is None:
                quoted = sites[site] = _quoted(site)
            lines.append(
                f'{slice_head}{index},"slice":{number},"site":{quoted},"begin":{(begin - origin) / 1000!r},'
                f'"end":{(end - origin) / 1000!r},"stream":null,"failed":{"true" if failed else "false"}}}\n'
            )
        for owner, site, sent, by, at, decision, sent_in in self._windows():
            lines.append(
                f'{recv_head}{owner},"site":{sites.get(site) or _quoted(site)},"sent":{sent!r},'
                f'"by":{"null" if by is None else by},"at":{"null" if at is None else repr(at)},'
                f'"decision":{"null" if decision is None else decision},"sent_decision":{sent_in}}}\n'
            )
        return "".join(lines).encode("ascii")

    def _windows(self) -> Iterator[tuple[int, str, float, int | None, float | None, int | None, int]]:
        """(owner, site, sent, by, at, decision, sent_decision) of each window, in the order in which they were sent."""
        us = self._microseconds
        waiting: dict[int, deque[tuple[int | None, int, int]]] = {}
        for owner, by, decision, at in self._receives:
            waiting.setdefault(owner, deque()).append((by, decision, at))
        for owner, sent_in, sent in self._sends:
            site = self._slices[sent_in][2] if sent_in < len(self._slices) else ""
            # A microbatch's receives run in the order in which it registered them.
            if ran := waiting.get(owner):
                by, decision, at = ran.popleft()
                yield owner, site, us(sent), by, us(at), decision, sent_in
            else:
                yield owner, site, us(sent), None, None, None, sent_in

    def _microseconds(self, clock: int) -> float:
        return (clock - self.origin_ns) / 1000


def make_header(
    *,
    rank: int = 0,
    world: int = 1,
    threads: int = 0,
    model: Mapping[str, Any] | None = None,
    settings: Mapping[str, Any] | None = None,
    origin_ns: int = 0,
) -> HeaderRecord:
    """The header of a run of this process, with the versions and the environment filled in.

    Args:
        rank, world, threads, model, settings: as in `HeaderRecord`.
        origin_ns: the recorder's (`StepRecorder.origin_ns`).
    """
    return HeaderRecord(
        package=__version__,
        rank=rank,
        world=world,
        torch=_torch_version(),
        python=platform.python_version(),
        platform=platform.platform(),
        threads=threads,
        model=dict(model or {}),
        settings=dict(settings or {}),
        env={
            name: value
            for name, value in sorted(os.environ.items())
            if name in _ENVIRONMENT or name.startswith(_ENVIRONMENT_PREFIXES)
        },
        started=datetime.now(timezone.utc).isoformat(timespec="seconds"),
        origin_ns=origin_ns,
    )


def _torch_version() -> str:
    # What is loaded knows its build ("2.13.0+cpu"); what is only installed has a version. Nothing is imported for it.
    if (torch := sys.modules.get("torch")) is not None:
        return str(torch.__version__)
    try:
        return metadata.version("torch")
    except metadata.PackageNotFoundError:
        return ""
