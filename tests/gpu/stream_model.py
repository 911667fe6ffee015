"""A model whose communication runs on the comm stream, and runners for it: what the tests of graphs share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

WIDTH, VOCABULARY, LAYERS = 256, 64, 4


class StreamModel:
    """Layers whose communication runs on the comm stream, behind events; sleeps make a missing one show."""

    def __init__(self, dtype: Any = None) -> None:
        kind = torch.float32 if dtype is None else dtype
        generator = torch.Generator().manual_seed(5)
        self.embedding = torch.randn(VOCABULARY, WIDTH, generator=generator).to("cuda", kind)
        self.weights = [(torch.randn(WIDTH, WIDTH, generator=generator) / 16).to("cuda", kind) for _ in range(LAYERS)]
        self.break_at: Callable[[int], None] = lambda layer: None

    def __call__(self, step: Any) -> Any:
        from dbo_greenlet import yields as y

        x = self.embedding[step.input_ids] + step.positions[:, None] * 0.01
        x = x.masked_fill((step.slot_mapping < 0)[:, None], 0.0)
        for layer, weight in enumerate(self.weights):
            torch.cuda._sleep(300_000)
            x = torch.tanh(x @ weight)
            y.dbo_yield_and_switch_from_compute_to_comm(f"layer{layer}.dispatch")
            torch.cuda._sleep(200_000)
            sent = x.flip(1)
            self.break_at(layer)
            y.dbo_yield_and_switch_from_comm_to_compute(f"layer{layer}.combine")
            x = x + sent
        return x


def make_runner(model: Any, n: int, **options: Any) -> Any:
    from dbo_greenlet.batching import VoteSettings
    from dbo_greenlet.devices.cuda import CudaDevice
    from dbo_greenlet.runner import Runner

    return Runner(model, settings=VoteSettings(n, n, n), device=CudaDevice(), strict=True, **options)


def decode_step(count: int, seed: int = 0) -> Any:
    from dbo_greenlet.batching import StepInput

    generator = torch.Generator().manual_seed(seed)
    offsets = torch.arange(count + 1, dtype=torch.int32)
    lengths = torch.randint(1, 30, (count,), generator=generator, dtype=torch.int32)
    return StepInput(
        positions=(lengths - 1).to("cuda", torch.int64),
        query_start_loc=offsets.cuda(),
        seq_lens=lengths.cuda(),
        slot_mapping=torch.arange(count).cuda() * 64 + (lengths - 1).cuda(),
        request_rows=torch.arange(count).cuda(),
        num_tokens=count,
        num_padded_tokens=count,
        input_ids=torch.randint(0, VOCABULARY, (count,), generator=generator).cuda(),
        query_start_loc_cpu=offsets,
        seq_lens_cpu=lengths,
    )
