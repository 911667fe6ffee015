"""The file that an option says to write."""

from __future__ import annotations

import os
from pathlib import Path

from ..errors import ConfigurationError

__all__ = ["output_file"]


def output_file(text: str) -> Path:
    """The path as typed. A `Path` forgets the slash at its end, so this is asked before there is one.

    Raises:
        ConfigurationError: it ends with a slash, and so means a folder.
    """
    if text.endswith(tuple(filter(None, (os.sep, os.altsep)))):
        raise ConfigurationError(f"{text} names a folder; name the file to write in it")
    return Path(text)
