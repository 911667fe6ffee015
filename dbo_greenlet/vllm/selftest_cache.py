"""The self-test's answer, asked for once per machine and set of versions.

Every rank of every start needs the answer and it takes some ten seconds, most of them the import of torch. Only "it
holds" is kept; a failure is looked at again, because it may have been the machine's.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import sys
import tempfile
from contextlib import suppress
from importlib import metadata
from pathlib import Path

from ..selftest import run_selftest

__all__ = ["cache_file", "selftest_problem"]


def selftest_problem(timeout: float = 120.0) -> str | None:
    """None if yielding inside operators works here, else which case failed and how.

    Args:
        timeout: seconds for each case of a run; ranks that start together compete for the machine.
    """
    file = cache_file()
    with suppress(OSError):  # a folder that may not be looked into: as below
        if file.is_file():
            return None
    result = run_selftest(timeout)
    if not result.ok:
        failed = next(case for case in result.cases if case.status == "failed")
        return f"{failed.name}: {failed.detail}"
    # A folder that cannot be written costs the next start another run, nothing else.
    with suppress(OSError):
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps([case.name for case in result.cases]))
    return None


def cache_file() -> Path:
    """Where the answer for this machine, interpreter and set of versions is kept."""
    parts = [platform.node(), platform.machine(), sys.version, sys.executable, _built()]
    for name in ("dbo-greenlet", "torch", "greenlet", "triton"):
        try:
            parts.append(metadata.version(name))
        except metadata.PackageNotFoundError:
            parts.append("")
    home = os.path.expanduser("~")
    if home == "~":  # a user without a home
        home = tempfile.gettempdir()
    folder = os.environ.get("XDG_CACHE_HOME") or os.path.join(home, ".cache")
    return Path(folder, "dbo_greenlet", f"selftest-{hashlib.sha256(repr(parts).encode()).hexdigest()[:16]}.json")


def _built() -> str:
    # A package that is being worked on keeps its version while its code changes.
    package = Path(__file__).resolve().parents[1]
    return repr(sorted((path.name, path.stat().st_mtime_ns) for path in package.glob("*.py")))
