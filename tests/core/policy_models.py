"""Slow, obvious models of the policies and of the receives, to compare the real ones with.

They share no code with the package, and they are told beforehand what a policy finds out on its way: how many slices
each microbatch has.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

from tests.core.programs import Action, Event


def may_run(completed: Sequence[int], slices: Sequence[int]) -> list[int]:
    """Law 6: the k-th slice of a microbatch, once every earlier one has completed its own k-th slice or is done."""
    return [
        index
        for index in range(len(slices))
        if completed[index] < slices[index]
        and all(completed[j] == slices[j] or completed[j] > completed[index] for j in range(index))
    ]


def round_robin(slices: Sequence[int]) -> list[int]:
    return [index for _, index in sorted((k, i) for i, n in enumerate(slices) for k in range(n))]


def in_turn(slices: Sequence[int]) -> list[int]:
    return [index for index, n in enumerate(slices) for _ in range(n)]


def phase_offset(slices: Sequence[int], offset: int) -> list[int]:
    if offset == 0:
        return round_robin(slices)
    staged = sorted((k + offset * i, -i) for i, n in enumerate(slices) for k in range(n))
    return [-behind for _, behind in staged]


def seeded(slices: Sequence[int], seed: int) -> list[int]:
    rng, completed, decisions = random.Random(seed), [0] * len(slices), []
    while able := may_run(completed, slices):
        index = able[0] if len(able) == 1 else able[int(rng.random() * len(able))]
        completed[index] += 1
        decisions.append(index)
    return decisions


def pct(slices: Sequence[int], seed: int, depth: int, length: int) -> list[int]:
    rng, completed, decisions = random.Random(seed), [0] * len(slices), []
    priorities = [rank + depth for rank in _shuffle(rng, len(slices), len(slices))]
    changes = _shuffle(rng, length, depth - 1)
    while able := may_run(completed, slices):
        index = max(able, key=lambda i: priorities[i])
        if len(decisions) in changes:
            priorities[index] = 1 + changes.index(len(decisions))
            index = max(able, key=lambda i: priorities[i])
        completed[index] += 1
        decisions.append(index)
    return decisions


def _shuffle(rng: random.Random, bound: int, count: int) -> list[int]:
    """The first `count` places of a Fisher-Yates shuffle of all numbers below `bound`."""
    numbers = list(range(bound))
    for position in range(count):
        other = position + int(rng.random() * (bound - position))
        numbers[position], numbers[other] = numbers[other], numbers[position]
    return numbers[:count]


def act_out(programs: Sequence[Sequence[Action]], decisions: Sequence[int]) -> tuple[list[Event], list[str]]:
    """(log, sites) of programs that run by these decisions: as `tests.core.programs.play` logs them."""
    count = len(programs)
    log: list[Event] = []
    sites: list[str] = []
    to_receive: list[list[str]] = [[] for _ in programs]  # by owner, oldest first
    inboxes: list[list[str]] = [[] for _ in programs]  # by the owner's successor
    done = [False] * count

    def receive(owner: int, name: str, by: int) -> None:
        to_receive[owner].remove(name)
        if name in inboxes[(owner + 1) % count]:
            inboxes[(owner + 1) % count].remove(name)
        log.append((owner, "receive", name, by))

    def empty_inbox(me: int) -> None:
        while inboxes[me]:
            receive((me - 1) % count, inboxes[me][0], me)

    def receive_own(me: int) -> None:
        while to_receive[me]:
            receive(me, to_receive[me][0], me)

    def run(me: int) -> Any:
        successor = (me + 1) % count
        for kind, name in programs[me]:
            if kind == "yield":
                yield name
                receive_own(me)
            elif kind == "receive sibling's":
                empty_inbox(me)
            elif kind == "send":
                log.append((me, "send", name))
                to_receive[me].append(name)
                if not done[successor]:
                    inboxes[successor].append(name)
            else:
                log.append((me, "work", name))
        log.append((me, "return"))
        empty_inbox(me)
        if count == 1 or done[successor]:
            receive_own(me)

    runs = [run(index) for index in range(count)]
    for index in decisions:
        site = next(runs[index], "")
        done[index] = site == ""
        sites.append(site)
    return log, sites
