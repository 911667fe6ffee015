"""What scripts/bench_gpu_overlap.py times is right: the layers, the order, the wires. GPU: python -m pytest -m gpu"""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

SCRIPTS = Path(__file__).parents[2] / "scripts"
GPU = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device; run: python -m pytest -m gpu"),
]
CUDA = pytest.param("cuda", marks=GPU)


@pytest.fixture(scope="module", autouse=True)
def scripts() -> Any:
    sys.path.insert(0, str(SCRIPTS))
    yield
    sys.path.remove(str(SCRIPTS))


@pytest.fixture
def layers(scripts: Any) -> Any:
    return importlib.import_module("bench_gpu_overlap_layers")


@pytest.fixture
def wires(scripts: Any) -> Any:
    return importlib.import_module("bench_gpu_overlap_wire")


@pytest.fixture
def limits(scripts: Any) -> Any:
    return importlib.import_module("bench_gpu_overlap_limit")


def make_program(layers: Any, where: str, count: int = 2, depth: int = 3) -> Any:
    from dbo_greenlet.devices import cpu_device

    if where == "cpu":
        device: Any = cpu_device()
    else:
        from dbo_greenlet.devices.cuda import CudaDevice

        torch.cuda.init()
        device = CudaDevice(0)
    shape = layers.Shape("small", 256, 2, 64, 64, 128, 128, 4, 2)
    return layers.Program(shape, 96, depth, device, context=128, count=count)


@pytest.fixture(autouse=True)
def inference() -> Any:
    with torch.inference_mode():
        yield


def equal(left: list[Any], right: list[Any]) -> bool:
    return len(left) == len(right) and all(map(torch.equal, left, right))


@pytest.mark.parametrize("where", ["cpu", CUDA])
def test_a_layer_is_what_float32_says(layers: Any, where: str) -> None:
    program = make_program(layers, where, depth=1)
    for batch in (program.whole, *program.parts):
        got, wanted = program.forward(batch, layers.NoWire()).float(), layers.reference_layer(program, batch)
        assert (got - wanted).norm() < 1e-2 * wanted.norm()


@pytest.mark.parametrize("where", ["cpu", CUDA])
@pytest.mark.parametrize("count", [2, 3])
def test_split_is_bit_equal_to_in_turn_with_rows_on_the_wire(layers: Any, wires: Any, where: str, count: int) -> None:
    program = make_program(layers, where, count)
    wire = wires.CarryingWire()
    expected = program.in_turn(wire)
    assert not equal(expected, program.in_turn(layers.NoWire())), "the wire's reversal of the rows must show"
    for _ in range(3):
        assert equal(program.split(wire), expected)


@pytest.mark.parametrize("where", ["cpu", CUDA])
def test_the_order_is_round_robins(layers: Any, where: str) -> None:
    program = make_program(layers, where, depth=2)
    sent: list[int] = []

    class Noting(layers.NoWire):
        def transfer(self, rows: Any, arrived: Any, share: float) -> None:
            from dbo_greenlet import dbo_current_ubatch_id

            sent.append(dbo_current_ubatch_id())

    program.split(Noting())
    assert sent == [0, 1] * 4
    sent.clear()
    program.in_turn(Noting())
    assert sent == [0] * 8


@pytest.mark.parametrize("where", [CUDA])
def test_a_replay_is_bit_equal_to_eager(layers: Any, wires: Any, where: str) -> None:
    from dbo_greenlet.graphs import GraphPool

    program, wire = make_program(layers, where), wires.CarryingWire()
    expected = program.in_turn(wire)
    graphs = GraphPool(program.device)
    for run in (program.split, program.in_turn):
        captured = graphs.capture(lambda run=run: run(wire), streams=[program.comm_stream])
        for _ in range(3):
            for output in captured.output:
                output.fill_(float("nan"))
            captured.replay()
            torch.cuda.synchronize()
            assert equal(captured.output, expected)


@pytest.mark.parametrize("where", [CUDA])
@pytest.mark.parametrize("name", ["copy", "timer"])
def test_a_longer_amount_takes_longer_and_any_length_can_be_asked_for(wires: Any, where: str, name: str) -> None:
    wire = wires.WIRES[name]("cuda:0")
    wire.calibrate(repeats=3)
    amounts = [wire.amount_for(seconds) for seconds in (1e-5, 1e-4, 1e-3, 1e-2, 1e-1)]
    assert amounts == sorted(amounts)
    assert amounts[0] >= 1
    part, whole = wire.lengths_for(1e-3, 2)
    assert 1.5 * part < whole < 2.5 * part
    for amount in amounts[:3]:
        wire.enqueue(amount)
    torch.cuda.synchronize()


# -- the limits, on no device at all -----------------------------------------------------------------------------------


def test_a_wire_that_takes_no_time_leaves_the_compute(limits: Any) -> None:
    stages = limits.Stages(3.0, 2.0, 0.5)
    assert limits.round_robin(stages, 0.0, layers=5) == pytest.approx(2 * 5 * 5.5)


def test_balanced_stages_reach_the_limit_up_to_the_ends(limits: Any) -> None:
    stages = limits.Stages(1.0, 1.0, 0.0)
    for transfer in (0.1, 0.5, 1.0, 2.0):
        compute, wire = 2 * 7 * 2.0, 4 * 7 * transfer
        best = limits.limit_with_ends(compute, wire, stages, transfer, 2)
        assert best == pytest.approx(max(compute + transfer, 1.0 + wire))
        assert limits.round_robin(stages, transfer, layers=7) == pytest.approx(best)


def test_unequal_stages_wait_for_each_other(limits: Any) -> None:
    """In the steady state each transfer is beside one stage: a layer takes the longer one, stage by stage."""
    stages = limits.Stages(1.0, 3.0, 0.0)
    many, few = (limits.round_robin(stages, 2.0, layers) for layers in (20, 10))
    assert (many - few) / 10 == pytest.approx(2 * max(1.0, 2.0) + 2 * max(3.0, 2.0))


def test_the_order_never_beats_the_limits(limits: Any) -> None:
    for attend in (0.5, 1.0, 2.0):
        for transfer in (0.05, 0.4, 1.0, 3.0):
            stages = limits.Stages(attend, 1.0, 0.1)
            for count in (2, 3):
                compute, wire = 6 * count * stages.total, 6 * 2 * count * transfer
                order = limits.round_robin(stages, transfer, 6, count)
                with_ends = limits.limit_with_ends(compute, wire, stages, transfer, count)
                assert order >= with_ends - 1e-9 >= limits.limit(compute, wire) - 2e-9


def test_where_splitting_loses_is_found_between_the_points(limits: Any) -> None:
    assert limits.where_it_loses([1.0, 2.0, 3.0], [1.1, 1.2, 1.1]) == []
    assert limits.where_it_loses([1.0, 2.0, 3.0], [0.9, 0.8, 0.7]) == [(1.0, 3.0)]
    ((begin, end),) = limits.where_it_loses([1.0, 2.0, 3.0], [0.9, 1.1, 1.2])
    assert begin == 1.0
    assert end == pytest.approx(1.5)
    ((begin, end),) = limits.where_it_loses([1.0, 2.0, 3.0], [1.1, 0.9, 1.1])
    assert (begin, end) == (pytest.approx(1.5), pytest.approx(2.5))


# -- what is said about the numbers ------------------------------------------------------------------------------------


def sweep_row(limits: Any, factor: float, host: float) -> dict[str, Any]:
    """A row as if the split step took `factor` times round robin's order."""
    stages, layers = limits.Stages(0.4, 0.5, 0.1), 8
    compute, points = 2 * layers * stages.total, []
    for ratio in (0.25, 1.0, 2.0):
        transfer = ratio * stages.total / 2
        wire = 4 * layers * transfer
        bounds = {
            "limit": limits.limit(compute, wire),
            "limit_with_ends": limits.limit_with_ends(compute, wire, stages, transfer, 2),
            "round_robin": limits.round_robin(stages, transfer, layers),
            "limit_same_mode": limits.limit(compute, wire),
        }
        split = factor * bounds["round_robin"]
        unsplit = 0.7 * compute + wire
        points.append(
            {
                "ratio": ratio,
                "transfer": transfer,
                "unsplit": unsplit,
                "in_turn": None,
                "split": split,
                "split_quartiles": [split, split],
                "split_host": host,
                "bounds": bounds,
                "over": {name: split / bound for name, bound in bounds.items()},
                "gain": unsplit / split,
                "host_bound": host > bounds["limit"],
            }
        )
    return {
        "mode": "graph",
        "layers": layers,
        "rounds": 9,
        "context": 128,
        "balanced": True,
        "wire": "copy",
        "stages": {"attend": 0.4, "experts": 0.5, "unpack": 0.1},
        "compute": compute,
        "compute_same_mode": compute,
        "compute_beside_wire": compute,
        "unsplit_compute": 0.7 * compute,
        "split_no_transfers": compute,
        "split_one_stream": compute,
        "host": {"split, no transfers": host},
        "points": points,
    }


def test_losses_and_host_bound_steps_are_named(scripts: Any, limits: Any) -> None:
    tables = importlib.import_module("bench_gpu_overlap_table")
    made = tables.report({"slow host": sweep_row(limits, 1.02, 1e3), "fast host": sweep_row(limits, 1.02, 0.1)})
    remarks = [[row[-1] for row in table.rows] for table in made.tables[1:]]
    assert remarks == [["loss, host-bound", "host-bound", "host-bound"], ["loss", "", ""]]
    assert not any("WRONG" in sentence for sentence in made.said)
    header, slow = made.tables[0].columns, made.tables[0].rows[0]
    assert slow[header.index("1")].endswith("*")
    assert slow[header.index("loses at")].startswith("0.25 to 0.")


def test_a_step_faster_than_any_order_is_called_wrong(scripts: Any, limits: Any) -> None:
    tables = importlib.import_module("bench_gpu_overlap_table")
    rows = {"row": sweep_row(limits, 0.9, 0.1)}
    assert len(tables.too_fast(rows)) == 3
    assert any("WRONG" in sentence for sentence in tables.report(rows).said)
