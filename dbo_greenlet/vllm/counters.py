"""How many steps this process ran as microbatches, and why steps were split or not.

The numbers lie in one block of bytes, a fixed layout of slots with their names in it. Counting is one 8-byte store, and
`place_in` moves the block into a memory-mapped file that another process reads while this one counts (prometheus.py).
Rejected: a Prometheus counter in each worker (vLLM's workers have no endpoint, and the client's multiprocess mode is on
only with several API servers); a thread that writes the numbers out now and then (a thread for what one store does).
"""

from __future__ import annotations

import struct
import threading
from typing import Any

from dbo_greenlet.errors import DboError

__all__ = ["BLOCK_SIZE", "EXECUTED_KINDS", "OTHER", "StepCounters", "counters", "read_block"]

EXECUTED_KINDS = ("eager", "captured", "replayed", "failed")
OTHER = "other"  # where a reason goes that finds no slot any more

# A block is one page: a header, then slots, in this machine's byte order (writer and reader share the machine).
BLOCK_SIZE = 4096
_MAGIC = b"dboSTEP1"
_HEADER = struct.Struct("=8sqq")  # magic, rank, number of slots in use
_SLOT_SIZE = 64  # of the header too
_VALUE = struct.Struct("=Q")  # a slot: its value, then its name, padded with zero bytes
_NAME_SIZE = _SLOT_SIZE - _VALUE.size
_SLOTS = BLOCK_SIZE // _SLOT_SIZE - 1
_FAMILIES = ("executed", "split", "unsplit")


class StepCounters:
    """Counts of steps. A call costs less than a microsecond.

    `executed` counts the steps that ran as microbatches, by how they ran. `decided` counts the decisions, by reason.
    A reason that finds no free slot (there are 57 for both outcomes together) is counted as "other".

    No lock is taken to count or to read: a signal handler that asks for the snapshot must not wait for the code that it
    interrupted. The interpreter does not switch threads between the load and the store of one `+= 1`.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._place(bytearray(BLOCK_SIZE))
        _HEADER.pack_into(self._block, 0, _MAGIC, -1, 0)
        # The indices of the slots' values in the block seen as 8-byte numbers.
        self._executed: dict[str, int] = {}
        self._decided: dict[tuple[bool, str], int] = {}
        self._used = 0
        for kind in EXECUTED_KINDS:
            self._executed[kind] = self._new_slot(f"executed/{kind}")
        for split in (True, False):
            self._decided[split, OTHER] = self._new_slot(_decision_name(split, OTHER))

    def executed(self, kind: str) -> None:
        """A step ran as microbatches: "eager", "captured" into a graph, "replayed" from one, or "failed".

        Raises DboError for any other kind.
        """
        index = self._executed.get(kind)
        if index is None:
            raise DboError(f"a step is counted as one of {', '.join(EXECUTED_KINDS)}, not as {kind!r}")
        self._numbers[index] += 1

    def decided(self, split: bool, reason: str) -> None:
        """It was decided to split this step, or not to, for a reason."""
        index = self._decided.get((split, reason))
        if index is None:
            index = self._slot_of_reason(split, reason)
        self._numbers[index] += 1

    def snapshot(self) -> dict[str, dict[str, int]]:
        """{"executed": {kind: steps}, "split": {reason: steps}, "unsplit": {reason: steps}}, without the zeros."""
        _, counts = read_block(self._block)
        return {family: {name: n for name, n in counts[family].items() if n} for family in _FAMILIES}

    def reset(self) -> None:
        """All counts to zero. Not for a process whose counts are published: what is published must not fall."""
        with self._lock:
            for index in (*self._executed.values(), *self._decided.values()):
                self._numbers[index] = 0

    def place_in(self, block: Any, *, rank: int) -> None:
        """Go on counting in `block`, with the counts so far; `rank` is written into it.

        Args:
            block: a writable buffer of BLOCK_SIZE bytes.

        Raises DboError if it has another size.
        """
        if len(block) != BLOCK_SIZE:
            raise DboError(f"a block of step counters has {BLOCK_SIZE} bytes, got {len(block)}")
        with self._lock:
            block[:] = bytes(self._block)
            self._place(block)
            _HEADER.pack_into(self._block, 0, _MAGIC, rank, self._used)

    def _place(self, block: Any) -> None:
        self._block = block
        # As numbers: `+= 1` on an item is several times faster than unpacking and packing, and stores 8 bytes at once.
        self._numbers = memoryview(block).cast("B").cast("Q")

    def _slot_of_reason(self, split: bool, reason: str) -> int:
        with self._lock:
            index = self._decided.get((split, reason))  # another thread may have made it
            if index is None:
                name = _decision_name(split, reason)
                fits = len(name.encode()) <= _NAME_SIZE and self._used < _SLOTS
                index = self._new_slot(name) if fits else self._decided[split, OTHER]
                if len(self._decided) < 2 * _SLOTS:  # reasons without end must not make this grow without end
                    self._decided[split, reason] = index
            return index

    def _new_slot(self, name: str) -> int:
        self._used += 1
        offset = self._used * _SLOT_SIZE
        text = name.encode()
        self._block[offset + _VALUE.size : offset + _VALUE.size + len(text)] = text
        # The number of slots last, and alone: a reader in another process never sees a slot without its name.
        self._numbers[2] = self._used
        return offset // _VALUE.size


def _decision_name(split: bool, reason: str) -> str:
    return f"{'split' if split else 'unsplit'}/{reason}"


def read_block(block: Any) -> tuple[int, dict[str, dict[str, int]]]:
    """The rank in a block (-1: never published), and its counts as `StepCounters.snapshot` has them, with the zeros.

    Args:
        block: BLOCK_SIZE bytes, of this process or read from another one's file.

    Raises DboError if these bytes are no such block.
    """
    if len(block) != BLOCK_SIZE:
        raise DboError(f"a block of step counters has {BLOCK_SIZE} bytes, got {len(block)}")
    magic, rank, used = _HEADER.unpack_from(block, 0)
    if magic != _MAGIC or not 0 <= used <= _SLOTS:
        raise DboError("these bytes are not a block of step counters of this version of dbo_greenlet")
    counts: dict[str, dict[str, int]] = {family: {} for family in _FAMILIES}
    for offset in range(_SLOT_SIZE, (used + 1) * _SLOT_SIZE, _SLOT_SIZE):
        (value,) = _VALUE.unpack_from(block, offset)
        text = bytes(block[offset + _VALUE.size : offset + _SLOT_SIZE]).rstrip(b"\0").decode(errors="replace")
        family, _, name = text.partition("/")
        if family in counts:
            counts[family][name] = value
    return rank, counts


counters = StepCounters()
