"""Why there are direct operators: two greenlets parked under an operator and resumed in turn. Dies of SIGABRT."""

from __future__ import annotations

import torch
from greenlet import getcurrent, greenlet

hub = getcurrent()


@torch.library.custom_op("dbo_test_fail::switching", mutates_args=())
def switching(x: torch.Tensor) -> torch.Tensor:
    hub.switch()
    hub.switch()  # with one switch in it, it may pass by luck
    return x + 1


def model() -> torch.Tensor:
    x = torch.ones(2)
    for _ in range(3):
        x = torch.ops.dbo_test_fail.switching(x)
    return x


microbatches = [greenlet(model), greenlet(model)]
with torch.inference_mode():
    while not all(m.dead for m in microbatches):
        for m in microbatches:
            if not m.dead:
                m.switch()
print("survived")
