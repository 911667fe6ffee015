"""What the pytest plugin costs who does not use it, and its registration by entry point and by hand."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.testing.plugin_suites import FAILING
from tests.testing.pytest_runs import PLUGIN, ROOT, Suite, environment, the_line

UNUSED = """
    import sys

    def pytest_sessionfinish():
        heavy = {"torch", "hypothesis", "greenlet", "numpy"} & set(sys.modules)
        ours = sorted(name for name in sys.modules if name.startswith("dbo_greenlet"))
        print("\\nLOADED", sorted(heavy), ours)
"""


def test_a_suite_that_does_not_use_it_pays_for_three_small_files(suite: Suite) -> None:
    suite.write("conftest.py", UNUSED)
    suite.write("test_it.py", "def test_it():\n    pass\n\ndef test_that_fails():\n    assert False\n")
    done = suite.pytest("-s")
    assert "1 failed, 1 passed" in done.stdout and done.returncode == 1
    ours = [
        "dbo_greenlet",
        "dbo_greenlet._version",
        "dbo_greenlet.testing",
        PLUGIN,
        "dbo_greenlet.testing.suite_report",
    ]
    assert f"LOADED [] {ours}" in done.stdout
    assert "dbo" not in done.stdout.replace("LOADED", "").replace(str(ours), "").replace(str(suite.folder), "").lower()


def test_a_suite_that_uses_it_loads_neither_torch_nor_hypothesis(suite: Suite) -> None:
    suite.write("conftest.py", UNUSED)
    suite.write(
        "test_it.py",
        """
        from dbo_greenlet.testing import low_latency

        def test_it(dbo_run, dbo_explore):
            assert dbo_run(low_latency(2)).succeeded and dbo_explore(low_latency(1)).complete
        """,
    )
    done = suite.pytest("-s")
    assert done.returncode == 0 and "LOADED ['greenlet'] [" in done.stdout, done.stdout


def installed(folder: Path) -> str:
    """A folder to put on the path, with the metadata that an installation of this project writes."""
    declared = (ROOT / "pyproject.toml").read_text(encoding="utf-8").partition("[project.entry-points.pytest11]\n")[2]
    metadata = folder / "site" / "dbo_greenlet_here-1.dist-info"
    metadata.mkdir(parents=True)
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: dbo-greenlet-here\nVersion: 1\n", encoding="utf-8")
    name, _, value = declared.splitlines()[0].partition(" = ")
    (metadata / "entry_points.txt").write_text(f"[pytest11]\n{name} = {value.strip(chr(34))}\n", encoding="utf-8")
    return str(metadata.parent)


@pytest.mark.parametrize(
    ("by_hand", "ini"),
    [
        ([], ""),
        (["-p", PLUGIN], ""),
        (["-p", "dbo_greenlet"], ""),
        ([], f"[pytest]\naddopts = -p {PLUGIN}\n"),
    ],
)
def test_the_entry_point_and_p_together_register_it_once(suite: Suite, by_hand: list[str], ini: str) -> None:
    env = environment(autoload=True, path=installed(suite.folder))
    if ini:
        suite.write("pytest.ini", ini)
    suite.write("test_it.py", FAILING["an assertion"][0])
    done = suite.pytest(*by_hand, plugin=False, env=env)
    assert done.returncode == 1, done.stdout + done.stderr
    line = the_line(done.stdout)
    # With the entry point nobody needs to name it again.
    assert line.startswith("python -m pytest 'test_it.py::test_it' --dbo-replay=")


def test_the_entry_point_can_be_switched_off(suite: Suite) -> None:
    env = environment(autoload=True, path=installed(suite.folder))
    suite.write("test_it.py", "def test_it(dbo_run):\n    pass\n")
    for name in ("dbo_greenlet", PLUGIN):
        done = suite.pytest("-p", f"no:{name}", plugin=False, env=env)
        assert "fixture 'dbo_run' not found" in done.stdout, done.stdout + done.stderr
