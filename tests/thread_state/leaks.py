"""What microbatches leave switched on at their ends, by mistake."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from tests.thread_state.programs import STREAMS, DispatchLog, FunctionLog

# Scopes that are open, so that nothing closes them; who looks at what they did clears it.
held: list[Any] = []


def enters(make: Callable[[], Any]) -> Callable[[], None]:
    def leave_it_open() -> None:
        scope = make()
        scope.__enter__()
        held.append(scope)

    return leave_it_open


LEAKS: dict[str, Callable[[], None]] = {
    "grad": lambda: torch._C._set_grad_enabled(False),
    "inference": enters(torch.inference_mode),
    "below autograd": enters(torch._C._AutoDispatchBelowAutograd),
    "autocast": enters(lambda: torch.autocast("cpu", dtype=torch.float16, cache_enabled=False)),
    "dtype alone": lambda: torch.set_autocast_dtype("cpu", torch.float16),
    "cache alone": lambda: torch.set_autocast_cache_enabled(not torch.is_autocast_cache_enabled()),
    "dispatch mode": enters(lambda: DispatchLog("d", [])),
    "function mode": enters(lambda: FunctionLog("f", [])),
    "default device": lambda: torch.set_default_device("meta"),
    "function state": enters(torch._C.DisableTorchFunctionSubclass),
    "frame callback": lambda: torch._C._dynamo.eval_frame.set_eval_frame(False),
    "stream": lambda: STREAMS.set_stream(STREAMS.new_stream("side")),
}
