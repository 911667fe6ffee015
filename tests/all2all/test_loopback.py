"""The all-to-all of one rank: routings of every kind, the order of the rows, the order of the parts, refused inputs."""

from __future__ import annotations

from unittest.mock import patch

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from dbo_greenlet.all2all import AllToAllInputError, PaddedTokens, PartOrderError
from dbo_greenlet.all2all.loopback import Loopback
from dbo_greenlet.errors import ConfigurationError, ReceiveNotFinishedError
from tests.all2all.rank_cases import dense_reference, layer, random_inputs, run_experts


@st.composite
def routings(draw: st.DrawFn) -> tuple[int, Tensor]:
    """A number of experts and topk_ids [T, K]: repeats, -1, no tokens at all."""
    num_experts = draw(st.integers(1, 6))
    tokens = draw(st.integers(0, 7))
    choices = draw(st.integers(1, 4))
    row = st.lists(st.integers(-1, num_experts - 1), min_size=choices, max_size=choices)
    rows = draw(st.lists(row, min_size=tokens, max_size=tokens))
    return num_experts, torch.tensor(rows, dtype=torch.int64).view(tokens, choices)


@given(routings(), st.sampled_from([torch.float32, torch.bfloat16, torch.float16]), st.integers(0, 2**31))
def test_any_routing_equals_the_dense_computation(routing: tuple[int, Tensor], dtype: torch.dtype, seed: int) -> None:
    num_experts, topk_ids = routing
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(topk_ids.shape[0], 5, generator=generator).to(dtype)
    weights = torch.randn(topk_ids.shape, generator=generator)
    result = layer(Loopback(num_experts), hidden, topk_ids, weights)
    assert result.dtype == dtype
    assert torch.equal(result, dense_reference(hidden, topk_ids, weights))


@given(routings(), st.sampled_from([torch.float32, torch.bfloat16]), st.integers(0, 2**31))
def test_a_static_shape_gives_the_same_bits(routing: tuple[int, Tensor], dtype: torch.dtype, seed: int) -> None:
    num_experts, topk_ids = routing
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(topk_ids.shape[0], 5, generator=generator).to(dtype)
    weights = torch.randn(topk_ids.shape, generator=generator)
    static = Loopback(num_experts, static_shapes=True)
    assert torch.equal(layer(static, hidden, topk_ids, weights), dense_reference(hidden, topk_ids, weights))


def test_a_static_shape_depends_on_the_number_of_tokens_only() -> None:
    hidden = torch.tensor([[0.0], [1.0], [2.0]])
    sent = Loopback(2, static_shapes=True).dispatch_send(hidden, torch.tensor([[1], [1], [-1]]), torch.ones(3, 1))
    sent.finish_dispatch()
    tokens = sent.tokens()
    assert isinstance(tokens, PaddedTokens)
    assert tokens.hidden.shape == (2, 3, 1)
    assert tokens.counts.tolist() == [0, 2]
    assert tokens.hidden[1, :2].flatten().tolist() == [0.0, 1.0]


def test_only_a_static_shape_can_be_captured() -> None:
    assert "static shapes" in str(Loopback(2).not_capturable)
    assert Loopback(2, static_shapes=True).not_capturable is None


def test_many_choices_are_added_like_few() -> None:
    # Above a size the terms are not held in memory together; the numbers must not change.
    generator = torch.Generator().manual_seed(2)
    hidden, topk_ids, weights = random_inputs(generator, 6, 5, 4)
    together = layer(Loopback(4), hidden, topk_ids, weights)
    with patch("dbo_greenlet.all2all.routing._MAX_TERMS", 0):
        assert torch.equal(layer(Loopback(4), hidden, topk_ids, weights), together)


@given(routings())
def test_rows_are_grouped_by_expert_then_token_then_choice(routing: tuple[int, Tensor]) -> None:
    num_experts, topk_ids = routing
    tokens = topk_ids.shape[0]
    hidden = torch.arange(tokens, dtype=torch.float32).view(tokens, 1)
    sent = Loopback(num_experts).dispatch_send(hidden, topk_ids, torch.ones(topk_ids.shape))
    sent.finish_dispatch()
    received = sent.tokens()
    rows, counts = [], []
    for expert in range(num_experts):
        of_expert = [token for token in range(tokens) for choice in topk_ids[token].tolist() if choice == expert]
        rows += of_expert
        counts.append(len(of_expert))
    assert received.hidden.flatten().tolist() == rows
    assert received.counts.tolist() == counts


@given(routings(), st.data())
def test_a_token_has_the_same_bits_in_any_company(routing: tuple[int, Tensor], data: st.DataObject) -> None:
    num_experts, topk_ids = routing
    order = data.draw(st.permutations(range(topk_ids.shape[0])))
    kept = torch.tensor(order[: data.draw(st.integers(0, len(order)))], dtype=torch.int64)
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(topk_ids.shape[0], 19, generator=generator)
    weights = torch.rand(topk_ids.shape, generator=generator)
    everyone = layer(Loopback(num_experts), hidden, topk_ids, weights)
    some = layer(Loopback(num_experts), hidden[kept], topk_ids[kept], weights[kept])
    assert torch.equal(some, everyone[kept])


def test_choices_are_added_in_order_and_in_float32() -> None:
    # Next to 1e8 a float32 has no room for 1: whether it survives depends on when it is added.
    hidden = torch.tensor([[1.0]])
    weights = torch.tensor([[1e8, -1e8, 1.0]])
    sent = Loopback(3).dispatch_send(hidden, torch.tensor([[2, 1, 0]]), weights)
    sent.finish_dispatch()
    sent.combine_send(sent.tokens().hidden)
    sent.finish_combine()
    assert sent.combined().item() == 1.0
    sent = Loopback(3).dispatch_send(hidden, torch.tensor([[2, 1, 0]]), weights[:, [0, 2, 1]])
    sent.finish_dispatch()
    sent.combine_send(sent.tokens().hidden)
    sent.finish_combine()
    assert sent.combined().item() == 0.0


def test_the_callers_tensors_are_free_after_the_send() -> None:
    generator = torch.Generator().manual_seed(1)
    hidden, topk_ids, weights = random_inputs(generator, 6, 2, 4)
    expected = dense_reference(hidden, topk_ids, weights)
    all_to_all = Loopback(4)
    sent = all_to_all.dispatch_send(hidden, topk_ids, weights)
    hidden.zero_(), topk_ids.zero_(), weights.zero_()
    sent.finish_dispatch()
    sent.combine_send(run_experts(all_to_all, sent))
    sent.finish_combine()
    assert torch.equal(sent.combined(), expected)


def test_reading_or_answering_before_the_receive_is_an_error() -> None:
    sent = Loopback(2).dispatch_send(torch.ones(1, 2), torch.tensor([[0]]), torch.ones(1, 1))
    with pytest.raises(ReceiveNotFinishedError, match="tokens"):
        sent.tokens()
    with pytest.raises(ReceiveNotFinishedError, match="combine_send"):
        sent.combine_send(torch.ones(1, 2))
    with pytest.raises(PartOrderError, match="before combine_send"):
        sent.finish_combine()
    sent.finish_dispatch()
    sent.combine_send(sent.tokens().hidden)
    with pytest.raises(ReceiveNotFinishedError, match="combined"):
        sent.combined()
    sent.finish_combine()
    assert sent.combined().tolist() == [[1.0, 1.0]]


def test_a_part_called_twice_is_an_error_and_changes_nothing() -> None:
    sent = Loopback(2).dispatch_send(torch.ones(1, 2), torch.tensor([[0]]), torch.ones(1, 1))
    sent.finish_dispatch()
    with pytest.raises(PartOrderError, match="finish_dispatch"):
        sent.finish_dispatch()
    sent.combine_send(sent.tokens().hidden)
    with pytest.raises(PartOrderError, match="combine_send"):
        sent.combine_send(torch.zeros(1, 2))
    sent.finish_combine()
    with pytest.raises(PartOrderError, match="finish_combine"):
        sent.finish_combine()
    assert sent.combined() is sent.combined()
    assert sent.combined().tolist() == [[1.0, 1.0]]


def test_outputs_of_another_shape_or_dtype_are_refused_and_can_be_sent_again() -> None:
    sent = Loopback(2).dispatch_send(torch.ones(2, 2), torch.tensor([[0], [1]]), torch.ones(2, 1))
    sent.finish_dispatch()
    for wrong in (torch.ones(1, 2), torch.ones(2, 3), torch.ones(2, 2, dtype=torch.bfloat16)):
        with pytest.raises(AllToAllInputError, match="expert outputs"):
            sent.combine_send(wrong)
    sent.combine_send(torch.ones(2, 2))
    sent.finish_combine()
    assert sent.combined().tolist() == [[1.0, 1.0], [1.0, 1.0]]


@pytest.mark.parametrize(
    ("hidden", "topk_ids", "weights", "complaint"),
    [
        (torch.ones(2), torch.zeros(2, 1, dtype=torch.int64), torch.ones(2, 1), "hidden must be"),
        (torch.ones(2, 3).double(), torch.zeros(2, 1, dtype=torch.int64), torch.ones(2, 1), "float64"),
        (torch.ones(2, 3), torch.zeros(3, 1, dtype=torch.int64), torch.ones(3, 1), "2 tokens"),
        (torch.ones(2, 3), torch.zeros(2, 0, dtype=torch.int64), torch.ones(2, 0), "topk_ids must be"),
        (torch.ones(2, 3), torch.zeros(2, 1, dtype=torch.int32), torch.ones(2, 1), "int32"),
        (torch.ones(2, 3), torch.zeros(2, 1, dtype=torch.int64), torch.ones(2, 1).half(), "float16"),
        (torch.ones(2, 3), torch.zeros(2, 1, dtype=torch.int64), torch.ones(2, 2), "shape of topk_ids"),
        (torch.ones(2, 3), torch.tensor([[0], [4]]), torch.ones(2, 1), "expert 4; it must be one of 0 to 3"),
        (torch.ones(2, 3), torch.tensor([[-2], [3]]), torch.ones(2, 1), "expert -2"),
        (torch.ones(2, 3), torch.zeros(2, 1, dtype=torch.int64, device="meta"), torch.ones(2, 1), "one device"),
    ],
)
def test_wrong_inputs_are_named(hidden: Tensor, topk_ids: Tensor, weights: Tensor, complaint: str) -> None:
    with pytest.raises(AllToAllInputError, match=complaint):
        Loopback(4).dispatch_send(hidden, topk_ids, weights)


def test_no_experts_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="num_experts = 0"):
        Loopback(0)
