"""The model that the GPU benchmarks split: a stack of Mixture-of-Experts layers, each with four yields.

A full layer has an attention-like part (three products, two norms), a gate, experts (two batched products) and a
shared expert: nineteen launches, small enough that at few tokens the host is the bound, which is where a hand-off
counts. Row `m` always goes to expert `m % EXPERTS`, so that neither the shapes nor the split depend on the data. A copy
on the comm stream stands for the transport: its host side costs what a launch costs, and the streams are switched as
DeepEP's high-throughput kernels want it, compute to comm to compute, once for the dispatch and once for the combine.

A thin layer is no more than the yields need: five launches, so that a hand-off weighs four times as much.

How a microbatch changes streams is its *lane's* business, and the only thing in which the variants differ:

    SplitLane       yields at each change (inside a step)
    PlainLane       yields and stays on the compute stream
    SerialLane      changes streams with the same calls of the device and does not yield
    OneStreamLane   does nothing: everything on the compute stream
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dbo_greenlet import (
    UBatchContext,
    dbo_yield,
    dbo_yield_and_switch_from_comm_to_compute,
    dbo_yield_and_switch_from_compute_to_comm,
)

__all__ = [
    "EXPERTS",
    "YIELDS_PER_LAYER",
    "Lane",
    "Model",
    "OneStreamLane",
    "PlainLane",
    "SerialLane",
    "SplitLane",
    "called_directly",
    "make_model",
    "relative_error",
]

EXPERTS = 8
YIELDS_PER_LAYER = 4


class Lane:
    """Carries the rows of one microbatch to the experts and back, through buffers of its own.

    Args:
        context: streams and events of the microbatch.
        tokens: rows of the microbatch, a multiple of `EXPERTS`.
        like: a tensor whose last dimension, dtype and device the buffers take.
    """

    def __init__(self, context: UBatchContext, tokens: int, like: Tensor) -> None:
        self.context = context
        self.device: Any = context.device
        self.received = torch.empty(tokens, like.shape[-1], dtype=like.dtype, device=like.device)
        self.returned = torch.empty_like(self.received)
        self.poison()

    def poison(self) -> None:
        """Make every element that a step leaves unwritten show up in its output."""
        self.received.fill_(float("nan"))
        self.returned.fill_(float("nan"))

    def dispatch(self, sites: tuple[str, str], rows: Tensor) -> Tensor:
        self.to_comm(sites[0])
        self.received.copy_(rows)
        self.to_compute(sites[1])
        return self.received

    def combine(self, sites: tuple[str, str], rows: Tensor) -> Tensor:
        self.to_comm(sites[0])
        self.returned.view(rows.shape).copy_(rows)
        self.to_compute(sites[1])
        return self.returned

    def to_comm(self, site: str) -> None:
        raise NotImplementedError

    def to_compute(self, site: str) -> None:
        raise NotImplementedError


class SplitLane(Lane):
    def to_comm(self, site: str) -> None:
        dbo_yield_and_switch_from_compute_to_comm(site)

    def to_compute(self, site: str) -> None:
        dbo_yield_and_switch_from_comm_to_compute(site)


class PlainLane(Lane):
    def to_comm(self, site: str) -> None:
        dbo_yield(site)

    def to_compute(self, site: str) -> None:
        dbo_yield(site)


class SerialLane(Lane):
    def to_comm(self, site: str) -> None:
        context, device = self.context, self.device
        device.record(context.gpu_compute_done_event, context.compute_stream)
        device.set_stream(context.comm_stream)
        device.wait(context.comm_stream, context.gpu_compute_done_event)

    def to_compute(self, site: str) -> None:
        context, device = self.context, self.device
        device.record(context.gpu_comm_done_event, context.comm_stream)
        device.set_stream(context.compute_stream)
        device.wait(context.compute_stream, context.gpu_comm_done_event)


class OneStreamLane(Lane):
    def to_comm(self, site: str) -> None:
        pass

    def to_compute(self, site: str) -> None:
        pass


class Experts(nn.Module):
    def __init__(self, number: int, hidden: int, inner: int) -> None:
        super().__init__()
        self.gate = weight(hidden, EXPERTS)
        self.up = weight(EXPERTS, hidden, inner)
        self.down = weight(EXPERTS, inner, hidden)
        self.shared_up = weight(hidden, inner)
        self.shared_down = weight(inner, hidden)
        self.dispatch_sites = (f"layer{number}.dispatch.send", f"layer{number}.dispatch.receive")
        self.combine_sites = (f"layer{number}.combine.send", f"layer{number}.combine.receive")

    def forward(self, x: Tensor, lane: Lane) -> Tensor:
        tokens, hidden = x.shape
        weights = torch.softmax(torch.mm(x, self.gate), dim=-1)
        rows = lane.dispatch(self.dispatch_sites, x)
        inner = F.silu(torch.bmm(rows.view(tokens // EXPERTS, EXPERTS, hidden).transpose(0, 1), self.up))
        done = torch.bmm(inner, self.down)
        back = lane.combine(self.combine_sites, done.transpose(0, 1))
        shared = torch.mm(F.silu(torch.mm(x, self.shared_up)), self.shared_down)
        # Only now may `done` go: the comm stream has read it, and the compute stream waits for that.
        return torch.addcmul(shared, back, weights[:, :1])


class Layer(nn.Module):
    direct = False

    def __init__(self, number: int, hidden: int, inner: int) -> None:
        super().__init__()
        self.shape, self.inner_shape = (hidden,), (inner,)
        self.query_down = weight(hidden, inner)
        self.query_up = weight(inner, hidden)
        self.out = weight(hidden, hidden)
        self.experts = Experts(number, hidden, inner)

    def forward(self, h: Tensor, lane: Lane) -> Tensor:
        q = torch.mm(F.rms_norm(h, self.shape), self.query_down)
        q = torch.mm(F.rms_norm(q, self.inner_shape), self.query_up)
        h = h + torch.mm(q, self.out)
        x = F.rms_norm(h, self.shape)
        return h + (self.experts.forward(x, lane) if self.direct else self.experts(x, lane))


class ThinExperts(nn.Module):
    def __init__(self, number: int, hidden: int) -> None:
        super().__init__()
        self.expert = weight(EXPERTS, hidden, hidden)
        self.dispatch_sites = (f"layer{number}.dispatch.send", f"layer{number}.dispatch.receive")
        self.combine_sites = (f"layer{number}.combine.send", f"layer{number}.combine.receive")

    def forward(self, x: Tensor, lane: Lane) -> Tensor:
        tokens, hidden = x.shape
        rows = lane.dispatch(self.dispatch_sites, x)
        done = torch.bmm(rows.view(tokens // EXPERTS, EXPERTS, hidden).transpose(0, 1), self.expert)
        back = lane.combine(self.combine_sites, done.transpose(0, 1))
        del done  # not before: the comm stream reads it
        return back


class ThinLayer(nn.Module):
    direct = False

    def __init__(self, number: int, hidden: int, inner: int) -> None:
        super().__init__()
        self.mix = weight(hidden, hidden)
        self.shared = weight(hidden, hidden)
        self.experts = ThinExperts(number, hidden)

    def forward(self, h: Tensor, lane: Lane) -> Tensor:
        x = torch.mm(h, self.mix)
        y = self.experts.forward(x, lane) if self.direct else self.experts(x, lane)
        # Two terms of the size of `h` each: scaled, so that sixty layers neither grow nor shrink it.
        return torch.addmm(y, x, self.shared, beta=0.7071, alpha=0.7071)


def weight(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.randn(*shape) / shape[-2] ** 0.5, requires_grad=False)


class Model(nn.Module):
    """`layers` layers on [tokens, hidden]; call it with a lane for `tokens` rows."""

    def __init__(self, layers: int, thin: bool = False, hidden: int = 1024, inner: int = 512) -> None:
        super().__init__()
        self.hidden, self.inner = hidden, inner
        kind = ThinLayer if thin else Layer
        self.layers = nn.ModuleList(kind(number, hidden, inner) for number in range(layers))

    def forward(self, h: Tensor, lane: Lane, layers: int | None = None) -> Tensor:
        for layer in self.layers[:layers] if layers else self.layers:
            h = layer.forward(h, lane) if layer.direct else layer(h, lane)
        return h


def called_directly(model: Model) -> Model:
    """The same weights, and every `forward` called as a method: two levels of `nn.Module.__call__` less at a yield."""
    thin = isinstance(model.layers[0], ThinLayer)
    with torch.device("meta"):
        other = Model(len(model.layers), thin, model.hidden, model.inner)
    other.load_state_dict(model.state_dict(), assign=True)
    for layer in other.layers:
        layer.direct = True
    return other.eval()


def make_model(
    layers: int, device: str, dtype: torch.dtype, seed: int = 0, small: bool = False, thin: bool = False
) -> Model:
    torch.manual_seed(seed)
    with torch.device(device):
        model = Model(layers, thin, 64, 32) if small else Model(layers, thin)
    return model.to(dtype).eval()


def relative_error(out: Tensor, reference: Tensor) -> float:
    """‖out − reference‖ / ‖reference‖ in float64; NaN where there is one."""
    difference = out.double() - reference.double()
    return float(difference.norm() / reference.double().norm())
