"""The project's own model as a step under test: real numbers, every operator and transfer recorded."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from dbo_greenlet.all2all.loopback import Loopback
from dbo_greenlet.batching import UBatchBuffers, slice_all
from dbo_greenlet.batching.slices import split_step
from dbo_greenlet.devices.cpu import CpuDevice
from dbo_greenlet.moe import DeepseekV2Model, KVCache
from dbo_greenlet.stream_program import RecordingDevice, StreamProgram
from dbo_greenlet.testing.recorded_all2all import RecordedAllToAll
from dbo_greenlet.testing.step_run import StepUnderTest, TestBed
from dbo_greenlet.testing.torch_accesses import TorchAccesses, memory_of
from tests.runner.tiny import CONFIG, ROW_LENGTH, ROWS, tiny_model, tiny_step

# Prefills, a chunk of a longer one and decodes; two and three microbatches both cut a request somewhere.
REQUESTS = ((0, 0, 4), (1, 3, 1), (2, 5, 3), (3, 2, 1), (4, 0, 3))


class Exchange:
    """The model's all-to-all, which is another recorded one in each run."""

    def __init__(self, inner: Any) -> None:
        self.inner = self.now = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self.now, name)


class Recordings:
    """Makes a recording device for each run; the operators of a run are noted on its device.

    An exploration makes its devices itself, so the mode that sees the operators stays on and changes its device.
    """

    def __init__(self) -> None:
        self._accesses: TorchAccesses | None = None

    @contextmanager
    def recording(self) -> Iterator[None]:
        with torch.inference_mode(), TorchAccesses(self.make_device()) as self._accesses:
            yield
        self._accesses = None

    def make_device(self) -> RecordingDevice:
        device = RecordingDevice(CpuDevice(), StreamProgram(keep_places=True))
        if self._accesses is not None:
            self._accesses.device, self._accesses.memory = device, memory_of(device)
        return device


class OwnModel(Recordings):
    """A DeepSeek-V2 model with `layers` MoE layers, in the form that `run_step` and `explore` take.

        own = OwnModel(1)
        with own.recording():
            explore(own.build, make_device=own.make_device)

    Attributes: `model`; `begin`, called before each run.
    """

    def __init__(self, layers: int, *, count: int = 2, all_to_all: Any = None, seed: int = 0) -> None:
        super().__init__()
        inner = Loopback(CONFIG.n_routed_experts) if all_to_all is None else all_to_all
        self.exchange = Exchange(inner)
        self.model = _model(layers, self.exchange)
        step = tiny_step(REQUESTS, seed)
        self.parts = slice_all(step, split_step(step, count), UBatchBuffers(8, count))
        self.begin: Callable[[], None] = lambda: None

    def build(self, bed: TestBed) -> StepUnderTest:
        self.begin()
        if self.exchange.now is not self.exchange.inner:
            self.exchange.now.detach()  # of a run that failed
        recorded = self.exchange.now = RecordedAllToAll(self.exchange.inner, bed.device)
        memory = memory_of(bed.device)
        memory.paused += 1  # what earlier steps left in the cache is no part of this one
        cache = self.cache()
        memory.paused -= 1
        memory.name(cache._slots, "KV cache")
        entries: list[Callable[[], Tensor]] = [partial(self.model, part, cache) for part in self.parts]
        return StepUnderTest(entries, after=recorded.detach)

    def cache(self) -> KVCache:
        """A cache with what earlier steps left in it."""
        cache = KVCache(self.model.config, ROWS, ROW_LENGTH)
        slots = cache._slots
        slots.copy_(torch.randn(slots.shape, generator=torch.Generator().manual_seed(1)))
        return cache


def _model(layers: int, exchange: Exchange) -> DeepseekV2Model:
    """`layers` MoE layers behind a dense one, with the tiny model's weights; a third one has those of the second."""
    source = dict(tiny_model().named_parameters())
    model = DeepseekV2Model(replace(CONFIG, num_hidden_layers=1 + layers), exchange).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.startswith("layers."):
                _, number, rest = name.split(".", 2)
                name = f"layers.{min(int(number), 2)}.{rest}"
            whole = source[name]
            first = exchange.rank * exchange.num_local_experts
            parameter.copy_(whole if whole.shape == parameter.shape else whole[first : first + len(parameter)])
    return model
