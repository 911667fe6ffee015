"""The step counters of the workers on vLLM's /metrics.

vLLM answers /metrics in its front end; the counters are in the workers. The front end thinks of a folder and names it
in the environment, which the processes it starts inherit. A worker that engages makes the folder and counts from then
on in a file of one page there, mapped into its memory: a count stays one 8-byte store, and no step waits for anybody. A
scrape reads the files, one page for each worker. The process that thought of the folder removes it when it exits (one
that is killed leaves a page for each worker behind).

Nobody who does not engage writes anything. On a machine without prometheus_client, or where anything fails, there are
no metrics and one debug line. Not seen on /metrics are workers on other machines, and those that Ray starts: they do
not inherit the environment.

Rejected: prometheus_client's multiprocess mode, which vLLM uses only with several API servers; with one, it must be
off, and it is chosen once for a process, when the client is imported.
"""

from __future__ import annotations

import atexit
import functools
import logging
import mmap
import multiprocessing
import os
import secrets
import shutil
import sys
import tempfile
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from dbo_greenlet.errors import DboError
from dbo_greenlet.vllm.after_import import after_import
from dbo_greenlet.vllm.counters import BLOCK_SIZE, StepCounters, read_block

__all__ = ["FOLDER", "StepCollector", "announce", "publish", "read_folder"]

logger = logging.getLogger("vllm.plugins.dbo_greenlet")

FOLDER = "_DBO_GREENLET_METRICS"  # the variable that names the folder; set by us, not by users
_SUFFIX = ".counters"
_HOST_METRICS = "vllm.v1.metrics.prometheus"

_folders: dict[int, str] = {}  # by process id: forked children inherit this, and must not take it for theirs
_published: dict[int, mmap.mmap] = {}
_registries: weakref.WeakSet[Any] = weakref.WeakSet()


def announce() -> None:
    """Say to the processes that this one will start where to count, and put their counts on this one's registries.

    For the front end, before it starts the engine; harmless anywhere and any number of times. It imports nothing of
    vLLM and touches no disk.
    """
    try:
        _think_of_a_folder()
        # Every front end imports it. We do not: it brings the client, which chooses its multiprocess mode when it is
        # imported, by a variable that vLLM may set after it has loaded the plugins.
        after_import(_HOST_METRICS, _watch_registries)
    except Exception:  # whatever it is, a server does not stop for its metrics
        logger.debug("dbo_greenlet has no metrics", exc_info=True)


def publish(counters: StepCounters, rank: int | None = None) -> None:
    """Let the front end read this worker's counters.

    Args:
        counters: those of this process; they count in the published file from here on.
        rank: the label of this process; by default its number among all workers of the engine.
    """
    folder = os.environ.get(FOLDER)
    if folder is None or os.getpid() in _published:
        return
    try:
        _published[os.getpid()] = _publish_in(Path(folder), counters, _own_rank() if rank is None else rank)
    except Exception:  # whatever it is, a server does not stop for its metrics
        logger.debug("dbo_greenlet has no metrics", exc_info=True)


def read_folder(folder: Path | str) -> Iterator[tuple[int, dict[str, dict[str, int]]]]:
    """(rank, counts as in `StepCounters.snapshot`, with zeros) of each worker that counts in the folder."""
    for path in sorted(Path(folder).glob(f"*{_SUFFIX}")):
        try:
            yield read_block(path.read_bytes())
        except (OSError, DboError):
            continue  # removed meanwhile, or not ours


class StepCollector:
    """A collector for prometheus_client: reads the workers' counters when it is asked, and keeps nothing.

    dbo_greenlet_steps_total{kind, rank}: steps run as microbatches. dbo_greenlet_decisions_total{split, reason, rank}:
    steps by decision. A worker that was replaced by another of the same rank goes on counting in their sum.
    """

    def describe(self) -> list[Any]:
        """Both metrics without samples, so that registering reads no file."""
        return self._families()

    def collect(self) -> list[Any]:
        """Both metrics."""
        steps: Counter[tuple[str, ...]] = Counter()
        decisions: Counter[tuple[str, ...]] = Counter()
        folder = os.environ.get(FOLDER)
        for rank, counts in read_folder(folder) if folder else ():
            for kind, count in counts["executed"].items():
                steps[kind, str(rank)] += count
            for split, family in (("true", "split"), ("false", "unsplit")):
                for reason, count in counts[family].items():
                    decisions[split, reason, str(rank)] += count
        families = self._families()
        for metric, totals in zip(families, (steps, decisions), strict=True):
            for labels, count in totals.items():
                metric.add_metric(list(labels), count)
        return families

    def _families(self) -> list[Any]:
        from prometheus_client.core import CounterMetricFamily

        return [
            CounterMetricFamily(
                "dbo_greenlet_steps",
                "Steps run as microbatches: eager, captured into a CUDA graph, replayed from one, failed.",
                labels=["kind", "rank"],
            ),
            CounterMetricFamily(
                "dbo_greenlet_decisions",
                "Steps by whether they were split into microbatches, and why.",
                labels=["split", "reason", "rank"],
            ),
        ]


# --- the folder ---------------------------------------------------------------------------------------------------


def _think_of_a_folder() -> None:
    if os.getpid() in _folders:
        return
    # A process that multiprocessing started is a part of the server that its parent belongs to. Any other may be a
    # front end of its own, even where it inherits the variable of a process that served something else.
    if FOLDER in os.environ and multiprocessing.parent_process() is not None:
        return
    name = f"dbo-greenlet-{os.getpid()}-{secrets.token_hex(8)}"  # not to be guessed: the parent folder is everybody's
    folder = os.path.join(tempfile.gettempdir(), name)
    os.environ[FOLDER] = _folders[os.getpid()] = folder
    atexit.register(_remove, folder, os.getpid())


def _remove(folder: str, owner: int) -> None:
    if os.getpid() == owner:
        shutil.rmtree(folder, ignore_errors=True)


def _publish_in(folder: Path, counters: StepCounters, rank: int) -> mmap.mmap:
    folder.mkdir(mode=0o700, exist_ok=True)
    if folder.stat().st_uid != os.geteuid():
        raise DboError(f"the folder {folder} belongs to another user")
    descriptor, name = tempfile.mkstemp(prefix=f"rank{rank}-", suffix=".new", dir=folder)
    try:
        # Written, not only made longer: a store into a page for which the disk has no room would kill the worker.
        if os.write(descriptor, bytes(BLOCK_SIZE)) != BLOCK_SIZE:
            raise DboError(f"no room for {BLOCK_SIZE} bytes in {folder}")
        block = mmap.mmap(descriptor, BLOCK_SIZE)
    except BaseException:  # passed on; only the half-made file must not stay
        os.unlink(name)
        raise
    finally:
        os.close(descriptor)
    counters.place_in(block, rank=rank)
    os.rename(name, name.removesuffix(".new") + _SUFFIX)  # a reader sees a whole block or none
    return block


def _own_rank() -> int:
    import torch

    distributed = torch.distributed
    if distributed.is_available() and distributed.is_initialized():
        return distributed.get_rank()  # vLLM's global rank: that of data parallelism included
    return 0


# --- the registries -----------------------------------------------------------------------------------------------


def _watch_registries() -> None:
    """Register with the client's own registry, and with each that vLLM makes for /metrics from now on."""
    host = sys.modules[_HOST_METRICS]
    try:
        original = host.get_prometheus_registry
        _register(host.REGISTRY)
        if hasattr(original, "_dbo_greenlet"):
            return
        ours = _registering(original)
        # Besides vLLM's own module those that hold it already: the one that answers /metrics imports it by name.
        for module in [module for name, module in sys.modules.items() if name.startswith("vllm.")]:
            if getattr(module, "__dict__", {}).get("get_prometheus_registry") is original:
                module.get_prometheus_registry = ours  # type: ignore[attr-defined]
    except Exception:  # whatever it is, a server does not stop for its metrics
        logger.debug("dbo_greenlet has no metrics", exc_info=True)


def _registering(original: Callable[[], Any]) -> Callable[[], Any]:
    @functools.wraps(original)
    def get_prometheus_registry(*args: Any, **kwargs: Any) -> Any:
        registry = original(*args, **kwargs)
        _register(registry)
        return registry

    get_prometheus_registry._dbo_greenlet = True  # type: ignore[attr-defined]
    return get_prometheus_registry


def _register(registry: Any) -> None:
    try:
        if registry not in _registries:
            registry.register(StepCollector())
            _registries.add(registry)
    except Exception:  # whatever it is, a server does not stop for its metrics
        logger.debug("dbo_greenlet has no metrics", exc_info=True)
