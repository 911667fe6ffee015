"""How long a hand-off takes inside a real step: from the last thing before a yield to the first thing after it.

The clock starts when a microbatch registers a receive, which is the last thing it does before it yields, and stops
when the microbatch that goes on asks its all-to-all for what it received, which is the first thing it does when its own
yield returns. Between the two lies what a yield costs the host, whatever carries the microbatches: the bookkeeping, the
choice, and the switch or the wake-up of the other thread. The model is not touched: the clock is an instrument of the
scheduler at one end and a thin layer over the all-to-all at the other.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from time import perf_counter_ns
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

    from ..all2all import AllToAll, Dispatch, DispatchedTokens, PaddedTokens
    from ..step import Microbatch, Step

__all__ = ["HandOffClock"]


class HandOffClock:
    """The all-to-all `inner` with a clock; also an instrument for the scheduler.

    `running` is whether the clock runs: off, a dispatch costs one more call.
    """

    def __init__(self, inner: AllToAll) -> None:
        self.inner = inner
        self.name = inner.name
        self.rank = inner.rank
        self.world_size = inner.world_size
        self.num_experts = inner.num_experts
        self.num_local_experts = inner.num_local_experts
        self.running = False
        self._left = 0
        self._times: list[int] = []

    @property
    def not_capturable(self) -> str | None:
        """See `AllToAll.not_capturable`. The clock is none: in a captured step it is called while it is captured."""
        return self.inner.not_capturable

    def begin_capture(self) -> None:
        """See `AllToAll.begin_capture`."""
        self.inner.begin_capture()

    def replay_token(self) -> Any:
        """See `AllToAll.replay_token`."""
        return self.inner.replay_token()

    def replaying(self, token: Any) -> None:
        """See `AllToAll.replaying`."""
        self.inner.replaying(token)

    def expect_tokens(self, most: int | None) -> None:
        """See `AllToAll.expect_tokens`."""
        self.inner.expect_tokens(most)

    def reserve_sms(self) -> AbstractContextManager[None]:
        """See `AllToAll.reserve_sms`."""
        return self.inner.reserve_sms()

    def close(self) -> None:
        """See `AllToAll.close`."""
        self.inner.close()

    def dispatch_send(self, hidden: Tensor, topk_ids: Tensor, topk_weights: Tensor) -> Dispatch:
        """See `AllToAll.dispatch_send`."""
        sent = self.inner.dispatch_send(hidden, topk_ids, topk_weights)
        return _ClockedDispatch(sent, self) if self.running else sent

    def take_times(self) -> tuple[int, ...]:
        """Nanoseconds of each hand-off since the last call."""
        times, self._times = tuple(self._times), []
        return times

    # -- what the scheduler calls ------------------------------------------------------------------------------------

    def before_step(self, step: Step) -> None:
        self._left = 0

    def recv_registered(self, microbatch: Microbatch) -> None:
        self._left = perf_counter_ns()

    def recv_ran(self, owner: Microbatch, by: int | None) -> None:
        if by is None:
            # The owner receives between its yield's return and its next line: that time is no hand-off.
            self._left = 0

    # -- what a dispatch calls ---------------------------------------------------------------------------------------

    def went_on(self) -> None:
        if self._left:
            self._times.append(perf_counter_ns() - self._left)
            self._left = 0


class _ClockedDispatch:
    """A dispatch that tells the clock when it is read."""

    __slots__ = ("_clock", "_inner", "combine_send", "finish_combine", "finish_dispatch")

    def __init__(self, inner: Dispatch, clock: HandOffClock) -> None:
        self._inner = inner
        self._clock = clock
        self.finish_dispatch: Any = inner.finish_dispatch
        self.combine_send: Any = inner.combine_send
        self.finish_combine: Any = inner.finish_combine

    @property
    def bytes_sent(self) -> int:
        return self._inner.bytes_sent

    def tokens(self) -> DispatchedTokens | PaddedTokens:
        self._clock.went_on()
        return self._inner.tokens()

    def combined(self) -> Tensor:
        self._clock.went_on()
        return self._inner.combined()
