"""`overlap` and `import` on the command line: help, exit codes, JSON, one sentence for each bad input."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest

from dbo_greenlet.trace import HeaderRecord, RecvRecord, SliceRecord, StepRecord, TraceWriter
from tests.cli.loaded import output_and_loaded
from tests.job.command import in_process, one_sentence
from tests.trace.profiles import DISPATCH, GEMM, ChromeProfile, NsysProfile


def profile(path: Path) -> Path:
    made = ChromeProfile()
    made.kernel(GEMM, 10, 30, launch=1)
    made.kernel(DISPATCH, 20, 40, stream=21, launch=5)
    return made.write(path)


@pytest.mark.parametrize("command", ["overlap", "import"])
def test_help_has_an_example_and_needs_nothing_heavy(command: str) -> None:
    output, loaded = output_and_loaded("torch numpy greenlet msgspec", command, "--help")
    assert f"Example: dbo-greenlet {command}" in output
    assert loaded == "[]"


def test_overlap_and_import_need_no_torch(tmp_path: Path) -> None:
    file = profile(tmp_path / "p.json")
    for words in (["overlap", file], ["import", file, "-o", tmp_path / "out"]):
        assert output_and_loaded("torch", *words)[1] == "[]"


def test_overlap_of_a_profile(tmp_path: Path) -> None:
    done = in_process("overlap", profile(tmp_path / "p.json.gz"))
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith(f"{tmp_path / 'p.json.gz'} (torch.profiler, NVIDIA H200), times in us\n")
    assert re.search(r"^hidden +50\.00 %$", done.stdout, re.MULTILINE)


def test_overlap_of_several_files_as_json(tmp_path: Path) -> None:
    nsys = NsysProfile(tmp_path / "b.sqlite")
    nsys.kernel(GEMM, 0, 10)
    nsys.kernel(DISPATCH, 0, 10, stream=21)
    done = in_process("overlap", "--json", profile(tmp_path / "a.json"), nsys.done())
    reports = json.loads(done.stdout)["reports"]
    assert done.returncode == 0
    assert [report["kernels"]["hidden"] for report in reports] == [0.5, 1.0]


def test_a_summary_of_several_files(tmp_path: Path) -> None:
    unknown = ChromeProfile()
    unknown.call("cudaGraphLaunch", 0, 5)
    unknown.kernel(GEMM, 10, 20)
    done = in_process("overlap", profile(tmp_path / "a.json"), unknown.write(tmp_path / "b.json"))
    assert done.returncode == 1
    summary, _ = done.stdout.split("\n\n\n")[-2:]
    head, first, second = summary.splitlines()
    assert head.split() == ["all,", "in", "ms", "communication", "exposed", "hidden", "window"]
    assert first.split() == [str(tmp_path / "a.json"), "by", "kernels", "0.020", "0.010", "50.00", "%", "0.030"]
    assert second.split() == [str(tmp_path / "b.json"), "unreliable"]


def test_run_and_rank_choose_from_a_trace_of_ours(tmp_path: Path) -> None:
    done = in_process("overlap", profile(tmp_path / "a.json"), "--rank", 1)
    assert done.returncode == 2
    assert one_sentence(done.stderr) == (
        f"{tmp_path / 'a.json'} is a profile; --run and --rank choose from a trace of ours"
    )


def test_an_imported_profile_gives_the_same(tmp_path: Path) -> None:
    file, out = profile(tmp_path / "p.json"), tmp_path / "out.npz"
    done = in_process("import", file, "-o", out)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == f"{out}: 2 events on the GPU, 2 calls, 0 ranges, 0.030 ms (torch.profiler)\n"
    before, after = (json.loads(in_process("overlap", "--json", each).stdout)["reports"][0] for each in (file, out))
    assert after.pop("file") == str(out) and before.pop("file") == str(file)
    assert after.pop("notes") == [f"Imported from {file}.", *before.pop("notes")]
    assert after == before
    as_json = json.loads(in_process("import", file, "-o", out, "--json").stdout)
    assert (as_json["activities"], as_json["calls"], as_json["window"]) == (2, 2, 30.0)


def test_a_trace_of_ours(tmp_path: Path) -> None:
    file = tmp_path / "t.jsonl"
    with TraceWriter(file) as writer:
        writer.write(
            HeaderRecord("0.1.0", 0, 1),
            StepRecord(0, 0, "dbo", 8, 8, True, "split"),
            SliceRecord(0, 0, "dbo", 0, 0, "layer0.dispatch", 0.0, 10.0),
            RecvRecord(0, 0, "dbo", 0, "layer0.dispatch", 5.0, 1, 15.0, 0, 0),
        )
    done = in_process("overlap", file)
    assert done.returncode == 0, "without the GPU's times it is a bound, and says so"
    assert re.search(r"^hidden +<= 50\.00 %$", done.stdout, re.MULTILINE)
    assert "upper bound (in flight): a slice on the host stands for compute" in done.stdout
    (as_json,) = json.loads(in_process("overlap", file, "--json").stdout)["reports"]
    assert (as_json["reliable"], as_json["at_most"]) == (False, True)
    summary = in_process("overlap", file, profile(tmp_path / "p.json")).stdout.split("\n\n\n")[-1].splitlines()
    assert summary[1].split()[1:] == ["in", "flight", "0.010", ">=", "0.005", "<=", "50.00", "%", "0.015"]
    assert "a trace of dbo_greenlet already" in one_sentence(in_process("import", file, "-o", tmp_path / "o").stderr)


def test_an_unreliable_answer_is_exit_code_1(tmp_path: Path) -> None:
    made = ChromeProfile()
    made.call("cudaGraphLaunch", 0, 5)
    made.kernel(GEMM, 10, 20)
    done = in_process("overlap", made.write(tmp_path / "p.json"))
    assert done.returncode == 1
    assert "unreliable (by kernels): 1 of 1 graph replays have no kernels in the profile" in done.stdout


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (None, "no such file"),
        (b"", "the file is empty"),
        (b"nothing", "is not JSON"),
        (b"\x1f\x8b\x08\0\0\0\0\0\0", "the gzip data ends in the middle"),
        (b'{"traceEvents": [{}', "the JSON ends in the middle"),
        (b'{"traceEvents": [{"ph": "X", "cat": "cpu_op"}]}', "none of its 1 events ran on a GPU"),
        (b"PK\x03\x04nothing", "the imported profile is damaged"),
    ],
)
def test_bad_input_is_one_sentence_and_exit_code_2(tmp_path: Path, content: bytes | None, sentence: str) -> None:
    file = tmp_path / "p.json"
    if content is not None:
        file.write_bytes(content)
    for words in (["overlap", file], ["import", file, "-o", tmp_path / "out"]):
        done = in_process(*words)
        assert (done.returncode, done.stdout) == (2, "")
        said = one_sentence(done.stderr)
        assert sentence in said and str(file) in said
    assert not (tmp_path / "out").exists()


def test_no_communication_and_a_bad_table(tmp_path: Path) -> None:
    made = ChromeProfile()
    made.kernel(GEMM, 0, 10)
    done = in_process("overlap", made.write(tmp_path / "p.json"))
    assert (done.returncode, done.stdout) == (2, "")
    assert one_sentence(done.stderr).startswith(f"{tmp_path / 'p.json'}: no communication in it")
    done = in_process("overlap", profile(tmp_path / "q.json"), "--kernels", tmp_path / "absent.toml")
    assert done.returncode == 2
    assert one_sentence(done.stderr) == f"{tmp_path / 'absent.toml'} cannot be read: no such file"


def test_the_profile_is_not_overwritten(tmp_path: Path) -> None:
    file = profile(tmp_path / "p.json")
    before = file.read_bytes()
    done = in_process("import", file, "-o", file)
    assert done.returncode == 2 and "is the profile itself; name another file" in one_sentence(done.stderr)
    assert file.read_bytes() == before


def test_what_to_install_where_it_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.startswith("dbo_greenlet.trace.importers")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "msgspec", None)
    done = in_process("overlap", profile(tmp_path / "p.json"))
    assert done.returncode == 2
    assert one_sentence(done.stderr) == "msgspec is not installed; install dbo-greenlet[trace]"
