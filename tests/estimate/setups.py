"""Small setups for the tests of estimates."""

from __future__ import annotations

from typing import Any

from dbo_greenlet.estimate import Setup, make_setup

LITE_ON_TWO = {"model": "deepseek-v2-lite", "layers": 4, "ranks": 2, "link": "nvlink", "context": 64}


def lite(tokens: int = 64, **values: Any) -> Setup:
    """DeepSeek-V2-Lite's shape with four layers on two H200s, low latency."""
    return make_setup({**LITE_ON_TWO, "tokens": tokens, **values})
