"""Environment variables that keep streams from running side by side."""

from __future__ import annotations

from .checks import Check, Facts, Looked, StepView
from .findings import Hit, Missing, Place

__all__ = ["OneConnection"]

VARIABLE = "CUDA_DEVICE_MAX_CONNECTIONS"


class OneConnection(Check):
    """By the header of each rank whose steps were split, unless it ran on a CPU."""

    def __init__(self, facts: Facts) -> None:
        super().__init__(facts)
        self._ranks: dict[int, bool] = {}  # rank -> whether any of its steps was timed on a GPU

    def step(self, view: StepView) -> Looked:
        if not view.split:
            return None
        self._ranks[view.step.rank] = self._ranks.get(view.step.rank, False) or bool(view.step.gpu)
        return []

    def end(self) -> list[Hit | Missing]:
        out: list[Hit | Missing] = []
        for rank, on_gpu in sorted(self._ranks.items()):
            header = self.facts.headers.get(rank)
            if header is None:
                out.append(Missing("needs the rank's header, which holds the environment"))
            elif _on_cpu(header.settings.get("device"), header.torch) and not on_gpu:
                continue  # nothing there has connections
            elif header.env.get(VARIABLE, "").strip() == "1":
                what = (
                    f"{VARIABLE}=1: all streams of a process share one queue to the GPU, in the order of the launches"
                )
                out.append(Hit(what, Place(rank=rank)))
        return out


def _on_cpu(device: object, torch: str) -> bool:
    return device == "cpu" or (device is None and torch.endswith("+cpu"))
