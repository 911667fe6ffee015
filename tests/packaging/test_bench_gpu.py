"""What of scripts/bench_gpu*.py needs no GPU: taking turns, the fit, merging, and the variants computing the same."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import bench_gpu
import bench_gpu_ranks
import pytest
import torch
from bench_gpu_common import Bench, Report, Table, spread, take_turns
from bench_gpu_model import SerialLane, SplitLane, called_directly, make_model
from bench_gpu_profile import Sampler
from bench_gpu_scaling import LAYERS, MICROBATCHES, SERIAL, SPLIT, fit, interval
from bench_gpu_step import Steps, all_steps, check, stack_saved
from bench_gpu_threads import Baton, ThreadedStep

from dbo_greenlet.devices import cpu_device


def alive(pid: int) -> bool:
    """Whether the process runs; one that has ended and was not yet asked for does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.fixture
def bench() -> Bench:
    return Bench(cpu_device(), quick=True)


@pytest.fixture
def model():
    return make_model(2, "cpu", torch.float32, small=True)


class TestTakingTurns:
    def test_every_variant_runs_once_a_round_and_is_first_in_turn(self):
        order = []
        variants = {name: lambda n=name: order.append(n) or {"value": float(len(order))} for name in "abc"}
        samples = take_turns(variants, 3)
        assert order == ["a", "b", "c", "b", "c", "a", "c", "a", "b"]
        assert samples["a"]["value"] == [1.0, 6.0, 8.0]

    def test_spread(self):
        assert spread([3.0, 1.0, 8.0]) == {"median": 3.0, "min": 1.0, "max": 8.0, "rounds": 3}


class TestFit:
    def points(self):
        return {(n, layers): 0.5 + 0.1 * n * layers for n in MICROBATCHES for layers in LAYERS}

    def test_a_line_is_found(self):
        line = fit(self.points())
        assert line["slope_us"] == pytest.approx(100)
        assert line["start_us"] == pytest.approx(500)
        assert line["worst_of_range"] < 1e-9

    def test_a_point_off_the_line_is_named(self):
        points = self.points()
        points[3, 60] += 5
        line = fit(points)
        assert (line["worst"]["microbatches"], line["worst"]["layers"]) == (3, 60)
        assert line["worst"]["off_us"] > 4000

    def test_the_interval_of_two_lines_without_noise_is_their_difference(self):
        serial = {key: [value, value, value] for key, value in self.points().items()}
        split = {key: [value * 1.5] * 3 for key, value in self.points().items()}
        low, high = interval({SERIAL: serial, SPLIT: split}, times=20)
        assert (low, high) == (pytest.approx(50), pytest.approx(50))

    def test_rounds_that_differ_widen_the_interval(self):
        serial = {key: [value, value, value] for key, value in self.points().items()}
        split = {key: [value * 1.4, value * 1.5, value * 1.6] for key, value in self.points().items()}
        low, high = interval({SERIAL: serial, SPLIT: split}, times=100)
        assert 39 < low < 50 < high < 61


class TestSteps:
    @torch.inference_mode()
    @pytest.mark.parametrize("thin", [False, True])
    def test_all_variants_compute_the_same(self, bench, thin):
        model = make_model(2, "cpu", torch.float32, small=True, thin=thin)
        steps, direct = Steps(bench, model, 32), Steps(bench, called_directly(model), 32)
        direct.use_input_of(steps)
        found = check(bench, model, steps, all_steps(steps, direct))
        assert found["not_equal"] == []
        assert max(found["errors"].values()) < 1e-5

    @torch.inference_mode()
    def test_a_variant_that_skips_the_transport_is_found(self, bench, model):
        class NoCopy(SerialLane):
            def combine(self, sites, rows):
                return self.returned

        steps = Steps(bench, model, 32)
        variants = {"right": ("stock", steps.serial(SerialLane)), "wrong": ("stock", steps.serial(NoCopy))}
        found = check(bench, model, steps, variants)
        assert found["not_equal"] == ["wrong"]
        assert found["errors"]["wrong"] != found["errors"]["wrong"]

    @torch.inference_mode()
    def test_modules_called_directly_lie_on_less_of_the_stack(self, bench, model):
        plain, direct = Steps(bench, model, 32), Steps(bench, called_directly(model), 32)
        assert stack_saved(direct)["p50"] < stack_saved(plain)["p50"]

    @torch.inference_mode()
    def test_fewer_layers_take_fewer_yields(self, bench, model):
        assert stack_saved(Steps(bench, model, 32))["yields"] == 2 * 2 * 4
        assert stack_saved(Steps(bench, model, 32, layers=1))["yields"] == 2 * 4


class TestThreadedCapture:
    @torch.inference_mode()
    @pytest.mark.parametrize("count", [2, 3])
    def test_the_classical_step_computes_what_the_split_one_does(self, bench, model, count):
        steps = Steps(bench, model, 16 * count, count)
        by_threads = torch.cat(ThreadedStep(steps).run())
        assert torch.equal(by_threads, torch.cat(steps.split("greenlet", SplitLane)()))

    @torch.inference_mode()
    def test_an_error_in_one_thread_reaches_the_caller(self, bench, model):
        steps = Steps(bench, model, 32)
        threaded = ThreadedStep(steps)
        threaded.lanes[1].received = torch.empty(1, 1)
        with pytest.raises(RuntimeError):
            threaded.run()

    def test_the_baton_passes_over_those_that_have_ended(self):
        baton = Baton(3)
        assert baton.next_after(0) == 1
        baton.finish(1)
        assert baton.next_after(0) == 2
        baton.finish(0)
        assert baton.next_after(2) == 2


def test_the_sampler_sees_where_time_goes():
    def busy():
        end = time.perf_counter() + 0.2
        while time.perf_counter() < end:
            pass

    sampler = Sampler()
    with sampler:
        busy()
    ((name, hits),) = sampler.by_function().most_common(1)
    assert name.endswith("busy")
    assert hits > 10


class TestMerging:
    def report(self):
        return {"tables": [{"title": "T", "columns": ["", "a"], "rows": [["x", "1"]]}], "said": ["so"], "numbers": {}}

    def test_a_merged_file_is_printed_without_running_anything(self, tmp_path):
        held = tmp_path / "held.json"
        held.write_text(json.dumps({"step": self.report()}))
        script = Path(bench_gpu.__file__)
        command = [sys.executable, str(script), "--rows", "--merge", str(held), "--markdown"]
        ran = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
        assert "| x | 1 |" in ran.stdout
        assert "- so" in ran.stdout

    def test_a_row_that_fails_does_not_wipe_out_what_was_there(self, tmp_path, monkeypatch):
        held, out = tmp_path / "held.json", tmp_path / "out.json"
        held.write_text(json.dumps({"step": self.report()}))
        # A folder without the scripts: the row's process ends with an error.
        monkeypatch.setattr(bench_gpu, "HERE", tmp_path)
        asked = ["bench_gpu.py", "--rows", "step", "scaling", "--merge", str(held), "--json", str(out)]
        monkeypatch.setattr(sys, "argv", asked)
        assert bench_gpu.main() == 1
        results = json.loads(out.read_text())
        assert results["step"] == self.report()
        assert "exit status" in results["scaling"]["error"]

    def test_every_row_has_a_script_of_its_name(self):
        folder = Path(bench_gpu.__file__).parent
        assert [name for name in bench_gpu.ROWS if not (folder / f"bench_gpu_{name}.py").exists()] == []

    def test_rows_that_need_a_gpu_are_left_out_of_a_dry_run(self, tmp_path, monkeypatch, capsys):
        out = tmp_path / "out.json"
        monkeypatch.setattr(sys, "argv", ["bench_gpu.py", "--cpu", "--rows", "capture", "ranks", "--json", str(out)])
        assert bench_gpu.main() == 0
        assert "capture needs a GPU and is left out" in capsys.readouterr().out
        assert not out.exists()

    def test_what_a_row_has_started_ends_with_it(self, tmp_path, monkeypatch):
        noted = tmp_path / "pid"
        (tmp_path / "bench_gpu_step.py").write_text(
            "import subprocess, sys, time\n"
            "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
            f"open({str(noted)!r}, 'w').write(str(child.pid))\n"
            "time.sleep(600)\n"
        )
        monkeypatch.setattr(bench_gpu, "HERE", tmp_path)
        monkeypatch.setitem(bench_gpu.ROWS, "step", bench_gpu.Row(4))
        assert bench_gpu.run_row("step", []) == {"error": "took longer than 4 s"}
        assert not alive(int(noted.read_text()))

    def test_a_report_without_a_machine_gets_one(self, tmp_path, monkeypatch):
        (tmp_path / "bench_gpu_step.py").write_text(
            "import sys\nprint('a table')\nopen(sys.argv[2], 'w').write('{\"rows\": 1}')\n"
        )
        monkeypatch.setattr(bench_gpu, "HERE", tmp_path)
        report = bench_gpu.run_row("step", ["--cpu"])
        assert report["printed"] == "a table\n"
        assert {"commit", "package", "date", "versions"} <= set(report["machine"])

    def test_a_dry_run_from_end_to_end(self, tmp_path):
        out = tmp_path / "out.json"
        command = [sys.executable, bench_gpu.__file__, "--cpu", "--quick", "--rounds", "1", "--rows", "handoff"]
        ran = subprocess.run([*command, "--json", str(out)], capture_output=True, text=True, check=True, timeout=240)
        assert "Hand-off per yield" in ran.stdout
        report = json.loads(out.read_text())["handoff"]
        assert report["numbers"]["us"]["greenlets"]["rounds"] == 1
        assert report["quick"] is True

    def test_reports_are_printed_aligned(self, capsys):
        from dataclasses import asdict

        from bench_gpu_common import print_report

        table = Table("T", ["", "long column"], [["a", "1"], ["bcd", "22"]])
        print_report(asdict(Report([table], ["said"])))
        assert capsys.readouterr().out == "\nT\n     long column\na              1\nbcd           22\n- said\n"


class TestRanks:
    def test_rows_of_two_gpus_do_not_take_the_names_of_one(self):
        assert bench_gpu_ranks.named("ll, graph", 1) == "ll, graph"
        assert bench_gpu_ranks.named("ll, graph", 2) == "ll, graph, 2 GPUs"

    def test_only_ranks_that_share_a_gpu_pass_for_two_hosts(self):
        shared, apart = ([bench_gpu_ranks.nccl_environment(rank, gpus) for rank in (0, 1)] for gpus in (1, 2))
        assert len({one["NCCL_HOSTID"] for one in shared}) == 2
        assert apart == [{}, {}]
