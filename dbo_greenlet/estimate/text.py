"""An estimate as text and as JSON."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping
from typing import Any

from .predict import DO_NOT_SPLIT, SPLIT, TOO_CLOSE, Estimate, Option, Setup
from .reason import reason
from .threshold import Threshold

__all__ = ["estimate_json", "render_estimate", "render_setup", "render_threshold"]

_VERDICTS = {
    SPLIT: "Split: {count} microbatches, {policy}; expected {gain}.",
    TOO_CLOSE: "Too close to call: the best is {count} microbatches, {policy}, with {gain}.",
    DO_NOT_SPLIT: "Do not split: the best is {count} microbatches, {policy}, and loses: {gain}.",
}


def render_setup(setup: Setup) -> str:
    """What is estimated, on two lines, and on a third what a gain is."""
    shape, work, communication = setup.shape, setup.work, setup.communication
    link = communication.link
    what = f"prefill, prompts of {work.context}" if work.prefill else f"decode, context {work.context}"
    return (
        f"{shape.name}: {shape.moe_layers} layers with {shape.experts} experts (top {shape.top_k})"
        f"{f', {shape.dense_layers} without' if shape.dense_layers else ''}; {work.tokens} tokens a rank, {what}\n"
        f"{communication.ranks} ranks, {setup.gpu.name}; {communication.kind} over {link.name}, {link.gbs:.3g} GB/s, "
        f"{link.latency_us:g} us; calibrated as {setup.engine.name!r}{_fitted(setup)}\n"
        "gain: unsplit time over split time; below 1 splitting loses"
    )


def _fitted(setup: Setup) -> str:
    model, ranks = setup.engine.fitted_to
    if not model or (setup.shape.name == model and setup.communication.ranks == ranks):
        return ""
    return f" (on {model} with {ranks} ranks: an extrapolation)"


def render_estimate(found: Estimate) -> str:
    """The table of ways to run the step, the verdict, and why."""
    execution = "graph" if found.setup.graph else "eager"
    lines = [f"{execution:32} {'step, ms':>9} {'gain':>6} {'compute':>8} {'comm.':>8} {'hidden':>7}"]
    lines += [_row(option) for option in (found.unsplit, *found.options)]
    sentences = [textwrap.fill(text, 110) for text in (verdict_sentence(found), reason(found))]
    return "\n".join([*lines, "", *sentences])


def _row(option: Option) -> str:
    name = "unsplit" if option.count == 1 else f"{option.count} microbatches, {option.policy}"
    run = option.run
    hidden = f"{round(100 * run.hidden / run.comm)} %" if run.comm else "-"
    gain = f"{option.gain:6.2f}" if option.count > 1 else f"{'':6}"
    times = f"{run.compute / 1e3:8.2f} {run.comm / 1e3:8.2f}"
    return f"{name:32} {option.step / 1e3:9.2f} {gain} {times} {hidden:>7}"


def verdict_sentence(found: Estimate) -> str:
    best, margin = found.best, found.setup.margin
    gain = f"{_length(best.gain)} (gain {best.gain:.2f}; within {margin:.2f} of 1 none is called)"
    return _VERDICTS[found.verdict].format(count=best.count, policy=best.policy, gain=gain)


def _length(gain: float) -> str:
    """What a gain does to the step's time, as the table has it."""
    percent = round(100 * (1 / gain - 1))
    if not percent:
        return "a step of the same length"
    return f"a step {abs(percent)} % {'longer' if percent > 0 else 'shorter'}"


def render_threshold(found: Threshold) -> str:
    """One line, with the option for vLLM."""
    if found.tokens is not None:
        return f"{found.flag} {found.tokens}   (at every number tried from there to {found.most} tokens a rank)"
    if found.until is not None:
        return (
            f"{found.flag}: no value is right: splitting pays at {found.until} tokens a rank and not at {found.most}, "
            "and a threshold cannot say so"
        )
    return f"{found.flag}: no value up to {found.most} tokens a rank pays; leave --enable-dbo off for these steps"


def estimate_json(found: Estimate) -> dict[str, Any]:
    """For `--json`; times in microseconds."""

    def option(each: Option) -> dict[str, Any]:
        return {
            "microbatches": each.count,
            "policy": each.policy,
            "step": each.step,
            "gain": each.gain,
            "compute": each.run.compute,
            "communication": each.run.comm,
            "hidden": each.run.hidden,
            "host": each.run.host - each.run.waited,
            "schedule": each.run.schedule,
        }

    return {
        "execution": "graph" if found.setup.graph else "eager",
        "tokens": found.setup.work.tokens,
        "unsplit": option(found.unsplit),
        "options": [option(each) for each in found.options],
        "verdict": found.verdict,
        "margin": found.setup.margin,
        "gain_on_a_slow_host": found.best.slow_gain,
        "reason": reason(found),
    }


def threshold_json(found: Threshold) -> Mapping[str, Any]:
    return {"option": found.flag, "tokens": found.tokens, "most": found.most, "pays_until": found.until}
