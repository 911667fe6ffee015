"""What two ranks do when one of them fails, fails to replay a graph, or dies; cases like those of `transport_cases`."""

from __future__ import annotations

import os
import time
from functools import partial
from typing import Any

from torch import Tensor

from dbo_greenlet import Scheduler
from dbo_greenlet.errors import DboError
from tests.all2all.transport_ranks import Captured, Ranks, largest, original


def failure(ranks: Ranks) -> dict[str, Any]:
    """A microbatch of rank 0 fails, at each of its yields in turn; after a reset the next step is right."""
    told: dict[str, Any] = {"rank": [], "after": []}
    parts = [ranks.inputs(5, 70 + i) for i in range(2)]
    expected = [ranks.layers(part) for part in parts]
    captured = Captured(ranks, parts) if ranks.device.type == "cuda" and ranks.kind == "ll" else None
    for failing_layer in range(2):

        def entry(part: tuple[Tensor, Tensor, Tensor], fails: bool, at: int = failing_layer) -> Tensor:
            hidden, ids, weights = part
            for number in range(3):
                if fails and number == at:
                    raise ValueError("broken weights")
                hidden = hidden + ranks.layer(hidden, ids, weights, f"layer{number}")
            return hidden

        try:
            # Inside, because the other rank may fail before this one is back from here.
            ranks.together()
            Scheduler(strict=False).run(
                [partial(entry, part, ranks.rank == 0 and i == 1) for i, part in enumerate(parts)]
            )
            ranks.settled()
            told["rank"].append("no error")
        except DboError as error:
            if ranks.rank == 0:
                ranks.group.announce_failure(1, error)
            told["rank"].append(type(original(error)).__name__)
        ranks.group.reset()
        outputs = Scheduler(strict=False).run([partial(ranks.layers, part) for part in parts]).outputs
        ranks.settled()
        told["after"].append(max(largest(a, b) for a, b in zip(outputs, expected, strict=True)))
        if captured is not None:
            # The communicator of NCCL is another one after a reset; DeepEP's buffers are not.
            told["after"].append(max(largest(a, b) for a, b in zip(captured.replay(), expected, strict=True)))
    return told


def failed_replay(ranks: Ranks) -> dict[str, Any]:
    """Rank 0 launches a graph and rank 1 fails instead; after a reset, a step and a replay, in both orders."""
    parts = [ranks.inputs(5, 78 + i) for i in range(2)]
    expected = [ranks.layers(part) for part in parts]
    captured = Captured(ranks, parts)
    told: dict[str, Any] = {"rank": [], "after": []}
    for replay_first in (False, True):
        ranks.together()
        if ranks.rank == 0:
            captured.launch()
        try:
            ranks.group.exchange([0])
            if ranks.rank == 1:
                ranks.group.announce_failure(None, ValueError("no memory for the inputs"))
            ranks.settled()
            while True:
                ranks.group.check()
        except DboError as error:
            told["rank"].append(type(error).__name__)
        ranks.group.reset()
        for run in (captured.replay, captured.eager) if replay_first else (captured.eager, captured.replay):
            outputs = run()
            ranks.settled()
            told["after"].append(max(largest(a, b) for a, b in zip(outputs, expected, strict=True)))
    return told


def death(ranks: Ranks) -> dict[str, Any]:
    """The process of rank 1 ends in the middle of a step: what rank 0 gets, and after how many seconds."""
    parts = [ranks.inputs(5, 75 + i) for i in range(2)]

    def entry(part: tuple[Tensor, Tensor, Tensor], ends: bool) -> Tensor:
        hidden, ids, weights = part
        for number in range(3):
            if ends and number == 1:
                os._exit(3)
            hidden = hidden + ranks.layer(hidden, ids, weights, f"layer{number}")
        return hidden

    begin = time.monotonic()
    try:
        ranks.together()
        Scheduler(strict=False).run([partial(entry, part, ranks.rank == 1 and i == 1) for i, part in enumerate(parts)])
        ranks.settled()
    except DboError as error:
        return {"raised": repr(original(error)), "seconds": time.monotonic() - begin}
    return {"raised": "nothing"}
