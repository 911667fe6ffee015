"""What a run of the command says and leaves: two ranks, split and unsplit, from the prompts to the trace."""

from __future__ import annotations

import json
from collections import Counter

import pytest

from dbo_greenlet.batching import RankVote, VoteSettings, decide
from dbo_greenlet.job.report import is_right
from dbo_greenlet.schedule import Schedule
from dbo_greenlet.trace import read_trace
from tests.job.command import in_process, one_sentence
from tests.job.conftest import ARRIVALS, Recorded

SITES = [f"layer{layer}.{stage}" for layer in (1, 2, 3, 4) for stage in ("dispatch", "combine")]


def test_every_prompt_is_answered_and_scored(recorded: Recorded) -> None:
    report = recorded.report
    assert [each["arrival"] for each in report["answers"]] == ARRIVALS
    right = [is_right(each["text"], each["answer"]) for each in report["answers"]]
    # The checkpoint solves three problems of four; of twelve it cannot miss more than half by rounding.
    assert sum(right) >= 6
    rows = {row["run"]: row for row in report["table"]}
    assert rows["eager, DBO"]["exact_match"] == pytest.approx(sum(right) / 12)
    assert rows["eager, DBO"]["stderr"] == pytest.approx((sum(right) / 12 * (1 - sum(right) / 12) / 12) ** 0.5)
    assert rows["eager, no DBO"]["n"] == 12
    for graph in ("graph, no DBO", "graph, DBO"):
        assert rows[graph]["exact_match"] is None and "needs a CUDA device" in rows[graph]["needs"]


def test_the_tokens_are_those_of_the_unsplit_run(recorded: Recorded) -> None:
    tokens = recorded.report["tokens"]
    assert tokens["unexplained"] == 0
    assert tokens["equal"] is (tokens["differing"] == [])
    assert tokens["generated"] > 12 * 5


def test_steps_are_split_and_not_split_with_reasons(recorded: Recorded) -> None:
    steps = recorded.report["steps"]
    assert steps["total"] == steps["split"] + sum(steps["not_split"].values())
    assert {"split-prefill", "split-decode"} <= set(steps["split_reasons"])
    # Requests 10 and 11 come alone, one on each rank, when the others are long done.
    assert {"rank-idle", "too-few-tokens", "below-decode-threshold"} & set(steps["not_split"])
    for reason in [*steps["split_reasons"], *steps["not_split"]]:
        assert steps["explanations"][reason].startswith("split into 2:" if reason.startswith("split") else "not split:")


def test_yields_and_hashes_are_those_of_round_robin_over_four_moe_layers(recorded: Recorded) -> None:
    assert recorded.report["yields"]["per_step"] == [16]
    assert recorded.report["yields"]["per_microbatch"] == [8]
    sites = tuple(site for each in [*SITES, ""] for site in (each, each))
    expected = Schedule(2, (0, 1) * 9, sites).hash
    assert recorded.report["schedule_hash"] == {
        "agreed": True,
        "apart": [],
        "distinct": [expected],
        "ranks": 2,
        "steps": recorded.report["steps"]["split"],
    }


def test_hand_offs_are_measured_for_both_carriers_on_the_same_steps(recorded: Recorded) -> None:
    handoffs = recorded.report["hand_off_us"]
    assert handoffs["steps"] >= 4
    # Of 16 yields of a split step, the first one starts the sibling and the last one ends it.
    assert handoffs["greenlet"]["measured"] == handoffs["thread"]["measured"] == 15 * 2 * handoffs["steps"]
    assert handoffs["greenlet"]["median"] > 0


def test_the_timetable_is_in_the_notation(recorded: Recorded) -> None:
    lines = recorded.report["timetable"].splitlines()
    assert any(line.startswith("Comp: |-in_0-A0_0-A1_0-|") for line in lines)
    assert any(line.startswith("Comm: ") and "D_0" in line for line in lines)
    assert any(line.startswith("Order: ") and "D_0 send" in line for line in lines)


def test_the_trace_holds_the_job(recorded: Recorded) -> None:
    trace = read_trace(recorded.trace)
    assert (trace.ranks, trace.runs, trace.torn, trace.unknown_kinds) == (
        [0, 1],
        ["dbo", "unsplit", "thread"],
        False,
        set(),
    )
    assert sorted(prompt.request for prompt in trace.prompts) == list(range(12))
    assert {prompt.rank for prompt in trace.prompts if prompt.request % 2} == {1}
    assert [trace.ends[rank].ok for rank in (0, 1)] == [True, True]
    assert len(trace.header.model["sha256"]) == 64
    assert trace.header.settings["decode_threshold"] == 4


def test_every_step_in_the_trace_is_complete_and_follows_from_its_votes(recorded: Recorded) -> None:
    trace = read_trace(recorded.trace)
    settings = VoteSettings(2, 4, 16)
    for (run, number, rank), step in trace.steps.items():
        record = step.record
        assert record is not None
        decision = decide([RankVote.from_row(row) for row in record.votes], settings)
        assert len(record.output) == 16 and len(record.sampled) == len(record.requests)
        if run == "unsplit":
            assert not record.split
            continue
        assert (record.split, record.reason) == (decision.split, decision.reason)
        assert record.padded == decision.tokens_on(rank)
        assert record.votes == trace.steps[run, number, 1 - rank].record.votes
        assert record.hash == trace.steps[run, number, 1 - rank].record.hash
        if record.split:
            assert [s[1] - s[0] for s in record.slices] == [record.padded // 2, record.padded - record.padded // 2]
            assert Schedule(2, step.decisions, step.sites).hash == record.hash
            assert Schedule.decode(record.schedule).decisions == step.decisions
            assert len(step.receives) == 16 and all(receive.at is not None for receive in step.receives)
    assert Counter(r for _, _, r in trace.steps) == {0: len(trace.steps) // 2, 1: len(trace.steps) // 2}


def test_a_split_step_tells_who_chose_where_it_ran_and_what_it_sent(recorded: Recorded) -> None:
    trace = read_trace(recorded.trace)
    split = [step for step in trace.steps.values() if step.record.split]
    assert {(step.record.policy, step.record.seed) for step in split} == {("round_robin", None)}
    for step in split:
        assert {each.stream for each in step.slices} == {"compute"}
        assert [each.layer for each in step.slices[::2]] == [1, 1, 2, 2, 3, 3, 4, 4, None]
        # A microbatch of a few tokens may have none for the other rank's experts.
        sent = [window.bytes for window in step.receives]
        assert sum(sent) > 0 and all(size % 4 == 0 for size in sent)
        # Nothing switches streams in low latency; only the runner joins them, behind the step.
        assert [(op.op, op.ubatch, op.stream, op.of) for op in step.ops] == [
            ("record", None, "comm", None),
            ("wait", None, "compute", 0),
        ]
    unsplit = [step for step in trace.steps.values() if not step.record.split]
    assert {(step.record.policy, len(step.ops)) for step in unsplit} == {("", 0)}


def test_no_rank_leaves_a_vote_before_both_have_come_to_it(recorded: Recorded) -> None:
    trace = read_trace(recorded.trace)
    origins = {rank: header.origin_ns / 1000 for rank, header in trace.headers.items()}
    for (run, number, rank), step in trace.steps.items():
        mine, other = step.record, trace.steps[run, number, 1 - rank].record
        assert mine.begin <= mine.vote_begin < mine.vote_end <= mine.end
        # Both ranks are on this host, and so on one clock.
        assert origins[rank] + mine.vote_end > origins[1 - rank] + other.vote_begin


def test_both_carriers_give_the_same_bits(recorded: Recorded) -> None:
    trace = read_trace(recorded.trace)
    compared = 0
    for (run, number, rank), step in trace.steps.items():
        if run == "thread":
            assert step.record.output == trace.steps["dbo", number, rank].record.output
            compared += 1
    assert compared >= 8


def test_the_file_is_in_the_order_of_the_run(recorded: Recorded) -> None:
    lines = [json.loads(line) for line in recorded.trace.read_text(encoding="ascii").splitlines()]
    kinds = [line["t"] for line in lines]
    assert kinds[:8] == ["header", *["prompt"] * 6, "header"]
    assert kinds[-2:] == ["end", "end"]
    runs = ["dbo", "unsplit", "thread"]
    steps = [(runs.index(line["run"]), line["step"], line["rank"]) for line in lines if line["t"] == "step"]
    assert steps == sorted(steps)


def test_show_prints_a_recorded_step(recorded: Recorded) -> None:
    done = in_process("show", recorded.trace, "--step", 0, "--rank", 1, "--layers", "2-3")
    assert done.returncode == 0 and done.stderr == ""
    assert "step 0, rank 1, run dbo" in done.stdout
    headings = [line for line in done.stdout.splitlines() if line.startswith("layer")]
    assert headings and all("2" in line or "3" in line for line in headings)
    assert not any("1" in line or "4" in line for line in headings)
    unsplit = in_process("show", recorded.trace, "--step", 0, "--run", "unsplit")
    assert unsplit.returncode == 0 and "not split: off" in unsplit.stdout


def test_show_names_what_there_is_not(recorded: Recorded) -> None:
    done = in_process("show", recorded.trace, "--step", 9999)
    assert done.returncode == 2
    assert "has no step 9999" in one_sentence(done.stderr)
    done = in_process("show", recorded.trace, "--layers", "40")
    assert done.returncode == 2
    assert "--layers 40: none of them is in this step" in one_sentence(done.stderr)
