"""A server as far as its trace is concerned: steps of the real scheduler, one for each line on standard input.

    script_server.py FOLDER EVERY MEGABYTES [LAYERS]

Says "ready PATH" once the trace is open and the number of steps after each line. Ends in order at the end of its input;
"die" kills the process, "torn" leaves half a line behind before that; "fork" and "spawn" run a step and the end of the
process in a child of multiprocessing, which opens a trace of its own, and wait for it; "fork on" runs a step of the
parent's trace in a forked child.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys

from dbo_greenlet import Scheduler, dbo_maybe_run_recv_hook, dbo_register_recv_hook, dbo_yield
from dbo_greenlet.vllm.recording import ServerTrace


def entry(layers: int):
    def model() -> None:
        for layer in range(layers):
            for stage in ("dispatch", "combine"):
                dbo_maybe_run_recv_hook()
                dbo_register_recv_hook(lambda: None)
                dbo_yield(f"layer{layer}.{stage}")

    return model


class Server:
    def __init__(self, folder: str, every: int, megabytes: float, layers: int) -> None:
        self.trace = ServerTrace(
            folder, every=every, megabytes=megabytes, rank=0, world=2, settings={"model": "tiny", "runner": "V1"}
        )
        self.layers = layers
        self.plain = Scheduler()
        self.recording = Scheduler(instruments=[self.trace.recorder])

    def step(self) -> None:
        scheduler = self.recording if self.trace.due() else self.plain
        result = scheduler.run([entry(self.layers)] * 2)
        self.trace.split_step(
            kind="eager",
            slices=[(0, 4, 0, 1), (4, 8, 1, 2)],
            tokens=8,
            padded=8,
            schedule=result.schedule,
            error=None,
        )


def child(arguments: list[str]) -> None:
    make_server(arguments).step()


def make_server(arguments: list[str]) -> Server:
    folder, every, megabytes, *layers = arguments
    return Server(folder, int(every), float(megabytes), int(layers[0]) if layers else 2)


def main() -> None:
    server = make_server(sys.argv[1:])
    print("ready", server.trace.path, flush=True)
    for count, line in enumerate(sys.stdin, 1):
        command = line.strip()
        if command in ("die", "torn"):
            if command == "torn":
                with open(server.trace.path, "ab") as file:
                    file.write(b'{"t":"slice","step":99,"ra')
            os.kill(os.getpid(), signal.SIGKILL)
        if command in ("fork", "spawn"):
            process = multiprocessing.get_context(command).Process(target=child, args=(sys.argv[1:],))
            process.start()
            process.join()
        elif command == "fork on":
            process = multiprocessing.get_context("fork").Process(target=server.step)
            process.start()
            process.join()
        else:
            server.step()
        print(count, flush=True)


if __name__ == "__main__":
    main()
