"""What a step takes unsplit and split: its stages' times, run on the virtual device in the order of each policy."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from ..errors import ConfigurationError
from ..policies.names import policy_from_text
from .costs import Communication, StageTimes, Workload, stage_times
from .engines import CARRIERS, Carrier, Engine
from .gpus import Gpu
from .models import ModelShape
from .program import HostCosts, Simulated, StepCosts, simulate

__all__ = [
    "COUNTS",
    "DO_NOT_SPLIT",
    "POLICIES",
    "SLOW_HOST",
    "SPLIT",
    "TOO_CLOSE",
    "Estimate",
    "Option",
    "Scale",
    "Setup",
    "estimate",
    "run_option",
    "step_costs",
]

POLICIES = ("round_robin", "phase_offset:1", "phase_offset:2")
COUNTS = (2, 3, 4)
SPLIT, DO_NOT_SPLIT, TOO_CLOSE = "split", "do not split", "too close to call"

# One host ran the same Python 1 to 1.8 times slower from one minute to the next (README, hand-offs on a GPU's host).
SLOW_HOST = 1.8


@dataclass(frozen=True)
class Scale:
    """By what an unsplit measurement corrects the calibration: factors, and what each layer and microbatch takes more.

    `gpu` is for all stages of compute, the next three come on top of it.
    """

    gpu: float = 1.0
    attention: float = 1.0
    experts: float = 1.0
    shared: float = 1.0
    wire: float = 1.0
    host: float = 1.0
    padded_us: float = 0.0


@dataclass(frozen=True)
class Setup:
    """A step on a machine.

    Attributes:
        graph: replayed from a CUDA graph: the host launches once.
        margin: a gain is called one above 1 + this, and a loss below 1 - this; what the model may be wrong by.
    """

    shape: ModelShape
    gpu: Gpu
    engine: Engine
    communication: Communication
    work: Workload
    graph: bool = False
    carrier: Carrier = CARRIERS["greenlets"]
    scale: Scale = field(default_factory=Scale)
    margin: float = 0.1

    def __post_init__(self) -> None:
        if self.graph and self.communication.kind == "deepep_ht":
            raise ConfigurationError(
                "high throughput cannot be captured: its host waits for the counts of each dispatch; estimate it eager"
            )

    @property
    def outside(self) -> float:
        """Microseconds of a step beside the model; the same however the model is split."""
        return self.engine.outside_us + self.work.requests * self.engine.outside_us_per_request

    def with_tokens(self, tokens: int) -> Setup:
        return replace(self, work=replace(self.work, tokens=tokens))

    def times(self, tokens: int) -> StageTimes:
        return stage_times(self.shape, self.gpu, self.engine, self.communication, self.work, tokens)


@dataclass(frozen=True)
class Option:
    """One way to run the step; times in microseconds.

    `gain` is the unsplit step over this one, `slow_gain` the same on a host that is `SLOW_HOST` times slower (of a
    graph the same number).
    """

    count: int
    policy: str
    step: float
    gain: float
    slow_gain: float
    run: Simulated
    costs: StepCosts


@dataclass(frozen=True)
class Estimate:
    """What was predicted.

    Attributes:
        unsplit: the step as one batch.
        options: every split, the best first (of equal ones, to a per cent, the first policy); only the first one has a
            `slow_gain` of its own.
        verdict: "split", "do not split", or "too close to call": the best gain is within the margin of 1, or above it
            on a fast host only.
    """

    setup: Setup
    unsplit: Option
    options: list[Option]

    @property
    def best(self) -> Option:
        return self.options[0]

    @property
    def verdict(self) -> str:
        best, margin = self.best, self.setup.margin
        if min(best.gain, best.slow_gain) > 1 + margin:
            return SPLIT
        return DO_NOT_SPLIT if best.gain < 1 - margin else TOO_CLOSE

    def option(self, count: int, policy: str) -> Option:
        """Raises `ConfigurationError` where it was not asked for."""
        for each in self.options:
            if (each.count, each.policy) == (count, policy):
                return each
        raise ConfigurationError(f"{count} microbatches with {policy} were not estimated")


def step_costs(setup: Setup, count: int) -> StepCosts:
    """The program's times where the step is cut into `count` microbatches."""
    tokens = math.ceil(setup.work.tokens / count)
    times, scale, link = setup.times(tokens), setup.scale, setup.communication.link
    engine, gpu = setup.engine, setup.gpu
    wire = scale.wire / (link.gbs * 1e3)
    dispatch, combine = times.dispatch_bytes * wire, times.combine_bytes * wire
    latency = link.latency_us * scale.wire
    if link.turns:
        dispatch, combine, latency = dispatch + latency, combine + latency, 0.0
    send = receive = 0.0
    if setup.communication.kind == "deepep_ll":
        # Both parts read and write each row once.
        rows = tokens * setup.shape.top_k * setup.shape.hidden * 2 * 2
        copied = engine.kernel_us + rows / (gpu.bytes_per_us * engine.activation_bandwidth)
        send, receive = copied + link.occupies * (dispatch + combine) / 2, copied
        dispatch, combine = dispatch * (1 - link.occupies), combine * (1 - link.occupies)
    slower = _missing_multiprocessors(setup, times, dispatch + combine + 2 * latency) if count > 1 else 1.0
    factor = scale.gpu * slower
    return StepCosts(
        a0=0.4 * times.attention * factor * scale.attention,
        a1=0.6 * times.attention * factor * scale.attention,
        dispatch=dispatch,
        mlp=max(0.0, times.experts * factor * scale.experts + scale.padded_us),
        combine=combine,
        shared=times.shared * factor * scale.shared,
        out=times.unpack * factor,
        receive=receive * scale.gpu,
        counts=engine.kernel_us,
        unpack=times.unpack * factor,
        dense=times.dense * factor,
        dense_layers=setup.shape.dense_layers,
        send=send,
        latency=latency,
        event=engine.event_us,
        shared_first=engine.shared_first,
        host=HostCosts() if setup.graph else _host(setup, count),
    )


def _host(setup: Setup, count: int) -> HostCosts:
    engine, carrier = setup.engine, setup.carrier
    call = engine.call_us * setup.scale.host * (carrier.slower if count > 1 else 1.0)
    attention, dispatch, experts, combine, shared = (calls * call for calls in engine.calls)
    beside = shared if setup.shape.shared_inner else 0.0
    return HostCosts(attention, dispatch, experts, combine, beside, shared, carrier.handoff_us)


def _missing_multiprocessors(setup: Setup, times: StageTimes, comm: float) -> float:
    """By what factor compute takes longer because communication kernels hold multiprocessors beside it.

    Only products that are bound by FLOP slow down, by sms / (sms - taken), and only while there is communication.
    """
    taken = setup.communication.sms
    if not taken or not times.compute:
        return 1.0
    beside = min(1.0, comm / times.compute)
    longer = setup.gpu.sms / max(1, setup.gpu.sms - taken) - 1
    return 1.0 + longer * beside * min(1.0, times.bound_by_flops / times.compute)


def run_option(setup: Setup, count: int, policy: str) -> Option:
    """Run one way on the virtual device; its gains are left at 1."""
    costs = step_costs(setup, count)
    chosen = None if count == 1 else policy_from_text(policy)
    run = simulate(setup.communication.kind, setup.shape.moe_layers, costs, count, chosen)
    started = setup.carrier.start_us if count > 1 and not setup.graph else 0.0
    return Option(count, policy if count > 1 else "", run.length + started + setup.outside, 1.0, 1.0, run, costs)


def estimate(setup: Setup, counts: Sequence[int] = COUNTS, policies: Sequence[str] = POLICIES) -> Estimate:
    """Predict the unsplit step and each split.

    A split into more microbatches than there are tokens is left out, and so is a low-latency one that more than two
    receives would be outstanding in (a phase offset with more than two microbatches): DeepEP refuses it.

    Raises:
        ConfigurationError: nothing is left to split; says what was left out.
    """
    unsplit = run_option(setup, 1, "")
    options = []
    outstanding = False
    for count in counts:
        if not 2 <= count <= setup.work.tokens:
            continue
        for policy in policies:
            if setup.communication.kind == "deepep_ll" and count > 2 and policy.startswith("phase_offset"):
                outstanding = True
                continue
            option = run_option(setup, count, policy)
            gain = unsplit.step / option.step
            options.append(replace(option, gain=gain, slow_gain=gain))
    if not options and outstanding:
        raise ConfigurationError(
            f"{', '.join(map(str, counts))} microbatches with {', '.join(policies)} over deepep_ll: more than two "
            "receives would be outstanding, which DeepEP refuses; use two microbatches or round_robin"
        )
    if not options:
        raise ConfigurationError(
            f"nothing to split: {setup.work.tokens} tokens into {', '.join(map(str, counts))} microbatches; "
            "a microbatch has at least one token"
        )
    # Within a per cent the first policy is as good, and the one with fewer microbatches.
    order = {policy: place for place, policy in enumerate(policies)}
    options.sort(key=lambda option: (-round(option.gain, 2), option.count, order[option.policy]))
    options[0] = replace(options[0], slow_gain=_on_slow_host(setup, options[0]))
    return Estimate(setup, unsplit, options)


def _on_slow_host(setup: Setup, option: Option) -> float:
    if setup.graph:
        return option.gain
    slow = replace(setup, scale=replace(setup.scale, host=setup.scale.host * SLOW_HOST))
    return run_option(slow, 1, "").step / run_option(slow, option.count, option.policy).step
