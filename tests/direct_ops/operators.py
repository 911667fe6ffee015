"""Operators with yields inside, one of each way to define one in Python, and models that call them."""

from __future__ import annotations

import sys
from typing import Any

import torch

from dbo_greenlet import dbo_yield
from dbo_greenlet.unsafe_calls import find_unsafe_call

# The operator whose C++ frame is on the stack, or None: an entry for each call of an implementation.
seen: list[str | None] = []


def mix(x: torch.Tensor, layer: int) -> torch.Tensor:
    """What every operator here computes. Bit-equality is asked of it, so it must not be linear by accident."""
    seen.append(find_unsafe_call(sys._getframe()))
    y = x * (layer + 1.5)
    dbo_yield("dispatch")
    y = y.sin() + x
    dbo_yield("combine")
    return y * 0.5


@torch.library.custom_op("dbo_test::custom", mutates_args=())
def custom(x: torch.Tensor, layer: int) -> torch.Tensor:
    return mix(x, layer)


custom.register_fake(lambda x, layer: torch.empty_like(x))

torch.library.define("dbo_test::raw", "(Tensor x, int layer) -> Tensor")
torch.library.impl("dbo_test::raw", "CompositeExplicitAutograd", mix)
torch.library.register_fake("dbo_test::raw", lambda x, layer: torch.empty_like(x))

torch.library.define("dbo_test::composite", "(Tensor x, int layer) -> Tensor")
torch.library.impl("dbo_test::composite", "CompositeImplicitAutograd", mix)


@torch.library.custom_op("dbo_test::add_in_place", mutates_args=("x",))
def add_in_place(x: torch.Tensor, amount: float) -> None:
    dbo_yield("before")
    x.add_(amount)
    dbo_yield("after")


@torch.library.custom_op("dbo_test::with_backward", mutates_args=())
def with_backward(x: torch.Tensor) -> torch.Tensor:
    seen.append(find_unsafe_call(sys._getframe()))
    return x * 2


def _backward(context: Any, gradient: torch.Tensor) -> torch.Tensor:
    # Not the derivative of x * 2: whoever gets this went by way of the operator's own formula.
    return gradient * 100


with_backward.register_autograd(_backward)


def add_one(x: torch.Tensor) -> torch.Tensor:
    return x + 1


# Name to implementation, for register_direct_op.
IMPLEMENTATIONS = {"dbo_test::custom": None, "dbo_test::raw": mix, "dbo_test::composite": mix}

# What each of three microbatches is given.
INPUTS = [torch.arange(12.0).reshape(3, 4) * (i + 1) for i in range(3)]


def packet(name: str) -> Any:
    return getattr(torch.ops.dbo_test, name.partition("::")[2])


def model(x: torch.Tensor, name: str, layers: int = 3) -> torch.Tensor:
    op = packet(name)
    for layer in range(layers):
        # Both ways to call it: vLLM calls the packet, compiled code the overload.
        x = op(x, layer) if layer % 2 else op.default(x, layer)
        x = x + layer
    return x
