"""Slices as objects, and what may be put round them.

A *slice* is what a microbatch runs between two yield points. It has a known begin and end, and nothing else happens
between the two: the hub calls the bracket, switches, and calls the bracket again when the thread is back. So a slice is
a unit that can be timed on the GPU (`gpu_timeline`), or captured into a graph of its own.

An instrument watches and cannot fail a step; a bracket acts, on the stream that the slice begins and ends on, and what
it raises fails the step. A step without one makes no `Slice`.
"""

from __future__ import annotations

from typing import Protocol

__all__ = ["Slice", "SliceBracket"]


class Slice:
    """One slice of a running step.

    Attributes:
        microbatch: index of the microbatch.
        number: the how-manieth of its slices this is, from 0.
        decision: the how-manieth slice of the step.
        begin_site: the yield site that it goes on from, "" where the microbatch starts.
        end_site: the site at which it ended, "" where the microbatch returned; None as long as it runs.
    """

    __slots__ = ("begin_site", "decision", "end_site", "microbatch", "number")

    def __init__(self, microbatch: int, number: int, decision: int, begin_site: str) -> None:
        self.microbatch = microbatch
        self.number = number
        self.decision = decision
        self.begin_site = begin_site
        self.end_site: str | None = None

    def __repr__(self) -> str:
        return f"Slice(microbatch={self.microbatch}, number={self.number}, {self.begin_site!r} to {self.end_site!r})"


class SliceBracket(Protocol):
    """What runs round every slice of a step, on the thread and the current stream of the slice."""

    def begin(self, slice: Slice) -> None:
        """The switch to the microbatch comes next."""

    def end(self, slice: Slice) -> None:
        """The microbatch has yielded or returned, or failed: then its error is the step's, whatever is raised here."""
