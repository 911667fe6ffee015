"""A Chrome JSON of any size, in blocks of whole events, in bounded memory.

The file is cut between two events, and each block of events goes to msgspec. Where to cut is no guess: text that
follows the opening bracket of an array is a list of whole elements exactly where it parses with a closing bracket put
behind it, since inside a string or a nested object that bracket would close something else. So a place that looks like
the end of an event ("}," and the beginning of the next) is tried, and kept if the block parses.

Measured on 97 MB of events of torch.profiler (441,440 of them; two cores, Python 3.11), whole file unless said:
json 3.0 s and 507 MB, orjson 2.3 s and 698 MB, ijson event by event 3.0 s and 12 MB, msgspec into typed structs 1.3 s
and 322 MB. In blocks msgspec keeps its speed, and memory no longer grows with the file.
"""

from __future__ import annotations

import gzip
import os
import re
import zlib
from collections.abc import Iterator
from typing import BinaryIO, cast

import msgspec

from ...errors import TraceFileError

__all__ = ["Args", "Document", "Event", "JsonBlocks", "open_stream"]

BLOCK_BYTES = 8 * 1024 * 1024
# A head (or one event) larger than this is of no profiler.
LARGEST_PIECE_BYTES = 256 * 1024 * 1024

_EVENTS = re.compile(rb'"traceEvents"\s*:\s*\[')
_CUT = re.compile(rb"\}\s*,\s*(?=\{)")
_GZIP = b"\x1f\x8b"


class Args(msgspec.Struct, gc=False):
    """What is read of an event's "args"; the rest is passed over without being built."""

    device: int | str | None = None
    stream: int | str | None = None
    correlation: int | str | None = None
    graph_node: int | str | None = msgspec.field(default=None, name="graph node id")
    size: int | float | str | None = msgspec.field(default=None, name="bytes")
    bandwidth: int | float | str | None = msgspec.field(default=None, name="memory bandwidth (GB/s)")
    elements: int | str | None = msgspec.field(default=None, name="In msg nelems")
    dtype: object = None
    wait_on_stream: int | str | None = None
    record_correlation: int | str | None = msgspec.field(default=None, name="wait_on_cuda_event_record_corr_id")
    name: object = None


class Event(msgspec.Struct, gc=False):
    """One event of the Chrome format."""

    ph: str = ""
    cat: str | None = ""
    name: str | None = ""
    pid: int | str | float | None = None
    tid: int | str | float | None = None
    ts: float | str | None = None
    dur: float | str | None = None
    args: Args | None = None


class DistributedInfo(msgspec.Struct):
    rank: int | None = None
    world_size: int | None = None


class Device(msgspec.Struct):
    name: str = ""


class Document(msgspec.Struct):
    """The keys around the events; torch.profiler puts some before and some behind them."""

    traceEvents: list[Event] | None = None
    deviceProperties: list[Device] | None = None
    distributedInfo: DistributedInfo | None = None
    baseTimeNanoseconds: int | None = None
    schemaVersion: int | str | None = None
    displayTimeUnit: str | None = None


class JsonBlocks:
    """Iterates over lists of events.

    Args:
        path: the file; gzip is seen by its first bytes.

    Attributes, whole when the iteration is over:
        document: the keys around the events.
        bytes: length of the JSON text.
        left_out: number of events of a shape that no profiler writes.

    Iterating raises:
        TraceFileError: cannot be read, is empty, no JSON, cut off, or has no events; names the file.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = os.fspath(path)
        self.document = Document()
        self.bytes = 0
        self.left_out = 0
        self._events = msgspec.json.Decoder(list[Event])
        self._count = 0

    def __iter__(self) -> Iterator[list[Event]]:
        try:
            with open_stream(self.path) as file:
                yield from self._blocks(file)
        except (EOFError, zlib.error, gzip.BadGzipFile) as error:
            cut = isinstance(error, EOFError)
            what = "the gzip data ends in the middle; the copy is not whole" if cut else f"damaged gzip data ({error})"
            raise TraceFileError(f"{self.path}: {what}") from error
        except OSError as error:
            reason = "no such file" if isinstance(error, FileNotFoundError) else (error.strerror or str(error)).lower()
            raise TraceFileError(f"{self.path}: {reason}") from error

    def _blocks(self, file: BinaryIO) -> Iterator[list[Event]]:
        buffer, behind = self._open_array(file)
        while block := self._read(file):
            buffer += block
            if (found := self._cut(buffer)) is not None:
                events, rest = found
                self._count += len(events)
                yield events
                buffer = rest
            elif len(buffer) > LARGEST_PIECE_BYTES:
                break
        yield self._last(buffer, behind)

    def _read(self, file: BinaryIO) -> bytes:
        block = file.read(BLOCK_BYTES)
        self.bytes += len(block)
        return block

    def _open_array(self, file: BinaryIO) -> tuple[bytes, bytes]:
        """What was read behind the opening bracket of the events, and what closes the text in front of it."""
        buffer = b""
        while True:
            block = self._read(file)
            buffer += block
            start = buffer.lstrip(b" \t\r\n\xef\xbb\xbf")
            if not start:
                if not block:
                    raise TraceFileError(f"{self.path}: the file is empty")
                continue
            if start[:1] == b"[":
                return start[1:], b""
            if start[:1] != b"{":
                if self._scalar(start):
                    raise TraceFileError(f"{self.path}: JSON, but neither a trace nor a profile")
                what = "is a binary file" if b"\0" in start[:4096] else "is not JSON"
                raise TraceFileError(f"{self.path}: {what}; give a profile of torch.profiler or Nsight Systems")
            for match in _EVENTS.finditer(start):
                head = self._document(start[: match.end()] + b"]}")
                if head is not None:
                    self.document = head
                    return start[match.end() :], b"}"
            if not block or len(buffer) > LARGEST_PIECE_BYTES:
                raise TraceFileError(f"{self.path}: {self._why_no_events(start)}")

    @staticmethod
    def _scalar(text: bytes) -> bool:
        """Whether it is a number, a string, true, false or null, and nothing else."""
        try:
            msgspec.json.decode(text)
        except msgspec.DecodeError:
            return False
        return True

    def _document(self, text: bytes) -> Document | None:
        try:
            return msgspec.json.decode(text, type=Document)
        except msgspec.ValidationError:
            # JSON, but a key around the events has another type than torch.profiler gives it: do without those keys.
            return Document()
        except msgspec.DecodeError:
            return None

    def _why_no_events(self, text: bytes) -> str:
        try:
            msgspec.json.decode(text, type=dict[str, msgspec.Raw])
        except msgspec.DecodeError as error:
            return f"not JSON ({error})"
        return 'JSON, but no profile: it has no "traceEvents"'

    def _cut(self, buffer: bytes) -> tuple[list[Event], bytes] | None:
        """The events up to the last place where the buffer can be cut, and the rest."""
        reach = 64 * 1024
        while True:
            start = max(0, len(buffer) - reach)
            for match in reversed(list(_CUT.finditer(buffer, start))):
                try:
                    return self._decode(b"[" + buffer[: match.start() + 1] + b"]"), buffer[match.end() :]
                except msgspec.DecodeError:
                    continue
            if start == 0:
                return None
            reach *= 16

    def _decode(self, text: bytes) -> list[Event]:
        try:
            return self._events.decode(text)
        except msgspec.ValidationError:
            # Right JSON with an event of another shape: one by one, leaving out what no profiler writes.
            events = []
            for raw in msgspec.json.decode(text, type=list[msgspec.Raw]):
                try:
                    events.append(msgspec.json.decode(raw, type=Event))
                except msgspec.ValidationError:
                    self.left_out += 1
            return events

    def _last(self, buffer: bytes, behind: bytes) -> list[Event]:
        """The events in front of the closing bracket; the keys behind it go into `document`."""
        if behind:
            rest = b'{"traceEvents":[' + buffer
            try:
                whole = msgspec.json.decode(rest, type=dict[str, msgspec.Raw])
                events = self._decode(bytes(whole.pop("traceEvents")))
            except msgspec.DecodeError as error:
                raise self._torn(error) from error
            tail = self._document(msgspec.json.encode(whole)) or Document()
            for key in Document.__struct_fields__:
                if getattr(self.document, key) is None:
                    setattr(self.document, key, getattr(tail, key))
            self.document.traceEvents = None
            return events
        try:
            return self._decode(b"[" + buffer)
        except msgspec.DecodeError as error:
            raise self._torn(error) from error

    def _torn(self, error: msgspec.DecodeError) -> TraceFileError:
        if "truncated" in str(error):
            return TraceFileError(
                f"{self.path}: the JSON ends in the middle, behind {self._count} whole events or more"
            )
        # Where in the block it is, only the parser knows.
        return TraceFileError(
            f"{self.path}: not JSON behind event {self._count} or a later one ({error}); a NaN or Infinity is none"
        )


def open_stream(path: str | os.PathLike[str]) -> BinaryIO:
    """The file, decompressed where it is gzip.

    Raises:
        OSError: it cannot be opened.
    """
    with open(path, "rb") as file:
        zipped = file.read(2) == _GZIP
    return cast(BinaryIO, gzip.open(path) if zipped else open(path, "rb"))
