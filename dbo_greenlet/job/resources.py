"""What a rank computes with: its device, its all-to-all, its KV cache; and what they are called.

Ranks may share a GPU: rank r has GPU r modulo their number. The processes then take turns on it, so a run on one GPU
shows that everything works and what it costs the host, and nothing about overlap.
"""

from __future__ import annotations

import os
import platform
from collections.abc import MutableMapping
from typing import TYPE_CHECKING

import torch

from ..devices import Device, cpu_device
from ..errors import ConfigurationError
from ..moe import DeepseekV2Config, KVCache
from .spec import Settings

if TYPE_CHECKING:
    from ..all2all import AllToAll
    from ..ranks import RankGroup

__all__ = [
    "connect_sharing_ranks",
    "largest_microbatch",
    "open_all2all",
    "open_device",
    "open_kv_cache",
    "processor_name",
    "ranks_on_device",
]


def open_device(name: str, rank: int) -> tuple[Device, torch.device]:
    """The device that rank `rank` computes on. Raises `ConfigurationError` where there is none."""
    if name == "cpu":
        return cpu_device(), torch.device("cpu")
    from ..devices.cuda import CudaDevice

    index = rank % max(1, torch.cuda.device_count())
    device = CudaDevice(index)
    torch.cuda.set_device(index)
    return device, torch.device("cuda", index)


def ranks_on_device(settings: Settings, rank: int) -> int:
    """How many ranks of the job compute on the GPU of rank `rank`, itself included; 1 on the CPU."""
    if settings.device == "cpu":
        return 1
    gpus = max(1, torch.cuda.device_count())
    return len(range(rank % gpus, settings.ranks, gpus))


def connect_sharing_ranks(settings: Settings, rank: int, environment: MutableMapping[str, str] = os.environ) -> None:
    """Prepare NCCL for ranks that share a GPU, if any do. To be called before the process's first NCCL group is made.

    NCCL refuses two ranks on one GPU of a host. With a host name of its own each, the ranks pass for two hosts; between
    hosts it takes sockets, if there is no InfiniBand, and here they lead nowhere but to this machine.
    """
    if settings.device == "cpu" or settings.ranks <= torch.cuda.device_count():
        return
    environment["NCCL_HOSTID"] = f"dbo-greenlet-rank-{rank}"
    environment.setdefault("NCCL_IB_DISABLE", "1")
    environment.setdefault("NCCL_SOCKET_IFNAME", "lo")


def processor_name(device: torch.device) -> str:
    """What computes: equal names (with equal torch and threads) should give equal bits."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            for line in file:
                if line.startswith("model name"):
                    return line.partition(":")[2].strip()
    except OSError:
        # Not Linux; the platform module has to do.
        pass
    return platform.processor() or platform.machine()


def open_kv_cache(
    config: DeepseekV2Config,
    rows: int,
    row_length: int,
    dtype: torch.dtype,
    device: torch.device,
    *,
    static_shapes: bool = False,
) -> KVCache:
    """The cache of a rank. Raises `ConfigurationError`, naming its size, where there is no memory for it."""
    try:
        return KVCache(config, rows, row_length, dtype, device, static_shapes=static_shapes)
    except RuntimeError as error:
        # What torch raises for memory that it cannot get (on a GPU a subclass), and for a size that overflows.
        size = config.num_hidden_layers * (rows * row_length + 1) * config.cache_dim * dtype.itemsize
        raise ConfigurationError(
            f"--max-num-seqs is {rows}, and {rows} KV cache rows of {row_length} tokens take {size / 2**30:,.1f} GiB, "
            f"which {device} does not have; lower --max-num-seqs, or --max-new-tokens"
        ) from error


def largest_microbatch(settings: Settings) -> int:
    """The most tokens that a rank ever dispatches at once, padding included.

    An unsplit step is one dispatch a layer, so splitting makes it no smaller; graph sizes are at most the token budget
    (`Settings.check`).
    """
    return settings.token_budget


def open_all2all(settings: Settings, group: RankGroup | None, config: DeepseekV2Config) -> AllToAll:
    """The all-to-all that the settings name, between the ranks of `group` (None: this rank is alone).

    Raises `ConfigurationError` where it cannot serve these ranks, experts or sizes, or is not installed.
    """
    experts = config.n_routed_experts
    if group is None:
        from ..all2all.loopback import Loopback

        # Rows for every expert as if it were chosen by all: only where graphs are to be made of it.
        return Loopback(experts, static_shapes=settings.no_graphs is None)
    tokens = largest_microbatch(settings)
    if settings.all2all == "deepep_ll":
        from ..all2all.deepep_ll import DeepEPLowLatency

        return DeepEPLowLatency(group, experts, config.hidden_size, tokens)
    if settings.all2all == "deepep_ht":
        from ..all2all.deepep_ht import DeepEPHighThroughput

        return DeepEPHighThroughput(group, experts, config.hidden_size)
    from ..all2all.torch_distributed import TorchDistributed

    return TorchDistributed(group, experts, capacity=tokens if settings.all2all == "nccl" else None)
