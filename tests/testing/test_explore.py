"""Exploration: what is explored, in which order, what is said of it, and the same each time."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from functools import partial

import pytest

from dbo_greenlet import dbo_yield
from dbo_greenlet.devices.virtual import VirtualDevice
from dbo_greenlet.errors import ConfigurationError
from dbo_greenlet.testing.errors import ExplorationFailed, SpaceTooLargeError
from dbo_greenlet.testing.explore import explore
from dbo_greenlet.testing.interleavings import count_interleavings, interleavings
from dbo_greenlet.testing.layer_programs import Costs, high_throughput, low_latency
from dbo_greenlet.testing.step_run import TestBed
from dbo_greenlet.testing.verdicts import DEFAULT, laws_kept, nothing_left, succeeded
from tests.testing.exploring import (
    PROGRAMS,
    all_by_recursion,
    out_of_phase,
    schedules_in,
    sizes,
    yields,
)


class TestWhatIsExplored:
    @pytest.mark.parametrize("number", range(6))
    def test_every_schedule_once_in_the_order_of_its_size(self, number):
        log: list[list[int]] = []
        found = explore(yields(number, log), verdicts=[succeeded, laws_kept], report=None)
        slices = (number + 1, number + 1)
        wanted = sorted(interleavings(slices), key=sizes(slices).get)
        assert schedules_in(log) == wanted
        assert found.schedules == found.distinct == found.space == len(wanted)
        assert found.slices == slices
        assert found.space_is_exact and found.complete

    @pytest.mark.parametrize("count", [1, 2, 3, 4])
    def test_any_number_of_microbatches(self, count):
        found = explore(yields(2), count=count, report=None)
        assert found.schedules == found.distinct == count_interleavings((3,) * count)

    @pytest.mark.parametrize("bound", [0, 1, 2, 3])
    def test_within_a_bound_on_preemptions(self, bound):
        log: list[list[int]] = []
        found = explore(yields(4, log), preemptions=bound, report=None)
        assert sorted(schedules_in(log)) == list(interleavings((5, 5), bound))
        assert found.schedules == found.space == count_interleavings((5, 5), bound)
        assert not found.complete

    @pytest.mark.parametrize("layers", [1, 2, 3])
    def test_layers_of_low_latency(self, layers):
        found = explore(low_latency(layers, numerics=False), verdicts=[succeeded, laws_kept, nothing_left], report=None)
        assert found.schedules == {1: 5, 2: 42, 3: 429}[layers]

    @pytest.mark.parametrize("layers", [1, 2])
    def test_layers_of_high_throughput(self, layers):
        verdicts = [succeeded, laws_kept, nothing_left]
        found = explore(high_throughput(layers, numerics=False), verdicts=verdicts, report=None)
        assert found.schedules == {1: 14, 2: 429}[layers]

    @pytest.mark.parametrize(
        ("program", "layers", "count", "schedules"),
        [
            ("low latency", 1, 2, 5),
            ("low latency", 2, 2, 42),
            ("low latency", 1, 3, 42),
            ("high throughput", 1, 2, 14),
            ("high throughput", 1, 3, 462),
        ],
    )
    def test_correct_layers_pass_every_verdict_in_every_schedule(self, program, layers, count, schedules):
        found = explore(PROGRAMS[program](layers), count=count, verdicts=[*DEFAULT, laws_kept], report=None)
        assert found.schedules == schedules

    def test_with_other_times(self):
        # Launches cost time, and transfers take longer than all compute: other moments, the same verdicts.
        device = partial(VirtualDevice, launch=3.0, record=1.0, wait=1.0)
        build = low_latency(2, costs=Costs(dispatch=500.0, combine=700.0, receive=5.0))
        assert explore(build, make_device=device, report=None).schedules == 42

    @pytest.mark.slow
    def test_three_layers_of_high_throughput(self):
        found = explore(high_throughput(3, numerics=False), verdicts=[succeeded, laws_kept], report=None)
        assert found.schedules == 16_796

    def test_a_step_whose_slices_depend_on_the_schedule(self):
        # Whoever comes first to the second slice has three more: no number of slices is known beforehand.
        def build(bed: TestBed):
            first: list[int] = []

            def entry(i: int) -> None:
                dbo_yield("a")
                first.append(i)
                for k in range(2 if first[0] == i else 0):
                    dbo_yield(f"more{k}")
                if len(first) == 1:
                    dbo_yield("alone so far")

            return [partial(entry, i) for i in range(bed.count)]

        seen: list[tuple[int, ...]] = []

        def note(run, reference):
            seen.append(run.schedule.decisions)

        found = explore(build, count=3, verdicts=[succeeded, note], strict=False, report=None)
        wanted = set(all_by_recursion(build, 3))
        assert sorted(set(seen)) == sorted(wanted)
        assert found.schedules == found.distinct == len(wanted)
        assert len({len(each) for each in wanted}) > 1

    def test_states_are_counted(self):
        found = explore(yields(4), report=None)
        # All (a, b) with 0 <= b <= a <= 5: law 6 keeps microbatch 1 from being ahead.
        assert found.states == 21
        assert found.decisions == 42 * 10


class TestTheReport:
    def report(self, build, **options) -> list[str]:
        lines: list[str] = []
        explore(build, verdicts=[succeeded], report=lines.append, **options)
        return lines

    def test_the_count_is_said_before_the_first_run(self):
        log: list[list[int]] = []
        runs: list[int] = []
        explore(yields(4, log), report=lambda line: runs.append(len(log)))
        assert runs == [3]
        assert self.report(yields(4)) == ["exploring all 42 schedules of 2 microbatches with 5 slices each"]

    def test_with_a_bound(self):
        lines = self.report(yields(4), preemptions=1)
        assert lines == ["exploring all 5 schedules with at most 1 preemption of 2 microbatches with 5 slices each"]

    def test_by_chance(self):
        (line,) = self.report(yields(12), how="pct", schedules=3, depth=3, seed=8)
        assert line == (
            "exploring 3 schedules by chance (pct, depth 3, seed 8) of 742,900 of 2 microbatches with 13 slices each"
        )

    @pytest.mark.parametrize(("number", "count", "size"), [(30, 2, "about 10^16"), (120, 36, "about 10^5992")])
    def test_of_a_space_beyond_writing_out(self, number, count, size):
        (line,) = self.report(yields(number), how="random", schedules=1, count=count)
        assert line == (
            f"exploring 1 schedule by chance (random, seed 0) of {size} of {count} microbatches with {number + 1} "
            "slices each"
        )
        with pytest.raises(SpaceTooLargeError, match=f"there are {re.escape(size)} schedules of .* Use preemptions="):
            explore(yields(number), count=count, report=None)

    def test_it_is_printed(self, capsys):
        explore(yields(1))
        assert capsys.readouterr().out == "exploring all 2 schedules of 2 microbatches with 2 slices each\n"

    def test_an_exploration_as_text(self):
        assert str(explore(yields(4), report=None)) == (
            "exhaustive: 42 schedules run, 42 different of 42, 21 states, 420 decisions, no finding"
        )
        assert str(explore(yields(4), how="random", schedules=5, seed=3, report=None)).startswith(
            "random, seed 3: 5 schedules run, "
        )
        assert str(explore(yields(1), preemptions=0, report=None)).startswith(
            "exhaustive, at most 0 preemptions: 1 schedule run, 1 different of 1,"
        )


class TestTooLarge:
    def test_the_count_and_a_bound_are_named_before_anything_runs(self):
        log: list[list[int]] = []
        with pytest.raises(SpaceTooLargeError) as caught:
            explore(yields(12, log), most=1000, report=None)
        bound = max(b for b in range(30) if count_interleavings((13, 13), b) <= 1000)
        number = count_interleavings((13, 13), bound)
        assert str(caught.value) == (
            f"there are 742,900 schedules of 2 microbatches with 13 slices each, and most=1,000. Use "
            f"preemptions={bound}, which leaves {number:,}, raise most, explore fewer layers, or explore by chance: "
            "how='pct'"
        )
        assert len(log) == 3
        assert explore(yields(12), most=1000, preemptions=bound, report=None).schedules == number

    def test_it_is_a_mistake_in_what_was_asked(self):
        with pytest.raises(ConfigurationError):
            explore(yields(40), report=None)

    def test_of_a_bound_that_leaves_too_many(self):
        with pytest.raises(SpaceTooLargeError, match="schedules with at most 5 preemptions of .* Use preemptions=1,"):
            explore(yields(12), preemptions=5, most=20, report=None)

    def test_a_step_that_grows_under_another_schedule(self):
        def build(bed: TestBed):
            begun: set[int] = set()
            ended: set[int] = set()

            def entry(i: int) -> None:
                begun.add(i)
                dbo_yield("a")
                for k in range(6 if len(begun) == 2 and not ended else 0):
                    dbo_yield(f"more{k}")
                ended.add(i)

            return [partial(entry, i) for i in range(bed.count)]

        assert explore(build, most=2, preemptions=0, strict=False, report=None).schedules == 1
        with pytest.raises(SpaceTooLargeError, match="the number of slices depends on the schedule"):
            explore(build, most=2, strict=False, report=None)


class TestSameSeedSameExploration:
    @pytest.mark.parametrize("how", ["exhaustive", "pct", "random"])
    def test_twice(self, how):
        first, second = (explore(yields(6), how=how, schedules=50, seed=4, report=None) for _ in range(2))
        assert first == second

    @pytest.mark.parametrize("how", ["pct", "random"])
    def test_another_seed_is_another_exploration(self, how):
        first, second = (explore(yields(6), how=how, schedules=50, seed=seed, report=None) for seed in (4, 5))
        assert first.fingerprint != second.fingerprint

    def test_the_sites_count(self):
        def other(bed: TestBed):
            def entry() -> None:
                dbo_yield("elsewhere")

            return [entry] * bed.count

        assert explore(yields(1), report=None).fingerprint != explore(other, report=None).fingerprint

    def test_the_failure_is_the_same_one(self):
        def found() -> str:
            with pytest.raises(ExplorationFailed) as caught:
                explore(low_latency(2, mutate=out_of_phase), how="random", seed=1, verdicts=[succeeded], report=None)
            return str(caught.value)

        assert found() == found()


def test_neither_torch_nor_a_test_framework_is_imported():
    done = subprocess.run(
        [
            sys.executable,
            "-c",
            "import sys; from dbo_greenlet.testing.explore import explore; "
            "from dbo_greenlet.testing.layer_programs import low_latency; print(explore(low_latency(1))); "
            "print({'torch', 'hypothesis', 'pytest', 'numpy'} & set(sys.modules))",
        ],
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(each for each in sys.path if each)},
    )
    assert done.stdout.splitlines() == [
        "exploring all 5 schedules of 2 microbatches with 3 slices each",
        "exhaustive: 5 schedules run, 5 different of 5, 10 states, 30 decisions, no finding",
        "set()",
    ], done.stderr


class TestBadOptions:
    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"how": "all"}, "how='all': use one of exhaustive, pct, random"),
            ({"how": "pct", "preemptions": 2}, "only an exhaustive exploration has a bound"),
            ({"preemptions": -1}, "preemptions=-1: use a whole number, 0 or more"),
            ({"most": 0}, "most=0: use a whole number, 1 or more"),
            ({"schedules": 0.5}, "schedules=0.5: use a whole number, 1 or more"),
            ({"how": "pct", "depth": 0}, "depth=0: use a whole number, 1 or more"),
            ({"shrink_runs": -1}, "shrink_runs=-1: use a whole number, 0 or more"),
        ],
    )
    def test_are_refused_before_anything_runs(self, options, message):
        log: list[list[int]] = []
        with pytest.raises(ConfigurationError) as caught:
            explore(yields(1, log), **options)
        assert message in str(caught.value)
        assert not log
