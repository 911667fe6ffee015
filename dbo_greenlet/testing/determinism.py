"""Is a step a function of its schedule? Run it twice and compare everything that can be compared.

Replay, golden schedules and exploration all stand on it: where the same decisions give another run, a failure cannot be
run again. Compared are the microbatches that could have run at each decision, the decisions, the yield sites, what was
enqueued (kind, stream, name, microbatch, accesses, event), the error, and the checksum of the outputs. Buffers and
events are compared by the order in which they turn up, because their identities are other ones in each run.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Hashable, Sequence
from typing import TYPE_CHECKING, Any

from .errors import NondeterminismError
from .step_run import Build, StepRun, StepRunner

if TYPE_CHECKING:
    from ..policy import Policy
    from ..stream_program import Operation, StreamProgram
    from .faults import Faults

__all__ = ["check_deterministic", "compare_runs"]

_CAUSES = {
    "path": (
        "a branch on something that is no input of the step: the clock, a random number without a seed, a counter or a "
        "cache that an earlier run filled, the iteration order of a set, an `is` or `id`, another thread"
    ),
    "program": (
        "a cache or a buffer that only the first run had to fill, an operation that is skipped when a condition on the "
        "device or the clock holds, the iteration order of a set"
    ),
    "outputs": (
        "random numbers without a seed, memory that is read before it is written, atomic additions in a kernel, "
        "parameters or buffers that a run changes, state kept from one run to the next, an object whose repr shows "
        "its address"
    ),
}


def check_deterministic(
    build: Build,
    policy: Policy | None = None,
    *,
    count: int = 2,
    runs: int = 2,
    make_device: Callable[[], Any] | None = None,
    faults: Faults | None = None,
    carrier: str = "greenlet",
    strict: bool = True,
    thread_state: Any = "auto",
) -> StepRun:
    """Run a step `runs` times under one policy and compare each run with the first, which is returned.

    Args: `policy` default round robin; others see `run_step`.

    Raises:
        NondeterminismError: two runs differ; the message names the first difference and the usual causes.
    """
    __tracebackhide__ = True  # to pytest, which would print this function above what was found
    from ..policy import RoundRobin

    runner = StepRunner(
        build,
        count=count,
        make_device=make_device,
        faults=faults,
        carrier=carrier,
        strict=strict,
        thread_state=thread_state,
    )
    policy = RoundRobin() if policy is None else policy
    first = runner.run(policy, watch=True)
    for _ in range(runs - 1):
        if (difference := compare_runs(first, runner.run(policy, watch=True))) is not None:
            raise NondeterminismError(difference)
    return first


def compare_runs(first: StepRun, second: StepRun) -> str | None:
    """The first difference between two runs of the same step, with its usual causes; None where they are equal."""
    found = (
        _of_path(first, second)
        or _of_programs(first.program, second.program)
        or _of_errors(first.error, second.error)
        or _of_outputs(first, second)
    )
    if found is None:
        return None
    what, difference = found
    return f"two runs of the same step differ: {difference}. Usual causes: {_CAUSES[what]}"


def _of_path(first: StepRun, second: StepRun) -> tuple[str, str] | None:
    one, two = first.schedule, second.schedule
    positions = max(len(one.decisions), len(two.decisions), len(first.runnable), len(second.runnable))
    for position in range(positions):
        at = f"at decision {position}"
        a, b = _at(first.runnable, position), _at(second.runnable, position)
        if a != b:
            return "path", f"{at} the first run could go on with {_which(a)}, the second with {_which(b)}"
        a, b = _at(one.decisions, position), _at(two.decisions, position)
        if a != b:
            return "path", f"{at} the first run went on with {_who(a)}, the second with {_who(b)}"
        a, b = _at(one.sites, position), _at(two.sites, position)
        if a != b:
            who = f"microbatch {one.decisions[position]}"
            return "path", f"{at} {who} {_went(a)} in the first run, and {_went(b)} in the second"
    return None


def _of_programs(first: StreamProgram | None, second: StreamProgram | None) -> tuple[str, str] | None:
    if first is None or second is None:
        return None
    one, two = _Names(), _Names()
    for a, b in itertools.zip_longest(first.operations, second.operations):
        if a is None or b is None:
            here, other = ("second", "first") if a is None else ("first", "second")
            return "program", f"the {here} run enqueued {a or b}, and the {other} had ended"
        if one.of(a) != two.of(b):
            return "program", f"the first run enqueued {_words(a)}, the second {_words(b)}"
    return None


class _Names:
    """Numbers for buffers, events and transfers in the order in which they turn up."""

    def __init__(self) -> None:
        self._numbers: dict[Hashable, int] = {}

    def of(self, operation: Operation) -> tuple[object, ...]:
        numbers = self._numbers
        return (
            operation.kind,
            operation.stream,
            operation.name,
            operation.microbatch,
            operation.slice,
            None if operation.event is None else numbers.setdefault(("event", operation.event), len(numbers)),
            operation.of,
            None if operation.transfer is None else operation.transfer.number,
            tuple(
                (numbers.setdefault(("buffer", each.buffer), len(numbers)), *each[1:]) for each in operation.accesses
            ),
        )


def _of_errors(first: BaseException | None, second: BaseException | None) -> tuple[str, str] | None:
    if type(first) is type(second) and str(first) == str(second):
        return None
    return "path", f"the first run {_ended(first)}, the second {_ended(second)}"


def _of_outputs(first: StepRun, second: StepRun) -> tuple[str, str] | None:
    if first.checksum == second.checksum:
        return None
    from .checksum import checksum

    outputs = zip(first.outputs or (), second.outputs or (), strict=False)
    for index, (a, b) in enumerate(outputs):
        if (one := checksum(a)) != (two := checksum(b)):
            return (
                "outputs",
                f"the output of microbatch {index} has checksum {one} in the first run, {two} in the second",
            )
    return "outputs", f"the outputs have checksum {first.checksum} in the first run, {second.checksum} in the second"


def _at(values: Sequence[Any], position: int) -> Any:
    return values[position] if position < len(values) else None


def _which(runnable: Sequence[int] | None) -> str:
    return "nobody" if runnable is None else "microbatch " + " or ".join(map(str, runnable))


def _who(index: int | None) -> str:
    return "nobody" if index is None else f"microbatch {index}"


def _went(site: str | None) -> str:
    return "did not end its slice" if site is None else f"yielded at {site!r}" if site else "returned"


def _ended(error: BaseException | None) -> str:
    return "succeeded" if error is None else f"failed with {type(error).__name__}: {error}"


def _words(operation: Operation) -> str:
    accesses = ", ".join(map(str, operation.accesses))
    return f"{operation}{f' ({accesses})' if accesses else ''}"
