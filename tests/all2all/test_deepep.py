"""The DeepEP transports on CPUs, over a stand-in for the library that moves the tokens between real gloo ranks.

What the stand-in cannot show (kernels, streams, graphs) is in tests/gpu/test_deepep.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.all2all import deepep_tasks
from tests.ranks.rank_pool import RankPool

Results = list[dict[str, dict[str, Any]]]
BF16 = 1e-2  # relative error of two products and a sum in bfloat16
KINDS = pytest.mark.parametrize("kind", ["ll", "ht"])


@pytest.fixture(scope="module")
def ranks() -> Iterator[RankPool]:
    pool = RankPool(2)
    pool.make_groups("two", 2)
    yield pool
    pool.close()


def run(ranks: RankPool, kind: str, *cases: str) -> Results:
    told = ranks.check(deepep_tasks.run, name="two", kind=kind, hidden=32, cases=list(cases))
    for rank in told:
        for case in rank.values():
            assert "error" not in case, case["error"]
        assert "closed" in rank
        assert rank["calls"]["calls"][-1] == ("destroyed",)
    return told


@KINDS
def test_every_token_count_against_all_experts_on_one_rank(ranks: RankPool, kind: str) -> None:
    for rank in run(ranks, kind, "against_reference", "repeats"):
        case = rank["against_reference"]
        assert len(case["errors"]) == 8
        assert all(error < BF16 for error in case["errors"].values()), case
        assert case["nowhere"] == 0.0
        assert rank["repeats"]["largest"] == 0.0


@KINDS
def test_microbatches_have_the_same_bits_split_and_in_turn(ranks: RankPool, kind: str) -> None:
    for rank in run(ranks, kind, "split", "model"):
        assert {rank["split"][name] for name in ("two", "three", "threads")} == {0.0}
        assert rank["model"]["split against in turn"] == 0.0
        assert all(error < 2 * BF16 for error in rank["model"]["against one rank"].values()), rank["model"]


def test_experts_get_rows_for_the_tokens_that_are_expected(ranks: RankPool) -> None:
    for rank in run(ranks, "ll", "expected_tokens"):
        told = rank["expected_tokens"]
        assert told["rows"] == 2 * 5
        assert told["refused"] == [6, 5]
        assert max(told["relative"], told["after"]) < BF16
        # What is sent back has the shape that DeepEP takes all the same.
        assert {call[1] for call in rank["calls"]["calls"] if call[0] == "ll combine"} == {(4, 48, 2048)}


def test_low_latency_sends_and_receives_take_turns_and_the_sibling_receives(ranks: RankPool) -> None:
    for rank in ranks.check(deepep_tasks.one_split_step, name="two", kind="ll"):
        names = [call[0] for call in rank]
        assert names == ["ll dispatch", "ll dispatch received"] * 2 + ["ll combine", "ll combine received"] * 2
        # Microbatch 1 receives what 0 sent; what the last one sent is received by the hub or by itself.
        assert [(call[0], call[-1]) for call in rank[:3]] == [
            ("ll dispatch", 0),
            ("ll dispatch received", 1),
            ("ll dispatch", 1),
        ]


def test_high_throughput_events_are_captured_by_the_owner_before_it_yields(ranks: RankPool) -> None:
    for rank in ranks.check(deepep_tasks.one_split_step, name="two", kind="ht"):
        # The dispatch of microbatch 0 waits for the event that 0 captured, and 1 launches it, before its own event.
        captures = [place for place, call in enumerate(rank) if call[0] == "capture"]
        layouts = [place for place, call in enumerate(rank) if call[0] == "ht layout"]
        assert rank[captures[0]] == ("capture", 0)
        assert rank[layouts[0]] == ("ht layout", captures[0] + 1)
        assert rank[layouts[0] + 1][0] == "ht dispatch"
        assert rank[layouts[0] + 1][-1] == 1
        assert captures[0] < layouts[0] < captures[1]
        assert rank[captures[1]] == ("capture", 1)
        assert rank[layouts[1]] == ("ht layout", captures[1] + 1)
        # A combine stands right behind the event of its own microbatch.
        combines = [place for place, call in enumerate(rank) if call[0] == "ht combine"]
        assert [rank[place - 1] for place in combines] == [("capture", rank[place][-1]) for place in combines]
        assert [rank[place][-1] for place in combines] == [0, 1]


def test_rows_padded_to_the_wire_and_cut_are_exact(ranks: RankPool) -> None:
    for right, shapes in ranks.check(deepep_tasks.narrow_rows, name="two"):
        assert right == [True] * 4
        assert shapes == {2048}


@KINDS
def test_what_is_not_taken_is_refused_with_numbers(ranks: RankPool, kind: str) -> None:
    for rank in run(ranks, kind, "errors"):
        told = rank["errors"]
        assert "bfloat16" in told["dtype"]
        assert "rows of 16" in told["width"]
        assert "40 choices" in told["choices"]
        if kind == "ll":
            assert "25 tokens" in told["tokens"]
            assert "one operation at a time" in told["two receives"]
            assert float(told["after"]) < BF16


@KINDS
def test_a_failing_microbatch_fails_both_ranks_and_the_next_step_works(ranks: RankPool, kind: str) -> None:
    failing, other = (rank["failure"] for rank in run(ranks, kind, "failure"))
    assert failing["rank"] == ["ValueError"] * len(failing["rank"])
    assert other["rank"] == ["RankFailedError"] * len(other["rank"])
    assert {*failing["after"], *other["after"]} == {0.0}


def test_multiprocessors_are_reserved_for_the_time_of_a_block(ranks: RankPool) -> None:
    for rank in ranks.check(deepep_tasks.reserve, name="two"):
        assert rank["before"] == rank["after"] == [20, 0]
        assert rank["inside"] == [12, 12]
        assert rank["used"] == [20, 12, 12, 20]  # by the dispatches and combines before, inside and after


def test_a_process_that_joins_later_is_refused(ranks: RankPool) -> None:
    for error in ranks.check(deepep_tasks.meet_for_different_things, name="two"):
        assert "restart all ranks" in error


@KINDS
def test_a_dispatch_from_before_a_reset_cannot_be_completed_after_it(ranks: RankPool, kind: str) -> None:
    for right, *told in ranks.check(deepep_tasks.complete_after_a_reset, name="two", kind=kind):
        assert right == "True"
        assert all("before the group was reset" in error for error in told)


def test_a_rank_owes_the_operations_of_a_graph_that_it_did_not_replay(ranks: RankPool) -> None:
    replayed, failed = ranks.check(deepep_tasks.fail_instead_of_replaying, name="two")
    assert "no memory for the inputs" in replayed[0]
    assert (replayed[1], failed[1]) == ("True", "True")


@pytest.mark.parametrize(
    ("kind", "call"),
    [("ll", "low_latency_dispatch"), ("ll", "low_latency_combine"), ("ht", "get_dispatch_layout"), ("ht", "combine")],
)
def test_an_error_inside_the_library_ends_its_use_on_every_rank(ranks: RankPool, kind: str, call: str) -> None:
    failing, other = ranks.check(deepep_tasks.fail_inside_the_library, name="two", kind=kind, call=call)
    assert failing[0] == "OutOfMemoryError: no room for the rows"
    assert other[0].startswith("RankFailedError: rank 0 failed: OutOfMemoryError")
    for told in (failing, other):
        # Whoever is first announces it, and the other may hear of that before it sees for itself.
        assert told[1].startswith(("BrokenGroupError: ", "RankFailedError: "))
        assert told[1].endswith("restart all ranks")


def test_a_rank_pays_once_what_it_owes_also_if_settling_fails(ranks: RankPool) -> None:
    assert ranks.check(deepep_tasks.fail_while_settling, name="two") == [["rank 1 failed: it stalled", "True"]] * 2
