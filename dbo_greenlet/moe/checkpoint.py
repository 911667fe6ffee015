"""Reading single tensors, or rows of them, from the safetensors files of a checkpoint folder."""

from __future__ import annotations

import json
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from dbo_greenlet.errors import CheckpointError

__all__ = ["CheckpointFiles"]

_SINGLE = "model.safetensors"
_INDEX = "model.safetensors.index.json"
_REMEDY = "download or export the checkpoint again"
# A quantised tensor needs its scales, so reading it as numbers would load a wrong model without a complaint.
_PLAIN_DTYPES = ("F64", "F32", "F16", "BF16")


class CheckpointFiles:
    """The tensors of a folder with one model.safetensors or several files and their index, opened on demand.

    Use as a context manager; leaving it closes the files. Every method raises `CheckpointError` that names the file
    and what to do if a file is missing, truncated or not as its index says.
    """

    def __init__(self, folder: str | Path) -> None:
        self._folder = Path(folder)
        self._open_files: dict[str, Any] = {}
        self._closing = ExitStack()
        self._file_of = self._locate_tensors()

    def __enter__(self) -> CheckpointFiles:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._open_files.clear()
        self._closing.close()

    def __contains__(self, name: str) -> bool:
        return name in self._file_of

    def read(self, name: str, shape: tuple[int, ...], rows: slice | None = None) -> Tensor:
        """The tensor `name`, or only `rows` of its first dimension, on the CPU in its stored dtype.

        `shape` is what the whole tensor must have; only the asked rows are read from disk.
        """
        if name not in self._file_of:
            raise CheckpointError(
                f"{self._folder}: tensor {name!r} is in none of its safetensors files; {_REMEDY}, "
                "or correct config.json if it describes another model"
            )
        path = self._folder / self._file_of[name]
        opened = self._open(self._file_of[name])
        try:
            entry = opened.get_slice(name)
            stored_shape, stored_dtype = tuple(entry.get_shape()), entry.get_dtype()
            if stored_shape != shape:
                raise CheckpointError(
                    f"{path}: tensor {name!r} has shape {list(stored_shape)}, config.json asks for {list(shape)}; "
                    "the two files belong to different models"
                )
            if stored_dtype not in _PLAIN_DTYPES:
                raise CheckpointError(
                    f"{path}: tensor {name!r} has dtype {stored_dtype}, readable are {', '.join(_PLAIN_DTYPES)}; "
                    "use a checkpoint that is not quantised"
                )
            stored: Tensor = entry[:] if rows is None else entry[rows]
            return stored
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{path}: tensor {name!r} cannot be read ({error}); {_REMEDY}") from error

    def _locate_tensors(self) -> dict[str, str]:
        """Tensor name -> file name."""
        index = self._folder / _INDEX
        if index.is_file():
            try:
                located = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
            except (OSError, ValueError, KeyError, TypeError) as error:
                raise CheckpointError(f"{index} is not a safetensors index ({error!r}); {_REMEDY}") from error
            if not isinstance(located, dict) or not all(isinstance(file, str) for file in located.values()):
                raise CheckpointError(f"{index}: weight_map does not give a file name per tensor; {_REMEDY}")
            return located
        if not (self._folder / _SINGLE).is_file():
            raise CheckpointError(
                f"{self._folder} has neither {_SINGLE} nor {_INDEX}; {_REMEDY}, "
                "and convert it to safetensors if it has other weight files"
            )
        return dict.fromkeys(self._open(_SINGLE).keys(), _SINGLE)

    def _open(self, file: str) -> Any:
        if file not in self._open_files:
            path = self._folder / file
            if not path.is_file():
                raise CheckpointError(f"{path} does not exist, but {_INDEX} names it; {_REMEDY}")
            try:
                self._open_files[file] = self._closing.enter_context(safe_open(path, framework="pt", device="cpu"))
            except (SafetensorError, OSError) as error:
                raise CheckpointError(f"{path} is truncated or not a safetensors file ({error}); {_REMEDY}") from error
        return self._open_files[file]
