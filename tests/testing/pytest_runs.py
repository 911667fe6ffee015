"""Running pytest on a small suite of its own, in a process of its own, as a user of the plugin would."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from textwrap import dedent

import dbo_greenlet

ROOT = Path(dbo_greenlet.__file__).parent.parent
PLUGIN = "dbo_greenlet.testing.plugin"
SECONDS = 120


def environment(*, autoload: bool = False, path: str = "") -> dict[str, str]:
    """This process' one, with this package, and without plugins that happen to be installed.

    `autoload`: with entry points; what the project's own test tools have is blocked by name, for speed.
    """
    found = {k: v for k, v in os.environ.items() if not k.startswith(("PYTEST_", "DBO_", "COV_"))}
    found["PYTHONPATH"] = os.pathsep.join(filter(None, [path, str(ROOT), os.environ.get("PYTHONPATH")]))
    found["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    found["COLUMNS"] = "200"
    if autoload:
        found["PYTEST_ADDOPTS"] = " ".join(
            f"-p no:{name}" for name in ("anyio", "hypothesispytest", "timeout", "xdist")
        )
    else:
        found["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
    return found


class Suite:
    """A folder with tests."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def write(self, name: str, text: str) -> Path:
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(dedent(text), encoding="utf-8")
        return path

    def pytest(
        self,
        *arguments: str,
        stdin: str = "",
        plugin: bool = True,
        env: dict[str, str] | None = None,
        folder: Path | None = None,
    ) -> subprocess.CompletedProcess[str]:
        """Run pytest with these arguments."""
        words = ["-p", PLUGIN] if plugin else []
        return subprocess.run(
            [sys.executable, "-m", "pytest", *words, "-p", "no:cacheprovider", *arguments],
            cwd=folder or self.folder,
            input=stdin,
            capture_output=True,
            text=True,
            timeout=SECONDS,
            env=env or environment(),
            check=False,
        )

    def shell(self, line: str, folder: Path | None = None) -> subprocess.CompletedProcess[str]:
        """What a user does who copies a line into a shell."""
        return subprocess.run(
            line,
            shell=True,
            cwd=folder or self.folder,
            capture_output=True,
            text=True,
            timeout=SECONDS,
            env=environment(),
            check=False,
        )


def sections(output: str) -> list[str]:
    """What a report says of each failure; each begins with a headline such as "____ test_it ____"."""
    return re.split(r"^_{5,} .+ _{5,}$", output, flags=re.MULTILINE)[1:]


def the_line(output: str) -> str:
    """The one line of a report that runs a test again."""
    lines = [line for line in output.splitlines() if "--dbo-replay" in line]
    assert len(lines) == 1, output
    return lines[0]


def failures(output: str) -> list[str]:
    """What pytest says went wrong, without where."""
    return [line for line in output.splitlines() if line.startswith("E  ")]
