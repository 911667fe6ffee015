"""`critical-path` on the command line: what it prints, exit codes, JSON, one sentence for each bad input."""

from __future__ import annotations

import gzip
import json
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("msgspec", reason="msgspec is not installed")
from dbo_greenlet.trace import HeaderRecord, StepRecord, TraceWriter
from tests.cli.loaded import output_and_loaded
from tests.job.command import in_process, one_sentence
from tests.trace.profiles import DISPATCH, FLASH, GEMM, ChromeProfile
from tests.trace.test_critical_path_trace import HOST, REPLAYED, step_record, written


def profile(path: Path) -> Path:
    made = ChromeProfile()
    made.kernel(FLASH, 10, 40, launch=4)
    made.call("cudaStreamWaitEvent", 8, 9)
    made.kernel(DISPATCH, 41, 81, stream=21, launch=10)
    made.kernel(FLASH, 41, 61, launch=14)
    made.call("cudaStreamWaitEvent", 17, 18)
    made.kernel(GEMM, 82, 92, launch=20)
    return made.write(path)


def trace(path: Path) -> Path:
    record = step_record(execution="replayed", begin=990.0, end=1400.0)
    return written(path, record, *REPLAYED)


def test_help_has_an_example_and_needs_nothing_heavy() -> None:
    output, loaded = output_and_loaded("torch numpy greenlet msgspec", "critical-path", "--help")
    assert "Example: dbo-greenlet critical-path" in output
    assert loaded == "[]"


def test_it_needs_no_torch(tmp_path: Path) -> None:
    for file in (profile(tmp_path / "p.json"), trace(tmp_path / "t.jsonl")):
        assert output_and_loaded("torch", "critical-path", file)[1] == "[]"


def test_of_a_trace(tmp_path: Path) -> None:
    file = trace(tmp_path / "t.jsonl")
    done = in_process("critical-path", file, "--width", "62")
    assert (done.returncode, done.stderr) == (0, "")
    assert (
        done.stdout.splitlines()
        == f"""\
{file} (dbo_greenlet): run dbo, step 4 of rank 0, times in us

stage      on the path    share  10 % shorter  50 % shorter  without it
attention      100.000   24.4 %        -2.4 %       -12.2 %     -24.4 %
dispatch       150.000   36.6 %        -3.7 %       -12.2 %     -12.2 %
experts        120.000   29.3 %        -2.9 %        -9.8 %     -17.1 %
host            40.000    9.8 %        -1.0 %        -4.9 %      -9.8 %
all            410.000  100.0 %

on the path: event 2, host 1, launch 1, stream order 1

step 4, rank 0: 410.0 us

          0 us                        410 us (7.9 us a column)
host      ┃                                               ┃━━━
compute 0  ┃A3━━━━━━━━━━                  ┃M3━━━━━━
compute 1              ──────────────             ┃M3━━━━━
comm 0                 ┃D3━━━━━━━━━━━━━━━━━
comm 1                                    ───────

 from   took  stage      lane       reached by    what
  0.0   10.0  host       host       launch        before the graph's first slice
 10.0  100.0  attention  compute 0                A3 of microbatch 0
110.0  150.0  dispatch   comm 0     event         D3 of microbatch 0
260.0   60.0  experts    compute 0  event         M3 of microbatch 0
320.0   60.0  experts    compute 1  stream order  M3 of microbatch 1
380.0   30.0  host       host       host          behind the GPU's last work

note: Steps that were replayed from their graphs: 1. Gaps
  between the kernels of a slice are part of it.
""".splitlines()
    )


def test_of_a_profile(tmp_path: Path) -> None:
    done = in_process("critical-path", profile(tmp_path / "p.json.gz"), "--pieces", "2", "--shorter", "25")
    lines = done.stdout.splitlines()
    assert (done.returncode, done.stderr) == (0, "")
    assert lines[0] == f"{tmp_path / 'p.json.gz'} (torch.profiler, NVIDIA H200): step 0 on one GPU, times in us"
    assert lines[2].split("  ")[-1] == "25 % shorter" and lines[4].split()[:2] == ["dispatch", "40.000"]
    assert "and 4 shorter ones, 18.0 us together (--pieces)" in lines


def test_as_json_and_several_files(tmp_path: Path) -> None:
    done = in_process("critical-path", "--json", trace(tmp_path / "t.jsonl"), profile(tmp_path / "p.json"))
    own, other = json.loads(done.stdout)["reports"]
    assert done.returncode == 0 and own["reliable"] and other["reliable"]
    assert own["total"]["length"] == 410 and own["steps"][0] | {"pieces": own["shown"]["pieces"]} == own["shown"]
    dispatch = next(row for row in own["total"]["stages"] if row["stage"] == "dispatch")
    assert dispatch == {
        "stage": "dispatch",
        "on_path": 150,
        "uncertain": 0,
        "gains": [
            {"percent": 10, "least": 15, "most": 15},
            {"percent": 50, "least": 50, "most": 50},
            {"percent": 100, "least": 50, "most": 50},
        ],
    }
    pieces: list[dict[str, Any]] = other["shown"]["pieces"]
    assert [(piece["stage"], piece["end"] - piece["begin"]) for piece in pieces][:3] == [
        ("launch", 6),
        ("attention", 30),
        ("idle", 1),
    ]


def test_steps_are_listed_when_asked_for(tmp_path: Path) -> None:
    records: list[Any] = []
    for number, end in ((4, 300.0), (5, 400.0)):
        records.append(step_record(step=number, end=end))
        records += [type(each)(**{**each.__dict__, "step": number}) for each in HOST]
    done = in_process("critical-path", written(tmp_path / "t.jsonl", *records), "--steps")
    assert "dbo     4     0        200.0  other 58.5 %, attention 28.5 %, host 13.0 %" in done.stdout
    assert "dbo     5     0        300.0  host 42.0 %, other 39.0 %, attention 19.0 %" in done.stdout
    assert "step 5, rank 0 (of median length): 300.0 us" in done.stdout


def test_exit_code_1_where_it_must_not_be_trusted(tmp_path: Path) -> None:
    made = ChromeProfile()
    made.call("cudaGraphLaunch", 0, 5)
    made.kernel(GEMM, 10, 20)
    done = in_process("critical-path", made.write(tmp_path / "p.json"))
    assert done.returncode == 1
    assert "unreliable: 1 of 1 graph replays have no kernels in the profile" in " ".join(done.stdout.split())


def header(path: Path) -> Path:
    with TraceWriter(path) as writer:
        writer.write(HeaderRecord("0.1", 0, 1))
    return path


def unsplit(path: Path) -> Path:
    return written(path, StepRecord(7, 0, "dbo", 8, 8, False, "few", begin=1.0, end=2.0))


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["missing.jsonl"], "missing.jsonl: no such file"),
        (["folder"], "folder: a folder without traces or profiles"),
        (["header.jsonl"], "header.jsonl: the trace has no steps (yet)"),
        (["unsplit.jsonl"], "of its step none has slices or times of the GPU to find a path in"),
        (["trace.jsonl", "--run", "thread"], "trace.jsonl has no steps of run thread; it holds the runs dbo"),
        (["trace.jsonl", "--step", "9"], "trace.jsonl has no step 9; it holds the runs dbo of the ranks 0"),
        (["profile.json", "--rank", "1"], "profile.json is a profile; --run and --rank choose from a trace of ours"),
        (["profile.json", "--step", "3"], "profile.json has no step 3; its ranges name 0"),
        (["trace.jsonl", "--shorter", "ten"], "--shorter ten: give percentages above 0 and up to 100"),
        (["trace.jsonl", "--shorter", "0,10"], "--shorter 0,10: give percentages above 0 and up to 100"),
        (["text.jsonl"], "text.jsonl: is not JSON"),
        (["cut.json.gz"], "cut.json.gz: the gzip data ends in the middle"),
    ],
)
def test_bad_input_gets_a_sentence(tmp_path: Path, words: list[str], text: str) -> None:
    (tmp_path / "folder").mkdir()
    header(tmp_path / "header.jsonl")
    unsplit(tmp_path / "unsplit.jsonl")
    trace(tmp_path / "trace.jsonl")
    profile(tmp_path / "profile.json")
    (tmp_path / "text.jsonl").write_text("no trace at all\n")
    (tmp_path / "cut.json.gz").write_bytes(gzip.compress(profile(tmp_path / "p.json").read_bytes())[:200])
    done = in_process("critical-path", tmp_path / words[0], *words[1:])
    assert (done.returncode, done.stdout) == (2, "")
    assert text in one_sentence(done.stderr)


def test_what_to_install_where_it_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.startswith("dbo_greenlet.trace.importers")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "msgspec", None)
    done = in_process("critical-path", profile(tmp_path / "p.json"))
    assert (done.returncode, done.stdout) == (2, "")
    assert one_sentence(done.stderr) == "msgspec is not installed; install dbo-greenlet[trace]"
