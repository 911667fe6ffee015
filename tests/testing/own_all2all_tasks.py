"""Ranks that explore in lockstep: real gloo groups, the project's transports, every operator and transfer recorded."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from dbo_greenlet.all2all.torch_distributed import TorchDistributed
from dbo_greenlet.testing import Faults, FaultyRanks, explore, run_step
from dbo_greenlet.testing.recorded_all2all import RecordedAllToAll
from dbo_greenlet.testing.step_run import StepUnderTest, TestBed
from dbo_greenlet.testing.verdicts import DEFAULT, laws_kept
from tests.all2all.fake_deep_ep import cuda_on_cpu
from tests.all2all.transport_ranks import Ranks
from tests.ranks.rank_pool import group
from tests.runner.tiny import CONFIG
from tests.testing.own_model import OwnModel, Recordings

VERDICTS = (*DEFAULT, laws_kept)


def told(build: Any, recordings: Recordings, **options: Any) -> dict[str, Any]:
    """What this rank has to say of its exploration."""
    with recordings.recording():
        try:
            found = explore(build, make_device=recordings.make_device, verdicts=VERDICTS, report=None, **options)
        except Exception as error:  # whatever it is, the test judges it
            return {"error": error}
    return {"schedules": found.schedules, "distinct": found.distinct, "fingerprint": found.fingerprint}


def model_over_gloo(name: str, capacity: int | None, static: bool, faults: str = "", **options: Any) -> dict[str, Any]:
    """One layer, whose experts are spread over the ranks; each rank has tokens of its own."""
    ranks = FaultyRanks(group(name), Faults.parse(faults))
    transport = TorchDistributed(ranks, CONFIG.n_routed_experts, capacity, static_shapes=static)  # type: ignore[arg-type]
    own = OwnModel(1, all_to_all=transport, seed=ranks.rank)
    own.begin = ranks.begin_step
    return {**told(own.build, own, **options), "struck": [str(fault) for fault in ranks.struck], "steps": ranks.steps}


def ready() -> bool:
    """Everything is imported, and torch has run the model's operators once: seconds on a busy machine."""
    own = OwnModel(1)
    with own.recording():
        return run_step(own.build, make_device=own.make_device).succeeded


class DeepEPLayer(Recordings):
    """One layer over a stand-in for DeepEP."""

    def __init__(self, ranks: Ranks) -> None:
        super().__init__()
        self.ranks = ranks
        self.parts = [ranks.inputs(5, seed) for seed in range(2)]

    def build(self, bed: TestBed) -> StepUnderTest:
        recorded = RecordedAllToAll(self.ranks.all_to_all, bed.device)
        return StepUnderTest([partial(self._layer, *part) for part in self.parts], after=recorded.detach)

    def _layer(self, hidden: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        return hidden + self.ranks.layer(hidden, ids, weights, "layer0")


def layer_over_deepep(name: str, kind: str, **options: Any) -> dict[str, Any]:
    with cuda_on_cpu():
        ranks = Ranks(kind, group(name), 32)
        layer = DeepEPLayer(ranks)
        with torch.no_grad():
            result = told(layer.build, layer, **options)
        ranks.all_to_all.close()
    return result
