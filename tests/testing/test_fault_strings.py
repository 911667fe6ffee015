"""Fault strings: what is read, written, drawn and refused."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dbo_greenlet import RoundRobin, dbo_yield
from dbo_greenlet.errors import ConfigurationError
from dbo_greenlet.testing.errors import FaultStringError
from dbo_greenlet.testing.faults import KINDS, Fault, Faults
from dbo_greenlet.testing.replay_case import ReplayCase
from dbo_greenlet.testing.step_run import run_step
from dbo_greenlet.testing.strategies import faults

EXAMPLES = [example for _, example, _ in KINDS.values()]


def test_every_example_is_read_and_written_as_it_is() -> None:
    assert [str(Faults.parse(example)) for example in EXAMPLES] == EXAMPLES
    text = "+".join(EXAMPLES)
    read = Faults.parse(text)
    assert (str(read), [each.kind for each in read.faults]) == (text, list(KINDS))
    assert eval(repr(read)) == read and hash(read) == hash(Faults.parse(text))
    assert str(read.of_ranks) == "(<fault die@rank1:step3>, <fault stall@rank1:step3:2s>)"
    assert read.interrupts and not Faults.parse("raise@0.0").interrupts


def test_no_fault_is_the_empty_string() -> None:
    assert str(Faults()) == "" and Faults.parse(" ") == Faults() and not Faults.parse("")
    assert Faults() != "" and Faults.parse("empty@0") != Faults()


def test_fields_are_what_the_string_says() -> None:
    assert Faults.parse("late@12.7:50us").faults == (Fault("late", 12, 7, nanoseconds=50_000),)
    assert Faults.parse("signal@1.2:TERM").faults == (Fault("signal", 1, 2, signal="TERM"),)
    (fault,) = Faults.parse("stall@rank1:step3.2:1.5s").faults
    assert (fault.rank, fault.step, fault.collective, fault.seconds) == (1, 3, 2, 1.5)
    assert (fault.microbatch, fault.number, fault.microseconds) == (None, None, 1.5e6)


@pytest.mark.parametrize(
    ("written", "canonical"),
    [
        ("late@0.1:0.5ms", "late@0.1:500us"),
        ("late@0.1:1000us", "late@0.1:1ms"),
        ("late@0.1:0.001us", "late@0.1:1ns"),
        ("late@0.1:0us", "late@0.1:0s"),
        ("raise@01.003", "raise@1.3"),
        ("die@rank0:step1.0", "die@rank0:step1"),
        ("raise@1.3+raise@1.3+empty@0", "raise@1.3+empty@0"),
        (" raise@1.3 ", "raise@1.3"),
    ],
)
def test_one_form_of_each(written: str, canonical: str) -> None:
    assert str(Faults.parse(written)) == canonical


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("raise", "'raise' in 'raise' is of no known kind; write one of these: raise@1.3, late@0.1:50us"),
        ("explode@1.3", "'explode@1.3' .* is of no known kind"),
        ("raise@1.3+", "'' in 'raise@1.3\\+' is of no known kind"),
        ("raise@1", "it is written like raise@1.3 \\(microbatch 1 raises at its yield 3\\)"),
        ("raise@1.3:INT", "cannot be read"),
        ("raise@-1.3", "cannot be read"),
        ("raise@1.٣", "cannot be read"),
        ("late@0.1", "it is written like late@0.1:50us"),
        ("late@0.1:50", "cannot be read"),
        ("late@0.1:0.0001us", "a time is a whole number of nanoseconds"),
        ("signal@0.1:NONE", "there is no signal SIGNONE here"),
        ("signal@0.1:int", "cannot be read"),
        ("die@1.3", "it is written like die@rank1:step3"),
        ("empty@0.1", "it is written like empty@1"),
        ("raise@1.9999999999", "cannot be read"),
        ("RAISE@1.3", "no known kind"),
    ],
)
def test_what_cannot_be_read_is_named(text: str, says: str) -> None:
    with pytest.raises(FaultStringError, match=says):
        Faults.parse(text)


@given(faults(count=4, most=5, kinds=("raise", "late", "early", "reorder", "fail", "empty", "oom", "signal")))
def test_all_faults_survive_their_string_and_a_replay_string(drawn: Faults) -> None:
    assert Faults.parse(str(drawn)) == drawn
    run = run_step(lambda bed: [lambda: dbo_yield("a")] * 2, RoundRobin())
    run.faults = str(drawn)
    assert Faults.parse(ReplayCase.decode(ReplayCase.of(run).encode()).faults) == drawn


@given(st.text(max_size=12))
def test_any_text_is_read_or_refused(text: str) -> None:
    try:
        Faults.parse(text)
    except FaultStringError as error:
        assert text.strip().split("+")[0] in str(error) or repr(text)[1:-1] in str(error)


def test_a_seed_gives_the_same_faults() -> None:
    drawn = [str(Faults.random(seed, count=3, most=3)) for seed in range(300)]
    assert drawn == [str(Faults.random(seed, count=3, most=3)) for seed in range(300)]
    kinds = {fault.kind for text in drawn for fault in Faults.parse(text).faults}
    assert kinds == set(KINDS) - {"die", "stall"}
    assert {len(Faults.parse(text).faults) for text in drawn} == {1, 2, 3}
    only = {f for seed in range(50) for f in Faults.random(seed, kinds=["raise"], count=1, yields=2).faults}
    assert {str(fault) for fault in only} == {"raise@0.0", "raise@0.1"}


@pytest.mark.parametrize("wrong", [{"count": 0}, {"yields": 0}, {"most": 0}, {"kinds": ["die"]}, {"kinds": []}])
def test_faults_that_cannot_be_drawn(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError):
        Faults.random(1, **wrong)


def test_a_fault_of_a_microbatch_that_is_not_there() -> None:
    with pytest.raises(FaultStringError, match="'raise@2.0' is for microbatch 2, and the step has 2: 0 to 1"):
        run_step(lambda bed: [lambda: None] * 2, faults=Faults.parse("raise@2.0"))


def test_faults_and_marks_need_neither_torch_nor_hypothesis_nor_pytest() -> None:
    modules = ("faults", "faulty_microbatch", "rank_faults", "sometimes", "step_programs", "step_model")
    names = ", ".join(f"dbo_greenlet.testing.{name}" for name in modules)
    done = subprocess.run(
        [sys.executable, "-c", f"import sys, {names}; print({{'torch', 'hypothesis', 'pytest'}} & set(sys.modules))"],
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)},
        check=False,
    )
    assert (done.returncode, done.stdout.strip()) == (0, "set()"), done.stderr
