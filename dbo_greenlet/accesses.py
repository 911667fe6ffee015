"""What an operation touches: bytes of a buffer, read or written."""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from typing import NamedTuple

__all__ = ["Access", "whole"]


class Access(NamedTuple):
    """Bytes [begin, end) of a buffer, read or written; `end` None is the whole buffer.

    `partial`: some of these bytes, and nobody knows which: a scattered write, which replaces nothing for certain.
    `pitch` and `run`, where `pitch` is not 0: of these bytes only the first `run` of every `pitch`, counted from
    `begin`: columns of a matrix.
    """

    buffer: Hashable
    write: bool
    begin: int = 0
    end: int | None = None
    partial: bool = False
    pitch: int = 0
    run: int = 0

    def meets(self, other: Access) -> bool:
        """Both touch a common byte, or may do."""
        return (
            self.buffer == other.buffer
            and (self.end is None or other.begin < self.end)
            and (other.end is None or self.begin < other.end)
            and (not (self.pitch or other.pitch) or _columns_meet(self, other))
        )

    def covers(self, other: Access) -> bool:
        """It certainly touches every byte of `other`."""
        return (
            self.buffer == other.buffer
            and not self.partial
            and self.begin <= other.begin
            and (self.end is None or (other.end is not None and other.end <= self.end))
            and (not self.pitch or self[2:] == (*other[2:4], False, *other[5:]))
        )

    def __str__(self) -> str:
        verb = ("writes some of" if self.partial else "writes") if self.write else "reads"
        if self.end is None and not self.begin:
            return f"{verb} {self.buffer}"
        columns = f", {self.run} of every {self.pitch}" if self.pitch else ""
        return f"{verb} {self.buffer}[{self.begin}:{'' if self.end is None else self.end}{columns}]"


def _columns_meet(one: Access, other: Access) -> bool:
    """Of two accesses whose spans meet, at least one with a pitch: whether there is a common byte.

    Where the pitches differ the answer may be yes without one.
    """
    if not one.pitch:
        one, other = other, one
    pitch = one.pitch
    if other.pitch == pitch:
        apart = (other.begin - one.begin) % pitch
        return apart < one.run or apart + other.run > pitch
    if other.pitch:
        return True
    # The first row of `one` that does not end before `other` begins, against the span of both.
    row = max(0, -(-(other.begin - one.begin - one.run + 1) // pitch))
    begin = one.begin + row * pitch
    return (other.end is None or begin < other.end) and (one.end is None or begin < one.end)


def whole(reads: Iterable[Hashable | Access] = (), writes: Iterable[Hashable | Access] = ()) -> tuple[Access, ...]:
    """Accesses to whole buffers, or to what an `Access` says; its own `write` is then replaced."""
    return tuple(
        each._replace(write=write) if isinstance(each, Access) else Access(each, write)
        for write, buffers in ((False, reads), (True, writes))
        for each in buffers
    )
