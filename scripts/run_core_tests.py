"""Run the core's tests on every other supported Python that this machine has, without torch.

Those are tests/core, and of the test kit (tests/testing) what needs neither torch nor many seconds.

Each version gets a small environment of its own, .venv-core-3.x, with greenlet and the test tools. A version that is
not on this machine is skipped, and said so. The closing line counts the versions, not the tests.

    python3 scripts/run_core_tests.py [3.10 3.12 ...] [-- pytest arguments]
"""

from __future__ import annotations

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

from setup_env import DEFAULT_TORCH_INDEX, ROOT, Environment, InterpreterMissing, SetupFailed, environment, prepare

DEFAULT_VERSIONS = ("3.10", "3.12", "3.13")

# Of the kit what could differ from one Python to the next: together about as long as tests/core.
KIT_TESTS = (
    "determinism",
    "explore_ends",
    "explore_findings",
    "golden",
    "happens_before",
    "hazard_rules",
    "hazard_search",
    "hazards",
    "interleavings",
    "layer_program_order",
    "layer_program_overlap",
    "layer_program_settings",
    "layer_program_values",
    "public_names",
    "replay_case",
    "shrink",
    "sometimes",
    "values",
    "verdicts",
    "virtual_device",
    "virtual_device_steps",
    "virtual_graphs",
)
TESTS = ("tests/core", *(f"tests/testing/test_{name}.py" for name in KIT_TESTS))
AT_ONCE = ("-n", "2", "--dist", "loadfile", "--no-loadscope-reorder")
# Fewer examples of each property than on the Python that runs all tests: what differs from one Python to the next shows
# in the first ones, and the seeds are others each time.
EXAMPLES = ("--hypothesis-profile", "other-pythons")


def main(arguments: list[str]) -> int:
    split = arguments.index("--") if "--" in arguments else len(arguments)
    versions, pytest_arguments = arguments[:split] or list(DEFAULT_VERSIONS), arguments[split + 1 :]
    passed: list[str] = []
    failed: list[str] = []
    # Side by side, since making an environment keeps one core busy.
    environments = [environment("core", version) for version in versions]
    with ThreadPoolExecutor(len(versions)) as pool:
        outcomes = list(pool.map(_prepared, environments))
    for i, version in enumerate(versions):
        env, failure = environments[i], outcomes[i]
        if isinstance(failure, InterpreterMissing):
            print(f"core tests: Python {version} skipped: not on this machine (PATH, pyenv and uv)", flush=True)
            continue
        if failure is not None:
            print(f"core tests: Python {version}: set-up failed: {failure}", flush=True)
            failed.append(version)
            continue
        print(f"core tests: Python {version}", flush=True)
        command = [
            str(env.executable),
            "-m",
            "pytest",
            *TESTS,
            *AT_ONCE,
            *EXAMPLES,
            "-q",
            "-p",
            "no:cacheprovider",
            *pytest_arguments,
        ]
        # The tests start subprocesses that import the package too; it is not installed here, so the path says where.
        search_path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
        done = subprocess.run(command, cwd=ROOT, env={**os.environ, "PYTHONPATH": search_path}, check=False)
        (passed if done.returncode == 0 else failed).append(version)
    print(f"core tests: passed on {', '.join(passed) or 'none'}; failed on {', '.join(failed) or 'none'}", flush=True)
    return 1 if failed else 0


def _prepared(env: Environment) -> SetupFailed | None:
    """None, or why there is no such environment."""
    try:
        prepare(env, None, DEFAULT_TORCH_INDEX)
    except SetupFailed as failure:
        return failure
    return None


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except KeyboardInterrupt:
        sys.exit("core tests: interrupted")
