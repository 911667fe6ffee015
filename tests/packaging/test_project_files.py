"""What the project's own files say must agree: the version, the extras and the pins, and no address of a registry."""

from __future__ import annotations

import importlib.metadata
import re
import subprocess
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

import dbo_greenlet

ROOT = Path(__file__).resolve().parents[2]
REQUIREMENTS = ROOT / "scripts" / "requirements"
# Put together here, so that this file does not contain what it forbids.
REGISTRY = re.compile(
    "|".join(("pypi" + r"\.org", "python" + "hosted", "npm" + r"js\.(org|com)", "conda" + r"\.anaconda"))
)


def project_files() -> list[Path]:
    """Every file that is, or would be, committed."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    if listed.returncode != 0:
        pytest.skip("needs git and a working copy to list the project's files")
    return [path for name in listed.stdout.split("\0") if name and (path := ROOT / name).is_file()]


def pins(*names: str) -> dict[str, list[Requirement]]:
    found: dict[str, list[Requirement]] = {}
    for name in names:
        for line in (REQUIREMENTS / name).read_text().splitlines():
            if line.strip() and not line.startswith("#"):
                requirement = Requirement(line)
                found.setdefault(canonicalize_name(requirement.name), []).append(requirement)
    return found


def pinned_version(requirement: Requirement) -> Version:
    (specifier,) = requirement.specifier
    assert specifier.operator == "=="
    return Version(specifier.version)


def declared() -> list[Requirement]:
    lines = importlib.metadata.requires("dbo-greenlet") or []
    return [Requirement(line) for line in lines]


def test_the_installed_version_is_the_one_in_the_package() -> None:
    assert importlib.metadata.version("dbo-greenlet") == dbo_greenlet.__version__


@pytest.mark.parametrize("file", sorted(path.name for path in REQUIREMENTS.glob("*.txt")))
def test_every_requirement_file_pins_exactly(file: str) -> None:
    found = pins(file)
    assert found
    for requirements in found.values():
        for requirement in requirements:
            pinned_version(requirement)


def test_the_pins_are_within_what_the_package_declares() -> None:
    pinned = pins("core.txt", "dev.txt", "torch.txt")
    elsewhere = {"dbo-greenlet", "vllm", "tokenspeed-deepep"}  # itself, and what CI does not hold
    checked = 0
    for requirement in declared():
        if requirement.name in elsewhere:
            continue
        for pin in pinned[canonicalize_name(requirement.name)]:
            assert requirement.specifier.contains(pinned_version(pin)), f"{pin} is outside {requirement}"
            checked += 1
    assert checked >= 10


def test_without_an_extra_the_package_needs_greenlet_alone() -> None:
    assert [requirement.name for requirement in declared() if requirement.marker is None] == ["greenlet"]


def test_the_extras_that_the_readme_promises_exist() -> None:
    extras = set(importlib.metadata.metadata("dbo-greenlet").get_all("Provides-Extra") or ())
    assert {"cli", "run", "vllm", "deepep", "test"} <= extras


def test_no_file_names_a_package_registry() -> None:
    naming = []
    for path in project_files():
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue  # a binary asset
        if REGISTRY.search(text):
            naming.append(path.relative_to(ROOT).as_posix())
    assert naming == []


def test_the_top_level_holds_what_it_should() -> None:
    allowed = {"dbo_greenlet", "tests", "scripts", "pyproject.toml", "Makefile", "README.md", "CHANGELOG.md", "LICENSE"}
    top = {path.relative_to(ROOT).parts[0] for path in project_files()}
    assert {name for name in top if not name.startswith(".")} <= allowed
