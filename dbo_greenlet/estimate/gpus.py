"""What GPUs and links can do by their data sheets. A table: add a row, or describe one in a TOML file (`setup`).

FLOP/s are dense (data sheets print the doubled figure for sparse matrices), bfloat16 with float32 accumulation and fp8.
Nothing reaches these figures; how much of them is reached is `engines`' business.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from ..errors import ConfigurationError

__all__ = ["GPUS", "LINKS", "Gpu", "Link", "gpu_named", "link_named"]


@dataclass(frozen=True)
class Gpu:
    """One GPU: `bf16` and `fp8` in TFLOP/s, `memory` in TB/s, `sms` multiprocessors, `source` of the figures."""

    name: str
    bf16: float
    fp8: float
    memory: float
    sms: int
    source: str

    def flops_per_us(self, weight_bytes: float) -> float:
        """FLOP a microsecond of products whose weights have so many bytes an element."""
        return (self.fp8 if weight_bytes <= 1 else self.bf16) * 1e6

    @property
    def bytes_per_us(self) -> float:
        return self.memory * 1e6


GPUS = {
    gpu.name: gpu
    for gpu in (
        Gpu("A100", 312, 312, 2.039, 108, "NVIDIA A100 80GB SXM data sheet (no fp8: bfloat16's rate)"),
        Gpu("H100", 989, 1979, 3.35, 132, "NVIDIA H100 SXM data sheet"),
        Gpu("H800", 989, 1979, 3.35, 132, "as the H100 SXM; its links differ"),
        Gpu("H20", 148, 296, 4.0, 78, "NVIDIA H20 data sheet"),
        Gpu("H200", 989, 1979, 4.8, 132, "NVIDIA H200 SXM data sheet"),
        Gpu("B200", 2250, 4500, 8.0, 148, "NVIDIA HGX B200 data sheet, a GPU"),
        Gpu("MI300X", 1307, 2615, 5.3, 304, "AMD Instinct MI300X data sheet"),
        Gpu("MI355X", 2500, 5000, 8.0, 256, "AMD Instinct MI355X data sheet"),
    )
}


@dataclass(frozen=True)
class Link:
    """What carries a rank's messages.

    Attributes:
        gbs: GB/s that one rank sends, as messages of a library get it and not as the data sheet has it.
        latency_us: what a message takes however small it is, one way; of the slowest hop.
        occupies: the part of a low-latency message's bytes that its kernels move themselves, on the compute stream: 1
            over NVLink, where SMs store into the peer's memory, and 0 where a network card reads it.
        source: of the figures.
        by_ranks: (ranks, GB/s) where the rate depends on how many there are; between them by straight lines.
        turns: messages wait for each other with their latency too: ranks that share a GPU and take turns on it.
    """

    name: str
    gbs: float
    latency_us: float
    occupies: float
    source: str
    turns: bool = False
    by_ranks: tuple[tuple[int, float], ...] = ()

    def between(self, ranks: int) -> Link:
        """The link as so many ranks have it."""
        table = self.by_ranks
        if not table:
            return self
        if ranks <= table[0][0] or ranks >= table[-1][0]:
            return replace(self, gbs=table[0][1] if ranks <= table[0][0] else table[-1][1])
        right = next(place for place, (count, _) in enumerate(table) if count >= ranks)
        (r0, g0), (r1, g1) = table[right - 1], table[right]
        return replace(self, gbs=g0 + (g1 - g0) * (ranks - r0) / (r1 - r0))


LINKS = {
    link.name: link
    for link in (
        Link("nvlink", 150, 25, 1.0, "DeepEP's docs/legacy.md: 153 to 158 GB/s within a node of H800; latency assumed"),
        Link("rdma", 50, 100, 0.0, "DeepEP's docs/legacy.md: high throughput between nodes, 43 to 58 GB/s"),
        # 128 tokens of 7,168 in fp8 to 8 experts there and in bfloat16 back, less 20 us of latency: means of both.
        Link(
            "rdma-ll",
            142,
            20,
            0.0,
            "DeepEP's docs/legacy.md, low latency on H800 with 400 Gbit/s: dispatch / combine of 77 / 114 us on 8 "
            "ranks, 118 / 195 on 16, 155 / 273 on 32, 173 / 314 on 64, 192 / 369 on 128",
            by_ranks=((8, 142.0), (16, 79.0), (32, 56.0), (64, 49.0), (128, 42.0)),
        ),
        Link("pcie", 25, 30, 1.0, "PCIe 4 x16 through the host, assumed"),
        Link("shared-gpu", 1000, 2600, 0.0, "ranks of vLLM that share an H200: 2.5 to 3 ms an all-to-all", turns=True),
    )
}


def gpu_named(name: str) -> Gpu:
    """The GPU whose name occurs in `name`, as a driver prints it ("NVIDIA H200").

    Raises:
        ConfigurationError: none does; names those there are.
    """
    wanted = name.lower()
    for known in sorted(GPUS, key=len, reverse=True):
        if known.lower() in wanted:
            return GPUS[known]
    raise ConfigurationError(f"no GPU {name!r} in the table; use one of {', '.join(GPUS)}")


def link_named(name: str) -> Link:
    """Raises `ConfigurationError` where there is none."""
    try:
        return LINKS[name]
    except KeyError:
        raise ConfigurationError(f"no link {name!r} in the table; use one of {', '.join(LINKS)}") from None
