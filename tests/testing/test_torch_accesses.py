"""What operators are noted to touch, and hazards of torch programs on CPU streams."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import numpy as np
import pytest
import torch
from torch import Tensor

from dbo_greenlet import Scheduler, dbo_yield
from dbo_greenlet.direct_ops import register_direct_op
from dbo_greenlet.errors import UnsafeYieldError
from dbo_greenlet.microbatch import make_ubatch_contexts
from dbo_greenlet.stream_program import Access
from dbo_greenlet.testing.hazards import check, find_hazards
from dbo_greenlet.testing.tensor_memory import TensorMemory
from dbo_greenlet.testing.torch_accesses import TorchAccesses, recorded_step
from dbo_greenlet.yields import (
    dbo_maybe_run_recv_hook,
    dbo_register_recv_hook,
    dbo_switch_to_comm,
    dbo_switch_to_compute,
    dbo_yield_and_switch_from_comm_to_compute,
    dbo_yield_and_switch_from_compute_to_comm,
)


@pytest.fixture
def recording() -> Iterator[TorchAccesses]:
    with recorded_step() as made:
        yield made


def noted(recording: TorchAccesses) -> list[tuple[str, list[str]]]:
    """Each operation and its accesses, and none of it twice."""
    found = [(each.name, [str(access) for access in each.accesses]) for each in recording.program.operations]
    recording.program.clear()
    return found


def named(recording: TorchAccesses, **tensors: Tensor) -> None:
    for name, tensor in tensors.items():
        recording.name(tensor, name)
    recording.program.clear()


# -- operators ---------------------------------------------------------------------------------------------------------


def test_an_operator_reads_its_arguments_and_writes_what_it_makes(recording: TorchAccesses) -> None:
    a, b = torch.ones(2, 3), torch.ones(2, 3)
    named(recording, a=a, b=b)
    made = a + b
    named_made = noted(recording)
    assert named_made[0][0] == "add"
    assert named_made[0][1][:2] == ["reads a[0:24]", "reads b[0:24]"]
    assert named_made[0][1][2].startswith("writes tensor ")
    assert "(float32 2x3, made by add)[0:24]" in named_made[0][1][2]
    recording.name(made, "made")
    torch.mul(a, b, out=made)
    made.add_(a)
    made.copy_(b)
    made.zero_()
    assert noted(recording) == [
        ("mul", ["reads a[0:24]", "reads b[0:24]", "writes made[0:24]"]),
        ("add_", ["reads made[0:24]", "reads a[0:24]", "writes made[0:24]"]),
        ("copy_", ["reads b[0:24]", "writes made[0:24]"]),
        ("zero_", ["writes made[0:24]"]),
    ]


def test_views_metadata_and_new_memory_touch_nothing(recording: TorchAccesses) -> None:
    a = torch.ones(4, 6)
    named(recording, a=a)
    a.view(24), a.t(), a[1:3], a.expand(2, 4, 6), a.unsqueeze(0).detach(), a.split(2), a.reshape(6, 4), a.contiguous()
    a.view(torch.int32), torch.empty(3), torch.empty_like(a), a.new_empty(2), a.shape, a.is_contiguous(), a.data_ptr()
    assert noted(recording) == []
    # A copy is none of these.
    a.t().reshape(24)
    assert [name for name, _ in noted(recording)] == ["clone"]


def test_a_view_touches_its_own_bytes(recording: TorchAccesses) -> None:
    a = torch.zeros(4, 6)
    named(recording, a=a)
    a[1:3].fill_(1.0)
    a[:, 2:4].fill_(1.0)
    a[2, 3].fill_(1.0)
    a.view(torch.uint8)[3:, :4].fill_(1)
    a[::2].fill_(1.0)
    a.view(2, 2, 6)[:, :, :2].fill_(1.0)
    torch.tensor(5.0).expand(3, 4).sum()
    told = noted(recording)
    assert [accesses for name, accesses in told if name == "fill_"] == [
        ["writes a[24:72]"],
        ["writes a[8:88, 8 of every 24]"],
        ["writes a[60:64]"],
        ["writes a[72:76]"],
        ["writes a[0:72, 24 of every 48]"],
        ["writes a[0:80, 8 of every 24]"],
    ]
    assert told[-1][1][0].endswith("[0:4]")  # one element, however often


def test_scattered_writes_replace_nothing_for_certain_and_read_only_what_they_add_to(recording: TorchAccesses) -> None:
    a, index, rows = torch.zeros(4, 6), torch.tensor([1, 2]), torch.ones(2, 6)
    named(recording, a=a, index=index, rows=rows)
    a.index_copy_(0, index, rows)
    a[index] = rows
    a.index_add_(0, index, rows)
    a.index_put_((index,), rows, accumulate=True)
    given = ["reads index[0:16]", "reads rows[0:48]"]
    assert noted(recording) == [
        ("index_copy_", [*given, "writes some of a[0:96]"]),
        ("index_put_", [*given, "writes some of a[0:96]"]),
        ("index_add_", ["reads a[0:96]", *given, "writes some of a[0:96]"]),
        ("index_put_", ["reads a[0:96]", *given, "writes some of a[0:96]"]),
    ]


def test_lists_of_tensors_and_empty_ones(recording: TorchAccesses) -> None:
    a, b, empty = torch.ones(2), torch.ones(2), torch.ones(0)
    named(recording, a=a, b=b)
    torch._foreach_add_([a, b], 1.0)
    torch.cat([a, empty, b])
    empty.add_(1.0)
    told = noted(recording)
    assert told[0] == ("_foreach_add_", ["reads a[0:8]", "reads b[0:8]", "writes a[0:8]", "writes b[0:8]"])
    assert told[1][1][:2] == ["reads a[0:8]", "reads b[0:8]"]
    assert told[2] == ("add_", [])


def test_shapes_are_no_reads(recording: TorchAccesses) -> None:
    a = torch.ones(2)
    named(recording, a=a)
    torch.zeros_like(a), a.new_zeros(3)
    assert all(not any("reads" in each for each in accesses) for _, accesses in noted(recording))


def test_the_host_waits_for_what_it_reads_if_it_was_computed(recording: TorchAccesses) -> None:
    given = torch.tensor([1, 2])
    recording.program.clear()
    with recorded_step() as inner:
        given[0].item()  # nobody has computed it
        computed = given + 1
        computed[0].item()
        given[computed > 2]
        kinds = [(each.kind, each.name) for each in inner.program.operations]
    assert kinds.count(("host_wait", "the host reads _local_scalar_dense")) == 1
    assert ("host_wait", "the host reads index") in kinds


# -- memory ------------------------------------------------------------------------------------------------------------


def test_storages_of_the_same_address_are_one_buffer() -> None:
    memory = TensorMemory()
    array = np.zeros(8, dtype=np.float32)
    whole, part = torch.from_numpy(array), torch.from_numpy(array[4:])
    assert whole.untyped_storage()._cdata != part.untyped_storage()._cdata
    first, second = memory.access(whole, True), memory.access(part, False)
    assert first is not None
    assert second is not None
    assert (second.buffer, second.begin, second.end) == (first.buffer, 16, 32)
    assert first.meets(second)


def test_memory_that_was_freed_is_not_taken_for_what_comes_after_it() -> None:
    memory = TensorMemory()
    seen = set()
    for _ in range(50):
        access = memory.access(torch.zeros(1000), True)
        assert access is not None
        seen.add(access.buffer)
    assert len(seen) == 50


def test_tensors_without_memory_of_their_own_are_passed_over(recording: TorchAccesses) -> None:
    on_meta = torch.ones(3, device="meta") + 1
    sparse = torch.eye(3).to_sparse()
    sparse * 2
    assert recording.memory.access(on_meta, False) is None
    assert recording.memory.access(sparse, False) is None


# -- the mode and the scheduler ----------------------------------------------------------------------------------------


def layered(i: int, weight: Tensor, layers: int = 2) -> Tensor:
    x = torch.full((2, 3), float(i + 1))
    for layer in range(layers):
        with torch.no_grad() if layer else torch.inference_mode():
            x = x @ weight
            dbo_yield(f"layer{layer}")
            x = x.clone() * 2
    return x


@pytest.mark.parametrize("carrier", ["greenlet", "thread"])
def test_every_microbatch_is_seen_and_the_schedule_is_as_without(carrier: str) -> None:
    weight = torch.ones(3, 3)
    entries = [partial(layered, i, weight) for i in range(3)]
    plain = Scheduler(carrier=carrier).run(entries)
    with recorded_step() as recording:
        result = Scheduler(carrier=carrier).run(entries)
    assert result.schedule == plain.schedule
    assert all(map(torch.equal, result.outputs, plain.outputs))
    mm = [(each.microbatch, each.slice) for each in recording.program.operations if each.name == "mm"]
    assert mm == [(i, s) for s in range(2) for i in range(3)]
    # The mode is gone, and nothing is noted any more.
    count = len(recording.program.operations)
    torch.ones(3) + 1
    assert len(recording.program.operations) == count


def test_a_microbatch_that_enters_modes_of_its_own_is_still_seen() -> None:
    class Doubling(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            return func(*args, **(kwargs or {}))

    def forward(i: int) -> Tensor:
        x = torch.ones(2)
        with Doubling():
            x = x + 1
            dbo_yield("inside")
            x = x * 3
        return x

    with recorded_step() as recording:
        Scheduler().run([partial(forward, i) for i in range(2)])
    assert [each.microbatch for each in recording.program.operations if each.name == "mul"] == [0, 1]


def test_a_recv_hook_that_a_sibling_runs_is_its_owners() -> None:
    def forward(i: int) -> Tensor:
        received = torch.full((2,), float("nan"))
        dbo_maybe_run_recv_hook()
        dbo_register_recv_hook(lambda: received.fill_(i))
        dbo_yield("sent")
        return received + 1

    with recorded_step() as recording:
        Scheduler().run([partial(forward, i) for i in range(2)])
    fills = [each for each in recording.program.operations if each.name == "fill_"]
    assert [(each.microbatch, each.owner) for each in fills] == [(1, 0), (0, 1)]
    # Or it would look as if the sibling had written over what the owner had made.
    assert find_hazards(recording.program) == []


@torch.library.custom_op("kit_test::block", mutates_args=())
def block(x: Tensor) -> Tensor:
    y = x + 1
    dbo_yield("in the operator")
    return y * 2


def test_an_operator_that_is_called_directly_is_looked_into_and_may_yield() -> None:
    direct = register_direct_op("kit_test::block")
    try:
        with recorded_step() as recording, torch.no_grad():
            result = Scheduler().run([partial(block, torch.full((2,), float(i))) for i in range(2)])
    finally:
        direct.remove()
    assert [each[0].item() for each in result.outputs] == [2.0, 4.0]
    assert result.schedule.decisions == (0, 1, 0, 1)
    names = [(each.name, each.microbatch, each.slice) for each in recording.program.operations]
    assert [each for each in names if each[0] in ("add", "mul", "block")] == [
        ("add", 0, 0),
        ("add", 1, 0),
        ("mul", 0, 1),
        ("mul", 1, 1),
    ]


def test_an_operator_that_is_not_called_directly_is_refused_as_without_recording() -> None:
    with recorded_step(), pytest.raises(UnsafeYieldError, match="kit_test::block"):
        Scheduler().run([partial(block, torch.ones(2))] * 2)


def test_in_inference_mode_operators_are_taken_apart_as_outside_of_it() -> None:
    x, weight = torch.ones(2, 3, 3), torch.ones(3, 3)
    names = []
    for mode in (torch.no_grad, torch.inference_mode):
        with recorded_step() as recording, mode():
            torch.nn.functional.linear(x, weight).reshape(-1)[0].item()
        names.append([each.name for each in recording.program.operations])
    assert names[0] == names[1]
    assert "the host reads _local_scalar_dense" in names[0]


# -- hazards of torch programs -----------------------------------------------------------------------------------------


def run_two(forward, recording: TorchAccesses) -> list[str]:
    """Both microbatches on a compute and a comm stream, joined; what is found."""
    contexts = make_ubatch_contexts(2, device=recording.device)
    recording.program.clear()
    Scheduler().run([partial(forward, i) for i in range(2)], contexts)
    event = recording.device.new_event()
    recording.device.record(event, contexts[0].comm_stream)
    recording.device.wait(contexts[0].compute_stream, event)
    return [str(each) for each in find_hazards(recording.program)]


def high_throughput(i: int, waits: bool = True) -> Tensor:
    """Communication on the comm stream, as the model of tests/gpu/stream_model.py has it."""
    x = torch.full((4, 4), float(i))
    for layer in range(2):
        x = torch.tanh(x @ x)
        dbo_yield_and_switch_from_compute_to_comm(f"layer{layer}.dispatch")
        sent = x.flip(1)
        if waits:
            dbo_yield_and_switch_from_comm_to_compute(f"layer{layer}.combine")
        else:
            dbo_yield(f"layer{layer}.combine")
            dbo_switch_to_compute()
        x = x + sent
    return x


def test_switching_streams_with_events_is_clean_and_without_is_a_race(recording: TorchAccesses) -> None:
    found = run_two(partial(high_throughput, waits=False), recording)
    assert len(found) == 4  # two microbatches, two layers
    for each in found:
        assert each.startswith("race: #")
        assert "'flip' on comm, microbatch " in each
        assert "'add' on compute, microbatch " in each
        assert "test_torch_accesses.py:" in each
        assert "Missing: compute waiting, before #" in each
    assert run_two(high_throughput, recording) == []


def test_columns_of_one_message_do_not_collide_and_rows_of_it_do(recording: TorchAccesses) -> None:
    def forward(i: int, cut: bool) -> Tensor:
        message = torch.zeros(4, 6)
        dbo_yield_and_switch_from_compute_to_comm("a")
        (message[:, :2] if cut else message[1:2]).fill_(1.0)
        dbo_switch_to_compute()
        message[:, 2:].fill_(2.0)
        dbo_switch_to_comm()
        dbo_yield_and_switch_from_comm_to_compute("b")
        return message.sum()

    assert run_two(partial(forward, cut=True), recording) == []
    found = run_two(partial(forward, cut=False), recording)
    assert len(found) == 2
    assert "writes " in found[0]
    assert "16 of every 24]" in found[0]


def test_a_workspace_that_two_microbatches_share_over_a_yield_is_found(recording: TorchAccesses) -> None:
    workspace = torch.zeros(4)
    recording.name(workspace, "workspace")

    def forward(i: int) -> Tensor:
        workspace.copy_(torch.full((4,), float(i)))
        dbo_yield("between")
        return workspace * 2

    (found,) = run_two(forward, recording)
    assert found.startswith("workspace-reused: ")
    assert "'mul' on compute, microbatch 0 (slice 1, after 'between', at test_torch_accesses.py:" in found
    assert "reads workspace[0:16], which its microbatch wrote at #" in found


def test_a_cache_with_rows_of_several_microbatches_is_none(recording: TorchAccesses) -> None:
    cache = torch.zeros(6, 4)

    def forward(i: int) -> Tensor:
        cache.index_copy_(0, torch.tensor([3 * i, 3 * i + 1]), torch.ones(2, 4))
        dbo_yield("between")
        return cache[: 3 * i + 2].sum()

    assert run_two(forward, recording) == []


def test_names_of_parameters(recording: TorchAccesses) -> None:
    module = torch.nn.Linear(2, 2)
    recording.name_all(module)
    recording.program.clear()
    with torch.no_grad():
        module(torch.ones(1, 2))
    accesses = [str(each) for operation in recording.program.operations for each in operation.accesses]
    assert "reads weight[0:16]" in accesses
    assert "reads bias[0:8]" in accesses
    check(recording.program)


def test_access_text() -> None:
    assert str(Access("b", True)) == "writes b"
    assert str(Access("b", True, 0, 8, True)) == "writes some of b[0:8]"
    assert str(Access("b", False, 4, None)) == "reads b[4:]"
