"""Dispatch and combine between real gloo ranks, compared bit by bit with the obvious dense computation."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from dbo_greenlet.all2all import CapacityExceededError
from dbo_greenlet.all2all.torch_distributed import TorchDistributed
from dbo_greenlet.errors import ConfigurationError
from dbo_greenlet.ranks import RankGroup, serve_store
from tests.all2all import rank_cases
from tests.all2all.rank_cases import Capacity
from tests.ranks.rank_pool import RankPool

EXACT_ROWS = pytest.mark.parametrize("capacity", [None, 9], ids=["exact", "capacity"])
MODES = pytest.mark.parametrize("capacity", [None, 9, (9, "static")], ids=["exact", "capacity", "static"])


@pytest.fixture(scope="module")
def ranks() -> Iterator[RankPool]:
    """Three processes; the groups "two" and "three"."""
    pool = RankPool(3)
    pool.make_groups("two", 2)
    pool.make_groups("three", 3)
    yield pool
    pool.close()


@pytest.mark.parametrize("mode", ["exact", "capacity", "static"])
def test_every_token_count_on_two_ranks(ranks: RankPool, mode: str) -> None:
    compared = ranks.check(rank_cases.all_token_counts, range(2), name="two", mode=mode, largest=4, choices=[1, 2, 4])
    assert compared == [150, 150]


@pytest.mark.parametrize("mode", ["exact", "capacity", "static"])
def test_every_token_count_on_three_ranks(ranks: RankPool, mode: str) -> None:
    compared = ranks.check(rank_cases.all_token_counts, name="three", mode=mode, largest=2, choices=[1, 3])
    assert compared == [108] * 3


@MODES
@pytest.mark.parametrize("name", ["two", "three"])
def test_one_sided_and_repeated_routings(ranks: RankPool, name: str, capacity: Capacity) -> None:
    world = {"two": 2, "three": 3}[name]
    assert ranks.check(rank_cases.patterns, range(world), name=name, capacity=capacity) == [[]] * world


@MODES
def test_dtypes_and_odd_widths(ranks: RankPool, capacity: Capacity) -> None:
    assert ranks.check(rank_cases.dtypes, range(2), name="two", capacity=capacity) == [[], []]


@EXACT_ROWS
def test_rows_are_grouped_by_expert_then_source_then_token_then_choice(ranks: RankPool, capacity: Capacity) -> None:
    first, second = ranks.check(rank_cases.received_order, range(2), name="two", capacity=capacity)
    # Expert 0: one row a token. Expert 1: two rows a token, for its first and its third choice.
    expert_0 = [[0.0, 0.0], [0.0, 1.0], [1.0, 0.0], [1.0, 1.0]]
    expert_1 = [row for row in expert_0 for _ in range(2)]
    assert first == (expert_0 + expert_1, [4, 8])
    assert second == ([], [0, 0])


def test_in_a_static_shape_an_expert_has_its_rows_first_and_each_token_once(ranks: RankPool) -> None:
    first, second = ranks.check(rank_cases.received_order, range(2), name="two", capacity=(3, "static"))
    rows, counts = first
    assert counts == [4, 4]
    assert [len(of_expert) for of_expert in rows] == [6, 6]  # two ranks, three tokens each
    assert [of_expert[:4] for of_expert in rows] == [[[0.0, 0.0], [0.0, 1.0], [1.0, 0.0], [1.0, 1.0]]] * 2
    assert second[1] == [0, 0]


def test_messages_are_padded_to_what_is_expected(ranks: RankPool) -> None:
    for few, many, as_made, refused in ranks.check(rank_cases.expected_tokens, range(2), name="two"):
        assert few[0] * 3 == many[0]
        assert many == as_made
        assert (few[1:], many[1:]) == ((6, True), (18, True))
        assert isinstance(refused, CapacityExceededError)
        assert (refused.tokens, refused.capacity) == (3, 2)


def test_graphs_from_before_a_reset_are_refused(ranks: RankPool) -> None:
    for before, after in ranks.check(rank_cases.replay_after_a_reset, range(2), name="two"):
        assert before == "replayed"
        assert "capture it again" in after


def test_what_can_be_captured_depends_on_capacity_and_shape(ranks: RankPool) -> None:
    told = ranks.check(rank_cases.not_capturable, range(2), name="two")[0]
    assert "without a capacity" in told["exact"]
    assert "without static shapes" in told["capacity"]
    assert told["static"] is None


@MODES
def test_a_token_has_the_same_bits_alone_and_in_company(ranks: RankPool, capacity: Capacity) -> None:
    assert ranks.check(rank_cases.company_does_not_matter, range(3), name="three", capacity=capacity) == [True] * 3


@MODES
def test_two_dispatches_in_flight_in_every_interleaving(ranks: RankPool, capacity: Capacity) -> None:
    assert ranks.check(rank_cases.two_in_flight, range(2), name="two", capacity=capacity) == [[], []]


@MODES
def test_under_the_scheduler_as_one_after_the_other(ranks: RankPool, capacity: Capacity) -> None:
    assert ranks.check(rank_cases.scheduled, range(2), name="two", capacity=capacity, layers=3) == [True, True]


def test_with_a_capacity_the_send_parts_do_not_wait_for_the_other_rank(ranks: RankPool) -> None:
    assert ranks.check(rank_cases.send_does_not_wait, range(2), name="two", key="send_does_not_wait") == [True, True]


def test_capacity_exceeded_names_the_numbers_and_the_capacity_can_be_raised(ranks: RankPool) -> None:
    for error, right_after in ranks.check(rank_cases.capacity_per_step, range(2), name="two"):
        assert isinstance(error, CapacityExceededError)
        assert (error.tokens, error.capacity) == (5, 2)
        assert "5 tokens" in str(error)
        assert "capacity of 2" in str(error)
        assert right_after is True


def test_bytes_sent_counts_what_leaves_for_other_ranks(ranks: RankPool) -> None:
    # A row of the dispatch: 8 float32, and 2 expert numbers padded to 16 bytes. A row of the combine: 8 float32.
    row, answer = 8 * 4 + 16, 8 * 4
    exact = ranks.check(rank_cases.bytes_sent, range(2), name="two", capacity=None)
    assert exact == [(3 * row, 3 * row + 3 * answer)] * 2
    padded = ranks.check(rank_cases.bytes_sent, range(2), name="two", capacity=5)
    assert padded == [(5 * row, 5 * row + 5 * 2 * answer)] * 2


def test_a_group_of_one_works_and_bad_settings_are_refused() -> None:
    import torch

    with RankGroup(serve_store(), 0, 1) as alone:
        for capacity in (None, 4):
            all_to_all = TorchDistributed(alone, 3, capacity)
            inputs = rank_cases.random_inputs(rank_cases.generator_of(0, 1), 4, 2, 3)
            assert torch.equal(rank_cases.layer(all_to_all, *inputs), rank_cases.dense_reference(*inputs))
        with pytest.raises(ConfigurationError, match="capacity = 0"):
            TorchDistributed(alone, 3, 0)
        with pytest.raises(ConfigurationError, match="num_experts = 0"):
            TorchDistributed(alone, 0)
