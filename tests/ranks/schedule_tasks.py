"""What the ranks run in the tests of compared schedules: real ranks, each with a model and policy of its own."""

from __future__ import annotations

import time
from typing import Any

import torch

from dbo_greenlet import Runner, dbo_yield, policy_from_text
from dbo_greenlet.batching import StepInput, VoteSettings
from dbo_greenlet.rank_schedules import compare_with_ranks
from dbo_greenlet.schedule import Schedule
from tests.ranks.rank_pool import group, this_rank


class Counted:
    """The rank's group, and the number of exchanges.

    `late`: this rank comes back from each exchange long after the others, and finds out then what they did meanwhile.
    """

    def __init__(self, name: str, late: bool = False) -> None:
        self.of = group(name)
        self.rank, self.world_size = self.of.rank, self.of.world_size
        self.exchanges = 0
        self.late = late

    def exchange(self, row: torch.Tensor) -> torch.Tensor:
        self.exchanges += 1
        rows = self.of.exchange(row)
        if self.late:
            time.sleep(0.2)
            self.of.check()
        return rows

    def announce_failure(self, microbatch: int | None, error: BaseException) -> None:
        self.of.announce_failure(microbatch, error)


def compare(name: str, schedules: list[tuple[int, str, str]]) -> tuple[int, str]:
    """Compare the schedules, one (N, decisions, sites) for each rank: exchanges it took, and what was raised."""
    count, decisions, sites = schedules[this_rank()]
    schedule = Schedule(count, tuple(map(int, decisions)), tuple(sites.split(" ")))
    of = Counted(name)
    try:
        compare_with_ranks(of, schedule)
    except Exception as error:
        return of.exchanges, f"{type(error).__name__}: {error}"
    return of.exchanges, ""


def step_with(name: str, policies: list[str], sites: list[list[str]], steps: int, late: int | None = None) -> list[Any]:
    """`steps` split steps under this rank's policy, of a model with this rank's yield sites: hashes, or what failed."""
    mine = sites[this_rank()]

    def model(step: StepInput) -> torch.Tensor:
        for site in mine:
            dbo_yield(site)
        return step.positions

    of = Counted(name, late == this_rank())
    policy = policy_from_text(policies[this_rank()])
    runner = Runner(model, settings=VoteSettings(2, 2, 2), group=of, policy=policy, compare_schedules=True)
    told: list[Any] = []
    for _ in range(steps):
        try:
            told.append(runner.step(eight_tokens()).schedule.hash)
        except Exception as error:
            told.append(error)
            break
    return [*told, of.exchanges]


def eight_tokens() -> StepInput:
    """Two requests of four tokens each."""
    return StepInput(
        positions=torch.arange(8),
        query_start_loc=torch.tensor([0, 4, 8], dtype=torch.int32),
        seq_lens=torch.tensor([4, 4], dtype=torch.int32),
        slot_mapping=torch.arange(8),
        request_rows=torch.arange(2),
        num_tokens=8,
        num_padded_tokens=8,
        input_ids=torch.zeros(8, dtype=torch.int64),
    )
