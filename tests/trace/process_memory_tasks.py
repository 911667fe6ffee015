"""What ranks run whose environment asks what operations do to memory, and the same with a recorder set up by hand."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dbo_greenlet.devices import cpu_device
from dbo_greenlet.memory_recorder import MemoryRecorder
from dbo_greenlet.microbatch import make_ubatch_contexts
from dbo_greenlet.scheduler import Scheduler
from dbo_greenlet.trace import OpRecord, read_trace
from dbo_greenlet.trace import process_trace as module
from tests.all2all.fake_deep_ep import cuda_on_cpu
from tests.all2all.transport_ranks import Ranks
from tests.ranks.rank_pool import group

__all__ = ["by_hand", "in_short", "over_a_transport"]


def in_short(records: Iterable[OpRecord]) -> list[tuple[Any, ...]]:
    """What does not differ from run to run: times, addresses and what is freed by whom when a step ends do."""
    kept = [each for each in records if each.op != "free"]
    places = {each.number: place for place, each in enumerate(kept)}
    return [
        (
            each.op, each.name, each.ubatch, each.slice, each.stream, each.owner,
            None if each.of is None else places[each.of], each.event, [(way, *rest) for way, _, *rest in each.memory],
        )
        for each in kept
    ]  # fmt: skip


def by_hand(
    make_entries: Callable[[Any], list[Callable[[], Any]]], all_to_all: Any, **options: Any
) -> list[tuple[Any, ...]]:
    """The operations of a step as a program notes them that was written for it, its all-to-all and contexts wrapped."""
    memory = MemoryRecorder()
    wrapped = memory.all_to_all(all_to_all)
    entries = make_entries(wrapped)
    contexts = make_ubatch_contexts(len(entries), device=memory.device)
    try:
        scheduler = Scheduler(instruments=[memory], **options)
        scheduler.recording = None
        scheduler.run(entries, contexts)
    finally:
        wrapped.detach()
    return in_short(memory.records(step=0))


def over_a_transport(name: str, kind: str, carrier: str) -> dict[str, Any]:
    """Two microbatches of two layers over a transport, three steps of which two are recorded."""
    told: dict[str, Any] = {}
    with cuda_on_cpu(), _recording(every=2) as folder:
        ranks = Ranks(kind, group(name), 32)
        parts = [ranks.inputs(5, seed) for seed in range(2)]
        expected = [_through(ranks, part) for part in parts]

        def entries(_: Any) -> list[Callable[[], Tensor]]:
            return [partial(_through, ranks, part) for part in parts]

        before = dict(vars(ranks.all_to_all))
        scheduler = Scheduler(carrier=carrier)
        for _ in range(3):
            contexts = make_ubatch_contexts(2, device=cpu_device())
            result = scheduler.run(entries(None), contexts)
            told.setdefault("equal", []).append(all(map(torch.equal, result.outputs, expected)))
        left = vars(ranks.all_to_all)
        told["left"] = [each for each in left if each not in before or type(left[each]) is not type(before[each])]
        told["hand"] = by_hand(entries, ranks.all_to_all, carrier=carrier)
        ranks.all_to_all.close()
        module.end_process_trace()
        (file,) = folder.iterdir()
        told["recorded"] = [in_short(step.ops) for step in read_trace(file).steps.values()]
    return told


def _through(ranks: Ranks, part: tuple[Tensor, Tensor, Tensor]) -> Tensor:
    hidden, ids, weights = part
    for layer in range(2):
        hidden = hidden + ranks.layer(hidden, ids, weights, f"layer{layer}")
    return hidden


@contextmanager
def _recording(every: int) -> Iterator[Path]:
    asked = {"DBO_GREENLET_TRACE_EVERY": str(every), "DBO_GREENLET_TRACE_MEMORY": "1"}
    with tempfile.TemporaryDirectory() as folder:
        os.environ |= asked | {"DBO_GREENLET_TRACE": folder}
        module._process_trace = None
        try:
            yield Path(folder)
        finally:
            for variable in (*asked, "DBO_GREENLET_TRACE"):
                del os.environ[variable]
            module._process_trace = None
