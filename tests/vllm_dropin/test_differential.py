"""The drop-in against vLLM's threads: equal outputs, and an equal log but for a table of fewer calls.

Each case runs three times on fresh objects: microbatches one after the other, with vLLM's threads, with the drop-in.
"""

from __future__ import annotations

import pytest

pytest.importorskip("vllm", reason="needs vLLM, which is the other side (make test-vllm)")

import torch

from tests.vllm_dropin.differences import TABLE, compare, expected
from tests.vllm_dropin.drive import Case, Outcome, drop_in, run_case, run_in_turn

pytestmark = pytest.mark.vllm

STRADDLING = {"queries": [5, 7, 4], "contexts": [2, 0, 6]}

CASES = [
    *(
        Case(runner, backend, mode, layers)
        for runner in ("V1", "V2")
        for backend in ("LL", "HT")
        for mode in ("eager", "capture")
        for layers in (1, 2, 3)
    ),
    *(Case(runner, backend, shared=False) for runner in ("V1", "V2") for backend in ("LL", "HT")),
    *(Case(runner, "LL", mode, inputs=inputs) for inputs in ("mrope", "embeds", "intermediate")
      for runner in ("V1", "V2") for mode in ("eager", "capture")),
    *(Case(runner, "HT", mode, 2, output="aux") for runner in ("V1", "V2") for mode in ("eager", "capture")),
    *(Case("V2", "LL", mode, output="intermediate") for mode in ("eager", "capture")),
    *(Case("V2", backend, mode, dcp=2, batch=STRADDLING) for backend in ("LL", "HT") for mode in ("eager", "capture")),
    *(Case(runner, backend, mode, 2, batch=STRADDLING) for runner in ("V1", "V2") for backend in ("LL", "HT")
      for mode in ("eager", "capture")),
    # 7 real tokens of 8; 6 of 16: the last microbatch is padding and nothing else, which V1's vote rules out.
    *(Case(runner, "LL", mode, batch={"queries": [1] * 7, "padded": 8}) for runner in ("V1", "V2")
      for mode in ("eager", "capture")),
    *(Case("V2", backend, mode, batch={"queries": [2, 2, 2], "padded": 16}) for backend in ("LL", "HT")
      for mode in ("eager", "capture")),
]  # fmt: skip


def same(one: list[list[torch.Tensor]], other: list[list[torch.Tensor]]) -> bool:
    return [len(step) for step in one] == [len(step) for step in other] and all(
        torch.equal(a, b) for left, right in zip(one, other, strict=True) for a, b in zip(left, right, strict=True)
    )


@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_drop_in_does_what_the_threads_do(case: Case) -> None:
    in_turn = run_in_turn(case)
    threads = run_case(case)
    with drop_in():
        greenlets = run_case(case)
    assert not any(one.isnan().any() for step in in_turn for one in step)
    assert not same([in_turn[0]], [in_turn[1]]), "the second step has other inputs, so it must have other outputs"
    assert same(threads.outputs, in_turn)
    assert same(greenlets.outputs, threads.outputs)
    assert compare(threads.log, greenlets.log) == expected(case)


@pytest.mark.parametrize("case", [Case("V1", "HT", "capture", 2), Case("V2", "LL", layers=2)], ids=str)
def test_what_the_threads_do_is_repeatable(case: Case) -> None:
    first, second = run_case(case), run_case(case)
    assert first.log == second.log
    assert same(first.outputs, second.outputs)


def test_the_comparison_sees_a_call_that_is_missing_doubled_or_elsewhere() -> None:
    case = Case("V1", "HT")
    threads, greenlets = _both(case)
    compare(threads.log, greenlets.log)
    at = next(i for i, call in enumerate(greenlets.log) if call.what == "event.wait")
    missing = greenlets.log[:at] + greenlets.log[at + 1 :]
    doubled = greenlets.log[: at + 1] + greenlets.log[at:]
    elsewhere = [*greenlets.log[:at], greenlets.log[at]._replace(stream="compute"), *greenlets.log[at + 1 :]]
    of_another = [*greenlets.log[:at], greenlets.log[at]._replace(who="1"), *greenlets.log[at + 1 :]]
    for wrong in (missing, doubled, elsewhere, of_another):
        with pytest.raises(AssertionError, match="threads:"):
            compare(threads.log, wrong)


def test_the_comparison_sees_a_wrong_stream_and_a_wrong_number() -> None:
    case = Case("V1", "HT")
    threads, greenlets = _both(case)
    log = greenlets.log
    at = next(i for i, c in enumerate(log) if c.what == "set_stream" and c.who == "0" and c.stream != log[i - 1].stream)
    with pytest.raises(AssertionError, match="threads:"):
        compare(threads.log, log[:at] + log[at + 1 :])
    assert compare(threads.log, threads.log) != expected(case)


def test_the_comparison_sees_a_stream_that_lacks_its_cublas_handle() -> None:
    threads, greenlets = _both(Case("V1", "LL", "capture"))
    at = [i for i, call in enumerate(greenlets.log) if call.what == "blas_handle"]
    one, other = (greenlets.log[i - 1 : i + 2] for i in at)
    assert one != other
    twice = greenlets.log[: at[1] - 1] + one + greenlets.log[at[1] + 2 :]
    with pytest.raises(AssertionError, match="cuBLAS handles"):
        compare(threads.log, twice)


def test_every_row_of_the_table_applies_somewhere() -> None:
    for row in TABLE:
        assert any(row.count(case) for case in CASES), row


def _both(case: Case) -> tuple[Outcome, Outcome]:
    threads = run_case(case)
    with drop_in():
        return threads, run_case(case)
