"""Messages that splitting made so small that the transport takes another way for them.

Half a batch should take half the time on the wire. Below some size it does not: the transport has an algorithm for
small messages, whose time hardly depends on their size, and two of them take longer than one whole one. (vLLM's dense
tensor-parallel overlap paid 49.5 us for half an all-reduce that took 41.8 us as a whole: half of it fell under the
256 kB at which its two-shot algorithm begins.)
"""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass

from .checks import Check, Looked, StepView
from .findings import Hit, Missing

__all__ = ["BY_USER", "CUTOFFS", "NO_CUTOFF", "Cutoff", "SmallMessages", "bytes_text"]


@dataclass(frozen=True)
class Cutoff:
    """A size of messages at which a transport changes its way.

    Attributes:
        size: bytes; to each other rank, or of the message as a whole.
        each_rank: which of the two.
        what: what happens below, a clause.
    """

    size: int
    each_rank: bool
    what: str


# By the name of the all-to-all in the trace's settings. NCCL: the default of NCCL_P2P_LL_THRESHOLD, a channel (NCCL's
# src/enqueue.cc); with several channels the way changes at a multiple, so this is the least that it can be.
CUTOFFS = {"nccl": Cutoff(16384, True, "NCCL sends it by its low-latency protocol")}

BY_USER = "a message counts as small (--cutoff)"
NO_CUTOFF = "no size is known {} below which a message goes another way; give one with --cutoff BYTES"
NO_BYTES = "needs the bytes of messages, which were not recorded"


class SmallMessages(Check):
    """By the bytes of the windows: those of all microbatches at one site together are the unsplit message.

    A site that names no layer comes again in every layer, so a message's parts are each microbatch's first window at
    the site, then each one's second, and so on.
    """

    def step(self, view: StepView) -> Looked:
        if not view.split or view.failed or not view.step.receives:
            return None
        sizes: dict[tuple[str, int], list[tuple[int, int, float]]] = defaultdict(list)
        passed: Counter[tuple[str, int]] = Counter()
        for each in sorted(view.step.receives, key=lambda window: window.sent):
            number = passed[each.site, each.ubatch]
            passed[each.site, each.ubatch] += 1
            if each.bytes is not None:
                sizes[each.site, number].append((each.ubatch, each.bytes, each.sent))
        if not sizes:
            return Missing(NO_BYTES)
        cutoff = self._cutoff(view.step.rank)
        if isinstance(cutoff, Missing):
            return cutoff
        peers = max(1, self.facts.world - 1) if cutoff.each_rank else 1
        hits = []
        for (site, _), parts in sizes.items():
            whole = sum(size for _, size, _ in parts)
            if len(parts) < 2 or whole < cutoff.size * peers:
                continue
            for index, size, sent in parts:
                if 0 < size < cutoff.size * peers:
                    per = " to each other rank" if cutoff.each_rank and peers > 1 else ""
                    what = (
                        f"microbatch {index} sends {bytes_text(size / peers)}{per} before {site!r}; below "
                        f"{bytes_text(cutoff.size)} {cutoff.what}, and unsplit it would be {bytes_text(whole / peers)}"
                    )
                    hits.append(Hit(what, view.place(index, site=site, at=sent), site.rpartition(".")[2]))
        return hits

    def _cutoff(self, rank: int) -> Cutoff | Missing:
        if self.facts.cutoff is not None:
            return Cutoff(self.facts.cutoff, False, BY_USER)
        name = self.facts.setting(rank, "all2all")
        known = CUTOFFS.get(str(name))
        if known is None:
            what = f"for {name}" if name else "for a transport that the trace does not name"
            return Missing(NO_CUTOFF.format(what))
        return known


def bytes_text(size: float) -> str:
    """ "12.5 KiB" and the like."""
    units = ["B", "KiB", "MiB", "GiB"]
    while size >= 1024 and len(units) > 1:
        size /= 1024
        units.pop(0)
    return f"{size:.1f}".removesuffix(".0") + f" {units[0]}"
