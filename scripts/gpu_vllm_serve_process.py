"""The processes of scripts/gpu_vllm_serve.py: a `vllm serve` with all its children, and the client."""

from __future__ import annotations

import contextlib
import json
import os
import re
import select
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterable
from pathlib import Path
from typing import Any

TELLING = re.compile(
    r"run as greenlets|left to vLLM's own|dbo_greenlet|Loading plugin|Microbatch \d|InjectedFault|torch\.cat\(\)"
    r"|Traceback|Error:|EngineDead|died|unexpectedly|timeout|timed out",
    re.IGNORECASE,
)
# Nobody asked for these: a library that is not in the bundle, what the front end could be asked, and what NCCL says
# once a second in a rank that is left alone.
IDLE = re.compile(r"import_utils\.py|Route:|GET /health|deep_gemm|\"should dump\"|^frame #", re.IGNORECASE)
SAID_LINES = 60


class ServerFailed(Exception):
    """A server or the client did not do what it was asked; the message says which and what."""


class Server:
    """One `vllm serve`, in a process group of its own."""

    def __init__(self, name: str, command: list[str], variables: dict[str, str], port: int, log: Path) -> None:
        self.name, self.port, self.log = name, port, log
        self.url = f"http://127.0.0.1:{port}"
        self.variables = variables
        self.begin = time.monotonic()
        self.started_s = 0.0
        with log.open("w") as file:
            print(" ".join(command), file=file, flush=True)
            self.process = subprocess.Popen(
                command, env=variables, stdin=subprocess.DEVNULL, stdout=file, stderr=file, start_new_session=True
            )

    @property
    def up(self) -> bool:
        """It has answered once.

        Raises:
            ServerFailed: it ended before it did.
        """
        if self.started_s:
            return True
        if self.process.poll() is not None:
            raise ServerFailed(f"{self.name}: exited with {self.process.returncode} before it was up")
        if self.healthy():
            self.started_s = time.monotonic() - self.begin
        return bool(self.started_s)

    def healthy(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.url}/health", timeout=5) as answer:
                return answer.status == 200
        except OSError:  # URLError is one: nobody listens yet, or 503
            return False

    def counters(self) -> dict[str, float]:
        """The package's samples on /metrics, by name and labels."""
        try:
            with urllib.request.urlopen(f"{self.url}/metrics", timeout=10) as answer:
                text = answer.read().decode()
        except OSError as error:
            return {f"no metrics: {error}": 0.0}
        lines = [line for line in text.splitlines() if line.startswith("dbo_greenlet")]
        return {name: float(value) for name, value in (line.rsplit(" ", 1) for line in lines)}

    def ranks(self) -> dict[str, int]:
        """Process id by name of this server's engine cores and workers, as vLLM titles them."""
        found = {}
        for folder in Path("/proc").iterdir():
            if not folder.name.isdigit():
                continue
            with contextlib.suppress(OSError):
                if os.getpgid(int(folder.name)) != self.process.pid:
                    continue
                title = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
                # A zombie has no command line.
                if name := re.search(r"(?:EngineCore|Worker)\w*", title):
                    found[name[0]] = int(folder.name)
        return found

    def said(self) -> list[str]:
        """The lines of the log that tell something of what is looked for here, each once."""
        lines = self.log.read_text(errors="replace").splitlines()[1:]  # the first is the command
        lines = [line for line in lines if TELLING.search(line) and not IDLE.search(line)]
        telling = dict.fromkeys(re.sub(r"\s+", " ", line)[:400] for line in lines)
        return list(telling)[:SAID_LINES]

    def last_words(self, lines: int = 6) -> str:
        text = [line for line in self.log.read_text(errors="replace").splitlines() if not IDLE.search(line)]
        return "\n".join(f"{self.name} | {line[:200]}" for line in text[-lines:])

    def end(self, politely: bool = True) -> None:
        """End the whole group: politely, then not."""
        signs = ((signal.SIGTERM, 6.0), (signal.SIGKILL, 2.0))
        for sign, patience in signs[0 if politely else 1 :]:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.process.pid, sign)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(timeout=patience)


def wait_until_up(servers: Iterable[Server], seconds: float) -> None:
    """Wait for all of them; seconds are those since the latest was started.

    Raises:
        ServerFailed: one of them ended, or is not up in time.
    """
    servers = list(servers)
    last = max(server.begin for server in servers) + seconds
    # All are asked every time, so that one that has ended is seen while another is still starting.
    while sum(server.up for server in servers) < len(servers):
        if time.monotonic() > last:
            missing = ", ".join(server.name for server in servers if not server.started_s)
            raise ServerFailed(f"{missing}: not up after {seconds:.0f} s")
        time.sleep(0.25)


class Client:
    """The process of gpu_vllm_serve_client.py."""

    def __init__(self, variables: dict[str, str], log: Path) -> None:
        with log.open("w") as file:
            self.process = subprocess.Popen(
                [sys.executable, str(Path(__file__).with_name("gpu_vllm_serve_client.py"))],
                env=variables,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=file,
                text=True,
                start_new_session=True,
            )
        self.input: Any = self.process.stdin
        self.output: Any = self.process.stdout
        self.ready = False

    def ask(self, job: dict[str, Any], seconds: float) -> dict[str, Any]:
        if not self.ready:
            self._answer(120)
            self.ready = True
        self.input.write(json.dumps(job) + "\n")
        self.input.flush()
        return self._answer(seconds)

    def _answer(self, seconds: float) -> dict[str, Any]:
        readable, _, _ = select.select([self.output], [], [], seconds)
        line = self.output.readline() if readable else ""
        if not line.startswith("RESULT "):
            raise ServerFailed(f"the client said nothing within {seconds:.0f} s: {line!r}")
        return json.loads(line.removeprefix("RESULT "))

    def end(self) -> None:
        self.process.kill()
        self.process.wait()
