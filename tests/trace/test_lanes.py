from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import dbo_greenlet
from dbo_greenlet.errors import ConfigurationError
from dbo_greenlet.trace import SliceRecord, StepRecord, StepTrace, render_lanes


def trace(*slices: tuple[int, str, float, float]) -> StepTrace:
    seen: dict[int, int] = {}
    records = []
    for index, site, begin, end in slices:
        records.append(SliceRecord(0, 0, "dbo", index, seen.get(index, 0), site, begin, end))
        seen[index] = seen.get(index, 0) + 1
    return StepTrace("dbo", 0, 0, None, records)


STEP = trace(
    (0, "layer3.dispatch", 100.0, 150.0),
    (1, "layer3.dispatch", 150.0, 190.0),
    (0, "layer3.combine", 200.0, 300.0),
    (1, "layer3.combine", 300.0, 380.0),
    (0, "layer13.dispatch", 380.0, 420.0),
    (1, "layer13.dispatch", 420.0, 430.0),
    (0, "", 430.0, 480.0),
    (1, "", 480.0, 500.0),
)


def picture(text: str) -> str:
    return textwrap.dedent(text).strip("\n")


def test_a_row_for_each_microbatch() -> None:
    assert render_lanes(STEP, width=93) == picture("""
                     100 us                                                  500 us (5.0 us a column)
        microbatch 0 ┃A3━━━━━━━          ┃M3━━━━━━━━━━━━━━━━━                ┃A13━━━━  ┃out━━━━━━
        microbatch 1           ┃A3━━━━━                      ┃M3━━━━━━━━━━━━━        ┃━          ┃out
    """)


def test_without_unicode() -> None:
    assert render_lanes(STEP, width=93, unicode=False) == picture("""
                     100 us                                                  500 us (5.0 us a column)
        microbatch 0 |A3=======          |M3=================                |A13====  |out======
        microbatch 1           |A3=====                      |M3=============        |=          |out
    """)


def test_some_layers_fill_the_width() -> None:
    assert render_lanes(STEP, layers=[13], width=63) == picture("""
                     380 us                    430 us (1.0 us a column)
        microbatch 0 ┃A13━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━
        microbatch 1                                         ┃A13━━━━━━
    """)


def test_narrow_rows_drop_labels_and_mark_what_is_crowded() -> None:
    assert render_lanes(STEP, width=1) == picture("""
        100 us to 500 us (40.0 us a column)
        microbatch 0 ┃ ┃M3  ┃┃━
        microbatch 1  ┃   ┃━ ┃┃
    """)
    many = trace(*((0, "layer1.dispatch", float(n), float(n + 1)) for n in range(100)))
    assert render_lanes(many, width=23, unicode=False).splitlines()[1] == "microbatch 0 ##########"


def test_a_failed_slice_and_a_site_of_another_kind() -> None:
    step = trace((0, "all_reduce", 0.0, 50.0), (1, "a_site_with_a_long_name", 50.0, 60.0))
    step.slices.append(SliceRecord(0, 0, "dbo", 0, 1, "all_reduce", 60.0, 100.0, failed=True))
    assert render_lanes(step, width=63).splitlines()[1:] == [
        "microbatch 0 ┃all_reduce━━━━━━━━━━━━━━     ┃failed━━━━━━━━━━━━━",
        "microbatch 1                          ┃━━━━",
    ]


def test_a_step_that_was_not_split() -> None:
    whole = StepTrace("x", 0, 0, StepRecord(0, 0, "x", 8, 8, False, ""))
    assert render_lanes(whole) == "no lanes: the step was not split"
    split = StepTrace("x", 0, 0, StepRecord(0, 0, "x", 8, 8, True, ""))
    assert render_lanes(split) == "no lanes: its slices are not in the trace (yet)"
    replayed = StepTrace("x", 0, 0, StepRecord(0, 0, "x", 8, 8, True, "", execution="replayed"))
    assert render_lanes(replayed).startswith("no lanes: the step was replayed from its graph")


def test_a_microbatch_that_never_ran_has_an_empty_row() -> None:
    record = StepRecord(0, 0, "dbo", 8, 8, True, "split", slices=[[0, 4, 0, 1], [4, 8, 1, 2]])
    step = StepTrace("dbo", 0, 0, record, [SliceRecord(0, 0, "dbo", 0, 0, "", 0.0, 1.0, failed=True)])
    assert render_lanes(step, width=23).splitlines()[1:] == ["microbatch 0 ┃failed━━━", "microbatch 1"]


@pytest.mark.parametrize(
    ("step", "message"),
    [
        (STEP, "--layers 4-5: none of them is in this step, which has 3, 13"),
        (
            trace((0, "x", 0.0, 1.0)),
            "--layers 4-5: none of them is in this step, whose sites are not dispatch and combine labels",
        ),
    ],
)
def test_layers_that_are_not_there(step: StepTrace, message: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        render_lanes(step, layers=range(4, 6))
    assert str(caught.value) == message


durations = st.lists(st.tuples(st.integers(0, 2), st.floats(0, 1e4), st.floats(0, 1e6)), min_size=1, max_size=40)


@given(durations, st.integers(-5, 150), st.booleans())
def test_rows_never_exceed_the_width_and_never_lose_a_microbatch(
    turns: list[tuple[int, float, float]], width: int, unicode: bool
) -> None:
    now, slices = 0.0, []
    for index, gap, length in turns:
        slices.append((index, "layer1.dispatch", now + gap, now + gap + length))
        now += gap + length
    lines = render_lanes(trace(*slices), width=width, unicode=unicode).splitlines()
    assert len(lines) == 2 + max(index for index, _, _ in turns)
    assert all(len(line) <= max(width, 23) for line in lines[1:])
    for index, line in enumerate(lines[1:]):
        ran = any(turn[0] == index for turn in turns)
        assert bool(line[13:].strip()) is ran
        assert unicode or line.isascii()


def test_the_room_imports_without_torch() -> None:
    program = "import sys, dbo_greenlet.trace; print('torch' in sys.modules)"
    root = Path(dbo_greenlet.__file__).parents[1]
    done = subprocess.run([sys.executable, "-c", program], cwd=root, capture_output=True, text=True, timeout=60)
    assert done.stdout == "False\n", done.stderr
