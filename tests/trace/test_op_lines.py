"""Operations as lines, made without records: byte for byte what `to_json` makes of the records."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from dbo_greenlet.accesses import Access
from dbo_greenlet.stream_program import StreamProgram
from dbo_greenlet.trace.op_records import Freed, op_lines, op_records
from dbo_greenlet.trace.schema import to_json


class Memory:
    """A buffer with an address, as tensors have."""

    def __init__(self, address: int) -> None:
        self.address = address

    def __str__(self) -> str:
        return f"tensor \u00e9 at {self.address}"


MEMORIES = [Memory(64), Memory(4096)]
WORDS = st.sampled_from(["", "compute", "comm", 'a "quoted" \u20ac', "line\nbreak"])
ACCESSES = st.builds(
    Access,
    st.sampled_from([*MEMORIES, "hidden", "hidden \u20ac", ("a", 1)]),
    st.booleans(),
    st.integers(0, 99),
    st.none() | st.integers(0, 10**12),
    st.booleans(),
    st.sampled_from([0, 0, 64]),
    st.sampled_from([0, 16]),
)
TIMES = st.integers(0, 10**15)
FREED = st.builds(
    Freed, st.integers(0, 9), ACCESSES, st.none() | WORDS, st.none() | st.just(1), st.none() | st.just(0),
    st.none() | TIMES,
)  # fmt: skip
KINDS = st.tuples(
    st.sampled_from(["work", "record", "wait", "send", "receive", "host_wait", "hold"]),
    WORDS,
    WORDS,
    st.lists(ACCESSES, max_size=3),
    TIMES,
    st.none() | st.integers(0, 2),
)


@given(st.lists(KINDS, max_size=9), st.lists(FREED, max_size=4), st.booleans())
def test_lines_are_those_of_the_records(operations: list[Any], freed: list[Freed], renamed: bool) -> None:
    program = StreamProgram(clock=lambda: 0)
    for kind, stream, name, accesses, at, owner in operations:
        program.began = at
        with program.on_behalf_of(owner):
            if kind == "send":
                sent = program.send(stream, name, tuple(accesses)).transfer
                assert sent is not None
                sent.bytes = owner
            elif kind == "receive" and program.transfers:
                program.receive(stream, program.transfers[0], tuple(accesses))
            else:
                event = owner if kind in ("record", "wait") else None
                where = None if kind == "host_wait" and not stream else stream
                program.add(kind, where, name, tuple(accesses), event=event)
    said: dict[str, Any] = {
        "step": 3, "rank": 1, "run": 'a "run"', "origin_ns": 17, "freed": sorted(freed, key=lambda each: each.position),
        "streams": {"compute": "comm \u00e9"} if renamed else None,
    }  # fmt: skip
    records = op_records(program, **said)
    assert len(records) == len(operations) + len(freed)
    assert op_lines(program, **said) == "".join(to_json(each) + "\n" for each in records).encode("ascii")
