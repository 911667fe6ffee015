"""The steps that a profile's own ranges name."""

from __future__ import annotations

import re

from .profile import Profile

__all__ = ["steps_of"]

# torch.profiler's ranges of the steps of its schedule, and what people write into NVTX ranges.
_STEP = re.compile(r"(?i)(?:ProfilerStep#|(?:execute_)?step[ _#:]*)(\d+)")


def steps_of(profile: Profile, rank: int) -> list[tuple[int, float]]:
    """(number, begin in microseconds) of the steps that ranges of `rank` name, in order of time."""
    ranges, names = profile.ranges, profile.names
    named = {number: match for number, name in enumerate(names) if (match := _STEP.fullmatch(name))}
    found = {
        int(named[int(name)][1]): float(begin)
        for name, begin, owner in zip(ranges.name[::-1], ranges.begin[::-1], ranges.rank[::-1], strict=True)
        if int(name) in named and owner == rank
    }
    return sorted(found.items(), key=lambda step: step[1])
