"""Arithmetic word problems: what the packaged checkpoint is trained on and what its accuracy is measured on.

A problem is a short English story whose answer is one integer, for example

    Tom has 17 apples. Then he buys 25 more apples. How many apples does Tom have now? A:

and the text a model is trained to write after it is a worked form that ends in the answer (" 17+25=42"; for a product
" 34*7=210+28=238"; for two steps " 17+25=42;42-9=33"). Only the last integer counts: `final_answer(text)` is what exact
match compares.

Training and held-out problems differ in two ways at once, so a score on held-out problems is neither recall of a sum
nor recall of a sentence:

* Operands. Every unordered pair of numbers belongs to one side for good (`is_held_out_pair`). All pairs that a training
  text adds, subtracts or multiplies, also on the way (the 42 and 9, the 210 and 28 above), are of the training
  side; every pair that a held-out problem states or passes as an intermediate result is of the other. Exempt are the
  partial products (30*7 and 4*7 above): they are the times table, without which nobody multiplies.
* Templates. A problem's sentences come from one of two sets of patterns that share none (problem_patterns.py).

Everything is a function of the seed: the same seed gives the same problems on every machine and Python version.
Nothing here imports torch.

`python -m dbo_greenlet.problems --out FILE` writes held-out problems as a prompt file.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import sys
import zlib
from collections.abc import Iterator
from dataclasses import dataclass

from dbo_greenlet.errors import ConfigurationError
from dbo_greenlet.problem_patterns import (
    CONTAINERS,
    HELD_OUT,
    NAMES,
    PLACES,
    THINGS,
    TIMES,
    TRAIN,
    Patterns,
)

__all__ = [
    "MAX_PROMPT_BYTES",
    "MAX_WORKED_BYTES",
    "PROMPT_COUNT",
    "PROMPT_SEED",
    "Problem",
    "final_answer",
    "held_out_problems",
    "is_held_out_pair",
    "prompt_records",
    "train_problems",
]

MAX_PROMPT_BYTES = 160  # longer stories are drawn again: prompt, worked form and two special tokens fit in 192 tokens
MAX_WORKED_BYTES = 30
PROMPT_COUNT = 240
PROMPT_SEED = 2024

_HELD_OUT_ONE_IN = 5

# Each kind as often as it is listed. "change" is a gain or a loss, "groups" equal groups (a product).
_KINDS = (
    "change", "change", "change", "change", "change_change", "change_change", "change_change", "total", "total",
    "difference", "difference", "comparison", "comparison", "comparison", "groups", "groups", "groups", "price",
    "price", "groups_change", "groups_change",
)  # fmt: skip


@dataclass(frozen=True)
class Problem:
    """One word problem.

    `prompt`: the text given to a model, ASCII, ends in "A:". `worked`: what it is trained to write next, starts with a
    space. `answer`: the integer, as text. `kind`: which sort of story. `template`: the pattern of the whole story with
    its slots unfilled. `operands`: the numbers of the story in the order of the calculation. `pairs`: every unordered
    pair (smaller first) that a step of the calculation takes, partial products left out.
    """

    prompt: str
    worked: str
    answer: str
    kind: str
    template: str
    operands: tuple[int, ...]
    pairs: tuple[tuple[int, int], ...]


def is_held_out_pair(left: int, right: int) -> bool:
    """Whether this unordered pair of operands occurs in held-out problems only; one pair in five does."""
    low, high = sorted((left, right))
    # A checksum, not hash(): it must not change with the interpreter or its hash seed.
    return zlib.crc32(f"{low},{high}".encode()) % _HELD_OUT_ONE_IN == 0


def final_answer(text: str) -> str | None:
    """The last integer in a model's text, without leading zeros, or None if it wrote none."""
    numbers = re.findall(r"\d+", text)
    return str(int(numbers[-1])) if numbers else None


def train_problems(seed: int) -> Iterator[Problem]:
    """Endless training problems. Two iterators with the same seed give the same problems."""
    rng = random.Random(seed)
    while True:
        yield _draw(rng, TRAIN, held_out=False)


def held_out_problems(n: int, seed: int) -> list[Problem]:
    """`n` held-out problems, no prompt twice.

    Raises ConfigurationError if `n` is negative, or larger than what can be drawn without a repetition.
    """
    if n < 0:
        raise ConfigurationError(f"the number of problems must not be negative, but is {n}")
    rng = random.Random(seed)
    found: dict[str, Problem] = {}
    draws = 0
    while len(found) < n:
        problem = _draw(rng, HELD_OUT, held_out=True)
        found.setdefault(problem.prompt, problem)
        draws += 1
        if draws > 100 * n:
            raise ConfigurationError(f"only {len(found)} different held-out problems in {draws} draws, not {n}")
    return list(found.values())


def prompt_records(n: int = PROMPT_COUNT, seed: int = PROMPT_SEED) -> list[dict[str, str | int]]:
    """Held-out problems as lines of a prompt file: {"id", "prompt", "answer", "arrival"}.

    `arrival` is the step at which a request arrives. A fifth is there at step 0; the others come a fifteenth of all at
    every second step after, so that while the early ones decode, later ones are prefilled in the same steps.
    """
    at_start, group = max(1, n // 5), max(1, n // 15)
    records: list[dict[str, str | int]] = []
    for index, problem in enumerate(held_out_problems(n, seed)):
        arrival = 0 if index < at_start else 2 * (1 + (index - at_start) // group)
        records.append({"id": f"p{index:03d}", "prompt": problem.prompt, "answer": problem.answer, "arrival": arrival})
    return records


class _Calculation:
    """Numbers of one problem as they are drawn, and the worked form that comes of them."""

    def __init__(self, first: int) -> None:
        self.value = first
        self.operands = [first]
        self.stated_pairs: list[tuple[int, int]] = []
        self.inner_pairs: list[tuple[int, int]] = []
        self.steps: list[str] = []

    def _pair(self, other: int) -> None:
        self.operands.append(other)
        self.stated_pairs.append((min(self.value, other), max(self.value, other)))

    def add(self, other: int) -> None:
        self._pair(other)
        self.steps.append(f"{self.value}+{other}={self.value + other}")
        self.value += other

    def subtract(self, other: int) -> None:
        self._pair(other)
        self.steps.append(f"{self.value}-{other}={self.value - other}")
        self.value -= other

    def multiply(self, other: int) -> None:
        """First factor of two digits, second of one."""
        self._pair(other)
        tens, ones = self.value // 10 * 10 * other, self.value % 10 * other
        self.inner_pairs.append((min(tens, ones), max(tens, ones)))
        self.steps.append(f"{self.value}*{other}={tens}+{ones}={tens + ones}")
        self.value *= other

    def is_on_side(self, held_out: bool) -> bool:
        if held_out:
            return all(is_held_out_pair(*pair) for pair in self.stated_pairs)
        return not any(is_held_out_pair(*pair) for pair in self.stated_pairs + self.inner_pairs)


def _draw(rng: random.Random, patterns: Patterns, held_out: bool) -> Problem:
    """One problem of that side. The kind is drawn once, so that what is drawn again does not change the mixture."""
    kind = rng.choice(_KINDS)
    while True:
        numbers = _draw_numbers(rng, kind)
        if numbers is None or not numbers.is_on_side(held_out):
            continue
        template, slots = _STORIES[kind](rng, patterns, numbers)
        prompt = _sentence_case(template.format(**slots, **_words(rng))) + " A:"
        if len(prompt) <= MAX_PROMPT_BYTES:
            break
    worked = " " + ";".join(numbers.steps)
    pairs = tuple(numbers.stated_pairs + numbers.inner_pairs)
    return Problem(prompt, worked, str(numbers.value), kind, template, tuple(numbers.operands), pairs)


def _draw_numbers(rng: random.Random, kind: str) -> _Calculation | None:
    """Operands of a problem of this kind and their calculation; None if a difference would not be positive."""
    if kind in ("groups", "price", "groups_change"):
        numbers = _Calculation(10 * rng.randrange(1, 10) + rng.randrange(1, 10))
        numbers.multiply(rng.randrange(2, 10))
    else:
        # Large numbers now and then: the sum at the end of a product needs them learned from more than products.
        numbers = _Calculation(rng.randrange(100, 900) if rng.randrange(4) == 0 else rng.randrange(2, 100))
    changes = {"groups": 0, "price": 0, "change_change": 2}.get(kind, 1)
    for _ in range(changes):
        other = rng.randrange(2, 100)
        grows = kind == "total" or (kind != "difference" and rng.randrange(2) == 0)
        if grows:
            numbers.add(other)
        elif numbers.value > other:
            numbers.subtract(other)
        else:
            return None
    return numbers


_Story = tuple[str, dict[str, int]]


def _story_of_changes(rng: random.Random, patterns: Patterns, numbers: _Calculation) -> _Story:
    sentences = [rng.choice(patterns.state).replace("{k}", "{k0}")]
    return _with_changes(rng, patterns, numbers, sentences, {"k0": numbers.operands[0]})


def _story_of_groups_and_change(rng: random.Random, patterns: Patterns, numbers: _Calculation) -> _Story:
    return _with_changes(rng, patterns, numbers, [rng.choice(patterns.groups)], _factors(rng, numbers))


def _with_changes(
    rng: random.Random,
    patterns: Patterns,
    numbers: _Calculation,
    sentences: list[str],
    slots: dict[str, int],
) -> _Story:
    """Appends one gain or loss a remaining step of the calculation, and the question."""
    product = "a" in slots
    for position in range(1 + product, len(numbers.operands)):
        step = numbers.steps[position - 1]
        change = rng.choice(patterns.gain if "+" in step else patterns.loss)
        change = change.replace("{s}", rng.choice(patterns.subjects)).replace("{np}", rng.choice(patterns.amounts))
        lead = rng.choice(patterns.leads)
        # One place or time a sentence: a second one would be the same again.
        tail = "" if "{" in lead or "{x}" in change else rng.choice(patterns.tails)
        sentences.append(lead + change.replace("{k}", f"{{k{position}}}") + tail)
        slots[f"k{position}"] = numbers.operands[position]
    return _join(rng, patterns, sentences, rng.choice(patterns.ask_now)), slots


def _story_of_two_people(rng: random.Random, patterns: Patterns, numbers: _Calculation) -> _Story:
    total = "+" in numbers.steps[0]
    sentences = [
        rng.choice(patterns.state).replace("{k}", "{k0}"),
        rng.choice(patterns.state).replace("{k}", "{k1}").replace("{n}", "{f}").replace("{box}", "{other_box}"),
    ]
    if rng.randrange(2):
        sentences.reverse()
    question = rng.choice(patterns.ask_total if total else patterns.ask_difference)
    return _join(rng, patterns, sentences, question), {"k0": numbers.operands[0], "k1": numbers.operands[1]}


def _story_of_comparison(rng: random.Random, patterns: Patterns, numbers: _Calculation) -> _Story:
    comparison = rng.choice(patterns.more if "+" in numbers.steps[0] else patterns.fewer)
    sentences = [
        rng.choice(patterns.state).replace("{k}", "{k0}").replace("{n}", "{f}"),
        comparison.replace("{k}", "{k1}"),
    ]
    if rng.randrange(3) == 0:
        sentences.reverse()
    slots = {"k0": numbers.operands[0], "k1": numbers.operands[1]}
    return _join(rng, patterns, sentences, rng.choice(patterns.ask_one)), slots


def _story_of_groups(rng: random.Random, patterns: Patterns, numbers: _Calculation) -> _Story:
    # The questions about two people are left out by naming no one: a group story knows one person only.
    questions = [question for question in patterns.ask_total if "{f}" not in question and "they" not in question]
    return f"{rng.choice(patterns.groups)}. {_upper(rng.choice(questions))}", _factors(rng, numbers)


def _story_of_price(rng: random.Random, patterns: Patterns, numbers: _Calculation) -> _Story:
    return f"{rng.choice(patterns.price)}. {_upper(rng.choice(patterns.ask_price))}", _factors(rng, numbers)


_STORIES = {
    "change": _story_of_changes,
    "change_change": _story_of_changes,
    "total": _story_of_two_people,
    "difference": _story_of_two_people,
    "comparison": _story_of_comparison,
    "groups": _story_of_groups,
    "price": _story_of_price,
    "groups_change": _story_of_groups_and_change,
}


def _factors(rng: random.Random, numbers: _Calculation) -> dict[str, int]:
    left, right = numbers.operands[:2]
    return {"a": left, "b": right} if rng.randrange(2) else {"a": right, "b": left}


def _join(rng: random.Random, patterns: Patterns, sentences: list[str], question: str) -> str:
    """Story template of two or three sentences and a question; an "if" only goes with a "how many"."""
    forms = patterns.two_sentences if len(sentences) == 2 else patterns.three_sentences
    form = rng.choice(forms)
    if ", {q}" in form and not question.startswith("how many"):
        form = forms[0]
    for number, sentence in enumerate(sentences, start=1):
        form = form.replace(f"{{{number}}}", sentence)
    return form.replace("{q}", question)


def _words(rng: random.Random) -> dict[str, str]:
    name, subject, object_ = rng.choice(NAMES)
    friend = rng.choice([entry[0] for entry in NAMES if entry[0] != name])
    box, boxes = rng.choice(CONTAINERS)
    return {
        "n": name,
        "p": subject,
        "m": object_,
        "f": friend,
        "o": rng.choice(THINGS),
        "box": box,
        "boxes": boxes,
        "other_box": rng.choice(CONTAINERS)[0],
        "x": rng.choice(PLACES),
        "t": rng.choice(TIMES),
    }


def _upper(sentence: str) -> str:
    return sentence[:1].upper() + sentence[1:]


def _sentence_case(story: str) -> str:
    """Capitals where a sentence begins."""
    return ". ".join(_upper(sentence) for sentence in story.split(". "))


def main(arguments: list[str] | None = None) -> int:
    """Writes a prompt file of held-out problems (JSON Lines); returns the exit code."""
    parser = argparse.ArgumentParser(description="Write held-out word problems as a prompt file.")
    parser.add_argument("--out", default="-", help="file to write, - for standard output (default)")
    parser.add_argument("--count", type=int, default=PROMPT_COUNT)
    parser.add_argument("--seed", type=int, default=PROMPT_SEED)
    options = parser.parse_args(arguments)
    lines = "".join(json.dumps(record) + "\n" for record in prompt_records(options.count, options.seed))
    if options.out == "-":
        sys.stdout.write(lines)
    else:
        with open(options.out, "w", encoding="ascii") as file:
            file.write(lines)
    return 0


if __name__ == "__main__":
    sys.exit(main())
