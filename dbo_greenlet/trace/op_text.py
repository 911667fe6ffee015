"""One recorded operation as a line of text."""

from __future__ import annotations

from typing import Any

from .schema import OpRecord

__all__ = ["operation_text"]

_MOST_MEMORY = 8  # stretches of memory that one line names


def operation_text(record: OpRecord) -> str:
    """What it did, on which stream, with which event and memory: "12: wait on comm for event 4 of operation 9"."""
    words = [f"{record.number}: {record.op}"]
    if record.name:
        words.append(record.name)
    if record.stream is not None:
        words.append(f"on {record.stream}")
    if record.event is not None:
        words.append(f"for event {record.event}" if record.op == "wait" else f"event {record.event}")
    if record.of is not None:
        words.append(f"of operation {record.of}")
    if record.owner is not None:
        words.append(f"for microbatch {record.owner}")
    text = " ".join(words)
    if record.bytes is not None:
        text += f", {record.bytes} bytes"
    if record.at is not None:
        text += f", at {record.at} us"
    memory = [_memory(entry) for entry in record.memory[:_MOST_MEMORY]]
    if len(record.memory) > _MOST_MEMORY:
        memory.append(f"and {len(record.memory) - _MOST_MEMORY} more")
    return "; ".join([text, *memory])


def _memory(entry: Any) -> str:
    """["write", 140245, 0, 4096] -> "writes 0x223d5 +0 to +4096"; whatever else a trace holds, as it stands there."""
    if not isinstance(entry, list) or len(entry) < 4 or entry[0] not in ("read", "write"):
        return f"memory {entry}"
    use, buffer, begin, end = entry[:4]
    what = hex(buffer) if type(buffer) is int else str(buffer)
    where = "" if end is None and not begin else f" +{begin} to {'its end' if end is None else f'+{end}'}"
    return f"{use}s {what}{where}"
