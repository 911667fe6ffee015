"""The experts of one rank: rows sorted by expert, and the same rows in a static shape."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from dbo_greenlet.all2all import DispatchedTokens, PaddedTokens
from dbo_greenlet.moe.experts import LocalExperts
from tests.runner.tiny import CONFIG

COUNTS = [3, 0, 5, 1]


@pytest.fixture
def experts() -> LocalExperts:
    made = LocalExperts(CONFIG, 0, len(COUNTS))
    generator = torch.Generator().manual_seed(0)
    for parameter in made.parameters():
        parameter.copy_(torch.randn(parameter.shape, generator=generator) / parameter.shape[-1] ** 0.5)
    return made


def rows(width: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(count, width, generator=generator) for count in COUNTS]


def expected(experts: LocalExperts, of_expert: list[torch.Tensor]) -> list[torch.Tensor]:
    out = []
    for number, hidden in enumerate(of_expert):
        gate, up = (hidden.double() @ experts.gate_up_proj[number].double().T).chunk(2, dim=-1)
        out.append((F.silu(gate) * up) @ experts.down_proj[number].double().T)
    return out


def test_exact_rows_go_through_their_experts(experts: LocalExperts) -> None:
    of_expert = rows(CONFIG.hidden_size)
    out = experts.forward(DispatchedTokens(torch.cat(of_expert), torch.tensor(COUNTS)))
    torch.testing.assert_close(out.double(), torch.cat(expected(experts, of_expert)), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("places", [5, 9])
def test_rows_in_a_static_shape_do_not_see_what_else_is_there(experts: LocalExperts, places: int) -> None:
    of_expert = rows(CONFIG.hidden_size)
    hidden = torch.full((len(COUNTS), places, CONFIG.hidden_size), float("nan"))
    for number, real in enumerate(of_expert):
        hidden[number, : len(real)] = real
    out = experts.forward(PaddedTokens(hidden, torch.tensor(COUNTS)))
    assert out.shape == hidden.shape
    for number, theirs in enumerate(expected(experts, of_expert)):
        ours = out[number, : COUNTS[number]]
        torch.testing.assert_close(ours.double(), theirs, rtol=1e-5, atol=1e-5)


def test_rows_that_are_cut_from_wider_ones_are_taken(experts: LocalExperts) -> None:
    wide = torch.randn(len(COUNTS), 6, 2 * CONFIG.hidden_size, generator=torch.Generator().manual_seed(2))
    cut = wide[..., : CONFIG.hidden_size]
    counts = torch.full((len(COUNTS),), 6)
    ours = experts.forward(PaddedTokens(cut, counts))
    torch.testing.assert_close(ours, experts.forward(PaddedTokens(cut.contiguous(), counts)), rtol=1e-6, atol=1e-6)
