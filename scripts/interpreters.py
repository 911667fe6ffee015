"""Finding a Python of a given minor version on this machine.

A name on PATH proves nothing: a pyenv shim exists for every version that any of its Pythons has and fails when that
version is not switched on, and a Debian python3 may lack `venv`. So every candidate is run and asked.

This file and setup_env.py are run by whatever python3 a machine has, so they keep to what Python 3.8 knows.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

__all__ = ["Interpreter", "candidates", "find_interpreter"]

_ASK = "import sys, venv, ensurepip; print('%d.%d.%d' % sys.version_info[:3]); print(sys.executable)"
_ANSWER_SECONDS = 20


class Interpreter:
    """A Python that answered: the path it gives for itself and its full version, such as "3.11.7"."""

    def __init__(self, path: str, version: str) -> None:
        self.path = path
        self.version = version


def candidates(minor: str, override: str | None = None) -> list[str]:
    """Paths and names to ask for Python `minor` ("3.11"), best first; `override` alone if it is given."""
    if override:
        return [override]
    found: list[str] = []
    name = "python" + minor
    for folder in os.environ.get("PATH", "").split(os.pathsep):
        for file in (name, "python3", "python"):
            path = os.path.join(folder, file)
            if folder and os.access(path, os.X_OK):
                found.append(path)
    found.sort(key=lambda path: os.path.basename(path) != name)  # stable: PATH order within the two groups
    pyenv_root = Path(os.environ.get("PYENV_ROOT") or Path.home() / ".pyenv")
    newest_first = sorted(pyenv_root.glob(f"versions/{minor}.*/bin/python{minor}"), key=_patch_number, reverse=True)
    found += [str(path) for path in newest_first]
    found += _from_uv(minor)
    return list(dict.fromkeys(found))


def find_interpreter(minor: str, override: str | None = None) -> Interpreter | None:
    """The first candidate that runs, is of the version `minor` and can make virtual environments; else None."""
    for path in candidates(minor, override):
        answer = _ask(path)
        if answer is not None and answer.version.startswith(minor + "."):
            return answer
    return None


def _ask(path: str) -> Interpreter | None:
    try:
        done = subprocess.run(
            [path, "-I", "-c", _ASK],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_ANSWER_SECONDS,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    lines = done.stdout.split("\n")
    if done.returncode != 0 or len(lines) < 2:
        return None
    return Interpreter(lines[1], lines[0])


def _from_uv(minor: str) -> list[str]:
    uv = shutil.which("uv")
    if uv is None:
        return []
    try:
        done = subprocess.run(
            [uv, "python", "find", "--no-python-downloads", "--no-project", minor],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_ANSWER_SECONDS,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return []
    return [done.stdout.strip()] if done.returncode == 0 and done.stdout.strip() else []


def _patch_number(path: Path) -> int:
    digits = path.parent.parent.name.rsplit(".", 1)[-1]
    return int(digits) if digits.isdigit() else -1
