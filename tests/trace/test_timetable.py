from __future__ import annotations

import re
import textwrap
from collections import Counter
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dbo_greenlet import Scheduler, Scripted
from dbo_greenlet.errors import ConfigurationError
from dbo_greenlet.schedule import Schedule
from dbo_greenlet.trace import (
    RecvRecord,
    SliceRecord,
    StepRecord,
    StepRecorder,
    StepTrace,
    parse_layers,
    render_order,
    render_step,
)
from dbo_greenlet.trace.notation import order
from dbo_greenlet.trace.step_text import LEGEND
from dbo_greenlet.trace.timetable import blocks
from dbo_greenlet.yields import dbo_maybe_run_recv_hook, dbo_register_recv_hook, dbo_yield

OFFSET = [0, 0] + [1, 0] * 5 + [1, 1]  # microbatch 0 two yields ahead, three layers


@pytest.fixture
def draw(moe_schedule) -> Callable[..., str]:
    def render(decisions, experts_in, **options) -> str:
        return render_order(order(*moe_schedule(decisions, experts_in)), **options)

    return render


def picture(text: str) -> str:
    return textwrap.dedent(text).strip("\n")


def test_a_phase_offset_of_two_yields_is_vllms_timetable_literally(draw) -> None:
    # The order lines are broken where vLLM's documentation breaks them; its drawing is one dash short in the last cell.
    assert draw(OFFSET, [0, 1, 2], layers=[1], width=71) == picture("""
        layer 1 (microbatch 0 one layer ahead)
        Comp: |-A0_0-A1_0-||-MLP_1-||-S_1-MLP_0-||-S_0-A0_1-A1_1-|
        Comm: |----D_1----||--D_0--||----C_1----||------C_0------|
        Order: D_1 send, A0_0, A1_0, D_1 recv, D_0 send, MLP_1, D_0 recv,
               C_1 send, S_1, MLP_0, C_1 recv, C_0 send, S_0, A0_1, A1_1,
               C_0 recv
    """)


def test_round_robin_in_steady_state(draw) -> None:
    assert draw([0, 1] * 7, [0, 1, 2], layers=[1], width=71) == picture("""
        layer 1
        Comp: |-A0_1-A1_1-||-MLP_0-||-S_0-MLP_1-||-S_1-A0_0-A1_0-|
        Comm: |----D_0----||--D_1--||----C_0----||------C_1------|
        Order: D_0 send, A0_1, A1_1, D_0 recv, D_1 send, MLP_0, D_1 recv,
               C_0 send, S_0, MLP_1, C_0 recv, C_1 send, S_1, A0_0, A1_0,
               C_1 recv
    """)


def test_a_whole_step_draws_equal_layers_once(draw) -> None:
    assert draw([0, 1] * 51, range(1, 26)) == picture("""
        layer 1
        Comp: |-in_0-A0_0-A1_0-||-in_1-A0_1-A1_1-||-MLP_0-||-S_0-MLP_1-||-S_1-A0_0-A1_0-|
        Comm:                   |------D_0-------||--D_1--||----C_0----||------C_1------|
        Order: in_0, A0_0, A1_0, D_0 send, in_1, A0_1, A1_1, D_0 recv, D_1 send, MLP_0, D_1 recv, C_0 send,
               S_0, MLP_1, C_0 recv, C_1 send, S_1, A0_0, A1_0, C_1 recv

        layers 2 to 24
        Comp: |-A0_1-A1_1-||-MLP_0-||-S_0-MLP_1-||-S_1-A0_0-A1_0-|
        Comm: |----D_0----||--D_1--||----C_0----||------C_1------|
        Order: D_0 send, A0_1, A1_1, D_0 recv, D_1 send, MLP_0, D_1 recv, C_0 send, S_0, MLP_1, C_0 recv,
               C_1 send, S_1, A0_0, A1_0, C_1 recv

        layer 25
        Comp: |-A0_1-A1_1-||-MLP_0-||-S_0-MLP_1-||-S_1-out_0-||-out_1-|
        Comm: |----D_0----||--D_1--||----C_0----||----C_1----|
        Order: D_0 send, A0_1, A1_1, D_0 recv, D_1 send, MLP_0, D_1 recv, C_0 send, S_0, MLP_1, C_0 recv,
               C_1 send, S_1, out_0, C_1 recv, out_1
    """)


def test_the_phase_offset_step_from_its_first_slice_to_its_last(draw) -> None:
    assert draw(OFFSET, [0, 1, 2]) == picture("""
        layer 0 (microbatch 0 in layer 0 and 1)
        Comp: |-A0_0-A1_0-|         |-MLP_0-||-S_0-A0_1-A1_1-||-A0_0-A1_0-||-MLP_1-||-S_1-MLP_0-|
        Comm:              |--D_0--|         |------C_0------||----D_1----||--D_0--||----C_1----|
        Comp: |-S_0-A0_1-A1_1-|
        Comm: |------C_0------|
        Order: A0_0, A1_0, D_0 send, D_0 recv*, MLP_0, C_0 send, S_0, A0_1, A1_1, C_0 recv, D_1 send, A0_0,
               A1_0, D_1 recv, D_0 send, MLP_1, D_0 recv, C_1 send, S_1, MLP_0, C_1 recv, C_0 send, S_0,
               A0_1, A1_1, C_0 recv

        layer 1 (microbatch 0 one layer ahead)
        Comp: |-A0_0-A1_0-||-MLP_1-||-S_1-MLP_0-||-S_0-A0_1-A1_1-|
        Comm: |----D_1----||--D_0--||----C_1----||------C_0------|
        Order: D_1 send, A0_0, A1_0, D_1 recv, D_0 send, MLP_1, D_0 recv, C_1 send, S_1, MLP_0, C_1 recv,
               C_0 send, S_0, A0_1, A1_1, C_0 recv

        layer 2
        Comp: |-out_0-||-MLP_1-||-S_1-||-out_1-|
        Comm: |--D_1--|         |-C_1-|
        Order: D_1 send, out_0, D_1 recv, MLP_1, C_1 send, S_1, C_1 recv*, out_1
    """)


def test_one_microbatch_hides_nothing(draw) -> None:
    assert draw([0] * 3, [0]) == picture("""
        layer 0
        Comp: |-A0_0-A1_0-|         |-MLP_0-||-S_0-||-out_0-|
        Comm:              |--D_0--|         |-C_0-|
        Order: A0_0, A1_0, D_0 send, D_0 recv*, MLP_0, C_0 send, S_0, C_0 recv*, out_0
    """)


def test_four_microbatches(draw) -> None:
    assert draw([0, 1, 2, 3] * 7, [0, 1, 2], layers=[1]) == picture("""
        layer 1
        Comp: |-A0_1-A1_1-||-A0_2-A1_2-||-A0_3-A1_3-||-MLP_0-||-S_0-MLP_1-||-S_1-MLP_2-||-S_2-MLP_3-|
        Comm: |----D_0----||----D_1----||----D_2----||--D_3--||----C_0----||----C_1----||----C_2----|
        Comp: |-S_3-A0_0-A1_0-|
        Comm: |------C_3------|
        Order: D_0 send, A0_1, A1_1, D_0 recv, D_1 send, A0_2, A1_2, D_1 recv, D_2 send, A0_3, A1_3,
               D_2 recv, D_3 send, MLP_0, D_3 recv, C_0 send, S_0, MLP_1, C_0 recv, C_1 send, S_1, MLP_2,
               C_1 recv, C_2 send, S_2, MLP_3, C_2 recv, C_3 send, S_3, A0_0, A1_0, C_3 recv
    """)


def test_windows_that_overlap_take_more_comm_lines_and_go_on_in_the_next_row(draw) -> None:
    assert draw([0, 0, 1, 0, 2, 1, 0, 2, 1, 0, 2, 1, 1, 2, 2], [0, 2]) == picture("""
        layer 0 (microbatch 0 in layer 0 and 2)
        Comp: |-A0_0-A1_0-|         |-MLP_0-||-S_0-A0_1-A1_1-||-L1_0-A0_0-A1_0-||-A0_2-A1_2-||-MLP_1-|
        Comm:              |--D_0--|         |------C_0------||-------------D_1-------------||--D_2---
                                                                                |--------D_0---------|
        Comp: |-S_1-MLP_0-||-S_0-MLP_2-||-S_2-L1_1-A0_1-A1_1-|
        Comm: -----D_2----||---------------C_0---------------|
              |----------C_1-----------||--------C_2----------
        Order: A0_0, A1_0, D_0 send, D_0 recv*, MLP_0, C_0 send, S_0, A0_1, A1_1, C_0 recv, D_1 send, L1_0,
               A0_0, A1_0, D_0 send, A0_2, A1_2, D_1 recv, D_2 send, MLP_1, D_0 recv, C_1 send, S_1, MLP_0,
               D_2 recv, C_0 send, S_0, MLP_2, C_1 recv, C_2 send, S_2, L1_1, A0_1, A1_1, C_0 recv

        layer 2
        Comp: |-out_0-||-L1_2-A0_2-A1_2-||-MLP_1-||-S_1-||-out_1-||-MLP_2-||-S_2-||-out_2-|
        Comm: ---C_2--|                  |----------D_2----------|         |-C_2-|
              |-----------D_1-----------|         |-C_1-|
        Order: D_1 send, out_0, C_2 recv, L1_2, A0_2, A1_2, D_1 recv, D_2 send, MLP_1, C_1 send, S_1,
               C_1 recv*, out_1, D_2 recv*, MLP_2, C_2 send, S_2, C_2 recv*, out_2
    """)


def test_microbatches_one_after_the_other_are_cut_by_the_layer_of_each_send(draw) -> None:
    in_turn = [0] * 7 + [1] * 7
    assert draw(in_turn, [0, 1, 2], layers=[1]) == picture("""
        layer 1
        Comp:          |-MLP_0-||-S_0-||-A0_0-A1_0-|
        Comm: |--D_0--|         |-C_0-|
        Order: D_0 send, D_0 recv*, MLP_0, C_0 send, S_0, C_0 recv*, A0_0, A1_0

        layer 1
        Comp:          |-MLP_1-||-S_1-||-A0_1-A1_1-|
        Comm: |--D_1--|         |-C_1-|
        Order: D_1 send, D_1 recv*, MLP_1, C_1 send, S_1, C_1 recv*, A0_1, A1_1
    """)


def test_a_failed_step_says_what_was_never_received(draw) -> None:
    assert draw([0, 1, 0], [0, 1]) == picture("""
        layer 0
        Comp: |-A0_0-A1_0-||-A0_1-A1_1-||-MLP_0-||-S_0-|
        Comm:              |----D_0----||--D_1--||-C_0--
        Order: A0_0, A1_0, D_0 send, A0_1, A1_1, D_0 recv, D_1 send, MLP_0, D_1 recv, C_0 send, S_0

        sent and never received: C_0 of layer 0
    """)


@settings(deadline=None)
@given(st.data())
def test_every_item_is_in_one_block_and_every_row_fits(data: st.DataObject) -> None:
    count, layers = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 3))
    left = [2 * layers + 1] * count
    decisions: list[int] = []
    sites: list[str] = []
    stop = data.draw(st.integers(1, sum(left)))
    while any(left) and len(decisions) < stop:
        index = data.draw(
            st.sampled_from(
                [i for i in range(count) if left[i] and (i == 0 or left[i - 1] < left[i] or not left[i - 1])]
            )
        )
        done = 2 * layers + 1 - left[index]
        decisions.append(index)
        sites.append("" if left[index] == 1 else f"layer{done // 2}.{('dispatch', 'combine')[done % 2]}")
        left[index] -= 1
    items = order(decisions, sites)
    assert [item for block in blocks(items) for item in block.items] == items
    width = data.draw(st.integers(40, 120))
    text = render_order(items, width=width)
    assert all(len(line) <= width for line in text.splitlines() if line.startswith(("Comp:", "Comm:", "      ")))
    # Each window is drawn at least once, and compute as often as it ran in the blocks drawn.
    drawn = Counter(
        re.findall(r"[DC]_\d", "\n".join(x for x in text.splitlines() if re.match(r"Comm:|      [|\- ]", x)))
    )
    assert drawn.keys() >= {item.label for item in items if item.action == "recv"}


def test_layers_that_are_not_there(draw) -> None:
    with pytest.raises(ConfigurationError) as caught:
        draw([0, 1] * 5, [1, 2], layers=range(5, 7))
    assert str(caught.value) == "--layers 5-6: none of them is in this step, which has 1, 2"


@pytest.mark.parametrize(("text", "layers"), [("3", range(3, 4)), ("3-5", range(3, 6)), (" 0 - 0 ", range(1))])
def test_layers_as_typed(text: str, layers: range) -> None:
    assert parse_layers(text) == layers


@pytest.mark.parametrize("text", ["", "a", "5-3", "3-", "-3", "1-2-3", "1,2", "1.5", "100-99999999999"])
def test_layers_mistyped(text: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        parse_layers(text)
    assert str(caught.value) == f"--layers {text}: give one layer (3) or a range with both ends (3-5)"


# -- recorded steps ----------------------------------------------------------------------------------------------------


def recorded(entries, decisions, record: StepRecord | None = None, label: str = "dbo") -> StepTrace:
    watch = StepRecorder()
    Scheduler(Scripted(decisions), instruments=[watch]).run(entries)
    records = watch.records(step=3, rank=1, run=label)
    return StepTrace(
        label,
        3,
        1,
        record,
        [r for r in records if isinstance(r, SliceRecord)],
        [r for r in records if isinstance(r, RecvRecord)],
    )


def one_layer() -> None:
    for stage in ("dispatch", "combine"):
        dbo_maybe_run_recv_hook()
        dbo_register_recv_hook(lambda: None)
        dbo_yield(f"layer0.{stage}")


def test_a_recorded_step() -> None:
    record = StepRecord(
        3, 1, "dbo", 24, 32, True, "split", slices=[[0, 16, 0, 4], [16, 24, 4, 6]], hash="0123456789abcdef"
    )
    step = recorded([one_layer] * 2, [0, 1, 0, 1, 0, 1], record)
    assert render_step(step, width=400) == picture(f"""
        step 3, rank 1, run dbo: 24 tokens, 2 microbatches, 6 slices, schedule hash 0123456789abcdef

        layer 0
        Comp: |-A0_0-A1_0-||-A0_1-A1_1-||-MLP_0-||-S_0-MLP_1-||-S_1-out_0-||-out_1-|
        Comm:              |----D_0----||--D_1--||----C_0----||----C_1----|
        Order: A0_0, A1_0, D_0 send, A0_1, A1_1, D_0 recv, D_1 send, MLP_0, D_1 recv, C_0 send, S_0, MLP_1, C_0 recv, C_1 send, S_1, out_0, C_1 recv, out_1

        {LEGEND}
    """)  # noqa: E501
    assert render_step(step, layers=[0]) == render_step(step)
    assert all(len(line) <= 100 for line in render_step(step).splitlines())


def test_recorded_receives_are_drawn_as_they_ran_and_not_as_they_should_have(moe_schedule) -> None:
    decisions, sites = moe_schedule([0, 1, 0, 1, 0, 1], [0])
    times = [(10.0 * n, 10.0 * n + 5) for n in range(6)]
    seen = {0: 0, 1: 0}
    slices = []
    for (begin, end), index, site in zip(times, decisions, sites, strict=True):
        slices.append(SliceRecord(0, 0, "dbo", index, seen[index], site, begin, end))
        seen[index] += 1
    receives = [
        RecvRecord(0, 0, "dbo", 0, "layer0.dispatch", 4.0, None, 20.5, 2, 0),
        RecvRecord(0, 0, "dbo", 1, "layer0.dispatch", 14.0, 0, 21.0, 2, 1),
        RecvRecord(0, 0, "dbo", 0, "layer0.combine", 24.0, None, 40.0, 4, 2),
        RecvRecord(0, 0, "dbo", 1, "layer0.combine", 34.0, None, None, None, 3),
    ]
    assert render_step(StepTrace("dbo", 0, 0, None, slices, receives), width=400) == picture(f"""
        step 0, rank 0, run dbo: 2 microbatches, 6 slices

        layer 0
        Comp: |-A0_0-A1_0-||-A0_1-A1_1-||-MLP_0-||-S_0-MLP_1-||-S_1-||-out_0-out_1-|
        Comm:              |----D_0----||--D_1--||-------C_0--------|
                                                              |--------C_1----------
        Order: A0_0, A1_0, D_0 send, A0_1, A1_1, D_1 send, D_0 recv*, MLP_0, D_1 recv, C_0 send, S_0, MLP_1, C_1 send, S_1, C_0 recv*, out_0, out_1

        sent and never received: C_1 of layer 0

        {LEGEND}
    """)  # noqa: E501


def test_a_step_that_was_not_split() -> None:
    record = StepRecord(3, 0, "dbo", 24, 24, False, "below the decode threshold")
    assert render_step(StepTrace("dbo", 3, 0, record)) == picture("""
        step 3, rank 0, run dbo: 24 tokens
        not split: below the decode threshold
    """)


def test_slices_that_are_not_in_the_trace_yet() -> None:
    schedule = Schedule(2, (0, 1) * 12).encode()
    record = StepRecord(3, 0, "dbo", 24, 24, True, "thresholds met", schedule=schedule, yields=[11, 11])
    assert render_step(StepTrace("dbo", 3, 0, record), width=60) == picture("""
        step 3, rank 0, run dbo: 24 tokens
        split: thresholds met; its slices are not in the trace (yet)
        microbatches in the order in which they ran: 0 1 0 1 0 1 0 1
          0 1 0 1 0 1 0 1 0 1 0 1 0 1 0 1
    """)
    partial = StepTrace("dbo", 3, 0, record, [SliceRecord(3, 0, "dbo", 0, 0, "layer0.dispatch", 0.0, 1.0)])
    assert "only 1 of its 24 slices are in the trace (yet)" in render_step(partial).splitlines()
    unknown = render_step(StepTrace("dbo", 3, 0))
    assert unknown == "step 3, rank 0, run dbo\nits record and its slices are not in the trace (yet)"


def test_a_schedule_that_is_mistyped_is_said_and_no_error() -> None:
    record = StepRecord(3, 0, "dbo", 24, 24, True, "", schedule="dbo1:2:01:000000")
    text = render_step(StepTrace("dbo", 3, 0, record))
    assert "its schedule cannot be read: schedule string is truncated or mistyped" in text


def test_other_sites_are_listed_slice_by_slice_with_the_reason() -> None:
    def entry() -> None:
        dbo_maybe_run_recv_hook()
        dbo_register_recv_hook(lambda: None)
        dbo_yield("all_reduce")
        dbo_yield("layer0.dispatch")

    assert render_step(recorded([entry] * 2, [0, 1, 0, 1, 0, 1])) == picture("""
        step 3, rank 1, run dbo: 2 microbatches, 6 slices
        no timetable: its sites are not dispatch and combine labels (the first other one is 'all_reduce'); its slices, in the order in which they ran:
            0  microbatch 0  slice   0  to all_reduce
            1  microbatch 1  slice   0  to all_reduce, ran the receive of microbatch 0 (all_reduce)
            2  microbatch 0  slice   1  to layer0.dispatch
            3  microbatch 1  slice   1  to layer0.dispatch, ran its own receive (all_reduce)
            4  microbatch 0  slice   2  returned
            5  microbatch 1  slice   2  returned
    """)  # noqa: E501


def test_a_recorded_step_that_failed() -> None:
    record = StepRecord(0, 0, "dbo", 8, 8, True, "split", error="MicrobatchFailed: boom")
    slices = [
        SliceRecord(0, 0, "dbo", 0, 0, "layer0.dispatch", 0.0, 1.0),
        SliceRecord(0, 0, "dbo", 1, 0, "", 1.0, 2.0, failed=True),
    ]
    text = render_step(StepTrace("dbo", 0, 0, record, slices, []))
    assert text.splitlines()[:7] == [
        "step 0, rank 0, run dbo: 8 tokens, 2 microbatches, 1 slices",
        "failed: MicrobatchFailed: boom",
        "microbatch 1 failed in its slice 0",
        "",
        "layer 0",
        "Comp: |-A0_0-A1_0-|",
        "Comm:",
    ]
