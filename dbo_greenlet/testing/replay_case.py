"""One run as a string that can be pasted into a shell: its decisions, its sites, and what was made to go wrong.

    dbor1:2;(01*5);(layer#.dispatch,layer#.combine*2+0),.|=;late@0.1:50us;3f0c91d2

    dbor1    version of the encoding
    2        number of microbatches; 2@3 is for the third step that a test runs, and 2 for each of them
    RUNS     the microbatch of each decision, as in `Schedule.encode`; a ? at the end: the last slice never ended
    SITES    where the slices of each microbatch ended, see `site_words`; empty: unknown
    FAULTS   what was made to go wrong; empty: nothing
    CHECK    eight hex characters over the rest, so that a mistyped or truncated string is refused

Within single quotes no shell takes any of it for its own. Blanks and line breaks, which a terminal may have put in, and
quotes around it do not count.
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from ..errors import ConfigurationError, ScheduleDecodeError
from ..schedule import MAX_MICROBATCHES, Schedule, compress_runs, expand_runs
from .errors import ReplayStringError
from .replay_policy import Replaying
from .site_words import pack_lists, pack_text, unpack_lists, unpack_text

if TYPE_CHECKING:
    from .step_run import StepRun

__all__ = ["ReplayCase"]

VERSION = 1
_DIGITS = "0123456789abcdefghijklmnopqrstuvwxyz"
_FAULT_CHARACTERS = "+,="


@dataclass(frozen=True)
class ReplayCase:
    """What it takes to run a step again.

    Attributes:
        schedule: N, the decisions, and the sites at which their slices ended. The last decision may lack its site: the
            step failed in that slice.
        faults: what was made to go wrong, as `str(Faults)` has it; "" for nothing.
        call: which step of a test it is, from 1; 0 for each of them.
    """

    schedule: Schedule
    faults: str = ""
    call: int = 0

    @classmethod
    def of(cls, run: StepRun, last: int | None = None, *, call: int = 0) -> ReplayCase:
        """The case of a run.

        Args:
            run: what came of it; it may have failed.
            last: the microbatch whose slice did not end; default: the one that failed, if one did.
            call: which step of a test it was.
        """
        schedule, last = run.schedule, run.failed if last is None else last
        if last is not None:
            schedule = Schedule(schedule.count, (*schedule.decisions, last), schedule.sites)
        return cls(schedule, run.faults, call)

    def for_call(self, call: int) -> ReplayCase:
        """The same for one step of a test, from 1; 0 for each."""
        return replace(self, call=call)

    def encode(self) -> str:
        """The string; `decode` gives back an equal case.

        Raises:
            ConfigurationError: a schedule with neither all its sites, nor all but the last, nor none; or a microbatch
                that is not below N.
        """
        schedule = self.schedule
        missing = len(schedule) - len(schedule.sites)
        if schedule.sites and missing not in (0, 1):
            raise ConfigurationError(
                f"a schedule of {len(schedule)} decisions and {len(schedule.sites)} sites is no step; give all sites, "
                "all but the last, or none"
            )
        if not 1 <= schedule.count <= MAX_MICROBATCHES or any(not 0 <= i < schedule.count for i in schedule.decisions):
            raise ConfigurationError(
                f"a schedule of {schedule.count} microbatches with decisions for {sorted(set(schedule.decisions))} is "
                f"no step; N is 1 to {MAX_MICROBATCHES}"
            )
        runs = compress_runs("".join(_DIGITS[index] for index in schedule.decisions))
        sites = ""
        if schedule.sites:
            runs += "?" * missing
            sites = pack_lists(_by_microbatch(schedule))
        count = f"{schedule.count}@{self.call}" if self.call else str(schedule.count)
        body = f"dbor{VERSION}:{count};{runs};{sites};{pack_text(self.faults, _FAULT_CHARACTERS)}"
        return f"{body};{_check(body)}"

    @classmethod
    def decode(cls, text: str) -> ReplayCase:
        """Read what `encode` wrote.

        Raises:
            ReplayStringError: no replay string, of another version, truncated, or mistyped.
        """
        text = _without_wrapping(text)
        _check_version(text)
        body, _, check = text.rpartition(";")
        fields = body.partition(":")[2].split(";")
        if _check(body) != check or len(fields) != 4:
            raise ReplayStringError(
                "the replay string is truncated or mistyped (its check characters do not match); copy it whole, in "
                "single quotes"
            )
        count, call = _read_count(fields[0])
        decisions = _read_runs(fields[1], count)
        sites = _read_sites(fields[2], decisions, count, int(fields[1].endswith("?")))
        return cls(Schedule(count, decisions, sites), unpack_text(fields[3]), call)

    def policy(self) -> Replaying:
        """A policy that makes the decisions again; see `Replaying` for what it raises and when."""
        return Replaying(self.schedule)

    def __str__(self) -> str:
        return self.encode()


def _by_microbatch(schedule: Schedule) -> list[list[str]]:
    lists: list[list[str]] = [[] for _ in range(schedule.count)]
    for index, site in zip(schedule.decisions, schedule.sites, strict=False):
        lists[index].append(site)
    return lists


def _without_wrapping(text: str) -> str:
    text = "".join(text.split())
    if len(text) > 1 and text[0] == text[-1] and text[0] in "'\"":
        text = text[1:-1]
    return text


def _check_version(text: str) -> None:
    match = re.match(r"dbor(\d+):", text, re.ASCII)
    if match is None:
        hint = "; this is a schedule string, which has no sites" if text.startswith("dbo1:") else ""
        raise ReplayStringError(
            f"a replay string begins with 'dbor{VERSION}:' and this begins with {text[:12]!r}{hint}"
        )
    if match[1] != str(VERSION):
        raise ReplayStringError(
            f"the replay string is of version {match[1][:12]} of the encoding and this dbo_greenlet reads version "
            f"{VERSION}; use the dbo_greenlet that printed it, or let the test fail again with this one"
        )


def _read_count(text: str) -> tuple[int, int]:
    match = re.fullmatch(r"([1-9]\d?)(?:@([1-9]\d{0,8}))?", text, re.ASCII)
    if match is None or int(match[1]) > MAX_MICROBATCHES:
        raise ReplayStringError(f"the replay string is for {text[:20]!r} microbatches; N is 1 to {MAX_MICROBATCHES}")
    return int(match[1]), int(match[2] or 0)


def _read_runs(text: str, count: int) -> tuple[int, ...]:
    try:
        decisions = tuple(map(_DIGITS.index, expand_runs(text.removesuffix("?"))))
    except ScheduleDecodeError as error:
        raise ReplayStringError(f"the replay string cannot be read: {error}") from None
    if any(index >= count for index in decisions):
        raise ReplayStringError(f"the replay string names a microbatch that is not below its N = {count}")
    return decisions


def _read_sites(text: str, decisions: tuple[int, ...], count: int, missing: int) -> tuple[str, ...]:
    if not text:
        return ()
    ended = decisions[: len(decisions) - missing]
    lists = unpack_lists(text, [ended.count(index) for index in range(count)])
    following = [iter(each) for each in lists]
    return tuple(next(following[index]) for index in ended)


def _check(body: str) -> str:
    return hashlib.blake2b(body.encode(errors="surrogatepass"), digest_size=4).hexdigest()
