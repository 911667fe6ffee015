"""What the ranks run in the tests of `FaultyRanks`: real groups, the real all-to-all, the real scheduler."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from dbo_greenlet import Scheduler, dbo_maybe_run_recv_hook, dbo_register_recv_hook, dbo_yield
from dbo_greenlet.all2all.torch_distributed import TorchDistributed
from dbo_greenlet.rank_failures import failing_together
from dbo_greenlet.step import running, traced
from dbo_greenlet.testing.faults import Faults
from dbo_greenlet.testing.rank_faults import FaultyRanks
from tests.all2all.rank_cases import dense_reference, generator_of, random_inputs, run_experts
from tests.ranks.rank_pool import group

CAPACITY = 4
MICROBATCHES = 2
# Of a step: the vote, then a dispatch and a combine of each microbatch.
COLLECTIVES = 1 + 2 * MICROBATCHES


def forward(all_to_all: Any, inputs: Any, log: list[str]) -> torch.Tensor:
    """One Mixture-of-Experts layer of a microbatch, which notes how it was left."""
    try:
        with torch.no_grad():
            sent = all_to_all.dispatch_send(*inputs)
            dbo_register_recv_hook(sent.finish_dispatch)
            dbo_yield("layer0.dispatch")
            outputs = run_experts(all_to_all, sent)
            dbo_maybe_run_recv_hook()
            sent.combine_send(outputs)
            dbo_register_recv_hook(sent.finish_combine)
            dbo_yield("layer0.combine")
            return sent.combined()
    except BaseException as error:  # noted and passed on
        log.append(type(error).__name__)
        raise


def steps(name: str, faults: str, count: int) -> dict[str, Any]:
    """Run `count` steps, or fewer if one fails; say what came of each, and what is left behind."""
    ranks = FaultyRanks(group(name), Faults.parse(faults))
    all_to_all = TorchDistributed(ranks, 2 * ranks.world_size, CAPACITY)  # type: ignore[arg-type]
    scheduler = Scheduler(strict=True)
    told: list[Any] = []
    log: list[str] = []
    for number in range(count):
        generator = generator_of(ranks.rank, number)
        inputs = [random_inputs(generator, 3, 2, all_to_all.num_experts) for _ in range(MICROBATCHES)]
        ranks.begin_step()
        try:
            with failing_together(ranks):
                voted = ranks.exchange([number, ranks.rank]).tolist()
                assert voted == [[number, rank] for rank in range(ranks.world_size)], voted
                outputs = scheduler.run([partial(forward, all_to_all, each, log) for each in inputs]).outputs
        except Exception as error:
            told.append(error)
            break
        told.append(all(torch.equal(out, dense_reference(*each)) for out, each in zip(outputs, inputs, strict=True)))
    return {
        "told": told,
        "left by": log,
        "struck": [str(fault) for fault in ranks.struck],
        "clean": not running and traced == [False, 0] and torch.is_grad_enabled(),
        # Without ranks, so also where the group is broken: the scheduler runs its next step.
        "next step": scheduler.run([lambda: dbo_yield("a") or 0, lambda: dbo_yield("a") or 1]).outputs,
    }


def model_steps(name: str, faults: str, count: int) -> list[Any]:
    """`Runner` and a tiny model, its experts spread over the ranks: for each step whether split equals sequential."""
    from dbo_greenlet.batching import VoteSettings
    from dbo_greenlet.moe import DeepseekV2Model
    from dbo_greenlet.runner import Runner
    from tests.runner.tiny import CONFIG, tiny_cache, tiny_step

    ranks = FaultyRanks(group(name), Faults.parse(faults))
    all_to_all = TorchDistributed(ranks, CONFIG.n_routed_experts)  # type: ignore[arg-type]
    model = DeepseekV2Model(CONFIG, all_to_all).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(0.1 * torch.randn(parameter.shape, generator=generator_of(ranks.rank, 3)))
    runner = Runner(model, kv_cache=tiny_cache(), settings=VoteSettings(2, 2, 4), group=ranks, all2all=all_to_all)
    told: list[Any] = []
    for _ in range(count):
        try:
            outputs = []
            for mode in ("auto", "sequential"):
                ranks.begin_step()
                outputs.append(runner.step(tiny_step([(0, 0, 11), (1, 0, 6)]), mode=mode).output)
        except Exception as error:
            told.append(error)
            break
        told.append(torch.equal(*outputs))
    return told


def attributes(name: str) -> tuple[Any, ...]:
    """What passes through to the group."""
    ranks = FaultyRanks(group(name), Faults.parse("die@rank0:step0+die@rank1:step0"))
    # Before the first step begins nothing strikes.
    ranks.exchange([ranks.rank])
    return ranks.rank, ranks.world_size, str(ranks.device), ranks.generation, ranks.timeout
