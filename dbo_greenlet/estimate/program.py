"""A step with estimated times as a program for the virtual device: the layers of `testing.layer_programs`, with a host.

What is added to those layers: the host's launches (in pieces, so that the GPU starts before the last is launched), the
hand-off at each yield, the GPU's time for an edge between streams, dense layers before those with experts, and one wire
that messages share.

The order of a step is whatever the scheduler makes of the policy; nothing in here knows it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..devices.virtual import VirtualDevice
from ..errors import ConfigurationError
from ..policy import RoundRobin
from ..testing.layer_programs import Costs, HighThroughput, LayerRun, LowLatency, high_throughput, low_latency
from ..testing.step_run import TestBed, run_step
from ..yields import dbo_enabled, dbo_switch_to_comm, dbo_switch_to_compute

if TYPE_CHECKING:
    from ..policy import Policy
    from ..stream_program import Access, Transfer
    from ..testing.values import Value

__all__ = ["HostCosts", "Simulated", "StepCosts", "Wire", "simulate"]

_PIECES = 4  # of a stage that the host launches


@dataclass(frozen=True)
class HostCosts:
    """Microseconds of the host for the launches of a stage of one layer; all 0 in a graph."""

    attention: float = 0.0
    dispatch: float = 0.0
    experts: float = 0.0
    combine: float = 0.0
    shared: float = 0.0
    dense: float = 0.0
    handoff: float = 0.0

    @property
    def layer(self) -> float:
        """Of one layer with experts, hand-offs left out."""
        return self.attention + self.dispatch + self.experts + self.combine + self.shared


@dataclass(frozen=True)
class StepCosts(Costs):
    """What `testing.Costs` has, of one microbatch, and what a host and a wire add.

    `dispatch` and `combine` are what the bytes take the wire; `latency` comes on top of each message. `send` is what a
    low-latency send part works on the compute stream, `receive` what a receive part does.
    """

    unpack: float = 0.0
    dense: float = 0.0
    dense_layers: int = 0
    send: float = 0.0
    latency: float = 0.0
    event: float = 0.0
    shared_first: bool = False
    host: HostCosts = HostCosts()

    @property
    def compute(self) -> float:
        """Of one microbatch in one layer with experts."""
        return self.a0 + self.a1 + self.shared + self.mlp + self.unpack


@dataclass(frozen=True)
class Simulated:
    """One run. Microseconds.

    Attributes:
        length: from the first launch to the end of the last work or transfer.
        host: when the host had launched everything, waits included.
        waited: of that, what it waited for the GPU.
        compute: the compute stream worked so long.
        comm, hidden: a message was on its way so long, and of that so long beside compute.
        schedule: the decisions; "" where nothing was split.
    """

    length: float
    host: float
    waited: float
    compute: float
    comm: float
    hidden: float
    schedule: str = ""


class _Stages(LayerRun):
    """What both kinds of layers have in common."""

    costs: StepCosts

    def forward(self, i: int) -> Value | None:
        costs = self.costs
        for _ in range(costs.dense_layers):
            self.piece("A", costs.a0 + costs.a1, costs.host.attention, self.plan.d_send[i])
            self.piece("dense", costs.dense, costs.host.dense, self.plan.d_send[i])
        return super().forward(i)

    def attention(self, i: int, layer: int) -> None:
        costs, plan = self.costs, self.plan
        host = costs.host.attention / 2
        self.piece("A0", costs.a0 + (costs.unpack if layer else 0.0), host, plan.a0[i][layer])
        self.piece("A1", costs.a1, host, plan.a1[i][layer])
        if costs.shared_first:
            self.piece("S", costs.shared, costs.host.shared, plan.s[i])

    def experts(self, i: int, layer: int) -> None:
        self.piece("MLP", self.costs.mlp, self.costs.host.experts, self.plan.mlp[i])

    def shared(self, i: int, layer: int) -> None:
        if self.has_shared and not self.costs.shared_first:
            self.piece("S", self.costs.shared, self.costs.host.shared, self.plan.s[i])

    def piece(self, name: str, us: float, host: float, accesses: tuple[Access, ...]) -> None:
        """A stage, launched by the host in pieces."""
        device = self.device
        pieces = _PIECES if host else 1
        for _ in range(pieces):
            device.host(host / pieces)
            device.work(name, us / pieces, accesses=accesses)

    def hand_off(self) -> None:
        if dbo_enabled():
            self.device.host(self.costs.host.handoff)

    def edge(self) -> None:
        if dbo_enabled():
            self.device.work("event", self.costs.event)


class _LowLatency(_Stages, LowLatency):
    def moe(self, i: int, layer: int) -> None:
        plan, costs, host = self.plan, self.costs, self.costs.host
        self.receive_due()
        self.piece("D", costs.send, host.dispatch, plan.d_send[i])
        sent = self.device.send("D", costs.dispatch + costs.latency, accesses=plan.d_send[i])
        self.leave(sent, plan.d_receive[i], f"layer{layer}.dispatch")
        self.experts(i, layer)
        self.receive_due()
        self.piece("C", costs.send, host.combine, plan.c_send[i])
        sent = self.device.send("C", costs.combine + costs.latency, accesses=plan.c_send[i])
        self.shared(i, layer)
        self.leave(sent, plan.c_receive[i], f"layer{layer}.combine")

    def leave(self, sent: Transfer, accesses: tuple[Access, ...], site: str) -> None:
        self.hand_off()
        super().leave(sent, accesses, site)


class _OnStream(_Stages, HighThroughput):
    """High throughput without its wait for counts: copies on a comm stream."""

    host_blocks = False

    def moe(self, i: int, layer: int) -> None:
        plan, costs, host, device = self.plan, self.costs, self.costs.host, self.device
        self.over_to_comm(f"layer{layer}.before_dispatch")
        if self.host_blocks:
            device.host(host.dispatch / 2)
            device.work("counts", costs.counts, accesses=plan.d_send[i])
            device.wait_for_host()
        self.piece("D", costs.dispatch + costs.latency, host.dispatch / (2 if self.host_blocks else 1), plan.d[i])
        self.back_to_compute()
        self.experts(i, layer)
        self.over_to_comm(f"layer{layer}.before_combine")
        self.piece("C", costs.combine + costs.latency, host.combine, plan.c[i])
        if costs.shared_first or not self.has_shared:
            self.back_to_compute()
            return
        dbo_switch_to_compute()
        self.shared(i, layer)
        dbo_switch_to_comm()
        self.over_to_compute(f"layer{layer}.combine")

    def over_to_comm(self, site: str) -> None:
        self.edge()
        self.hand_off()
        super().over_to_comm(site)

    def back_to_compute(self) -> None:
        super().back_to_compute()
        self.edge()

    def over_to_compute(self, site: str) -> None:
        self.hand_off()
        super().over_to_compute(site)
        self.edge()


class _HighThroughput(_OnStream):
    host_blocks = True


class Wire:
    """What messages share, as a device's `transfer_time`: bytes go one after the other, latencies beside each other."""

    def __init__(self, device: VirtualDevice, latency: float) -> None:
        self._device, self._latency, self._free = device, latency, 0.0

    def __call__(self, transfer: Transfer, us: float) -> float:
        begin: Any = self._device.program.operations[-1].begin
        self._free = max(self._free, begin) + us - self._latency
        return float(self._free + self._latency - begin)


def _build(kind: str, layers: int, costs: StepCosts) -> Callable[[TestBed], Any]:
    settings: dict[str, Any] = {"costs": costs, "numerics": False, "shared_expert": costs.shared > 0}
    if kind == "deepep_ll":
        return low_latency(layers, kind=_LowLatency, **settings)
    if kind == "deepep_ht":
        return high_throughput(layers, kind=_HighThroughput, **settings)
    if kind == "stream":
        return high_throughput(layers, kind=_OnStream, **settings)
    raise ConfigurationError(f"no all-to-all {kind!r}")


def simulate(kind: str, layers: int, costs: StepCosts, count: int = 1, policy: Policy | None = None) -> Simulated:
    """Run a step on the virtual device.

    Args:
        kind: the all-to-all, one of `costs.ALL2ALLS`.
        layers: with experts.
        costs: of one microbatch.
        count: number of microbatches. 1: nothing is split, no yield does anything.
        policy: who goes next; default round robin.

    Raises:
        ConfigurationError: no such all-to-all.
        what the step raises: an order that the policy makes and the program refuses, for example.
    """
    device = VirtualDevice()
    device.transfer_time = Wire(device, costs.latency)
    build = _build(kind, layers, costs)
    schedule = ""
    if count == 1:
        made = build(TestBed(device, 1))
        for entry in made.entries:
            entry()
    else:
        run = run_step(
            build, policy or RoundRobin(), count=count, make_device=lambda: device, strict=False, thread_state=None,
            outputs=False,
        )  # fmt: skip
        if run.error is not None:
            raise run.error
        schedule = run.schedule.encode()
    host = device.now
    waits = [each for each in device.program.operations if each.kind == "host_wait"]
    waited = sum((each.end or 0.0) - (each.begin or 0.0) for each in waits)
    overlap = device.overlap()
    comm, hidden = overlap.comm, overlap.hidden
    if count == 1 and kind != "deepep_ll":  # on the compute stream, where nothing hides it
        comm, hidden = layers * (costs.dispatch + costs.combine + 2 * costs.latency), 0.0
    compute = device.busy() - (comm if count == 1 and kind != "deepep_ll" else 0.0)
    return Simulated(max(host, device.finished_at), host, waited, compute, comm, hidden, schedule)
