"""Prints one line per error of the core; run with and without -O, the output must be the same."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from greenlet import getcurrent, greenlet

from dbo_greenlet import Scheduler, Scripted, dbo_register_recv_hook, dbo_yield, make_ubatch_contexts
from dbo_greenlet.errors import DboError
from dbo_greenlet.schedule import Schedule


def yields(*sites: str) -> Callable[[], None]:
    def entry() -> None:
        for site in sites:
            dbo_yield(site)

    return entry


def failing() -> None:
    dbo_yield("a")
    raise ValueError("the model's own error")


def broken_receive() -> None:
    dbo_register_recv_hook(lambda: 1 / 0)
    dbo_yield("a")


def foreign_yield() -> None:
    greenlet(lambda: dbo_yield("b")).switch()


HUB = getcurrent()

CASES: list[Callable[[], Any]] = [
    lambda: Scheduler().run([yields("a"), failing]),
    lambda: Scheduler(strict=True).run([yields("a"), yields("b")]),
    lambda: Scheduler().run([broken_receive]),
    lambda: Scheduler().run([foreign_yield]),
    lambda: Scheduler().run([lambda: HUB.switch()]),
    lambda: Scheduler(Scripted([1, 0])).run([yields(), yields()]),
    lambda: Schedule.decode("dbo1:2:01"),
    lambda: Scheduler().run([]),
    lambda: make_ubatch_contexts(0),
]

for case in CASES:
    try:
        case()
        print("no error")
    except DboError as error:
        print(f"{type(error).__name__}: {error}")
