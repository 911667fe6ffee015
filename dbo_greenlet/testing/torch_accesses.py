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

import sys
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from threading import get_ident
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode

from ..devices import cpu_device
from ..direct_gate import Gate
from ..step import running
from ..stream_program import Access, RecordingDevice, StreamProgram
from .tensor_memory import Memory, TensorMemory

if TYPE_CHECKING:
    from typing_extensions import Self

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
        self._entered = 0  # how often it is entered now

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

    def __enter__(self) -> Self:
        # torch keeps its compiler out of a mode's code, and loads it for that with the first operator: seconds, in the
        # middle of the step. Where nobody has loaded it there is nothing to be kept out.
        if "torch._dynamo" not in sys.modules:
            self.__dict__["__torch_dispatch__"] = self._dispatched
        self._entered += 1
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._entered -= 1
        if not self._entered:
            # It refers to itself by it, and with it what it met would live until the garbage collector comes.
            self.__dict__.pop("__torch_dispatch__", None)
        super().__exit__(*error)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return self._dispatched(func, types, args, kwargs)

    def _dispatched(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        plan = _plans.get(func) or _plan(func)
        if plan is None:
            return func(*args, **kwargs)
        gate = func._op
        if type(gate) is Gate and gate._enabled():
            with self:
                return gate._implementation(*args, **kwargs)
        if plan.passed or self.memory.paused:
            return func(*args, **kwargs)
        if plan.composite:
            # Seen in inference mode only; taken apart, as outside of it, for what its parts do.
            with self:
                return func.decompose(*args, **kwargs)
        program = self.device.program
        if program.clock is None:
            result = func(*args, **kwargs)
            self._note(func, args, kwargs, result)
            return result
        # It began before it is noted. (`since_now`, without its generator: this runs for every operator.)
        before, program.began = program.began, program.clock()
        try:
            result = func(*args, **kwargs)
            self._note(func, args, kwargs, result)
        finally:
            program.began = before
        return result

    def _note(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        plan = _plans.get(func) or _plan(func)
        if plan is None:
            return
        name = plan.name
        if name == "resize_":
            self.memory.find(args[0])  # it may lie elsewhere now
        if plan.touches_nothing:
            return
        memory = self.memory
        find = memory.find
        given: list[Tensor] = []
        reads: list[tuple[Tensor, Memory]] = []
        writes: list[tuple[Tensor, Memory, bool]] = []
        works = False
        old: set[int | None] = set()  # None: of what has no memory (an empty tensor)
        for value, (mutated, read, partial) in _arguments(plan, args, kwargs):
            if value is None or value.__class__ in _NO_TENSORS:
                continue
            read = (read and not plan.only_shape) or (
                partial and kwargs.get("accumulate", len(args) > 3 and args[3] is True)
            )
            for tensor in (value,) if isinstance(value, Tensor) else _tensors(value):
                given.append(tensor)
                works |= mutated
                if (found := find(tensor)) is None:
                    old.add(None)
                    continue
                old.add(found.number)
                if mutated:
                    writes.append((tensor, found, partial))
                if read:
                    reads.append((tensor, found))
        made = (result,) if isinstance(result, Tensor) else tuple(_tensors(result))
        if not self._on_cpu and not any(tensor.is_cuda for tensor in (*given, *made)):
            return
        for tensor in made:
            # What an operator gives back is memory of its arguments (a view, or what it wrote), or new.
            found = find(tensor, name)
            if (None if found is None else found.number) not in old:
                works = True
                if found is not None:
                    writes.append((tensor, found, False))
        if made and not works:
            return
        waits = self._host_waits(name, args, kwargs, given, made)
        accesses: dict[Access, None] = {}
        for tensor, found in reads:
            if (access := memory.access_in(found, tensor, False)) is not None:
                accesses[access] = None
        for tensor, found, partial in writes:
            if (access := memory.access_in(found, tensor, True, partial=partial)) is not None:
                accesses[access] = None
        if (owner := _received_for()) is None:
            self._add(name, tuple(accesses), waits)
        else:
            with self.program.on_behalf_of(owner):
                self._add(name, tuple(accesses), waits)

    def _add(self, name: str, accesses: tuple[Access, ...], waits: bool) -> None:
        stream = self.device.work(name, accesses).stream
        if waits:
            self.program.add("host_wait", stream, f"the host reads {name}")

    def _host_waits(
        self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], given: list[Tensor], made: tuple[Tensor, ...]
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


# Of an argument: whether it is mutated, read, and mutated only in part.
_Way = tuple[bool, bool, bool]


class _Plan:
    """What is known of an operator before it is called.

    Attributes: `name`, `passed` (it is none that touches memory as far as anybody here knows), `composite` (it is made
    of others), `touches_nothing` (but for what it makes), `only_shape` (of its arguments only their shapes matter),
    `positional` and `named` (what it does to its arguments).
    """

    __slots__ = ("composite", "name", "named", "only_shape", "passed", "positional", "touches_nothing")

    def __init__(self, func: Any) -> None:
        self.name: str = func._schema.name.partition("::")[2]
        self.passed = func.namespace in ("prim", "c10d")
        self.composite: bool = torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "CompositeImplicitAutograd")
        self.touches_nothing = self.name in EMPTY or self.name in _METADATA
        self.only_shape = self.name.endswith("_like") or self.name.startswith("new_")
        self.positional: list[_Way] = []
        self.named: dict[str, _Way] = {}
        for argument in func._schema.arguments:
            mutated = argument.alias_info is not None and argument.alias_info.is_write
            partial = mutated and self.name in _SCATTERED
            if not mutated:
                read = True
            elif argument.kwarg_only or self.name in _REPLACING:
                read = False  # out=, or replaced
            else:
                read = not partial or self.name in _ADDING
            way = (mutated, read, partial)
            self.named[argument.name] = way
            if not argument.kwarg_only:
                self.positional.append(way)


_plans: dict[Any, _Plan] = {}
# What most arguments are that are no tensors.
_NO_TENSORS = frozenset({bool, int, float, torch.dtype, torch.device, torch.layout, torch.memory_format})


def _plan(func: Any) -> _Plan | None:
    """The plan of an operator; None for what is none (a higher-order one, say)."""
    if not isinstance(func, OpOverload):
        return None
    plan = _plans[func] = _Plan(func)
    return plan


def _arguments(plan: _Plan, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterable[tuple[Any, _Way]]:
    arguments: list[tuple[Any, _Way]] = list(zip(args, plan.positional, strict=False))
    if kwargs:
        arguments += [(value, plan.named[name]) for name, value in kwargs.items()]
    return arguments


def _tensors(value: Any) -> Iterable[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for each in value:
            yield from _tensors(each)


def for_its_owner(program: StreamProgram) -> AbstractContextManager[None]:
    """What is noted inside is charged to the microbatch whose recv hook runs on this thread, if one does."""
    owner = _received_for()
    return nullcontext() if owner is None else program.on_behalf_of(owner)


def _received_for() -> int | None:
    """The microbatch whose recv hook runs on this thread, if one does."""
    microbatch = running.get(get_ident())
    if microbatch is not None and microbatch.step is not None:
        for each in microbatch.step.microbatches:
            for receive in each.outstanding:
                if receive.running:
                    return each.index
    return None
