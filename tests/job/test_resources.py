"""What a rank computes with: how ranks that share a GPU are connected, and which all-to-all the settings name."""

from __future__ import annotations

import pytest
import torch

from dbo_greenlet.all2all.loopback import Loopback
from dbo_greenlet.all2all.torch_distributed import TorchDistributed
from dbo_greenlet.job.resources import connect_sharing_ranks, largest_microbatch, open_all2all, ranks_on_device
from dbo_greenlet.job.spec import PACKAGED_MODEL, Settings
from dbo_greenlet.moe import DeepseekV2Config
from dbo_greenlet.ranks import RankGroup, serve_store


@pytest.mark.parametrize(
    ("ranks", "gpus", "sharing"), [(2, 1, [2, 2]), (2, 2, [1, 1]), (3, 2, [2, 1, 2]), (4, 8, [1, 1, 1, 1])]
)
def test_ranks_are_dealt_out_to_gpus(
    monkeypatch: pytest.MonkeyPatch, ranks: int, gpus: int, sharing: list[int]
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    settings = Settings(ranks=ranks, device="cuda")
    assert [ranks_on_device(settings, rank) for rank in range(ranks)] == sharing
    assert [ranks_on_device(Settings(ranks=ranks), rank) for rank in range(ranks)] == [1] * ranks


def test_ranks_that_share_a_gpu_pass_for_hosts_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    settings = Settings(ranks=2, device="cuda")
    first: dict[str, str] = {}
    second = {"NCCL_SOCKET_IFNAME": "eth7", "NCCL_HOSTID": "the same for all"}
    connect_sharing_ranks(settings, 0, first)
    connect_sharing_ranks(settings, 1, second)
    assert first["NCCL_HOSTID"] != second["NCCL_HOSTID"]
    assert (first["NCCL_IB_DISABLE"], first["NCCL_SOCKET_IFNAME"]) == ("1", "lo")
    # What the user says about the network stays.
    assert second["NCCL_SOCKET_IFNAME"] == "eth7"


@pytest.mark.parametrize("gpus", [2, 8])
def test_ranks_with_a_gpu_each_are_left_alone(monkeypatch: pytest.MonkeyPatch, gpus: int) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    environment: dict[str, str] = {}
    connect_sharing_ranks(Settings(ranks=2, device="cuda"), 1, environment)
    connect_sharing_ranks(Settings(ranks=9), 1, environment)
    assert environment == {}


def test_the_all_to_all_that_the_settings_name() -> None:
    config = DeepseekV2Config.from_folder(PACKAGED_MODEL)
    alone = open_all2all(Settings(ranks=1), None, config)
    assert isinstance(alone, Loopback) and not alone.static_shapes
    on_gpu = open_all2all(Settings(ranks=1, device="cuda"), None, config)
    assert isinstance(on_gpu, Loopback) and on_gpu.static_shapes and on_gpu.not_capturable is None
    store = serve_store()
    with RankGroup(store, 0, 1) as group:
        exact = open_all2all(Settings(ranks=1, all2all="torch"), group, config)
        assert isinstance(exact, TorchDistributed) and exact.capacity is None and exact.not_capturable is not None
        settings = Settings(ranks=1, all2all="nccl", device="cuda", token_budget=96)
        fixed = open_all2all(settings, group, config)
        assert isinstance(fixed, TorchDistributed) and fixed.capacity == largest_microbatch(settings) == 96
