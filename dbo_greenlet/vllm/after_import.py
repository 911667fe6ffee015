"""Doing something to a module as soon as it is imported, and nothing if it never is.

vLLM loads plugins in processes that never run a model, too. Importing what a worker needs there, only to replace two
methods in it, would cost each of them seconds.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

__all__ = ["after_import", "forget"]

Action = Callable[[], None]


class _Finder(MetaPathFinder):
    """Finds nothing by itself: it lets the others find, and puts itself between a waited-for module and its loader."""

    def __init__(self) -> None:
        self.waiting: dict[str, Action] = {}
        self._looking = threading.local()

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        # Another finder of this kind asks all others, too: this one must not answer itself.
        if fullname not in self.waiting or getattr(self._looking, "now", False):
            return None
        self._looking.now = True
        try:
            for finder in sys.meta_path:
                find = None if finder is self else getattr(finder, "find_spec", None)
                spec: ModuleSpec | None = None if find is None else find(fullname, path, target)
                if spec is not None:
                    if spec.loader is not None:
                        spec.loader = _Loader(spec.loader, self, fullname)
                    return spec
        finally:
            self._looking.now = False
        return None

    def imported(self, name: str) -> None:
        action = self.waiting.pop(name, None)
        if not self.waiting and self in sys.meta_path:
            sys.meta_path.remove(self)
        if action is not None:
            action()


class _Loader(Loader):
    """The module's own loader, and afterwards the action. The module keeps the loader that it would have had."""

    def __init__(self, loader: Loader, finder: _Finder, name: str) -> None:
        self._loader = loader
        self._finder = finder
        self._name = name

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        module.__loader__ = self._loader
        self._loader.exec_module(module)
        self._finder.imported(self._name)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)


_finder = _Finder()


def after_import(name: str, action: Action) -> None:
    """Call `action` once, right after module `name` was executed; at once where that has happened already.

    What `action` raises comes out of the import statement.
    """
    if name in sys.modules and not _is_being_imported(sys.modules[name]):
        action()
        return
    _finder.waiting[name] = action
    if _finder not in sys.meta_path:
        sys.meta_path.insert(0, _finder)


def forget(name: str) -> None:
    """Do nothing any more when `name` is imported."""
    _finder.waiting.pop(name, None)
    if not _finder.waiting and _finder in sys.meta_path:
        sys.meta_path.remove(_finder)


def _is_being_imported(module: ModuleType) -> bool:
    return bool(getattr(getattr(module, "__spec__", None), "_initializing", False))
