"""Which stage of a layer a slice of an export belongs to: what the page and the plot colour by."""

from __future__ import annotations

from .export.items import Slice
from .notation import parse_site

__all__ = ["STAGES", "layer_of", "stage_of"]

# In the order of their colours in the page and in the plot; "other" is everything else: layers without yields, a step's
# frame, sites that are no dispatches and combines.
STAGES = ("attention", "dispatch", "experts", "combine", "shared", "other")

# The letters that `lanes.slice_label` and the export put before the number of a layer.
_BY_LETTER = {"A": "attention", "D": "dispatch", "M": "experts", "C": "combine", "S": "shared"}


def stage_of(item: Slice) -> str:
    """One of `STAGES`: what the slice's details say, or else what its name says where a site stands behind it."""
    said = item.details.get("stage")
    if isinstance(said, str) and said in STAGES:
        return said
    if _sites(item):
        return _BY_LETTER.get(item.name[:1], "other")
    return "other"


def layer_of(item: Slice) -> int | None:
    """The layer that the slice's name carries; None where no site says one."""
    said = item.details.get("layer")
    if type(said) is int:
        return said
    digits = item.name.split(",", 1)[0][1:]
    return int(digits) if _sites(item) and digits.isdigit() else None


def _sites(item: Slice) -> bool:
    """Whether its name is made from a site with a layer, the one at its end or the one that it goes on from."""
    texts = (item.details.get("site"), item.details.get("after"))
    return any(isinstance(text, str) and parse_site(text) is not None for text in texts)
