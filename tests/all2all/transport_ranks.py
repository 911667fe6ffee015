"""One of two ranks with a transport between them, a MoE layer on it, and the same layer in float64."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from dbo_greenlet import Scheduler
from dbo_greenlet.all2all import PaddedTokens
from dbo_greenlet.errors import MicrobatchFailed, ReceiveHookError
from dbo_greenlet.ranks import RankGroup
from dbo_greenlet.yields import dbo_enabled, dbo_maybe_run_recv_hook, dbo_register_recv_hook, dbo_yield

WORLD, EXPERTS, CHOICES, INNER, TOKENS = 2, 8, 3, 96, 24
LOCAL = EXPERTS // WORLD


def make(kind: str, group: RankGroup, hidden: int) -> Any:
    if kind == "ll":
        from dbo_greenlet.all2all.deepep_ll import DeepEPLowLatency

        return DeepEPLowLatency(group, EXPERTS, hidden, TOKENS)
    if kind == "ht":
        from dbo_greenlet.all2all.deepep_ht import DeepEPHighThroughput

        return DeepEPHighThroughput(group, EXPERTS, hidden, num_sms=24)
    from dbo_greenlet.all2all.torch_distributed import TorchDistributed

    return TorchDistributed(group, EXPERTS, TOKENS)


class Ranks:
    """This rank's group, transport and experts; the same weights for all experts on both ranks."""

    def __init__(self, kind: str, group: RankGroup, hidden: int) -> None:
        self.kind = kind
        self.group = group
        self.hidden = hidden
        self.rank = group.rank
        self.device = group.device
        self.all_to_all = make(kind, group, hidden)
        generator = torch.Generator().manual_seed(1)
        self.up = (torch.randn(EXPERTS, hidden, INNER, generator=generator) / hidden**0.5).bfloat16().to(self.device)
        self.down = (torch.randn(EXPERTS, INNER, hidden, generator=generator) / INNER**0.5).bfloat16().to(self.device)

    def experts(self, tokens: Any) -> Tensor:
        mine = slice(self.rank * LOCAL, (self.rank + 1) * LOCAL)
        up, down = self.up[mine], self.down[mine]
        if isinstance(tokens, PaddedTokens):
            return torch.bmm(torch.relu(torch.bmm(tokens.hidden, up)), down)
        parts = tokens.hidden.split(tokens.counts.tolist())
        return torch.cat([torch.relu(rows @ up[e]) @ down[e] for e, rows in enumerate(parts)])

    def layer(self, hidden: Tensor, ids: Tensor, weights: Tensor, site: str = "layer") -> Tensor:
        """One MoE layer; it yields inside a step, as the model's does."""
        dbo_maybe_run_recv_hook()
        sent = self.all_to_all.dispatch_send(hidden, ids, weights)
        if dbo_enabled():
            dbo_register_recv_hook(sent.finish_dispatch)
            dbo_yield(f"{site}.dispatch")
        else:
            sent.finish_dispatch()
        out = self.experts(sent.tokens())
        dbo_maybe_run_recv_hook()
        sent.combine_send(out)
        if dbo_enabled():
            dbo_register_recv_hook(sent.finish_combine)
            dbo_yield(f"{site}.combine")
        else:
            sent.finish_combine()
        return sent.combined()

    def reference(self, hidden: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        """All experts for this rank's tokens, in float64."""
        x, total = hidden.double(), torch.zeros(hidden.shape, dtype=torch.float64, device=self.device)
        for expert in range(EXPERTS):
            out = torch.relu(x @ self.up[expert].double()) @ self.down[expert].double()
            total += out * (weights.double() * (ids == expert)).sum(1, keepdim=True)
        return total

    def layers(self, inputs: tuple[Tensor, Tensor, Tensor], count: int = 3) -> Tensor:
        hidden, ids, weights = inputs
        for number in range(count):
            hidden = hidden + self.layer(hidden, ids, weights, f"layer{number}")
        return hidden

    def settled(self) -> None:
        """Until the GPU is done, noticing a rank that failed."""
        self.group.wait_for_device()

    def together(self) -> None:
        """Until both ranks are here."""
        self.settled()
        self.group.exchange([0])

    def inputs(self, tokens: int, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
        """Hidden rows, distinct experts of which some are none, weights."""
        generator = torch.Generator().manual_seed(100 * seed + 10 * self.rank + 1)
        hidden = torch.randn(tokens, self.hidden, generator=generator).bfloat16()
        ids = torch.rand(tokens, EXPERTS, generator=generator).argsort(1)[:, :CHOICES].contiguous()
        ids[torch.rand(ids.shape, generator=generator) < 0.1] = -1
        weights = torch.rand(tokens, CHOICES, generator=generator)
        return hidden.to(self.device), ids.to(self.device), weights.to(self.device)


class Captured:
    """A split step, captured into a graph after one eager step on another stream."""

    def __init__(self, ranks: Ranks, parts: list[tuple[Tensor, Tensor, Tensor]]) -> None:
        self.ranks = ranks
        self.entries = [partial(ranks.layers, part) for part in parts]
        warm = torch.cuda.Stream()
        warm.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(warm):
            self.eager()
        torch.cuda.current_stream().wait_stream(warm)
        ranks.settled()
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph, capture_error_mode="thread_local"):
            ranks.all_to_all.begin_capture()
            self.outputs = self.eager()
        self.token = ranks.all_to_all.replay_token()

    def eager(self) -> list[Tensor]:
        return Scheduler(strict=False).run(self.entries).outputs

    def launch(self) -> list[Tensor]:
        self.ranks.all_to_all.replaying(self.token)
        self.graph.replay()
        return [output.clone() for output in self.outputs]

    def replay(self) -> list[Tensor]:
        outputs = self.launch()
        self.ranks.settled()
        return outputs


def relative(ours: Tensor, reference: Tensor) -> float:
    return float((ours.double() - reference).norm() / reference.norm().clamp(min=1e-30))


def largest(a: Tensor, b: Tensor) -> float:
    return float((a.double() - b.double()).abs().max()) if a.numel() else 0.0


def original(error: BaseException) -> BaseException:
    """What a microbatch or a recv hook raised."""
    while isinstance(error, (MicrobatchFailed, ReceiveHookError)) and error.__cause__ is not None:
        error = error.__cause__
    return error
