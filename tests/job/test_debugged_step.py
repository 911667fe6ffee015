"""`dbo-greenlet replay TRACE --until STEP`: the debugger in rank 0, over the parent's standard streams."""

from __future__ import annotations

import subprocess

from tests.job.command import SECONDS, arguments, environment, in_process, one_sentence
from tests.job.conftest import Recorded


def debug(recorded: Recorded, step: int, commands: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        arguments("replay", recorded.trace, "--until", step),
        input=commands,
        capture_output=True,
        text=True,
        timeout=SECONDS,
        env=environment(),
        check=False,
    )


def test_the_debugger_stops_before_the_step_and_the_replay_goes_on(recorded: Recorded) -> None:
    done = debug(recorded, 3, "p 'AT', self.step, self.rank, self.run_name, mode\ns\nw\nc\n")
    assert "step 3 of run dbo, rank 0: s steps into it" in done.stdout, done.stdout + done.stderr
    assert "('AT', 3, 0, 'dbo', 'auto')" in done.stdout
    assert "job/worker.py" in done.stdout.partition("--Call--")[2]
    assert done.stdout.count("Decisions: met on every rank and step.") == 1
    assert (done.returncode, done.stderr) == (0, "")


def test_quitting_the_debugger_ends_the_replay_on_all_ranks(recorded: Recorded) -> None:
    done = debug(recorded, 2, "q\n")
    assert done.returncode == 2
    assert one_sentence(done.stderr) == "the debugger was quit in step 2; the replay is not over"


def test_a_step_that_the_run_does_not_have_is_refused(recorded: Recorded) -> None:
    done = in_process("replay", recorded.trace, "--until", 999)
    assert (done.returncode, done.stdout) == (2, "")
    sentence = one_sentence(done.stderr)
    assert sentence.startswith(f"--until is 999, and run dbo of {recorded.trace} has no such step; it has ")
