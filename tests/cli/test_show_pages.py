"""`show` on the command line: ranges of steps, pages, pictures and profiles; and one sentence for what is wrong."""

from __future__ import annotations

import gzip
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from dbo_greenlet.trace import read_trace, render_step
from tests.cli.loaded import output_and_loaded
from tests.job.command import environment, in_process, one_sentence
from tests.trace.pages import data_of, slices_of, write_trace

PNG = b"\x89PNG\r\n"


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_trace(tmp_path_factory.mktemp("show") / "t.jsonl", steps=4)


def page_steps(page: Path) -> list[tuple[int, int]]:
    data = data_of(page.read_text(encoding="utf-8"))
    return sorted({(each["details"]["step"], each["rank"]) for each in slices_of(data)})


# -- text --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("option", ["--step", "--steps"])
def test_a_range_of_steps_one_below_the_other(recorded: Path, option: str) -> None:
    done = in_process("show", recorded, option, "1-2", "--rank", 1, "--width", 90)
    assert (done.returncode, done.stderr) == (0, "")
    first, second = done.stdout.split(f"\n{'-' * 90}\n\n")
    trace = read_trace(recorded)
    assert first.startswith(render_step(trace.step(1, rank=1), width=90))
    assert second.startswith(render_step(trace.step(2, rank=1), width=90))
    assert "on the GPU: " in first and "on the GPU: " in second


def test_json_of_a_step_and_of_a_range(recorded: Path) -> None:
    alone = json.loads(in_process("show", recorded, "--step", 2, "--json").stdout)
    assert alone["record"]["step"] == 2 and len(alone["slices"]) == 14
    several = json.loads(in_process("show", recorded, "--step", "2-3", "--json").stdout)["steps"]
    assert several[0] == alone and several[1]["record"]["step"] == 3
    operations = json.loads(in_process("show", recorded, "--json").stdout)["ops"]
    assert [operation["op"] for operation in operations] == ["record", "wait", "work"]


def test_a_compressed_trace_and_the_ranks_in_files_of_their_own(recorded: Path, tmp_path: Path) -> None:
    lines = recorded.read_text().splitlines(keepends=True)
    for rank in (0, 1):
        own = "".join(line for line in lines if f'"rank":{rank},' in line)
        (tmp_path / f"rank{rank}.jsonl.gz").write_bytes(gzip.compress(own.encode()))
    wanted = in_process("show", recorded, "--step", 3, "--rank", 1).stdout
    assert in_process("show", *tmp_path.glob("*.gz"), "--step", 3, "--rank", 1).stdout == wanted
    done = in_process("show", tmp_path, "--step", 3, "--rank", 1)
    assert done.stdout == wanted
    assert done.stderr == f"dbo-greenlet: this is {tmp_path}/rank0.jsonl.gz, {tmp_path}/rank1.jsonl.gz\n"


def test_a_pipe_is_read_once(recorded: Path, tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with subprocess.Popen(["cp", str(recorded), str(pipe)]) as writer:
        done = in_process("show", pipe, "--step", 3)
        assert done.stdout == in_process("show", recorded, "--step", 3).stdout
        assert writer.wait(20) is not None


# -- pages and pictures ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "steps"),
    [
        ([], [(step, rank) for step in range(4) for rank in (0, 1)]),
        (["--rank", 1], [(step, 1) for step in range(4)]),
        (["--step", "1-2"], [(step, rank) for step in (1, 2) for rank in (0, 1)]),
        (["--last"], [(3, 0), (3, 1)]),
        (["--run", "dbo", "--step", 0, "--rank", 0], [(0, 0)]),
    ],
    ids=str,
)
def test_a_page_holds_the_steps_that_are_asked_for(
    recorded: Path, tmp_path: Path, options: list[object], steps: list[tuple[int, int]]
) -> None:
    out = tmp_path / "page.html"
    done = in_process("show", recorded, "--html", out, *options)
    assert (done.returncode, done.stderr) == (0, "")
    assert page_steps(out) == steps
    data = data_of(out.read_text(encoding="utf-8"))
    ranks = sorted({rank for _, rank in steps})
    of = f"ranks {', '.join(map(str, ranks))}" if len(ranks) > 1 else f"rank {ranks[0]}"
    assert done.stdout.splitlines()[0] == f"{out}: {len(slices_of(data))} slices of {of}"
    assert sorted((step["step"], step["rank"]) for step in data["steps"]) == steps
    assert ["file", str(recorded)] in data["facts"] and ["torch", "2.13.0"] in data["facts"]


def test_what_a_page_and_a_picture_say_as_json(recorded: Path, tmp_path: Path) -> None:
    said = json.loads(in_process("show", recorded, "--html", tmp_path / "p.html", "--json").stdout)
    data = data_of((tmp_path / "p.html").read_text(encoding="utf-8"))
    assert said["slices"] == len(slices_of(data)) and said["ranks"] == [0, 1] and said["files"] == [str(recorded)]
    assert said["offsets_us"] == {"0": 0.0, "1": 100.0} and len(said["axis"]) >= 1
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    said = json.loads(in_process("show", recorded, "--png", tmp_path / "p.png", "--json").stdout)
    assert said["output"] == str(tmp_path / "p.png") and said["slices"] == 106


def test_a_picture_shows_the_first_split_step_and_others_when_asked(recorded: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    out = tmp_path / "p.png"
    counts = []
    for options in ([], ["--step", "1-2"], ["--last", "--rank", 1], ["--layers", "2", "--rank", 0]):
        done = in_process("show", recorded, "--png", out, *options)
        assert (done.returncode, done.stderr) == (0, "")
        assert out.read_bytes().startswith(PNG)
        counts.append(int(done.stdout.split(": ")[1].split(" ")[0]))
    assert counts[:3] == [106, 212, 53] and counts[3] < 53


def test_a_page_needs_neither_numpy_nor_torch(recorded: Path, tmp_path: Path) -> None:
    words = ("show", recorded, "--html", tmp_path / "p.html")
    assert output_and_loaded("torch numpy matplotlib", *words)[1] == "[]"


def test_without_the_trace_extra_a_page_is_the_same(recorded: Path, tmp_path: Path) -> None:
    with_extra, without = tmp_path / "with.html", tmp_path / "without.html"
    assert in_process("show", recorded, "--html", with_extra).returncode == 0
    code = "import sys; sys.modules |= dict.fromkeys(['msgspec', 'numpy', 'perfetto']); "
    code += "from dbo_greenlet.cli.main import main; main(sys.argv[1:])"
    words = [sys.executable, "-c", code, "show", str(recorded), "--html", str(without)]
    done = subprocess.run(words, capture_output=True, text=True, env=environment(), timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
    assert without.read_bytes() == with_extra.read_bytes()


def test_without_matplotlib_a_picture_says_what_to_install(recorded: Path, tmp_path: Path) -> None:
    code = "import sys; sys.modules['matplotlib'] = None; from dbo_greenlet.cli.main import main; main(sys.argv[1:])"
    words = [sys.executable, "-c", code, "show", str(recorded), "--png", str(tmp_path / "p.png")]
    done = subprocess.run(words, capture_output=True, text=True, env=environment(), timeout=60)
    assert done.returncode == 2
    assert one_sentence(done.stderr) == "matplotlib is not installed; install dbo-greenlet[plot]"
    assert not (tmp_path / "p.png").exists()


def test_a_torn_trace_makes_a_page_that_says_so(recorded: Path, tmp_path: Path) -> None:
    torn = tmp_path / "torn.jsonl"
    torn.write_bytes(recorded.read_bytes()[:-40])
    done = in_process("show", torn, "--html", tmp_path / "p.html")
    assert done.returncode == 0 and f"note: The last line of {torn} is torn and was left out" in done.stdout


# -- profiles ----------------------------------------------------------------------------------------------------------


def test_a_profile_as_text_as_json_and_as_a_page(tmp_path: Path) -> None:
    pytest.importorskip("msgspec", reason="msgspec is not installed")
    from tests.trace.profiles import DISPATCH, FLASH, ChromeProfile

    profile = ChromeProfile()
    profile.kernel(FLASH, 0, 80, stream=7)
    profile.kernel(DISPATCH, 20, 120, stream=9)
    path = profile.write(tmp_path / "profile.json.gz")
    done = in_process("show", path, "--width", 69)
    assert (done.returncode, done.stderr) == (0, "")
    rows = [line for line in done.stdout.splitlines() if line.startswith("stream ")]
    assert rows[:2] == ["stream 7 " + "A" * 40, "stream 9 " + " " * 10 + "D" * 50]
    assert rows[2] == "stream 7: in use 0.080 ms (attention 0.080)"
    streams = json.loads(in_process("show", path, "--json").stdout)["streams"]
    assert [each["stages_us"] for each in streams] == [{"attention": 80.0}, {"dispatch": 100.0}]
    assert in_process("show", path, "--html", tmp_path / "p.html").returncode == 0
    data = data_of((tmp_path / "p.html").read_text(encoding="utf-8"))
    assert {each["details"]["kernel"] for each in slices_of(data) if "kernel" in each["details"]} == {FLASH, DISPATCH}
    assert data["steps"] == []


# -- what is wrong -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--step", "5-3"], "--step 5-3: give one step (3) or a range with both ends (3-5)"),
        (["--step", "x"], "--step x: give one step (3) or a range"),
        (["--step", "8-9"], "has no step 8; it holds steps 0 to 3 of run dbo on ranks 0, 1"),
        (["--step", "1", "--last"], "--last: --step names a step already"),
        (["--html", "a.html", "--png", "a.png"], "--html and --png: write one after the other"),
        (["--html", "a.html", "--lanes"], "--lanes: a page and a picture are lanes"),
        (["--html", "a.html", "--layers", "2"], "--layers: the page shows all layers"),
        (["--html", "absent/a.html"], "absent/a.html cannot be written: its folder does not exist"),
        (["--html", "a.html", "--rank", "7"], "nothing to export: none of its 8 steps is asked for"),
        (["--png", "a.png", "--layers", "40"], "--layers 40: none of them is in these steps, which have 1, 2, 3"),
    ],
)
def test_one_sentence_for_each(
    recorded: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, words: list[str], sentence: str
) -> None:
    if "--png" in words and "--html" not in words:
        pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    monkeypatch.chdir(tmp_path)
    done = in_process("show", recorded, *words)
    assert (done.returncode, done.stdout) == (2, "")
    assert sentence in one_sentence(done.stderr)
    assert list(tmp_path.iterdir()) == [], "nothing is left of what was not written"


def test_a_page_is_not_written_over_its_trace(recorded: Path) -> None:
    before = recorded.read_bytes()
    done = in_process("show", recorded, "--html", recorded)
    assert done.returncode == 2 and "is the trace itself" in one_sentence(done.stderr)
    assert recorded.read_bytes() == before


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (b"", "the file is empty"),
        (b"hello\n", "not JSON"),
        (b'{"t":"header","schema":99,"package":"9.9","rank":0,"world":1}\n', "has schema 99"),
        (gzip.compress(b'{"t":"header","schema":1,"package":"0","rank":0,"world":1}\n' * 999)[:40], "gzip"),
    ],
    ids=["empty", "text", "newer", "cut off"],
)
@pytest.mark.parametrize("page", [True, False], ids=["page", "text"])
def test_bad_files(tmp_path: Path, content: bytes, sentence: str, page: bool) -> None:
    bad = tmp_path / "bad.jsonl"
    bad.write_bytes(content)
    done = in_process("show", bad, *(["--html", tmp_path / "p.html"] if page else []))
    assert done.returncode == 2 and done.stdout == ""
    said = one_sentence(done.stderr)
    assert str(bad) in said and sentence in said
    assert not (tmp_path / "p.html").exists()


# -- a real job --------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_real_job(tmp_path: Path) -> None:
    trace = tmp_path / "job.jsonl"
    assert in_process("run", "--limit", 16, "--max-new-tokens", 3, "--trace", trace, "--json").returncode == 0
    assert in_process("show", trace, "--html", tmp_path / "p.html").returncode == 0
    found = slices_of(data := data_of((tmp_path / "p.html").read_text(encoding="utf-8")))
    steps = read_trace(trace).steps.values()
    assert len(found) == sum(len(s.slices) + len(s.receives) + 1 for s in steps)
    assert len(data["steps"]) == len(steps)
    assert len(data["arrows"]) == sum(len(s.receives) for s in steps) > 0
