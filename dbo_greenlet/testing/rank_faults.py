"""Ranks that die or stall at a stated collective of a stated step: `die@rank1:step3`, `stall@rank1:step3.2:2s`.

    group = FaultyRanks(RankGroup(...), Faults.parse("die@rank1:step3"))
    runner = Runner(model, group=group, all2all=TorchDistributed(group, num_experts))
    for batch in batches:
        group.begin_step()
        runner.step(batch)

Every rank wraps its own group, with the same faults; only the rank that is named is struck. Nothing is simulated: the
process ends by `os._exit`, as if it had been killed (no announcement, no farewell, connections closed by the operating
system), or the rank sleeps while the others wait in the collective.

Steps count from 0, and the collectives of a step too: in a step of `Runner`, collective 0 is the vote, and what the
all-to-all sends follows in the order of the schedule. A collective counts where it begins. What comes before the first
`begin_step` is never struck.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from .sometimes import sometimes

if TYPE_CHECKING:
    from .faults import Fault, Faults

__all__ = ["DEAD", "FaultyRanks"]

DEAD = 86
"""Exit status of a rank that a fault ended: told apart from a crash (below 0) and from an error (1)."""


class FaultyRanks:
    """A group of ranks that strikes its own rank; everything else passes through to `group`.

    Args:
        group: a `RankGroup`, or any other `RankLink`.
        faults: those of ranks count, the rest is for `run_step`.

    Attributes: `steps` (begun so far), `struck` (faults that acted here and let the process live).
    """

    def __init__(self, group: Any, faults: Faults) -> None:
        self.inner = group
        self.steps = 0
        self.struck: list[Fault] = []
        self._collective = 0
        self._open = {(f.step, f.collective): f for f in faults.of_ranks if f.rank == group.rank}

    def begin_step(self) -> None:
        """The next collective is collective 0 of the next step. Every rank calls it before each of its steps."""
        self.steps += 1
        self._collective = 0

    def exchange(self, row: Any) -> Any:
        """See `RankGroup.exchange`."""
        self._strike()
        return self.inner.exchange(row)

    def all_to_all(
        self, received: Any, sent: Any, received_rows: Sequence[int] = (), sent_rows: Sequence[int] = ()
    ) -> Any:
        """See `RankGroup.all_to_all`."""
        self._strike()
        return self.inner.all_to_all(received, sent, received_rows, sent_rows)

    def __getattr__(self, name: str) -> Any:
        if name == "inner":  # while being unpickled there is none yet
            raise AttributeError(name)
        return getattr(self.inner, name)

    def _strike(self) -> None:
        fault = self._open.pop((self.steps - 1, self._collective), None)
        self._collective += 1
        if fault is None:
            return
        # Before the process ends, so that the suite hears of it.
        sometimes(f"fault struck: {fault.kind}")
        if fault.kind == "die":
            os._exit(DEAD)
        self.struck.append(fault)
        time.sleep(fault.seconds)
