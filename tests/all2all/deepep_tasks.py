"""What the ranks run in the tests of the DeepEP transports on CPUs, with a stand-in for the library."""

from __future__ import annotations

from functools import partial
from typing import Any
from unittest.mock import patch

import torch

from dbo_greenlet import Scheduler
from dbo_greenlet.all2all.deepep import meet
from dbo_greenlet.all2all.deepep_ht import DeepEPHighThroughput
from dbo_greenlet.all2all.deepep_ll import DeepEPLowLatency
from dbo_greenlet.errors import BrokenGroupError, RankFailedError
from tests.all2all.fake_deep_ep import Buffer, calls, cuda_on_cpu
from tests.all2all.rank_cases import dense_reference, generator_of, layer
from tests.all2all.transport_cases import run_cases
from tests.all2all.transport_ranks import EXPERTS, Ranks, relative
from tests.ranks.rank_pool import group, store_for_tests, this_rank


def run(name: str, kind: str, hidden: int, cases: list[str]) -> dict[str, dict[str, Any]]:
    """What each case gave, by case, and under "calls" what the stand-in was asked to do."""
    calls.clear()
    with cuda_on_cpu():
        told = {result["case"]: result for result in run_cases(Ranks(kind, group(name), hidden), cases)}
    told["calls"] = {"calls": list(calls)}
    return told


def one_split_step(name: str, kind: str) -> list[tuple[Any, ...]]:
    """What a step of one layer and two microbatches asks the library to do."""
    with cuda_on_cpu():
        ranks = Ranks(kind, group(name), 32)
        parts = [ranks.inputs(4, seed) for seed in range(2)]
        calls.clear()
        Scheduler(strict=True).run([partial(ranks.layer, *part) for part in parts])
        told = list(calls)
        ranks.all_to_all.close()
    return told


def narrow_rows(name: str) -> tuple[list[bool], set[int]]:
    """Widths below the wire's, through experts whose bits do not depend on other numbers; and the widths sent."""
    right = []
    with cuda_on_cpu():
        calls.clear()
        for width in (1, 8, 33, 2047):
            with torch.inference_mode():  # what it keeps must be writable outside all the same
                all_to_all = DeepEPLowLatency(group(name), 4, width, 8)
            generator = generator_of(all_to_all.rank, width)
            hidden = torch.randn(5, width, generator=generator).bfloat16()
            topk_ids = torch.tensor([[0, 3], [2, -1], [1, 2], [3, 0], [-1, -1]])
            weights = torch.rand(5, 2, generator=generator)
            result = layer(all_to_all, hidden, topk_ids, weights)
            right.append(torch.equal(result, dense_reference(hidden, topk_ids, weights)))
            all_to_all.close()
    return right, {call[1][-1] for call in calls if call[0] in ("ll dispatch", "ll combine")}


def reserve(name: str) -> dict[str, list[int]]:
    """DeepEP's number of multiprocessors and the number that products leave free; and what the kernels used."""
    told: dict[str, list[int]] = {}
    free = [0]

    def now() -> list[int]:
        return [Buffer.num_sms, free[0]]

    with (
        cuda_on_cpu(),
        patch.object(torch._C, "_set_sm_carveout_experimental", lambda sms: free.__setitem__(0, sms or 0), create=True),
        patch.object(torch._C, "_get_sm_carveout_experimental", lambda: free[0] or None, create=True),
    ):
        ranks = Ranks("ht", group(name), 32)
        ranks.all_to_all.close()
        ranks.all_to_all = DeepEPHighThroughput(group(name), EXPERTS, 32, num_sms=12)
        calls.clear()
        part = ranks.inputs(4)
        told["before"] = now()
        before = ranks.all_to_all.dispatch_send(*part)
        before.finish_dispatch()
        try:
            with ranks.all_to_all.reserve_sms():
                told["inside"] = now()
                ranks.layer(*part)
                raise ValueError("on the way")
        except ValueError:
            told["after"] = now()
        # A dispatch that began outside is combined with what it began with.
        before.combine_send(ranks.experts(before.tokens()))
        before.finish_combine()
        before.combined()
        told["used"] = [call[2] for call in calls if call[0] in ("ht dispatch", "ht combine")]
        ranks.all_to_all.close()
    return told


def meet_for_different_things(name: str) -> str:
    """One rank makes a buffer anew, the other repairs its own: what each is told."""
    try:
        meet(group(name), "ll new" if group(name).rank else "ll fix", [1])
    except BrokenGroupError as error:
        return str(error)
    return "nothing"


def complete_after_a_reset(name: str, kind: str) -> list[str]:
    """A dispatch whose rows were not received and one that was not combined, both from before a reset."""
    told = []
    with cuda_on_cpu():
        ranks = Ranks(kind, group(name), 32)
        received = ranks.all_to_all.dispatch_send(*ranks.inputs(4, 1))
        received.finish_dispatch()
        outputs = ranks.experts(received.tokens())
        sent = ranks.all_to_all.dispatch_send(*ranks.inputs(4, 2))
        group(name).reset()
        expected = ranks.reference(*ranks.inputs(4, 3))
        told.append(f"{relative(ranks.layer(*ranks.inputs(4, 3)), expected) < 1e-2}")
        for part in (sent.finish_dispatch, lambda: (received.combine_send(outputs), received.finish_combine())):
            try:
                part()
                told.append("completed")
            except BrokenGroupError as error:
                told.append(str(error))
        ranks.all_to_all.close()
    return told


def fail_instead_of_replaying(name: str) -> list[str]:
    """Rank 0 replays a graph of two dispatches and combines, rank 1 fails before it does; then a reset and a layer."""
    of, told = group(name), []
    with cuda_on_cpu():
        ranks = Ranks("ll", of, 32)
        part = ranks.inputs(4, 1)
        expected = ranks.layer(*part)
        token = capture_token(ranks)
        both_here("before the replay")
        if of.rank == 0:
            ranks.all_to_all.replaying(token)
            ranks.all_to_all.buffer.replay(len(token) // 2)
        both_here("after the replay")
        if of.rank == 0:
            try:
                while True:
                    of.check()
            except RankFailedError as error:
                told.append(str(error))
        else:
            of.announce_failure(None, ValueError("no memory for the inputs"))
            told.append("failed")
        of.reset()
        told.append(str(torch.equal(ranks.layer(*part), expected)))
        ranks.all_to_all.close()
    return told


def capture_token(ranks: Ranks) -> tuple[int, ...]:
    """Of a capture of two layers. (The stand-in runs them, on both ranks; the transport takes them for captured.)"""
    with patch("torch.cuda.is_current_stream_capturing", lambda: True):
        ranks.all_to_all.begin_capture()
        for seed in range(2):
            ranks.layer(*ranks.inputs(4, seed))
    return ranks.all_to_all.replay_token()


def fail_inside_the_library(name: str, kind: str, call: str) -> list[str]:
    """The library runs out of memory in `call` on rank 0: what each rank gets then, and in the step after a reset."""
    of, told = group(name), []
    with cuda_on_cpu():
        ranks = Ranks(kind, of, 32)
        part = ranks.inputs(4, 1)
        ranks.layer(*part)
        both_here(f"{kind} {call}")

        def full(*_: Any, **__: Any) -> None:
            raise torch.OutOfMemoryError("no room for the rows")

        if of.rank == 0:
            setattr(ranks.all_to_all.buffer, call, full)
        for _ in range(2):
            try:
                ranks.layer(*part)
                while True:
                    of.check()
            except Exception as error:
                of.announce_failure(None, error)
                told.append(f"{type(error).__name__}: {error}")
            of.reset()
    return told


def fail_while_settling(name: str) -> list[str]:
    """Rank 0 has sent a dispatch that rank 1 has not; after a reset settling fails at its end, after the next not."""
    of, told = group(name), []
    with cuda_on_cpu():
        ranks = Ranks("ll", of, 32)
        part = ranks.inputs(4, 1)
        expected = ranks.layer(*part)
        if of.rank == 0:
            ranks.all_to_all.dispatch_send(*part)
        both_here("sent")
        of.announce_failure(None, ValueError("stopped"))
        both_here("announced")
        of.reset()
        stalled = RankFailedError(1, None, "it stalled")
        with patch.object(of, "wait_for_device", side_effect=stalled):
            try:
                ranks.layer(*part)
            except RankFailedError as error:
                told.append(str(error))
        both_here("settled in vain")
        of.reset()
        told.append(str(torch.equal(ranks.layer(*part), expected)))
        ranks.all_to_all.close()
    return told


def both_here(place: str) -> None:
    """Until both ranks are there; through the tests' store, which does not care for a rank that leaves its group."""
    store = store_for_tests()
    store.set(f"{place}/{this_rank()}", "")
    store.wait([f"{place}/{rank}" for rank in range(2)])
