"""What the pieces of a path are called, and whose time they are, by the yield sites of a step."""

from __future__ import annotations

from collections.abc import Sequence

from ..lanes import slice_label, slice_letters
from ..notation import is_high_throughput, parse_site
from ..schema import GpuRecord

__all__ = ["HOST", "LAUNCH", "OTHER", "OTHER_COMMUNICATION", "VOTE", "StepNames"]

HOST, LAUNCH, VOTE, OTHER = "host", "launch", "vote", "other"
OTHER_COMMUNICATION = "other communication"

_CARRIED = {"dispatch": "D", "before_dispatch": "D", "combine": "C", "before_combine": "C"}
_FLIGHT = {"D": "dispatch", "C": "combine"}


class StepNames:
    """Names and stages in a step with these sites.

    Attributes:
        high_throughput: whether they are sites of high throughput.
    """

    def __init__(self, sites: Sequence[str]) -> None:
        self.high_throughput = is_high_throughput(sites)
        self._letters = slice_letters(sites)

    def stage(self, site: str) -> str:
        """Whose compute the slice is that ends at `site`. With receive hooks the shared expert is the experts'."""
        parsed = parse_site(site)
        if parsed is None:
            return OTHER
        if parsed.stage in ("dispatch", "before_dispatch"):
            return "attention"
        return "shared" if self.high_throughput and parsed.stage == "combine" else "experts"

    def slice(self, site: str, ubatch: int) -> str:
        """The slice that ends at `site`."""
        return f"{slice_label(site, self._letters)} of microbatch {ubatch}"

    def flight_stage(self, site: str) -> str:
        """What is sent before the yield at `site`: a dispatch or a combine."""
        parsed = parse_site(site)
        return OTHER if parsed is None else _FLIGHT[_CARRIED[parsed.stage]]

    def flight(self, site: str, ubatch: int) -> str:
        """The same with its layer, as in the timetable: "D3 of microbatch 0"."""
        parsed = parse_site(site)
        what = (site or "communication") if parsed is None else f"{_CARRIED[parsed.stage]}{parsed.layer}"
        return f"{what} of microbatch {ubatch}"

    def stretch_stage(self, stretch: GpuRecord) -> str:
        """Whose time a stretch on a stream is."""
        return self.stage(stretch.site) if stretch.stream == "compute" else self.flight_stage(stretch.after)

    def stretch(self, stretch: GpuRecord) -> str:
        """What runs in it."""
        if stretch.stream == "compute":
            return self.slice(stretch.site, stretch.ubatch)
        return self.flight(stretch.after, stretch.ubatch)
