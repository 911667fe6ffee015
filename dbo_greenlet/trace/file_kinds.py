"""Whether what the command line names are traces of ours or profiles, and never both."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from pathlib import Path

from ..errors import ConfigurationError
from .files import is_trace

__all__ = ["all_ours"]


def all_ours(paths: Sequence[Path], why_not_both: str) -> bool:
    """True for traces of ours, False for files that are none: profiles, or nothing that can be read.

    Args:
        paths: one or more files.
        why_not_both: why the command cannot take both at once, a clause.

    Raises:
        TraceFileError: some are ours and the first other one is no profile either; it says what is wrong with it.
        ConfigurationError: some are ours and some are profiles.
    """
    ours = [is_trace(path) for path in paths]
    if len(set(ours)) == 1:
        return ours[0]
    other = paths[ours.index(False)]
    # Without the extra `trace` nobody can say whether it is a profile; the sentence below is right all the same.
    with contextlib.suppress(ModuleNotFoundError):
        from .importers import read_profile

        read_profile(other)
    raise ConfigurationError(f"{paths[ours.index(True)]} is a trace of ours and {other} is none: {why_not_both}")
