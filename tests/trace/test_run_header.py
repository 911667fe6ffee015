from __future__ import annotations

import os
import sys
from importlib import metadata
from types import SimpleNamespace

import pytest

from dbo_greenlet._version import __version__
from dbo_greenlet.trace import make_header
from dbo_greenlet.trace.run_header import kept_environment


def test_the_header_states_versions_and_only_the_environment_that_matters(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in kept_environment(os.environ):
        monkeypatch.delenv(name)
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    monkeypatch.setenv("MY_SECRET_TOKEN", "x")
    header = make_header(rank=1, world=2, threads=3, model={"path": "m"}, settings={"N": 2}, origin_ns=5)
    assert (header.rank, header.world, header.threads, header.origin_ns) == (1, 2, 3, 5)
    assert (header.package, header.model, header.settings) == (__version__, {"path": "m"}, {"N": 2})
    assert header.env == {"OMP_NUM_THREADS": "3"}
    assert header.python == ".".join(map(str, sys.version_info[:3]))
    assert header.started.endswith("+00:00")
    assert header.versions["greenlet"] == metadata.version("greenlet") and "" not in header.versions.values()


def test_the_cuda_of_the_torch_that_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    torch = SimpleNamespace(__version__="2.11.0+cu129", version=SimpleNamespace(cuda="12.9"))
    monkeypatch.setitem(sys.modules, "torch", torch)
    header = make_header()
    assert (header.torch, header.versions["cuda"]) == ("2.11.0+cu129", "12.9")


@pytest.mark.parametrize(
    "name",
    [
        "CUDA_DEVICE_MAX_CONNECTIONS",
        "CUDA_LAUNCH_BLOCKING",
        "DBO_GREENLET",
        "DBO_GREENLET_STRICT",
        "EP_NUM_SMS",
        "NCCL_MAX_NCHANNELS",
        "NVSHMEM_QP_DEPTH",
        "PYTORCH_CUDA_ALLOC_CONF",
        "TORCH_NCCL_AVOID_RECORD_STREAMS",
        "VLLM_ALL2ALL_BACKEND",
        "VLLM_DBO_COMM_SMS",
        "VLLM_DEEPEP_BUFFER_SIZE_MB",
        "VLLM_SHARED_EXPERTS_STREAM_TOKEN_THRESHOLD",
    ],
)
def test_what_changes_how_microbatches_overlap_is_kept(name: str) -> None:
    assert kept_environment({name: "1"}) == {name: "1"}


@pytest.mark.parametrize(
    "name",
    [
        "HOME",
        "HF_TOKEN",
        "VLLM_API_KEY",
        "VLLM_DP_MASTER_IP",
        "AWS_SECRET_ACCESS_KEY",
        "DBO_GREENLET_API_KEY",
        "UCX_PASSWORD",
        "NIXL_ETCD_TOKEN",
        "EP_CREDENTIALS",
        "MY_NCCL_DEBUG",
    ],
)
def test_secrets_and_what_is_nobodys_business_are_not(name: str) -> None:
    assert kept_environment({name: "x"}) == {}
