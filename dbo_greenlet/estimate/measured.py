"""Correct a calibration by unsplit steps that were measured: what a user has before deciding whether to split.

Three things may be known of an unsplit step, and each corrects what it tells about:

    how long it took, for one or several numbers of tokens     the GPU, work on padding, the host
    what its stages took on the GPU (a profile)                each stage, and the wire
    how long the host launched                                 the host

An eager step of which only the length is known may be as long as it is because of its GPU or because of its host, and
the two differ when it is split. Then there are two readings, and the estimate goes by the less favourable one.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from ..errors import ConfigurationError
from .costs import padding_us
from .predict import Setup, run_option, step_costs

__all__ = ["GPU_BOUND", "HOST_BOUND", "UnsplitStep", "misfits", "readings"]

HOST_BOUND = "the step waits for its host"
GPU_BOUND = "the step waits for its GPU"

_MOST = 1e6  # no machine is further from its calibration
_LEAST_HOST = 0.25
# The calibrations reach 0.4 to 0.85 of a data sheet, so a GPU that takes half as long is about at its limit.
_LEAST_GPU = 0.5
# An explanation that needs a host or a GPU this many times off its calibration is left out, if another one needs less.
_UNLIKELY = 2.5
_CLOSE = 0.15  # steps on one machine vary by as much
_REFUSED = 0.5  # a step that is missed by more than this was not explained at all


@dataclass(frozen=True)
class UnsplitStep:
    """One measurement. Times in microseconds.

    Attributes:
        tokens: of the rank.
        step: the whole step; None where the measurement is of stages alone.
        host: what of it the host launched (eager), waiting left out; None: not known.
        layer_host: what the host takes to launch one layer with experts; None: not known.
        stages: GPU time in one layer of "attention", "shared", "experts", "compute" (all three together) and of one
            "dispatch" and "combine"; what is not known is left out.
    """

    tokens: int
    step: float | None = None
    host: float | None = None
    layer_host: float | None = None
    stages: Mapping[str, float] = field(default_factory=dict)


def readings(setup: Setup, steps: Sequence[UnsplitStep]) -> dict[str, Setup]:
    """The setup corrected, under each explanation that the measurements leave open: explanation -> setup.

    Of several steps of one number of tokens the median counts. What is met less well than steps vary, `misfits` says.

    Raises:
        ConfigurationError: no measurement, or one that no such machine can have made, or several that contradict each
            other; names it.
    """
    if not steps:
        raise ConfigurationError("no unsplit step to correct the estimate by")
    steps = _one_of_each(steps)
    for step in steps:
        if not setup.graph and step.host and step.step and step.host > (1 + _CLOSE) * step.step:
            raise ConfigurationError(
                f"a host that launches {step.host / 1e3:g} ms of an unsplit step of {step.tokens} tokens in "
                f"{step.step / 1e3:g} ms; it cannot take longer than the step"
            )
    found = _explanations(setup, steps)
    met = {name: reading for name, reading in found.items() if not _missed(reading, steps, _REFUSED)}
    if met:
        return met
    reading = next(iter(found.values()))
    step, predicted = _missed(reading, steps, _REFUSED)[0]
    raise ConfigurationError(
        f"an unsplit step of {step.tokens} tokens in {_positive(step) / 1e3:g} ms: no correction meets it, the nearest "
        f"is {predicted / 1e3:.1f} ms, {reading.with_tokens(step.tokens).outside / 1e3:.1f} of these beside the model; "
        "check the numbers, or give --outside-ms"
    )


def misfits(setup: Setup, steps: Sequence[UnsplitStep]) -> list[str]:
    """A sentence for each timed step that a setup of `readings` misses by more than steps vary."""
    return [
        f"The unsplit step of {step.tokens} tokens is predicted as {predicted / 1e3:.1f} ms; measured: "
        f"{_positive(step) / 1e3:.1f}."
        for step, predicted in _missed(setup, _one_of_each(steps), _CLOSE)
    ]


def _missed(setup: Setup, steps: Sequence[UnsplitStep], by: float) -> list[tuple[UnsplitStep, float]]:
    """(step, predicted length) of those that are off by more than the factor 1 + `by`, the furthest first."""
    off = []
    for step in steps:
        if step.step is not None:
            predicted = run_option(setup.with_tokens(step.tokens), 1, "").step
            off.append((_apart(max(predicted, 1e-3) / _positive(step)), step, predicted))
    off.sort(key=lambda each: -each[0])
    return [(step, predicted) for factor, step, predicted in off if factor > 1 + by]


def _one_of_each(steps: Sequence[UnsplitStep]) -> list[UnsplitStep]:
    """By tokens, ascending; of steps that were only timed, and have the same number of tokens, the median."""
    timed: dict[int, list[UnsplitStep]] = {}
    for step in steps:
        if step.step is not None and not step.stages:
            _positive(step)
            timed.setdefault(step.tokens, []).append(step)
    merged = [step for step in steps if step.step is None or step.stages]
    for tokens, same in timed.items():
        hosts = [step.host for step in same if step.host is not None]
        layers = [step.layer_host for step in same if step.layer_host is not None]
        merged.append(
            UnsplitStep(
                tokens,
                statistics.median(_positive(step) for step in same),
                statistics.median(hosts) if hosts else None,
                statistics.median(layers) if layers else None,
            )
        )
    return sorted(merged, key=lambda step: step.tokens)


def _explanations(setup: Setup, steps: Sequence[UnsplitStep]) -> dict[str, Setup]:
    setup = _by_stages(setup, steps)
    known_host = [step for step in steps if step.host is not None or step.layer_host is not None]
    if any(step.stages for step in steps) and any(step.step for step in steps):
        known_host = []  # a profiler slows the host down, a step that was timed without one tells
    if known_host and not setup.graph:
        setup = _by_host(setup, known_host)
    timed = [step for step in steps if step.step is not None]
    if not timed:
        return {"": setup}
    if any(step.stages for step in steps):
        # What a step takes longer than its stages lies beside the model in a graph, and is the host's otherwise.
        if setup.graph:
            return {"": _solve(_outside(setup, 0.0), timed[-1], _outside)}
        met = _solve(setup, timed[-1], _host, least=_LEAST_HOST)
        if not _explains(met, timed[-1]):
            # Its messages alone took longer than a whole step takes: while it was profiled they waited for other ranks.
            setup = replace(setup, scale=replace(setup.scale, wire=1.0))
            met = _solve(setup, timed[-1], _host, least=_LEAST_HOST)
        if not _explains(met, timed[-1]):
            # Nor is there room for all that the calibration puts beside the model.
            met = _solve(_outside(setup, 0.0), timed[-1], _host, least=_LEAST_HOST)
        return {"": met}
    if setup.graph or known_host:
        return {"": _by_gpu(setup, timed)}
    return _by_either(setup, timed)


def _by_stages(setup: Setup, steps: Sequence[UnsplitStep]) -> Setup:
    with_stages = [step for step in steps if step.stages]
    if not with_stages:
        return setup
    step = with_stages[-1]
    times = setup.times(step.tokens)
    predicted = {"attention": times.attention, "shared": times.shared, "experts": times.experts}
    factors = {}
    for stage, us in predicted.items():
        if us > 0 and step.stages.get(stage):
            factors[stage] = step.stages[stage] / us
    scale = replace(setup.scale, **factors)
    if not factors and step.stages.get("compute"):
        scale = replace(scale, gpu=step.stages["compute"] / times.compute)
    messages = [step.stages[stage] for stage in ("dispatch", "combine") if stage in step.stages]
    if messages:
        scale = replace(scale, wire=_wire(setup, step.tokens, 2 * sum(messages) / len(messages)))
    return replace(setup, scale=scale)


def _wire(setup: Setup, tokens: int, both: float) -> float:
    """By what factor the wire is slower, if a dispatch and a combine take `both` with their send and receive parts."""
    costs = step_costs(setup.with_tokens(tokens), 1)
    # What the parts copy does not depend on the wire; what a send stores into a peer does.
    copied = 4 * costs.receive
    sent = costs.dispatch + costs.combine + 2 * (costs.latency + costs.send - costs.receive)
    return max(0.0, both - copied) / sent if sent > 0 else 1.0


def _by_host(setup: Setup, steps: Sequence[UnsplitStep]) -> Setup:
    factors = []
    for step in steps:
        there = setup.with_tokens(step.tokens)
        measured, predicted = step.layer_host, step_costs(there, 1).host.layer
        if measured is None:
            run = run_option(there, 1, "").run
            measured, predicted = step.host or 0.0, run.host - run.waited
            if step.step is not None and measured + there.outside > (1 + _CLOSE) * step.step:
                # Both cannot lie within the step one after the other: the host's time has in it what is beside the
                # model, of which no more can be known than that.
                outside = min(there.outside, measured / 2)
                setup = _outside(setup, outside)
                measured -= outside
        if not 0 < measured < 1e12 or predicted <= 0:
            raise ConfigurationError(
                f"a host that takes {measured} us, where {predicted:g} are calibrated; both have to be above 0"
            )
        factors.append(measured / predicted)
    return _host(setup, setup.scale.host * sum(factors) / len(factors))


def _by_gpu(setup: Setup, steps: Sequence[UnsplitStep]) -> Setup:
    """One measurement tells by what factor the GPU is slower; two also what it takes for no tokens at all."""
    if len(steps) == 1:
        return _solve_gpu(setup, steps[0])
    for _ in range(4):
        setup = _solve_gpu(setup, steps[-1])
        setup = _solve(setup, steps[0], _padded, least=-padding_us(setup.shape, setup.gpu, setup.engine))
    return setup


def _solve_gpu(setup: Setup, step: UnsplitStep) -> Setup:
    """By `_gpu`; as it was where a faster GPU would not shorten the step, because something else is its bound."""
    found = _solve(setup, step, _gpu, least=_LEAST_GPU)
    if found.scale.gpu >= min(setup.scale.gpu, 1.01 * _LEAST_GPU):
        return found
    lengths = [run_option(each.with_tokens(step.tokens), 1, "").step for each in (found, setup)]
    return setup if lengths[1] < 1.02 * lengths[0] else found


def _by_either(setup: Setup, steps: Sequence[UnsplitStep]) -> dict[str, Setup]:
    if len(steps) > 1:
        # The fewer tokens, the more it is the host; the GPU is taken to be off only where the host cannot explain it.
        both = _solve(setup, steps[0], _host, least=_LEAST_HOST)
        for _ in range(3):
            if _explains(both, steps[-1]):
                break
            both = _solve_gpu(both, steps[-1])
            both = _solve(both, steps[0], _host, least=_LEAST_HOST)
        return {"": both}
    host = _solve(setup, steps[0], _host, least=_LEAST_HOST)
    # What the host would take if it were not the bound is not known then: as calibrated, or half of the bound.
    free = min(setup.scale.host, host.scale.host / 2)
    gpu = _solve_gpu(_host(setup, free), steps[0])
    found = {HOST_BOUND: host, GPU_BOUND: gpu}
    far = {
        HOST_BOUND: _apart(host.scale.host / setup.scale.host),
        GPU_BOUND: _apart(gpu.scale.gpu / setup.scale.gpu),
    }
    likely = {name: reading for name, reading in found.items() if far[name] <= _UNLIKELY}
    return likely or found


def _explains(setup: Setup, step: UnsplitStep) -> bool:
    return abs(run_option(setup.with_tokens(step.tokens), 1, "").step / _positive(step) - 1) < _CLOSE


def _apart(factor: float) -> float:
    return max(factor, 1 / factor)


def _gpu(setup: Setup, value: float) -> Setup:
    return replace(setup, scale=replace(setup.scale, gpu=value))


def _host(setup: Setup, value: float) -> Setup:
    return replace(setup, scale=replace(setup.scale, host=value))


def _outside(setup: Setup, value: float) -> Setup:
    return replace(setup, engine=replace(setup.engine, outside_us=value, outside_us_per_request=0.0))


def _padded(setup: Setup, value: float) -> Setup:
    return replace(setup, scale=replace(setup.scale, padded_us=value))


def _solve(setup: Setup, step: UnsplitStep, put: Callable[[Setup, float], Setup], least: float = 0.0) -> Setup:
    """The setup with that value which makes the unsplit step as long as measured; the nearest where none does.

    The length grows with each of the values, so bisection finds it.
    """
    wanted = _positive(step)
    there = setup.with_tokens(step.tokens)

    def length(value: float) -> float:
        return run_option(put(there, value), 1, "").step

    low, high = least, max(1.0, least + 1.0)
    while length(high) < wanted:
        if high > _MOST:
            raise ConfigurationError(
                f"an unsplit step of {step.tokens} tokens in {wanted / 1e3:.1f} ms is no step of this model and machine"
            )
        high *= 2
    for _ in range(30):
        middle = (low + high) / 2
        low, high = (middle, high) if length(middle) < wanted else (low, middle)
        if high - low < 1e-3 * high:
            break
    return put(setup, high)


def _positive(step: UnsplitStep) -> float:
    if step.step is None or not 0 < step.step < 1e12 or step.tokens < 1:
        raise ConfigurationError(f"an unsplit step of {step.tokens} tokens in {step.step} us; both are above 0")
    return step.step
