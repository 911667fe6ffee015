"""What stands in a trace file: JSON Lines, one record a line, its kind under the key "t".

The kinds and their fields are those of `records`, which this module hands on. The first record is a header. One file
may hold the records of several ranks; every line names its rank.

Versions: a reader takes every older schema (`UPGRADES`) and refuses a newer one. Within a version, keys and kinds it
does not know are passed over, and those that are missing have their defaults, so a later version of the package may add
both without a new number; a number changes only when the meaning of something that stood there changes.

JSON Lines was taken over one JSON document because a run that dies leaves a file that can be read up to its last line,
and over a binary format because people look at traces with grep.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from typing import Any

from ..errors import TraceFileError
from .records import (
    KINDS,
    SCHEMA_VERSION,
    EndRecord,
    GpuRecord,
    HeaderRecord,
    OpRecord,
    PromptRecord,
    Record,
    RecvRecord,
    SliceRecord,
    StepRecord,
)

__all__ = [
    "KINDS",
    "SCHEMA_VERSION",
    "EndRecord",
    "GpuRecord",
    "HeaderRecord",
    "OpRecord",
    "PromptRecord",
    "Record",
    "RecvRecord",
    "SliceRecord",
    "StepRecord",
    "check_version",
    "from_json",
    "to_json",
]

OLDEST_VERSION = 1

# version -> what turns an object of that version into one of the next. Applied in turn, so each one only knows its own
# change. An entry is added together with the new number.
UPGRADES: dict[int, Callable[[dict[str, Any]], dict[str, Any]]] = {}


def _is_int(value: object) -> bool:
    # JSON's true is a bool, and in Python a bool is an int.
    return type(value) is int


def _is_number(value: object) -> bool:
    return type(value) in (int, float)


def _is_ints(value: object) -> bool:
    return isinstance(value, list) and all(map(_is_int, value))


# What a field's annotation asks of its JSON value. The annotations are the only place where types are written down.
_CHECKS: dict[str, Callable[[Any], bool]] = {
    "bool": lambda value: isinstance(value, bool),
    "int": _is_int,
    "int | None": lambda value: value is None or _is_int(value),
    "float": _is_number,
    "float | None": lambda value: value is None or _is_number(value),
    "str": lambda value: isinstance(value, str),
    "str | None": lambda value: value is None or isinstance(value, str),
    "dict[str, Any]": lambda value: isinstance(value, dict),
    "dict[str, str]": lambda value: isinstance(value, dict) and all(isinstance(v, str) for v in value.values()),
    "list[Any]": lambda value: isinstance(value, list),
    "list[int]": _is_ints,
    "list[list[int]]": lambda value: isinstance(value, list) and all(map(_is_ints, value)),
}

# kind -> (name, annotation, check, required) of each field.
_FIELDS: dict[str, tuple[tuple[str, str, Callable[[Any], bool], bool], ...]] = {
    name: tuple(
        (
            f.name,
            str(f.type),
            _CHECKS[str(f.type)],
            f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING,
        )
        for f in dataclasses.fields(cls)
    )
    for name, cls in KINDS.items()
}


# What an operation has that has nothing of a kind.
_LACKING: dict[str, Any] = {
    name: [] if name == "memory" else getattr(OpRecord, name) for name, _, _, required in _FIELDS["op"] if not required
}


def to_json(record: Record) -> str:
    """One line without its newline, pure ASCII. Operations, of which there are thousands, leave out what they lack.

    Raises:
        TypeError, ValueError: a field holds something that JSON cannot say (an object, NaN).
    """
    data: dict[str, Any] = {"t": record.kind}
    for name, _, _, _ in _FIELDS[record.kind]:
        data[name] = getattr(record, name)
    if isinstance(record, OpRecord):
        data = {name: value for name, value in data.items() if name not in _LACKING or value != _LACKING[name]}
    return json.dumps(data, separators=(",", ":"), allow_nan=False)


def from_json(data: object, version: int = SCHEMA_VERSION) -> Record | None:
    """The record that one parsed line stands for; None for a kind that this version does not know.

    Args:
        data: the parsed line.
        version: the schema of the file, from its header.

    Raises:
        TraceFileError: no object, no kind, a missing key or a value of the wrong type. The message names no file: the
            reader adds it.
    """
    if not isinstance(data, dict):
        raise TraceFileError(f"a record is a JSON object, not {_json_name(data)}")
    for older in range(version, SCHEMA_VERSION):
        if upgrade := UPGRADES.get(older):
            data = upgrade(data)
    kind = data.get("t")
    if not isinstance(kind, str):
        raise TraceFileError('the record has no kind (the key "t")')
    fields = _FIELDS.get(kind)
    if fields is None:
        return None
    arguments: dict[str, Any] = {}
    for name, annotation, check, required in fields:
        if name in data:
            value = data[name]
            if not check(value):
                raise TraceFileError(f'"{name}" of {_a(kind)} record is {_json_name(value)}, expected {annotation}')
            arguments[name] = value
        elif required:
            raise TraceFileError(f'{_a(kind)} record needs the key "{name}"')
    record: Record = KINDS[kind](**arguments)
    return record


def check_version(data: object) -> int:
    """The schema version that a parsed header line states.

    Raises:
        TraceFileError: it is no header, or of a schema that this package does not read. The message names no file.
    """
    if not isinstance(data, dict) or data.get("t") != "header":
        raise TraceFileError("the first record is no header; this is not a trace of dbo_greenlet")
    version: Any = data.get("schema")
    if not _is_int(version):
        raise TraceFileError(f'"schema" of the header is {_json_name(version)}, expected int')
    if version > SCHEMA_VERSION:
        raise TraceFileError(
            f"the trace has schema {version}, this version of dbo_greenlet reads up to {SCHEMA_VERSION}; "
            f"it was written by {data.get('package', 'a newer version')}: read it with that one or a later one"
        )
    if version < OLDEST_VERSION:
        raise TraceFileError(
            f"the trace states schema {version}, which never existed; this version of dbo_greenlet reads "
            f"{OLDEST_VERSION} to {SCHEMA_VERSION}"
        )
    return int(version)


def _a(kind: str) -> str:
    return f"an {kind}" if kind[0] in "aeiou" else f"a {kind}"


def _json_name(value: object) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, (dict, list)):
        return "an object" if isinstance(value, dict) else "an array"
    text = json.dumps(value)
    return text if len(text) <= 40 else text[:37] + "..."
