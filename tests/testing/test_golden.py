"""Golden schedules: the committed ones of the documented layers; and files that differ, are damaged or are missing."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dbo_greenlet import RoundRobin, Schedule
from dbo_greenlet.errors import ScheduleDivergence
from dbo_greenlet.policies import PhaseOffset
from dbo_greenlet.testing import (
    Golden,
    GoldenFileError,
    GoldenMismatch,
    ReplayCase,
    high_throughput,
    low_latency,
    run_step,
)
from dbo_greenlet.testing.plugin_runs import DboGolden, DboRun
from dbo_greenlet.trace.notation import order

GOLDENS = Path(__file__).parent / "goldens"

DOCUMENTED = (
    "D_1 send, A0_0, A1_0, D_1 recv, D_0 send, MLP_1, D_0 recv, C_1 send, S_1, MLP_0, C_1 recv, C_0 send, S_0, "
    "A0_1, A1_1, C_0 recv"
)


@pytest.mark.parametrize(
    ("name", "build", "policy", "count"),
    [
        ("vllm_round_robin", low_latency(3), "round_robin", 2),
        ("vllm_phase_offset_2", low_latency(3), "phase_offset:2", 2),
        ("deepep_high_throughput", high_throughput(3), "round_robin", 2),
        ("deepep_high_throughput_phase_offset_2", high_throughput(3), "phase_offset:2", 2),
        ("low_latency_three_microbatches", low_latency(2), "round_robin", 3),
        ("high_throughput_three_microbatches", high_throughput(2), "round_robin", 3),
    ],
)
@pytest.mark.parametrize("carrier", ["greenlet", "thread"])
def test_the_documented_layers_run_as_committed(
    dbo_run: DboRun, dbo_golden: DboGolden, name: str, build: object, policy: str, count: int, carrier: str
) -> None:
    dbo_golden(dbo_run(build, policy, count=count, carrier=carrier), name)


@pytest.mark.parametrize(("name", "exchanged"), [("vllm_phase_offset_2", False), ("vllm_round_robin", True)])
def test_the_committed_schedule_is_the_one_that_vllm_documents(name: str, exchanged: bool) -> None:
    schedule, _ = Golden(GOLDENS / f"{name}.txt").read()
    words = [
        (item.piece, 1 - item.microbatch if exchanged else item.microbatch, item.action)
        for item in order(schedule.decisions, schedule.sites)
    ]
    wanted = [
        (word.split("_")[0], int(word.split("_")[1][0]), word.partition(" ")[2]) for word in DOCUMENTED.split(", ")
    ]
    assert any(words[at : at + len(wanted)] == wanted for at in range(len(words)))


# -- files -------------------------------------------------------------------------------------------------------------

SITES = st.one_of(
    st.just(""),
    st.text(min_size=1, max_size=6),
    st.sampled_from(["(returned)", '"', '"a"', "a b", " a", "\n", "#"]),
)


@given(
    st.integers(1, 4).flatmap(
        lambda count: st.lists(st.tuples(st.integers(0, count - 1), SITES), min_size=1, max_size=12).map(
            lambda rows: Schedule(count, tuple(i for i, _ in rows), tuple(site for _, site in rows))
        )
    ),
    st.text(max_size=12),
)
def test_a_golden_file_gives_back_the_schedule(
    tmp_path_factory: pytest.TempPathFactory, schedule: Schedule, policy: str
) -> None:
    golden = Golden(tmp_path_factory.mktemp("golden") / "deeper" / "a.txt")
    assert golden.update(schedule, policy)
    assert golden.read() == (schedule, policy)
    golden.compare(schedule)
    assert not golden.update(schedule, policy)
    assert golden.path.read_bytes().isascii()


@pytest.fixture
def golden(tmp_path: Path) -> Golden:
    golden = Golden(tmp_path / "two.txt")
    golden.update(run_step(low_latency(2)).schedule, "round_robin")
    return golden


def test_what_a_golden_file_looks_like(golden: Golden) -> None:
    assert golden.path.read_text(encoding="utf-8") == LITERAL


LITERAL = """\
dbo-greenlet golden schedule, version 1
microbatches 2
policy round_robin
hash 1c6b8f0f99f8d103
decisions 10
     0  0  layer0.dispatch
     1  1  layer0.dispatch
     2  0  layer0.combine
     3  1  layer0.combine
     4  0  layer1.dispatch
     5  1  layer1.dispatch
     6  0  layer1.combine
     7  1  layer1.combine
     8  0  (returned)
     9  1  (returned)
check 363c4a4f
"""


def test_another_order_is_shown_in_two_columns(golden: Golden) -> None:
    run = run_step(low_latency(2), PhaseOffset(2))
    with pytest.raises(GoldenMismatch) as caught:
        golden.compare(run.schedule, run.policy)
    assert isinstance(caught.value, ScheduleDivergence)
    assert str(caught.value) == DIFFERENCE.format(path=golden.path)


DIFFERENCE = """\
the schedule is not that of {path}; they part at decision 1:

  policy: golden round_robin, this step phase_offset

    golden                      this step
       0  0  layer0.dispatch       0  0  layer0.dispatch
  >                                1  0  layer0.combine
       1  1  layer0.dispatch       2  1  layer0.dispatch
  >    2  0  layer0.combine        3  0  layer1.dispatch
       3  1  layer0.combine        4  1  layer0.combine
  >    4  0  layer1.dispatch       5  0  layer1.combine
       5  1  layer1.dispatch       6  1  layer1.dispatch
  >    6  0  layer1.combine        7  0  (returned)
       7  1  layer1.combine        8  1  layer1.combine
  >    8  0  (returned)
       9  1  (returned)            9  1  (returned)

5 of 10 decisions differ; hash: golden 1c6b8f0f99f8d103, this step 40eac3b969c1bc95. \
If the new order is meant: pytest --dbo-update-golden"""


def test_one_slice_more_does_not_make_the_rest_differ(golden: Golden) -> None:
    schedule, _ = golden.read()
    more = Schedule(
        2,
        (*schedule.decisions[:2], 0, 1, *schedule.decisions[2:]),
        (*schedule.sites[:2], "new", "new", *schedule.sites[2:]),
    )
    with pytest.raises(GoldenMismatch) as caught:
        golden.compare(more)
    text = str(caught.value)
    assert "they part at decision 2:" in text and "2 of 12 decisions differ" in text
    assert [line.split() for line in text.splitlines() if line.startswith("  >")] == [
        [">", "2", "0", "new"],
        [">", "3", "1", "new"],
    ]


def test_another_number_of_microbatches_is_named(golden: Golden) -> None:
    schedule, _ = golden.read()
    with pytest.raises(GoldenMismatch, match="microbatches: golden 2, this step 3"):
        golden.compare(Schedule(3, schedule.decisions, schedule.sites))


def test_a_long_difference_is_cut(tmp_path: Path) -> None:
    golden = Golden(tmp_path / "long.txt")
    golden.update(run_step(low_latency(60)).schedule)
    with pytest.raises(GoldenMismatch) as caught:
        golden.compare(run_step(high_throughput(60)).schedule)
    assert len(str(caught.value).splitlines()) < 75 and "more lines" in str(caught.value)


def test_a_step_that_failed_cannot_become_golden(tmp_path: Path) -> None:
    golden = Golden(tmp_path / "failed.txt")
    with pytest.raises(GoldenFileError, match="has 3 decisions and 2 sites: a golden schedule is of a step that ran"):
        golden.update(Schedule(2, (0, 1, 0), ("a", "a")))
    with pytest.raises(GoldenFileError, match="has 0 decisions"):
        golden.update(Schedule(2, ()))
    assert not golden.path.exists()


def test_line_ends_do_not_count(golden: Golden) -> None:
    schedule, _ = golden.read()
    golden.path.write_bytes(golden.path.read_bytes().replace(b"\n", b"\r\n"))
    golden.compare(schedule)
    golden.path.write_bytes(golden.path.read_bytes().removesuffix(b"\r\n"))
    golden.compare(schedule)


@pytest.mark.parametrize("line", range(len(LITERAL.splitlines())))
@pytest.mark.parametrize("edit", ["changed", "doubled", "removed", "blank"])
def test_a_file_that_was_edited_by_hand_is_refused(golden: Golden, line: int, edit: str) -> None:
    lines = golden.path.read_text(encoding="utf-8").splitlines()
    lines[line : line + 1] = {
        "changed": [lines[line].replace(lines[line][-1], "x")],
        "doubled": [lines[line]] * 2,
        "removed": [],
        "blank": [lines[line] + " "],
    }[edit]
    golden.path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    with pytest.raises(GoldenFileError) as caught:
        golden.read()
    words = str(caught.value)
    assert words.startswith(str(golden.path)) and "pytest --dbo-update-golden" in words and "\n" not in words


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        (None, "does not exist; write it with pytest --dbo-update-golden"),
        (b"", "is empty; write it anew with pytest --dbo-update-golden"),
        (b"\xff\xfe", "is no golden schedule: it is not UTF-8 text"),
        (b"something else\n", "is no golden schedule: its first line is 'something else'"),
        (b"dbo-greenlet golden schedule, version 2\n", "of version '2' and this dbo_greenlet reads version 1"),
        (b"dbo-greenlet golden schedule, version 1\n", "is cut off or was edited by hand: it has no check line"),
        (b"dbo-greenlet golden schedule, version 1\nmicrobatches 2\n", "is cut off or was edited by hand"),
        (
            b"dbo-greenlet golden schedule, version 1\ncheck 00000000\n",
            "was edited by hand: its check line does not fit",
        ),
    ],
)
def test_what_is_no_golden_file_is_one_clear_sentence(tmp_path: Path, text: bytes | None, sentence: str) -> None:
    golden = Golden(tmp_path / "a.txt")
    if text is not None:
        golden.path.write_bytes(text)
    with pytest.raises(GoldenFileError) as caught:
        golden.compare(Schedule(1, (0,), ("",)))
    assert sentence in str(caught.value) and str(caught.value).startswith(str(golden.path))


def with_check(body: str) -> bytes:
    """A file that is whole, whatever it says."""
    from dbo_greenlet.testing.golden import _check

    return f"{body}\ncheck {_check(body.split(chr(10)))}\n".encode()


HEAD = "dbo-greenlet golden schedule, version 1\nmicrobatches {}\npolicy p\nhash {}\ndecisions {}"


@pytest.mark.parametrize(
    "body",
    [
        "dbo-greenlet golden schedule, version 1",
        HEAD.format(1, "0" * 16, 1) + "\n0 0 a",  # another hash
        HEAD.format(1, Schedule(1, (0,), ("a",)).hash, 2) + "\n0 0 a",  # another number
        HEAD.format(1, Schedule(1, (1,), ("a",)).hash, 1) + "\n0 1 a",  # not below N
        HEAD.format(1, Schedule(1, (0,), ("a",)).hash, 1) + "\n0 0",
        HEAD.format(1, Schedule(1, (0,), ("a",)).hash, 1) + '\n0 0 "a',
        HEAD.format(1, Schedule(1, (0,), ("a",)).hash, 1) + f"\n0 0 {json.dumps(json.dumps(['a']))[1:-1]}",
        HEAD.format("x", "0" * 16, 0),
    ],
)
def test_a_file_that_contradicts_itself_is_refused(tmp_path: Path, body: str) -> None:
    golden = Golden(tmp_path / "a.txt")
    golden.path.write_bytes(with_check(body))
    with pytest.raises(GoldenFileError, match="contradicts itself|is no golden schedule of version 1"):
        golden.read()


def test_a_folder_that_cannot_be_written_to_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(GoldenFileError, match="a.txt cannot be written: "):
        Golden(tmp_path / "file" / "a.txt").update(run_step(low_latency(1)).schedule)


def test_the_golden_schedule_can_be_replayed() -> None:
    schedule, _ = Golden(GOLDENS / "vllm_phase_offset_2.txt").read()
    run = run_step(low_latency(3), ReplayCase(schedule).policy())
    assert run.succeeded and run.schedule == schedule
    assert run.schedule != run_step(low_latency(3), RoundRobin()).schedule
