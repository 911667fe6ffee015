"""What the DeepEP transports refuse before they make anything, and the log by which ranks repair a failed step."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from dbo_greenlet.all2all.deepep import check_group, import_deep_ep
from dbo_greenlet.all2all.deepep_ht import HIGH_THROUGHPUT_RANKS, DeepEPHighThroughput
from dbo_greenlet.all2all.deepep_ll import LOW_LATENCY_RANKS, DeepEPLowLatency, rows_for, wire_width
from dbo_greenlet.all2all.operation_log import KEPT, OperationLog
from dbo_greenlet.errors import BrokenGroupError, ConfigurationError
from tests.all2all.fake_deep_ep import cuda_on_cpu, module


def ranks(count: int, device: str = "cuda:0") -> Any:
    return SimpleNamespace(world_size=count, rank=0, device=torch.device(device), generation=0)


# -- the library -----------------------------------------------------------------------------------------------------


def test_a_missing_library_is_named_with_the_extra_that_brings_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "deep_ep", None)
    with pytest.raises(ConfigurationError, match=r"pip install \"dbo-greenlet\[deepep\]\""):
        import_deep_ep()


def test_a_library_that_cannot_be_loaded_is_not_called_missing(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "deep_ep.py").write_text("raise ImportError('libnvshmem_host.so.3: cannot open shared object file')")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "deep_ep", raising=False)
    with pytest.raises(ConfigurationError, match="libnvshmem_host.*LD_LIBRARY_PATH"):
        import_deep_ep()


def test_deep_ep_2_is_refused_with_the_version_that_works(monkeypatch: pytest.MonkeyPatch) -> None:
    second: Any = ModuleType("deep_ep")
    second.ElasticBuffer = second.Buffer = type("ElasticBuffer", (), {})
    monkeypatch.setitem(sys.modules, "deep_ep", second)
    with pytest.raises(ConfigurationError, match=r"DeepEP 2 \(ElasticBuffer\).*works with DeepEP 1.2"):
        import_deep_ep()


def test_deep_ep_1_2_is_taken_also_with_an_elastic_buffer_beside_it(monkeypatch: pytest.MonkeyPatch) -> None:
    first: Any = module()
    first.ElasticBuffer = object
    monkeypatch.setitem(sys.modules, "deep_ep", first)
    assert import_deep_ep() is first


# -- ranks, sizes ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("count", "complaint"), [(1, "at least two ranks"), (3, "2, 4 or 8 ranks"), (16, "between nodes"), (24, "24 ranks")]
)
def test_numbers_of_ranks_without_a_kernel_are_refused(count: int, complaint: str) -> None:
    with pytest.raises(ConfigurationError, match=complaint):
        check_group(ranks(count), "DeepEP", HIGH_THROUGHPUT_RANKS)


def test_low_latency_takes_any_number_of_ranks_of_one_node() -> None:
    for count in range(2, 9):
        check_group(ranks(count), "DeepEP", LOW_LATENCY_RANKS)
    for count in (1, 9):
        with pytest.raises(ConfigurationError):
            check_group(ranks(count), "DeepEP", LOW_LATENCY_RANKS)


@pytest.mark.parametrize("kind", [DeepEPLowLatency, DeepEPHighThroughput])
def test_ranks_on_cpus_are_refused(kind: Any) -> None:
    with pytest.raises(ConfigurationError, match="not on cpu"):
        kind(ranks(2, "cpu"), 4, 64, 8) if kind is DeepEPLowLatency else kind(ranks(2, "cpu"), 4, 64)


def test_rows_go_on_the_wire_in_the_next_width_that_has_a_kernel() -> None:
    assert [wire_width(hidden) for hidden in (1, 2048, 2049, 2880, 4096, 7169, 8192)] == [
        2048,
        2048,
        2560,
        3072,
        4096,
        8192,
        8192,
    ]
    for hidden in (0, -1, 8193):
        with pytest.raises(ConfigurationError, match=f"hidden size {hidden}.*8192"):
            wire_width(hidden)


def test_tokens_of_a_microbatch_fit_the_send_queues(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NVSHMEM_QP_DEPTH", raising=False)
    # The rows of all ranks together are a multiple of four.
    assert [rows_for(tokens, 2) for tokens in (1, 2, 509, 510)] == [2, 2, 510, 510]
    assert [rows_for(tokens, 4) for tokens in (1, 511)] == [1, 511]
    for tokens, world, most in ((0, 4, 511), (512, 4, 511), (511, 2, 510)):
        with pytest.raises(ConfigurationError, match=f"max_tokens = {tokens}: .*1 to {most} tokens"):
            rows_for(tokens, world)
    monkeypatch.setenv("NVSHMEM_QP_DEPTH", "2048")
    assert rows_for(1023, 8) == 1023


@pytest.mark.parametrize(
    ("hidden", "sms", "complaint"),
    [
        (24, 20, "multiples of 16"),
        (8192, 20, "up to 8176"),
        (64, 0, "num_sms = 0"),
        (64, 7, "even number of the 132"),
        (64, 132, "some must be left"),
    ],
)
def test_widths_and_multiprocessors_that_high_throughput_does_not_take(hidden: int, sms: int, complaint: str) -> None:
    with cuda_on_cpu(), pytest.raises(ConfigurationError, match=complaint):
        DeepEPHighThroughput(ranks(2, "cpu"), 4, hidden, num_sms=sms)


# -- the log ---------------------------------------------------------------------------------------------------------


def test_a_log_tells_what_a_rank_did_since_the_slowest_one() -> None:
    ahead, behind = OperationLog(), OperationLog()
    for number in (0, 1, 0, 0, 1):
        ahead.add(number)
    behind.add(0)
    behind.add(1)
    assert ahead.since(2, 5) == [0, 0, 1, -1]
    assert behind.since(2, 5) == [-1, -1, -1, -1]
    assert ahead.since(5, 5) == [-1]


def test_a_log_counts_captured_operations_apart() -> None:
    log = OperationLog()
    log.add(0)
    log.add(1, captured=True)
    assert (log.total, log.captured) == (1, 1)
    assert log.since(0, 1) == [0, -1]
    # A replay does them after all.
    log.extend([1, 0])
    assert (log.total, log.captured) == (3, 1)
    assert log.since(1, 3) == [1, 0, -1]


def test_a_log_that_forgot_says_so_on_every_rank_alike() -> None:
    ahead, behind = OperationLog(), OperationLog()
    for _ in range(KEPT + 2):
        ahead.add(0)
    behind.add(0)
    for log in (ahead, behind):
        with pytest.raises(BrokenGroupError, match=f"{KEPT + 1} operations behind"):
            log.since(1, KEPT + 2)
    behind.add(0)
    assert ahead.since(2, KEPT + 2) == [0] * KEPT + [-1]
    assert behind.since(2, KEPT + 2) == [-1] * (KEPT + 1)
