"""Whole engines of vLLM on the CPU, in all their processes, with the drop-in installed as its users install it.

vLLM's CPU platform switches DBO off, so this shows that the plugin is loaded everywhere and disturbs nothing; the
engaged path is shown by the differential tests and on a GPU.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.vllm_dropin.script_engine import NEW_TOKENS, PROMPTS

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(900)]

HERE = Path(__file__).parent
LIMIT = 600  # seconds; an engine starts in a tenth of it on a machine that is not busy
WHY_NOT = (
    "Microbatches are left to vLLM's own implementation, not run as greenlets: vLLM's CPU platform switches DBO off"
)


def environment(tmp_path, **more):
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(HERE / "processes"), str(HERE.parents[1])]),
        "PLUGIN_PROCESSES": str(tmp_path / "processes"),
        "TMPDIR": str(tmp_path),
        "VLLM_RPC_BASE_PATH": tempfile.gettempdir(),  # of sockets, whose paths must be short
        # Nothing remembered: the model is looked at in a subprocess, which loads plugins, too.
        "VLLM_CACHE_ROOT": str(tmp_path / "cache"),
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        **more,
    }


@dataclass
class Run:
    tokens: list[list[int]]
    pid: int
    said: str
    processes: list[dict]
    left_behind: list[Path]

    def lines(self, start):
        return [line for line in self.said.splitlines() if start in line]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    pytest.importorskip("vllm")
    from tests.vllm_dropin import tiny_mixtral

    folder = tmp_path_factory.mktemp("tiny") / "mixtral"
    tiny_mixtral.write(folder)
    return folder


def generate(model, tmp_path, *flags, **variables):
    result = tmp_path / "result.json"
    run = subprocess.run(
        [sys.executable, str(HERE / "script_engine.py"), str(model), str(result), *flags],
        env=environment(tmp_path, **variables),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=LIMIT,
    )
    assert run.returncode == 0, run.stdout[-6000:]
    return Run(
        said=run.stdout,
        processes=processes(tmp_path),
        left_behind=list(tmp_path.glob("dbo-greenlet-*")),
        **json.loads(result.read_text()),
    )


def processes(tmp_path):
    noted = tmp_path / "processes"
    return [json.loads(line) for line in noted.read_text().splitlines()] if noted.exists() else []


def kinds(noted, front_end):
    """How many of vLLM's processes of each kind called the plugin."""
    found = dict.fromkeys(("front end", "registry", "engine core", "worker"), 0)
    for process in noted:
        if process["pid"] == front_end:
            found["front end"] += 1
        elif process["program"] == "registry.py":
            found["registry"] += 1
        elif process["name"].startswith("EngineCore"):
            found["engine core"] += 1
        else:
            assert "Worker" in process["name"], process
            found["worker"] += 1
    return found


@pytest.fixture(scope="module")
def asked(model, tmp_path_factory):
    """An engine that is asked for microbatches, and the folder with what it remembers."""
    folder = tmp_path_factory.mktemp("asked")
    return generate(model, folder, "enable_dbo=true", 'all2all_backend="deepep_low_latency"'), folder / "cache"


@pytest.fixture(scope="module")
def stock(model, asked, tmp_path_factory):
    # What the first engine has looked at is not looked at once more: a subprocess less.
    return generate(model, tmp_path_factory.mktemp("stock"), DBO_GREENLET="0", VLLM_CACHE_ROOT=str(asked[1]))


def test_the_model_of_these_tests_answers_each_prompt_in_its_own_way(stock):
    assert [len(tokens) for tokens in stock.tokens] == [NEW_TOKENS] * len(PROMPTS)
    assert len({tuple(tokens) for tokens in stock.tokens}) == len(PROMPTS)
    assert all(len(set(tokens)) > 2 for tokens in stock.tokens)
    assert stock.lines("icrobatches") == []


def test_an_engine_that_is_asked_for_microbatches_answers_alike_and_one_line_says_why_it_has_none(asked, stock):
    run, _ = asked
    assert run.tokens == stock.tokens
    assert len(run.lines("icrobatches")) == len(run.lines(WHY_NOT)) == 1, run.lines("icrobatches")
    assert kinds(run.processes, run.pid) == {"front end": 1, "registry": 1, "engine core": 1, "worker": 1}
    assert run.left_behind == []


def test_a_server_answers_alike_and_its_metrics_have_ours(model, asked, stock, tmp_path):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model), "--port", str(port)]
    command += ["--host", "127.0.0.1", "--max-model-len", "64", "--max-num-seqs", "4", "--enforce-eager"]
    variables = environment(tmp_path, VLLM_CACHE_ROOT=str(asked[1]))
    log = tmp_path / "log"
    with log.open("w") as said:
        server = subprocess.Popen(command, env=variables, stdout=said, stderr=subprocess.STDOUT, start_new_session=True)
    try:
        wait_until_it_answers(server, f"http://127.0.0.1:{port}/health", log)
        body = {
            "model": str(model),
            "prompt": PROMPTS,
            "max_tokens": NEW_TOKENS,
            "temperature": 0,
            "ignore_eos": True,
            "return_token_ids": True,
        }
        answer = json.loads(ask(f"http://127.0.0.1:{port}/v1/completions", body))
        choices = sorted(answer["choices"], key=lambda choice: choice["index"])
        assert [choice["token_ids"] for choice in choices] == stock.tokens
        metrics = ask(f"http://127.0.0.1:{port}/metrics").splitlines()
        # No worker engages on a CPU, so there are no samples; the metrics are there, beside vLLM's own.
        assert [line for line in metrics if "dbo_greenlet" in line and not line.startswith("# HELP")] == [
            "# TYPE dbo_greenlet_steps_total counter",
            "# TYPE dbo_greenlet_decisions_total counter",
        ]
        assert any(line.startswith("vllm:") for line in metrics)
        found = kinds(processes(tmp_path), server.pid)
        assert found == {"front end": 1, "registry": 0, "engine core": 1, "worker": 1}
        server.send_signal(signal.SIGINT)
        server.wait(120)
    finally:
        if server.poll() is None:
            os.killpg(server.pid, signal.SIGKILL)
            server.wait(60)
    assert list(tmp_path.glob("dbo-greenlet-*")) == []
    assert "icrobatches are left" not in log.read_text()


def wait_until_it_answers(server, url, log):
    end = time.monotonic() + LIMIT
    while time.monotonic() < end:
        assert server.poll() is None, log.read_text()[-6000:]
        try:
            ask(url)
            return
        except (urllib.error.URLError, ConnectionError):
            time.sleep(0.5)
    raise AssertionError(f"no answer from {url} within {LIMIT} s: {log.read_text()[-6000:]}")


def ask(url, body=None):
    request = urllib.request.Request(
        url, None if body is None else json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=120) as answer:
        return answer.read().decode()
