"""How far the logits of two passes are apart: rows of equal history only, the largest difference, what was not kept."""

from __future__ import annotations

import math

import pytest
import torch

from dbo_greenlet.job.engine import RequestState
from dbo_greenlet.job.logits import LogitRows
from dbo_greenlet.job.messages import LogitsCompared

A, B = torch.tensor([1.0, 2.0, 3.0]), torch.tensor([4.0, 4.5, -1.0])


def request(number: int, *generated: int) -> RequestState:
    return RequestState(number, 0, [7], list(generated))


def rows(*taken: tuple[RequestState, torch.Tensor], against: LogitRows | None = None, room: int = 1000) -> LogitRows:
    out = LogitRows("dbo" if against is None else "unsplit", against, keep=against is None, kept_bytes=room)
    for sequence, logits in taken:
        out.take([sequence], logits[None])
    return out


def test_equal_rows_are_counted_and_differ_by_nothing() -> None:
    first = rows((request(0), A), (request(0, 5), B))
    compared = rows((request(0), A), (request(0, 5), B), against=first).result()
    assert compared == LogitsCompared("dbo", rows=2, equal=2)


def test_the_largest_difference_is_found_with_its_place() -> None:
    first = rows((request(0), A), (request(1), B), (request(1, 8), A))
    second = rows(
        (request(0), A),
        (request(1), B + torch.tensor([0, 0.25, 0])),
        (request(1, 8), A - torch.tensor([0, 0, 0.5])),
        against=first,
    )
    assert second.result() == LogitsCompared("dbo", rows=3, equal=1, largest=0.5, request=1, token=1)


def test_rows_after_another_token_are_not_compared() -> None:
    first = rows((request(0), A), (request(0, 5), B), (request(0, 5, 6), B))
    second = rows((request(0), A), (request(0, 4), A), (request(0, 4, 6), A), against=first)
    assert second.result() == LogitsCompared("dbo", rows=1, equal=1, parted=2)


def test_a_step_of_several_rows_is_taken_row_by_row() -> None:
    first = LogitRows("dbo", keep=True)
    first.take([request(3), request(1)], torch.stack([A, B]))
    second = LogitRows("unsplit", first)
    second.take([request(1), request(3)], torch.stack([B, A]))
    assert second.result() == LogitsCompared("dbo", rows=2, equal=2)


def test_what_is_not_kept_is_counted_as_left_out() -> None:
    # A row of three numbers takes 12 bytes.
    first = rows((request(0), A), (request(1), A), (request(2), A), room=25)
    compared = rows((request(0), A), (request(1), A), (request(2), A), against=first).result()
    assert compared == LogitsCompared("dbo", rows=2, equal=2, left_out=1)


def test_rows_of_a_request_that_ended_earlier_are_not_left_out() -> None:
    compared = rows((request(0), A), (request(0, 5), B), against=rows((request(0), A))).result()
    assert compared == LogitsCompared("dbo", rows=1, equal=1, parted=1)


def test_no_number_is_the_largest_difference() -> None:
    first = rows((request(0), A), (request(1), A))
    compared = rows((request(0), A * math.nan), (request(1), A + 1), against=first).result()
    assert compared is not None and math.isnan(compared.largest) and compared.request == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_are_copies(dtype: torch.dtype) -> None:
    logits = A.to(dtype)[None].clone()
    first = LogitRows("dbo", keep=True)
    first.take([request(0)], logits)
    logits += 1
    second = LogitRows("unsplit", first)
    second.take([request(0)], logits)
    compared = second.result()
    assert compared is not None and compared.largest == 1.0


def test_a_pass_without_another_has_no_result() -> None:
    assert rows((request(0), A)).result() is None
