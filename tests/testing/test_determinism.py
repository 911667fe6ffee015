"""The nondeterminism detector: each thing in which two runs can differ is found, and named first where it is first."""

from __future__ import annotations

import itertools
from functools import partial

import pytest

from dbo_greenlet import RoundRobin, dbo_enabled, dbo_yield
from dbo_greenlet.policies import SeededRandom
from dbo_greenlet.stream_program import Access
from dbo_greenlet.testing.determinism import check_deterministic, compare_runs
from dbo_greenlet.testing.errors import Finding, NondeterminismError
from dbo_greenlet.testing.faults import Faults
from dbo_greenlet.testing.layer_programs import high_throughput, low_latency
from dbo_greenlet.testing.step_run import TestBed, run_step


def differing(build, policy=None, **options) -> str:
    with pytest.raises(NondeterminismError) as caught:
        check_deterministic(build, policy, **options)
    return str(caught.value)


def entries(function):
    """A step whose microbatches call `function(i, bed)`."""
    return lambda bed: [partial(function, i, bed) for i in range(bed.count)]


class TestDeterministicSteps:
    @pytest.mark.parametrize("program", [low_latency, high_throughput])
    @pytest.mark.parametrize("count", [1, 2, 3])
    def test_the_documented_layers(self, program, count):
        run = check_deterministic(program(2), SeededRandom(3), count=count, runs=3)
        assert run.succeeded
        assert len(run.runnable) == len(run.schedule)

    def test_on_threads(self):
        check_deterministic(low_latency(1), carrier="thread")

    def test_with_faults(self):
        run = check_deterministic(low_latency(2), faults=Faults.parse("raise@1.1"))
        assert not run.succeeded

    def test_both_runs_failing_alike_is_no_difference(self):
        def fails(i: int, bed: TestBed) -> None:
            dbo_yield("a")
            if i:
                raise ValueError("as always")

        assert check_deterministic(entries(fails)).error is not None

    def test_a_nondeterministic_seed_shows_only_where_it_is_used(self):
        # Objects that are other ones in each run are no difference, as long as only their identity is.
        def fresh(i: int, bed: TestBed) -> str:
            buffer = bed.device.new_buffer(f"buffer {i}")
            bed.device.work("write", 1.0, writes=[buffer])
            return str(buffer)

        check_deterministic(entries(fresh))


class TestWhatDiffers:
    def test_a_site(self):
        counter = itertools.count()

        def step(i: int, bed: TestBed) -> None:
            dbo_yield("a")
            dbo_yield(f"b{next(counter) // 2}")

        text = differing(entries(step))
        assert text.startswith(
            "two runs of the same step differ: at decision 2 microbatch 0 yielded at 'b0' in the first run, and "
            "yielded at 'b1' in the second. Usual causes: a branch on something that is no input of the step: the clock"
        )

    def test_the_number_of_slices(self):
        lengths = itertools.chain([1, 1], itertools.repeat(3))

        def step(i: int, bed: TestBed) -> None:
            for _ in range(next(lengths)):
                dbo_yield("a")

        text = differing(entries(step), strict=False)
        assert "at decision 2 microbatch 0 returned in the first run, and yielded at 'a' in the second" in text

    def test_who_could_run(self):
        # Follows from sites and decisions on this scheduler; on another carrier it need not.
        one, two = (run_step(entries(lambda i, bed: dbo_yield("a")), watch=True) for _ in range(2))
        assert one.runnable == [(0,), (0, 1), (0,), (1,)]
        two.runnable[1] = (0,)
        text = compare_runs(one, two)
        assert text is not None
        assert "at decision 1 the first run could go on with microbatch 0 or 1, the second with microbatch 0" in text

    def test_a_decision(self):
        class ByTurns:
            """Each step another first choice where there is one: a policy that breaks law 5."""

            name = "by turns"
            steps = itertools.count()

            def start(self, step):
                turn = next(self.steps)
                return lambda: step.runnable()[-1 if turn else 0]

        text = differing(entries(lambda i, bed: dbo_yield("a")), ByTurns())
        assert "at decision 1 the first run went on with microbatch 0, the second with microbatch 1" in text

    def test_an_operation(self):
        first = iter([True])

        def step(i: int, bed: TestBed) -> None:
            bed.device.work("always", 1.0)
            if next(first, False):
                bed.device.work("fill the cache", 1.0)
            dbo_yield("a")
            bed.device.work("last", 1.0)

        text = differing(entries(step))
        assert "the first run enqueued #1 work 'fill the cache' on compute, microbatch 0 (slice 0, " in text
        assert "the second #1 work 'always' on compute, microbatch 1" in text
        assert "Usual causes: a cache or a buffer that only the first run had to fill" in text

    def test_an_operation_more_at_the_end(self):
        runs = itertools.count()

        def build(bed: TestBed):
            def after() -> None:
                if next(runs):
                    bed.device.work("late", 1.0)

            from dbo_greenlet.testing.step_run import StepUnderTest

            return StepUnderTest([lambda: None] * bed.count, after=after)

        assert (
            "the second run enqueued #0 work 'late' on compute, outside the microbatches, and the first"
            in differing(build)
        )

    def test_what_an_operation_touches(self):
        runs = itertools.count()

        def build(bed: TestBed):
            buffers = [bed.device.new_buffer("even"), bed.device.new_buffer("odd")]
            turn = next(runs)

            def step(i: int) -> None:
                bed.device.work("first", 1.0, writes=[buffers[0]])
                bed.device.work("then", 1.0, reads=[buffers[turn % 2]])

            return [partial(step, i) for i in range(bed.count)]

        text = differing(build)
        assert "'then' on compute, microbatch 0 (slice 0, before its first yield) (reads even)" in text
        assert "(reads odd)" in text

    def test_how_much_of_it_an_operation_touches(self):
        runs = itertools.count()

        def forward(i, bed):
            rows = Access("rows", True, 0, 8, partial=next(runs) >= 2)
            bed.device.work("scatter", 1.0, writes=[rows])

        assert "writes some of rows[0:8]" in differing(entries(forward))

    def test_the_stream(self):
        runs = itertools.count()

        def build(bed: TestBed):
            turn = next(runs)

            def step() -> None:
                if turn and dbo_enabled():
                    bed.device.set_stream(bed.device.new_stream("other"))
                bed.device.work("work", 1.0)

            return [step] * bed.count

        text = differing(build)
        assert "on compute, microbatch 0" in text and "on other, microbatch 0" in text

    def test_the_error(self):
        words = iter(["first", "second"])

        def step(i: int, bed: TestBed) -> None:
            dbo_yield("a")
            raise ValueError(next(words))

        text = differing(entries(step))
        assert "the first run failed with MicrobatchFailed:" in text
        assert "ValueError: first, the second failed with" in text

    def test_an_error_in_one_only(self):
        first = iter([True])

        def step(i: int, bed: TestBed) -> None:
            if i and next(first, False):
                raise ValueError("once")

        assert "at decision 1 the first run" in differing(entries(step))

    def test_the_outputs(self):
        state = itertools.count()

        def step(i: int, bed: TestBed) -> int:
            dbo_yield("a")
            return next(state) if i else 7

        text = differing(entries(step))
        assert "the output of microbatch 1 has checksum" in text
        assert "Usual causes: random numbers without a seed, memory that is read before it is written" in text

    def test_in_a_later_run_only(self):
        runs = itertools.count()

        def build(bed: TestBed):
            number = next(runs)
            return [lambda: number if number == 3 else 0] * bed.count

        check_deterministic(build, runs=3)
        runs = itertools.count()
        assert "the output of microbatch 0" in differing(build, runs=4)


def test_it_is_a_finding():
    assert issubclass(NondeterminismError, Finding)


def test_runs_are_compared_without_a_program_and_without_watching():
    build = entries(lambda i, bed: dbo_yield("a"))
    one, two = run_step(build, RoundRobin()), run_step(build, RoundRobin())
    assert compare_runs(one, two) is None
    one.program = None
    assert compare_runs(one, two) is None
