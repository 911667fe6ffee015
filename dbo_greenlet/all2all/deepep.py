"""What the two DeepEP transports share: the library, the group of ranks that its buffer meets through, and its limits.

DeepEP's `Buffer` exchanges its addresses either through a torch process group or through an object with three methods.
It gets the second, served by our `RankGroup`: no default process group is needed, and a rank that dies while the buffer
is made raises `RankFailedError` on the others instead of leaving them waiting.

This is DeepEP 1.2 (`deep_ep.Buffer`). DeepEP 2 has another interface, `deep_ep.ElasticBuffer`, and is refused.
"""

from __future__ import annotations

import importlib
import pickle
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from ..errors import BrokenGroupError, ConfigurationError, DboError, SchedulerInternalError
from ..ranks import RankGroup
from .errors import AllToAllInputError
from .operation_log import OperationLog
from .routing import check_inputs, experts_per_rank

__all__ = [
    "TOO_LATE",
    "DeepEPTransport",
    "RanksForDeepEP",
    "check_group",
    "check_hidden",
    "import_deep_ep",
    "make_buffer",
    "meet",
]

# Of the ranks; a constant so that everything but the kernels can be tested on CPUs.
DEVICE_TYPE = "cuda"

_LOST = "an error inside DeepEP left its buffer in a state that nobody knows; restart all ranks"
TOO_LATE = "a dispatch that began before the group was reset cannot be completed after it"

_NEEDED = ("dispatch", "combine", "low_latency_dispatch", "low_latency_combine", "get_dispatch_layout", "set_num_sms")


def import_deep_ep() -> ModuleType:
    """The module `deep_ep`.

    Raises `ConfigurationError` if it is not installed, cannot be loaded, or is not the 1.2 that is needed here.
    """
    try:
        deep_ep = importlib.import_module("deep_ep")
    except ModuleNotFoundError as error:
        if error.name not in ("deep_ep", "deep_ep_cpp"):
            raise
        raise ConfigurationError(
            'DeepEP is not installed; pip install "dbo-greenlet[deepep]" brings version 1.2.1 (Linux, x86_64, CUDA)'
        ) from error
    except (ImportError, OSError) as error:
        # A shared library that is missing, or of another version.
        raise ConfigurationError(
            f"DeepEP is installed and cannot be loaded: {error}. It needs the torch and CUDA versions that it was "
            "built with, and the lib folder of the package nvidia.nvshmem on LD_LIBRARY_PATH"
        ) from error
    missing = [name for name in _NEEDED if not hasattr(getattr(deep_ep, "Buffer", None), name)]
    if missing:
        found = "DeepEP 2 (ElasticBuffer)" if hasattr(deep_ep, "ElasticBuffer") else "a DeepEP"
        raise ConfigurationError(
            f"{found} is installed, whose Buffer has no {', '.join(missing)}; this package works with DeepEP 1.2: "
            'pip install "dbo-greenlet[deepep]"'
        )
    return deep_ep


def check_group(group: RankGroup, name: str, counts: tuple[int, ...]) -> None:
    """Raises `ConfigurationError` unless DeepEP can run among the ranks of `group`: `counts` of them, on GPUs."""
    if group.world_size == 1:
        raise ConfigurationError(
            f"{name} needs at least two ranks, DeepEP refuses one; use the loopback for a single one"
        )
    if group.world_size not in counts:
        raise ConfigurationError(
            f"{name} with {group.world_size} ranks: within one node it takes {_either(counts)} ranks, and between "
            "nodes this package never ran"
        )
    if group.device.type != DEVICE_TYPE:
        raise ConfigurationError(f"{name} needs a group of ranks on CUDA devices, not on {group.device}")


def check_hidden(
    hidden: Tensor, topk_ids: Tensor, topk_weights: Tensor, num_experts: int, width: int, most: int
) -> None:
    """Raises `AllToAllInputError` for what `AllToAll.dispatch_send` refuses, or DeepEP.

    That is another dtype than bfloat16, another width than `width`, more than `most` choices.
    """
    check_inputs(hidden, topk_ids, topk_weights, num_experts)
    if hidden.dtype != torch.bfloat16:
        raise AllToAllInputError(f"DeepEP carries hidden rows in bfloat16, not in {hidden.dtype}")
    if hidden.shape[1] != width:
        raise AllToAllInputError(f"hidden has rows of {hidden.shape[1]}, the buffers were made for {width}")
    if topk_ids.shape[1] > most:
        raise AllToAllInputError(f"topk_ids has {topk_ids.shape[1]} choices a token, DeepEP takes at most {most}")


class RanksForDeepEP:
    """A `RankGroup` with the three methods that DeepEP asks for; the names are those of mpi4py."""

    def __init__(self, group: RankGroup) -> None:
        self._group = group

    def Get_rank(self) -> int:
        return self._group.rank

    def Get_size(self) -> int:
        return self._group.world_size

    def allgather(self, mine: Any) -> list[Any]:
        """Every rank's object, of a kind that pickle knows."""
        data = pickle.dumps(mine)
        lengths = self._group.exchange([len(data)]).flatten().tolist()
        rows = self._group.exchange(torch.frombuffer(bytearray(data.ljust(max(lengths), b"\0")), dtype=torch.uint8))
        told = rows.to(torch.uint8).numpy()
        return [pickle.loads(row[:length].tobytes()) for row, length in zip(told, lengths, strict=True)]


def make_buffer(deep_ep: ModuleType, group: RankGroup, **sizes: Any) -> Any:
    """A `deep_ep.Buffer` between the ranks of `group`; `sizes` as its constructor calls them. Blocks for all ranks.

    Raises `ConfigurationError` where DeepEP cannot make one, `RankFailedError` if a rank failed meanwhile.
    """
    with torch.cuda.device(group.device):
        if "PCIE" in torch.cuda.get_device_name().upper():
            raise ConfigurationError(
                "DeepEP looks for NVLink between PCIe cards through a torch process group, and has none here"
            )
        try:
            return deep_ep.Buffer(None, comm=RanksForDeepEP(group), explicitly_destroy=True, **sizes)
        except DboError:
            raise
        except (RuntimeError, AssertionError) as error:
            raise ConfigurationError(f"DeepEP cannot make its buffer ({_in_short(sizes)}): {error}") from error


def meet(group: RankGroup, what: str, row: list[int]) -> list[list[int]]:
    """Every rank's `row`, if all ranks are there for the same thing: `what`, in the same instance of DeepEP's buffer.

    Raises `BrokenGroupError` where they are not: a process that took the place of a dead rank makes new buffers, and
    the others cannot let it into theirs.
    """
    kind = int.from_bytes(what.encode()[:7], "big")
    rows: list[list[int]] = group.exchange([kind, *row]).tolist()
    if any(theirs[0] != kind for theirs in rows):
        raise BrokenGroupError(
            "a rank was started anew, and DeepEP cannot take it into the buffers of the others; restart all ranks"
        )
    return [theirs[1:] for theirs in rows]


class DeepEPTransport:
    """What both transports are: ranks, a buffer, a log of operations, and the way back after a failed step.

    `name` is the transport's for traces, `short` a word of two letters by which the ranks know what they meet for.
    """

    name = "deepep"
    short = ""
    buffer: Any

    def __init__(self, group: RankGroup, num_experts: int) -> None:
        self.group = group
        self.num_experts = num_experts
        self.num_local_experts = experts_per_rank(num_experts, group.world_size)
        self._log = OperationLog()
        self._generation = group.generation
        # Set for good by an error inside the library: what it had done by then cannot be known, which half of a buffer
        # it will use next for example, and an operation that does not meet its counterpart gives wrong rows.
        self._lost = False

    @property
    def rank(self) -> int:
        return self.group.rank

    @property
    def world_size(self) -> int:
        return self.group.world_size

    def close(self) -> None:
        """Give the buffer back; every rank closes, and it returns when all do. After a failure it is left alone."""
        buffer, self.buffer = self.buffer, None
        if buffer is not None and not self._lost:
            try:
                meet(self.group, f"{self.short} end", [])
                self.group.wait_for_device()
            except DboError:
                # A rank that will not come: the buffer can only be taken down together, and these processes are ending.
                return
            torch.cuda.synchronize(self.group.device)
            buffer.destroy()

    def make_ready(self) -> None:
        """Before the first operation of a step. Raises `RankFailedError` or `BrokenGroupError`."""
        self.group.check()
        if self._generation != self.group.generation:
            self._settle()
        elif self._lost:
            raise BrokenGroupError(_LOST)

    def call(self, function: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
        """Call the library; an error that comes out of it ends the use of the buffer."""
        if self._lost:
            raise BrokenGroupError(_LOST)
        try:
            return function(*arguments, **named)
        except BaseException:  # passed on; which half of the buffer comes next is not known any more
            self._lost = True
            raise

    def _settle(self) -> None:
        """Bring all ranks to the same operation, so that nothing waits for one that never comes.

        Operations come in the same order on every rank (law 5). A rank that left the failed step earlier than another
        does what the other still waits for. Every rank calls it, in its first step after a reset; where that fails, it
        goes on from where it was after the next.
        """
        if torch.cuda.is_current_stream_capturing():
            raise BrokenGroupError("after a reset of the group a step must be run before one is captured")
        self.before_settling()
        told = meet(self.group, f"{self.short} fix", [int(self._lost), self._log.total])
        if any(lost for lost, _ in told):
            raise BrokenGroupError(_LOST)
        totals = [total for _, total in told]
        least, most = min(totals), max(totals)
        numbers = self.group.exchange(self._log.since(least, most)).tolist()[totals.index(most)]
        for number in numbers[self._log.total - least : most - least]:
            self.owe(number)
        self.after_settling(most)
        self.group.wait_for_device()
        meet(self.group, f"{self.short} set", [])
        # The log goes on: a rank may fail at the very end of this, and its counts must still be those of the others.
        self._generation = self.group.generation

    def before_settling(self) -> None:
        """What this rank can do by itself."""

    def owe(self, number: int) -> None:
        """Do operation `number` of the log without tokens of this rank, and log it; each transport says how."""
        raise SchedulerInternalError(f"{type(self).__name__} is not a transport")

    def after_settling(self, total: int) -> None:
        """All ranks have done `total` operations."""


def _either(numbers: tuple[int, ...]) -> str:
    return f"{', '.join(map(str, numbers[:-1]))} or {numbers[-1]}"


def _in_short(sizes: dict[str, Any]) -> str:
    return ", ".join(f"{key}={value}" for key, value in sizes.items())
