"""Probabilistic concurrency testing: random priorities and a few places at which one of them is taken away."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

from ..errors import ConfigurationError
from .chance import Below, check_seed, draws

if TYPE_CHECKING:
    from ..policy import Chooser
    from ..step import Step

__all__ = ["Pct"]

# More decisions than any step takes; a bound on what a typed length can ask for.
_LONGEST = 50_000_000


class Pct:
    """The algorithm of Burckhardt, Kothari, Musuvathi and Nagarakatte, "A Randomized Scheduler with Probabilistic
    Guarantees of Finding Bugs" (ASPLOS 2010), among the microbatches that law 6 lets run.

    Each microbatch gets a priority at random, and the one with the highest goes, as long as it may. At each of
    `depth` - 1 decisions, drawn from the first `length`, the one that would have gone gets a priority below all that
    were given at the start; those of the changes are ordered at random among themselves. A bug that shows whenever d
    decisions come in a certain order is met with a probability of at least 1 / (N * length ** (d - 1)), if `depth` is d
    and `length` no less than the step's decisions.

    Law 6 takes part of the choice: microbatch 1 with the higher priority follows microbatch 0 slice for slice, which is
    round robin, and with the lower one it waits for its end. What lies in between comes from the changes.

    Args:
        seed: each step starts from it anew, so equal steps have equal schedules, on every rank (law 5).
        depth: one more than the changes, 1 or more.
        length: decisions in which the changes may fall: about as many as the step takes.
        rng: see `SeededRandom`.

    Raises:
        ConfigurationError: a number that is no whole one, or is out of range; more changes than `length` has room for.
    """

    name = "pct"

    def __init__(self, seed: int = 0, depth: int = 2, length: int = 100, *, rng: random.Random | None = None) -> None:
        self.seed = check_seed(seed)
        if type(depth) is not int or depth < 1:
            raise ConfigurationError(f"a depth of {depth!r}; use a whole number, 1 or more")
        if type(length) is not int or not 1 <= length <= _LONGEST:
            raise ConfigurationError(f"a length of {length!r} decisions; use a whole number, 1 to {_LONGEST}")
        if depth - 1 > length:
            raise ConfigurationError(
                f"a depth of {depth} has {depth - 1} changes, and a length of {length} has no room for them; "
                "use a greater length or a smaller depth"
            )
        self.depth = depth
        self.length = length
        self.rng = rng

    def start(self, step: Step) -> Chooser:
        below = draws(self.seed, self.rng)
        indices = range(step.count)
        priorities = _drawn(step.count, step.count, below)
        lowered = self.depth - 1
        changes = {decision: rank - lowered for rank, decision in enumerate(_drawn(lowered, self.length, below))}
        may_run, decisions, priority = step.may_run, step.decisions, priorities.__getitem__

        def choose() -> int:
            able = [index for index in indices if may_run(index)]
            index = max(able, key=priority)
            change = changes.get(len(decisions))
            if change is not None:
                priorities[index] = change
                index = max(able, key=priority)
            return index

        return choose

    def __repr__(self) -> str:
        source = str(self.seed) if self.rng is None else f"rng={self.rng!r}"
        return f"Pct({source}, depth={self.depth}, length={self.length})"


def _drawn(count: int, bound: int, below: Below) -> list[int]:
    """`count` different numbers below `bound`, in an order that is drawn as well."""
    moved: dict[int, int] = {}  # what a shuffle of all `bound` numbers would have moved so far
    out = []
    for position in range(count):
        other = position + below(bound - position)
        out.append(moved.get(other, other))
        moved[other] = moved.get(position, position)
    return out
