"""The wheel holds the whole package and only the package, and its core works where torch cannot be imported."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

import check_wheel
import pytest

# The wheel comes first on the path, and torch is not to be found, as where it is not installed.
NO_TORCH = """
import sys

class NoTorch:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "torch":
            raise ModuleNotFoundError("torch is not installed", name=name)

sys.meta_path.insert(0, NoTorch())
sys.path.insert(0, {wheel!r})
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return check_wheel.build(tmp_path_factory.mktemp("dist"))


def test_every_file_of_the_package_is_in_the_wheel(wheel: Path) -> None:
    assert "of them assets" in check_wheel.check_contents(wheel)


def test_a_file_left_out_or_added_is_noticed(wheel: Path, tmp_path: Path) -> None:
    without = tmp_path / "without.whl"
    with zipfile.ZipFile(wheel) as source, zipfile.ZipFile(without, "w") as target:
        for name in source.namelist():
            if name != "dbo_greenlet/errors.py":
                target.writestr(name, source.read(name))
    with pytest.raises(check_wheel.CheckFailed, match="not in the wheel: dbo_greenlet/errors.py"):
        check_wheel.check_contents(without)
    with zipfile.ZipFile(wheel, "a") as archive:
        archive.writestr("tests/stray.py", "")
    with pytest.raises(check_wheel.CheckFailed, match="not of the package: tests/stray.py"):
        check_wheel.check_contents(wheel)


@pytest.mark.parametrize("entry", check_wheel.ENTRY_POINTS)
def test_a_wheel_that_nobody_would_load_is_noticed(wheel: Path, tmp_path: Path, entry: str) -> None:
    without = tmp_path / "without.whl"
    with zipfile.ZipFile(wheel) as source, zipfile.ZipFile(without, "w") as target:
        for name in source.namelist():
            if name == "tests/stray.py":
                continue
            content = source.read(name)
            if name.endswith("entry_points.txt"):
                content = content.replace(entry.encode(), b"")
            target.writestr(name, content)
    with pytest.raises(check_wheel.CheckFailed, match=f"does not declare '{entry}'"):
        check_wheel.check_contents(without)


def test_the_kit_explores_from_the_wheel_where_torch_cannot_be_imported(wheel: Path, tmp_path: Path) -> None:
    # Unpacked, as an installation would have it: pytest finds the entry point beside the package.
    site = tmp_path / "site"
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site)
    (site / "torch.py").write_text("raise ModuleNotFoundError('torch is not installed', name='torch')\n")
    said = check_wheel.run_kit_test(
        Path(sys.executable), tmp_path / "suite", PYTHONPATH=str(site), PYTEST_ADDOPTS="-p no:timeout"
    )
    assert "fails again" in said


def test_the_core_runs_from_the_wheel_where_torch_cannot_be_imported(wheel: Path) -> None:
    step = NO_TORCH.format(wheel=str(wheel)) + check_wheel.CORE_STEP + "print(dbo_greenlet.__file__)\n"
    done = subprocess.run([sys.executable, "-I", "-c", step], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1].startswith(str(wheel))
