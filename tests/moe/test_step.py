"""The model under the scheduler: a split step equals the same slices one after the other, bit for bit."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor, nn

from dbo_greenlet import Scheduler, dbo_enabled
from dbo_greenlet.all2all.loopback import Loopback
from dbo_greenlet.batching.inputs import StepInput, UBatchBuffers, slice_all
from dbo_greenlet.batching.slices import split_step
from dbo_greenlet.errors import MicrobatchFailed
from dbo_greenlet.moe import KVCache, load_model
from tests.moe.support import Loaded, Part, assert_close, make_step, reference_logits, token_ids

# Name -> (parts computed before, parts of the split step, padding). Two microbatches cut the tokens in the middle.
BATCHES = {
    "one prefill, cut": ([], [Part(0, 0, token_ids(21))], 0),
    "a chunk of a longer prefill, cut": ([Part(1, 0, token_ids(6))], [Part(1, 6, token_ids(14, 1))], 0),
    "a request straddles the cut": ([], [Part(0, 0, token_ids(5)), Part(1, 0, token_ids(9)), Part(2, 0, [3])], 0),
    "cut between requests": ([], [Part(2, 0, token_ids(6)), Part(0, 0, token_ids(6, 1))], 0),
    "decodes": ([Part(r, 0, token_ids(4 + r, r)) for r in range(4)], [Part(r, 4 + r, [r]) for r in range(4)], 0),
    "mixed": ([Part(3, 0, token_ids(8))], [Part(3, 8, [1]), Part(0, 0, token_ids(12)), Part(1, 0, [9])], 0),
    "padded, second microbatch half empty": ([], [Part(0, 0, token_ids(9))], 5),
    "second microbatch all padding": ([], [Part(0, 0, token_ids(4))], 6),
}


def slices_of(step: StepInput, count: int) -> list[StepInput]:
    return slice_all(step, split_step(step, count), UBatchBuffers(8, count))


def prepared(loaded: Loaded, before: list[Part]) -> KVCache:
    cache = loaded.cache()
    for part in before:
        loaded.logits(make_step([part]), cache)
    return cache


def run_split(loaded: Loaded, slices: list[StepInput], cache: KVCache, **options: str) -> Tensor:
    entries: list[Callable[[], Tensor]] = [partial(loaded.model, part, cache) for part in slices]
    with torch.inference_mode():
        return torch.cat(Scheduler(**options).run(entries).outputs)


def run_in_turn(loaded: Loaded, slices: list[StepInput], cache: KVCache) -> Tensor:
    with torch.inference_mode():
        return torch.cat([loaded.model(part, cache) for part in slices])


@pytest.mark.parametrize("carrier", ["greenlet", "thread"])
@pytest.mark.parametrize("count", [1, 2, 3])
@pytest.mark.parametrize(("before", "parts", "padding"), BATCHES.values(), ids=BATCHES.keys())
def test_split_equals_in_turn_bit_for_bit_and_unsplit_closely(
    v2: Loaded, before: list[Part], parts: list[Part], padding: int, count: int, carrier: str
) -> None:
    step = make_step(parts, padding)
    slices = slices_of(step, count)
    split_cache, turn_cache = prepared(v2, before), prepared(v2, before)
    split = run_split(v2, slices, split_cache, carrier=carrier)
    assert torch.equal(split, run_in_turn(v2, slices, turn_cache))
    for layer in range(v2.model.config.num_hidden_layers):
        assert torch.equal(split_cache.entries(layer), turn_cache.entries(layer))
    unsplit = v2.logits(step, prepared(v2, before))
    assert_close(v2.model.logits(split)[: step.num_tokens], unsplit[: step.num_tokens])


def test_a_split_prefill_equals_the_reference(v2: Loaded) -> None:
    ids = token_ids(40)
    split = run_split(v2, slices_of(make_step([Part(0, 0, ids)]), 2), v2.cache())
    assert_close(v2.model.logits(split), reference_logits(v2.reference, ids))


def test_the_schedule_of_two_moe_layers(v2: Loaded) -> None:
    slices = slices_of(make_step([Part(0, 0, token_ids(8)), Part(1, 0, token_ids(8))]), 2)
    cache = v2.cache()
    schedule = Scheduler().run([partial(v2.model, part, cache) for part in slices]).schedule
    sites = ["layer1.dispatch", "layer1.combine", "layer2.dispatch", "layer2.combine", ""]
    assert list(schedule.sites) == [site for site in sites for _ in range(2)]
    assert list(schedule.decisions) == [0, 1] * 5


def test_a_microbatch_without_tokens_takes_part_in_every_exchange(v2: Loaded) -> None:
    parts = [Part(0, 0, token_ids(7))]
    slices = [make_step(parts), make_step([])]
    cache = v2.cache()
    result = Scheduler(strict=True).run([partial(v2.model, part, cache) for part in slices])
    assert result.yields == (4, 4)
    assert result.outputs[1].shape == (0, 32)
    assert torch.equal(result.outputs[0], v2.model(slices[0], v2.cache()))


def test_each_receive_runs_before_its_owner_goes_on_and_outside_its_owner(v2: Loaded) -> None:
    runs: list[tuple[int, int | None]] = []

    class Watch:
        def recv_ran(self, owner, by):
            runs.append((owner.index, getattr(by, "index", by)))

    slices = slices_of(make_step([Part(0, 0, token_ids(8))]), 2)
    cache = v2.cache()
    Scheduler(instruments=[Watch()]).run([partial(v2.model, part, cache) for part in slices])
    assert len(runs) == 8  # two microbatches, two layers, dispatch and combine
    assert [owner for owner, _ in runs] == [0, 1] * 4
    # The sibling completes all but the last, which is left when the sibling has returned.
    assert all(by == 1 - owner for owner, by in runs[:-1])


def test_no_module_call_lies_between_entry_and_yield(v2: Loaded) -> None:
    depths: list[int] = []

    class Probe(Loopback):
        def dispatch_send(self, hidden, topk_ids, topk_weights):
            frame = sys._getframe()
            calls = 0
            while frame is not None and frame.f_code is not entry.__code__:
                calls += frame.f_code is nn.Module._call_impl.__code__
                frame = frame.f_back
            assert frame is not None
            depths.append(calls)
            return super().dispatch_send(hidden, topk_ids, topk_weights)

    model = load_model(v2.folder, Probe(8))

    def entry() -> Tensor:
        return model.forward(make_step([Part(0, 0, [1, 2])]), v2.cache())

    Scheduler().run([entry, entry])
    assert depths == [0] * 4


def test_an_error_in_one_microbatch_leaves_the_model_usable(v2: Loaded) -> None:
    class Failing(Loopback):
        sends = 0

        def dispatch_send(self, hidden, topk_ids, topk_weights):
            self.sends += 1
            if self.sends == 4:
                raise RuntimeError("link down")
            return super().dispatch_send(hidden, topk_ids, topk_weights)

    model = load_model(v2.folder, Failing(8))
    cache = v2.cache()
    slices = slices_of(make_step([Part(0, 0, token_ids(10))]), 2)
    entries = [partial(model, part, cache) for part in slices]
    with pytest.raises(MicrobatchFailed, match="link down") as raised:
        Scheduler().run(entries)
    assert (raised.value.index, raised.value.site) == (1, "layer1.combine")
    assert not dbo_enabled()
    again = torch.cat(Scheduler().run(entries).outputs)
    assert torch.equal(again, run_in_turn(v2, slices, v2.cache()))
