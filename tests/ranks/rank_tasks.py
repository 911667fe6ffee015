"""What the ranks run in the tests of `RankGroup`. Groups go by name; the pool made them."""

from __future__ import annotations

import os
import signal
from typing import Any

import torch
import torch.distributed as dist

from dbo_greenlet import ranks
from dbo_greenlet.all2all.torch_distributed import TorchDistributed
from dbo_greenlet.ranks import RankGroup, serve_store
from tests.all2all.rank_cases import dense_reference, generator_of, layer, random_inputs
from tests.ranks.rank_pool import group, store_for_tests, this_rank

CAPACITY = 4
_left_over: dict[str, Any] = {}


def one_step(name: str) -> bool:
    """A vote, and a layer in both modes: does all of it come out right?"""
    of = group(name)
    voted = of.exchange([of.rank, 7]).tolist() == [[rank, 7] for rank in range(of.world_size)]
    right = []
    for capacity in (None, CAPACITY):
        all_to_all = TorchDistributed(of, 2 * of.world_size, capacity)
        inputs = random_inputs(generator_of(of.rank, 1), 3, 2, all_to_all.num_experts)
        right.append(torch.equal(layer(all_to_all, *inputs), dense_reference(*inputs)))
    return voted and all(right)


def send(name: str) -> Any:
    """The send part of a dispatch."""
    of = group(name)
    all_to_all = TorchDistributed(of, of.world_size, CAPACITY)
    return all_to_all.dispatch_send(*random_inputs(generator_of(of.rank, 2), 3, 2, of.world_size))


def outcomes(name: str, uses: int, wait_for: str = "", then_say: str = "") -> list[Any]:
    """Dispatch and wait, `uses` times over: what each raised, or None.

    Begins when the key `wait_for` is in the test's store, and puts `then_say` there at the end.
    """
    if wait_for:
        store_for_tests().wait([wait_for])
    told: list[Any] = []
    for _ in range(uses):
        try:
            send(name).finish_dispatch()
            told.append(None)
        except Exception as error:
            told.append(error)
    if then_say:
        store_for_tests().set(then_say, "")
    return told


def fail(name: str, microbatch: int | None, in_flight: int = 0, reason: str = "broken weights") -> list[Any]:
    """Send `in_flight` dispatches, fail, and try once more."""
    pending = [send(name) for _ in range(in_flight)]
    group(name).announce_failure(microbatch, ValueError(reason))
    told = outcomes(name, 1)
    for sent in pending:
        try:
            sent.finish_dispatch()
            told.append(None)
        except Exception as error:
            told.append(error)
    return told


def be_killed() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def reset(name: str) -> int:
    group(name).reset()
    return group(name).generation


def keep_a_dispatch(name: str) -> None:
    _left_over[name] = send(name)


def finish_the_kept_dispatch(name: str) -> None:
    _left_over.pop(name).finish_dispatch()


def leave(name: str) -> None:
    group(name).close()


def agree(name: str, settings: list[dict[str, Any]], versions: list[str] | None = None) -> None:
    """Agree on what the lists say for this rank."""
    own_version = ranks.__version__
    if versions is not None:
        ranks.__version__ = versions[this_rank()]
    try:
        group(name).agree(settings[this_rank()])
    finally:
        ranks.__version__ = own_version


def fail_in_with_block(name: str) -> list[list[int]] | None:
    """A group of its own, which rank 1 leaves with an error."""
    with RankGroup(dist.PrefixStore(name, store_for_tests()), this_rank(), 2) as of:
        if of.rank == 1:
            raise ValueError("left the with block")
        return of.exchange([0]).tolist()


def join_from_env(port: int) -> list[list[int]]:
    os.environ.update(RANK=str(this_rank()), WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    with RankGroup.from_env() as of:
        return of.exchange([of.rank]).tolist()


def host_store_and_join() -> None:
    """Rank 0 hosts the store of its own group, and says on the test's store where."""
    _left_over["store"] = serve_store()
    store_for_tests().set("hosted", str(_left_over["store"].port))
    _left_over["hosted"] = RankGroup(_left_over["store"], 0, 2)


def join_hosted() -> None:
    _left_over["hosted"] = RankGroup.connect(1, 2, int(store_for_tests().get("hosted")))


def lose_the_host() -> list[Any]:
    """Wait for rank 0, then try to reset without its store."""
    told: list[Any] = []
    for use in (lambda: _left_over["hosted"].exchange([1]), lambda: _left_over["hosted"].reset()):
        try:
            use()
            told.append(None)
        except Exception as error:
            told.append(error)
    return told


def announce(name: str, microbatch: int | None) -> None:
    group(name).announce_failure(microbatch, ValueError("broken weights"))
