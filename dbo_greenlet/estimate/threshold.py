"""From how many tokens on splitting pays: the value for vLLM's --dbo-decode-token-threshold, or the one for prefill."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ..errors import ConfigurationError
from .predict import SPLIT, Setup, estimate

__all__ = ["MOST_LOW_LATENCY", "Threshold", "threshold"]

# What vLLM runs, whatever else was estimated.
COUNT, POLICY = 2, "round_robin"

# Tokens of a rank: README: at most 510 over low latency; of the others what servers are set to.
MOST_LOW_LATENCY, _MOST_DECODE, _MOST_PREFILL = 510, 4096, 32768


@dataclass(frozen=True)
class Threshold:
    """What was found.

    Attributes:
        tokens: a rank's tokens from which splitting is recommended at every number that was tried, up to `most` (powers
            of two below `most`, and those around `tokens` itself; between them nobody looked); None: there is none.
        most: the largest number that was tried.
        until: where splitting pays in between and not at `most`: the largest number at which it does; None elsewhere.
        flag: vLLM's option.
    """

    tokens: int | None
    most: int
    until: int | None
    flag: str


def threshold(setup: Setup, most: int | None = None, precision: float = 0.05) -> Threshold:
    """Search it in steps of a factor of two, and then between the two numbers where the recommendation changes.

    Args:
        setup: its own number of tokens does not matter.
        most: tokens of a rank up to which to look; None: 4,096 of decodes, 32,768 of prefills. With low latency no more
            than 510.
        precision: how far the result may be above the true one, relative.

    Raises:
        ConfigurationError: `most` is below 2.
    """
    if most is None:
        most = _MOST_PREFILL if setup.work.prefill else _MOST_DECODE
    if setup.communication.kind == "deepep_ll":
        most = min(most, MOST_LOW_LATENCY)
    if most < COUNT:
        raise ConfigurationError(f"a threshold of at most {most} tokens; a split step has {COUNT} or more")
    flag = f"--dbo-{'prefill' if setup.work.prefill else 'decode'}-token-threshold"

    def pays(tokens: int) -> bool:
        return estimate(setup.with_tokens(tokens), (COUNT,), (POLICY,)).verdict == SPLIT

    tried = [most]
    while tried[0] >= 2 * COUNT:
        tried.insert(0, tried[0] // 2)
    paying = {tokens: pays(tokens) for tokens in tried}
    if not paying[most]:
        last = max((tokens for tokens in tried if paying[tokens]), default=None)
        return Threshold(None, most, last, flag)
    loses = max((tokens for tokens in tried if not paying[tokens]), default=None)
    if loses is None:
        return Threshold(tried[0], most, None, flag)
    first = min(tokens for tokens in tried if tokens > loses)
    return Threshold(_between(pays, loses, first, precision), most, None, flag)


def _between(pays: Callable[[int], bool], loses: int, first: int, precision: float) -> int:
    while first - loses > max(1, precision * loses):
        middle = (loses + first) // 2
        loses, first = (loses, middle) if pays(middle) else (middle, first)
    return first
