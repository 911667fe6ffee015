"""What the commands that measure need beyond the command line: numpy and msgspec."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from ..errors import ConfigurationError

__all__ = ["needs_trace_extra"]

_PACKAGES = ("msgspec", "numpy", "tomli")


@contextmanager
def needs_trace_extra() -> Iterator[None]:
    """Say how to install what is missing.

    Raises:
        ConfigurationError: instead of the import error of one of these packages.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        if error.name not in _PACKAGES:
            raise
        raise ConfigurationError(f"{error.name} is not installed; install dbo-greenlet[trace]") from error
