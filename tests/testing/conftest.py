"""Small suites for the tests of the plugin."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.testing.plugin_suites import MODEL
from tests.testing.pytest_runs import Suite


@pytest.fixture
def suite(tmp_path: Path) -> Suite:
    suite = Suite(tmp_path)
    suite.write("model.py", MODEL)
    return suite


@pytest.fixture
def scenarios(suite: Suite) -> Suite:
    suite.write(
        "tests/test_it.py",
        """
        import os, subprocess, sys
        from dbo_greenlet.testing.sometimes import declare, sometimes

        declare("here", "in a subprocess", "never")

        def test_here():
            sometimes("here", True)

        def test_subprocess():
            code = "from dbo_greenlet.testing.sometimes import sometimes; sometimes('in a subprocess')"
            subprocess.run([sys.executable, "-c", code], check=True)

        def test_never():
            sometimes("never", os.environ.get("NOW"))
        """,
    )
    return suite
