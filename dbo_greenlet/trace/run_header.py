"""The header of a run: versions, the machine, and those environment variables that change how a run behaves.

Never the whole environment: it holds secrets. What is kept is named here, one by one or by the beginning of its name;
of the latter, nothing that is called a key, a token or a password.
"""

from __future__ import annotations

import os
import platform
import re
import sys
from collections.abc import Mapping
from contextlib import suppress
from datetime import datetime, timezone
from importlib import metadata
from typing import Any

from .._version import __version__
from .records import HeaderRecord

__all__ = ["kept_environment", "make_header"]

_NAMES = frozenset(
    {
        # Python, and which operators are deterministic
        "CUBLAS_WORKSPACE_CONFIG",
        "PYTHONHASHSEED",
        # how many streams reach the GPU at once, what the host waits for, and which GPU it is
        "CUDA_DEVICE_MAX_CONNECTIONS",
        "CUDA_DEVICE_MAX_COPY_CONNECTIONS",
        "CUDA_DEVICE_ORDER",
        "CUDA_LAUNCH_BLOCKING",
        "CUDA_MODULE_LOADING",
        "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE",
        "CUDA_VISIBLE_DEVICES",
        "GPU_MAX_HW_QUEUES",
        "HIP_LAUNCH_BLOCKING",
        "HIP_VISIBLE_DEVICES",
        "ROCR_VISIBLE_DEVICES",
        # when memory goes back and comes again
        "PYTORCH_ALLOC_CONF",
        "PYTORCH_CUDA_ALLOC_CONF",
        "PYTORCH_HIP_ALLOC_CONF",
        "PYTORCH_NO_CUDA_MEMORY_CACHING",
        # DeepEP, beside what begins with EP_
        "DISABLE_NVSHMEM",
        "DISABLE_SM90_FEATURES",
        # vLLM: what splits a step, carries its tokens and runs beside them. Not by VLLM_, which begins VLLM_API_KEY.
        "VLLM_ALL2ALL_BACKEND",
        "VLLM_DBO_COMM_SMS",
        "VLLM_DISABLE_COMPILE_CACHE",
        "VLLM_DISABLE_PYNCCL",
        "VLLM_DISABLE_SHARED_EXPERTS_STREAM",
        "VLLM_ENABLE_MOE_DP_CHUNK",
        "VLLM_FUSED_MOE_CHUNK_SIZE",
        "VLLM_MOE_DP_CHUNK_SIZE",
        "VLLM_MOE_ROUTING_SIMULATION_STRATEGY",
        "VLLM_MOE_SKIP_PADDING",
        "VLLM_MOE_USE_DEEP_GEMM",
        "VLLM_MULTI_STREAM_GEMM_TOKEN_THRESHOLD",
        "VLLM_PLUGINS",
        "VLLM_RANDOMIZE_DP_DUMMY_INPUTS",
        "VLLM_SHARED_EXPERTS_STREAM_TOKEN_THRESHOLD",
        "VLLM_TORCH_PROFILER_DIR",
        "VLLM_USE_BREAKABLE_CUDAGRAPH",
        "VLLM_USE_DEEP_GEMM",
        "VLLM_USE_NCCL_SYMM_MEM",
        "VLLM_USE_V1",
        "VLLM_USE_V2_MODEL_RUNNER",
    }
)
_BEGINNINGS = (
    "DBO_GREENLET",
    "DEEPEP_",
    "DEEP_EP_",
    "EP_",
    "GLOO_",
    "KMP_",
    "MKL_",
    "NCCL_",
    "NIXL_",
    "NVSHMEM_",
    "OMP_",
    "RCCL_",
    "TORCH_NCCL_",
    "UCX_",
    "VLLM_DEEPEP",
)
# By the names under which they are installed.
_PACKAGES = (
    "deep_ep",
    "greenlet",
    "nvidia-nccl-cu12",
    "nvidia-nccl-cu13",
    "nvidia-nvshmem-cu12",
    "nvidia-nvshmem-cu13",
    "transformers",
    "triton",
    "vllm",
)
_SECRET = re.compile(r"(?:^|_)(?:KEY|TOKEN|SECRET|PASSWORD|PASSWD|CREDENTIALS?)(?:_|$)")


def kept_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """Those of the variables that change a run and hold no secret, sorted by name."""
    return {
        name: value
        for name, value in sorted(environment.items())
        if name in _NAMES or (name.startswith(_BEGINNINGS) and not _SECRET.search(name))
    }


def make_header(
    *,
    rank: int = 0,
    world: int = 1,
    threads: int = 0,
    model: Mapping[str, Any] | None = None,
    settings: Mapping[str, Any] | None = None,
    origin_ns: int = 0,
) -> HeaderRecord:
    """The header of a run of this process, with the versions and the environment filled in.

    Args:
        rank, world, threads, model, settings: as in `HeaderRecord`.
        origin_ns: the recorder's (`StepRecorder.origin_ns`).
    """
    return HeaderRecord(
        package=__version__,
        rank=rank,
        world=world,
        torch=_torch_version(),
        python=platform.python_version(),
        platform=platform.platform(),
        threads=threads,
        model=dict(model or {}),
        settings=dict(settings or {}),
        env=kept_environment(os.environ),
        started=datetime.now(timezone.utc).isoformat(timespec="seconds"),
        origin_ns=origin_ns,
        versions=_versions(),
    )


def _versions() -> dict[str, str]:
    found = {}
    for name in _PACKAGES:
        with suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    # Asked of what is loaded, like torch's own.
    cuda = getattr(getattr(sys.modules.get("torch"), "version", None), "cuda", None)
    return found | ({"cuda": str(cuda)} if cuda else {})


def _torch_version() -> str:
    # What is loaded knows its build ("2.13.0+cpu"); what is only installed has a version. Nothing is imported for it.
    if (torch := sys.modules.get("torch")) is not None:
        return str(torch.__version__)
    try:
        return metadata.version("torch")
    except metadata.PackageNotFoundError:
        return ""
