"""The two documented Mixture-of-Experts layers as programs for a virtual device.

`low_latency` yields after each send and leaves the receive to a hook, as `all2all.deepep_ll` does below `moe.layers`;
`high_throughput` yields before each send, runs the all-to-all on the comm stream behind events, and has the host wait
for the counts of each dispatch, as `all2all.deepep_ht` does. Sites are those that `trace.notation` documents. Both
touch the buffers that a real layer touches:

    hidden of microbatch i          read and written by A0, A1; read by D and S
    workspace                       one for all: written by A0, read by A1 of the same slice
    KV cache of layer l             one range for each microbatch; A1 reads those of the earlier ones, too (law 6)
    rows, outputs of microbatch i   what D brings and MLP reads; what MLP writes and C sends
    combined, shared of i           what C brings and S writes; read by A0 of the next layer
    result of i                     the output

    run = run_step(low_latency(2), RoundRobin())
    run.program, run.outputs

Faults that need the step's help get it: an empty microbatch computes nothing before the dispatch and behind the
combine (its experts have the other ranks' rows), and attention and experts allocate once each.

To plant a bug, replace a method of the run (`mutate`), or subclass:

    def forgets_to_wait(run):
        run.back_to_compute = dbo_switch_to_compute

    run_step(high_throughput(1, mutate=forgets_to_wait))
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from ..devices.virtual import Buffer
from ..errors import ConfigurationError
from ..stream_program import Access, Transfer, whole
from ..yields import (
    dbo_enabled,
    dbo_maybe_run_recv_hook,
    dbo_register_recv_hook,
    dbo_switch_to_comm,
    dbo_switch_to_compute,
    dbo_switch_to_compute_sync,
    dbo_yield,
    dbo_yield_and_switch_from_comm_to_compute,
    dbo_yield_and_switch_from_compute_to_comm,
)
from .step_run import StepUnderTest, TestBed
from .values import Results, Value

if TYPE_CHECKING:
    from .step_run import Build

__all__ = ["Costs", "HighThroughput", "LayerRun", "LowLatency", "high_throughput", "low_latency"]


@dataclass(frozen=True)
class Costs:
    """Microseconds of each piece of one microbatch; what dispatch and combine take, in flight or on the comm stream.

    `receive` is what a receive part works once everything has arrived (low latency); `counts` is what the comm stream
    works before the host knows how many rows come (high throughput); `out` is what is left behind the last layer.
    """

    a0: float = 20.0
    a1: float = 40.0
    dispatch: float = 60.0
    mlp: float = 60.0
    combine: float = 60.0
    shared: float = 20.0
    out: float = 10.0
    receive: float = 0.0
    counts: float = 0.0


class _Plan:
    """The buffers of a step with `count` microbatches and what each piece does with them; the same for every run."""

    def __init__(self, layers: int, count: int) -> None:
        def one_each(what: str) -> list[Buffer]:
            return [Buffer(f"{what} of microbatch {i}") for i in range(count)]

        self.hidden, self.rows, self.outputs = one_each("hidden"), one_each("rows"), one_each("expert outputs")
        self.combined, self.shared, self.results = one_each("combined"), one_each("shared"), one_each("result")
        self.workspace = Buffer("workspace")
        self.kv = [Buffer(f"KV cache of layer {layer}") for layer in range(layers)]
        every = range(count)
        merged = [[self.hidden[i], self.combined[i], self.shared[i]] for i in every]
        self.a0 = [
            [
                whole(merged[i] if layer else [self.hidden[i]], [self.hidden[i], self.workspace, own])
                for layer, own in enumerate(Access(kv, True, i, i + 1) for kv in self.kv)
            ]
            for i in every
        ]
        self.a1 = [
            [whole([self.hidden[i], self.workspace, Access(kv, False, 0, i + 1)], [self.hidden[i]]) for kv in self.kv]
            for i in every
        ]
        self.d_send = [whole([self.hidden[i]]) for i in every]
        self.d_receive = [whole((), [self.rows[i]]) for i in every]
        self.d = [whole([self.hidden[i]], [self.rows[i]]) for i in every]
        self.mlp = [whole([self.rows[i]], [self.outputs[i]]) for i in every]
        self.c_send = [whole([self.outputs[i]]) for i in every]
        self.c_receive = [whole((), [self.combined[i]]) for i in every]
        self.c = [whole([self.outputs[i]], [self.combined[i]]) for i in every]
        self.s = [whole([self.hidden[i]], [self.shared[i]]) for i in every]
        self.out = [whole(merged[i], [self.results[i]]) for i in every]


class LayerRun:
    """One run of the layers: a method for each piece, so that a test can replace one.

    Attributes: `device`, `count` (N), `layers`, `costs` and `costs_of` (of each microbatch), `plan` (the
    buffers, and the accesses of each piece by microbatch; one for all runs of a build, and what is changed there stays
    changed), `has_shared`, `faults` (of the bed), `results` (the values, None without numerics).
    """

    def __init__(
        self, bed: TestBed, plan: _Plan, layers: int, costs: Costs, shared_expert: bool, numerics: bool
    ) -> None:
        self.bed = bed
        self.device = bed.device
        self.count = bed.count
        self.layers = layers
        self.costs = costs
        self.costs_of = [costs] * bed.count
        self.faults = bed.faults
        self.plan = plan
        self.has_shared = shared_expert
        self.results = Results(bed.device.program) if numerics else None

    def forward(self, i: int) -> Value | None:
        """Microbatch i: its result, or None without numerics."""
        if self.faults is not None and not self.faults.tokens(i, 1):
            self.costs_of[i] = replace(self.costs, a0=0.0, a1=0.0, shared=0.0, out=0.0)
        for layer in range(self.layers):
            self.attention(i, layer)
            self.moe(i, layer)
        return self.result(i)

    def attention(self, i: int, layer: int) -> None:
        plan, costs, work = self.plan, self.costs_of[i], self.device.work
        if self.faults is not None:
            self.faults.allocating(i)
        work("A0", costs.a0, accesses=plan.a0[i][layer])
        work("A1", costs.a1, accesses=plan.a1[i][layer])

    def moe(self, i: int, layer: int) -> None:
        """Dispatch, experts, combine and shared expert, with the yields between them."""
        raise ConfigurationError(f"{type(self).__name__} says not how its layer communicates; subclass one that does")

    def experts(self, i: int, layer: int) -> None:
        if self.faults is not None:
            self.faults.allocating(i)
        self.device.work("MLP", self.costs_of[i].mlp, accesses=self.plan.mlp[i])

    def shared(self, i: int, layer: int) -> None:
        if self.has_shared:
            self.device.work("S", self.costs_of[i].shared, accesses=self.plan.s[i])

    def result(self, i: int) -> Value | None:
        self.device.work("out", self.costs_of[i].out, accesses=self.plan.out[i])
        return None if self.results is None else self.results.of(self.plan.results[i])


class LowLatency(LayerRun):
    """Sends that fly by themselves, receives by hooks."""

    def moe(self, i: int, layer: int) -> None:
        plan, costs, device = self.plan, self.costs, self.device
        self.receive_due()
        sent = device.send("D", costs.dispatch, accesses=plan.d_send[i])
        self.leave(sent, plan.d_receive[i], f"layer{layer}.dispatch")
        self.experts(i, layer)
        self.receive_due()
        sent = device.send("C", costs.combine, accesses=plan.c_send[i])
        self.shared(i, layer)
        self.leave(sent, plan.c_receive[i], f"layer{layer}.combine")

    def receive_due(self) -> None:
        """The receives that the sibling left, before the own send."""
        dbo_maybe_run_recv_hook()

    def leave(self, sent: Transfer, accesses: tuple[Access, ...], site: str) -> None:
        """Leave the receive of `sent` to a hook and yield; outside a step receive it at once."""
        hook = partial(self.receive, sent, accesses)
        if dbo_enabled():
            dbo_register_recv_hook(hook)
            dbo_yield(site)
        else:
            hook()

    def receive(self, sent: Transfer, accesses: tuple[Access, ...]) -> None:
        """The recv hook."""
        self.device.receive(sent, self.costs.receive, accesses=accesses)


class HighThroughput(LayerRun):
    """Sends that are kernels of the comm stream, behind events; the compute stream waits at fixed places."""

    host_blocks = True

    def moe(self, i: int, layer: int) -> None:
        plan, costs, device = self.plan, self.costs, self.device
        self.over_to_comm(f"layer{layer}.before_dispatch")
        if self.host_blocks:
            device.work("counts", costs.counts, accesses=plan.d_send[i])
            device.wait_for_host()
        device.work("D", costs.dispatch, accesses=plan.d[i])
        self.back_to_compute()
        self.experts(i, layer)
        self.over_to_comm(f"layer{layer}.before_combine")
        device.work("C", costs.combine, accesses=plan.c[i])
        dbo_switch_to_compute()
        self.shared(i, layer)
        dbo_switch_to_comm()
        self.over_to_compute(f"layer{layer}.combine")

    def over_to_comm(self, site: str) -> None:
        dbo_yield_and_switch_from_compute_to_comm(site)

    def back_to_compute(self) -> None:
        dbo_switch_to_compute_sync()

    def over_to_compute(self, site: str) -> None:
        dbo_yield_and_switch_from_comm_to_compute(site)


class _Build:
    """Makes the step for a bed; a plan serves all runs with the same number of microbatches."""

    def __init__(self, kind: type[LayerRun], layers: int, settings: tuple[Any, ...], mutate: Any) -> None:
        if layers < 0:
            raise ConfigurationError(f"layers={layers}: a model has 0 or more")
        self.kind = kind
        self.layers = layers
        self.settings = settings
        self.mutate = mutate
        self._plans: dict[int, _Plan] = {}

    def __call__(self, bed: TestBed) -> StepUnderTest:
        plan = self._plans.get(bed.count)
        if plan is None:
            plan = self._plans[bed.count] = _Plan(self.layers, bed.count)
        run = self.kind(bed, plan, self.layers, *self.settings)
        if self.mutate is not None:
            self.mutate(run)
        return StepUnderTest([partial(run.forward, i) for i in range(bed.count)])

    def __repr__(self) -> str:
        return f"{self.kind.__name__}({self.layers} layers)"


def low_latency(
    layers: int,
    *,
    costs: Costs | None = None,
    shared_expert: bool = True,
    numerics: bool = True,
    mutate: Callable[[Any], None] | None = None,
    kind: type[LowLatency] = LowLatency,
) -> Build:
    """Layers with recv hooks: sites "layer0.dispatch", "layer0.combine", "layer1.dispatch" ...

    Args:
        layers: number of Mixture-of-Experts layers.
        costs: microseconds of each piece; default `Costs()`.
        shared_expert: whether there is a shared expert.
        numerics: the outputs are values to compare; else None, which costs nothing.
        mutate: called with each run (a `LowLatency`) before it starts; may replace its methods.
        kind: the class of the runs.

    Raises:
        ConfigurationError: `layers` is negative.
    """
    return _Build(kind, layers, (costs or Costs(), shared_expert, numerics), mutate)


def high_throughput(
    layers: int,
    *,
    costs: Costs | None = None,
    shared_expert: bool = True,
    numerics: bool = True,
    mutate: Callable[[Any], None] | None = None,
    kind: type[HighThroughput] = HighThroughput,
) -> Build:
    """Layers on a comm stream: sites "layer0.before_dispatch", "layer0.before_combine", "layer0.combine" ...

    Args and errors: as `low_latency`; `mutate` is called with a `HighThroughput`.
    """
    return _Build(kind, layers, (costs or Costs(), shared_expert, numerics), mutate)
