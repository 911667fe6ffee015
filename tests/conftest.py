"""What every test of the project shares: one torch thread, strict mode, hypothesis profiles, markers.

torch is not imported here: the core's tests run on Pythons that have none, and some tests look at whether it is loaded.
"""

from __future__ import annotations

import importlib.util
import os
import signal
import sys
from pathlib import Path

import pytest
from hypothesis import settings

# Before torch is imported by anybody, and inherited by the subprocesses that tests start: the suite runs beside others
# on few cores, and tiny models run slower on many threads than on one.
for _variable in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ.setdefault(_variable, "1")
# Every yield checks the frames it would switch under.
os.environ.setdefault("DBO_GREENLET_STRICT", "1")
# Models and tokenizers come from the package or from a test's own folder, never from a hub.
os.environ.setdefault("HF_HUB_OFFLINE", "1")

# No deadline: a first example pays for imports, and a busy machine is not a bug.
settings.register_profile("default", deadline=None)
settings.register_profile("ci", deadline=None, derandomize=True, print_blob=True)
settings.register_profile("other-pythons", deadline=None, max_examples=30)  # make test-core
settings.load_profile("ci" if os.environ.get("CI") else "default")


if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # Started in the background of a shell: what the tests start would be deaf to Ctrl-C, too.
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """With `-m vllm` or `-m gpu`, leave files without such tests alone: to import them all takes half a minute."""
    mark = config.option.markexpr
    if mark not in ("gpu", "vllm") or collection_path.suffix != ".py" or not collection_path.is_file():
        return None
    return True if f"mark.{mark}" not in collection_path.read_text(encoding="utf-8") else None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if hasattr(config, "workerinput"):
        # Shared out to processes by pytest-xdist: the long files go first, since at the end one would run alone.
        long_files = {item.path for item in items if item.get_closest_marker("slow")}
        items.sort(key=lambda item: item.path not in long_files)
    for item in items:
        if item.get_closest_marker("gpu") and not _has_cuda():
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
        if item.get_closest_marker("vllm") and importlib.util.find_spec("vllm") is None:
            item.add_marker(pytest.mark.skip(reason="needs vLLM: make test-vllm"))


def pytest_runtest_setup() -> None:
    # The environment variables above come too late where a plugin imported torch before this file.
    torch = sys.modules.get("torch")
    if torch is not None and torch.get_num_threads() != 1:
        torch.set_num_threads(1)


def _has_cuda() -> bool:
    if importlib.util.find_spec("torch") is None:
        return False
    import torch

    return torch.cuda.is_available()
