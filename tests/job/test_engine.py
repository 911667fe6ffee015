"""Continuous batching: every token is computed once, in order, in its own slot, within the budget."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dbo_greenlet.batching import check_step
from dbo_greenlet.job.engine import Batch, Engine, RequestState, Sample, pick

EOS = 99
ROW_LENGTH = 24
CLOSE_CALL = 1e-3


def engine(states: list[RequestState], rows: int = 3, budget: int = 16, new: int = 6) -> Engine:
    return Engine(
        states,
        rows=rows,
        row_length=ROW_LENGTH,
        token_budget=budget,
        max_new_tokens=new,
        eos_ids=[EOS],
        close_call=CLOSE_CALL,
    )


def state(number: int, length: int, arrival: int = 0) -> RequestState:
    return RequestState(number, arrival, [number * 100 + j for j in range(length)])


def next_token(sequence: RequestState) -> int:
    """Anything that follows from the request and the place; sometimes the end."""
    return EOS if (sequence.number + len(sequence.generated)) % 5 == 4 else len(sequence.generated)


def run(target: Engine, steps: int) -> list[Batch]:
    batches = []
    for step in range(steps):
        batch = target.next_batch(step)
        batches.append(batch)
        target.advance(batch, [Sample(next_token(batch.parts[part][0]), 1.0) for part in batch.sampling])
    return batches


@given(
    st.lists(st.tuples(st.integers(1, ROW_LENGTH), st.integers(0, 6)), min_size=1, max_size=9),
    st.integers(1, 4),
    st.integers(1, 40),
)
def test_every_token_is_computed_once_in_its_slot_within_the_budget(
    sizes: list[tuple[int, int]], rows: int, budget: int
) -> None:
    states = [state(number, length, arrival) for number, (length, arrival) in enumerate(sizes)]
    seen: dict[int, int] = {}
    for step, batch in enumerate(run(engine(states, rows, budget), 200)):
        check_step(batch.input)
        assert batch.input.num_tokens <= max(budget, rows)
        assert len(batch.parts) <= rows
        used = batch.input.request_rows.tolist()
        assert len(set(used)) == len(used)
        for sequence, start, stop in batch.parts:
            assert sequence.arrival <= step
            assert start == seen.get(sequence.number, 0)
            seen[sequence.number] = stop
        expected = [s.row * ROW_LENGTH + p for s, start, stop in batch.parts for p in range(start, stop)]
        assert batch.input.slot_mapping.tolist() == expected
        ids = [i for s, start, stop in batch.parts for i in (s.prompt + s.generated)[start:stop]]
        # What was sampled in this very step is not in it yet.
        assert batch.input.input_ids.tolist() == ids
    for each in states:
        assert each.generated and (each.generated[-1] == EOS or len(each.generated) == 6 or each.length > ROW_LENGTH)
        # The last token is sampled and never computed.
        assert seen[each.number] == each.length - 1


def test_decodes_come_first_and_prompts_join_them() -> None:
    target = engine([state(0, 5), state(1, 4, arrival=1), state(2, 4, arrival=1), state(3, 2, arrival=1)])
    first, second, third = run(target, 3)
    assert [(s.number, start, stop) for s, start, stop in first.parts] == [(0, 0, 5)]
    assert [(s.number, start, stop) for s, start, stop in second.parts] == [(0, 5, 6), (1, 0, 4), (2, 0, 4)]
    # Request 3 waits for a row.
    assert [(s.number, start, stop) for s, start, stop in third.parts] == [(0, 6, 7), (1, 4, 5), (2, 4, 5)]
    assert third.input.uniform_query_len == 1


def test_a_prompt_longer_than_the_budget_is_cut_and_sampled_at_its_end() -> None:
    first, second, third = run(engine([state(0, 20)], budget=16), 3)
    assert [first.parts[0][1:], second.parts[0][1:], third.parts[0][1:]] == [(0, 16), (16, 20), (20, 21)]
    assert (first.sampling, second.sampling, second.last_tokens) == ([], [0], [3])


def test_many_rows_do_not_raise_the_budget() -> None:
    first, second = run(engine([state(0, 7)], rows=12, budget=4), 2)
    assert [first.parts[0][1:], second.parts[0][1:]] == [(0, 4), (4, 7)]


def test_an_engine_without_work_gives_an_idle_step() -> None:
    target = engine([state(0, 2, arrival=4)])
    assert target.next_batch(0).input.num_tokens == 0
    assert target.next_batch(4).requests == [0]


def test_a_request_ends_where_its_row_does() -> None:
    only = state(1, ROW_LENGTH - 1)
    run(engine([only], new=50, budget=64), 5)
    # One more token fits the row, and a last one is sampled after it.
    assert len(only.generated) == 2


def test_close_calls_are_kept_with_their_place() -> None:
    only = state(0, 3)
    target = engine([only])
    for step, gap in enumerate([1.0, CLOSE_CALL / 2, CLOSE_CALL]):
        target.advance(target.next_batch(step), [Sample(1, gap)])
    assert only.close_calls == {1: CLOSE_CALL / 2}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_best_token_is_picked_and_the_first_of_equals(dtype: torch.dtype) -> None:
    logits = torch.tensor([[0.0, 2.0, 1.5], [3.0, 1.0, 3.0], [-1.0, -2.0, -1.0]], dtype=dtype)
    assert pick(logits) == [Sample(1, 0.5), Sample(0, 0.0), Sample(0, 0.0)]
    assert pick(logits[:0]) == []
