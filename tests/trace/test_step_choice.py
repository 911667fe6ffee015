"""Which steps `show` shows, and how far it reads for them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from dbo_greenlet.errors import TraceFileError
from dbo_greenlet.trace import SliceRecord, StepTrace
from dbo_greenlet.trace.step_choice import choose_steps

Name = tuple[str, int, int]


def step(run: str, number: int, rank: int, *, split: bool = True) -> StepTrace:
    made = StepTrace(run, number, rank)
    if split:
        made.slices.append(SliceRecord(number, rank, run, 0, 0, "", 1.0, 2.0))
    return made


# Rank by rank within a step, run by run, as `TraceFiles` and the job have it; the first two steps are not split.
STEPS = [step(run, n, rank, split=n > 1) for run in ("dbo", "thread") for n in range(5) for rank in (0, 1)]


class Stream:
    def __init__(self) -> None:
        self.read = 0

    def __iter__(self) -> Iterator[StepTrace]:
        for each in STEPS:
            self.read += 1
            yield each


def chosen(stream: Stream, **asked: object) -> list[Name]:
    return [(s.run, s.step, s.rank) for s in choose_steps(stream, "t", **asked)]  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("asked", "names", "read"),
    [
        ({}, [("dbo", 2, 0)], 5),
        ({"rank": 1}, [("dbo", 2, 1)], 6),
        ({"run": "thread"}, [("thread", 2, 0)], 15),
        ({"last": True}, [("thread", 4, 0)], 20),
        ({"last": True, "run": "dbo"}, [("dbo", 4, 0)], 20),
        ({"last": True, "rank": 1}, [("thread", 4, 1)], 20),
        ({"steps": range(1, 2)}, [("dbo", 1, 0)], 3),
        ({"steps": range(3, 5)}, [("dbo", 3, 0), ("dbo", 4, 0)], 9),
        ({"steps": range(3, 5), "rank": 1, "run": "thread"}, [("thread", 3, 1), ("thread", 4, 1)], 20),
        ({"steps": range(4, 100)}, [("dbo", 4, 0)], 20),
    ],
    ids=str,
)
def test_what_is_shown_and_what_is_read_for_it(asked: dict[str, object], names: list[Name], read: int) -> None:
    stream = Stream()
    assert chosen(stream, **asked) == names
    assert stream.read == read


@pytest.mark.parametrize(
    ("asked", "sentence"),
    [
        ({"steps": range(7, 9)}, "t has no step 7; it holds steps 0 to 4 of runs dbo, thread on ranks 0, 1"),
        ({"rank": 5}, "t has no step 0 on rank 5; it holds steps 0 to 4"),
        ({"run": "unsplit", "last": True}, "t has no step 0 of run unsplit; it holds"),
    ],
    ids=str,
)
def test_what_is_not_there(asked: dict[str, object], sentence: str) -> None:
    with pytest.raises(TraceFileError, match=sentence):
        chosen(Stream(), **asked)


def test_without_a_split_step_the_first_or_last_one() -> None:
    unsplit = STEPS[:4]
    assert choose_steps(unsplit, "t") == [unsplit[0]]
    assert choose_steps(unsplit, "t", last=True) == [unsplit[2]]
    with pytest.raises(TraceFileError, match=r"t has no step 0; it holds no steps \(yet\)"):
        choose_steps([], "t")
