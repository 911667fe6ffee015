"""The model and the failing tests of the small suites that the plugin is tried on."""

from __future__ import annotations

MODEL = """
    from functools import partial

    from dbo_greenlet import dbo_yield
    from dbo_greenlet.testing import InjectedFault, low_latency

    LAYERS = 2

    def build(bed):
        log = []

        def forward(i):
            log.append(i)
            for layer in range(LAYERS):
                dbo_yield(f"layer{layer}.dispatch")
                log.append(i)
                dbo_yield(f"layer{layer}.combine")
                log.append(i)
            return "".join(map(str, log))

        return [partial(forward, i) for i in range(bed.count)]
"""


FAILING = {
    "an assertion": (
        """
        from model import build

        def test_it(dbo_run):
            assert dbo_run(build, "random:3").outputs[1] == "nothing"
        """,
        "nothing",
    ),
    "a microbatch that raises": (
        """
        from model import build

        def breaking(bed):
            first, second = build(bed)

            def raising():
                second()
                raise ValueError("in microbatch 1")

            return [first, raising]

        def test_it(dbo_run):
            run = dbo_run(breaking, "phase_offset:2")
            if run.error:
                raise run.error
        """,
        "in microbatch 1",
    ),
    "a fault": (
        """
        from model import build

        def test_it(dbo_run):
            run = dbo_run(build, "random:1", faults="raise@1.2+raise@0.99")
            assert run.succeeded, run.error
        """,
        "raise@1.2",
    ),
    "the third of several steps": (
        """
        from model import build

        def test_it(dbo_run):
            for number in range(5):
                run = dbo_run(build, f"random:{number}")
                assert run.schedule.decisions[:5] != (0, 0, 1, 0, 1), f"step {number}"
        """,
        "AssertionError: step ",
    ),
    "an exploration": (
        """
        from dbo_greenlet.testing import high_throughput
        from dbo_greenlet import dbo_switch_to_compute

        def forgets_to_wait(run):
            run.back_to_compute = dbo_switch_to_compute

        def test_it(dbo_explore):
            dbo_explore(high_throughput(1, mutate=forgets_to_wait))
        """,
        "is not bit-equal to the one it gives without interleaving",
    ),
    "an exploration under a fault": (
        """
        from dbo_greenlet.testing import Faults
        from model import build

        def only_in_order(run, reference):
            return "out of order" if run.schedule.decisions[:4] == (0, 1, 0, 1) and run.faults else None

        def test_it(dbo_explore):
            dbo_explore(build, verdicts=[only_in_order], faults=Faults.parse("late@0.1:50us"))
        """,
        "out of order",
    ),
    "an exploration of a step that raises": (
        """
        from model import build

        def raising(bed):
            began = []

            def noted(i, entry):
                began.append(i)
                value = entry()
                if began == [0, 1] and i == 0:
                    raise ValueError("microbatch 1 had begun")
                return value

            return [lambda i=i, entry=entry: noted(i, entry) for i, entry in enumerate(build(bed))]

        def only_success(run, reference):
            return str(run.error) if run.error else None

        def test_it(dbo_explore):
            dbo_explore(raising, verdicts=[only_success])
        """,
        "microbatch 1 had begun",
    ),
    "an exploration where no memory is left": (
        """
        from dbo_greenlet import dbo_yield
        from dbo_greenlet.testing import Faults

        def build(bed):
            def entry(i):
                dbo_yield("a")
                if bed.faults is not None:
                    bed.faults.allocating(i)
                return i

            return [lambda i=i: entry(i) for i in range(bed.count)]

        def never_this(run, reference):
            return "microbatch 1 first" if run.schedule.decisions[:2] == (0, 1) else None

        def test_it(dbo_explore):
            dbo_explore(build, verdicts=[never_this], faults=Faults.parse("oom@1.0"))
        """,
        "microbatch 1 first",
    ),
    "hypothesis": (
        """
        from hypothesis import HealthCheck, given, settings, strategies as st
        from model import build

        @settings(suppress_health_check=list(HealthCheck), database=None)
        @given(st.integers(0, 1000))
        def test_it(dbo_run, seed):
            assert dbo_run(build, f"random:{seed}").schedule.decisions[:4] != (0, 0, 1, 0)
        """,
        "assert (0, 0, 1, 0) != (0, 0, 1, 0)",
    ),
    "a fixture": (
        """
        import pytest
        from model import build

        @pytest.fixture
        def step(dbo_run):
            run = dbo_run(build, "in_turn")
            assert run.outputs == ["no", "such"]
            return run

        def test_it(step):
            pass
        """,
        "such",
    ),
}


def file_of(kind: str) -> str:
    return f"test_{kind.replace(' ', '_')}.py"
