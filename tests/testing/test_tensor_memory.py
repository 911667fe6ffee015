"""Which buffer a tensor lies in when its storage moves."""

from __future__ import annotations

import torch

from dbo_greenlet.stream_program import Access
from dbo_greenlet.testing.torch_accesses import recorded_step


def test_a_resized_tensor_is_another_buffer_from_then_on() -> None:
    with recorded_step() as recording:
        tensor = torch.ones(4)
        before = recording.memory.find(tensor)
        tensor.resize_(100_000).fill_(1.0)
        after = recording.memory.find(tensor)
    assert before is not None and after is not None and before is not after
    assert (after.address, after.end - after.address) == (tensor.data_ptr(), 400_000)
    assert [operation.accesses for operation in recording.program.operations] == [
        (Access(before, True, 0, 16),), (Access(after, True, 0, 400_000),)
    ]  # fmt: skip


def test_a_tensor_that_is_resized_where_it_lies_stays_in_its_buffer() -> None:
    with recorded_step() as recording:
        tensor = torch.ones(100_000)
        known = recording.memory.find(tensor)
        view = tensor[1:]
        tensor.resize_(10)
        assert recording.memory.find(tensor) is known and recording.memory.find(view) is known
