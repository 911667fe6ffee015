"""DeepEP and NCCL between two processes, on one GPU or with one each. Run there: python -m pytest -m gpu tests/gpu"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device; run: python -m pytest -m gpu"),
]

SCRIPT = Path(__file__).with_name("script_gpu_rank.py")
ROOT = SCRIPT.parents[2]
TIME_LIMIT = 100  # seconds; most of a run is start-up
BF16 = 2e-2  # relative error of two products and a sum in bfloat16, with room

FAILURE_SECONDS = 5.0  # as dbo_greenlet.ranks promises

Results = list[dict[str, dict[str, Any]]]


def run_ranks(kind: str, hidden: int, *cases: str, survivors: int = 2) -> Results:
    """What the two ranks told, by case; of rank 0 alone it is expected to end well if there is one survivor."""
    from dbo_greenlet.ranks import serve_store

    if kind in ("ll", "ht") and importlib.util.find_spec("deep_ep") is None:
        pytest.skip('needs DeepEP 1.2: pip install "dbo-greenlet[deepep]"')
    store = serve_store()
    processes = [
        subprocess.Popen(
            [sys.executable, str(SCRIPT), str(rank), str(store.port), kind, str(hidden), *cases],
            env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        outputs = [process.communicate(timeout=TIME_LIMIT)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    told = []
    for rank, (process, output) in enumerate(zip(processes, outputs, strict=True)):
        lines = [json.loads(line[7:]) for line in output.splitlines() if line.startswith("RESULT ")]
        told.append({line["case"]: line for line in lines})
        if rank < survivors:
            assert process.returncode == 0, output
            assert "closed" in told[-1], output
    return told


@pytest.fixture(scope="module", params=[("ll", 128), ("ll", 2048), ("ht", 128), ("ht", 2048), ("nccl", 128)], ids=str)
def results(request: pytest.FixtureRequest) -> tuple[str, Results]:
    kind, hidden = request.param
    return kind, run_ranks(kind, hidden)


def test_every_token_count_against_all_experts_on_one_rank(results: tuple[str, Results]) -> None:
    for rank in results[1]:
        case = rank["against_reference"]
        assert all(error < BF16 for error in case["errors"].values()), case
        assert case["nowhere"] == 0.0


def test_what_can_be_captured_says_so(results: tuple[str, Results]) -> None:
    kind, ranks = results
    for rank in ranks:
        reason = rank["made"]["not_capturable"]
        assert ("counts on the host" in reason) if kind == "ht" else reason is None


def test_experts_get_rows_for_the_tokens_that_are_expected(results: tuple[str, Results]) -> None:
    kind, ranks = results
    if kind == "ht":
        pytest.skip("rows are exact")
    for rank in ranks:
        told = rank["expected_tokens"]
        assert told["rows"] == 2 * 5
        assert told["refused"] == [6, 5]
        assert max(told["relative"], told["after"]) < BF16


def test_a_repeated_layer_has_the_same_bits(results: tuple[str, Results]) -> None:
    kind, ranks = results
    for rank in ranks:
        assert rank["repeats"]["largest"] == 0.0, kind


def test_microbatches_have_the_same_bits_split_and_in_turn(results: tuple[str, Results]) -> None:
    for rank in results[1]:
        assert {rank["split"][name] for name in ("two", "three", "threads")} == {0.0}
        assert rank["model"]["split against in turn"] == 0.0


def test_a_model_step_equals_one_rank_with_all_experts(results: tuple[str, Results]) -> None:
    for rank in results[1]:
        assert all(error < 2 * BF16 for error in rank["model"]["against one rank"].values()), rank["model"]


def test_hooks_and_reads_on_other_streams_are_waited_for(results: tuple[str, Results]) -> None:
    kind, ranks = results
    for rank in ranks:
        told = rank["streams"]
        assert told["hooks"] == 0.0
        assert kind == "ll" or told["reads"] == told["result"] == 0.0


def test_graph_replays_equal_eager_steps(results: tuple[str, Results]) -> None:
    kind, ranks = results
    for rank in ranks:
        assert ("graph" in rank) is (kind != "ht")
        assert rank.get("graph", {"largest": 0.0})["largest"] == 0.0


def test_what_is_not_taken_is_refused_with_numbers(results: tuple[str, Results]) -> None:
    kind, ranks = results
    for rank in ranks:
        told = rank["errors"]
        if kind != "nccl":
            assert "bfloat16" in told["dtype"]
            assert "rows of 16" in told["width"]
            assert "40 choices" in told["choices"]
        if kind != "ht":
            assert "25 tokens" in told["tokens"]
        if kind == "ll":
            assert "one operation at a time" in told["two receives"]
            assert float(told["after"]) < BF16


def test_a_failing_microbatch_fails_both_ranks_and_the_next_step_works(results: tuple[str, Results]) -> None:
    failing, other = (rank["failure"] for rank in results[1])
    assert failing["rank"] == ["ValueError"] * 2
    assert other["rank"] == ["RankFailedError"] * 2
    assert {*failing["after"], *other["after"]} == {0.0}


def test_captures_that_fail_leave_a_transport_that_works(results: tuple[str, Results]) -> None:
    kind, ranks = results
    if kind == "ht":
        pytest.skip("cannot be captured")
    for rank in ranks:
        assert rank["broken_capture"]["raised"] == 4
        assert rank["broken_capture"]["largest"] == 0.0


def test_a_rank_that_fails_instead_of_replaying_is_waited_for_by_none(results: tuple[str, Results]) -> None:
    kind, ranks = results
    if kind != "ll":
        pytest.skip("only DeepEP's buffers, and graphs with them, outlive a reset of the group")
    for rank, told in enumerate(each["failed_replay"] for each in ranks):
        assert told["rank"] == (["RankFailedError"] * 2 if rank == 0 else ["BrokenGroupError"] * 2)
        assert told["after"] == [0.0] * 4


@pytest.mark.parametrize("kind", ["ll", "ht", "nccl"])
def test_a_rank_that_dies_in_a_step_is_named_in_time(kind: str) -> None:
    survivor, dead = run_ranks(kind, 128, "death", survivors=1)
    assert "rank 1 failed" in survivor["death"]["raised"]
    assert survivor["death"]["seconds"] < FAILURE_SECONDS
    assert "death" not in dead


def test_reserved_multiprocessors_are_given_back(results: tuple[str, Results]) -> None:
    kind, ranks = results
    if kind != "ht":
        pytest.skip("only the high-throughput kernels run beside the model's")
    for rank in ranks:
        told = rank["sms"]
        assert told["inside"] == [24, 24]
        assert told["before"] == told["after"]
        assert told["difference"] == 0.0
