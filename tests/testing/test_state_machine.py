"""The state machine on both carriers and a real transport; it finds planted bugs and prints them as code that runs."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any, ClassVar

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis.stateful import run_state_machine_as_test

from dbo_greenlet.schedule import Schedule
from dbo_greenlet.step import Microbatch
from dbo_greenlet.testing.errors import Finding
from dbo_greenlet.testing.sometimes import declare
from dbo_greenlet.testing.state_machine import OverlapMachine
from dbo_greenlet.testing.step_programs import TOKENS, Parts, check_programs
from dbo_greenlet.testing.step_run import TestBed
from dbo_greenlet.testing.strategies import HARMLESS_TO_PYTEST, choices, policies, policy_of, programs, schedules

declare("state machine: a step succeeded", "state machine: a step failed", "state machine: microbatches took turns")


class Greenlets(OverlapMachine):
    """Interrupts among the faults, too."""

    fault_kinds: ClassVar[Any] = (*HARMLESS_TO_PYTEST, "signal")


class Threads(OverlapMachine):
    carrier = "thread"


class OverTheLoopback(OverlapMachine):
    """The real all-to-all of one rank, with rows of one number."""

    def make_wire(self, bed: TestBed) -> Any:
        return LoopbackWire()

    def make_device(self) -> Any:
        from dbo_greenlet.devices import CpuDevice

        return CpuDevice()


class LoopbackWire:
    def __init__(self) -> None:
        from dbo_greenlet.all2all.loopback import Loopback

        self._transport = Loopback(TOKENS)

    def dispatch(self, microbatch: int, payload: Any) -> Parts:
        import torch

        hidden = torch.tensor(payload, dtype=torch.float32).view(-1, 1)
        each_its_own = torch.arange(len(payload)).view(-1, 1)
        sent = self._transport.dispatch_send(hidden, each_its_own, torch.ones(len(payload), 1))
        return Parts(sent.finish_dispatch, lambda: _numbers(sent.tokens().hidden), sent)

    def combine(self, microbatch: int, payload: Any, dispatched: Parts) -> Parts:
        import torch

        sent = dispatched.handle
        sent.combine_send(torch.tensor(payload, dtype=torch.float32).view(-1, 1))
        return Parts(sent.finish_combine, lambda: _numbers(sent.combined()))


def _numbers(rows: Any) -> list[int]:
    return [int(number) for number in rows.flatten().tolist()]


def run(machine: type[OverlapMachine], examples: int, **options: Any) -> None:
    run_state_machine_as_test(
        machine, settings=settings(max_examples=examples, stateful_step_count=25, deadline=None, **options)
    )


def test_greenlets() -> None:
    run(Greenlets, 120)


def test_threads() -> None:
    run(Threads, 25)


def test_over_the_loopback() -> None:
    pytest.importorskip("torch")
    run(OverTheLoopback, 40)


def test_a_class_is_a_test_by_itself() -> None:
    """What the module tells users to write."""
    assert issubclass(Greenlets.TestCase, __import__("unittest").TestCase)


# -- planted bugs ------------------------------------------------------------------------------------------------------


def leftovers_forgotten(self: Microbatch) -> None:
    """Receives that nobody ran when the entry returned are lost."""


def newest_first(self: Microbatch) -> None:
    while self.outstanding:
        self.outstanding[-1].run(None)


def inbox_forgotten(self: Microbatch) -> None:
    """Nobody receives for a sibling."""


def receives_kept(self: Microbatch) -> None:
    """A step that fails runs its receives, instead of dropping them."""
    while self.outstanding:
        self.outstanding[0].run(None)


def nobody_is_last(self: Any) -> list[int]:
    """Law 6 forgotten: microbatches may overtake."""
    return [microbatch.index for microbatch in self.microbatches if not microbatch.done]


@pytest.mark.parametrize(
    ("where", "name", "bug"),
    [
        ("Microbatch", "run_leftovers", leftovers_forgotten),
        ("Microbatch", "run_outstanding", newest_first),
        ("Microbatch", "run_inbox", inbox_forgotten),
        ("Microbatch", "drop_receives", receives_kept),
        ("Step", "runnable", nobody_is_last),
    ],
)
def test_a_bug_in_the_scheduler_is_found(monkeypatch: pytest.MonkeyPatch, where: str, name: str, bug: Any) -> None:
    import dbo_greenlet.step

    monkeypatch.setattr(getattr(dbo_greenlet.step, where), name, bug)
    with pytest.raises(Finding, match="did not run as the model says|left something behind"):
        run(OverlapMachine, 400, phases=[Phase.generate], database=None, suppress_health_check=list(HealthCheck))


def python(*arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    return subprocess.run(
        [sys.executable, *arguments], capture_output=True, text=True, timeout=240, env=environment, check=False
    )


def test_a_failing_example_prints_as_code_that_runs(tmp_path: Path) -> None:
    script = Path(__file__).with_name("fail_state_machine.py")
    found = python(str(script))
    assert found.returncode == 1
    printed = re.search(r"^ *(state = Forgetful\(\)\n(?: *state\.\w+\(.*\)\n)+)", found.stdout + found.stderr, re.M)
    assert printed is not None, found.stdout + found.stderr
    lines = [line.strip() for line in printed[1].splitlines()]
    # Shrunk to what it takes: two sends in one slice, and the yield after which they are read (a layer has both).
    assert sum(line.startswith(("state.dispatch", "state.layer")) for line in lines) == 2, lines
    assert len(lines) <= 6, lines
    code = tmp_path / "found.py"
    code.write_text("\n".join(["from fail_state_machine import Forgetful", *lines]) + "\n")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(script.parent), *(p for p in sys.path if p)])}
    again = subprocess.run(
        [sys.executable, str(code)], capture_output=True, text=True, timeout=120, env=environment, check=False
    )
    assert again.returncode == 1
    message = re.search(r"Finding: (the step did not run as the model says: .*)", again.stderr)
    assert message is not None and message[1] in found.stdout + found.stderr, again.stderr


# -- strategies --------------------------------------------------------------------------------------------------------


@given(schedules())
def test_schedules_keep_law_6_and_survive_their_string(schedule: Schedule) -> None:
    completed = [0] * schedule.count
    slices = [schedule.decisions.count(i) for i in range(schedule.count)]
    for index, site in zip(schedule.decisions, schedule.sites, strict=True):
        for earlier in range(index):
            assert completed[earlier] > completed[index] or completed[earlier] == slices[earlier]
        completed[index] += 1
        assert (site == "") is (completed[index] == slices[index])
    assert completed == slices and all(slices)
    assert Schedule.decode(schedule.encode()).decisions == schedule.decisions


@given(schedules(sites=False))
def test_schedules_without_sites(schedule: Schedule) -> None:
    assert schedule.sites == ()


@given(programs(even=True, failing=False), policies())
@settings(max_examples=60)
def test_even_programs_pass_the_same_sites_under_every_policy(drawn: Any, policy: Any) -> None:
    run = check_programs(drawn, policy_of(policy))
    assert run.succeeded
    sites = {
        tuple(s for i, s in zip(run.schedule.decisions, run.schedule.sites, strict=True) if i == microbatch)
        for microbatch in range(len(drawn))
    }
    assert len(sites) == 1


@given(choices())
def test_choices_print_as_code(drawn: list[int]) -> None:
    assert eval(repr(policy_of(drawn)), {"Chosen": type(policy_of(drawn))}).choices == tuple(drawn)
