"""Build the wheel, install it into clean environments and check what a user gets from it.

- with greenlet alone: the package imports, the core runs a step, and torch is neither installed nor imported;
- every file of the package, the assets among them, is in the wheel, and nothing else is;
- with the extra `cli`: `dbo-greenlet --help` works;
- with the extra `testing`: pytest loads the plugin by itself, and a test file explores a step and replays a failure.

    .venv/bin/python scripts/check_wheel.py
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
REQUIREMENTS = ROOT / "scripts" / "requirements"
WORK = ROOT / "build" / "wheel-check"

CORE_STEP = """
import sys
import dbo_greenlet
from dbo_greenlet.scheduler import Scheduler
from dbo_greenlet.yields import dbo_current_ubatch_id, dbo_yield

order = []
def microbatch():
    for _ in range(2):
        order.append(dbo_current_ubatch_id())
        dbo_yield("site")
    return dbo_current_ubatch_id() * 10

result = Scheduler().run([microbatch, microbatch])
if result.outputs != [0, 10] or order != [0, 1, 0, 1]:
    sys.exit(f"a step of two microbatches gave {result.outputs}, in the order {order}")
if "torch" in sys.modules:
    sys.exit("importing the core imported torch")
print(dbo_greenlet.__version__)
"""


# Not among the package's code, and of no use to anybody if only the source tree has it.
LIMITS = "dbo_greenlet/testing/LIMITS.md"

KIT_TEST = """
import sys
from dbo_greenlet.testing import low_latency

def test_every_schedule(dbo_explore):
    assert dbo_explore(low_latency(2)).schedules == 42
    assert "torch" not in sys.modules

def test_that_fails(dbo_run):
    assert not dbo_run(low_latency(1), "phase_offset:2").succeeded
"""


class CheckFailed(Exception):
    """What a user would have found wrong with the wheel."""


# What makes the command exist, and what makes vLLM and pytest load the plugins.
ENTRY_POINTS = (
    "dbo-greenlet = dbo_greenlet.cli.main:main",
    "dbo_greenlet = dbo_greenlet.vllm.plugin:register",
    "dbo_greenlet = dbo_greenlet.testing.plugin:entry_point",
)


def package_files(package: Path) -> set[str]:
    """Every file of the package in the source tree, relative to its parent, without byte code."""
    return {
        path.relative_to(package.parent).as_posix()
        for path in package.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }


def check_contents(wheel: Path) -> str:
    """Compare the wheel with the source tree; raises CheckFailed naming what is missing or too much."""
    expected = package_files(ROOT / "dbo_greenlet")
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        entry_points = next((n for n in names if n.endswith(".dist-info/entry_points.txt")), None)
        declared = "" if entry_points is None else archive.read(entry_points).decode()
    inside = {name for name in names if ".dist-info/" not in name}
    if missing := sorted(expected - inside):
        raise CheckFailed(f"not in the wheel: {', '.join(missing)}")
    if extra := sorted(inside - expected):
        raise CheckFailed(f"in the wheel, but not of the package: {', '.join(extra)}")
    assets = [name for name in inside if name.startswith("dbo_greenlet/assets/")]
    if not assets:
        raise CheckFailed("the wheel holds no assets (dbo_greenlet/assets/)")
    if LIMITS not in inside:
        raise CheckFailed(f"the wheel does not hold {LIMITS}")
    for line in ENTRY_POINTS:
        if line not in declared.splitlines():
            raise CheckFailed(f"the wheel does not declare {line!r}")
    if not any(name.endswith(".dist-info/licenses/LICENSE") for name in names):
        raise CheckFailed("the wheel holds no licence")
    return f"{len(inside)} files, {len(assets)} of them assets"


def build(folder: Path) -> Path:
    """Build the wheel with the pinned build tool of this environment."""
    _run([sys.executable, "-m", "hatchling", "build", "--target", "wheel", "--directory", str(folder)], ROOT)
    (wheel,) = folder.glob("*.whl")
    return wheel


def check_bare(wheel: Path) -> str:
    """The wheel with what it requires and nothing else."""
    python = _clean_environment("bare")
    _install(python, str(wheel))
    listing = _run([*_pip_of(python), "list", "--format", "freeze"], WORK)
    installed = {line.partition("==")[0] for line in listing.split()}
    if installed != {"dbo-greenlet", "greenlet"}:
        raise CheckFailed(f"installing the wheel installed {', '.join(sorted(installed))}")
    version = _run([str(python), "-I", "-c", CORE_STEP], WORK).strip()
    return f"version {version}, with greenlet alone; a step ran; torch was not imported"


def check_command_line(wheel: Path) -> str:
    """The wheel with the extra `cli`: the command starts without torch."""
    python = _clean_environment("cli")
    _install(python, f"{wheel}[cli]")
    output = _run([str(python.with_name("dbo-greenlet")), "--help"], WORK)
    if "Usage" not in output:
        raise CheckFailed(f"dbo-greenlet --help printed no usage but:\n{output}")
    return "dbo-greenlet --help works"


def check_test_kit(wheel: Path) -> str:
    """The wheel with the extra `testing`, and a test file in a folder of its own."""
    python = _clean_environment("testing")
    _install(python, f"{wheel}[testing]")
    return run_kit_test(python, WORK / "suite")


def run_kit_test(python: Path, folder: Path, **environment: str) -> str:
    """Run `KIT_TEST` in `folder` with what `python` has installed, then the line that its failing test prints."""
    folder.mkdir()
    (folder / "test_kit.py").write_text(KIT_TEST, encoding="utf-8")
    (folder / "pytest.ini").write_text("[pytest]\n", encoding="utf-8")  # so that no other settings count

    def pytest(*words: str) -> str:
        command = [str(python), "-m", "pytest", "-p", "no:cacheprovider", *words]
        done = subprocess.run(
            command, cwd=folder, env={**os.environ, **environment}, capture_output=True, text=True, check=False
        )
        return f"{done.stdout}{done.stderr}exit code {done.returncode}"

    output = pytest()
    line = re.search(r"^python -m pytest ('\S+::test_that_fails') (--dbo-replay='\S+')$", output, re.MULTILINE)
    if "1 failed, 1 passed" not in output or line is None:
        raise CheckFailed(f"a test file with one test that passes and one that fails gave\n{output}")
    again = pytest(*(word.strip("'").replace("='", "=") for word in line.groups()))
    if "replaying " not in again or "1 failed" not in again:
        raise CheckFailed(f"{line[0]} gave\n{again}")
    return "a test explores a step with pytest's plugin, and the line that a failing one prints fails again"


def _clean_environment(name: str) -> Path:
    folder = WORK / name
    # Without a pip of its own, which takes longer to install than the wheel does: this environment's serves it.
    _run([sys.executable, "-m", "venv", "--without-pip", str(folder)], WORK)
    return folder / "bin" / "python"


def _pip_of(python: Path) -> list[str]:
    return [sys.executable, "-m", "pip", "--disable-pip-version-check", "--python", str(python)]


def _install(python: Path, what: str) -> None:
    pins = [item for name in ("core.txt", "dev.txt") for item in ("--constraint", str(REQUIREMENTS / name))]
    _run([*_pip_of(python), "install", "--quiet", *pins, what], WORK)


def _run(command: list[str], folder: Path) -> str:
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise CheckFailed(f"{' '.join(command)[:200]}\nexited with {done.returncode}:\n{done.stdout}{done.stderr}")
    return done.stdout


def main() -> int:
    shutil.rmtree(WORK, ignore_errors=True)
    WORK.mkdir(parents=True)
    try:
        wheel = build(WORK / "dist")
        print(f"wheel check: built {wheel.name}", flush=True)
        for check in (check_contents, check_bare, check_command_line, check_test_kit):
            print(f"wheel check: {check(wheel)}", flush=True)
    except CheckFailed as failure:
        print(f"wheel check: failed: {failure}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
