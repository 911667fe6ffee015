"""One step's decisions: the schedule, its hash, and a short string that carries it.

Law 5: the schedule is a function of the policy, its seed and the sequence of yield points. It is therefore the same on
every rank, eager or captured, and its hash says so in sixteen characters.

The string form, `dbo1:N:RUNS:CHECK`:

    dbo1     version of the encoding
    N        number of microbatches, decimal
    RUNS     the picked microbatches in order, base 36, one character each; a repeated group is written (group*times)
    CHECK    six hex characters over the rest, so that a mistyped or truncated string is refused

for example `dbo1:2:(01*25):9a41c2` for two microbatches with 24 yields each under round robin.
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass

from .errors import ScheduleDecodeError

__all__ = ["MAX_MICROBATCHES", "Schedule", "compress_runs", "expand_runs"]

VERSION = "dbo1"
_DIGITS = "0123456789abcdefghijklmnopqrstuvwxyz"
# One character per microbatch in the string form. Nobody splits a step 36 times: the weights are read once per slice.
MAX_MICROBATCHES = len(_DIGITS)
# A bound on what a typed string may expand to, so that "(01*99999999999)" is an error and not a memory hog.
_MAX_DECISIONS = 50_000_000


@dataclass(frozen=True)
class Schedule:
    """The decisions of one step.

    Attributes:
        count: number of microbatches N.
        decisions: the microbatch that ran, slice by slice.
        sites: the yield site at which each of these slices ended, "" where the microbatch returned. Empty when the
            schedule was decoded from its string form, which does not carry the sites.
    """

    count: int
    decisions: tuple[int, ...]
    sites: tuple[str, ...] = ()

    @property
    def hash(self) -> str:
        """Sixteen hex characters (BLAKE2b) over N, the decisions and the sites.

        A schedule decoded from its string form has no sites, and so another hash than the one it was encoded from.
        """
        digest = hashlib.blake2b(digest_size=8)
        digest.update(f"{self.count}|{','.join(map(str, self.decisions))}|".encode())
        # A site is whatever the model gave: a name from a badly decoded file may hold half of a surrogate pair.
        digest.update("\x00".join(self.sites).encode(errors="surrogatepass"))
        return digest.hexdigest()

    @property
    def yields(self) -> tuple[int, ...]:
        """Number of yields of each microbatch: its slices, less the one in which it returned."""
        slices = [0] * self.count
        for index in self.decisions:
            slices[index] += 1
        return tuple(max(0, n - 1) for n in slices)

    def encode(self) -> str:
        """The short string form; `decode` gives back everything but the sites."""
        body = f"{VERSION}:{self.count}:{compress_runs(''.join(_DIGITS[i] for i in self.decisions))}"
        return f"{body}:{_check(body)}"

    @classmethod
    def decode(cls, text: str) -> Schedule:
        """Read what `encode` wrote.

        Raises:
            ScheduleDecodeError: another version, truncated, mistyped, or an index that is not below N.
        """
        text = text.strip()
        version = text.split(":", 1)[0]
        if version != VERSION:
            raise ScheduleDecodeError(
                f"schedule string starts with {version[:12]!r}; this version of dbo_greenlet reads {VERSION!r}"
            )
        body, _, check = text.rpartition(":")
        match = re.fullmatch(rf"{VERSION}:(\d{{1,2}}):([0-9a-z()*]*)", body)
        if match is None or _check(body) != check:
            raise ScheduleDecodeError(
                "schedule string is truncated or mistyped (its check characters do not match); copy it whole"
            )
        count = int(match[1])
        decisions = tuple(_DIGITS.index(c) for c in expand_runs(match[2]))
        if not 1 <= count <= MAX_MICROBATCHES or any(i >= count for i in decisions):
            raise ScheduleDecodeError(f"schedule string names a microbatch that is not below its N = {count}")
        return cls(count, decisions)

    def __len__(self) -> int:
        return len(self.decisions)


def _check(body: str) -> str:
    return hashlib.blake2b(body.encode(), digest_size=3).hexdigest()


def compress_runs(text: str) -> str:
    """RUNS of the string form, from one base 36 digit for each decision; `expand_runs` undoes it."""
    # Greedy run-length coding of groups of one to four characters: a round robin of N <= 4 becomes one group. It is
    # no good compressor and need not be; a schedule that does not repeat is the information.
    out: list[str] = []
    position = 0
    while position < len(text):
        best_width, best_times = 1, 1
        for width in range(1, 5):
            group = text[position : position + width]
            if len(group) < width:
                break
            times = 1
            while text.startswith(group, position + times * width):
                times += 1
            if times > 1 and times * width > best_times * best_width:
                best_width, best_times = width, times
        group = text[position : position + best_width]
        repeated = f"({group}*{best_times})"
        plain = group * best_times
        out.append(repeated if len(repeated) < len(plain) else plain)
        position += best_width * best_times
    return "".join(out)


def expand_runs(text: str) -> str:
    """One base 36 digit for each decision, from RUNS of the string form.

    Raises:
        ScheduleDecodeError: a character that is none of RUNS', or more decisions than a step can have.
    """
    out: list[str] = []
    length = 0
    for match in re.finditer(r"\(([0-9a-z]+)\*(\d{1,9})\)|([0-9a-z]+)|(.)", text):
        if match[4]:
            raise ScheduleDecodeError(f"schedule string has an unexpected {match[4]!r}")
        group, times = (match[1], int(match[2])) if match[1] else (match[3], 1)
        length += len(group) * times
        if length > _MAX_DECISIONS:
            raise ScheduleDecodeError(f"schedule string stands for more than {_MAX_DECISIONS} decisions")
        out.append(group * times)
    return "".join(out)
