"""`estimate` on the command line: help, text, JSON, exit codes, one sentence for each wrong input."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from dbo_greenlet.trace import HeaderRecord, StepRecord, TraceWriter
from tests.cli.loaded import output_and_loaded
from tests.job.command import in_process, one_sentence

LITE = ["--model", "deepseek-v2-lite", "--layers", "4", "--ranks", "2", "--link", "nvlink", "--context", "64"]
V3 = ["--model", "deepseek-v3", "--layers", "9", "--ranks", "72", "--gpu", "H100", "--dispatch-bytes", "1"]


def test_help_has_an_example_and_needs_nothing_heavy() -> None:
    output, loaded = output_and_loaded("torch numpy greenlet msgspec", "estimate", "--help")
    assert "Example: dbo-greenlet estimate" in output
    assert loaded == "[]"


def test_an_estimate_from_shapes_needs_no_torch() -> None:
    words = ["--tokens", "256", "--outside-ms", "0", "--execution", "graph", "--microbatches", "2"]
    output, loaded = output_and_loaded("torch numpy msgspec", "estimate", *V3, *words)
    assert loaded == "[]"
    assert "Split: 2 microbatches" in output


def test_what_is_printed() -> None:
    done = in_process("estimate", *LITE, "--tokens", "64", "--unsplit", "64=12.5", "--execution", "graph")
    assert (done.returncode, done.stderr) == (1, "")
    lines = done.stdout.splitlines()
    assert (
        lines[0]
        == "deepseek-v2-lite: 3 layers with 64 experts (top 6), 1 without; 64 tokens a rank, decode, context 64"
    )
    assert lines[1] == "2 ranks, H200; deepep_ll over nvlink, 150 GB/s, 25 us; calibrated as 'vllm-ll'"
    assert lines[2] == "gain: unsplit time over split time; below 1 splitting loses"
    assert lines[5].startswith("unsplit") and lines[5].split()[1] == "12.50"
    assert any(line.startswith("Do not split: the best is 2 microbatches") for line in lines)
    assert lines[-1] == (
        "--dbo-decode-token-threshold: no value up to 510 tokens a rank pays; leave --enable-dbo off for these steps"
    )


def test_two_explanations_are_both_told_and_the_worse_one_counts() -> None:
    words = ["--tokens", "256", "--outside-ms", "0", "--unsplit", "256=10", "--execution", "eager"]
    text = in_process("estimate", *LITE, *words).stdout
    assert (
        "two explanations. Above: the step waits for its host. If the step waits for its GPU, the gain is 0.7" in text
    )
    done = in_process("estimate", *LITE, *words, "--json")
    (found,) = json.loads(done.stdout)["estimates"]
    (other,) = found["otherwise"].values()
    assert found["options"][0]["gain"] < other["options"][0]["gain"]


def test_a_step_that_low_latency_does_not_take_is_noted() -> None:
    words = ["--tokens", "600", "--execution", "graph", "--microbatches", "2", "--max-tokens", "8"]
    assert (
        "Low latency takes no 600 tokens of a rank in one message, at most 510"
        in in_process("estimate", *V3, *words).stdout
    )
    assert "at most 510" not in in_process("estimate", *V3, *words, "--all2all", "stream").stdout


def test_json() -> None:
    done = in_process("estimate", *V3, "--tokens", "256", "--outside-ms", "0", "--context", "4000", "--json")
    assert done.returncode == 0
    eager, graph = json.loads(done.stdout)["estimates"]
    assert (eager["execution"], graph["execution"]) == ("eager", "graph")
    assert graph["verdict"] == "split"
    best = graph["options"][0]
    assert best["gain"] == pytest.approx(graph["unsplit"]["step"] / best["step"])
    assert best["schedule"].startswith("dbo1:2:")
    assert graph["threshold"]["option"] == "--dbo-decode-token-threshold"
    assert 64 < graph["threshold"]["tokens"] <= 256


def test_values_from_a_file_give_way_to_options(tmp_path: Path) -> None:
    pytest.importorskip("tomllib")
    file = tmp_path / "machine.toml"
    file.write_text(
        'model = "deepseek-v2-lite"\ntokens = 32\nranks = 4\n'
        '[gpu]\nname = "X1"\nbf16 = 500\nfp8 = 900\nmemory = 3\nsms = 80\n'
        "[shape]\nlayers = 6\n[calibration]\npadded_us = 0\n"
    )
    done = in_process("estimate", "--values", file, "--ranks", "2", "--execution", "graph")
    assert done.stdout.startswith("deepseek-v2-lite: 5 layers")
    assert "32 tokens a rank" in done.stdout
    assert "\n2 ranks, X1;" in done.stdout


def test_a_trace_with_unsplit_and_split_steps(tmp_path: Path) -> None:
    file = tmp_path / "t.jsonl"
    common = {"requests": list(range(64)), "execution": "eager", "begin": 0.0}
    with TraceWriter(file) as writer:
        writer.write(
            HeaderRecord("0.1.0", 0, 2),
            StepRecord(0, 0, "unsplit", 64, 64, False, "off", end=15000.0, **common),  # type: ignore[arg-type]
            StepRecord(
                0, 0, "dbo", 64, 64, True, "split", slices=[[0, 32, 0, 32], [32, 64, 32, 64]], end=29000.0, **common  # type: ignore[arg-type]
            ),
        )  # fmt: skip
    done = in_process("estimate", file, *LITE, "--execution", "eager")
    assert (done.returncode, done.stderr) == (1, "")
    assert "1 of 64 tokens, 2 microbatches, round_robin, greenlets: 29.0 ms, predicted" in done.stdout
    assert "gain 0.52 (unsplit 15.0 ms), predicted 0.5" in done.stdout
    both = in_process("estimate", file, *LITE)
    assert f"Not estimated as a graph: {file}: no unsplit decode step" in both.stdout


@pytest.mark.parametrize(
    ("words", "wrong"),
    [
        (["--model", "gpt-5"], "no model 'gpt-5'; use a file (config.json, TOML) or one of"),
        (["--gpu", "V100"], "no GPU 'V100' in the table"),
        (["--policy", "fastest"], "policy is 'fastest'; use one of round_robin"),
        (["--microbatches", "9"], "--microbatches 9; use numbers from 2 to 4"),
        (["--microbatches", "1"], "--microbatches 1; use numbers from 2 to 4"),
        (["--host-ms", "5"], "--host-ms is of a step given by --unsplit TOKENS=MS, and there is none"),
        (["--unsplit", "64:12"], "--unsplit 64:12; use TOKENS=MILLISECONDS"),
        (["--unsplit", "64=-3"], "an unsplit step of 64 tokens in -3000.0 us"),
        (["--execution", "fast"], "--execution fast; use eager, graph or both"),
        (["--all2all", "deepep_ht", "--execution", "graph"], "high throughput cannot be captured"),
        (["--tokens", "1"], "nothing to split: 1 tokens"),
        (["--values", "none.toml"], "none.toml cannot be read as TOML: no such file"),
        (["none.jsonl"], "none.jsonl: no such file"),
        (["dbo_greenlet/estimate"], "dbo_greenlet/estimate: a folder without traces or profiles"),
    ],
)
def test_wrong_input_is_one_sentence(words: list[str], wrong: str) -> None:
    done = in_process("estimate", *words)
    assert done.returncode == 2
    assert one_sentence(done.stderr).startswith(wrong)


def test_files_that_are_neither_trace_nor_profile(tmp_path: Path) -> None:
    cut = tmp_path / "cut.json.gz"
    cut.write_bytes(gzip.compress(b'{"traceEvents": []}' * 100)[:30])
    (tmp_path / "text.txt").write_text("hello")
    (tmp_path / "empty").write_text("")
    for name in ("cut.json.gz", "text.txt", "empty"):
        done = in_process("estimate", tmp_path / name, "--tokens", "64")
        assert done.returncode == 2
        assert one_sentence(done.stderr).startswith(str(tmp_path / name))
