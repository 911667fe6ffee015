"""Golden schedules: the order in which a step ran when somebody looked at it and found it right, as a file to commit.

    dbo-greenlet golden schedule, version 1
    microbatches 2
    policy round_robin
    hash 8f3a51c2d0e94b17
    decisions 6
         0  0  layer0.dispatch
         1  1  layer0.dispatch
         2  0  layer0.combine
         ...
         5  1  (returned)
    check 1f0c93ab

One decision a line: its number, the microbatch that ran, the site at which its slice ended. A site that could be taken
for something else stands as a JSON string. The check line is over everything before it: the file says what a program
did, so it is written by running the program and not by an editor. Line ends do not count (git may change them).
"""

from __future__ import annotations

import contextlib
import difflib
import hashlib
import json
import os
import re
from pathlib import Path
from typing import NamedTuple

from ..schedule import MAX_MICROBATCHES, Schedule
from .errors import GoldenFileError, GoldenMismatch

__all__ = ["Golden"]

VERSION = 1
_TITLE = "dbo-greenlet golden schedule, version "
_RETURNED = "(returned)"
_NOT_NAMED = "(not named)"
_PLAIN_POLICY = re.compile(r"[A-Za-z0-9_.:,=-]+")
_PLAIN = re.compile(r"[A-Za-z0-9_.:/@#\[\]<>-]+")
_CONTEXT = 3  # equal decisions shown before and after those that differ
_MOST_ROWS = 60
_WRITE = "write it with pytest --dbo-update-golden"
_ANEW = "write it anew with pytest --dbo-update-golden"


class Golden:
    """A golden file.

    Args:
        path: where it is, or will be.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)

    def read(self) -> tuple[Schedule, str]:
        """The schedule, with its sites, and the name of its policy.

        Raises:
            GoldenFileError: missing, no golden file, of another version, cut off, or edited by hand.
        """
        lines = self._lines()
        title = lines[0]
        if lines == [""]:
            raise GoldenFileError(f"{self.path} is empty; {_ANEW}")
        if not title.startswith(_TITLE):
            raise GoldenFileError(f"{self.path} is no golden schedule: its first line is {title[:60]!r}; {_ANEW}")
        version = title[len(_TITLE) :]
        if version != str(VERSION):
            raise GoldenFileError(
                f"{self.path} is a golden schedule of version {version[:12]!r} and this dbo_greenlet reads version "
                f"{VERSION}; {_ANEW}"
            )
        *body, last = lines
        if not last.startswith("check "):
            raise GoldenFileError(f"{self.path} is cut off or was edited by hand: it has no check line; {_ANEW}")
        if last != f"check {_check(body)}":
            raise GoldenFileError(
                f"{self.path} was edited by hand: its check line does not fit; restore it, or {_ANEW}"
            )
        return self._parse(body)

    def compare(self, schedule: Schedule, policy: str = "") -> None:
        """Pass if `schedule` is the golden one, decision by decision and site by site.

        Args:
            schedule: of the step that ran, with its sites.
            policy: name of its policy, for the message.

        Raises:
            GoldenMismatch: another order, other sites, or another N; the message is the difference.
            GoldenFileError: see `read`.
        """
        __tracebackhide__ = True  # to pytest, which would print this function above the difference
        golden, golden_policy = self.read()
        if golden != schedule:
            raise GoldenMismatch(_difference(self.path, golden, golden_policy, schedule, policy))

    def update(self, schedule: Schedule, policy: str = "") -> bool:
        """Write `schedule` as the golden one; False where the file says so already.

        Raises:
            GoldenFileError: the file cannot be written, or the schedule lacks its sites.
        """
        if len(schedule.sites) != len(schedule) or not len(schedule):
            raise GoldenFileError(
                f"the schedule for {self.path} has {len(schedule)} decisions and {len(schedule.sites)} sites: a golden "
                "schedule is of a step that ran to its end"
            )
        text = _text(schedule, policy)
        try:
            if self.path.exists() and "\n".join(self._lines()) + "\n" == text:
                return False
        except GoldenFileError:
            pass  # whatever is there is what is to be replaced
        # Whole or not at all: an interrupted update must not leave half a file, which would count as edited by hand.
        beside = self.path.with_name(f"{self.path.name}.{os.getpid()}.new")
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            beside.write_text(text, encoding="utf-8", newline="\n")
            beside.replace(self.path)
        except OSError as error:
            with contextlib.suppress(OSError):
                beside.unlink()
            raise GoldenFileError(f"{self.path} cannot be written: {error.strerror or error}") from None
        return True

    def _lines(self) -> list[str]:
        try:
            text = self.path.read_text(encoding="utf-8")
        except FileNotFoundError:
            raise GoldenFileError(f"{self.path} does not exist; {_WRITE}") from None
        except UnicodeDecodeError:
            raise GoldenFileError(f"{self.path} is no golden schedule: it is not UTF-8 text; {_ANEW}") from None
        except OSError as error:
            raise GoldenFileError(f"{self.path} cannot be read: {error.strerror or error}") from None
        return text.removesuffix("\n").split("\n")

    def _parse(self, body: list[str]) -> tuple[Schedule, str]:
        try:
            count = int(_after("microbatches ", body[1]))
            policy = _policy(_after("policy ", body[2]))
            wanted = _after("hash ", body[3])
            length = int(_after("decisions ", body[4]))
            rows = [line.split(maxsplit=2) for line in body[5:]]
            numbers = [int(number) for number, _, _ in rows]
            schedule = Schedule(
                count, tuple(int(index) for _, index, _ in rows), tuple(_site(word) for _, _, word in rows)
            )
        except (ValueError, IndexError):
            raise GoldenFileError(f"{self.path} is no golden schedule of version {VERSION}; {_ANEW}") from None
        fits = 1 <= count <= MAX_MICROBATCHES and all(0 <= index < count for index in schedule.decisions)
        if not fits or numbers != list(range(length)) or schedule.hash != wanted:
            raise GoldenFileError(f"{self.path} contradicts itself; {_ANEW}")
        return schedule, policy


def _text(schedule: Schedule, policy: str) -> str:
    body = [
        f"{_TITLE}{VERSION}",
        f"microbatches {schedule.count}",
        f"policy {_policy_word(policy)}",
        f"hash {schedule.hash}",
        f"decisions {len(schedule)}",
        *(
            f"{number:>6}  {index}  {_word(site)}"
            for number, (index, site) in enumerate(zip(schedule.decisions, schedule.sites, strict=True))
        ),
    ]
    return "\n".join([*body, f"check {_check(body)}", ""])


def _check(body: list[str]) -> str:
    return hashlib.blake2b("\n".join(body).encode(), digest_size=4).hexdigest()


def _after(prefix: str, line: str) -> str:
    if not line.startswith(prefix):
        raise ValueError(line)
    return line[len(prefix) :]


def _policy_word(name: str) -> str:
    if not name:
        return _NOT_NAMED
    return name if _PLAIN_POLICY.fullmatch(name) else json.dumps(name)


def _policy(word: str) -> str:
    return "" if word == _NOT_NAMED else _unquoted(word)


def _word(site: str) -> str:
    if not site:
        return _RETURNED
    # JSON's escapes are ASCII: a site with a line break, or one that only looks like another, is seen to be one.
    return site if _PLAIN.fullmatch(site) else json.dumps(site)


def _site(word: str) -> str:
    return "" if word == _RETURNED else _unquoted(word)


def _unquoted(word: str) -> str:
    # What begins like a JSON string is one, so nothing but a str comes out of it.
    return str(json.loads(word)) if word.startswith('"') else word


def _difference(path: Path, golden: Schedule, golden_policy: str, now: Schedule, policy: str) -> str:
    """What differs, in two columns with some context."""
    left, right = _words(golden), _words(now)
    rows = _rows(left, right)
    differing = sum(row.differs for row in rows)
    # Up to the first difference both sides have the same numbers.
    first = next((f"at decision {number}" for number, row in enumerate(rows) if row.differs), "in N")
    lines = [f"the schedule is not that of {path}; they part {first}:", ""]
    if golden.count != now.count:
        lines += [f"  microbatches: golden {golden.count}, this step {now.count}", ""]
    if policy and golden_policy != policy:
        lines += [f"  policy: golden {_policy_word(golden_policy)}, this step {_policy_word(policy)}", ""]
    shown = _with_context(rows)
    width = max([len("golden"), *(len(row.golden) for row in shown if row is not None)]) + 2
    lines.append(f"    {'golden':<{width}}  this step")
    for row in shown[:_MOST_ROWS]:
        text = "    ..." if row is None else f"  {'>' if row.differs else ' '} {row.golden:<{width}}  {row.now}"
        lines.append(text.rstrip())
    if len(shown) > _MOST_ROWS:
        lines.append(f"    ... and {len(shown) - _MOST_ROWS} more lines")
    lines += [
        "",
        f"{differing} of {max(len(left), len(right))} decisions differ; hash: golden {golden.hash}, this step "
        f"{now.hash}. If the new order is meant: pytest --dbo-update-golden",
    ]
    return "\n".join(lines)


class _Row(NamedTuple):
    """Both sides of one decision, "" where a side has none."""

    differs: bool
    golden: str
    now: str


def _rows(left: list[str], right: list[str]) -> list[_Row]:
    """Both sides, aligned: after one slice more or less the rest is the same again, only with other numbers."""
    rows = []
    for kind, i, i_end, j, j_end in difflib.SequenceMatcher(None, left, right, autojunk=False).get_opcodes():
        for offset in range(max(i_end - i, j_end - j)):
            here = _numbered(left, i + offset, i_end)
            rows.append(_Row(kind != "equal", here, _numbered(right, j + offset, j_end)))
    return rows


def _numbered(words: list[str], position: int, end: int) -> str:
    return f"{position:>4}  {words[position]}" if position < end else ""


def _words(schedule: Schedule) -> list[str]:
    sites = [*map(_word, schedule.sites), *["(not ended)"] * (len(schedule) - len(schedule.sites))]
    return [f"{index}  {site}" for index, site in zip(schedule.decisions, sites, strict=False)]


def _with_context(rows: list[_Row]) -> list[_Row | None]:
    """The rows that differ with some equal ones around them; None stands for those left out."""
    near = {
        position + offset
        for position, row in enumerate(rows)
        if row.differs
        for offset in range(-_CONTEXT, _CONTEXT + 1)
    }
    shown: list[_Row | None] = []
    for position, row in enumerate(rows):
        if position in near:
            shown.append(row)
        elif not shown or shown[-1] is not None:
            shown.append(None)
    return shown
