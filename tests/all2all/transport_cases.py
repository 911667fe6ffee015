"""What two ranks do with a transport in the tests of DeepEP: on a GPU with the library, on CPUs with a stand-in for it.

The products are in bfloat16. Each case returns what the test has to look at, as JSON values.
"""

from __future__ import annotations

import dataclasses
import traceback
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from dbo_greenlet import Scheduler
from dbo_greenlet.all2all import AllToAllInputError, CapacityExceededError, PartOrderError
from dbo_greenlet.errors import DboError
from dbo_greenlet.ranks import RankGroup
from tests.all2all.transport_failures import death, failed_replay, failure
from tests.all2all.transport_ranks import CHOICES, EXPERTS, LOCAL, TOKENS, Captured, Ranks, largest, relative


def against_reference(ranks: Ranks) -> dict[str, Any]:
    """Relative errors for even, uneven and missing tokens."""
    errors = {}
    for seed, counts in enumerate([(TOKENS, TOKENS), (7, 5), (0, 4), (3, 0), (0, 0), (1, TOKENS)]):
        of_rank = ranks.inputs(counts[ranks.rank], seed)
        out = ranks.layer(*of_rank)
        errors[str(counts)] = relative(out, ranks.reference(*of_rank))
        ranks.settled()
    for name, row in (("all to one expert", [5]), ("every expert", list(range(EXPERTS)))):
        hidden = ranks.inputs(TOKENS, 9)[0]
        ids = torch.tensor([row] * TOKENS, device=ranks.device)
        weights = torch.full(ids.shape, 0.3, device=ranks.device)
        errors[name] = relative(ranks.layer(hidden, ids, weights), ranks.reference(hidden, ids, weights))
    nowhere = ranks.inputs(4, 9)
    nowhere[1].fill_(-1)
    return {"errors": errors, "nowhere": float(ranks.layer(*nowhere).abs().sum())}


def expected_tokens(ranks: Ranks) -> dict[str, Any]:
    """Rows for what a step has instead of for the most there can be: the shape, the error, and what is refused then."""
    ranks.all_to_all.expect_tokens(5)
    try:
        of_rank = ranks.inputs((5, 2)[ranks.rank], 15)
        sent = ranks.all_to_all.dispatch_send(*of_rank)
        sent.finish_dispatch()
        told: dict[str, Any] = {"rows": sent.tokens().hidden.shape[1]}
        sent.combine_send(ranks.experts(sent.tokens()))
        sent.finish_combine()
        told["relative"] = relative(sent.combined(), ranks.reference(*of_rank))
        try:
            ranks.all_to_all.dispatch_send(*ranks.inputs(6, 16))
        except CapacityExceededError as error:
            told["refused"] = [error.tokens, error.capacity]
    finally:
        ranks.all_to_all.expect_tokens(None)
    of_rank = ranks.inputs(TOKENS, 17)
    told["after"] = relative(ranks.layer(*of_rank), ranks.reference(*of_rank))
    return told


def repeats(ranks: Ranks) -> dict[str, Any]:
    """The same layer again and again: the largest difference to the first."""
    of_rank = ranks.inputs(11, 20)
    first = ranks.layer(*of_rank)
    return {"largest": max(float((ranks.layer(*of_rank) - first).abs().max()) for _ in range(10))}


def split(ranks: Ranks) -> dict[str, Any]:
    """Microbatches under the scheduler against one after the other: the largest differences."""
    told = {}
    for name, count, carrier in (("two", 2, "greenlet"), ("three", 3, "greenlet"), ("threads", 2, "thread")):
        parts = [ranks.inputs((5 + i) * (1 - (ranks.rank and i == 1)), 30 + i) for i in range(count)]
        in_turn = [ranks.layers(part) for part in parts]
        scheduler = Scheduler(carrier=carrier, strict=False)
        differences = []
        for _ in range(3):
            outputs = scheduler.run([partial(ranks.layers, part) for part in parts]).outputs
            ranks.settled()
            differences += [largest(a, b) for a, b in zip(outputs, in_turn, strict=True)]
        told[name] = max(differences)
    return told


def streams(ranks: Ranks) -> dict[str, Any]:
    """Hooks run while another stream is current, and (not for low latency) rows read on a third: the differences.

    The sleeps make a missing wait show as a wrong number.
    """
    hooks, reads = torch.cuda.Stream(), torch.cuda.Stream()
    owner = torch.cuda.current_stream()
    of_rank = ranks.inputs(9, 90)
    expected = ranks.layer(*of_rank)
    ranks.settled()
    told = {}
    # Who reads the rows and computes on them, and who reads the result.
    plans = {"hooks": (owner, owner)}
    if ranks.kind != "ll":
        plans |= {"reads": (reads, reads), "result": (owner, reads)}
    for name, (reader, last) in plans.items():
        differences = []
        for _ in range(4):
            torch.cuda._sleep(1_000_000)
            sent = ranks.all_to_all.dispatch_send(*of_rank)
            with torch.cuda.stream(hooks):
                torch.cuda._sleep(2_000_000)
                sent.finish_dispatch()
            with torch.cuda.stream(reader):
                tokens = sent.tokens()
                torch.cuda._sleep(2_000_000)
                outputs = ranks.experts(tokens)
                sent.combine_send(outputs)
            with torch.cuda.stream(hooks):
                sent.finish_combine()
            with torch.cuda.stream(last):
                combined = sent.combined()
            owner.wait_stream(last)
            differences.append(largest(combined, expected))
            ranks.settled()
        told[name] = max(differences)
    return told


def graph(ranks: Ranks) -> dict[str, Any]:
    """A split step captured and replayed on inputs that change: the largest differences to eager."""
    static = [ranks.inputs(6, 40 + i) for i in range(2)]
    captured = Captured(ranks, static)
    differences = []
    for seed in range(4):
        for i, part in enumerate(static):
            for ours, theirs in zip(part, ranks.inputs(6, 50 + 2 * seed + i), strict=True):
                ours.copy_(theirs)
        replayed = captured.replay()
        eager = captured.eager()
        ranks.settled()
        differences += [largest(a, b) for a, b in zip(replayed, eager, strict=True)]
    return {"largest": max(differences)}


def broken_capture(ranks: Ranks) -> dict[str, Any]:
    """Captures that end with an error after 1, 2, 3 and 4 operations; eager steps and a whole capture work then."""
    parts = [ranks.inputs(5, 44 + i) for i in range(2)]
    expected = [ranks.layers(part) for part in parts]
    raised, differences = [], []
    for stop in range(4):
        calls = iter(range(stop))

        def layers(part: tuple[Tensor, Tensor, Tensor], calls: Iterator[int] = calls) -> Tensor:
            hidden, ids, weights = part
            sent = ranks.all_to_all.dispatch_send(hidden, ids, weights)
            for receive in (sent.finish_dispatch, sent.finish_combine):
                if next(calls, None) is None:
                    raise ValueError("on the way")
                receive()
                if receive == sent.finish_dispatch:
                    sent.combine_send(ranks.experts(sent.tokens()))
            return sent.combined()

        try:
            with torch.cuda.graph(torch.cuda.CUDAGraph(), capture_error_mode="thread_local"):
                for part in parts:
                    layers(part)
        except ValueError as error:
            raised.append(str(error))
        outputs = [ranks.layers(part) for part in parts]
        ranks.together()
        differences += [largest(a, b) for a, b in zip(outputs, expected, strict=True)]
    whole = Captured(ranks, parts).replay()
    differences += [largest(a, b) for a, b in zip(whole, expected, strict=True)]
    return {"raised": len(raised), "largest": max(differences)}


def errors(ranks: Ranks) -> dict[str, Any]:
    """What is refused, by type."""
    told: dict[str, str] = {}

    def refused(name: str, kind: type[DboError], call: Callable[[], Any]) -> None:
        try:
            call()
            told[name] = "accepted"
        except kind as error:
            told[name] = str(error)

    hidden, ids, weights = ranks.inputs(4, 60)
    send = ranks.all_to_all.dispatch_send
    if ranks.kind != "nccl":
        refused("dtype", AllToAllInputError, lambda: send(hidden.float(), ids, weights))
        refused("width", AllToAllInputError, lambda: send(hidden[:, :16].contiguous(), ids, weights))
        many = torch.full((4, 40), -1, device=ranks.device)
        refused("choices", AllToAllInputError, lambda: send(hidden, many, torch.ones(4, 40, device=ranks.device)))
    if ranks.kind != "ht":
        refused("tokens", CapacityExceededError, lambda: send(*ranks.inputs(TOKENS + 1, 61)))
    if ranks.kind == "ll":
        first = send(hidden, ids, weights)
        refused("two receives", PartOrderError, lambda: send(hidden, ids, weights))
        first.finish_dispatch()
        first.combine_send(ranks.experts(first.tokens()))
        first.finish_combine()
        told["after"] = str(relative(first.combined(), ranks.reference(hidden, ids, weights)))
    return told


def sms(ranks: Ranks) -> dict[str, Any]:
    """Multiprocessors before, inside and after a reservation, also one that ends with an error; and a step inside."""
    import deep_ep

    def now() -> list[int]:
        return [deep_ep.Buffer.num_sms, torch._C._get_sm_carveout_experimental() or 0]

    told: dict[str, Any] = {"before": now()}
    of_rank = ranks.inputs(9, 80)
    plain = ranks.layers(of_rank)
    try:
        with ranks.all_to_all.reserve_sms():
            told["inside"] = now()
            told["difference"] = largest(ranks.layers(of_rank), plain)
            raise ValueError("on the way")
    except ValueError:
        told["after"] = now()
    return told


def model(ranks: Ranks) -> dict[str, Any]:
    """A DeepSeek-V2 model's step through the runner, split and not, against all experts on one rank."""
    from dbo_greenlet.all2all.loopback import Loopback
    from dbo_greenlet.batching import VoteSettings
    from dbo_greenlet.devices import cpu_device
    from dbo_greenlet.moe import DeepseekV2Model, KVCache
    from dbo_greenlet.runner import Runner
    from tests.runner.tiny import CONFIG, ROW_LENGTH, ROWS

    config = dataclasses.replace(
        CONFIG, hidden_size=ranks.hidden, n_routed_experts=EXPERTS, num_experts_per_tok=CHOICES, num_hidden_layers=4
    )
    device: Any = cpu_device()
    if ranks.device.type == "cuda":
        from dbo_greenlet.devices.cuda import CudaDevice

        device = CudaDevice(ranks.device.index)
    whole = DeepseekV2Model(config, Loopback(EXPERTS), torch.bfloat16, ranks.device).eval()
    generator = torch.Generator().manual_seed(3)
    for parameter in whole.parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        parameter.copy_(noise / parameter.shape[-1] ** 0.5 if parameter.dim() > 1 else 1 + 0.1 * noise)
    mine = DeepseekV2Model(config, ranks.all_to_all, torch.bfloat16, ranks.device).eval()
    for (_, ours), (_, theirs) in zip(mine.named_parameters(), whole.named_parameters(), strict=True):
        ours.copy_(theirs if ours.shape == theirs.shape else theirs[ranks.rank * LOCAL : (ranks.rank + 1) * LOCAL])
    step = device_step(ranks, [[3, 1, 5, 2], [4, 2]][ranks.rank])

    def run(which: Any, mode: str, group: RankGroup | None) -> Tensor:
        cache = KVCache(config, ROWS, ROW_LENGTH, torch.bfloat16, ranks.device)
        runner = Runner(which, kv_cache=cache, settings=VoteSettings(2, 2, 2), group=group, device=device, strict=True)
        out = runner.step(step, mode=mode)
        if out.decision.split is not (mode != "never"):
            raise RuntimeError(f"mode {mode}: {out.decision}")
        ranks.settled()
        return out.output

    expected = run(whole, "never", None)
    outputs = {mode: run(mine, mode, ranks.group) for mode in ("auto", "sequential", "never")}
    return {
        "split against in turn": largest(outputs["auto"], outputs["sequential"]),
        "against one rank": {mode: relative(out, expected.double()) for mode, out in outputs.items()},
    }


def device_step(ranks: Ranks, lengths: list[int]) -> Any:
    """Prompts of these lengths, in the rows 0, 1, ..."""
    from tests.runner.tiny import tiny_step

    step = tiny_step([(row, 0, length) for row, length in enumerate(lengths)], seed=ranks.rank)
    moved = {
        field.name: getattr(step, field.name).to(ranks.device)
        for field in dataclasses.fields(step)
        if isinstance(getattr(step, field.name), Tensor) and not field.name.endswith("_cpu")
    }
    return dataclasses.replace(step, query_start_loc_cpu=step.query_start_loc, seq_lens_cpu=step.seq_lens, **moved)


_ALL = (against_reference, repeats, split, model, streams, errors)
# The survivor of this one is alone, so it is run by name only.
_BY_NAME = (death,)
CASES = {
    "ll": (*_ALL, expected_tokens, graph, broken_capture, failure, failed_replay),
    "ht": (*_ALL, sms, failure),
    # NCCL waits with the end of a communicator, also with an abort, until the graphs that captured it are gone.
    "nccl": (*_ALL, expected_tokens, graph, broken_capture, failure),
}


def run_cases(ranks: Ranks, wanted: list[str]) -> Iterator[dict[str, Any]]:
    """What each case gave: of those `wanted`, or of all that both ranks survive.

    One that raised is the last, and the other rank is told so that it does not wait.
    """
    yield {"case": "made", "not_capturable": ranks.all_to_all.not_capturable}
    with torch.inference_mode():
        for case in [case for case in (*CASES[ranks.kind], *_BY_NAME) if case.__name__ in wanted] or CASES[ranks.kind]:
            try:
                result = case(ranks)
                if case not in _BY_NAME:
                    ranks.settled()
            except Exception as error:
                # Whatever it is, it goes into the result.
                ranks.group.announce_failure(None, error)
                yield {"case": case.__name__, "error": traceback.format_exc()}
                return
            yield {"case": case.__name__, **result}
    ranks.all_to_all.close()
    yield {"case": "closed"}
