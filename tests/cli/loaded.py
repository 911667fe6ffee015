"""Which modules a command loads, in a process of its own."""

from __future__ import annotations

import subprocess
import sys

from tests.job.command import environment

_CODE = """
import sys, dbo_greenlet.cli.main as command
names = set(sys.argv[1].split())
try:
    command.main(sys.argv[2:])
finally:
    print(sorted(names & set(sys.modules)))
"""


def output_and_loaded(names: str, *words: object) -> tuple[str, str]:
    """What `dbo-greenlet WORDS` prints, and as the last line which of `names` are loaded then; it must succeed."""
    done = subprocess.run(
        [sys.executable, "-c", _CODE, names, *map(str, words)],
        capture_output=True,
        text=True,
        timeout=60,
        env=environment(),
    )
    assert (done.returncode, done.stderr) == (0, "")
    output, _, loaded = done.stdout.rstrip("\n").rpartition("\n")
    return output, loaded
