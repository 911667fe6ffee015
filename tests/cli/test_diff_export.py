"""`diff` and `export` on the command line: help, exit codes, JSON, real traces, one sentence for each bad input."""

from __future__ import annotations

import gzip
import json
import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from dbo_greenlet.trace import HeaderRecord, SliceRecord, StepRecord, TraceWriter, read_trace
from dbo_greenlet.trace.export.model import ExportModel
from tests.cli.loaded import output_and_loaded
from tests.job.command import in_process, one_sentence
from tests.trace.exported import Shown, expected, from_chrome, from_perfetto

FORMATS = ("chrome", "perfetto")


def trace(path: Path, *, settings: dict[str, object] | None = None, site: str = "layer1.dispatch") -> Path:
    with TraceWriter(path) as writer:
        writer.write(
            HeaderRecord("0.1.0", 0, 1, settings=settings or {}),
            StepRecord(0, 0, "dbo", 8, 8, True, "split-decode", begin=0.0, end=30.0),
            SliceRecord(0, 0, "dbo", 0, 0, site, 1.0, 10.0),
            SliceRecord(0, 0, "dbo", 0, 1, "", 11.0, 20.0),
        )
    return path


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The same small job of two ranks, twice."""
    folder = tmp_path_factory.mktemp("recorded")
    files = (folder / "a.jsonl", folder / "b.jsonl")
    for file in files:
        done = in_process("run", "--limit", 16, "--max-new-tokens", 3, "--trace", file, "--json")
        assert done.returncode == 0, done.stderr
    return files


def shown(kind: str, file: Path) -> Shown:
    return (from_chrome if kind == "chrome" else from_perfetto)(file.read_bytes())


@pytest.mark.slow
@pytest.mark.parametrize("kind", FORMATS)
def test_a_real_trace_arrives_whole(recorded: tuple[Path, Path], tmp_path: Path, kind: str) -> None:
    out = tmp_path / "out"
    done = in_process("export", recorded[0], "--format", kind, "-o", out, "--json")
    assert (done.returncode, done.stderr) == (0, "")
    found, wanted = shown(kind, out), expected(recorded[0])
    assert found == wanted
    records = list(read_trace(recorded[0]).steps.values())
    receives = sum(len(step.receives) for step in records)
    said = json.loads(done.stdout)
    assert said["ranks"] == [0, 1] and said["steps"] == len(records) and said["notes"] == []
    assert said["slices"] == found.slices.total() == sum(len(s.slices) + len(s.receives) + 1 for s in records)
    # In a run every receive is run in a later slice than its send.
    assert said["flows"] == found.flows.total() == receives > 0
    assert said["counter_samples"] == sum(map(len, found.counters.values()))
    # No transfer stays in flight, and no two slices of a track were at once: a single lane of each.
    assert all(samples[-1][1] == 0 for samples in found.counters.values())
    assert b"(2)" not in out.read_bytes()


@pytest.mark.slow
def test_two_real_runs_decide_alike(recorded: tuple[Path, Path], tmp_path: Path) -> None:
    done = in_process("diff", *recorded, "--json")
    found = json.loads(done.stdout)
    assert found["first"] is None and found["differing"] == found["only_a"] == found["only_b"] == []
    assert done.returncode == 0 and found["equal"], found["outputs"]
    # One decision of one of its steps, changed.
    lines = recorded[1].read_text().splitlines()
    place = [n for n, line in enumerate(lines) if '"t":"slice"' in line and '"rank":1' in line][5]
    was = json.loads(lines[place])
    lines[place] = json.dumps(was | {"ubatch": 1 - was["ubatch"]})
    other = tmp_path / "other.jsonl"
    other.write_text("".join(line + "\n" for line in lines))
    done = in_process("diff", recorded[0], other)
    assert done.returncode == 1
    assert f"The first decision that differs: step {was['step']}, rank 1, run dbo, decision 5\n" in done.stdout
    assert f"  A: microbatch {was['ubatch']}, to {was['site']}\n" in done.stdout
    assert f"  B: microbatch {1 - was['ubatch']}, to {was['site']}\n" in done.stdout


@pytest.mark.parametrize("command", ["diff", "export"])
def test_help_has_an_example_and_needs_nothing_heavy(command: str) -> None:
    output, loaded = output_and_loaded("torch numpy greenlet perfetto google.protobuf", command, "--help")
    assert f"Example: dbo-greenlet {command}" in output
    assert loaded == "[]"


def test_diff_and_export_need_no_torch(tmp_path: Path) -> None:
    file = trace(tmp_path / "t")
    for words in (["diff", file, file], ["export", file, "--format", "perfetto", "-o", tmp_path / "out"]):
        assert output_and_loaded("torch", *words)[1] == "[]"


def test_diff_exit_codes_and_json(tmp_path: Path) -> None:
    a, b = trace(tmp_path / "a"), trace(tmp_path / "b", site="layer1.combine")
    done = in_process("diff", a, a)
    assert (done.returncode, done.stderr) == (0, "")
    assert "Every decision is equal, in 1 steps" in done.stdout
    done = in_process("diff", a, b, "--json")
    assert done.returncode == 1
    first = json.loads(done.stdout)["first"]
    assert first["decision"] == 0 and first["sites"] == ["layer1.dispatch", "layer1.combine"]


def test_diff_of_two_programs_is_one_sentence(tmp_path: Path) -> None:
    a = trace(tmp_path / "a", settings={"policy": "round_robin"})
    b = trace(tmp_path / "b", settings={"policy": "in_turn"})
    done = in_process("diff", a, b)
    assert (done.returncode, done.stdout) == (2, "")
    said = one_sentence(done.stderr)
    assert said.startswith(f"{a} and {b} are not of the same program")
    assert said.endswith('policy is "round_robin" and "in_turn"')


def test_export_says_what_it_wrote(tmp_path: Path) -> None:
    done = in_process("export", trace(tmp_path / "t"), "--format", "chrome", "-o", tmp_path / "out", "--steps", "0-3")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == f"{tmp_path / 'out'}: rank 0: 1 step, 3 slices, 0 arrows, 3 counter samples\n"
    assert stat.S_IMODE((tmp_path / "out").stat().st_mode) == stat.S_IMODE((tmp_path / "t").stat().st_mode)


def test_export_of_two_ranks_states_how_they_lie_on_one_axis(tmp_path: Path) -> None:
    file = tmp_path / "t"
    with TraceWriter(file) as writer:
        writer.write(HeaderRecord("0.1.0", 0, 2, origin_ns=5_000), HeaderRecord("0.1.0", 1, 2, origin_ns=7_500))
        writer.write(*(SliceRecord(0, rank, "dbo", 0, 0, "", 0.0, 1.0) for rank in (0, 1)))
    words = ("export", file, "--format", "perfetto", "-o", tmp_path / "out")
    axis = "The ranks lie on one axis by the clock of their host; there is no vote to check it by"
    assert axis in in_process(*words).stdout
    said = json.loads(in_process(*words, "--json").stdout)
    assert said["offsets_us"] == {"0": 0.0, "1": 2.5} and said["axis"][0].startswith(axis)


def test_export_of_a_file_whose_second_header_is_further_down(tmp_path: Path) -> None:
    """As `record -o FILE` joins the files of the ranks. Of a pipe nobody can look further down before it comes."""
    file, pipe = tmp_path / "t", tmp_path / "pipe"
    with TraceWriter(file) as writer:
        for rank, origin in ((1, 7_500), (0, 5_000)):
            writer.write(HeaderRecord("0.1.0", rank, 2, origin_ns=origin))
            for step in range(3):
                writer.write(SliceRecord(step, rank, "dbo", 0, 0, "", 0.0, 1.0))
                writer.write(StepRecord(step, rank, "dbo", 8, 8, True, "split-decode", begin=0.0, end=2.0))
    axis = "The ranks lie on one axis by the clock of their host"
    done = in_process("export", file, "--format", "chrome", "-o", tmp_path / "out", "--json")
    said = json.loads(done.stdout)
    assert said["offsets_us"] == {"0": 0.0, "1": 2.5} and said["axis"][0].startswith(axis)
    os.mkfifo(pipe)
    with subprocess.Popen(["cp", str(file), str(pipe)]) as writing:
        model = ExportModel(pipe)
        list(model)
        assert writing.wait(20) == 0
    assert model.offsets == {0: -2.5, 1: 0.0} and model.axis_text()[0].startswith(axis)


def test_a_folder_is_the_latest_trace_in_it(tmp_path: Path) -> None:
    folder = tmp_path / "traces"
    folder.mkdir()
    file = trace(folder / "dbo-rank0-12-34.jsonl")
    done = in_process("export", folder, "--format", "chrome", "-o", tmp_path / "out", "--json")
    assert (done.returncode, done.stderr) == (0, "")
    assert json.loads(done.stdout)["files"] == [str(file)]
    assert in_process("diff", folder, file).returncode == 0


def test_compressed_traces_are_read_as_they_are(tmp_path: Path) -> None:
    file, packed = trace(tmp_path / "t"), tmp_path / "t.gz"
    packed.write_bytes(gzip.compress(file.read_bytes()))
    outs = []
    for number, each in enumerate((file, packed)):
        out = tmp_path / str(number)
        assert in_process("export", each, "--format", "chrome", "-o", out).returncode == 0
        outs.append(out.read_bytes())
    assert outs[0] == outs[1]
    assert in_process("diff", file, packed).returncode == 0


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (None, "no such file"),
        (b"", "the file is empty"),
        (b"nothing\n", "is not JSON"),
        (b"\x1f\x8b\x08\0\0\0\0\0\0", "the gzip data ends in the middle"),
        (b'{"traceEvents": []}\n', "the profile holds no events"),
        (b'{"some": "object"}\n', 'JSON, but no profile: it has no "traceEvents"'),
        (b'{"t":"header","package":"9","rank":0,"world":1,"schema":99}\n', "has schema 99"),
        (b'{"t":"header","package":"0.1.0","rank":0,"world":1}\n', '"schema" of the header is null'),
        (
            b'{"t":"header","package":"0","rank":0,"world":1,"schema":1}\n{"t":"slice"}\n',
            "line 2: a slice record needs",
        ),
        (
            b'{"t":"header","package":"0.1.0","rank":0,"world":1,"schema":1}\n'
            b'{"t":"step","step":1,"rank":0,"run":"dbo","tokens":1,"padded":1,"split":false,"reason":""}\n'
            b'{"t":"step","step":0,"rank":0,"run":"dbo","tokens":1,"padded":1,"split":false,"reason":""}\n',
            "line 3: step 0 of run dbo, rank 0 behind its step 1; are these two traces in one file?",
        ),
    ],
)
def test_bad_input_is_one_sentence_and_exit_code_2(tmp_path: Path, content: bytes | None, sentence: str) -> None:
    file, good, out = tmp_path / "bad", trace(tmp_path / "good"), tmp_path / "out"
    if content is not None:
        file.write_bytes(content)
    out.write_text("what was there")
    for words in (
        ["diff", good, file],
        ["diff", file, good],
        *(["export", file, "--format", kind, "-o", out] for kind in FORMATS),
    ):
        done = in_process(*words)
        assert (done.returncode, done.stdout) == (2, "")
        said = one_sentence(done.stderr)
        assert sentence in said and str(file) in said
    # Nothing of it was written, not even beside the output.
    assert out.read_text() == "what was there"
    assert {each.name for each in tmp_path.iterdir()} <= {"bad", "good", "out"}


def test_an_empty_trace_is_a_sentence(tmp_path: Path) -> None:
    file = tmp_path / "t"
    with TraceWriter(file) as writer:
        writer.write(HeaderRecord("0.1.0", 0, 1))
    done = in_process("export", file, "--format", "chrome", "-o", tmp_path / "out")
    assert done.returncode == 2
    assert one_sentence(done.stderr) == f"{file}: nothing to export: it has no steps yet"
    done = in_process("diff", file, file)
    assert done.returncode == 2
    assert one_sentence(done.stderr) == f"no step is in both traces: {file} holds none, {file} holds none"


@pytest.mark.parametrize("kind", FORMATS)
def test_outputs_that_cannot_be(tmp_path: Path, kind: str) -> None:
    file = trace(tmp_path / "t")
    before = file.read_bytes()
    for out, sentence in (
        (file, f"--output {file} is the trace itself; name another file"),
        (tmp_path / "no" / "out", f"{tmp_path / 'no' / 'out'} cannot be written: its folder does not exist"),
        (tmp_path, f"{tmp_path} cannot be written: it is a folder"),
        (Path("/dev/full"), "/dev/full cannot be written: no space left on device"),
    ):
        done = in_process("export", file, "--format", kind, "-o", out)
        assert (done.returncode, one_sentence(done.stderr)) == (2, sentence)
    assert file.read_bytes() == before and [each.name for each in tmp_path.iterdir()] == ["t"]


def test_a_device_keeps_its_place(tmp_path: Path) -> None:
    done = in_process("export", trace(tmp_path / "t"), "--format", "chrome", "-o", "/dev/null")
    assert done.returncode == 0 and stat.S_ISCHR(Path("/dev/null").stat().st_mode)


@pytest.mark.parametrize("steps", ["x", "5-3", "-1", "3-", ""])
def test_steps_that_are_none(tmp_path: Path, steps: str) -> None:
    done = in_process("export", trace(tmp_path / "t"), "--format", "chrome", "-o", tmp_path / "o", f"--steps={steps}")
    assert done.returncode == 2
    assert one_sentence(done.stderr) == f"--steps {steps}: give one step (3) or a range with both ends (3-5)"


def test_a_format_that_is_none(tmp_path: Path) -> None:
    done = in_process("export", trace(tmp_path / "t"), "--format", "svg", "-o", tmp_path / "o")
    assert done.returncode == 2 and "'svg'" in one_sentence(done.stderr)


@pytest.mark.parametrize("name", ["perfetto", "google.protobuf"])
def test_what_to_install_where_it_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    for loaded in list(sys.modules):
        if loaded == "dbo_greenlet.trace.export.perfetto" or loaded.startswith(("perfetto.", "google.protobuf.")):
            monkeypatch.delitem(sys.modules, loaded)
    monkeypatch.setitem(sys.modules, name, None)
    file, out = trace(tmp_path / "t"), tmp_path / "out"
    done = in_process("export", file, "--format", "perfetto", "-o", out)
    assert done.returncode == 2
    assert one_sentence(done.stderr).endswith("is not installed; install dbo-greenlet[trace]")
    assert in_process("export", file, "--format", "chrome", "-o", out).returncode == 0
