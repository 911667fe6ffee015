"""A worker process of vLLM, its own `WorkerProc.worker_main`, whose model is `drive`'s: it fails, or it is ended.

    script_worker_end.py fails|waits

The parent, this script, stands for the engine core: it starts the worker, says "worker PID", runs the step that is
asked for and then lives until it is killed. "fails": a layer raises in a microbatch, and "answer ..." says what came of
it. "waits": "inside" says that a microbatch is running, which takes a minute.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
import time
from types import SimpleNamespace
from typing import Any

from vllm.distributed.device_communicators.shm_broadcast import MessageQueue
from vllm.v1.executor import multiproc_executor

from tests.vllm_dropin.drive import Case, Drive, drop_in, harness
from tests.vllm_dropin.fake_cuda import who_runs
from tests.vllm_dropin.scenarios import break_at

LONG = 60.0


class Worker:
    """What vLLM's worker does as far as this is about: a split step, and nothing to tidy up."""

    def fails(self) -> str:
        return self._step(lambda drive: break_at(drive, 1, "layer1"))

    def waits(self) -> str:
        def wait(place: str) -> None:
            if place == "layer1" and who_runs() == "1":
                print("inside", flush=True)
                end = time.monotonic() + LONG
                while time.monotonic() < end:
                    time.sleep(0.05)

        return self._step(lambda drive: setattr(drive.model, "hook", wait))

    def shutdown(self) -> None:
        print("shut down", flush=True)

    def _step(self, prepare: Any) -> str:
        with harness() as log, drop_in():
            drive = Drive(Case(layers=2), log)
            prepare(drive)
            return str(drive.step())


class Process(multiproc_executor.WorkerProc):
    """vLLM's, with a worker that needs no device and no peers."""

    def __init__(self, *, rank: int, input_shm_handle: Any, **_: Any) -> None:
        self.rank, self.worker = rank, Worker()
        self.rpc_broadcast_mq = MessageQueue.create_from_handle(input_shm_handle, 0)
        self.worker_response_mq = MessageQueue(1, 1)
        self.peer_response_handles = []
        self.use_async_scheduling = False


def main() -> None:
    multiproc_executor.WorkerProc = Process
    context = multiprocessing.get_context("fork")
    calls = MessageQueue(1, 1)
    ready, ready_writer = context.Pipe(duplex=False)
    death, death_writer = context.Pipe(duplex=False)
    parallel = SimpleNamespace(assigned_physical_gpu_ids=None, numa_bind=False)
    worker = context.Process(
        target=Process.worker_main,
        kwargs={
            "vllm_config": SimpleNamespace(parallel_config=parallel),
            "local_rank": 0,
            "rank": 0,
            "input_shm_handle": calls.export_handle(),
            "ready_pipe": ready_writer,
            "death_pipe": death,
            "inherited_fds": [ready.fileno(), death_writer.fileno()],
        },
        daemon=True,
    )
    worker.start()
    ready_writer.close()
    death.close()
    answers = MessageQueue.create_from_handle(ready.recv()["handle"], 0)
    calls.wait_until_ready()
    answers.wait_until_ready()
    print(f"worker {worker.pid}", flush=True)
    calls.enqueue((sys.argv[1], (), {}, None))
    if sys.argv[1] == "fails":
        status, said = answers.dequeue(timeout=LONG)
        print("answer", status.name, str(said).splitlines()[0], flush=True)
    while os.path.exists(f"/proc/{worker.pid}") and worker.is_alive():
        time.sleep(0.05)
    print(f"exit {worker.exitcode}", flush=True)


if __name__ == "__main__":
    main()
