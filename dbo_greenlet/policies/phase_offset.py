"""Each microbatch a fixed number of yields behind the one before it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..errors import ConfigurationError

if TYPE_CHECKING:
    from ..policy import Chooser
    from ..step import Step

__all__ = ["PhaseOffset"]


class PhaseOffset:
    """Microbatch i starts when microbatch 0 has passed `offset` * i yields; from then on they go in turn.

    Slice s of microbatch i belongs to stage s + `offset` * i. The stages run one after the other, and within a stage
    the microbatch that is furthest behind goes first: it sends, and a sibling's next slice hides what it sent.

        PhaseOffset(2), two microbatches with six slices:  0 0  1 0  1 0  1 0  1 0  1 1

    With two yields in a layer an offset of 2 puts the siblings one layer apart, and the order of a layer is that of
    vLLM's documentation, label for label. An offset of 0 is round robin. SGLang's `tbo_delta_stages=d`, which runs d
    stages of the first half alone and lets it go first in each pair, is an offset of d + 1.

    More than two microbatches have up to N - 1 receives outstanding at a time, because who runs a receive is the next
    microbatch of the ring and not the next one that goes. DeepEP's low-latency kernels refuse that (`PartOrderError`).

    Args:
        offset: in yields, 0 or more. As many as a microbatch has, or more, runs them one after the other.

    Raises:
        ConfigurationError: it is no whole number, or below 0: law 6 lets no microbatch start before an earlier one.
    """

    name = "phase_offset"

    def __init__(self, offset: int) -> None:
        if type(offset) is not int or offset < 0:
            raise ConfigurationError(f"a phase offset of {offset!r} yields; use a whole number, 0 or more")
        self.offset = offset

    def start(self, step: Step) -> Chooser:
        microbatches = step.microbatches
        offset = self.offset
        # Within a stage the last one first, but without an offset law 6 wants the first one first.
        order = microbatches[::-1] if offset else microbatches

        def choose() -> int:
            best, first_stage = -1, -1
            for microbatch in order:
                if not microbatch.done:
                    stage = microbatch.slice_number + offset * microbatch.index
                    if best < 0 or stage < first_stage:
                        best, first_stage = microbatch.index, stage
            return best

        return choose

    def __repr__(self) -> str:
        return f"PhaseOffset({self.offset})"
