"""`dbo-greenlet selftest`: does the switching mechanism work with this torch, on this machine?"""

from __future__ import annotations

import dataclasses
import json
from typing import Annotated

import typer

__all__ = ["selftest"]


def selftest(
    timeout: Annotated[float, typer.Option(min=1, help="Seconds for each case; a longer one has failed.")] = 60.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print the cases as JSON.")] = False,
) -> int:
    """Yield inside custom operators, eager and compiled, in a subprocess: it would abort where it does not work.

    Exit code 1 where a case fails.

    Example: dbo-greenlet selftest
    """
    from ..selftest import run_selftest

    result = run_selftest(timeout)
    if as_json:
        print(json.dumps(dataclasses.asdict(result), indent=2))
    else:
        width = max(len(case.name) for case in result.cases)
        for case in result.cases:
            print(f"{case.name:<{width}}  {case.status:<7}  {case.seconds:6.1f} s  {case.detail}".rstrip())
        print("All cases hold." if result.ok else "Direct operators do not work here; do not rely on them.")
    return 0 if result.ok else 1
