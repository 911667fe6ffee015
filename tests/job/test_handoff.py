"""The clock round an all-to-all changes nothing of what goes through it."""

from __future__ import annotations

import pytest
import torch

from dbo_greenlet.all2all import Dispatch, PaddedTokens
from dbo_greenlet.all2all.loopback import Loopback
from dbo_greenlet.job.handoff import HandOffClock


@pytest.mark.parametrize("static_shapes", [True, False])
def test_the_clock_says_what_its_all_to_all_says(static_shapes: bool) -> None:
    inner = Loopback(4, static_shapes=static_shapes)
    clock = HandOffClock(inner)
    assert clock.not_capturable == inner.not_capturable
    assert (clock.name, clock.rank, clock.world_size, clock.num_local_experts) == ("loopback", 0, 1, 4)


@pytest.mark.parametrize("running", [True, False])
def test_rows_of_one_shape_pass_through_the_clock(running: bool) -> None:
    clock = HandOffClock(Loopback(4, static_shapes=True))
    clock.running = running
    hidden = torch.arange(6.0).view(3, 2)
    ids = torch.tensor([[0, 3], [3, 1], [2, -1]])
    dispatch: Dispatch = clock.dispatch_send(hidden, ids, torch.full((3, 2), 0.5))
    dispatch.finish_dispatch()
    tokens = dispatch.tokens()
    assert isinstance(tokens, PaddedTokens) and tokens.counts.tolist() == [1, 1, 1, 2]
    dispatch.combine_send(tokens.hidden * 2)
    dispatch.finish_combine()
    # Half of twice the row for each real choice.
    assert torch.equal(dispatch.combined(), hidden * torch.tensor([[2.0], [2.0], [1.0]]))


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("close", ()),
        ("expect_tokens", (12,)),
        ("reserve_sms", ()),
        ("begin_capture", ()),
        ("replay_token", ()),
        ("replaying", ("token",)),
    ],
)
def test_what_is_said_to_the_clock_is_said_to_its_all_to_all(
    monkeypatch: pytest.MonkeyPatch, name: str, arguments: tuple[object, ...]
) -> None:
    heard = []

    def hear(self: Loopback, *said: object) -> str:
        heard.append((self, said))
        return "an answer"

    monkeypatch.setattr(Loopback, name, hear)
    inner = Loopback(4)
    answer = getattr(HandOffClock(inner), name)(*arguments)
    assert heard == [(inner, arguments)]
    assert answer == ("an answer" if name in ("reserve_sms", "replay_token") else None)
