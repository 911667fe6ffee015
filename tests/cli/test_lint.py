"""`lint` on the command line: help, exit codes, JSON, one sentence for each bad input, and our own runs."""

from __future__ import annotations

import gzip
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from dbo_greenlet.testing.layer_programs import high_throughput, low_latency
from dbo_greenlet.trace.lint import RULES
from tests.cli.loaded import output_and_loaded
from tests.job.command import environment, in_process, one_sentence, write_prompts
from tests.testing.planted_bugs import RecordsAfterTheSwitch
from tests.trace.lint_runs import header, recorded, write
from tests.trace.profiles import DISPATCH, FLASH, ChromeProfile

LATE = high_throughput(1, numerics=False, kind=RecordsAfterTheSwitch)
LOW = low_latency(1, numerics=False)


def ids(output: str) -> list[str]:
    return [finding["id"] for report in json.loads(output)["reports"] for finding in report["findings"]]


def test_help_has_an_example_and_needs_nothing_heavy() -> None:
    output, loaded = output_and_loaded("torch numpy greenlet msgspec", "lint", "--help")
    assert "Example: dbo-greenlet lint trace.jsonl --ignore no-overlap" in output
    assert loaded == "[]"


def test_our_own_traces_need_nothing_beyond_the_command_line(tmp_path: Path) -> None:
    trace = write(tmp_path / "t.jsonl", header(), recorded(LATE))
    assert output_and_loaded("torch numpy", "lint", trace, "--only", "race")[1] == "[]"
    without = "import sys; sys.modules.update(torch=None, numpy=None, msgspec=None)"
    code = f"{without}; from dbo_greenlet.cli.main import main; main(sys.argv[1:])"
    bare = [sys.executable, "-c", code, "lint", str(trace)]
    done = subprocess.run(bare, capture_output=True, text=True, timeout=60, env=environment())
    assert (done.returncode, done.stderr) == (1, "")
    assert done.stdout == in_process("lint", trace).stdout


def test_findings_make_it_exit_with_1(tmp_path: Path) -> None:
    trace = write(tmp_path / "t.jsonl", header(), recorded(LATE))
    done = in_process("lint", trace)
    assert (done.returncode, done.stderr) == (1, "")
    assert done.stdout.startswith(f"{trace} (dbo_greenlet), steps: 1 of run dbo; rank 0\n\nwarning event-after-yield: ")
    as_json = in_process("lint", "--json", trace)
    assert (as_json.returncode, ids(as_json.stdout)) == (1, ["event-after-yield"])


@pytest.mark.parametrize(
    "words, code",
    [
        (["--ignore", "event-after-yield"], 0),
        (["--ignore", "race,event-after-yield"], 0),
        (["--ignore", "race", "--ignore", "event-after-yield"], 0),
        (["--ignore", "race"], 1),
        (["--only", "race"], 0),
        (["--only", "race, event-after-yield"], 1),
        (["--run", "dbo", "--rank", "0"], 1),
    ],
)
def test_rules_are_silenced_by_id(tmp_path: Path, words: list[str], code: int) -> None:
    trace = write(tmp_path / "t.jsonl", header(), recorded(LATE))
    done = in_process("lint", trace, *words)
    assert done.returncode == code
    assert ("left out: " in done.stdout) == (words[0] in ("--ignore", "--only"))


def test_ranks_in_files_of_their_own_are_compared(tmp_path: Path) -> None:
    from dbo_greenlet.policies import InTurn

    write(tmp_path / "rank0.jsonl", header(world=2), recorded(LOW))
    second = write(tmp_path / "rank1.jsonl", header(world=2, rank=1), recorded(LOW, InTurn(), rank=1))
    packed = tmp_path / "rank1.jsonl.gz"
    packed.write_bytes(gzip.compress(second.read_bytes()))
    second.unlink()
    for files in ([tmp_path], [tmp_path / "rank0.jsonl", packed]):
        done = in_process("lint", "--json", "--only", "order-mismatch", *files)
        assert (done.returncode, ids(done.stdout)) == (1, ["order-mismatch"])


def test_profiles(tmp_path: Path) -> None:
    made = ChromeProfile()
    for microbatch, begin in enumerate((10, 40)):
        made.range(f"ubatch {microbatch}", begin - 9, begin - 6)
        made.kernel(FLASH, begin, begin + 10, launch=begin - 8)
        made.kernel(DISPATCH, begin + 10, begin + 20, launch=begin - 7)
    file = made.write(tmp_path / "p.json")
    done = in_process("lint", "--json", file, file)
    assert (done.returncode, ids(done.stdout)) == (1, ["comm-on-compute", "no-overlap"] * 2)
    done = in_process("lint", "--ignore", "comm-on-compute,no-overlap", file)
    # Nobody looked, which must not pass for nothing found.
    assert (done.returncode, done.stderr) == (2, "")
    assert "Nothing could be checked: no rule has what it needs.\n" in done.stdout


def test_a_profile_of_which_nothing_is_known_does_not_pass(tmp_path: Path) -> None:
    made = ChromeProfile()
    made.kernel(FLASH, 10, 20, launch=1)
    made.kernel(DISPATCH, 20, 30, launch=2)
    done = in_process("lint", made.write(tmp_path / "p.json"))
    assert done.returncode == 2 and "Nothing could be checked" in done.stdout


def test_the_rules_are_listed_without_a_file() -> None:
    done = in_process("lint", "--rules")
    assert (done.returncode, done.stderr) == (0, "")
    assert all(f"{rule.id} ({rule.severity})\n" in done.stdout for rule in RULES)
    listed = json.loads(in_process("lint", "--rules", "--json").stdout)["rules"]
    assert [each["id"] for each in listed] == [rule.id for rule in RULES]
    assert set(listed[0]) == {"id", "severity", "why", "remedy", "origin", "not_on_profiles"}


@pytest.mark.parametrize(
    "content, words, expected",
    [
        (None, [], "no such file"),
        (b"", [], "the file is empty"),
        (b"{\"t\":\"header\",\"schema\":99}\n", [], "schema 99"),
        (b"not JSON\n", [], "not JSON"),
        (b"{\"traceEvents\": []}", [], "the profile holds no events"),
        (b"{\"traceEvents\": []}", ["--rank", "1"], "is a profile; --run and --rank choose from a trace of ours"),
        (b"", ["--only", "racy"], "--only racy: no rule has this id"),
        (b"{\"traceEvents\": []}", ["--kernels", "nowhere.toml"], "nowhere.toml cannot be read: no such file"),
    ],
)  # fmt: skip
def test_bad_input_is_one_sentence(tmp_path: Path, content: bytes | None, words: list[str], expected: str) -> None:
    file = tmp_path / "t.jsonl"
    if content is not None:
        file.write_bytes(content)
    done = in_process("lint", file, *words)
    assert (done.returncode, done.stdout) == (2, "")
    assert expected in one_sentence(done.stderr)


def test_no_file_and_two_kinds_of_files(tmp_path: Path) -> None:
    done = in_process("lint")
    assert done.returncode == 2
    assert one_sentence(done.stderr) == "name a trace or a profile to look at, or use --rules to see the rules"
    trace = write(tmp_path / "t.jsonl", header(), recorded(LOW))
    made = ChromeProfile()
    made.kernel(FLASH, 10, 20)
    done = in_process("lint", trace, made.write(tmp_path / "p.json"))
    assert done.returncode == 2
    assert "p.json is no trace of ours and " in one_sentence(done.stderr)


@pytest.fixture(scope="module")
def own_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run on two ranks with everything recorded that a CPU has."""
    folder = tmp_path_factory.mktemp("run")
    prompts = write_prompts(folder / "prompts.jsonl", [0] * 6)
    trace = folder / "trace.jsonl"
    words: list[Any] = ["run", "--prompts", prompts, "--trace", trace, "--memory", "--max-new-tokens", 2]
    done = in_process(*words)
    assert done.returncode == 0, done.stderr
    return trace


def test_nothing_is_found_in_our_own_run(own_run: Path) -> None:
    done = in_process("lint", "--json", own_run)
    (report,) = json.loads(done.stdout)["reports"]
    assert (done.returncode, report["findings"]) == (0, [])
    # What a CPU cannot tell; everything else was looked at.
    assert {each["id"] for each in report["not_checked"] if not each["steps_checked"]} <= {
        "long-hold", "small-message", "cpu-block-before-peer-work",
    }  # fmt: skip
    assert len(report["checked"]) >= len(RULES) - 3
