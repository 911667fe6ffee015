"""What a checkpoint is trained and scored on, as token ids. Imports neither torch nor transformers.

The text is made by dbo_greenlet.problems; a token is a byte, and three more ids mark beginning, end and padding. As a
script it writes one shard of the training text, because problems are drawn by one core at a time:

    python scripts/training_text.py --seed 16 --count 62500 --out shard.npy

`Shards` starts one such process a core. They are programs and not a multiprocessing pool: a spawned worker would import
its parent's main module, and with it torch, sixteen times; a forked one would inherit torch's threads.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import pathlib
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any

import numpy

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))

from dbo_greenlet.problems import MAX_PROMPT_BYTES, MAX_WORKED_BYTES, Problem, train_problems

BOS, EOS, PAD = 256, 257, 258  # ids 0..255 are the bytes themselves
SPECIAL_TOKENS = {"<bos>": BOS, "<eos>": EOS, "<pad>": PAD}
LENGTH = MAX_PROMPT_BYTES + MAX_WORKED_BYTES
MAX_NEW_TOKENS = MAX_WORKED_BYTES + 2
POOL_SHARDS = 16  # fixed, so that the training text does not depend on the number of cores


def prompt_ids(problem: Problem) -> list[int]:
    """<bos> and the bytes of the story."""
    return [BOS, *problem.prompt.encode()]


def evaluation_record(problem: Problem) -> dict[str, Any]:
    """One line of eval.jsonl, for any program that can decode greedily; `answered` says what counts as right.

    {"prompt_ids": ids to go on from, "answer_ids": the text of the training form, calculation and answer, "final_ids":
    its end, "=" and the answer, "stop_id": the id that ends a text, "max_new_tokens": enough for the longest text,
    "prompt" and "answer": as text}.
    """
    return {
        "prompt_ids": prompt_ids(problem),
        "answer_ids": list(problem.worked.encode()),
        "final_ids": list(f"={problem.answer}".encode()),
        "stop_id": EOS,
        "max_new_tokens": MAX_NEW_TOKENS,
        "prompt": problem.prompt,
        "answer": problem.answer,
    }


def answered(record: Mapping[str, Any], generated: Sequence[int]) -> bool:
    """Whether ids decoded after `prompt_ids` give the answer: up to the first `stop_id` they end in `final_ids`.

    The last result of the calculation is compared, digit by digit, and not all of `answer_ids`: a sum of two people's
    things may be written in either order, and half of those sums would count as wrong. A text that never stops is
    wrong.
    """
    ids, final = list(generated), record["final_ids"]
    if record["stop_id"] not in ids:
        return False
    return ids[: ids.index(record["stop_id"])][-len(final) :] == final


def write_evaluation(problems: Sequence[Problem], path: pathlib.Path) -> None:
    path.write_text("".join(json.dumps(evaluation_record(problem)) + "\n" for problem in problems), encoding="ascii")


def encode_shard(seed: int, count: int) -> numpy.ndarray:
    """uint8 [count, 2 + LENGTH]: bytes of the prompt, bytes of both, and both as bytes, padded with zeros."""
    rows = numpy.zeros((count, 2 + LENGTH), dtype=numpy.uint8)
    for row, problem in zip(rows, itertools.islice(train_problems(seed), count), strict=True):
        text = (problem.prompt + problem.worked).encode()
        row[0], row[1] = len(problem.prompt), len(text)
        row[2 : 2 + len(text)] = numpy.frombuffer(text, dtype=numpy.uint8)
    return rows


class Shards:
    """`size` training problems in the making, as a context manager; leaving it ends what still runs.

    Processes start at once, so that the caller can build a model in the meantime.
    """

    def __init__(self, size: int, seed: int) -> None:
        self._folder = tempfile.TemporaryDirectory()
        self._count = size // POOL_SHARDS
        self._waiting = list(range(POOL_SHARDS))
        self._seed = seed
        self._running: list[subprocess.Popen[bytes]] = []
        for _ in range(min(POOL_SHARDS, os.cpu_count() or 1)):
            self._start_one()

    def __enter__(self) -> Shards:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for process in self._running:
            process.kill()
            process.wait()
        self._folder.cleanup()

    def result(self) -> numpy.ndarray:
        """Waits for all of them: uint8 [size, 2 + LENGTH] as `encode_shard` makes it, the same for the same seed.

        Raises RuntimeError if a process failed; its own message is on standard error.
        """
        while self._running:
            if self._running.pop(0).wait():
                raise RuntimeError("a process that writes training text failed")
            self._start_one()
        return numpy.concatenate([numpy.load(self._path(shard)) for shard in range(POOL_SHARDS)])

    def _path(self, shard: int) -> pathlib.Path:
        return pathlib.Path(self._folder.name, f"{shard}.npy")

    def _start_one(self) -> None:
        if not self._waiting:
            return
        shard = self._waiting.pop(0)
        numbers = ["--seed", str(self._seed * POOL_SHARDS + shard), "--count", str(self._count)]
        self._running.append(
            subprocess.Popen([sys.executable, __file__, *numbers, "--out", str(self._path(shard))], close_fds=True)
        )


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Write one shard of training text as a NumPy file.")
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--count", type=int, required=True)
    parser.add_argument("--out", type=pathlib.Path, required=True)
    options = parser.parse_args(arguments)
    numpy.save(options.out, encode_shard(options.seed, options.count))
    return 0


if __name__ == "__main__":
    sys.exit(main())
