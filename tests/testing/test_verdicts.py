"""The verdicts by themselves, on runs that are written down."""

from __future__ import annotations

import pytest

from dbo_greenlet.errors import MicrobatchFailed
from dbo_greenlet.schedule import Schedule
from dbo_greenlet.stream_program import StreamProgram
from dbo_greenlet.testing.checksum import checksum
from dbo_greenlet.testing.errors import InjectedFault
from dbo_greenlet.testing.step_run import StepRun
from dbo_greenlet.testing.verdicts import (
    Finding,
    Reference,
    first_finding,
    laws_kept,
    nothing_left,
    same_outputs,
    succeeded,
)

NOTHING = Reference()


def a_run(decisions=(0, 1), sites=None, **attributes) -> StepRun:
    count = 1 + max(decisions)
    run = StepRun(Schedule(count, tuple(decisions), tuple(sites or ["y"] * (len(decisions) - count) + [""] * count)))
    for name, value in attributes.items():
        setattr(run, name, value)
    return run


class TestOrder:
    @pytest.mark.parametrize(
        ("decisions", "sites"),
        [
            ((0, 0, 1, 1), ("a", "", "a", "")),
            ((0, 1, 0, 1), ("a", "a", "", "")),
            # Microbatch 0 is done after one slice; the other goes on alone.
            ((0, 1, 1, 1), ("", "a", "b", "")),
            ((0, 1, 2, 1, 2, 2), ("", "a", "a", "", "b", "")),
        ],
    )
    def test_law_6_kept(self, decisions, sites):
        assert laws_kept(a_run(decisions, sites), NOTHING) is None

    @pytest.mark.parametrize(
        ("decisions", "sites", "position", "number", "index", "earlier"),
        [
            ((1, 0), ("", ""), 0, 0, 1, 0),
            ((0, 1, 1, 0), ("a", "a", "", ""), 2, 1, 1, 0),
            ((0, 2, 1), ("", "", ""), 1, 0, 2, 1),
            # 1 is done; what counts for 2 is microbatch 0.
            ((0, 1, 2, 2, 0, 2), ("a", "", "a", "b", "", ""), 3, 1, 2, 0),
        ],
    )
    def test_law_6_broken(self, decisions, sites, position, number, index, earlier):
        assert laws_kept(a_run(decisions, sites), NOTHING) == (
            f"law 6: decision {position} ran slice {number} of microbatch {index} before microbatch {earlier} had "
            "completed its own"
        )

    def program(self, *entries) -> StreamProgram:
        """From (kind, microbatch, slice): sends and receives are those of transfers in order."""
        program = StreamProgram()
        received = 0
        for kind, microbatch, number in entries:
            if kind == "send":
                operation = program.send("compute", "D")
                operation.transfer.owner = microbatch
            elif kind == "receive":
                operation = program.receive("compute", program.transfers[received])
                received += 1
            else:
                operation = program.add(kind, "compute", kind)
            operation.microbatch, operation.slice = microbatch, number
        return program

    @pytest.mark.parametrize(
        "entries",
        [
            [("send", 0, 0), ("work", 0, 0), ("work", 1, 0), ("receive", 1, 0), ("work", 0, 1)],
            # By its owner itself, before anything else of its next slice; events are no work.
            [("send", 0, 0), ("wait", 0, 1), ("receive", 0, 1), ("work", 0, 1)],
            # Outside a step nobody yields.
            [("send", None, None), ("work", None, None), ("receive", None, None)],
        ],
    )
    def test_law_4_kept(self, entries):
        assert laws_kept(a_run(program=self.program(*entries)), NOTHING) is None

    @pytest.mark.parametrize("kind", ["work", "send"])
    def test_law_4_broken(self, kind):
        program = self.program(("send", 0, 0), ("work", 1, 0), (kind, 0, 1), ("receive", 0, 1))
        text = laws_kept(a_run(program=program), NOTHING)
        assert text is not None
        assert text.startswith(f"law 4: #2 {kind}")
        assert text.endswith("comes before the receive of its microbatch's transfer 'D', sent in slice 0")


class TestSucceeded:
    def failed(self, cause: BaseException) -> MicrobatchFailed:
        error = MicrobatchFailed(1, 2, 3, "layer0.dispatch")
        error.__cause__ = cause
        return error

    def test_an_error_is_named_with_its_cause(self):
        text = succeeded(a_run(error=self.failed(ValueError("boom"))), NOTHING)
        assert text is not None
        assert text.startswith("the step failed: MicrobatchFailed: ") and text.endswith("ValueError: boom")

    def test_an_injected_one_is_expected_where_something_was_injected(self):
        error = self.failed(InjectedFault("raise@1.3"))
        assert succeeded(a_run(error=error, faults="raise@1.3"), NOTHING) is None
        assert succeeded(a_run(error=error), NOTHING) is not None

    def test_wherever_in_the_chain_it_is(self):
        inner = KeyError("while handling it")
        inner.__context__ = InjectedFault("raise@1.3")
        assert succeeded(a_run(error=self.failed(inner), faults="raise@1.3"), NOTHING) is None
        assert succeeded(a_run(error=self.failed(KeyError("another")), faults="raise@1.3"), NOTHING) is not None


class TestOutputs:
    def judged(self, outputs, wanted) -> str | None:
        run = a_run(outputs=outputs, checksum=checksum(outputs))
        return same_outputs(run, Reference(wanted, checksum(wanted)))

    def test_equal(self):
        assert self.judged([1, "a"], [1, "a"]) is None

    def test_the_bits_count(self):
        assert self.judged([0.0, 1], [-0.0, 1]) is not None
        assert self.judged([1], [True]) is not None

    def test_who_and_what(self):
        assert self.judged([1, 2, 3], [1, 5, 6]) == (
            "the output of microbatch 1, 2 is not bit-equal to the one it gives without interleaving: 2 instead of 5"
        )

    def test_long_outputs_are_cut(self):
        text = self.judged(["x" * 1000], ["y"])
        assert text is not None and len(text) < 250

    def test_another_number(self):
        assert self.judged([1], [1, 2]) == "1 outputs; one after the other the microbatches give 2"

    def test_a_failed_step_has_none(self):
        assert same_outputs(a_run(error=ValueError()), Reference([1], "abc")) is None


def test_what_is_left():
    assert nothing_left(a_run(), NOTHING) is None
    assert nothing_left(a_run(left_behind=["a", "b"]), NOTHING) == "the step left something behind: a; b"


def test_the_first_that_finds_something_speaks():
    run = a_run(left_behind=["a"], error=ValueError("b"))
    assert first_finding(run, NOTHING, [same_outputs, nothing_left, succeeded]) == Finding(
        "nothing_left", "the step left something behind: a"
    )
    assert first_finding(run, NOTHING, [same_outputs]) is None
