"""Import the package module by module, so that the byte code of everything it stands on is written once, now.

setup_env.py runs this last, in the environment that it made. pip does not compile there: it would compile every file of
torch, transformers and vLLM, of which a fraction is ever imported (for the environment of the tests 85 seconds of
processor time; this takes 12). Rejected: leaving it to the first commands, which write nothing where
PYTHONDONTWRITEBYTECODE is set, as in many containers. Run it with -I, which ignores that variable.

What cannot be imported here, such as the modules for vLLM in the environment without it, is passed over in silence:
saying what is missing is `pip check`'s business, and the tests'.
"""

from __future__ import annotations

import contextlib
import importlib
import pkgutil
from types import ModuleType

import dbo_greenlet

# What the tests load besides; names that are not there are passed over too.
TEST_TOOLS = ("pytest", "hypothesis", "xdist.remote", "torch._dynamo", "torch._inductor.compile_fx")


def import_all(package: ModuleType, *others: str) -> None:
    """Import every module of a package but its commands (`__main__`), then the others; failures are passed over."""
    found = pkgutil.walk_packages(package.__path__, f"{package.__name__}.", onerror=_pass)
    for name in (*(module.name for module in found if not module.name.endswith(".__main__")), *others):
        with contextlib.suppress(Exception):
            importlib.import_module(name)


def _pass(name: str) -> None:
    """walk_packages has met a package that cannot be imported here."""


if __name__ == "__main__":
    import_all(dbo_greenlet, *TEST_TOOLS)
