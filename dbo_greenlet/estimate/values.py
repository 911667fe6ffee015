"""Which values an estimate takes: type and range of each, checked in one place before anything is computed with them.

They come from options, from a TOML file and from a trace, so nothing else has looked at them yet.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..errors import ConfigurationError
from .models import ModelShape

__all__ = ["check_engine", "check_gpu", "check_values", "number"]

# name -> the least and the largest whole number
_WHOLE = {
    "tokens": (1, 10**8),
    "layers": (1, 10**5),
    "context": (0, 10**9),
    "ranks": (1, 10**6),
    "ranks_per_node": (1, 10**6),
    "sms": (0, 10**4),
}
# name -> the least and the largest number
_NUMBERS = {
    "gbs": (0.0, 1e9),
    "latency_us": (0.0, 1e9),
    "dispatch_bytes": (0.1, 8.0),
    "handoff_us": (0.0, 1e9),
    "call_us": (0.0, 1e9),
    "outside_ms": (0.0, 1e9),
    "margin": (0.0, 1.0),
}
_FLAGS = ("loopback", "prefill", "shared_context", "graph")
_WORDS = ("all2all", "link", "engine", "carrier")
_TABLES = ("shape", "calibration")

# Parts of what the GPU can do: 0 would divide by it, and more than all of it is no part.
_PARTS = (
    "dense_flops", "grouped_flops", "attention_flops", "dense_bandwidth", "grouped_bandwidth", "activation_bandwidth",
    "unpack_bandwidth",
)  # fmt: skip
_TIMES = ("padded_rows", "kernel_us", "event_us", "padded_us", "padded_for", "call_us", "outside_us",
          "outside_us_per_request")  # fmt: skip
_LENGTHS = {"kernels": 4, "calls": 5}


def number(name: str, value: object, least: float, most: float, *, whole: bool = False) -> float:
    """`value`, if it is a number in that range.

    Raises:
        ConfigurationError: it is not; names it.
    """
    fits = type(value) is int or (type(value) is float and not whole)
    # Written so that NaN, which compares as False, does not pass.
    if not fits or not least <= value <= most:  # type: ignore[operator]
        allowed = f"a whole number from {least} to {most}" if whole else f"a number from {least:g} to {most:g}"
        raise ConfigurationError(f"{name} is {value!r}; use {allowed}")
    return value  # type: ignore[return-value]


def check_values(values: Mapping[str, Any]) -> None:
    """Those of `setup.make_setup`, as far as they are there; unknown keys are not looked at.

    Raises:
        ConfigurationError: one of another type, or out of its range; names it.
    """
    for name, value in values.items():
        # None: an option that was not given.
        if value is None and name in ("layers", "engine", "gbs", "latency_us", "handoff_us", "call_us", "outside_ms"):
            continue
        if name in _WHOLE:
            least, most = _WHOLE[name]
            number(name, value, least, most, whole=True)
        elif name in _NUMBERS:
            number(name, value, *_NUMBERS[name])
        elif name in _FLAGS and type(value) is not bool:
            raise ConfigurationError(f"{name} is {value!r}; use true or false")
        elif name in _WORDS and not isinstance(value, str):
            raise ConfigurationError(f"{name} is {value!r}; use a name")
        elif name in _TABLES and not isinstance(value, Mapping):
            raise ConfigurationError(f"{name} is {value!r}; use a table of its fields")
        elif name == "model" and not isinstance(value, (str, ModelShape)):
            raise ConfigurationError(f"model is {value!r}; use a name or a file")
        elif name == "gpu" and not isinstance(value, (str, Mapping)):
            raise ConfigurationError(f"gpu is {value!r}; use a name, or a table of its fields")


def check_engine(figures: Mapping[str, Any]) -> None:
    """Fields of an `engines.Engine`.

    Raises:
        ConfigurationError: as `check_values`.
    """
    for name, value in figures.items():
        if name in _PARTS:
            number(name, value, 1e-4, 1.0)
        elif name in _TIMES:
            number(name, value, 0.0, 1e9)
        elif name in _LENGTHS:
            if not isinstance(value, (list, tuple)) or len(value) != _LENGTHS[name]:
                raise ConfigurationError(f"{name} is {value!r}; use {_LENGTHS[name]} numbers")
            for each in value:
                number(f"one of {name}", each, 0.0, 1e6)
        elif name == "shared_first" and type(value) is not bool:
            raise ConfigurationError(f"{name} is {value!r}; use true or false")
        elif name in ("name", "source") and not isinstance(value, str):
            raise ConfigurationError(f"{name} is {value!r}; use a text")
        elif name == "fitted_to":
            raise ConfigurationError("a calibration has no fitted_to: what is given is of the model that is estimated")


def check_gpu(figures: Mapping[str, Any]) -> None:
    """Fields of a `gpus.Gpu`.

    Raises:
        ConfigurationError: as `check_values`.
    """
    for name in ("bf16", "fp8", "memory"):
        number(f"a GPU's {name}", figures[name], 1e-3, 1e6)
    number("a GPU's sms", figures["sms"], 1, 10**5, whole=True)
    if not isinstance(figures["name"], str):
        raise ConfigurationError(f"a GPU's name is {figures['name']!r}; use a text")
