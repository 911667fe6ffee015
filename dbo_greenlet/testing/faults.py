"""What is to go wrong in a run: a value with a short string form, so that every failure that it brings comes again.

    raise@1.3               microbatch 1 raises `InjectedFault` in place of its yield 3
    late@0.1:50us           what microbatch 0 sent as its transfer 1 arrives 50 us later
    early@0.1               it arrives as soon as it has left
    reorder@0.1             it is overtaken by the one that is sent next
    fail@0.2                its receive raises `InjectedFault` in place of completing
    empty@1                 microbatch 1 has no tokens
    oom@0.2                 from its allocation 2 on, the step finds the allocator exhausted
    signal@1.2:INT          the process gets SIGINT at yield 2 of microbatch 1
    die@rank1:step3         the process of rank 1 ends at its first collective of step 3
    stall@rank1:step3:2s    it comes 2 s late to it; `step3.2` is the third collective of that step

Several are joined by "+". All numbers count from 0: yield k of a microbatch is the one that ends its slice k, transfer
k the one of its k-th send part. Times have the units ns, us, ms and s.

`run_step(build, policy, faults=Faults.parse("raise@1.3"))` applies the first eight; `testing.rank_faults` the last two,
between real processes. Each strikes once, on the real scheduler, carrier and device (`testing.faulty_microbatch` says
how). Two of them need the step's help, which `bed.faults` gives: a step asks `tokens(i, normal)` for the size of a
microbatch, and says `allocating(i)` before it allocates, unless the device does both (`VirtualDevice.new_buffer`).

A signal is handled by the main thread. With `carrier="thread"` that thread waits meanwhile, and when it hears of the
signal is the system's affair: the error comes again, the schedule up to it may be another one. On greenlets both come
again.

A fault that the run never came to has not struck, and the run is then like any other: `struck` and `missed` say which.
"""

from __future__ import annotations

import random
import re
import signal
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..errors import ConfigurationError
from .errors import FaultStringError, InjectedFault
from .sometimes import sometimes

if TYPE_CHECKING:
    from ..scheduler import Scheduler
    from ..step import Microbatch
    from .step_run import TestBed

__all__ = ["KINDS", "Fault", "Faults", "exhaust"]

_YIELD = r"(?P<microbatch>\d{1,6})\.(?P<number>\d{1,6})"
_TIME = r":(?P<time>\d{1,12}(?:\.\d{1,9})?(?:ns|us|ms|s))"
_STEP = r"rank(?P<rank>\d{1,6}):step(?P<step>\d{1,9})(?:\.(?P<collective>\d{1,6}))?"
_UNITS = {"s": 1_000_000_000, "ms": 1_000_000, "us": 1_000, "ns": 1}

# kind -> (what stands behind the "@", an example, what it does)
KINDS: dict[str, tuple[str, str, str]] = {
    "raise": (_YIELD, "raise@1.3", "microbatch 1 raises at its yield 3"),
    "late": (_YIELD + _TIME, "late@0.1:50us", "transfer 1 of microbatch 0 arrives 50 us later"),
    "early": (_YIELD, "early@0.1", "transfer 1 of microbatch 0 arrives at once"),
    "reorder": (_YIELD, "reorder@0.1", "transfer 1 of microbatch 0 is overtaken by the next one"),
    "fail": (_YIELD, "fail@0.2", "the receive of transfer 2 of microbatch 0 raises"),
    "empty": (r"(?P<microbatch>\d{1,6})", "empty@1", "microbatch 1 has no tokens"),
    "oom": (_YIELD, "oom@0.2", "no memory is left from allocation 2 of microbatch 0 on"),
    "signal": (_YIELD + r":(?P<signal>[A-Z0-9]{1,12})", "signal@1.2:INT", "SIGINT at yield 2 of microbatch 1"),
    "die": (_STEP, "die@rank1:step3", "rank 1 ends at its first collective of step 3"),
    "stall": (_STEP + _TIME, "stall@rank1:step3:2s", "rank 1 is 2 s late there"),
}
# What a microbatch can meet and the suite survives in one process: what `random` draws unless it is told otherwise.
_DRAWN = ("raise", "late", "early", "reorder", "fail", "empty", "oom", "signal")


@dataclass(frozen=True, repr=False)
class Fault:
    """One thing to go wrong; `str()` is its form in a fault string.

    Attributes: `kind` (a key of `KINDS`); `microbatch` and `number` (which yield, transfer or allocation of it), or
    `rank`, `step` and `collective`; `nanoseconds` (late, stall); `signal` (a name without "SIG"). What a kind does not
    have is None, "" or 0.
    """

    kind: str
    microbatch: int | None = None
    number: int | None = None
    rank: int | None = None
    step: int | None = None
    collective: int = 0
    nanoseconds: int = 0
    signal: str = ""

    @property
    def microseconds(self) -> float:
        return self.nanoseconds / 1000

    @property
    def seconds(self) -> float:
        return self.nanoseconds / 1e9

    def __str__(self) -> str:
        if self.rank is not None:
            text = f"{self.kind}@rank{self.rank}:step{self.step}" + (f".{self.collective}" if self.collective else "")
        else:
            text = f"{self.kind}@{self.microbatch}" + ("" if self.number is None else f".{self.number}")
        if self.kind in ("late", "stall"):
            text += f":{_in_largest_unit(self.nanoseconds)}"
        return text + (f":{self.signal}" if self.signal else "")

    def __repr__(self) -> str:
        return f"<fault {self}>"


class Faults:
    """What is to go wrong in a run. Equal where the faults are; one run at a time uses it.

    Args:
        faults: in any order; the same one twice counts once.

    Attributes:
        faults: all of them.
        struck: those that acted in the latest run, in that order.
    """

    def __init__(self, faults: Iterable[Fault] = ()) -> None:
        self.faults: tuple[Fault, ...] = tuple(dict.fromkeys(faults))
        self.struck: list[Fault] = []
        self._open: dict[tuple[str, int | None, int | None], Fault] = {}
        self._allocations: dict[int, int] = {}
        self._exhausted: Fault | None = None
        self._device: Any = None

    @classmethod
    def parse(cls, text: str) -> Faults:
        """Read what `str` writes; "" is no fault.

        Raises:
            FaultStringError: it names the part that cannot be read, and what can be written there.
        """
        return cls(_parse_one(part, text) for part in text.strip().split("+")) if text.strip() else cls()

    @classmethod
    def random(
        cls,
        seed: int,
        *,
        count: int = 2,
        yields: int = 8,
        transfers: int = 8,
        most: int = 1,
        kinds: Sequence[str] = _DRAWN,
    ) -> Faults:
        """One to `most` faults that follow from `seed` alone, in microbatches below `count`.

        Args:
            seed: a whole number.
            count: number of microbatches N.
            yields: number of yields of a microbatch; a signal or a raise comes at one of them.
            transfers: number of its transfers, and of its allocations.
            most: how many faults at most.
            kinds: which kinds to draw from; not those of ranks.

        Raises:
            ConfigurationError: a kind that is unknown or one of a rank, or a number that is not positive.
        """
        if min(count, yields, transfers, most) < 1:
            raise ConfigurationError("count, yields, transfers and most must be positive to draw faults")
        if not kinds or not set(kinds) <= set(_DRAWN):
            raise ConfigurationError(f"kinds={tuple(kinds)!r}: faults are drawn from {', '.join(_DRAWN)}")
        draw = random.Random(seed)
        found = []
        for _ in range(draw.randint(1, most)):
            kind = draw.choice(list(kinds))
            number = None
            if kind != "empty":
                number = draw.randrange(yields if kind in ("raise", "signal") else transfers)
            nanoseconds = draw.randint(1, 1000) * 1000 if kind == "late" else 0
            signal_name = "INT" if kind == "signal" else ""
            found.append(Fault(kind, draw.randrange(count), number, nanoseconds=nanoseconds, signal=signal_name))
        return cls(found)

    @property
    def interrupts(self) -> bool:
        """A run with these may end with KeyboardInterrupt."""
        return any(fault.kind == "signal" for fault in self.faults)

    @property
    def of_ranks(self) -> tuple[Fault, ...]:
        """Those that strike a whole rank (`testing.rank_faults`)."""
        return tuple(fault for fault in self.faults if fault.rank is not None)

    @property
    def missed(self) -> list[Fault]:
        """Those that the latest run did not come to; before the first run, all."""
        return [fault for fault in self.faults if fault not in self.struck]

    # -- what a run does with them -------------------------------------------------------------------------------------

    def prepare(self, bed: TestBed) -> None:
        """Begin a run on `bed`: nothing has struck yet.

        Raises:
            FaultStringError: a fault of a microbatch that the step does not have.
        """
        from .faulty_microbatch import make_device_faulty

        for fault in self.faults:
            if fault.microbatch is not None and fault.microbatch >= bed.count:
                raise FaultStringError(
                    f"fault {str(fault)!r} is for microbatch {fault.microbatch}, and the step has {bed.count}: "
                    f"0 to {bed.count - 1}"
                )
        self.struck = []
        self._open = {(f.kind, f.microbatch, f.number): f for f in self.faults if f.rank is None}
        self._allocations = {}
        self._exhausted = None
        self._device = bed.device
        make_device_faulty(bed.device, self)

    def microbatch_type(self, base: type[Microbatch], bed: TestBed) -> type[Microbatch]:
        """`base`, a carrier's kind of microbatch, as one that these faults strike."""
        from .faulty_microbatch import make_faulty

        return make_faulty(base, self)

    @contextmanager
    def in_step_of(self, scheduler: Scheduler, *, count: int = 2, device: Any = None) -> Iterator[None]:
        """The next step of `scheduler` meets these faults: for a model's own runner, where there is no bed.

            with Faults.parse("raise@1.3").in_step_of(runner.scheduler):
                runner.step(batch)

        Args:
            scheduler: of any carrier, also a host's own; what it runs inside is struck.
            count: number of microbatches of the step.
            device: the step's device; None where it times no transfers and nothing of it is to be exhausted.

        Raises:
            FaultStringError: see `prepare`.
        """
        from .step_run import TestBed

        bed = TestBed(device, count, self)
        self.prepare(bed)
        kind = scheduler.microbatch_type
        scheduler.microbatch_type = self.microbatch_type(kind, bed)
        try:
            yield
        finally:
            scheduler.microbatch_type = kind

    def tokens(self, microbatch: int, normal: int) -> int:
        """How many tokens that microbatch has: `normal`, or 0 where it is to be empty."""
        return 0 if self.strike("empty", microbatch, None) else normal

    def allocating(self, microbatch: int) -> None:
        """That microbatch is about to allocate.

        Raises:
            MemoryError, or torch's error: the allocator's own, asked for more than there can be. Its cause is an
            `InjectedFault`.
        """
        number = self._allocations.get(microbatch, 0)
        self._allocations[microbatch] = number + 1
        self._exhausted = self.strike("oom", microbatch, number) or self._exhausted
        if self._exhausted is not None:
            try:
                exhaust(self._device)
            except (MemoryError, RuntimeError) as error:
                # The allocator's own error, and where it comes from.
                raise error from InjectedFault(f"{self._exhausted}: the allocator is exhausted")

    def waiting(self, kind: str, microbatch: int | None, number: int | None) -> Fault | None:
        """The fault of that kind and place, if there is one that has not struck yet."""
        return self._open.get((kind, microbatch, number))

    def strike(self, kind: str, microbatch: int | None, number: int | None) -> Fault | None:
        """Like `waiting`; the fault strikes by it, and so does not strike again."""
        fault = self._open.pop((kind, microbatch, number), None)
        if fault is not None:
            self.struck.append(fault)
            sometimes(f"fault struck: {kind}")
        return fault

    # -- as a value ----------------------------------------------------------------------------------------------------

    def __str__(self) -> str:
        return "+".join(map(str, self.faults))

    def __repr__(self) -> str:
        return f"Faults.parse({str(self)!r})"

    def __bool__(self) -> bool:
        return bool(self.faults)

    def __eq__(self, other: object) -> bool:
        return self.faults == other.faults if isinstance(other, Faults) else NotImplemented

    def __hash__(self) -> int:
        return hash(self.faults)


def exhaust(device: Any) -> None:
    """Ask the allocator of `device` for more than any address space holds, and raise what it says to that.

    Raises:
        MemoryError: Python's allocator, for a device whose memory is not torch's.
        RuntimeError: torch's, on the CPU; torch.OutOfMemoryError on a GPU.
    """
    torch = sys.modules.get("torch")
    name = getattr(device, "name", "")
    if torch is not None and (name == "cpu" or (name.startswith("cuda") and torch.cuda.is_available())):
        torch.empty(1 << 60, dtype=torch.uint8, device=name)
    bytearray(sys.maxsize - 64)


def _parse_one(part: str, text: str) -> Fault:
    kind, at, place = part.partition("@")
    if kind not in KINDS or not at:
        possible = ", ".join(example for _, example, _ in KINDS.values())
        raise FaultStringError(f"fault {part!r} in {text!r} is of no known kind; write one of these: {possible}")
    pattern, example, meaning = KINDS[kind]
    match = re.fullmatch(pattern, place, re.ASCII)
    if match is None:
        raise FaultStringError(f"fault {part!r} in {text!r} cannot be read; it is written like {example} ({meaning})")
    found = match.groupdict()

    def whole_number(group: str) -> int | None:
        return int(found[group]) if found.get(group) else None

    name = found.get("signal") or ""
    if name and f"SIG{name}" not in signal.Signals.__members__:
        raise FaultStringError(f"fault {part!r} in {text!r}: there is no signal SIG{name} here")
    return Fault(
        kind,
        whole_number("microbatch"),
        whole_number("number"),
        whole_number("rank"),
        whole_number("step"),
        whole_number("collective") or 0,
        _nanoseconds(found["time"], part, text) if found.get("time") else 0,
        name,
    )


def _nanoseconds(time: str, part: str, text: str) -> int:
    digits = time.rstrip("nums")
    scale = _UNITS[time[len(digits) :]]
    whole, _, fraction = digits.partition(".")
    exact, rest = divmod(int(whole + fraction) * scale, 10 ** len(fraction))
    if rest:
        raise FaultStringError(f"fault {part!r} in {text!r}: a time is a whole number of nanoseconds")
    return int(exact)


def _in_largest_unit(nanoseconds: int) -> str:
    unit = next(unit for unit, scale in _UNITS.items() if nanoseconds % scale == 0)
    return f"{nanoseconds // _UNITS[unit]}{unit}"
