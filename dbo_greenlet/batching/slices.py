"""Where a step is cut: one `UBatchSlice` per microbatch, over the step's flattened tokens and over its requests.

The cut is by tokens, not by requests: every microbatch but the last gets `P // N` of the P padded tokens, wherever that
falls. A request that a boundary falls into is in both microbatches, each with the tokens it owns. Cutting at request
boundaries was rejected: one long prefill would then be one microbatch and the rest the other, of very unequal work.

The cut is a function of the *padded* token count alone. The ranks of a data-parallel group agree on that number and on
nothing else, so every rank makes the same number of microbatches of the same sizes, as the expert all-to-all requires;
a rank's own tokens only decide how much of its last microbatch is padding.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np

from dbo_greenlet.errors import ConfigurationError, DboError

if TYPE_CHECKING:
    from dbo_greenlet.batching.inputs import StepInput

__all__ = ["BatchError", "UBatchSlice", "cut_points", "split_step"]


class BatchError(DboError):
    """A step's input, a vote or a microbatch's output whose shape does not fit the rest; the message names the part."""


@dataclass(frozen=True)
class UBatchSlice:
    """One microbatch's part of a step: requests [start, stop) and tokens [start, stop) of the flattened batch.

    The requests are all those that own at least one of the tokens, so neighbouring microbatches share a request that
    the boundary falls into. The last microbatch's slices reach to the end of the padding.
    """

    request_slice: slice
    token_slice: slice

    @property
    def num_tokens(self) -> int:
        """Tokens of the microbatch, padding included."""
        return int(self.token_slice.stop - self.token_slice.start)

    @property
    def num_requests(self) -> int:
        """Requests that the microbatch touches, padding requests included."""
        return int(self.request_slice.stop - self.request_slice.start)

    def is_empty(self) -> bool:
        """Whether there is nothing to run: no tokens, or no request that they could belong to."""
        return self.num_tokens == 0 or self.num_requests == 0


def cut_points(num_padded_tokens: int, n: int) -> list[int]:
    """The n + 1 token offsets 0, s, 2s, ..., P with s = P // n; the last microbatch takes the remainder.

    With fewer tokens than microbatches the step is not cut: [0, P].

    Raises:
        ConfigurationError: n < 1.
    """
    if n < 1:
        raise ConfigurationError(f"a step cannot be split into {n} microbatches; use 1 (unsplit) or more")
    if num_padded_tokens < n:
        return [0, num_padded_tokens]
    size = num_padded_tokens // n
    return [*range(0, size * n, size), num_padded_tokens]


def split_step(step: StepInput, n: int) -> list[UBatchSlice]:
    """Cut a step into n microbatches at the points that `cut_points` gives for its padded tokens.

    Args:
        step: T tokens of R requests, padded to P tokens; only its host-side query offsets are read.
        n: number of microbatches, at least 1.

    Returns:
        n slices whose token slices partition [0, P). One slice, the whole step, if P < n: too little to split is no
        error (`vote.decide` says so with a reason before it comes to this, and P is the same on every rank).
        A microbatch that lies entirely inside the padding keeps the last real request, with zero query tokens: it
        stays well-formed for the attention and has no work to do.

    Raises:
        ConfigurationError: n < 1.
    """
    points = cut_points(step.num_padded_tokens, n)
    offsets = step.query_start_loc_cpu[: step.num_requests + 1].numpy()
    last_request = max(step.num_requests - 1, 0)
    slices = []
    for start, stop in pairwise(points):
        # The request that owns token `start`, and the first request that starts at or after `stop`. Padding tokens
        # are owned by nobody, which puts both past the last real request: hence the clamps.
        first = int(np.searchsorted(offsets, start, side="right")) - 1
        beyond = int(np.searchsorted(offsets, stop, side="left"))
        slices.append(
            UBatchSlice(
                slice(min(first, last_request), min(beyond, step.num_padded_requests)),
                slice(start, stop),
            )
        )
    last = slices[-1]
    slices[-1] = UBatchSlice(slice(last.request_slice.start, step.num_padded_requests), last.token_slice)
    return slices
