"""Policies beside round robin and scripted ones (`policy`): who goes next, and how a policy is written as text.

    InTurn()                     in_turn                      all of microbatch 0, then all of 1, ...
    PhaseOffset(2)               phase_offset:2               each microbatch two yields behind the one before it
    SeededRandom(7)              random:7                     by chance, among those that may run
    Pct(7, depth=2, length=100)  pct:7,depth=2,length=100     by chance, with a bound on what it misses

All of them keep law 6 by themselves and give the same schedule for the same yield points (law 5). None imports torch.
"""

from __future__ import annotations

from .in_turn import InTurn
from .names import policy_from_text, text_and_seed, text_of
from .pct import Pct
from .phase_offset import PhaseOffset
from .seeded import SeededRandom

__all__ = ["InTurn", "Pct", "PhaseOffset", "SeededRandom", "policy_from_text", "text_and_seed", "text_of"]
