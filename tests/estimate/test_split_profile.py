"""The length of split steps by a profile: from a dispatch to the same one a step later; and what does not say it."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("numpy")
pytest.importorskip("msgspec")

from dbo_greenlet.errors import ConfigurationError, TraceFileError
from dbo_greenlet.estimate.report import Question, answer
from dbo_greenlet.estimate.split_profile import split_of_profile
from dbo_greenlet.trace.importers import read_profile
from tests.cli.loaded import output_and_loaded
from tests.estimate.setups import LITE_ON_TWO
from tests.job.command import in_process, one_sentence
from tests.trace.profiles import (
    COMBINE,
    DISPATCH,
    GEMM,
    LOW_LATENCY_COMBINE,
    LOW_LATENCY_DISPATCH,
    ChromeProfile,
    NsysProfile,
)

LAYERS = 3
NOTIFY = "void deep_ep::internode::notify_dispatch<false, 8>(int*)"


def message(made: ChromeProfile, name: str, at: float, low: bool) -> None:
    """A message of 20 us; with recv hooks its send is launched apart."""
    if not low:
        made.kernel(NOTIFY, at - 5, at - 4, stream=21, launch=at - 5)
        made.kernel(name, at, at + 20, stream=21, launch=at)
        return
    made.kernel(name, at, at + 5, launch=at)
    made.kernel(name, at + 5, at + 20, launch=at + 5)


def step(
    made: ChromeProfile, begin: float, length: float, *, low: bool, split: int = 2, layers_named: bool = False
) -> None:
    """A step of some layers; unsplit where `split` is 1: then no range names a microbatch."""
    dispatch, combine = (LOW_LATENCY_DISPATCH, LOW_LATENCY_COMBINE) if low else (DISPATCH, COMBINE)
    part = length / (LAYERS * split)
    for layer in range(LAYERS):
        for number in range(split):
            at = begin + part * (layer * split + number)
            if split > 1:
                made.range(f"layer {layer} ubatch {number}" if layers_named else f"ubatch {number}", at, at + part - 1)
            made.kernel(GEMM, at + 10, at + 30, launch=at + 1)
            message(made, dispatch, at + 40, low)
            message(made, combine, at + 70, low)


def profile(path: Path, lengths: list[float], *, low: bool = False, cut: float = 0.0, kinds: str = "") -> Path:
    """Steps of these lengths, one after the other; `kinds` has an u for those that are not split.

    `cut` is how much of the first step the profiler missed, a share.
    """
    made = ChromeProfile()
    at = 0.0
    for number, length in enumerate(lengths):
        step(made, at, length, low=low, split=1 if kinds[number : number + 1] == "u" else 2)
        at += length
    if cut:
        made.events = [each for each in made.events if "ts" not in each or each["ts"] >= cut * lengths[0]]
    return made.write(path)


@pytest.mark.parametrize("low", [True, False])
def test_from_a_dispatch_to_the_same_one_of_the_next_step(tmp_path: Path, low: bool) -> None:
    file = profile(tmp_path / "p.json", [6000.0, 9000.0, 6600.0, 6000.0], low=low)
    found, notes = split_of_profile(read_profile(file), 64, LAYERS, "greenlets")
    # Three lengths of four steps: of the last nobody saw the end.
    assert (found.tokens, found.count, found.policy, found.carrier, found.rounds) == (
        64, 2, "round_robin", "greenlets", 3,
    )  # fmt: skip
    assert found.step == pytest.approx(6600)
    assert notes[0].startswith("The split steps are of a profile: from a dispatch to the same one of the next step")


def test_a_profile_may_begin_in_the_middle_of_a_step(tmp_path: Path) -> None:
    file = profile(tmp_path / "p.json", [6000.0] * 4, cut=0.5)
    found, _ = split_of_profile(read_profile(file), 64, LAYERS, "greenlets")
    assert (found.step, found.rounds) == (pytest.approx(6000), 3)


def test_steps_that_are_not_split_end_the_row(tmp_path: Path) -> None:
    file = profile(tmp_path / "p.json", [6000.0, 6000.0, 3000.0, 6600.0, 6600.0, 3000.0, 6600.0], kinds="ssussus")
    found, _ = split_of_profile(read_profile(file), 64, LAYERS, "greenlets")
    assert (found.step, found.rounds) == (pytest.approx(6300), 2)


def test_the_estimate_states_its_error(tmp_path: Path) -> None:
    file = profile(tmp_path / "p.json", [6000.0] * 3, low=True)
    asked = {**LITE_ON_TWO, "tokens": 64}
    eager, graph = answer(Question(asked, split=file, unsplit=("64=12",), microbatches="2")).sections
    (judged,) = eager.judged
    assert (judged.step.step, judged.step.rounds, judged.gain) == (pytest.approx(6000), 2, pytest.approx(2.0))
    assert any("from a dispatch to the same one of the next step" in note for note in eager.notes)
    assert graph.judged == []
    assert any("of graphs a profile does not tell microbatches apart" in note for note in graph.notes)


def test_profiles_that_do_not_say_it_are_refused(tmp_path: Path) -> None:
    for file, sentence in (
        (profile(tmp_path / "unsplit.json", [3000.0] * 3, kinds="uuu"), "not told apart by microbatches"),
        (profile(tmp_path / "one.json", [3000.0]), "no two split steps of 3 layers with experts one after the other"),
        (profile(tmp_path / "apart.json", [3000.0] * 3, kinds="sus"), "no two split steps of 3 layers"),
    ):
        with pytest.raises(TraceFileError, match=f"{file.name}: .*{sentence}"):
            split_of_profile(read_profile(file), 64, LAYERS, "greenlets")
    whole = NsysProfile(tmp_path / "graph.sqlite")
    whole.kernel(GEMM, 0, 10)
    whole.graph(20, 30)
    with pytest.raises(TraceFileError, match=r"graph.sqlite: graph replays are recorded in one piece"):
        split_of_profile(read_profile(whole.done()), 64, LAYERS, "greenlets")
    split = profile(tmp_path / "split.json", [6000.0] * 3)
    with pytest.raises(ConfigurationError, match="says not how many tokens a step has: --tokens"):
        answer(Question(LITE_ON_TWO, split=split))
    with pytest.raises(TraceFileError, match="of graphs a profile does not tell microbatches apart"):
        answer(Question({**LITE_ON_TWO, "tokens": 64}, split=split, execution="graph"))


@pytest.mark.parametrize("asked", [1, 2, 6])
def test_another_number_of_layers_than_the_ranges_name_is_refused(tmp_path: Path, asked: int) -> None:
    made = ChromeProfile()
    for number in range(4):
        step(made, 6000.0 * number, 6000.0, low=False, layers_named=True)
    read = read_profile(made.write(tmp_path / "p.json"))
    assert split_of_profile(read, 64, LAYERS, "greenlets")[0].step == pytest.approx(6000)
    with pytest.raises(TraceFileError, match=f"split steps are in 3 layers, the model has {asked} with experts"):
        split_of_profile(read, 64, asked, "greenlets")


def test_on_the_command_line(tmp_path: Path) -> None:
    file = profile(tmp_path / "p.json", [6000.0] * 3, low=True)
    words = ["--model", "deepseek-v2-lite", "--layers", "4", "--ranks", "2", "--link", "nvlink", "--tokens", "64"]
    words += ["--unsplit", "64=12", "--execution", "eager", "--microbatches", "2", "--split"]
    output = in_process("estimate", *words, file).stdout
    assert "2 of 64 tokens, 2 microbatches, round_robin, greenlets: 6.0 ms, predicted" in output
    done = in_process("estimate", *words, tmp_path / "none")
    assert done.returncode == 2 and str(tmp_path / "none") in one_sentence(done.stderr)
    assert output_and_loaded("torch", "estimate", "--help")[1] == "[]"
