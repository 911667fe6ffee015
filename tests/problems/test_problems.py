"""The generator of word problems: the same from the same seed, right answers, and two sides that share nothing."""

from __future__ import annotations

import itertools
import re
import subprocess
import sys

import pytest

from dbo_greenlet.errors import ConfigurationError
from dbo_greenlet.problem_patterns import HELD_OUT, TRAIN, Patterns
from dbo_greenlet.problems import (
    MAX_PROMPT_BYTES,
    MAX_WORKED_BYTES,
    Problem,
    final_answer,
    held_out_problems,
    is_held_out_pair,
    train_problems,
)

COUNT = 1500
# Fields of a side that hold whole sentences, as against what is put into or around them.
SENTENCES = [
    name
    for name in Patterns._fields
    if name not in ("leads", "tails", "subjects", "amounts", "two_sentences", "three_sentences")
]


@pytest.fixture(scope="module")
def train() -> list[Problem]:
    return list(itertools.islice(train_problems(seed=11), COUNT))


@pytest.fixture(scope="module")
def held_out() -> list[Problem]:
    return held_out_problems(COUNT, seed=11)


def test_a_seed_gives_the_same_problems_again_and_another_seed_others(
    train: list[Problem], held_out: list[Problem]
) -> None:
    assert list(itertools.islice(train_problems(11), 200)) == train[:200]
    assert held_out_problems(200, 11) == held_out[:200]
    assert list(itertools.islice(train_problems(12), 200)) != train[:200]
    assert held_out_problems(200, 12) != held_out[:200]


def test_another_interpreter_with_another_hash_seed_gives_the_same_problems(held_out: list[Problem]) -> None:
    program = "from dbo_greenlet.problems import held_out_problems\nprint(held_out_problems(20, 11)[-1].prompt)"
    for hash_seed in ("1", "2"):
        printed = subprocess.run(
            [sys.executable, "-c", program],
            env={"PYTHONHASHSEED": hash_seed, "PYTHONPATH": ":".join(sys.path)},
            capture_output=True,
            text=True,
            check=True,
            timeout=60,
        ).stdout
        assert printed.strip() == held_out[19].prompt


def test_generating_needs_no_torch() -> None:
    program = "import sys, dbo_greenlet.problems as p; p.held_out_problems(3, 0); sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", program], env={"PYTHONPATH": ":".join(sys.path)}, check=True, timeout=60)


@pytest.mark.parametrize("side", ["train", "held_out"])
def test_the_worked_form_is_true_and_ends_in_the_answer(side: str, request: pytest.FixtureRequest) -> None:
    for problem in request.getfixturevalue(side):
        assert problem.worked[0] == " "
        for step in problem.worked[1:].split(";"):
            values = [_value(term) for term in step.split("=")]
            assert len(values) >= 2, problem
            assert len(set(values)) == 1, problem
        assert final_answer(problem.worked) == problem.answer
        assert int(problem.answer) > 0


@pytest.mark.parametrize("side", ["train", "held_out"])
def test_the_story_states_every_operand_and_no_other_number(side: str, request: pytest.FixtureRequest) -> None:
    for problem in request.getfixturevalue(side):
        stated = sorted(int(number) for number in re.findall(r"\d+", problem.prompt))
        assert stated == sorted(problem.operands), problem
        assert "{" not in problem.prompt
        assert problem.prompt.endswith(" A:")
        assert problem.prompt.isascii()
        assert len(problem.prompt) <= MAX_PROMPT_BYTES
        assert len(problem.worked) <= MAX_WORKED_BYTES


def test_every_kind_of_story_occurs_on_both_sides(train: list[Problem], held_out: list[Problem]) -> None:
    kinds = {problem.kind for problem in train}
    assert len(kinds) == 8
    assert {problem.kind for problem in held_out} == kinds


def test_a_held_out_calculation_uses_held_out_pairs_only_and_a_training_one_none(
    train: list[Problem], held_out: list[Problem]
) -> None:
    for problem in train:
        assert problem.pairs
        assert not any(is_held_out_pair(*pair) for pair in problem.pairs), problem
    for problem in held_out:
        stated = _pairs_of_steps(problem)
        assert stated
        assert all(is_held_out_pair(*pair) for pair in stated), problem


def test_training_text_never_computes_a_held_out_operand_pair(train: list[Problem], held_out: list[Problem]) -> None:
    # Read off the text alone, without the generator's own bookkeeping; the sum at the end of a product counts too.
    computed = {pair for problem in train for pair in _pairs_written(problem)}
    asked = {pair for problem in held_out for pair in _pairs_of_steps(problem)}
    assert len(computed) > 500
    assert len(asked) > 500
    assert not computed & asked


def test_the_order_of_a_pair_does_not_matter_and_a_fifth_is_held_out() -> None:
    pairs = list(itertools.combinations(range(2, 100), 2))
    assert all(is_held_out_pair(a, b) == is_held_out_pair(b, a) for a, b in pairs)
    share = sum(is_held_out_pair(a, b) for a, b in pairs) / len(pairs)
    assert 0.15 < share < 0.25


def test_the_two_sides_share_no_sentence() -> None:
    train_sentences = _sentences(TRAIN)
    held_out_sentences = _sentences(HELD_OUT)
    assert len(train_sentences) > 10_000
    assert not train_sentences & held_out_sentences


def test_no_story_template_occurs_on_both_sides(train: list[Problem], held_out: list[Problem]) -> None:
    assert not {problem.template for problem in train} & {problem.template for problem in held_out}


def test_held_out_sentences_are_made_of_words_that_training_knows() -> None:
    assert not _vocabulary(HELD_OUT) - _vocabulary(TRAIN)


def test_no_held_out_prompt_occurs_twice(held_out: list[Problem]) -> None:
    assert len({problem.prompt for problem in held_out}) == COUNT


def test_a_negative_number_of_problems_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="-1"):
        held_out_problems(-1, 0)


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        (" 17+25=42", "42"),
        (" 30-9=21;21+4=25", "25"),
        ("007", "7"),
        (" 12 apples.", "12"),
        ("none", None),
        ("", None),
    ],
)
def test_the_final_answer_is_the_last_integer(text: str, answer: str | None) -> None:
    assert final_answer(text) == answer


def _value(term: str) -> int:
    """Value of "a", "a+b", "a-b" or "a*b"."""
    left, operator, right = re.fullmatch(r"(\d+)(?:([+*-])(\d+))?", term).groups()
    if operator is None:
        return int(left)
    return {"+": int.__add__, "-": int.__sub__, "*": int.__mul__}[operator](int(left), int(right))


def _pairs_of_steps(problem: Problem) -> list[tuple[int, int]]:
    """The two numbers at the head of each step of the worked form, smaller first."""
    heads = re.findall(r"(?:^ |;)(\d+)[+*-](\d+)=", problem.worked)
    return [(min(int(a), int(b)), max(int(a), int(b))) for a, b in heads]


def _pairs_written(problem: Problem) -> list[tuple[int, int]]:
    """Every two numbers with a sign between them anywhere in the worked form, smaller first."""
    found = re.findall(r"(\d+)[+*-](\d+)", problem.worked)
    return [(min(int(a), int(b)), max(int(a), int(b))) for a, b in found]


def _sentences(side: Patterns) -> set[str]:
    """All sentences of a side with their slots for words and numbers unfilled."""
    sentences = {sentence for name in SENTENCES for sentence in getattr(side, name)}
    for change in (*side.gain, *side.loss):
        for subject, amount in itertools.product(side.subjects, side.amounts):
            core = change.replace("{s}", subject).replace("{np}", amount)
            sentences |= {lead + core + tail for lead, tail in itertools.product(side.leads, side.tails)}
    return sentences


def _vocabulary(side: Patterns) -> set[str]:
    text = " ".join(pattern for field in side for pattern in field).lower()
    return set(re.findall(r"[a-z]+", re.sub(r"\{\w+\}", " ", text)))
