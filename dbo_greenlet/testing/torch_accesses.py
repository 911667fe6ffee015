"""What a torch model reads and writes, noted operator by operator in a stream program.

    with recorded_step() as recording:
        model = Model(RecordedAllToAll(all_to_all, recording.device))
        contexts = make_ubatch_contexts(2, device=recording.device)
        Scheduler().run(entries, contexts)
    check(recording.program)

A dispatch mode sees every operator below autograd, with the tensors it really gets. It is entered round the step, so
each microbatch begins with it like with any other state of its caller, and it yields nowhere: the schedule is the same
with it and without. (Entering it in each microbatch was rejected: that state would have to be put on and taken off at
every yield.) PyTorch's CUDA sanitizer (`torch.cuda._sanitizer`) takes the same way for one thread and whole tensors.

* An operator reads its tensor arguments and writes what its schema says it mutates, and its outputs where they are new
  memory. One whose outputs are all memory of its arguments is a view, and touches nothing; `empty` and its kin neither.
* In-place operators read what they write, but for those that replace it (`copy_`, `fill_`, `out=`). Scattered writes
  (`index_put_`, `scatter_`, `masked_fill_`) touch some of the bytes and replace none for certain.
* What a recv hook issues is its owner's, whoever runs it.
* An operator whose result the host reads (`item`, a copy to the CPU, `nonzero`) makes the host wait for the current
  stream. On a CPU, where every tensor is in reach of the host, only if something recorded has written it; `tolist` and
  `numpy` of a CPU tensor are no operators and are not seen.
* Operators that `direct_ops` calls directly are looked into. Of others that are implemented in Python, kernels that
  are launched without an operator, and communication, only what is noted otherwise is known (`recorded_all2all`).

It works on a CPU, where streams are names, and on CUDA, where operators on CPU tensors alone are the host's and are
left out. Events are noted by the `RecordingDevice`; an event that the model records behind the device's back is not.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache
from threading import get_ident
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode

from ..devices import cpu_device
from ..direct_gate import Gate
from ..step import running
from ..stream_program import Access, RecordingDevice, StreamProgram
from .tensor_memory import TensorMemory

__all__ = ["EMPTY", "TorchAccesses", "for_its_owner", "memory_of", "recorded_step"]

# Make memory and leave it as it is.
EMPTY = {"empty", "empty_like", "new_empty", "empty_strided", "new_empty_strided", "empty_permuted"}
# About a tensor and not about what is in it.
_METADATA = {"record_stream", "is_pinned", "is_same_size", "set_", "resize_", "size", "stride", "numel", "dim"}
# Mutate some of the bytes.
_SCATTERED = {
    "_index_put_impl_",
    "index_add_",
    "index_copy_",
    "index_fill_",
    "index_put_",
    "index_reduce_",
    "masked_fill_",
    "masked_scatter_",
    "put_",
    "scatter_",
    "scatter_add_",
    "scatter_reduce_",
}
# Mutate, and add to what is there; the other scattered ones do not look at it.
_ADDING = {"index_add_", "index_reduce_", "scatter_add_", "scatter_reduce_"}
# In place, and what was there does not matter.
_REPLACING = {
    "bernoulli_",
    "copy_",
    "exponential_",
    "fill_",
    "normal_",
    "random_",
    "uniform_",
    "zero_",
}
# The host waits for their result: a value, or a shape that depends on values.
_READ_BY_HOST = {
    "_local_scalar_dense",
    "_unique2",
    "bincount",
    "equal",
    "masked_select",
    "nonzero",
    "unique_consecutive",
    "unique_dim",
}
_INDEXING = {"index", "index_put_", "_index_put_impl_"}


class TorchAccesses(TorchDispatchMode):
    """Notes what operators touch, on the current stream of `device`, in its program; a context manager.

    Attributes: `device`, `memory` (`name` gives tensors names for messages).
    """

    def __init__(self, device: RecordingDevice) -> None:
        super().__init__()
        self.device = device
        self.memory = memory_of(device)
        self._on_cpu = device.name == "cpu"

    @property
    def program(self) -> StreamProgram:
        return self.device.program

    def name(self, tensor: Tensor, name: str) -> None:
        """What messages call the memory of `tensor`."""
        self.memory.name(tensor, name)

    def name_all(self, module: torch.nn.Module) -> None:
        """Parameters and buffers by their own names."""
        for name, tensor in (*module.named_parameters(), *module.named_buffers()):
            self.memory.name(tensor, name)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if not isinstance(func, OpOverload):
            return func(*args, **kwargs)
        gate = func._op
        if type(gate) is Gate and gate._enabled():
            with self:
                return gate._implementation(*args, **kwargs)
        if self.memory.paused or func.namespace in ("prim", "c10d"):
            return func(*args, **kwargs)
        if _is_composite(func):
            # Seen in inference mode only; taken apart, as outside of it, for what its parts do.
            with self:
                return func.decompose(*args, **kwargs)
        result = func(*args, **kwargs)
        self._note(func, args, kwargs, result)
        return result

    def _note(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        name = func._schema.name.partition("::")[2]
        if name == "resize_":
            self.memory.find(args[0])  # it may lie elsewhere now
        if name in EMPTY or name in _METADATA:
            return
        plan = _plan(func, name)
        only_shape = name.endswith("_like") or name.startswith("new_")
        given: list[Tensor] = []
        reads: list[Tensor] = []
        writes: list[tuple[Tensor, bool]] = []
        for value, (mutated, read, partial) in _arguments(plan, args, kwargs):
            for tensor in _tensors(value):
                given.append(tensor)
                if mutated:
                    writes.append((tensor, partial))
                if (read and not only_shape) or (
                    partial and kwargs.get("accumulate", len(args) > 3 and args[3] is True)
                ):
                    reads.append(tensor)
        made = list(_tensors(result))
        if not self._on_cpu and not any(tensor.is_cuda for tensor in (*given, *made)):
            return
        memory = self.memory
        old = {id(memory.find(tensor)) for tensor in given}
        fresh = [tensor for tensor in made if id(memory.find(tensor, name)) not in old]
        if made and not fresh and not writes:
            return
        waits = self._host_waits(name, args, kwargs, given, made)
        accesses: dict[Access, None] = {}
        for tensor in reads:
            if (access := memory.access(tensor, False)) is not None:
                accesses[access] = None
        for tensor, partial in (*writes, *((each, False) for each in fresh)):
            if (access := memory.access(tensor, True, partial=partial, maker=name)) is not None:
                accesses[access] = None
        with for_its_owner(self.program):
            self.device.work(name, tuple(accesses))
            if waits:
                stream = self.device.name_stream(self.device.current_stream())
                self.program.add("host_wait", stream, f"the host reads {name}")

    def _host_waits(
        self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], given: list[Tensor], made: list[Tensor]
    ) -> bool:
        if not self._on_cpu and len({tensor.is_cuda for tensor in (*given, *made)}) == 2:
            # Between device and host, either way.
            if name == "_to_copy":
                return not kwargs.get("non_blocking")
            if name == "copy_":
                return not kwargs.get("non_blocking", len(args) > 2 and args[2])
        if name in _READ_BY_HOST:
            read = given
        elif name in _INDEXING:
            read = [each for each in _tensors(args[1]) if each.dtype in (torch.bool, torch.uint8)]
        else:
            return False
        return any(
            tensor.is_cuda or (self._on_cpu and (found := self.memory.find(tensor)) is not None and found.written)
            for tensor in read
        )


@contextmanager
def recorded_step(device: Any = None, *, keep_places: bool = True) -> Iterator[TorchAccesses]:
    """Record what runs inside: `recording.device` is the twin of `device` to run on, `recording.program` the result.

    Args:
        device: a `CudaDevice`, or None for the CPU.
        keep_places: note which line issued each operation, outside torch and this package's recording.
    """
    program = StreamProgram(keep_places=keep_places)
    with TorchAccesses(RecordingDevice(cpu_device() if device is None else device, program)) as accesses:
        yield accesses


def memory_of(device: RecordingDevice) -> TensorMemory:
    """The memory of the tensors that are noted in the program of `device`; one for all who note there."""
    memory = device.__dict__.get("tensor_memory")
    if memory is None:
        memory = device.__dict__["tensor_memory"] = TensorMemory()
    return memory


@cache
def _is_composite(func: Any) -> bool:
    return torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "CompositeImplicitAutograd")


# Of an argument: whether it is mutated, read, and mutated only in part.
_Way = tuple[bool, bool, bool]
_plans: dict[Any, tuple[list[_Way], dict[str, _Way]]] = {}


def _plan(func: Any, name: str) -> tuple[list[_Way], dict[str, _Way]]:
    plan = _plans.get(func)
    if plan is None:
        positional: list[_Way] = []
        named: dict[str, _Way] = {}
        for argument in func._schema.arguments:
            mutated = argument.alias_info is not None and argument.alias_info.is_write
            partial = mutated and name in _SCATTERED
            if not mutated:
                read = True
            elif argument.kwarg_only or name in _REPLACING:
                read = False  # out=, or replaced
            else:
                read = not partial or name in _ADDING
            way = (mutated, read, partial)
            named[argument.name] = way
            if not argument.kwarg_only:
                positional.append(way)
        plan = _plans[func] = (positional, named)
    return plan


def _arguments(
    plan: tuple[list[_Way], dict[str, _Way]], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Iterator[tuple[Any, _Way]]:
    positional, named = plan
    yield from zip(args, positional, strict=False)
    for name, value in kwargs.items():
        yield value, named[name]


def _tensors(value: Any) -> Iterable[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for each in value:
            yield from _tensors(each)


def for_its_owner(program: StreamProgram) -> AbstractContextManager[None]:
    """What is noted inside is charged to the microbatch whose recv hook runs on this thread, if one does."""
    microbatch = running.get(get_ident())
    if microbatch is not None and microbatch.step is not None:
        for each in microbatch.step.microbatches:
            if any(receive.running for receive in each.outstanding):
                return program.on_behalf_of(each.index)
    return nullcontext()
