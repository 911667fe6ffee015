"""The script that installs the browser, where it cannot: it says why, and what follows goes on."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "install_browser.sh"


def run_with(folder: Path, commands: dict[str, str]) -> str:
    """The script with these commands of ours on the path, and what a shell script needs; it must succeed."""
    for name, text in commands.items():
        (folder / name).write_text(f"#!/bin/sh\n{text}\n")
        (folder / name).chmod(0o755)
    for name in ("mktemp", "rm", "tail", "env", "cut"):
        (folder / name).symlink_to(str(shutil.which(name)))
    done = subprocess.run(
        ["/bin/sh", str(SCRIPT)], env={"PATH": str(folder), "TMPDIR": str(folder)}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert not list(folder.glob("tmp.*")), "it leaves no file behind"
    return done.stdout + done.stderr


INSTALL = "install -y --no-install-recommends chromium chromium-driver"
SKIPPED = "; the tests of pages will be skipped\n"


@pytest.mark.parametrize(
    ("commands", "said"),
    [
        ({"chromium": "exit 9", "chromedriver": "exit 9"}, "browser: already there\n"),
        ({}, "browser: no apt-get on this machine; install chromium and chromedriver to have them" + SKIPPED),
        (
            {"apt-get": "exit 9", "id": "echo 1000"},
            "browser: neither root nor sudo without a password" + SKIPPED,
        ),
        (
            {"apt-get": "exit 9", "id": "echo 1000", "sudo": "exit 1"},
            "browser: neither root nor sudo without a password" + SKIPPED,
        ),
        (
            {"apt-get": '[ "$1" = update ] && exit 7; echo "E: no such host"; exit 100', "id": "echo 0"},
            "browser: installing chromium and chromium-driver with apt-get\n"
            "browser: apt-get could not install it (its last words are above)" + SKIPPED + "E: no such host\n",
        ),
        (
            {"apt-get": "exit 0", "id": "echo 0"},
            "browser: installing chromium and chromium-driver with apt-get\n"
            "browser: apt-get installed it, but there is no chromedriver on the path" + SKIPPED,
        ),
    ],
    ids=["there", "no apt", "no root", "sudo asks", "apt fails", "apt lies"],
)
def test_where_it_cannot_it_says_why(tmp_path: Path, commands: dict[str, str], said: str) -> None:
    assert run_with(tmp_path, commands) == said


def test_what_is_missing_is_asked_of_apt_as_root(tmp_path: Path) -> None:
    log = tmp_path / "log"
    apt = f'echo "$DEBIAN_FRONTEND $*" >>{log}\n[ "$1" = update ] || {{ echo "#!/bin/sh\necho ChromeDriver 1.2 x"'
    apt += f" >{tmp_path}/chromedriver; {shutil.which('chmod')} +x {tmp_path}/chromedriver; }}"
    sudo = f'echo "sudo $*" >>{log}\nshift\n[ "$1" = true ] || "$@"'
    said = run_with(tmp_path, {"apt-get": apt, "sudo": sudo, "id": "echo 1000", "true": "exit 0"})
    assert said.endswith("browser: ChromeDriver 1.2 installed\n")
    assert log.read_text().splitlines() == [
        "sudo -n true",
        "sudo -n apt-get update",
        " update",
        f"sudo -n env DEBIAN_FRONTEND=noninteractive apt-get {INSTALL}",
        f"noninteractive {INSTALL}",
    ]
