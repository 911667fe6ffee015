"""A policy as text, as `--policy` takes it and a trace keeps it, and back:
round_robin, in_turn, phase_offset:2, random:7, pct:7 or pct:7,depth=3,length=400.
"""

from __future__ import annotations

import re

from ..errors import ConfigurationError
from ..policy import Policy, RoundRobin
from .in_turn import InTurn
from .pct import Pct
from .phase_offset import PhaseOffset
from .seeded import SeededRandom

__all__ = ["KNOWN", "policy_from_text", "text_and_seed", "text_of"]

# What a message and a help text offer.
KNOWN = "round_robin, in_turn, phase_offset:YIELDS, random:SEED, pct:SEED,depth=D,length=DECISIONS"

# Digits of a number: no seed needs more than 64 bits, and Python refuses to read thousands.
_NUMBER = "[0-9]{1,20}"


def policy_from_text(text: str, *, setting: str = "policy") -> Policy:
    """The policy that `text` names. `pct` may leave out its depth (then 2) and its length (then 100).

    Args:
        text: see the module.
        setting: what the text is called in messages.

    Raises:
        ConfigurationError: no such policy, or numbers that it cannot have.
    """
    if text == "round_robin":
        return RoundRobin()
    if text == "in_turn":
        return InTurn()
    try:
        if match := re.fullmatch(f"phase_offset:({_NUMBER})", text):
            return PhaseOffset(int(match[1]))
        if match := re.fullmatch(f"random:({_NUMBER})", text):
            return SeededRandom(int(match[1]))
        if match := re.fullmatch(f"pct:({_NUMBER})(?:,depth=({_NUMBER}))?(?:,length=({_NUMBER}))?", text):
            return Pct(int(match[1]), int(match[2] or 2), int(match[3] or 100))
    except ConfigurationError as error:
        raise ConfigurationError(f"{setting} is {text!r}: {error}") from None
    raise ConfigurationError(f"{setting} is {text!r}; use one of {KNOWN}")


def text_of(policy: Policy) -> str:
    """The text that `policy_from_text` reads as `policy`.

    Raises:
        ConfigurationError: there is none: the policy draws from a generator that it was given, is scripted (then its
            schedule's `encode()` is the text to keep), or is none of this package's.
    """
    if getattr(policy, "rng", None) is None:
        # By the exact type: a subclass may do something else.
        kind = type(policy)
        if kind is RoundRobin or kind is InTurn:
            return policy.name
        if kind is PhaseOffset:
            return f"phase_offset:{policy.offset}"  # type: ignore[attr-defined]
        if kind is SeededRandom:
            return f"random:{policy.seed}"  # type: ignore[attr-defined]
        if kind is Pct:
            return f"pct:{policy.seed},depth={policy.depth},length={policy.length}"  # type: ignore[attr-defined]
    raise ConfigurationError(
        f"the policy {policy!r} cannot be written as text; keep the step's schedule instead (Schedule.encode)"
    )


def text_and_seed(policy: Policy) -> tuple[str, int | None]:
    """What a trace says of a policy: its text, or its name where there is none; and the seed it draws from."""
    seed = None if getattr(policy, "rng", None) is not None else getattr(policy, "seed", None)
    try:
        text = text_of(policy)
    except ConfigurationError:
        text = str(getattr(policy, "name", type(policy).__name__))
    return text, seed if type(seed) is int else None
