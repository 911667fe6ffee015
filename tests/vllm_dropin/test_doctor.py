"""`dbo-greenlet doctor`: what it says with and without vLLM, its exit codes, and what it leaves alone."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

from dbo_greenlet._version import __version__
from dbo_greenlet.vllm import diagnosis
from dbo_greenlet.vllm.compat import installed_version
from dbo_greenlet.vllm.diagnosis import plugin_problem
from dbo_greenlet.vllm.patching import REPLACED, is_installed
from tests.job.command import dbo_greenlet, environment, in_process, one_sentence

BACKEND = "--all2all-backend=deepep_low_latency"
SERVER = ["--enable-dbo", "--data-parallel-size", "2", "--enable-expert-parallel", BACKEND]
without_vllm = pytest.mark.skipif(installed_version() is not None, reason="vLLM is installed here")


def doctor(*words: str) -> tuple[int, dict[str, Any]]:
    """The exit code, and what was found. Without the self-test, which has tests of its own."""
    done = in_process("doctor", "--no-selftest", "--json", *words)
    return done.returncode, json.loads(done.stdout)


@pytest.fixture(autouse=True)
def _plain_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [each for each in os.environ if each.startswith(("DBO_GREENLET", "VLLM_"))]:
        monkeypatch.delenv(name)


def test_help_has_an_example_and_imports_nothing_heavy() -> None:
    code = (
        "import sys, dbo_greenlet.cli.main as m\n"
        "try:\n    m.main(['doctor', '--help'])\n"
        "finally:\n    print(sorted({'torch', 'vllm', 'numpy', 'greenlet'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, env=environment())
    assert (done.returncode, done.stderr) == (0, "")
    assert "Example: dbo-greenlet doctor -- --enable-dbo" in done.stdout
    assert done.stdout.splitlines()[-1] == "[]"


@without_vllm
def test_without_vllm_it_says_so() -> None:
    done = dbo_greenlet("doctor", "--no-selftest", "--", *SERVER)
    assert (done.returncode, done.stderr) == (1, "")
    lines = done.stdout.splitlines()
    assert lines[0] == f"dbo_greenlet  {__version__}"
    assert "vllm          not installed" in lines
    assert lines[-1] == "It would not engage: vLLM is not installed here; install dbo-greenlet[vllm]."


@without_vllm
def test_json_has_the_same_without_vllm() -> None:
    code, found = doctor()
    assert (code, found["engages"], found["rule"], found["refuse"]) == (1, False, "no vLLM", False)
    assert found["facts"]["greenlet"] == metadata.version("greenlet")
    assert found["facts"]["selftest"] is None
    assert found["replaces"] == list(REPLACED)


@without_vllm
@pytest.mark.parametrize(("problem", "words"), [(None, "self-test     passed"), ("a: it broke", "failed: a: it broke")])
def test_the_self_test_is_told(monkeypatch: pytest.MonkeyPatch, problem: str | None, words: str) -> None:
    # What the cases find is tested where they are; here it is how it is told.
    monkeypatch.setattr("dbo_greenlet.vllm.selftest_cache.selftest_problem", lambda: problem)
    done = in_process("doctor")
    assert done.returncode == 1 and words in done.stdout


@pytest.mark.parametrize(
    ("variables", "row"),
    [
        ({}, "none asked for"),
        ({"DBO_GREENLET_TRACE": "a/folder"}, "a/folder"),
        (
            {"DBO_GREENLET_TRACE": "a/folder", "DBO_GREENLET_TRACE_EVERY": "1O"},
            "no step is recorded: DBO_GREENLET_TRACE_EVERY='1O' is not a whole number of 1 or more",
        ),
    ],
)
def test_the_trace_is_told(monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], row: str) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    lines = in_process("doctor", "--no-selftest").stdout.splitlines()
    assert f"trace         {row}" in lines
    _, found = doctor()
    assert found["settings"]["problem"] == (row if "EVERY" in row else None)


@pytest.mark.parametrize(
    ("words", "variables", "sentence"),
    [
        (["--platform", "tpu"], {}, "--platform is 'tpu'; use one of cuda, rocm"),
        ([], {"DBO_GREENLET": "maybe"}, "DBO_GREENLET='maybe' means nothing; use 0 (off), 1 (on, the default) or"),
    ],
)
def test_a_bad_option_is_one_sentence(
    monkeypatch: pytest.MonkeyPatch, words: list[str], variables: dict[str, str], sentence: str
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    done = in_process("doctor", "--no-selftest", *words)
    assert (done.returncode, done.stdout) == (2, "")
    assert one_sentence(done.stderr).startswith(sentence)


def test_the_plugin_is_looked_for_where_vllm_does(monkeypatch: pytest.MonkeyPatch) -> None:
    def points(*, group: str) -> list[metadata.EntryPoint]:
        assert group == "vllm.general_plugins"
        return [metadata.EntryPoint("dbo_greenlet", "dbo_greenlet.vllm.plugin:register", group)] * installed

    monkeypatch.setattr(diagnosis.metadata, "entry_points", points)
    installed = 0
    assert "dbo_greenlet of vllm.general_plugins is not installed" in str(plugin_problem())
    installed = 1
    assert plugin_problem() is None
    monkeypatch.setenv("VLLM_PLUGINS", "lora,dbo_greenlet")
    assert plugin_problem() is None
    monkeypatch.setenv("VLLM_PLUGINS", "lora")
    assert plugin_problem() == "VLLM_PLUGINS='lora' does not list dbo_greenlet; add it, or unset the variable"
    monkeypatch.setenv("VLLM_PLUGINS", "")
    assert "does not list dbo_greenlet" in str(plugin_problem())


# -- with vLLM ---------------------------------------------------------------------------------------------------------


@pytest.mark.vllm
def test_a_server_that_would_engage(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DBO_GREENLET", "require")
    before = is_installed()
    code, found = doctor("--platform", "cuda", "--", "vllm", "serve", "a/model", *SERVER, "--port", "8001")
    assert (code, found["engages"], found["runner"]) == (0, True, "V1"), found["reason"]
    assert found["facts"]["num_ubatches"] == 2 and found["facts"]["compat_problems"] == []
    assert found["facts"]["vllm"] == installed_version()
    assert found["environment"] == {"DBO_GREENLET": "require"} and found["settings"]["mode"] == "require"
    assert found["flags"][0] == "a/model"
    # Asking changes nothing in this process.
    assert is_installed() == before and os.environ["DBO_GREENLET"] == "require"

    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "1")
    code, found = doctor("--platform", "rocm", *SERVER)  # the "--" was forgotten
    assert (code, found["runner"]) == (0, "V2"), found["reason"]


@pytest.mark.vllm
@pytest.mark.parametrize(
    ("flags", "variables", "rule"),
    [
        ([], {}, "DBO off"),
        (["--enable-dbo"], {}, "all-to-all backend"),
        (["--enable-dbo", "--all2all-backend=nixl_ep"], {}, "one data-parallel rank"),
        (["--ubatch-size", "2", "-dp", "2"], {}, "ubatch size without DBO"),
        (["--ubatch-size", "3", "-dp", "2"], {}, "more than two microbatches"),
        (SERVER, {"DBO_GREENLET": "0"}, "switched off"),
        (SERVER, {"VLLM_PLUGINS": "lora"}, "plugin"),
    ],
)
def test_a_server_that_would_not(
    monkeypatch: pytest.MonkeyPatch, flags: list[str], variables: dict[str, str], rule: str
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    code, found = doctor("--platform", "cuda", "--", *flags)
    assert (code, found["engages"], found["rule"]) == (1, False, rule), found["reason"]
    assert found["refuse"] == ("--ubatch-size" in flags)
    assert found["environment"] == variables


@pytest.mark.vllm
@pytest.mark.parametrize("typed", ["pplx", "naive"])
def test_a_backend_that_is_gone_is_named_as_it_was_typed(typed: str) -> None:
    code, found = doctor("--platform", "cuda", "--", "--enable-dbo", "-dp", "2", "--all2all-backend", typed)
    assert (code, found["rule"]) == (1, "all-to-all backend")
    assert f"--all2all-backend {typed}, which it takes for allgather_reducescatter;" in found["reason"]


@pytest.mark.vllm
@pytest.mark.parametrize("model", [[], ["a/model"], ["model: a/model"]], ids=["none", "typed", "in the file"])
def test_flags_from_a_file(tmp_path: Path, model: list[str]) -> None:
    inside = [each for each in model if each.startswith("model:")]
    flags = ["enable-dbo: true", "data-parallel-size: 2", "enable-expert-parallel: true", *inside]
    file = tmp_path / "flags.yaml"
    file.write_text("\n".join([*flags, f"all2all-backend: {BACKEND.partition('=')[2]}"]))
    typed = [each for each in model if each not in inside]
    code, found = doctor("--platform", "cuda", "--", *typed, "--config", str(file))
    assert (code, found["engages"]) == (0, True), found["reason"]
    # What is typed goes before what the file says, and what neither of them may say is an error as ever.
    _, found = doctor("--platform", "cuda", "--", *typed, "--config", str(file), "-dp", "1")
    assert found["rule"] == "one data-parallel rank"
    file.write_text("enable-dboo: true")
    done = in_process("doctor", "--no-selftest", "--", *typed, "--config", str(file), *([] if typed else ["-dp", "2"]))
    assert done.returncode == 2 and "vLLM does not take these flags: unrecognized arguments:" in done.stderr


@pytest.mark.vllm
@pytest.mark.parametrize("value", ["true", ""])
def test_a_choice_of_runner_that_is_no_number(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", value)
    done = in_process("doctor", "--no-selftest", "--", *SERVER)
    assert (done.returncode, done.stdout) == (2, "")
    assert one_sentence(done.stderr) == f"vLLM does not start with VLLM_USE_V2_MODEL_RUNNER={value!r}; use 0 or 1"


@pytest.mark.vllm
def test_the_text_names_everything() -> None:
    # In a process of its own: vLLM writes to standard output while it is imported, and must not do so here.
    done = dbo_greenlet("doctor", "--no-selftest", "--", *SERVER)
    assert done.returncode == 1
    lines = done.stdout.splitlines()
    assert lines[0] == f"dbo_greenlet  {__version__}" and lines[1] == f"vllm          {installed_version()}"
    assert "plugin        installed, and vLLM loads it" in lines and "runner        V1" in lines
    assert f"flags         {' '.join(SERVER)}" in lines
    assert all(any(line.endswith(name) for line in lines) for name in REPLACED)
    assert lines[-1] == (
        "It would not engage: vLLM's CPU platform switches DBO off; dbo_greenlet engages on CUDA and ROCm."
    )


@pytest.mark.vllm
@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (["--enable-dboo"], "vLLM does not take these flags: unrecognized arguments: --enable-dboo"),
        (["--all2all-backend", "pigeon"], "vLLM does not take these flags: argument --all2all-backend: invalid choice"),
        (["--data-parallel-size", "two"], "vLLM does not take these flags: argument --data-parallel-size/-dp: invalid"),
        (["--config", "absent.yaml"], "vLLM does not take these flags: [Errno 2] No such file or directory"),
        (["--help"], "give the flags of a server, and ask vllm serve itself for its help"),
        (
            ["--enable-dbo", "--dbo-decode-token-threshold", "1"],
            "vLLM refuses these flags: dbo_decode_token_threshold and dbo_prefill_token_threshold must be at least",
        ),
    ],
)
def test_a_bad_flag_is_one_sentence(flags: list[str], sentence: str) -> None:
    done = in_process("doctor", "--no-selftest", "--", *flags)
    assert (done.returncode, done.stdout) == (2, "")
    assert one_sentence(done.stderr).startswith(sentence)


@pytest.mark.vllm
def test_a_vllm_that_does_not_import_is_the_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(name: str) -> None:
        raise ImportError("libtorch.so: undefined symbol")

    monkeypatch.setattr(diagnosis, "import_module", broken)
    code, found = doctor("--platform", "cuda", "--", *SERVER)
    assert (code, found["rule"]) == (1, "plugin")
    assert found["reason"] == "vLLM cannot be imported: ImportError: libtorch.so: undefined symbol"
