"""What a profile of unsplit steps says of a layer, and which profiles say nothing of it."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("numpy")
pytest.importorskip("msgspec")

from dbo_greenlet.errors import ConfigurationError, TraceFileError
from dbo_greenlet.estimate.from_profile import all2all_of_profile, unsplit_of_profile
from dbo_greenlet.estimate.predict import step_costs
from dbo_greenlet.estimate.report import Question, answer
from dbo_greenlet.trace.importers import read_profile
from tests.estimate.setups import LITE_ON_TWO
from tests.trace.profiles import (
    COMBINE,
    DISPATCH,
    FLASH,
    GEMM,
    LOW_LATENCY_COMBINE,
    LOW_LATENCY_DISPATCH,
    ChromeProfile,
)

NOTIFY = "void deep_ep::internode::notify_dispatch<false, 8>(int*)"


def low_latency(layers: int, name: str = "attention", apart: bool = True) -> ChromeProfile:
    """A layer takes 1000 us: 300 of attention, 400 of experts, 60 and 40 us of messages, and 100 of shared experts."""
    made = ChromeProfile()
    for layer in range(layers):
        at = 1000.0 * layer
        made.range(name, at, at + 20)
        made.kernel(FLASH, at + 100, at + 400, launch=at + 1)
        made.range("dispatch", at + 20, at + 40)
        if apart:
            made.kernel(LOW_LATENCY_DISPATCH, at + 400, at + 420, launch=at + 21)
            made.kernel(LOW_LATENCY_DISPATCH, at + 420, at + 460, launch=at + 25)
        else:
            made.kernel(LOW_LATENCY_DISPATCH, at + 400, at + 460, launch=at + 21)
        made.range("experts" if name == "attention" else name, at + 40, at + 60)
        made.kernel(GEMM, at + 460, at + 860, launch=at + 41)
        made.range("combine", at + 60, at + 80)
        made.kernel(LOW_LATENCY_COMBINE, at + 860, at + 900, launch=at + 61)
        if apart:
            made.kernel(LOW_LATENCY_COMBINE, at + 900, at + 900, launch=at + 65)
        made.range("shared experts" if name == "attention" else name, at + 80, at + 99)
        made.kernel(GEMM, at + 900, at + 1000, launch=at + 81)
    return made


@pytest.mark.parametrize("apart", [True, False])
def test_stages_of_a_layer(tmp_path: Path, apart: bool) -> None:
    profile = read_profile(low_latency(6, apart=apart).write(tmp_path / "p.json"))
    step, notes = unsplit_of_profile(profile, 64)
    assert step.stages == {
        "attention": 300, "experts": 400, "shared": 100, "compute": 800, "dispatch": 60, "combine": 40,
    }  # fmt: skip
    # Between the launches of two dispatches.
    assert (step.tokens, step.step, step.layer_host) == (64, None, 1000)
    assert notes[0] == "6 passes through a layer in the profile, by its dispatches."
    assert notes[1].startswith("The host takes 1000 us to launch a layer while it is profiled")


def test_without_names_of_stages_all_compute_is_one(tmp_path: Path) -> None:
    profile = read_profile(low_latency(6, name="forward").write(tmp_path / "p.json"))
    step, notes = unsplit_of_profile(profile, 64)
    assert {stage: us for stage, us in step.stages.items() if stage in ("attention", "experts", "compute")} == {
        "compute": 800
    }
    assert "so all stages are corrected by one factor" in notes[1]


def test_what_prepares_a_message_is_none(tmp_path: Path) -> None:
    made = ChromeProfile()
    for layer in range(3):
        at = 100.0 * layer
        made.kernel(GEMM, at, at + 40, launch=at)
        made.kernel(NOTIFY, at + 40, at + 45, stream=21, launch=at + 2)
        made.kernel(DISPATCH, at + 45, at + 60, stream=21, launch=at + 4)
        made.kernel(COMBINE, at + 60, at + 80, stream=21, launch=at + 6)
    step, _ = unsplit_of_profile(read_profile(made.write(tmp_path / "p.json")), 64)
    # A layout that waits for every rank is not what the wire takes.
    assert {"dispatch": 15, "combine": 20, "compute": 40}.items() <= step.stages.items()
    assert step.layer_host == 100


def test_waiting_for_a_late_rank_is_not_the_wire(tmp_path: Path) -> None:
    made = ChromeProfile()
    at = 0.0
    for layer in range(20):
        late = 5000.0 * (layer % 4 != 0)
        made.kernel(DISPATCH, at, at + 60 + late, stream=21, launch=at)
        at += 60 + late
        made.kernel(GEMM, at, at + 400, launch=at)
        made.kernel(COMBINE, at + 400, at + 440, stream=21, launch=at + 1)
        at += 500
    step, _ = unsplit_of_profile(read_profile(made.write(tmp_path / "p.json")), 64)
    assert {"dispatch": 60, "combine": 40, "compute": 400}.items() <= step.stages.items()


def test_messages_without_a_stage_are_taken_in_turn(tmp_path: Path) -> None:
    made = ChromeProfile()
    for layer in range(5):
        at = 1000.0 * layer
        made.kernel(GEMM, at, at + 500, launch=at)
        made.kernel("ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)", at + 500, at + 570, stream=21)
        made.kernel(GEMM, at + 570, at + 700, launch=at + 2)
        made.kernel("ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)", at + 700, at + 790, stream=21)
    step, notes = unsplit_of_profile(read_profile(made.write(tmp_path / "p.json")), 64)
    assert step.stages == {"dispatch": 70, "combine": 90, "compute": 630}
    assert notes[0].startswith("Its messages have no stage by their names")
    assert notes[1].startswith("5 passes through a layer")


def test_the_estimate_has_the_stages_of_the_profile(tmp_path: Path) -> None:
    file = low_latency(6).write(tmp_path / "p.json.gz")
    report = answer(Question({**LITE_ON_TWO, "layers": 7, "tokens": 64}, file=file, microbatches="2"))
    eager, graph = report.sections
    for section in (eager, graph):
        costs = step_costs(section.estimate.setup, 1)
        assert costs.mlp == pytest.approx(400)
        assert costs.a0 + costs.a1 == pytest.approx(300)
    assert step_costs(eager.estimate.setup, 1).host.layer == pytest.approx(1000)
    assert "The host takes 1000 us to launch a layer" in report.text()
    assert "6 passes through a layer in the profile, by its dispatches: 1 of 6 layers with experts." in report.text()


def test_several_steps_in_a_profile_say_how_long_one_takes(tmp_path: Path) -> None:
    file = low_latency(6).write(tmp_path / "p.json")
    profile = read_profile(file)
    step, notes = unsplit_of_profile(profile, 64, layers=3)
    # From the first kernel at 100 us to the end of the last one at 6000, by two steps.
    assert step.step == pytest.approx(5900 / 2)
    assert notes[0] == "6 passes through a layer in the profile, by its dispatches: 2 of 3 layers with experts."
    assert unsplit_of_profile(profile, 64, layers=6)[0].step is None
    step, notes = unsplit_of_profile(profile, 64, layers=4)
    assert step.step is None
    assert notes[0].endswith("no whole number of steps of 4 layers with experts; is it of that model?")
    asked = {**LITE_ON_TWO, "tokens": 64}
    for section in answer(Question(asked, file=file, microbatches="2")).sections:
        assert section.estimate.unsplit.step == pytest.approx(2950, rel=0.01)
        assert "A step of the profile takes 3.0 ms, by when its kernels ran; that is met." in section.notes
    (graph,) = answer(Question(asked, file=file, unsplit=("64=4",), execution="graph", microbatches="2")).sections
    assert graph.estimate.unsplit.step == pytest.approx(4000, rel=0.01)


def test_what_carried_its_messages_is_read_from_their_names(tmp_path: Path) -> None:
    asked = {name: value for name, value in LITE_ON_TWO.items() if name != "all2all"}
    for name, kind in ((LOW_LATENCY_DISPATCH, "deepep_ll"), (DISPATCH, "deepep_ht"), ("ncclDevKernel_X()", "stream")):
        made = ChromeProfile()
        for layer in range(3):
            made.kernel(GEMM, 100.0 * layer, 100.0 * layer + 40, launch=100.0 * layer)
            made.kernel(name, 100.0 * layer + 40, 100.0 * layer + 60, stream=21, launch=100.0 * layer + 2)
        profile = read_profile(made.write(tmp_path / "p.json"))
        assert all2all_of_profile(profile) == kind
    file = low_latency(3).write(tmp_path / "low.json")
    report = answer(Question({**asked, "tokens": 64}, file=file, microbatches="2", execution="eager"))
    assert report.sections[0].estimate.setup.communication.kind == "deepep_ll"
    plain = ChromeProfile()
    plain.kernel(GEMM, 0, 10, launch=0)
    assert all2all_of_profile(read_profile(plain.write(tmp_path / "plain.json"))) is None


def test_a_profile_that_does_not_say_what_is_needed_is_refused(tmp_path: Path) -> None:
    split = low_latency(2)
    split.range("ubatch 0", 0, 500)
    split.range("ubatch 1", 1000, 1500)
    split_file = split.write(tmp_path / "split.json")
    with pytest.raises(TraceFileError, match=r"split.json: its steps are split into 2 microbatches"):
        unsplit_of_profile(read_profile(split_file), 64)
    plain = ChromeProfile()
    plain.kernel(GEMM, 0, 10, launch=0)
    with pytest.raises(TraceFileError, match=r"plain.json: no dispatch in it"):
        unsplit_of_profile(read_profile(plain.write(tmp_path / "plain.json")), 64)
    with pytest.raises(ConfigurationError, match=r"split.json is a profile, which says not how many tokens"):
        answer(Question(LITE_ON_TWO, file=split_file))
    with pytest.raises(ConfigurationError, match=r"split.json is a profile, which says not which model"):
        answer(Question({"tokens": 64}, file=split_file))
