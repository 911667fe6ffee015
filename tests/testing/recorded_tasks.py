"""What ranks run with operators and transfers recorded: the model over gloo, and layers over DeepEP's stand-in."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from dbo_greenlet import Scheduler
from dbo_greenlet.batching import StepInput, UBatchBuffers, slice_all
from dbo_greenlet.batching.slices import split_step
from dbo_greenlet.microbatch import make_ubatch_contexts
from dbo_greenlet.moe import DeepseekV2Model
from dbo_greenlet.policies import policy_from_text
from dbo_greenlet.testing.hazards import find_hazards
from dbo_greenlet.testing.recorded_all2all import RecordedAllToAll
from dbo_greenlet.testing.torch_accesses import TorchAccesses, recorded_step
from dbo_greenlet.yields import dbo_yield
from tests.all2all.fake_deep_ep import cuda_on_cpu
from tests.all2all.rank_cases import Capacity, transport
from tests.all2all.transport_ranks import Ranks
from tests.ranks.rank_pool import group
from tests.runner.tiny import CONFIG, ROW_LENGTH, ROWS, tiny_cache, tiny_model, tiny_step

# Prefills, a chunk of a longer one and decodes; two, three and four microbatches all cut a request somewhere.
REQUESTS = ((0, 0, 9), (1, 3, 1), (2, 5, 7), (3, 2, 1), (4, 0, 6))


def make_model(all_to_all: Any) -> DeepseekV2Model:
    """The tiny model with the same weights whatever the transport."""
    loopback, model = tiny_model(), DeepseekV2Model(CONFIG, all_to_all).eval()
    whole, first = dict(loopback.named_parameters()), all_to_all.rank * all_to_all.num_local_experts
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            source = whole[name]
            if source.shape != parameter.shape:
                source = source[first : first + all_to_all.num_local_experts]
            parameter.copy_(source)
    return model


def outputs_of(
    model: DeepseekV2Model, step: StepInput, count: int, policy: str, recording: TorchAccesses | None, **options: Any
) -> tuple[Tensor, str]:
    """One split step: its rows, and the hash of its schedule."""
    cache = tiny_cache()
    for row in range(ROWS):  # what earlier steps left
        generator = torch.Generator().manual_seed(row)
        cache._slots[:, row * ROW_LENGTH : (row + 1) * ROW_LENGTH].normal_(generator=generator)
    slices = slice_all(step, split_step(step, count), UBatchBuffers(8, count))
    if recording is not None:
        recording.name(cache._slots, "KV cache")
        recording.program.clear()
    contexts = None if recording is None else make_ubatch_contexts(count, device=recording.device)
    entries: Sequence[Callable[[], Tensor]] = [partial(model, part, cache) for part in slices]
    with torch.inference_mode():
        result = Scheduler(policy_from_text(policy), **options).run(entries, contexts)
    return torch.cat(result.outputs), result.schedule.hash


def compare(all_to_all: Any, count: int, policy: str, **options: Any) -> list[str]:
    """Hazards of a recorded step, and what recording changed about it."""
    step = tiny_step(REQUESTS)
    plain, plain_hash = outputs_of(make_model(all_to_all), step, count, policy, None, **options)
    with recorded_step() as recording:
        recorded = RecordedAllToAll(all_to_all, recording.device)
        out, hash_ = outputs_of(make_model(recorded), step, count, policy, recording, **options)
        recorded.detach()
    found = [str(each) for each in find_hazards(recording.program)]
    if hash_ != plain_hash:
        found.append(f"schedule {hash_} instead of {plain_hash}")
    if not torch.equal(out, plain):
        found.append("other outputs than without recording")
    ran = {each.microbatch for each in recording.program.operations if each.name == "index_copy_"}
    if ran != set(range(count)):
        found.append(f"only microbatches {ran} were seen to write the cache")
    if len(recording.program.transfers) < 2 * 2 * count:
        found.append(f"{len(recording.program.transfers)} transfers")
    return found


def model_over_gloo(name: str, capacity: Capacity, policies: Sequence[str], count: int) -> dict[str, list[str]]:
    return {policy: compare(transport(name, CONFIG.n_routed_experts, capacity), count, policy) for policy in policies}


def layers_over_deepep(name: str, kind: str, policies: Sequence[str], count: int) -> dict[str, Any]:
    """Three layers over the stand-in for DeepEP: hazards, and the operations noted of the library."""
    told: dict[str, Any] = {}
    with cuda_on_cpu():
        ranks = Ranks(kind, group(name), 32)
        parts = [ranks.inputs(5, seed) for seed in range(count)]
        expected = [through(ranks, part) for part in parts]
        for policy in policies:
            with recorded_step() as recording:
                recorded = RecordedAllToAll(ranks.all_to_all, recording.device)
                contexts = make_ubatch_contexts(count, device=recording.device)
                entries = [partial(through, ranks, part) for part in parts]
                result = Scheduler(policy_from_text(policy)).run(entries, contexts)
                recorded.detach()
            told[policy] = [str(each) for each in find_hazards(recording.program)]
            if not all(map(torch.equal, result.outputs, expected)):
                told[policy].append("other outputs than without recording")
            told["noted"] = {
                (each.kind, each.stream, each.name)
                for each in recording.program.operations
                if each.stream == "deepep" or each.transfer is not None
            }
        ranks.all_to_all.close()
    return told


def through(ranks: Ranks, part: tuple[Tensor, Tensor, Tensor]) -> Tensor:
    hidden, ids, weights = part
    for layer in range(3):
        hidden = hidden + ranks.layer(hidden, ids, weights, f"layer{layer}")
    return hidden


def message_touched_in_flight(name: str, writes: bool) -> list[str]:
    """A layer that overwrites its message, or reads what comes back, while the dispatch is on its way."""
    ranks = Ranks("gloo", group(name), 32)
    with recorded_step() as recording:
        recorded = RecordedAllToAll(ranks.all_to_all, recording.device)
        sent = recorded.dispatch_send(*ranks.inputs(5, 1))
        message, received = sent._buffers
        recording.name(message, "the message")
        recording.name(received, "the rows")
        if writes:
            message.zero_()
        else:
            received.sum()
        sent.finish_dispatch()
        sent.combine_send(ranks.experts(sent.tokens()))
        sent.finish_combine()
        sent.combined()
        recorded.detach()
    return [str(each) for each in find_hazards(recording.program)]


def detached(name: str) -> list[str]:
    """What is left in transports after they were recorded."""
    with cuda_on_cpu(), recorded_step() as recording:
        gloo, deepep = Ranks("gloo", group(name), 32).all_to_all, Ranks("ll", group(name), 32).all_to_all
        for each in (gloo, deepep):
            RecordedAllToAll(each, recording.device).detach()
        told = [type(gloo.group).__name__, "a call of its own" if "call" in vars(deepep) else "no call of its own"]
        deepep.close()
    return told


def event_after_the_yield(name: str) -> list[str]:
    """High throughput whose dispatch event is captured after the yield, as once in vLLM."""
    with cuda_on_cpu():
        ranks = Ranks("ht", group(name), 32)
        part = ranks.inputs(5, 1)

        def late(hidden: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
            doubled = hidden * 2
            dbo_yield("dispatch")
            behind = ranks.all_to_all.capture()
            received = ranks.all_to_all.dispatch(doubled, ids, weights, behind)
            received.done.current_stream_wait()
            combined, done = ranks.all_to_all.combine(received.rows, received.number)
            done.current_stream_wait()
            return combined + 1

        with recorded_step() as recording:
            recorded = RecordedAllToAll(ranks.all_to_all, recording.device)
            Scheduler().run([partial(late, *part)] * 2, make_ubatch_contexts(2, device=recording.device))
            recorded.detach()
        ranks.all_to_all.close()
    return [str(each) for each in find_hazards(recording.program)]
