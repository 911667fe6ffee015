"""Small programs for microbatches, and a slow, obvious scheduler to compare the real one with.

A program is a list of actions. `play` makes an entry for the real scheduler out of it; `simulate` runs the same
programs as plain generators under round robin and is written to be read, not to be quick: it shares no code with the
package.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from dbo_greenlet.yields import dbo_current_ubatch_id, dbo_maybe_run_recv_hook, dbo_register_recv_hook, dbo_yield

Action = tuple[str, str]
Event = tuple[Any, ...]


def play(index: int, program: list[Action], log: list[Event]) -> Callable[[], str]:
    """An entry that acts out `program` and logs (microbatch it believes it is, what it did)."""

    def entry() -> str:
        for kind, name in program:
            if kind == "work":
                log.append((dbo_current_ubatch_id(), "work", name))
            elif kind == "send":
                log.append((dbo_current_ubatch_id(), "send", name))
                dbo_register_recv_hook(lambda name=name: log.append((index, "receive", name, dbo_current_ubatch_id())))
            elif kind == "receive sibling's":
                dbo_maybe_run_recv_hook()
            elif kind == "yield":
                dbo_yield(name)
            elif kind == "raise":
                raise ValueError(name)
        log.append((dbo_current_ubatch_id(), "return"))
        return f"output {index}"

    return entry


def simulate(programs: list[list[Action]]) -> tuple[list[Event], list[int], list[str]]:
    """(log, decisions, sites) that round robin must give for programs that do not raise."""
    count = len(programs)
    log: list[Event] = []
    decisions: list[int] = []
    sites: list[str] = []
    open_receives: list[list[str]] = [[] for _ in programs]  # by owner, oldest first
    left_for_sibling: list[list[str]] = [[] for _ in programs]  # by owner: those its successor may still run
    done = [False] * count

    def receive(owner: int, name: str, by: int) -> None:
        open_receives[owner].remove(name)
        if name in left_for_sibling[owner]:
            left_for_sibling[owner].remove(name)
        log.append((owner, "receive", name, by))

    def run(me: int) -> Iterator[str]:
        before, after = (me - 1) % count, (me + 1) % count
        for kind, name in programs[me]:
            if kind == "work":
                log.append((me, "work", name))
            elif kind == "send":
                log.append((me, "send", name))
                open_receives[me].append(name)
                if not done[after]:
                    left_for_sibling[me].append(name)
            elif kind == "receive sibling's":
                while left_for_sibling[before]:
                    receive(before, left_for_sibling[before][0], me)
            elif kind == "yield":
                yield name
                while open_receives[me]:
                    receive(me, open_receives[me][0], me)
        log.append((me, "return"))
        while left_for_sibling[before]:
            receive(before, left_for_sibling[before][0], me)
        if count == 1 or done[after]:
            while open_receives[me]:
                receive(me, open_receives[me][0], me)

    runs = [run(i) for i in range(count)]
    turn = 0
    while not all(done):
        if not done[turn]:
            site = next(runs[turn], "")
            done[turn] = site == ""
            decisions.append(turn)
            sites.append(site)
        turn = (turn + 1) % count
    return log, decisions, sites
