"""The estimate's own error: what it predicts for split steps that were measured."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ..errors import ConfigurationError
from ..policies.names import policy_from_text
from .from_trace import SplitStep, carried
from .measured import UnsplitStep
from .predict import Estimate, Setup, estimate

__all__ = ["Judged", "further_off", "judge", "judged_lines", "lost"]

_NEAR = 1.25  # numbers of tokens within this factor are of one kind of step


@dataclass(frozen=True)
class Judged:
    """A split step that was measured, beside what was predicted for it. Times in microseconds.

    `unsplit` is the measured unsplit step with about as many tokens; None where there was none.
    """

    step: SplitStep
    predicted: float
    unsplit: float | None
    predicted_gain: float

    @property
    def gain(self) -> float | None:
        return None if self.unsplit is None else self.unsplit / self.step.step

    @property
    def off(self) -> float:
        """By how much the gain is off; 0 where it was not measured."""
        return 0.0 if self.gain is None else self.predicted_gain - self.gain


def judge(setup: Setup, steps: Iterable[SplitStep], unsplit: Sequence[UnsplitStep]) -> tuple[list[Judged], list[str]]:
    """Each of the steps beside its prediction, and a sentence for those that cannot be predicted."""
    judged: list[Judged] = []
    refused: dict[str, int] = {}
    for step in steps:
        try:
            judged.append(_judge(setup, step, unsplit))
        except ConfigurationError as error:
            refused[str(error)] = refused.get(str(error), 0) + step.rounds
    notes = [
        f"{count} split step{'s' if count > 1 else ''} of the trace could not be predicted: {why}."
        for why, count in refused.items()
    ]
    return judged, notes


def _judge(setup: Setup, step: SplitStep, unsplit: Sequence[UnsplitStep]) -> Judged:
    if step.count < 2:
        raise ConfigurationError("the trace does not say into how many microbatches")
    try:
        policy_from_text(step.policy)
    except ConfigurationError:
        raise ConfigurationError(f"they ran in an order that cannot be run again, {step.policy}") from None
    found = estimate(carried(setup, step), (step.count,), (step.policy,))
    near = [each.step for each in unsplit if each.step and 1 / _NEAR < each.tokens / step.tokens < _NEAR]
    return Judged(step, found.best.step, near[0] if near else None, found.best.gain)


def judged_lines(judged: Sequence[Judged]) -> Iterable[str]:
    """For the text."""
    yield "Against the split steps that were measured:"
    for each in judged:
        step = each.step
        gain = (
            ""
            if each.gain is None or each.unsplit is None
            else f"; gain {each.gain:.2f} (unsplit {each.unsplit / 1e3:.1f} ms), predicted {each.predicted_gain:.2f}"
        )
        yield (
            f"  {step.rounds} of {step.tokens} tokens, {step.count} microbatches, {step.policy}, {step.carrier}: "
            f"{step.step / 1e3:.1f} ms, predicted {each.predicted / 1e3:.1f} ms "
            f"({round(100 * (each.predicted / step.step - 1)):+d} %){gain}"
        )


def further_off(judged: Sequence[Judged], margin: float) -> list[str]:
    """What has to be said of the verdict where a measured gain is further off than the margin."""
    gains = sorted(each.gain for each in judged if each.gain is not None and abs(each.off) > margin)
    if not gains:
        return []
    worst = max(abs(each.off) for each in judged)
    said = f"{gains[0]:.2f}" if len(gains) == 1 else f"{gains[0]:.2f} to {gains[-1]:.2f}"
    return [
        f"The prediction is off by up to {worst:.2f} here, more than the margin of {margin:.2f}, so it is unreliable; "
        f"go by the measured gain, {said}."
    ]


def lost(judged: Sequence[Judged], found: Estimate) -> bool:
    """Whether the best split was measured, at about this number of tokens, and lost."""
    tokens, best = found.setup.work.tokens, found.best
    return any(
        each.gain is not None
        and each.gain < 1
        and (each.step.count, each.step.policy) == (best.count, best.policy)
        and 1 / _NEAR < each.step.tokens / tokens < _NEAR
        for each in judged
    )
