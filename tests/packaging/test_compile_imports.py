"""What is imported after a set-up is compiled, whatever of it cannot be imported here."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from pathlib import Path

import pytest
from compile_imports import import_all


def test_modules_are_compiled_and_what_fails_is_passed_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "stands_for_ours"
    sources = {
        "__init__.py": "",
        "broken.py": "import not_installed_anywhere",
        "failing/__init__.py": "raise RuntimeError('no such device')",
        "failing/below.py": "",
        "__main__.py": "raise SystemExit('the command ran')",
        "room/__init__.py": "",
        "room/thing.py": "",
        "zebra.py": "",
    }
    for name, source in sources.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(source)
    (tmp_path / "beside.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    try:
        import_all(importlib.import_module("stands_for_ours"), "not_there_either", "beside")
    finally:
        for name in [each for each in sys.modules if each.partition(".")[0] in ("stands_for_ours", "beside")]:
            del sys.modules[name]
    compiled = {
        name
        for name in ("beside.py", *(f"stands_for_ours/{each}" for each in sources))
        if Path(importlib.util.cache_from_source(str(tmp_path / name))).exists()
    }
    # Byte code is written before a module runs, so also for the two that fail; "below" nobody can import.
    assert compiled == {"beside.py"} | {
        f"stands_for_ours/{each}" for each in sources if each not in ("__main__.py", "failing/below.py")
    }
