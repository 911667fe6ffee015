"""A failing schedule in words: what was found, the smallest schedule that fails, and how to run it again."""

from __future__ import annotations

from collections.abc import Sequence

from ..trace.notation import order, why_no_notation
from ..trace.timetable import render_order
from .shrink import Shrunk, Trials
from .step_run import StepRunner, virtual_device
from .verdicts import Finding, is_of_the_ranks

__all__ = ["AGAIN", "decision_list", "failure_text"]

# What comes before the way to run it again: the pytest plugin has another one.
AGAIN = "\n\nRun it again: "

# Decisions that are listed at the beginning and at the end of a long schedule.
_LISTED = 30


def failure_text(shrunk: Shrunk, which: str, trials: Trials) -> tuple[str, str]:
    """(the message, the replay string) of what exploration found."""
    from .replay_case import ReplayCase

    trial = shrunk.trial
    finding = trial.finding
    if finding is None:
        return "nothing was found", ""
    _, picked, decisions = trial.size
    run = trial.run
    replay = ReplayCase.of(run).encode()
    lines = [
        f"{which} fails: {finding.text}",
        "",
        _what_follows(shrunk, finding),
        *decision_list(decisions, run.schedule.sites, picked),
    ]
    if run.failed is None and why_no_notation(run.schedule.decisions, run.schedule.sites) is None:
        lines += ["", render_order(order(run.schedule.decisions, run.schedule.sites))]
    return "\n".join(lines) + AGAIN + _call(trials.runner, replay), replay


def _what_follows(shrunk: Shrunk, finding: Finding) -> str:
    trial = shrunk.trial
    if is_of_the_ranks(trial.run.error):
        return (
            "A step that another rank's failure ended is not run again, so this is its schedule as it was and not the "
            "smallest one:"
        )
    preemptions, picked, _ = trial.size
    how = "every smaller one passes" if shrunk.smallest else "cut down from a larger one"
    if shrunk.runs:
        how += f", {shrunk.runs} more runs"
    return (
        f"The smallest schedule that fails by this verdict ({finding.verdict}; {how}) has {preemptions} "
        f"preemption{'s' if preemptions != 1 else ''} and {picked} picked decisions; behind them each microbatch goes "
        "on as long as it may:"
    )


def _call(runner: StepRunner, replay: str) -> str:
    """The call that runs the step again, with what was not left to its default; what has no text, by its name."""
    words = ["build", f"ReplayCase.decode({replay!r}).policy()"]
    if runner.count != 2:
        words.append(f"count={runner.count}")
    if runner.make_device is not virtual_device():
        words.append("make_device=make_device")
    if runner.faults is not None:
        words.append(f"faults=Faults.parse({str(runner.faults)!r})")
    if not runner.strict:
        words.append("strict=False")
    if runner.thread_state != "auto":
        words.append("thread_state=thread_state")
    return f"run_step({', '.join(words)})"


def decision_list(decisions: Sequence[int], sites: Sequence[str], picked: int) -> list[str]:
    """One line for each of the picked decisions of a schedule, and one for the rest.

    A decision without a site is that for a slice which failed.
    """
    lines = []
    at = dict.fromkeys(decisions, "its start")
    last = -1
    for position, index in enumerate(decisions[:picked]):
        begin = at[index]
        failed = position >= len(sites)
        end = "its failure" if failed else sites[position] or "its end"
        at[index] = end
        turn = "" if position == 0 or index == last else "  (switch)"
        lines.append(f"{position:5}  microbatch {index}  from {begin} to {end}{turn}")
        last = index
    if len(lines) > 2 * _LISTED:
        lines[_LISTED:-_LISTED] = [f"       ... {len(lines) - 2 * _LISTED} more ..."]
    rest = list(decisions[picked:])
    if rest:
        end = ", in the last of which the step fails" if len(decisions) > len(sites) else ""
        lines.append(f"       then microbatch {', '.join(f'{index} x {times}' for index, times in _runs(rest))}{end}")
    return lines


def _runs(decisions: Sequence[int]) -> list[tuple[int, int]]:
    runs: list[tuple[int, int]] = []
    for index in decisions:
        if runs and runs[-1][0] == index:
            runs[-1] = (index, runs[-1][1] + 1)
        else:
            runs.append((index, 1))
    return runs
