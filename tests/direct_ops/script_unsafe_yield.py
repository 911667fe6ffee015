"""A yield under an operator that is not direct: refused, unwound without an abort, and the next step works.

Prints one line per case; run with and without -O, the output must be the same. The cases park none, one or two
microbatches in plain code before the refused one: those are no obstacle to unwinding it.
"""

from __future__ import annotations

import sys

import torch

from dbo_greenlet import Scheduler, dbo_yield, register_direct_op
from dbo_greenlet.errors import UnsafeYieldError

unwound: list[str] = []


def mix(x: torch.Tensor, name: str) -> torch.Tensor:
    try:
        dbo_yield("shared line")
        return x * 2
    finally:
        unwound.append(name)


torch.library.define("dbo_test_unsafe::mix", "(Tensor x, str name) -> Tensor")
torch.library.impl("dbo_test_unsafe::mix", "CompositeExplicitAutograd", mix)
X = torch.ones(2)


def plain(name: str) -> torch.Tensor:
    return mix(mix(X, name), name)


def under_operator(name: str) -> torch.Tensor:
    return torch.ops.dbo_test_unsafe.mix(X, name)


def swallowing(name: str) -> torch.Tensor:
    try:
        return under_operator(name)
    except UnsafeYieldError:
        return X


for strict in (True, False):
    for count in (1, 2, 3):
        entries = [lambda i=i: plain(f"plain {i}") for i in range(count - 1)] + [lambda: under_operator("operator")]
        unwound.clear()
        try:
            Scheduler(strict=strict).run(entries)
        except UnsafeYieldError as error:
            print(f"strict={strict} count={count}: {error.op} refused, unwound {sorted(unwound)}")
        print("  then", Scheduler(strict=strict).run([lambda: plain("a"), lambda: plain("b")]).schedule.decisions)

try:
    print("swallowed:", Scheduler().run([lambda: swallowing("s"), lambda: plain("p")]).schedule.decisions)
except UnsafeYieldError as error:
    print("swallowed, refused all the same:", error.op)

register_direct_op("dbo_test_unsafe::mix", mix)
print("direct:", Scheduler().run([lambda: under_operator("a"), lambda: under_operator("b")]).schedule.decisions)
print("optimized" if sys.flags.optimize else "not optimized", file=sys.stderr)
