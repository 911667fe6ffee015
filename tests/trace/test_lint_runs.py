"""The lint's rules about steps and runs: each with a trace that triggers it and one that nearly does."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dbo_greenlet.devices.virtual import VirtualDevice
from dbo_greenlet.errors import TraceFileError
from dbo_greenlet.policies import InTurn
from dbo_greenlet.testing.layer_programs import Costs, low_latency
from dbo_greenlet.trace.records import GpuRecord, RecvRecord, SliceRecord
from dbo_greenlet.yields import (
    dbo_switch_to_compute_sync,
    dbo_yield,
    dbo_yield_and_switch_from_compute_to_comm,
)
from tests.trace.lint_runs import found, header, look, missing, recorded, timed, write

LOW = low_latency(2, numerics=False)


# -- empty-ubatch ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "of_step, expected",
    [
        # The batch ends before the second microbatch begins: it is padding.
        ({"tokens": 8, "slices": [[0, 8, 0, 1], [8, 16, 0, 1]]}, "microbatch 1 of 2 has no tokens (its 8 are padding: "
         "the batch ends at 8)"),
        ({"tokens": 8, "padded": 8, "slices": [[0, 8, 0, 1], [8, 8, 1, 1]]}, "microbatch 1 of 2 has no tokens (none)"),
        ({"tokens": 9, "padded": 9, "slices": [[0, 8, 0, 3], [8, 9, 2, 4]], "requests": [1, 2, 3, 4]},
         "microbatch 1 has 2 requests and only 1 tokens"),
        # One token is not none, and a request that both microbatches have part of is no request too many.
        ({"tokens": 9, "slices": [[0, 8, 0, 1], [8, 16, 0, 1]]}, None),
        ({"tokens": 9, "padded": 9, "slices": [[0, 8, 0, 3], [8, 9, 2, 3]], "requests": [1, 2, 3]}, None),
        # Padding requests own padding tokens.
        ({"tokens": 14, "slices": [[0, 8, 0, 8], [8, 16, 8, 16]], "requests": list(range(14))}, None),
        ({"tokens": 14, "slices": [[0, 8, 0, 8], [8, 16, 8, 16]], "requests": []}, None),
        # A rank with nothing to do takes part with padding.
        ({"tokens": 0, "slices": [[0, 8, 0, 1], [8, 16, 0, 1]], "requests": []}, None),
    ],
)  # fmt: skip
def test_microbatches_without_tokens(tmp_path: Path, of_step: dict[str, Any], expected: str | None) -> None:
    report = look(write(tmp_path / "t.jsonl", header(), recorded(LOW, **of_step)), only=["empty-ubatch"])
    assert [each.what for each in report.findings] == ([] if expected is None else [expected])
    assert [each[:5] for each in found(report)] == ([] if expected is None else [("empty-ubatch", 1, 0, 0, 1)])
    assert len(report.checked) == (1 if of_step["tokens"] else 0)


def test_a_split_that_says_nothing_sensible(tmp_path: Path) -> None:
    trace = write(tmp_path / "t.jsonl", header(), recorded(LOW, slices=[[0, 8, 0, 1], [8, 16]]))
    with pytest.raises(TraceFileError) as raised:
        look(trace)
    assert str(raised.value) == (
        f"{trace}: step 0, run 'dbo', rank 0: the slice of microbatch 1 is [8, 16], expected [first token, end token, "
        "first request, end request]"
    )


# -- max-connections-1 -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "env, device, count, expected",
    [
        ({"CUDA_DEVICE_MAX_CONNECTIONS": "1"}, "cuda", 2, 1),
        ({"CUDA_DEVICE_MAX_CONNECTIONS": "1"}, None, 2, 1),
        ({"CUDA_DEVICE_MAX_CONNECTIONS": "8"}, "cuda", 2, 0),
        ({}, "cuda", 2, 0),
        ({"CUDA_DEVICE_MAX_CONNECTIONS": "1"}, "cpu", 2, 0),
        ({"CUDA_DEVICE_MAX_CONNECTIONS": "1"}, "cuda", 1, 0),
    ],
)
def test_one_connection(tmp_path: Path, env: dict[str, str], device: str | None, count: int, expected: int) -> None:
    settings = {} if device is None else {"device": device}
    trace = write(tmp_path / "t.jsonl", header(env=env, **settings), recorded(LOW, count=count))
    report = look(trace, only=["max-connections-1"])
    assert found(report) == [("max-connections-1", 1, None, 0, None, None, None)] * expected


# -- small-message -----------------------------------------------------------------------------------------------------


def with_bytes(size: int) -> list[Any]:
    return [replace(each, bytes=size) if isinstance(each, RecvRecord) else each for each in recorded(LOW)]


@pytest.mark.parametrize(
    "size, world, expected",
    [
        (16384, 2, []),
        (16383, 2, [("small-message", 4, 0, 0, 0, None, "layer0.dispatch"),
                    ("small-message", 4, 0, 0, 0, None, "layer0.combine")]),
        # Unsplit it would be as small.
        (8191, 2, []),
        # To each of three others.
        (3 * 16384, 4, []),
        (3 * 16384 - 1, 4, [("small-message", 4, 0, 0, 0, None, "layer0.dispatch"),
                            ("small-message", 4, 0, 0, 0, None, "layer0.combine")]),
        (0, 2, []),
    ],
)  # fmt: skip
def test_messages_below_a_cutoff(tmp_path: Path, size: int, world: int, expected: list[Any]) -> None:
    trace = write(tmp_path / "t.jsonl", header(world=world, all2all="nccl"), with_bytes(size))
    report = look(trace, only=["small-message"])
    assert found(report) == expected and len(report.checked) == 1


@pytest.mark.parametrize("size, counts", [(4096, []), (12288, [8])])
def test_messages_of_sites_that_name_no_layer(tmp_path: Path, size: int, counts: list[int]) -> None:
    """A line of the model comes again in every layer; a message is what both sent there in one of them."""
    records = [
        replace(each, site="model.py:12") if isinstance(each, (RecvRecord, SliceRecord)) and each.site else each
        for each in with_bytes(size)
    ]
    trace = write(tmp_path / "t.jsonl", header(world=2, all2all="nccl"), records)
    report = look(trace, only=["small-message"])
    # Dispatch and combine, of each of two layers and microbatches: findings of one place are one.
    assert [each.count for each in report.findings] == counts and len(report.checked) == 1
    assert all(each.what.endswith("unsplit it would be 24 KiB") for each in report.findings)


def test_a_message_of_nothing_is_no_small_one(tmp_path: Path) -> None:
    """All that is sent to other ranks is of one microbatch."""
    records = [
        replace(each, bytes=20_000 * (1 - each.ubatch)) if isinstance(each, RecvRecord) else each
        for each in recorded(LOW)
    ]
    trace = write(tmp_path / "t.jsonl", header(world=2, all2all="nccl"), records)
    assert found(look(trace, only=["small-message"])) == []


def test_a_cutoff_of_the_users(tmp_path: Path) -> None:
    trace = write(tmp_path / "t.jsonl", header(all2all="gloo"), with_bytes(131072))
    report = look(trace, only=["small-message"], cutoff=262144)
    assert report.findings[0].what == (
        "microbatch 0 sends 128 KiB before 'layer0.dispatch'; below 256 KiB a message counts as small (--cutoff), and "
        "unsplit it would be 256 KiB"
    )
    assert missing(look(trace, only=["small-message"])) == {
        "small-message": "no size is known for gloo below which a message goes another way; give one with "
        "--cutoff BYTES"
    }
    bare = write(tmp_path / "b.jsonl", header(all2all="nccl"), with_bytes_left_out())
    assert missing(look(bare)).get("small-message") == "needs the bytes of messages, which were not recorded"


def with_bytes_left_out() -> list[Any]:
    return [replace(each, bytes=None) if isinstance(each, RecvRecord) else each for each in recorded(LOW)]


# -- long-hold ---------------------------------------------------------------------------------------------------------


def layer(device: VirtualDevice, *, host: float = 0.0, queued: float = 0.0, compute: float = 60.0) -> None:
    """A layer that communicates on the comm stream; its first slice keeps the host, with work queued before."""
    device.work("queued", queued)
    device.host(host)
    device.work("A", compute)
    dbo_yield_and_switch_from_compute_to_comm("layer0.before_dispatch")
    device.work("D", 50.0)
    dbo_switch_to_compute_sync()
    device.work("MLP", compute)
    dbo_yield("layer0.before_combine")
    device.work("S", compute)


def holding(when: tuple[int, int] | None, **holds: float) -> list[Any]:
    def entry(device: VirtualDevice, step: int, index: int) -> None:
        layer(device, **(holds if (step, index) == when else {}))

    return timed(6, entry)


@pytest.mark.parametrize(
    "when, holds, expected",
    [
        ((3, 1), {"host": 5000.0}, [("long-hold", 1, 3, 0, 1, 0, "layer0.before_dispatch")]),
        # The GPU has enough to do meanwhile.
        ((3, 1), {"host": 5000.0, "queued": 6000.0}, []),
        # Long for a slice, and still short.
        ((3, 1), {"host": 900.0}, []),
        # The first step loads what it runs.
        ((0, 1), {"host": 5000.0}, []),
        (None, {}, []),
    ],
)
def test_a_microbatch_that_keeps_the_thread(
    tmp_path: Path, when: tuple[int, int] | None, holds: dict[str, float], expected: list[Any]
) -> None:
    report = look(write(tmp_path / "t.jsonl", header(), holding(when, **holds)), only=["long-hold"])
    assert found(report) == expected and len(report.checked) == 1


def test_a_slice_that_always_takes_long_is_compared_with_itself(tmp_path: Path) -> None:
    """2 ms in each step; in one of them 20.5, which is less than half of the step."""

    def entry(device: VirtualDevice, step: int, index: int) -> None:
        device.host(20_500.0 if (step, index) == (4, 0) else 2000.0)
        device.work("A", 60.0)
        for site in ("layer0.dispatch", "layer0.combine", "layer1.dispatch"):
            dbo_yield(site)
            device.work("more than the host takes", 9000.0)
            device.host(4000.0)

    report = look(write(tmp_path / "t.jsonl", header(), timed(8, entry)), only=["long-hold"])
    assert found(report) == [("long-hold", 1, 4, 0, 0, 0, "layer0.dispatch")]
    assert report.findings[0].what == (
        "microbatch 0 holds the thread for 20.5 ms in slice 0, 10 times as long as is usual for this slice, and by "
        "then the GPU has run all that was queued"
    )


def test_long_holds_need_gpu_times(tmp_path: Path) -> None:
    report = look(write(tmp_path / "t.jsonl", header(), recorded(LOW)), only=["long-hold"])
    assert report.checked == []
    assert missing(report)["long-hold"].startswith("needs GPU times of eager steps")


# -- no-overlap --------------------------------------------------------------------------------------------------------


def test_a_schedule_that_never_runs_a_sibling_meanwhile(tmp_path: Path) -> None:
    report = look(write(tmp_path / "t.jsonl", header(), recorded(LOW, InTurn())), only=["no-overlap"])
    assert found(report) == [("no-overlap", 1, 0, 0, None, None, None)]
    assert report.findings[0].what == (
        "in 8 of 8 windows of run dbo on rank 0 no sibling ran between the send and its receive"
    )
    assert report.findings[0].remedy.startswith("let another microbatch run in between")
    round_robin = look(write(tmp_path / "t.jsonl", header(), recorded(LOW)), only=["no-overlap"])
    assert found(round_robin) == [] and len(round_robin.checked) == 1


def test_a_run_of_one_microbatch_has_nothing_to_hide_behind(tmp_path: Path) -> None:
    report = look(write(tmp_path / "t.jsonl", header(), recorded(LOW, count=1)), only=["no-overlap"])
    assert found(report) == [] and report.checked == []


@pytest.mark.parametrize("compute, expected", [(60.0, 0), (1.0, 1)])
def test_communication_that_compute_is_too_short_to_hide(tmp_path: Path, compute: float, expected: int) -> None:
    def entry(device: VirtualDevice, step: int, index: int) -> None:
        layer(device, compute=compute)

    report = look(write(tmp_path / "t.jsonl", header(), timed(3, entry)), only=["no-overlap"])
    assert found(report) == [("no-overlap", 1, 0, 0, None, None, None)] * expected
    if expected:
        assert "of communication in run dbo on rank 0 compute hides" in report.findings[0].what


def test_each_run_of_a_trace_is_judged_by_itself(tmp_path: Path) -> None:
    """A run that takes turns does not make up for one that does not."""
    records = [recorded(LOW), recorded(LOW, InTurn(), run="one after the other")]
    report = look(write(tmp_path / "t.jsonl", header(), *records), only=["no-overlap"])
    assert [(each.rule.id, each.place.run) for each in report.findings] == [("no-overlap", "one after the other")]
    assert found(look(tmp_path / "t.jsonl", only=["no-overlap"], run="dbo")) == []


def test_what_is_hidden_at_most_is_not_taken_for_what_is_hidden(tmp_path: Path) -> None:
    report = look(write(tmp_path / "t.jsonl", header(), recorded(LOW)), only=["no-overlap"])
    assert missing(report) == {
        "no-overlap": "that another microbatch ran meanwhile is all that is known; how much that hid, only a "
        "profile says"
    }

    def entry(device: VirtualDevice, step: int, index: int) -> None:
        layer(device, compute=60.0)

    both = look(write(tmp_path / "b.jsonl", header(), timed(3, entry)), only=["no-overlap"])
    assert (found(both), missing(both)) == ([], {})
    # The comm stream left out: from the end of what sends to the end of what receives is all there is.
    kept = [each for each in timed(3, entry) if not (isinstance(each, GpuRecord) and each.stream == "comm")]
    assert "no-overlap" in missing(look(write(tmp_path / "k.jsonl", header(), kept), only=["no-overlap"]))


def test_costs_do_not_matter_where_the_gpu_was_not_timed(tmp_path: Path) -> None:
    """The order of slices says what could be hidden."""
    slow = low_latency(2, numerics=False, costs=Costs(dispatch=1e6, combine=1e6))
    assert found(look(write(tmp_path / "t.jsonl", header(), recorded(slow)), only=["no-overlap"])) == []
