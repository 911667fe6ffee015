"""Loaded by every process of a server of scripts/gpu_vllm_serve.py, as vLLM loads plugins: weights worth comparing
tokens of, and, where `FAULT_FILE` names a file, a layer that fails once that file is there.

It stands beside the package's own plugin and touches nothing that the package replaces.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

from gpu_vllm_engine import draw_weights
from gpu_vllm_rows import INJECTED, RANKS
from gpu_vllm_serve_left import tell_when_asked

FAULT_FILE = "GPU_VLLM_FAULT_FILE"
PLACE = "GPU_VLLM_FAULT_PLACE"
ONE_GPU = "GPU_VLLM_ONE_GPU"  # set: all ranks share the first one
# Layer and microbatch that raise. The third layer of the second one: both ranks and the sibling have something under
# way. The first layer, which has no experts, of the one that starts: of this step, nothing has been sent yet.
PLACES = {"raise": (2, 1), "raise-early": (0, 0)}
NAME = "gpu_vllm_serve_plugin"
METADATA = f"Metadata-Version: 2.1\nName: {NAME.replace('_', '-')}\nVersion: 0\n"
ENTRY_POINTS = f"[vllm.general_plugins]\n{NAME} = {NAME}:register\n"


class InjectedFault(RuntimeError):
    """What a layer raises once it is told to."""


def announce(folder: Path) -> None:
    """Write the metadata by which vLLM finds this file; the folder has to be on the path of its processes."""
    metadata = folder / f"{NAME}-0.dist-info"
    metadata.mkdir(parents=True, exist_ok=True)
    (metadata / "METADATA").write_text(METADATA)
    (metadata / "entry_points.txt").write_text(ENTRY_POINTS)


def register() -> None:
    """vLLM's entry point; called several times in a process."""
    tell_when_asked()
    if ONE_GPU in os.environ:
        _share_the_first_gpu()
    draw_weights(afterwards=_fail_on_demand if FAULT_FILE in os.environ else None)


def _share_the_first_gpu() -> None:
    """Every rank gets GPU 0; vLLM itself refuses to name one twice (`--device-ids`).

    NCCL refuses two ranks on one device of one host, so each process passes for a host of its own. Processes that are
    forked later do not come here again.
    """
    from vllm.engine.arg_utils import EngineArgs

    EngineArgs._resolve_device_ids = lambda _arguments: [0] * RANKS
    _be_a_host_of_its_own()
    os.register_at_fork(after_in_child=_be_a_host_of_its_own)


def _be_a_host_of_its_own() -> None:
    os.environ["NCCL_HOSTID"] = f"host{os.getpid()}"


def _fail_on_demand(model: Any, rank: int) -> None:
    """Make a layer of rank 1 raise in one microbatch, where `PLACE` says, once the file is there."""
    if rank != 1:
        return
    from vllm.v1.worker import ubatching

    place, trigger = os.environ[PLACE], Path(os.environ[FAULT_FILE])
    number, microbatch = PLACES[place]
    layer = model.model.layers[number]
    forward = layer.forward

    def failing(*args: Any, **kwargs: Any) -> Any:
        if ubatching.dbo_enabled() and ubatching.dbo_current_ubatch_id() == microbatch and trigger.exists():
            print(f"injected at {time.time():.2f}", flush=True)
            raise InjectedFault(INJECTED if place == "raise" else "the first layer failed, on purpose")
        return forward(*args, **kwargs)

    layer.forward = failing
