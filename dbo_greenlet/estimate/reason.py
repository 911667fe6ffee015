"""Why splitting pays or does not: one sentence from what the two runs did."""

from __future__ import annotations

from .predict import SLOW_HOST, Estimate, Option

__all__ = ["reason"]

_BOUND = 0.9  # of the step


def reason(found: Estimate) -> str:
    """What the best split wins and loses against the unsplit step, and what bounds it."""
    unsplit, best = found.unsplit, found.best
    launching = best.run.host - best.run.waited
    if not found.setup.graph and launching > _BOUND * best.run.length:
        return (
            f"The host is the bound: launching the split model takes it {_ms(launching)}, unsplit "
            f"{_ms(unsplit.run.host - unsplit.run.waited)}, and the GPU computes for only {_ms(best.run.compute)} of "
            "it. A CUDA graph takes the host out of it; larger steps do, too."
        )
    won, lost = _exposed(unsplit) - _exposed(best), best.run.compute - unsplit.run.compute
    parts = [
        f"Unsplit, {_ms(_exposed(unsplit))} of the {_ms(unsplit.step)} are communication that nothing hides; split, "
        f"{_ms(_exposed(best))}."
        if won > 0
        else f"Splitting hides no communication: unsplit {_ms(_exposed(unsplit))} of {_ms(unsplit.step)} are exposed."
    ]
    if lost > 0.02 * unsplit.step:
        parts.append(f"Compute takes {_ms(lost)} more: {_why_more(found)}.")
    if best.run.comm > _BOUND * best.run.length:
        parts.append("Split, the link is the bound.")
    elif best.run.compute > _BOUND * best.run.length:
        parts.append("Split, the GPU is the bound.")
    if best.gain > 1 + found.setup.margin >= best.slow_gain:
        parts.append(f"On a host {SLOW_HOST} times slower the gain would be {best.slow_gain:.2f}.")
    return " ".join(parts)


def _why_more(found: Estimate) -> str:
    setup, best = found.setup, found.best
    times = setup.times(max(1, setup.work.tokens // best.count))
    if times.reads_weights > 0.5 * times.compute:
        return "each microbatch reads the weights again and has its own launches and padding"
    return "smaller products use the GPU less well" + (
        ", and communication kernels hold multiprocessors" if setup.communication.sms else ""
    )


def _exposed(option: Option) -> float:
    return option.run.comm - option.run.hidden


def _ms(us: float) -> str:
    us = 0.0 if abs(us) < 50 else us  # rounding leaves a minus
    return f"{us / 1e3:.1f} ms" if us < 99_950 else f"{us / 1e3:.0f} ms"
