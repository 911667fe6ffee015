"""Expert parallelism over gloo ranks in processes of their own: the same numbers as one rank with all experts."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

from dbo_greenlet.ranks import serve_store
from tests.moe.support import TOLERANCE, Loaded

SCRIPT = Path(__file__).with_name("script_expert_parallel.py")
ROOT = SCRIPT.parents[2]
TIME_LIMIT = 120  # seconds; a run takes a few, most of them imports


def test_two_ranks_equal_one_rank_unsplit_and_split(v2: Loaded) -> None:
    store = serve_store()
    processes = [
        subprocess.Popen(
            [sys.executable, str(SCRIPT), str(rank), "2", str(store.port), str(v2.folder)],
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        outputs = [process.communicate(timeout=TIME_LIMIT)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    # Each batch runs twice: with exact messages and with padded ones.
    for rank, tokens in enumerate(([17, 17, 9, 9], [6, 6, 0, 0])):
        assert processes[rank].returncode == 0, outputs[rank]
        assert f"experts {{({4 * rank}, 4)}}" in outputs[rank]
        lines = re.findall(r"(\d+) tokens, (\S+), (\S+)", outputs[rank])
        assert [int(count) for count, _, _ in lines] == tokens
        assert all(float(value) < TOLERANCE for _, *errors in lines for value in errors), outputs[rank]
