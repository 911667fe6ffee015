"""The core is light, and `python -O` changes nothing."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
ENVIRONMENT = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}


def python(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments], capture_output=True, text=True, timeout=120, env=ENVIRONMENT, check=False
    )


CORE = [
    "errors",
    "policy",
    "schedule",
    "step",
    "scheduler",
    "greenlet_carrier",
    "thread_carrier",
    "watchdog",
    "yields",
    "microbatch",
    "devices",
]


def test_the_core_imports_greenlet_and_nothing_else() -> None:
    modules = "; ".join(f"import dbo_greenlet.{name}" for name in CORE)
    done = python(
        "-c",
        f"import sys; before = set(sys.modules); import dbo_greenlet; {modules}; from dbo_greenlet import *; "
        "dbo_yield(); Scheduler().run([dbo_yield, dbo_yield]); "
        "print(sorted({m.split('.')[0] for m in set(sys.modules) - before} - set(sys.stdlib_module_names)))",
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "['dbo_greenlet', 'greenlet']"


def test_importing_the_package_alone_imports_nothing() -> None:
    done = python("-c", "import sys, dbo_greenlet; print('greenlet' in sys.modules, dbo_greenlet.__version__)")
    assert done.stdout.split()[0] == "False", done.stderr


def test_an_unknown_name_is_an_attribute_error() -> None:
    import dbo_greenlet

    with pytest.raises(AttributeError, match="no attribute 'dbo_yeild'"):
        dbo_greenlet.dbo_yeild  # noqa: B018
    assert {"Scheduler", "dbo_yield", "register_direct_op"} <= set(dir(dbo_greenlet))


def test_optimised_python_raises_the_same_errors() -> None:
    done = python("-O", str(HERE / "script_errors.py"))
    plain = python(str(HERE / "script_errors.py"))
    assert done.returncode == plain.returncode == 0, done.stderr + plain.stderr
    assert done.stdout == plain.stdout and done.stdout.count("\n") == 9
