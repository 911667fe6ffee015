"""By chance, and by the same chance each time."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

from .chance import check_seed, draws

if TYPE_CHECKING:
    from ..policy import Chooser
    from ..step import Step

__all__ = ["SeededRandom"]


class SeededRandom:
    """Any of the microbatches that may run (law 6), each as likely as the others; nothing is drawn where only one may.

    Every schedule that the laws allow can come up. Not all are equally likely: see `Pct` for bugs that need a
    microbatch to be held back for long.

    Args:
        seed: each step starts from it anew, so equal steps have equal schedules, on every rank (law 5).
        rng: a generator to draw from instead. It goes on from one step to the next: for a test that wants another
            schedule in each step, and for Hypothesis, whose `st.randoms()` are remembered and shrunk.

    Raises:
        ConfigurationError: `seed` is no whole number, or below 0.
    """

    name = "random"

    def __init__(self, seed: int = 0, *, rng: random.Random | None = None) -> None:
        self.seed = check_seed(seed)
        self.rng = rng

    def start(self, step: Step) -> Chooser:
        below = draws(self.seed, self.rng)
        runnable = step.runnable

        def choose() -> int:
            able = runnable()
            return able[below(len(able))] if len(able) > 1 else able[0]

        return choose

    def __repr__(self) -> str:
        return f"SeededRandom({self.seed})" if self.rng is None else f"SeededRandom(rng={self.rng!r})"
