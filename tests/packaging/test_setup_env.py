"""Making, keeping, updating and repairing an environment: real virtual environments, with pins that need no network."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import setup_env
from interpreters import find_interpreter

THIS_MINOR = f"{sys.version_info[0]}.{sys.version_info[1]}"


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that stands for the project, with a core.txt that asks for nothing yet."""
    requirements = tmp_path / "scripts" / "requirements"
    requirements.mkdir(parents=True)
    (requirements / "core.txt").write_text("# nothing\n")
    monkeypatch.setattr(setup_env, "ROOT", tmp_path)
    monkeypatch.setattr(setup_env, "REQUIREMENTS", requirements)
    return tmp_path


def prepare() -> setup_env.Environment:
    env = setup_env.environment("core", THIS_MINOR)
    setup_env.prepare(env, sys.executable, "unused")
    return env


def test_the_life_of_an_environment(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One story, because making an environment takes seconds."""
    env = setup_env.environment("core", THIS_MINOR)
    name = f".venv-core-{THIS_MINOR}"
    left_over = env.folder / "left-over"

    # What a set-up that was cut off leaves is not built upon.
    env.folder.mkdir()
    env.mark.touch()
    left_over.touch()
    prepare()
    printed = capsys.readouterr().out
    assert f"set-up: {name} was left half-made by an interrupted set-up: making it afresh\n" in printed
    assert f"set-up: creating {name} with Python {THIS_MINOR}" in printed
    assert env.executable.exists() and env.stamp.exists()
    assert not env.mark.exists() and not left_over.exists()

    prepare()
    assert capsys.readouterr().out == f"set-up: {name} is up to date\n"

    # Other pins, and pip fails on them: its words are shown, and what is there is kept for the next run.
    pins = project / "scripts" / "requirements" / "core.txt"
    pins.write_text("not a requirement\n")
    left_over.touch()
    with pytest.raises(setup_env.SetupFailed, match="(?s)pip failed .*Invalid requirement.*Run the same command again"):
        prepare()
    assert not env.stamp.exists() and not env.mark.exists()

    # Without a stamp or a mark it is like one made by hand: brought to the pins, and kept.
    pins.write_text("pip\n")  # there already, so no network is needed
    prepare()
    assert f"set-up: bringing {name} up to date\n" in capsys.readouterr().out
    assert env.stamp.exists() and left_over.exists()


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (lambda env: env.mark.touch(), "was left half-made by an interrupted set-up"),
        (lambda env: env.executable.unlink(), "has no Python any more"),
        (lambda env: (env.folder / "pyvenv.cfg").write_text("version = 3.1.4\n"), f"is not a Python {THIS_MINOR} env"),
        (lambda env: env.stamp.write_text('{"folder": "/elsewhere"}'), "was made in another folder"),
    ],
)
def test_an_environment_that_cannot_be_trusted_is_said_to_be(
    project: Path, spoil: Callable[[setup_env.Environment], object], reason: str
) -> None:
    env = setup_env.environment("core", THIS_MINOR)
    env.executable.parent.mkdir(parents=True)
    env.executable.symlink_to(sys.executable)
    (env.folder / "pyvenv.cfg").write_text(f"home = somewhere\nversion = {THIS_MINOR}.1\n")
    assert setup_env.why_unusable(env) is None
    spoil(env)
    assert (setup_env.why_unusable(env) or "").startswith(reason)


def test_a_missing_python_is_named_with_what_to_do(project: Path) -> None:
    env = setup_env.environment("core", "3.99")
    with pytest.raises(setup_env.InterpreterMissing, match=r"no Python 3\.99 .*install it .*make setup PYTHON="):
        setup_env.prepare(env, None, "unused")
    assert not env.folder.exists()


def test_a_shim_that_fails_is_passed_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shim = tmp_path / f"python{THIS_MINOR}"
    shim.write_text("#!/bin/sh\necho 'version not switched on' >&2\nexit 127\n")
    shim.chmod(0o755)
    (tmp_path / "python3").symlink_to(sys.executable)
    monkeypatch.setenv("PATH", str(tmp_path))
    found = find_interpreter(THIS_MINOR)
    assert found is not None and found.version.startswith(THIS_MINOR)
    assert found.path != str(shim)


def test_an_override_of_another_version_is_not_taken() -> None:
    assert find_interpreter("3.99", sys.executable) is None


def test_a_link_to_somebody_elses_environment_is_not_removed(project: Path, tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "kept").write_text("")
    setup_env.environment("core", THIS_MINOR).folder.symlink_to(elsewhere)
    with pytest.raises(setup_env.SetupFailed, match="is a link to an environment"):
        prepare()
    assert (elsewhere / "kept").exists()
