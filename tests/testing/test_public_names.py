"""The names of the kit: all there, light, and functions where modules have the same name."""

from __future__ import annotations

import subprocess
import sys

import pytest

import dbo_greenlet.testing as kit
from tests.testing.pytest_runs import environment


def python(code: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, env=environment(), check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_all_names_can_be_imported_without_torch_hypothesis_and_pytest() -> None:
    code = (
        "import sys; before = set(sys.modules); from dbo_greenlet.testing import *; "
        "print(sorted({m.split('.')[0] for m in set(sys.modules) - before} - set(sys.stdlib_module_names)))"
    )
    assert python(code) == "['dbo_greenlet', 'greenlet']"


def test_importing_the_kit_alone_imports_nothing() -> None:
    assert python("import sys, dbo_greenlet.testing; print('greenlet' in sys.modules)") == "False"


@pytest.mark.parametrize("name", sorted(name for name in kit.__all__ if kit._HOME[name] == name))
def test_a_function_wins_over_the_module_of_its_name(name: str) -> None:
    """Whichever is imported first."""
    for first in (f"import dbo_greenlet.testing.{name}", f"from dbo_greenlet.testing.{name} import *", "pass"):
        code = (
            f"{first}; from dbo_greenlet.testing import {name}; import dbo_greenlet.testing, sys; "
            f"import dbo_greenlet.testing.{name}; again = dbo_greenlet.testing.{name}; "
            f"print(callable({name}), again is {name}, sys.modules['dbo_greenlet.testing.{name}'].{name} is {name})"
        )
        assert python(code) == "True True True"


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="module 'dbo_greenlet.testing' has no attribute 'explroe'"):
        kit.explroe  # noqa: B018
    assert dir(kit) == sorted(kit.__all__)
