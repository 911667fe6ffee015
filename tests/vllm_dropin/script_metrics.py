"""A front end with two workers, as processes of their own; prints what scrapes say, as JSON.

usage: script_metrics.py FOLDER_FOR_PROMETHEUS_MULTIPROCESS_MODE
"""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import sys
from multiprocessing.connection import Connection
from pathlib import Path


def worker(rank: int, pipe: Connection) -> None:
    from dbo_greenlet.vllm.counters import counters
    from dbo_greenlet.vllm.prometheus import announce, publish

    announce()  # the plugin is loaded here, too
    counters.executed("captured")
    publish(counters, rank)
    publish(counters, rank)
    while True:
        for _ in range(pipe.recv()):
            counters.executed("eager")
            counters.decided(True, "split-decode")
            counters.decided(False, "rank-idle")
        pipe.send("counted")


def scrape() -> list[str]:
    from prometheus_client import generate_latest
    from vllm.v1.metrics.prometheus import get_prometheus_registry

    text = generate_latest(get_prometheus_registry()).decode()
    return sorted(sorted_labels(line) for line in text.splitlines() if "dbo_greenlet" in line)


def sorted_labels(line: str) -> str:
    """Some versions of the client write labels as they were given, some in the order of the alphabet."""
    name, brace, rest = line.partition("{")
    labels, end, value = rest.rpartition("}")
    return name + brace + ",".join(sorted(labels.split(","))) + end + value if end else line


def main() -> None:
    from dbo_greenlet.vllm.prometheus import FOLDER, announce

    inherited = os.environ.get(FOLDER)
    announce()
    announce()
    import vllm.v1.metrics.prometheus  # noqa: F401 (after the plugin, as in some front ends)

    folder = Path(os.environ[FOLDER])
    said = {"own folder": str(folder) != inherited, "made too early": folder.exists(), "before": scrape()}

    folder.mkdir(mode=0o700)
    if (child := os.fork()) == 0:
        sys.exit()  # runs what is registered for the exit, in a process that does not own the folder
    os.waitpid(child, 0)
    said["kept by a forked child"] = folder.exists()
    folder.rmdir()

    spawn = multiprocessing.get_context("spawn")
    workers, pipes = [], []
    for rank in range(2):
        ours, theirs = spawn.Pipe()
        workers.append(spawn.Process(target=worker, args=(rank, theirs), daemon=True))
        workers[-1].start()
        pipes.append(ours)

    def count(*steps: int) -> None:
        for pipe, n in zip(pipes, steps, strict=True):
            pipe.send(n)
        for pipe in pipes:
            pipe.recv()

    count(3, 5)
    said["after 3 and 5"] = scrape()
    count(1, 0)
    os.environ["PROMETHEUS_MULTIPROC_DIR"] = sys.argv[1]
    said["after 4 and 5, several API servers"] = scrape()
    del os.environ["PROMETHEUS_MULTIPROC_DIR"]
    os.kill(workers[0].pid, signal.SIGKILL)
    workers[0].join()
    said["after one was killed"] = scrape()
    for path in folder.iterdir():
        if path.suffix != ".counters":
            raise SystemExit(f"left behind: {path}")
    (folder / "broken.counters").write_bytes(b"not a block")
    (folder / "empty.counters").touch()
    said["with broken files"] = scrape()
    said["mode"] = oct(folder.stat().st_mode & 0o777)
    said["bytes"] = sorted(path.stat().st_size for path in folder.glob("rank*"))
    said["folder"] = str(folder)
    workers[1].terminate()
    workers[1].join()
    print(json.dumps(said))


if __name__ == "__main__":
    main()
