"""From what the command line names to what can be exported."""

from __future__ import annotations

import os
from collections.abc import Collection, Sequence

from ...errors import ConfigurationError
from ..file_kinds import all_ours
from ..files import expand
from .model import ExportModel
from .write import Model

__all__ = ["open_export"]


def open_export(
    arguments: Sequence[str | os.PathLike[str]],
    *,
    run: str | None = None,
    rank: int | None = None,
    steps: Collection[int] | None = None,
    kernels: str | os.PathLike[str] | None = None,
) -> Model:
    """The model of traces of ours, or of profiles; what it reads is found out by the files' first bytes.

    Args:
        arguments: files and folders, of one run.
        run, steps: of traces of ours, which; default: all.
        rank: only this rank; default: all.
        kernels: of profiles, a TOML file with names to know.

    Raises:
        TraceFileError: as `files.expand` and `file_kinds.all_ours`.
        ConfigurationError: traces of ours and profiles at once, or a choice that such files do not offer.
        ModuleNotFoundError: profiles need the extra `trace`.
    """
    paths, notes = expand(arguments, rank=rank)
    if all_ours(paths, "their times have no axis in common; export them one by one"):
        if kernels is not None:
            raise ConfigurationError(f"--kernels says what names in profiles mean; {paths[0]} is a trace of ours")
        return ExportModel(arguments, run=run, rank=rank, steps=steps)
    if run is not None or steps is not None:
        raise ConfigurationError(f"{paths[0]} is a profile; --run and --steps choose from a trace of ours")
    from ..kernels import KernelTable
    from .profile import ProfileModel

    model = ProfileModel(paths, rank=rank, table=KernelTable(None if kernels is None else os.fspath(kernels)))
    model.notes += notes
    return model
