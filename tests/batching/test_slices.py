"""Where a step is cut: exhaustively over small batches, against a version that looks at one token at a time."""

from __future__ import annotations

import itertools

import pytest

from dbo_greenlet.batching import UBatchSlice, cut_points, split_step
from dbo_greenlet.errors import ConfigurationError


def slow_slices(lengths: list[int], padded: int, padded_requests: int, n: int) -> list[tuple[int, int, int, int]]:
    """(first request, end of requests, first token, end of tokens) per microbatch, one token at a time."""
    if padded < n:
        return [(first_with_tokens(lengths), padded_requests, 0, padded)]
    owners = [request for request, length in enumerate(lengths) for _ in range(length)]
    microbatch_of = [min(token // (padded // n), n - 1) for token in range(padded)]
    result = []
    for microbatch in range(n):
        tokens = [token for token in range(padded) if microbatch_of[token] == microbatch]
        real = [owners[token] for token in tokens if token < len(owners)]
        first, end = (min(real), max(real) + 1) if real else (max(len(lengths) - 1, 0), len(lengths))
        if tokens[-1] >= len(owners):  # it reaches into the padding, which comes after all real requests
            end = min(len(lengths) + 1, padded_requests)
        if microbatch == n - 1:
            end = padded_requests
        result.append((first, end, tokens[0], tokens[-1] + 1))
    return result


def first_with_tokens(lengths: list[int]) -> int:
    return next((r for r, length in enumerate(lengths) if length), max(len(lengths) - 1, 0))


def flat(slices: list[UBatchSlice]) -> list[tuple[int, int, int, int]]:
    return [(s.request_slice.start, s.request_slice.stop, s.token_slice.start, s.token_slice.stop) for s in slices]


@pytest.mark.parametrize("n", [1, 2, 3, 4])
@pytest.mark.parametrize("request_padding", [0, 2])
def test_every_small_batch_is_cut_as_the_slow_version_cuts_it(make_step, n, request_padding):
    cases = 0
    for count in range(4):
        for lengths in itertools.product(range(4), repeat=count):
            for padding in range(5):
                step = make_step([(length, 5) for length in lengths], padding, request_padding)
                slices = split_step(step, n)
                expected = slow_slices(list(lengths), step.num_padded_tokens, step.num_padded_requests, n)
                assert flat(slices) == expected, (lengths, padding)
                cases += 1
    assert cases == 85 * 5


def test_a_request_that_the_boundary_falls_into_is_in_both_microbatches(make_step):
    slices = split_step(make_step([(2, 0), (6, 3), (2, 0)]), 2)
    assert flat(slices) == [(0, 2, 0, 5), (1, 3, 5, 10)]


def test_one_request_can_straddle_all_microbatches(make_step):
    assert flat(split_step(make_step([(9, 4)]), 3)) == [(0, 1, 0, 3), (0, 1, 3, 6), (0, 1, 6, 9)]


def test_the_last_microbatch_takes_the_remainder():
    assert cut_points(11, 4) == [0, 2, 4, 6, 11]


def test_microbatches_inside_the_padding_keep_the_last_request(make_step):
    slices = split_step(make_step([(1, 0), (2, 0)], padding=9), 4)
    assert flat(slices) == [(0, 2, 0, 3), (1, 2, 3, 6), (1, 2, 6, 9), (1, 2, 9, 12)]
    assert not any(s.is_empty() for s in slices)


def test_the_padded_count_alone_decides_the_sizes(make_step):
    """Ranks agree on the padded count only, and must run microbatches of the same sizes."""
    sizes = {
        tuple(s.num_tokens for s in split_step(make_step([(tokens, 0)], padding=10 - tokens), 3))
        for tokens in range(1, 11)
    }
    assert sizes == {(3, 3, 4)}


@pytest.mark.parametrize("padded", [0, 1, 2])
def test_fewer_tokens_than_microbatches_stay_in_one_piece(make_step, padded):
    slices = split_step(make_step([(padded, 0)]), 3)
    assert flat(slices) == [(0, 1, 0, padded)]


def test_an_idle_rank_that_was_padded_is_cut_into_empty_slices(make_step):
    slices = split_step(make_step([], padding=4), 2)
    assert flat(slices) == [(0, 0, 0, 2), (0, 0, 2, 4)]
    assert all(s.is_empty() for s in slices)


@pytest.mark.parametrize("n", [0, -1])
def test_no_microbatch_at_all_is_refused(make_step, n):
    with pytest.raises(ConfigurationError, match=rf"cannot be split into {n} microbatches; use 1"):
        split_step(make_step([(4, 0)]), n)
