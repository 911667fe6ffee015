"""Install a CPU build of the pinned torch into the environment that runs this file, or refuse before any download.

On Linux the default package index answers `torch==X` with a CUDA build: with the nvidia packages it pulls in, several
GB that no demo on a CPU needs. So three sources are tried, cheapest first, and of each one pip is asked *what it
would install* (`--dry-run --report`: metadata, not the package) before it is let loose:

1. wheel files that pip's own configuration names (find-links): no network at all;
2. PyTorch's CPU index, if it answers a probe within a few seconds: a closed network must not stall the set-up;
3. the default index, which does hold CPU builds for macOS and on some mirrors.

Rejected: `--extra-index-url` with both indexes, which leaves the choice to version ordering; and a plain `--dry-run`,
which fetches the whole wheel to read its metadata where an index does not serve that separately (526 MB for torch
2.13.0): with `fast-deps` pip reads the metadata from the end of the remote file instead (2.5 MB in all, measured).

    python scripts/cpu_torch.py --index URL
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from urllib.parse import unquote, urlsplit

from packaging.requirements import Requirement

PINS = Path(__file__).parent / "requirements" / "torch.txt"
PROBE_SECONDS = 5
_PROBE = "import sys, urllib.request; urllib.request.urlopen(sys.argv[1], timeout=float(sys.argv[2])).close()"
_ONLY_ASK = ("--dry-run", "--ignore-installed", "--use-feature", "fast-deps")
_CUDA_REQUIREMENT = re.compile(r"^(nvidia-|cuda-|triton$|pytorch-triton)")


class SetupRefused(Exception):
    """No CPU build of torch is to be had; the message names what was tried and the remedy."""


@dataclass(frozen=True)
class Source:
    """A place pip can take torch from: words for the reader, and pip's arguments for it."""

    words: str
    pip_arguments: tuple[str, ...]


@dataclass(frozen=True)
class Offer:
    """What pip would install: the file's name, its version and those of its requirements that mean CUDA."""

    file: str
    version: str
    cuda_requirements: tuple[str, ...]

    @property
    def is_cpu(self) -> bool:
        local_label = self.version.partition("+")[2]
        return not self.cuda_requirements and not re.match(r"(cu\d|rocm|xpu)", local_label)


def read_offer(report: dict[str, object]) -> Offer:
    """The offer for torch in pip's installation report (format version 1); requirements that do not apply to this
    platform are left out, since every build of a release may carry the same list."""
    installs = report["install"]
    if not isinstance(installs, list) or len(installs) != 1:
        raise SetupRefused(f"pip's report lists {installs!r} where torch alone was asked for")
    entry = installs[0]
    applicable = (Requirement(line) for line in entry["metadata"].get("requires_dist", ()))
    return Offer(
        file=unquote(urlsplit(entry["download_info"]["url"]).path).rsplit("/", 1)[-1],
        version=entry["metadata"]["version"],
        cuda_requirements=tuple(
            requirement.name
            for requirement in applicable
            if _CUDA_REQUIREMENT.match(requirement.name)
            and (requirement.marker is None or requirement.marker.evaluate({"extra": ""}))
        ),
    )


def probe(index: str, seconds: float = PROBE_SECONDS) -> str | None:
    """None if the index answers within `seconds`, else why not, in a few words.

    In a process of its own, because a time limit on a connection does not cover a name server that keeps silent.
    """
    url = index.rstrip("/") + "/torch/"
    if urlsplit(url).scheme not in ("http", "https"):
        return None  # a folder: pip itself says at once whether it is there
    command = [sys.executable, "-I", "-c", _PROBE, url, str(seconds)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=seconds + 1, check=False)
    except subprocess.TimeoutExpired:
        return f"no answer within {seconds:g} s"
    if done.returncode == 0:
        return None
    return (done.stderr.strip().splitlines() or ["no reason given"])[-1][:200]


def ask_pip(pin: str, source: Source) -> Offer | str:
    """What pip would install from this source, or pip's reason why it would install nothing."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        done = subprocess.run(
            [*_pip_install(pin, source), "--quiet", *_ONLY_ASK, "--report", str(report)],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
        )
        if done.returncode != 0:
            return (done.stderr.strip().splitlines() or ["pip gave no reason"])[-1][:200]
        return read_offer(json.loads(report.read_text(encoding="utf-8")))


def sources(index: str, unreachable: list[str]) -> Iterable[Source]:
    """The sources in order; the index is probed only when its turn comes, and added to `unreachable` if it fails."""
    yield Source("a wheel file that pip's configuration names", ("--no-index",))
    why_not = probe(index)
    if why_not is None:
        yield Source(f"the index {index}", ("--index-url", index))
    else:
        unreachable.append(f"{index} does not answer ({why_not})")
    yield Source("pip's default index", ())


def choose(pin: str, index: str) -> tuple[Source, Offer]:
    """The first source that offers a CPU build.

    Raises SetupRefused if none does; nothing has been downloaded then.
    """
    refused: list[str] = []
    for source in sources(index, refused):
        offer = ask_pip(pin, source)
        if isinstance(offer, str):
            refused.append(f"{source.words}: {offer}")
        elif offer.is_cpu:
            return source, offer
        else:
            needs = ", ".join(offer.cuda_requirements[:3]) or "a CUDA runtime"
            refused.append(f"{source.words} offers {offer.file}, a CUDA build of several GB (it needs {needs}, ...)")
    raise SetupRefused(
        f"no CPU build of {pin} found, and a CUDA build is not fetched for this:\n"
        + "".join(f"  - {line}\n" for line in refused)
        + "Remedy: give an index that has one with `make setup TORCH_INDEX=URL`, or put the CPU wheel into a folder "
        "and run `PIP_FIND_LINKS=FOLDER make setup`."
    )


def installed_version() -> str | None:
    """The version of the installed torch, read without importing it (an import takes seconds)."""
    try:
        return metadata.version("torch")
    except metadata.PackageNotFoundError:
        return None


def verify() -> None:
    """Import the installed torch in a process of its own; raises SetupRefused if it is not a CPU build that works."""
    done = subprocess.run(
        [sys.executable, "-I", "-c", "import torch; torch.ones(2) + 1; print(torch.version.cuda, torch.version.hip)"],
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode != 0:
        raise SetupRefused(f"the installed torch does not import: {done.stderr.strip()[-500:]}")
    if done.stdout.split() != ["None", "None"]:
        raise SetupRefused(
            f"the installed torch is not a CPU build (CUDA, HIP: {done.stdout.strip()}). "
            "Remedy: `make clean-env`, then `make setup`."
        )


def read_pin(path: Path = PINS) -> str:
    """The one requirement in the pin file, such as "torch==2.13.0"."""
    lines = (line.strip() for line in path.read_text(encoding="utf-8").splitlines())
    return next(line for line in lines if line and not line.startswith("#"))


def _pip_install(pin: str, source: Source) -> list[str]:
    # No source builds, and no dependencies: those are pinned in dev.txt, and the CPU index need not hold them.
    # What is imported of it is compiled at the end of the set-up (compile_imports.py).
    limits = ["--no-deps", "--no-compile", "--only-binary", ":all:", "--retries", "1", "--timeout", "20"]
    return [sys.executable, "-m", "pip", "install", *limits, *source.pip_arguments, pin]


def main() -> int:
    parser = argparse.ArgumentParser(description="Install a CPU build of the pinned torch, or refuse.")
    parser.add_argument("--index", required=True, help="an index that holds CPU builds; used if it answers")
    index = parser.parse_args().index
    pin = read_pin()
    try:
        if (installed_version() or "").partition("+")[0] != pin.partition("==")[2]:
            source, offer = choose(pin, index)
            print(f"set-up: torch: {offer.file}, a CPU build, from {source.words}", flush=True)
            done = subprocess.run([*_pip_install(pin, source), "--quiet"], check=False)
            if done.returncode != 0:
                raise SetupRefused(f"pip could not install {offer.file}; its message is above")
        verify()
    except SetupRefused as refusal:
        print(f"set-up: refused: {refusal}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
