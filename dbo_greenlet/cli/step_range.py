"""Steps as a user types them."""

from __future__ import annotations

import re

from ..errors import ConfigurationError

__all__ = ["step_range"]


def step_range(text: str, option: str = "--steps") -> range:
    """ "3" or "3-5", both ends included, numbers of one to twelve digits.

    Raises:
        ConfigurationError: anything else; the message names `option`.
    """
    match = re.fullmatch(r"\s*(\d{1,12})\s*(?:-\s*(\d{1,12})\s*)?", text)
    if match is None or (match[2] is not None and int(match[2]) < int(match[1])):
        raise ConfigurationError(f"{option} {text}: give one step (3) or a range with both ends (3-5)")
    return range(int(match[1]), int(match[2] or match[1]) + 1)
