"""How many schedules there are, all of them one by one, and in which order an exploration goes through them.

A schedule of N microbatches is a sequence of decisions; microbatch i is picked as often as it has slices. Law 6 allows
a decision for i only if every earlier microbatch that is not done has completed more slices than i (`Step.may_run`).
For N = 2 with n slices each these sequences are the ballot sequences, counted by the Catalan number
C(n) = (2n)! / (n! (n+1)!); for N microbatches of n slices they are the standard Young tableaux of N rows of n boxes.

A *preemption* is a decision for another microbatch than the one that ran last while that one may go on: it is not done,
and law 6 lets it. A switch that law 6 or a return forces is none. In turn (all of 0, then all of 1, ...) has no
preemption and is the only schedule without one; round robin of two microbatches with n slices each has n - 1. Few
preemptions find most bugs (Musuvathi and Qadeer, "Iterative context bounding for systematic testing of multithreaded
programs", 2007), and their number bounds the exploration where the whole space is too large.

The *size* of a schedule, by which explorations are ordered and failures are shrunk, is

    (preemptions, decisions up to the last one that had to be picked, the decisions)

where the decisions behind the picked ones follow the default: whoever ran last goes on, and where it may not, the
lowest microbatch that may.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from ..errors import ConfigurationError
from ..schedule import MAX_MICROBATCHES

__all__ = [
    "IN_TURN",
    "Size",
    "SmallestFirst",
    "Start",
    "count_interleavings",
    "count_up_to",
    "default_choice",
    "interleavings",
    "largest_bound",
    "may_run",
    "size_of",
]

Size = tuple[int, int, tuple[int, ...]]


def may_run(completed: Sequence[int], slices: Sequence[int]) -> list[int]:
    """The microbatches that law 6 lets run, ascending, where `completed` of their `slices` are done."""
    runnable = []
    least: int | None = None  # slices completed by the nearest earlier microbatch that is not done
    for index, done in enumerate(completed):
        if done == slices[index]:
            continue
        if least is None or done < least:
            runnable.append(index)
        least = done
    return runnable


def default_choice(last: int, runnable: Sequence[int]) -> int:
    """Who runs where nothing is picked: the one that ran last as long as it may, else the lowest."""
    return last if last in runnable else runnable[0]


def count_interleavings(slices: Sequence[int], preemptions: int | None = None) -> int:
    """Number of schedules that law 6 allows.

    Args:
        slices: of each microbatch, at least 1: its yields and the slice in which it returns.
        preemptions: count only schedules with at most so many; None counts all.

    Without a bound and with slices that do not increase from one microbatch to the next this is the hook length formula
    (Frame, Robinson, Thrall 1954), at once for any size. Otherwise it is a sum over the states (slices completed of
    each, who ran last, preemptions), whose number grows with the product of the slices.

    Raises:
        ConfigurationError: no microbatch, more than 36, a microbatch without slices, or a negative bound.
    """
    number, _ = count_up_to(slices, preemptions, most_states=None)
    return number


def count_up_to(slices: Sequence[int], preemptions: int | None, most_states: int | None = 200_000) -> tuple[int, bool]:
    """(number, whether it is exact): as `count_interleavings`, but a lower bound where the sum has too many states."""
    slices = _checked(slices, preemptions)
    if preemptions is None and all(a >= b for a, b in itertools.pairwise(slices)):
        return _by_hook_lengths(slices), True
    ways: dict[tuple[tuple[int, ...], int, int], int] = {((0,) * len(slices), -1, 0): 1}
    states = 0
    for _ in range(sum(slices)):
        following: dict[tuple[tuple[int, ...], int, int], int] = defaultdict(int)
        for (completed, last, used), number in ways.items():
            runnable = may_run(completed, slices)
            for index in runnable:
                spent = used
                if preemptions is not None:
                    spent += index != last and last in runnable
                    if spent > preemptions:
                        continue
                after = (*completed[:index], completed[index] + 1, *completed[index + 1 :])
                following[after, -1 if preemptions is None else index, spent] += number
        ways = following
        states += len(ways)
        if most_states is not None and states > most_states:
            # Whatever began can be completed by the default, without another preemption.
            return sum(ways.values()), False
    return sum(ways.values()), True


def largest_bound(slices: Sequence[int], most: int) -> tuple[int, int]:
    """(bound, number): the largest preemption bound that leaves at most `most` schedules, and how many it leaves.

    Bound 0 is always possible: it leaves one.
    """
    bound, number = 0, 1
    while bound < sum(slices):
        larger, exact = count_up_to(slices, bound + 1)
        if not exact or larger > most:
            break
        bound, number = bound + 1, larger
    return bound, number


def interleavings(slices: Sequence[int], preemptions: int | None = None) -> Iterator[tuple[int, ...]]:
    """Every schedule that law 6 allows, once, in lexicographic order; made one by one.

    Raises:
        ConfigurationError: as `count_interleavings`.
    """
    return _enumerate(_checked(slices, preemptions), preemptions)


def _enumerate(slices: Sequence[int], preemptions: int | None) -> Iterator[tuple[int, ...]]:
    total = sum(slices)
    completed = [0] * len(slices)
    decisions: list[int] = []
    spent = [0]
    choices = [may_run(completed, slices)]
    # A stack of its own and no recursion: a deep model has more slices than Python has frames.
    pending = [iter(choices[0])]
    while pending:
        index = next(pending[-1], None)
        if index is None:
            pending.pop()
            choices.pop()
            spent.pop()
            if decisions:
                completed[decisions.pop()] -= 1
            continue
        last = decisions[-1] if decisions else -1
        cost = spent[-1] + (index != last and last in choices[-1])
        if preemptions is not None and cost > preemptions:
            continue
        if len(decisions) + 1 == total:
            yield (*decisions, index)
            continue
        decisions.append(index)
        completed[index] += 1
        spent.append(cost)
        choices.append(may_run(completed, slices))
        pending.append(iter(choices[-1]))


def size_of(decisions: Sequence[int], runnable: Sequence[Sequence[int]]) -> Size:
    """The size of a schedule; see the module. `runnable`: who could have run, for each decision."""
    preemptions = picked = 0
    last = -1
    for position, index in enumerate(decisions):
        could = runnable[position]
        if index != default_choice(last, could):
            picked = position + 1
        preemptions += index != last and last in could
        last = index
    return preemptions, picked, tuple(decisions)


class Start(NamedTuple):
    """How a schedule begins; from there on it follows the default.

    Attributes: `preemptions` in `decisions`, `length` of it, `decisions`, and the `sites` at which these slices ended
    in the run that it branches off from: all but the last, which that run did not take.
    """

    preemptions: int
    length: int
    decisions: tuple[int, ...]
    sites: tuple[str, ...]


IN_TURN = Start(0, 0, (), ())


class SmallestFirst:
    """Every schedule of a step once, in the order of their size, whatever the step turns out to do.

    Nothing is computed beforehand: a run shows who could have run at each of its decisions, and each of these that it
    did not pick begins another schedule. So steps whose slices depend on the schedule are gone through like all others.

        order = SmallestFirst(preemptions=2)
        while (start := order.next()) is not None:
            ... run start.decisions, then the default; note who could have run ...
            order.ran(start, decisions, sites, runnable)

    `next` gives the schedules by size because a branch has at least the preemptions of what it branches off from, and
    more decisions that are picked.
    """

    def __init__(self, preemptions: int | None = None) -> None:
        self.preemptions = preemptions
        self._waiting: list[Start] = [IN_TURN]

    def next(self) -> Start | None:
        return heapq.heappop(self._waiting) if self._waiting else None

    def ran(
        self, start: Start, decisions: tuple[int, ...], sites: tuple[str, ...], runnable: Sequence[Sequence[int]]
    ) -> None:
        """What became of `start`. `runnable`: who could have run, for each decision behind `start.decisions`."""
        begin = start.length
        bound = math.inf if self.preemptions is None else self.preemptions
        waiting = self._waiting
        last = decisions[begin - 1] if begin else -1
        for position in range(begin, min(len(decisions), begin + len(runnable))):
            index, could = decisions[position], runnable[position - begin]
            if len(could) > 1:
                preemptions = start.preemptions + (last in could)
                if preemptions <= bound:
                    for other in could:
                        if other != index:
                            picked = (*decisions[:position], other)
                            heapq.heappush(waiting, Start(preemptions, position + 1, picked, sites[:position]))
            last = index


def _checked(slices: Sequence[int], preemptions: int | None) -> tuple[int, ...]:
    if not 1 <= len(slices) <= MAX_MICROBATCHES or min(slices) < 1:
        raise ConfigurationError(f"slices={list(slices)}: 1 to {MAX_MICROBATCHES} microbatches, at least 1 slice each")
    if preemptions is not None and preemptions < 0:
        raise ConfigurationError(f"preemptions={preemptions}: a bound is 0 or more, or None for no bound")
    return tuple(slices)


def _by_hook_lengths(rows: Sequence[int]) -> int:
    """Standard Young tableaux of a shape: n! over the product of the hook lengths of its n boxes."""
    below = [sum(1 for row in rows if row > column) for column in range(rows[0])]
    hooks = 1
    for row, length in enumerate(rows):
        for column in range(length):
            hooks *= (length - column) + (below[column] - row) - 1
    return math.factorial(sum(rows)) // hooks
