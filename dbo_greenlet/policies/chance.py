"""Where policies take their chance from: a seed, anew in each step, or a generator that somebody else holds.

Law 5 wants the same numbers for the same seed on every rank, and ranks may run different versions of Python. Its
documentation promises an unchanged sequence for `random()` alone, so that is all that is asked of a seeded generator.
"""

from __future__ import annotations

import random
from collections.abc import Callable

from ..errors import ConfigurationError

__all__ = ["Below", "check_seed", "draws"]

# A number from 0 up to, and not including, the argument.
Below = Callable[[int], int]


def check_seed(seed: int) -> int:
    """`seed`, if it is one.

    Raises:
        ConfigurationError: no whole number, or below 0, where `random` takes -7 for 7.
    """
    if type(seed) is not int or seed < 0:
        raise ConfigurationError(f"a seed of {seed!r}; use a whole number, 0 or more")
    return seed


def draws(seed: int, rng: random.Random | None) -> Below:
    """A source of numbers for one step: from `rng` where it is given, which goes on from step to step."""
    if rng is not None:
        # Whole numbers, which is what Hypothesis shrinks; it hands in generators of its own.
        return rng.randrange
    fraction = random.Random(seed).random

    def below(bound: int) -> int:
        return int(fraction() * bound)

    return below
