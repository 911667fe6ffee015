"""Merging gives what the unsplit step would return, and refuses what no unsplit step would have returned."""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from typing import NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dbo_greenlet.batching import BatchError, UBatchBuffers, merge_outputs, slice_all, split_step


class NamedOutput(NamedTuple):
    hidden: torch.Tensor
    extra: object


class SentTensors:
    """Shaped like what a pipeline rank hands to the next one: a dict of tensors behind an attribute."""

    def __init__(self, tensors: dict[str, torch.Tensor]) -> None:
        self.tensors = tensors


def same(left: object, right: object) -> bool:
    if isinstance(left, torch.Tensor):
        return isinstance(right, torch.Tensor) and torch.equal(left, right)
    if type(left) is not type(right):
        return False
    if isinstance(left, (tuple, list)):
        return len(left) == len(right) and all(map(same, left, right))
    if isinstance(left, dict):
        return list(left) == list(right) and all(same(left[key], right[key]) for key in left)
    if isinstance(left, SentTensors):
        return same(left.tensors, right.tensors)
    return left == right


def rows_of(output: object, start: int, stop: int) -> object:
    """The part of an output that belongs to the tokens [start, stop)."""
    if isinstance(output, torch.Tensor):
        return output[start:stop]
    if isinstance(output, NamedOutput):
        return NamedOutput(*(rows_of(field, start, stop) for field in output))
    if isinstance(output, (tuple, list)):
        return type(output)(rows_of(item, start, stop) for item in output)
    if isinstance(output, dict):
        return {key: rows_of(value, start, stop) for key, value in output.items()}
    if isinstance(output, SentTensors):
        return SentTensors(rows_of(output.tensors, start, stop))
    return output


def structures(tokens: int) -> st.SearchStrategy[object]:
    tensors = st.sampled_from(
        [
            torch.arange(tokens),
            torch.arange(tokens * 3, dtype=torch.float32).reshape(tokens, 3),
            torch.arange(tokens * 4, dtype=torch.bfloat16).reshape(tokens, 2, 2),
        ]
    )
    return st.recursive(
        st.one_of(tensors, st.none()),
        lambda inner: st.one_of(
            st.lists(inner, max_size=3),
            st.lists(inner, max_size=3).map(tuple),
            st.tuples(tensors, inner).map(lambda fields: NamedOutput(*fields)),
            st.dictionaries(st.sampled_from("abc"), inner, max_size=3),
            st.dictionaries(st.sampled_from("abc"), tensors, max_size=3).map(SentTensors),
        ),
        max_leaves=6,
    )


@settings(deadline=None, max_examples=80)
@given(st.data(), st.integers(0, 12), st.integers(1, 4))
def test_merging_the_slices_of_an_output_gives_the_output(make_step, data, tokens, n):
    whole = data.draw(structures(tokens))
    slices = split_step(make_step([(tokens, 0)]), n)
    parts = [rows_of(whole, s.token_slice.start, s.token_slice.stop) for s in slices]
    assert same(merge_outputs(parts), whole)
    assert same(merge_outputs(parts, slices), whole)


@settings(deadline=None, max_examples=100)
@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), max_size=5), st.integers(0, 5), st.integers(1, 4))
def test_a_model_that_returns_its_input_returns_it_merged(make_step, requests, padding, n):
    step = make_step(requests, padding)
    slices = split_step(step, n)
    parts = slice_all(step, slices, UBatchBuffers(max(len(requests), 1), n))
    ids, aux = merge_outputs([(part.input_ids, {"positions": part.positions}) for part in parts], slices)
    assert torch.equal(ids, step.input_ids)
    assert torch.equal(aux["positions"], step.positions)


def test_one_output_comes_back_without_a_copy():
    hidden = torch.zeros(3, 2)
    assert merge_outputs([hidden]) is hidden


@pytest.mark.parametrize("kind", [OrderedDict, lambda items: defaultdict(list, items)])
def test_a_kind_of_dict_stays_that_kind(kind):
    first, second = kind({"h": torch.zeros(1), "r": torch.zeros(1)}), kind({"r": torch.ones(2), "h": torch.ones(2)})
    merged = merge_outputs([first, second])
    assert type(merged) is type(first)
    assert merged["h"].tolist() == [0, 1, 1]
    assert list(merged) == ["h", "r"]
    assert first["h"].tolist() == [0], "the microbatch's own output was changed"
    assert getattr(merged, "default_factory", None) is getattr(first, "default_factory", None)


HIDDEN = torch.zeros(2, 4)


@pytest.mark.parametrize(
    ("first", "second", "message"),
    [
        (HIDDEN, (HIDDEN,), "output of microbatch 1 is a tensor: False, that of microbatch 0 is a tensor: True"),
        ((HIDDEN,), HIDDEN, "output of microbatch 1 is a Tensor, that of microbatch 0 is a tuple"),
        ((HIDDEN,), [HIDDEN], "output of microbatch 1 is a list, that of microbatch 0 is a tuple"),
        (
            (HIDDEN, None),
            (HIDDEN, HIDDEN),
            r"output\[1\] of microbatch 1 is a Tensor, that of microbatch 0 is a NoneType",
        ),
        ((HIDDEN,), (HIDDEN, HIDDEN), "output of microbatch 1 has length 2, that of microbatch 0 has length 1"),
        ({"h": HIDDEN}, {"h": HIDDEN, "r": HIDDEN}, r"has keys \['h', 'r'\], that of microbatch 0 has keys \['h'\]"),
        ([{"h": HIDDEN}], [{"h": HIDDEN.bfloat16()}], r"output\[0\]\['h'\] of microbatch 1 has dtype torch.bfloat16"),
        (HIDDEN, HIDDEN.to("meta"), "is on device meta, that of microbatch 0 is on device cpu"),
        (HIDDEN, torch.zeros(2, 5), r"has, behind the tokens, shape \(5,\), that of microbatch 0 .* shape \(4,\)"),
        (HIDDEN, torch.zeros(2), r"has, behind the tokens, shape \(\)"),
        (HIDDEN, torch.tensor(1.0), "output of microbatch 1 is a scalar tensor"),
        (SentTensors({"h": HIDDEN}), SentTensors({}), r"output.tensors of microbatch 1 has keys \[\]"),
        ("text", "text", "output is a str, which cannot be merged"),
    ],
)
def test_outputs_that_do_not_fit_are_named(first, second, message):
    with pytest.raises(BatchError, match=message):
        merge_outputs([first, second])


def test_the_microbatch_that_differs_is_named():
    with pytest.raises(BatchError, match=r"output of microbatch 2 has dtype torch\.float64"):
        merge_outputs([HIDDEN, HIDDEN, HIDDEN.double()])


def test_a_microbatch_that_lost_rows_is_named(make_step):
    slices = split_step(make_step([(6, 0)]), 2)
    with pytest.raises(
        BatchError, match=r"output\['h'\] of microbatch 1 has 2 rows, but the microbatch ran on 3 tokens"
    ):
        merge_outputs([{"h": torch.zeros(3, 4)}, {"h": torch.zeros(2, 4)}], slices)


def test_nothing_to_merge_is_an_error(make_step):
    with pytest.raises(BatchError, match="no microbatch outputs"):
        merge_outputs([])
    with pytest.raises(BatchError, match="1 outputs for 2 microbatches"):
        merge_outputs([HIDDEN], split_step(make_step([(4, 0)]), 2))
