"""Files that a command cannot use, and profiles that say less than a reader may think; output that names a folder."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from tests.job.command import in_process, one_sentence
from tests.trace.profiles import DISPATCH, GEMM, ChromeProfile, NsysProfile

NONE_KNOWN = "no communication in it: none of its kernels is known as one"
WITH_A_TABLE = f"There is {NONE_KNOWN}; name yours in a TOML file (--kernels FILE)."


def profile(path: Path, *names: str) -> Path:
    made = ChromeProfile()
    for place, name in enumerate(names or (GEMM, GEMM)):
        made.kernel(name, 10 + 20 * place, 30 + 20 * place, launch=1 + 2 * place)
    return made.write(path)


# -- replay ------------------------------------------------------------------------------------------------------------


def replayed(path: Path) -> str:
    done = in_process("replay", path)
    assert (done.returncode, done.stdout) == (2, "")
    return one_sentence(done.stderr).removeprefix(f"{path}: ")


@pytest.mark.parametrize("name", ["p.json", "p.json.gz", "p.npz", "p.sqlite"])
def test_replay_of_a_profile_says_what_it_is(tmp_path: Path, name: str) -> None:
    file, what = tmp_path / name, "a profile of torch.profiler"
    if name == "p.sqlite":
        nsys = NsysProfile(file)
        nsys.kernel(GEMM, 0, 10)
        nsys.done()
        what = "an SQLite file, as Nsight Systems exports profiles"
    elif name == "p.npz":
        assert in_process("import", profile(tmp_path / "p.json"), "-o", file).returncode == 0
        what = "a ZIP archive, as dbo-greenlet import writes profiles"
    else:
        profile(file)
    assert replayed(file) == f"{what}; replay needs a trace of dbo-greenlet run"


def test_replay_of_a_file_that_is_not_whole(tmp_path: Path) -> None:
    file = profile(tmp_path / "p.json.gz", *[GEMM] * 200)
    whole = file.read_bytes()
    file.write_bytes(whole[: len(whole) // 2])
    assert replayed(file) == "the gzip data ends in the middle; the copy is not whole"
    file.write_bytes(whole[:-8] + b"\0" * 8)
    assert replayed(file).startswith("damaged gzip data")


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (b"", "no trace yet: the file is empty"),
        (b"3", "the first record is no header"),
        (b'{"a": 1}\n', "the first record is no header"),
        (gzip.compress(b"[1, 2]\n", mtime=0), "the first record is no header"),
    ],
)
def test_of_other_files_replay_says_what_it_said(tmp_path: Path, content: bytes, sentence: str) -> None:
    file = tmp_path / "t.jsonl"
    file.write_bytes(content)
    assert replayed(file).startswith(sentence)


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        ("3", "JSON, but neither a trace nor a profile"),
        ('"text"\n', "JSON, but neither a trace nor a profile"),
        ("3 or more", "is not JSON; give a profile of torch.profiler or Nsight Systems"),
    ],
)
def test_json_that_is_no_trace_and_no_profile(tmp_path: Path, content: str, sentence: str) -> None:
    file = tmp_path / "num.json"
    file.write_text(content)
    for words in (["overlap", file], ["lint", file], ["import", file, "-o", tmp_path / "out"]):
        done = in_process(*words)
        assert done.returncode == 2
        assert one_sentence(done.stderr) == f"{file}: {sentence}"


# -- a profile without communication -----------------------------------------------------------------------------------


@pytest.mark.parametrize("command", ["critical-path", "lint", "diff"])
def test_no_communication_is_said_with_the_way_out(tmp_path: Path, command: str) -> None:
    silent, speaking = profile(tmp_path / "s.json"), profile(tmp_path / "p.json", GEMM, DISPATCH)
    twice = 2 if command == "diff" else 1
    said = " ".join(in_process(command, *[silent] * twice).stdout.split())
    assert said.count(WITH_A_TABLE) == twice
    assert NONE_KNOWN not in " ".join(in_process(command, *[speaking] * twice).stdout.split())


def test_diff_says_in_which_of_the_two(tmp_path: Path) -> None:
    done = in_process("diff", profile(tmp_path / "p.json", GEMM, DISPATCH), profile(tmp_path / "s.json"), "--json")
    notes = json.loads(done.stdout)["notes"]
    assert f"B: {WITH_A_TABLE}" in notes and f"A: {WITH_A_TABLE}" not in notes


@pytest.mark.parametrize("words", [["show"], ["export", "--format", "chrome", "-o", "out"], ["import", "-o", "out"]])
def test_commands_without_numbers_note_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: list[str]) -> None:
    monkeypatch.chdir(tmp_path)
    done = in_process(words[0], profile(Path("s.json")), *words[1:])
    assert done.returncode == 0
    assert f"note: There is {NONE_KNOWN}." in done.stdout.splitlines()
    assert NONE_KNOWN not in in_process(words[0], profile(Path("p.json"), GEMM, DISPATCH), *words[1:]).stdout


def test_a_graph_that_is_not_shown_may_communicate(tmp_path: Path) -> None:
    made = ChromeProfile()
    made.call("cudaGraphLaunch", 0, 5)
    made.kernel(GEMM, 10, 20)
    assert NONE_KNOWN not in in_process("critical-path", made.write(tmp_path / "p.json")).stdout


# -- the command line's own words --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "words", [["import", "-o"], ["export", "--format", "chrome", "-o"], ["show", "--html"], ["show", "--png"]]
)
def test_a_slash_at_the_end_means_a_folder(tmp_path: Path, words: list[str]) -> None:
    out = f"{tmp_path}/new/"
    done = in_process(words[0], profile(tmp_path / "p.json"), *words[1:], out)
    assert (done.returncode, done.stdout) == (2, "")
    assert one_sentence(done.stderr) == f"{out} names a folder; name the file to write in it"
    assert not Path(out).exists()


def test_a_choice_that_is_none_in_our_own_words(tmp_path: Path) -> None:
    done = in_process("export", profile(tmp_path / "p.json"), "--format", "foo", "-o", tmp_path / "out")
    assert done.returncode == 2
    said = one_sentence(done.stderr)
    assert said.startswith("Invalid value for '--format': 'foo' is not one of 'chrome', 'perfetto'")


@pytest.mark.parametrize(
    "command",
    [
        "run",
        "record",
        "show",
        "overlap",
        "critical-path",
        "diff",
        "lint",
        "estimate",
        "export",
        "import",
        "replay",
        "selftest",
        "doctor",
    ],
)
def test_usage_has_no_brackets_in_brackets(command: str) -> None:
    usage = in_process(command, "--help").stdout.splitlines()[0]
    assert usage.startswith(f"Usage: dbo-greenlet {command} [OPTIONS]")
    assert not any(twice in usage for twice in ("[[", "]]", "......", "...}", "...]"))
