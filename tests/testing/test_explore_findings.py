"""What exploration finds: planted bugs, by every verdict, down to the smallest schedule that fails."""

from __future__ import annotations

import itertools
from functools import partial
from threading import get_ident

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dbo_greenlet import dbo_enabled, dbo_switch_to_compute, dbo_yield
from dbo_greenlet.devices.cpu import CpuDevice
from dbo_greenlet.errors import MicrobatchFailed
from dbo_greenlet.step import running
from dbo_greenlet.testing.errors import ExplorationFailed, NondeterminismError
from dbo_greenlet.testing.explore import explore
from dbo_greenlet.testing.faults import Faults
from dbo_greenlet.testing.layer_programs import LayerRun, high_throughput, low_latency
from dbo_greenlet.testing.replay_case import ReplayCase
from dbo_greenlet.testing.step_run import TestBed, run_step
from dbo_greenlet.testing.verdicts import laws_kept, no_hazard, nothing_left, same_outputs, succeeded
from tests.testing.exploring import (
    PROGRAMS,
    SLICES,
    a_schedule,
    an_order,
    fails_in_exactly,
    holds,
    out_of_phase,
    sizes,
    yields,
    yields_and_breaks,
)


class TestPlantedOrderBugs:
    @settings(max_examples=25)
    @given(st.data())
    def test_the_one_schedule_that_fails_is_found(self, data):
        program, layers = data.draw(
            st.sampled_from([("low latency", 1), ("low latency", 2), ("low latency", 3), ("high throughput", 1)])
        )
        slices = (SLICES[program](layers),) * 2
        target = data.draw(a_schedule(slices))
        build = PROGRAMS[program](layers, numerics=False, mutate=fails_in_exactly(target))
        with pytest.raises(ExplorationFailed) as caught:
            explore(build, verdicts=[succeeded, same_outputs], report=None)
        case = ReplayCase.decode(caught.value.replay)
        assert case.schedule.decisions == target
        # In what it says of the size, too.
        preemptions, picked, _ = sizes(slices)[target]
        assert f"has {preemptions} preemption{'s' if preemptions != 1 else ''} and {picked} picked" in str(caught.value)
        # Replayed, it fails; under any other schedule it does not.
        assert "from a stale buffer" in run_step(build, case.policy()).outputs

    @settings(max_examples=25)
    @given(st.data())
    def test_the_first_failure_is_the_smallest(self, data):
        # Fails where slices of different microbatches come in certain orders, as real races do.
        slices = (5, 5)
        orders = data.draw(st.lists(an_order(5), min_size=1, max_size=3))
        failing = [each for each in sizes(slices) if all(holds(order, each) for order in orders)]
        build = yields_and_breaks(4, orders)
        if not failing:
            explore(build, verdicts=[succeeded, same_outputs], report=None)
            return
        with pytest.raises(ExplorationFailed) as caught:
            explore(build, verdicts=[succeeded, same_outputs], report=None)
        assert ReplayCase.decode(caught.value.replay).schedule.decisions == min(failing, key=sizes(slices).get)


class TestByChance:
    @pytest.mark.parametrize("how", ["pct", "random"])
    def test_finds_and_shrinks_to_the_smallest(self, how):
        orders = [((1, 1), (0, 3)), ((0, 2), (1, 0))]
        failing = [each for each in sizes((7, 7)) if all(holds(order, each) for order in orders)]
        with pytest.raises(ExplorationFailed, match="every smaller one passes") as caught:
            explore(yields_and_breaks(6, orders), how=how, verdicts=[same_outputs], report=None)
        assert ReplayCase.decode(caught.value.replay).schedule.decisions == min(failing, key=sizes((7, 7)).get)

    def test_a_model_far_beyond_exhaustion(self):
        # 40 layers of low latency: 10^46 schedules.
        def plant(run: LayerRun) -> None:
            began: list[tuple[int, int]] = []
            experts = run.experts

            def broken(i: int, layer: int) -> None:
                began.append((i, layer))
                if (i, layer) == (0, 30) and (1, 9) in began:
                    raise ValueError("broken")
                experts(i, layer)

            run.experts = broken

        build = low_latency(40, numerics=False, mutate=plant)
        with pytest.raises(ExplorationFailed) as caught:
            explore(build, how="pct", verdicts=[succeeded], shrink_runs=300, report=None)
        # One preemption is enough: where microbatch 0 stands at the experts of layer 30, or before.
        assert "has 1 preemption and" in str(caught.value)
        assert run_step(build, ReplayCase.decode(caught.value.replay).policy()).failed == 0

    def test_nothing_found_says_how_many_were_different(self):
        found = explore(yields(4), how="random", schedules=400, report=None)
        assert found.schedules == 400
        assert 20 < found.distinct <= 42
        assert found.space == 42
        assert not found.complete


class TestNondeterminism:
    def test_before_anything_is_explored(self):
        counter = itertools.count()

        def build(bed: TestBed):
            def entry() -> None:
                dbo_yield(f"y{next(counter)}")

            return [entry] * bed.count

        with pytest.raises(NondeterminismError, match="yielded at 'y2' in the first run, and yielded at 'y4'"):
            explore(build, strict=False, report=None)

    def test_in_a_schedule_that_the_first_runs_do_not_have(self):
        # Only where microbatch 1 begins before microbatch 0 ends is there a counter that goes on from run to run.
        counter = itertools.count()

        def build(bed: TestBed):
            begun: set[int] = set()

            def entry(i: int) -> None:
                begun.add(i)
                dbo_yield("a")
                dbo_yield("b" if i or 1 not in begun else f"b{next(counter)}")
                dbo_yield("c")

            return [partial(entry, i) for i in range(bed.count)]

        with pytest.raises(NondeterminismError, match="in an earlier run of the same decisions"):
            explore(build, strict=False, report=None)

    def test_a_failure_that_does_not_come_again(self):
        failures = iter(["boom"])

        def build(bed: TestBed):
            order: list[int] = []

            def entry(i: int) -> None:
                order.append(i)
                dbo_yield("a")
                if order == [0, 1] and i == 0 and (why := next(failures, None)):
                    raise ValueError(why)

            return [partial(entry, i) for i in range(bed.count)]

        with pytest.raises(NondeterminismError, match="a schedule failed and, run again, did not: .*boom"):
            explore(build, how="random", report=None)


class TestWhatIsFound:
    def found(self, build, **options) -> str:
        with pytest.raises(ExplorationFailed) as caught:
            explore(build, report=None, **options)
        assert caught.value.replay in str(caught.value)
        return str(caught.value)

    @pytest.mark.parametrize("options", [{}, {"count": 3, "make_device": CpuDevice, "strict": False}])
    @pytest.mark.parametrize("faults", [None, "late@0.0:500us"])
    def test_how_to_run_it_again_is_code_that_does(self, options, faults):
        def build(bed: TestBed):
            began: list[int] = []

            def entry(i: int) -> None:
                began.append(i)
                dbo_yield("a")
                if i == 0 and 1 in began and dbo_enabled():
                    raise ValueError("broken")

            return [partial(entry, i) for i in range(bed.count)]

        text = self.found(build, faults=faults and Faults.parse(faults), verdicts=[succeeded], **options)
        code = text.splitlines()[-1].removeprefix("Run it again: ")
        names = {"run_step": run_step, "ReplayCase": ReplayCase, "Faults": Faults, "build": build}
        if options:
            names["make_device"] = CpuDevice
        run = eval(code, names)
        assert run.failed == 0 and "ValueError: broken" in str(run.error)
        assert (run.schedule.count, run.faults) == (options.get("count", 2), faults or "")
        assert ("strict=False" in code, "make_device" in code) == (bool(options), bool(options))

    def test_an_error_with_the_schedule_and_how_to_run_it_again(self):
        assert self.found(low_latency(2, numerics=False, mutate=out_of_phase), verdicts=[succeeded]) == "\n".join(
            [
                "schedule 3, in the order of their size, fails: the step failed: MicrobatchFailed: Microbatch 0 of 2 "
                "failed in slice 3 after the yield at 'layer1.dispatch': ValueError: broken",
                "",
                "The smallest schedule that fails by this verdict (succeeded; every smaller one passes) has 1 "
                "preemption and 3 picked decisions; behind them each microbatch goes on as long as it may:",
                "    0  microbatch 0  from its start to layer0.dispatch",
                "    1  microbatch 0  from layer0.dispatch to layer0.combine",
                "    2  microbatch 1  from its start to layer0.dispatch  (switch)",
                "       then microbatch 1 x 1, 0 x 2, in the last of which the step fails",
                "",
                "Run it again: run_step(build, ReplayCase.decode('dbor1:2;001100?;layer0.dispatch,layer0.combine,"
                "layer1.dispatch|=;;12a64ff5').policy())",
            ]
        )

    def test_the_steps_error_is_the_cause(self):
        with pytest.raises(ExplorationFailed) as caught:
            explore(low_latency(2, numerics=False, mutate=out_of_phase), report=None)
        assert isinstance(caught.value.__cause__, MicrobatchFailed)
        assert str(caught.value.__cause__.__cause__) == "broken"

    def test_a_failure_in_turn_is_found_before_the_space_is_known(self):
        lines: list[str] = []

        def build(bed: TestBed):
            def entry(i: int) -> None:
                dbo_yield("a")
                if i == 1 and dbo_enabled():
                    raise ValueError("always")

            return [partial(entry, i) for i in range(bed.count)]

        with pytest.raises(ExplorationFailed, match="has 0 preemptions and 0 picked decisions"):
            explore(build, report=lines.append)
        assert lines == ["exploring nothing: the microbatches fail in turn, without any preemption"]

    def test_outputs_that_depend_on_the_schedule(self):
        def build(bed: TestBed):
            shared = [0]

            def entry(i: int) -> int:
                shared[0] = i + 1
                dbo_yield("a")
                return shared[0]

            return [partial(entry, i) for i in range(bed.count)]

        text = self.found(build)
        assert "the output of microbatch 0 is not bit-equal to the one it gives without interleaving: 2 instead" in text
        assert "(same_outputs; every smaller one passes) has 1 preemption" in text

    def test_a_timetable_where_the_sites_allow_one(self):
        text = self.found(low_latency(1, numerics=False, mutate=fails_in_exactly((0, 0, 1, 0, 1, 1))))
        assert "Comp: |" in text and "Order: A0_0, A1_0, D_0 send" in text

    def test_a_microbatch_that_is_kept(self):
        kept = []

        def build(bed: TestBed):
            order: list[int] = []

            def entry(i: int) -> None:
                order.append(i)
                dbo_yield("a")
                if order == [0, 1] and i == 0:
                    kept.append(running[get_ident()])

            return [partial(entry, i) for i in range(bed.count)]

        text = self.found(build)
        assert "the step left something behind: microbatch 0 is still referenced" in text

    def test_a_transfer_that_is_never_received(self):
        def forgets(run: LayerRun) -> None:
            due, times = run.leave, []

            def leave(sent, accesses, site):
                times.append(site)
                if times[:2] == ["layer0.dispatch"] * 2 and len(times) == 2:
                    return dbo_yield(site)
                return due(sent, accesses, site)

            run.leave = leave

        text = self.found(low_latency(1, mutate=forgets), verdicts=[nothing_left])
        assert "microbatch 1's transfer 'D' was never received" in text

    def test_a_receive_that_comes_too_late(self):
        # The hook is not registered; the receive runs one yield later, behind the experts that need it.
        def late(run: LayerRun) -> None:
            def leave(sent, accesses, site):
                dbo_yield(site)
                run.device.work("too early", 1.0)
                run.receive(sent, accesses)

            run.leave = leave

        text = self.found(low_latency(1, numerics=False, mutate=late), verdicts=[laws_kept])
        assert "law 4: #" in text
        assert "comes before the receive of its microbatch's transfer 'D', sent in slice 0" in text

    @pytest.mark.parametrize(("verdict", "what"), [(no_hazard, "workspace"), (same_outputs, "bit-equal")])
    def test_a_workspace_that_is_used_across_a_yield(self, verdict, what):
        # A1 reads after the yield what A0 left in the workspace that all share.
        def plant(run: LayerRun) -> None:
            work, plan = run.device.work, run.plan

            def attention(i: int, layer: int) -> None:
                work("A0", 1.0, accesses=plan.a0[i][layer])
                dbo_yield(f"layer{layer}.between")
                work("A1", 1.0, accesses=plan.a1[i][layer])

            run.attention = attention

        text = self.found(low_latency(1, mutate=plant), verdicts=[verdict])
        assert what in text
        # One switch between the two is enough, and the least.
        assert "has 1 preemption and 2 picked decisions" in text
        assert "    1  microbatch 1  from its start to layer0.between  (switch)" in text

    def test_a_wait_that_is_missing_in_every_schedule(self):
        def plant(run: LayerRun) -> None:
            run.back_to_compute = dbo_switch_to_compute

        text = self.found(high_throughput(1, numerics=False, mutate=plant), verdicts=[no_hazard])
        assert "the first schedule fails: " in text
        assert "has 0 preemptions and 0 picked decisions" in text

    def test_by_a_verdict_of_ones_own(self):
        def no_more_than_two_switches(run, reference):
            decisions = run.schedule.decisions
            switches = sum(a != b for a, b in itertools.pairwise(decisions))
            return f"{switches} switches" if switches > 2 else None

        text = self.found(yields(3), verdicts=[no_more_than_two_switches])
        assert "fails: 3 switches" in text
        assert "(no_more_than_two_switches; every smaller one passes)" in text


class TestFaults:
    @pytest.mark.parametrize(
        ("fault", "schedules"),
        [
            ("raise@0.0", 1),
            ("raise@0.1", 2),
            ("raise@1.0", 3),
            ("raise@1.1", 5),
            ("signal@0.1:INT", 2),
            ("fail@0.1", 4),
        ],
    )
    def test_an_injected_fault_is_no_finding(self, fault, schedules):
        build = low_latency(1, numerics=False)
        found = explore(build, faults=Faults.parse(fault), report=None, verdicts=[succeeded, nothing_left])
        # What would come behind the fault makes no difference: as many as there are ways up to it, of those without.
        assert (found.schedules, found.distinct, found.space) == (schedules, schedules, 5)
        assert found.slices == (3, 3)

    def test_one_that_strikes_the_reference_too(self):
        def build(bed: TestBed):
            def entry(i: int) -> int:
                dbo_yield("a")
                if bed.faults is not None:
                    bed.faults.allocating(i)
                return i

            return [partial(entry, i) for i in range(bed.count)]

        assert explore(build, faults=Faults.parse("oom@1.0"), report=None).schedules == 2

    def test_an_error_of_the_steps_own_outside_a_step(self):
        def build(bed: TestBed):
            def entry() -> None:
                raise ZeroDivisionError("not in a step either")

            return [entry] * bed.count

        for faults in (None, Faults.parse("raise@0.0")):
            with pytest.raises(ZeroDivisionError):
                explore(build, faults=faults, report=None)

    def test_what_the_fault_brings_to_light_is(self):
        def swallows(run: LayerRun) -> None:
            experts = run.experts

            def careless(i: int, layer: int) -> None:
                experts(i, layer)
                if run.bed.faults is not None and run.bed.faults.struck:
                    raise KeyError("not prepared for this")

            run.experts = careless

        with pytest.raises(ExplorationFailed) as caught:
            explore(
                low_latency(1, numerics=False, mutate=swallows),
                faults=Faults.parse("late@0.0:500us"),
                verdicts=[succeeded],
                report=None,
            )
        assert "KeyError: 'not prepared for this'" in str(caught.value)
        assert ReplayCase.decode(caught.value.replay).faults == "late@0.0:500us"
