"""Flattened batches: padding, requests and microbatches without tokens, chunks of a prefill, shapes for graphs."""

from __future__ import annotations

import pytest
import torch

from dbo_greenlet.all2all.loopback import Loopback
from dbo_greenlet.batching.inputs import idle_step
from dbo_greenlet.errors import ConfigurationError
from dbo_greenlet.moe import KVCache, load_model, step_plan
from tests.moe.support import MAX_LEN, Loaded, Part, assert_close, make_step, token_ids

PARTS = [Part(0, 0, token_ids(9, 1)), Part(3, 0, token_ids(1, 2)), Part(1, 0, token_ids(5, 3))]


def filled(cache: KVCache) -> torch.Tensor:
    """Which slots of any layer were written, bool [rows, max_len]."""
    return torch.stack([cache.entries(layer).ne(0).any(dim=-1) for layer in range(3)]).any(dim=0)


def test_padding_changes_no_token_and_writes_no_slot(v2: Loaded) -> None:
    plain_cache, padded_cache = v2.cache(), v2.cache()
    plain = v2.logits(make_step(PARTS), plain_cache)
    padded = v2.logits(make_step(PARTS, padding=6), padded_cache)
    assert padded.shape[0] == 21
    assert torch.isfinite(padded).all()
    assert_close(padded[:15], plain, 1e-5)
    wanted = torch.zeros(4, MAX_LEN, dtype=torch.bool)
    for part in PARTS:
        wanted[part.row, : len(part.ids)] = True
    assert torch.equal(filled(padded_cache), wanted)
    assert torch.equal(filled(plain_cache), wanted)


def test_padding_is_sent_to_no_expert(v2: Loaded) -> None:
    sent: list[torch.Tensor] = []

    class Watched(Loopback):
        def dispatch_send(self, hidden, topk_ids, topk_weights):
            sent.append(topk_ids)
            return super().dispatch_send(hidden, topk_ids, topk_weights)

    model = load_model(v2.folder, Watched(8))
    model(make_step(PARTS, padding=2), v2.cache())
    assert len(sent) == 2  # the model has two MoE layers
    for ids in sent:
        assert (ids[15:] == -1).all()
        assert (ids[:15] >= 0).all()


def test_padding_inside_a_request_is_finite_and_unwritten(v2: Loaded) -> None:
    step = make_step([Part(0, 0, token_ids(6))])
    step.slot_mapping[4:] = -1
    step.positions[4:] = 0
    cache = v2.cache()
    logits = v2.logits(step, cache)
    assert torch.isfinite(logits).all()
    assert filled(cache).sum() == 4
    assert_close(logits[:4], v2.logits(make_step([Part(0, 0, token_ids(6)[:4])]), v2.cache()), 1e-5)


def test_a_request_without_query_tokens(v2: Loaded) -> None:
    cache = v2.cache()
    v2.logits(make_step([Part(2, 0, token_ids(7))]), cache)
    before = cache.entries(1)[2].clone()
    idle = Part(2, 7, [])
    for position in range(len(PARTS) + 1):
        with_idle = make_step([*PARTS[:position], idle, *PARTS[position:]])
        assert_close(v2.logits(with_idle, cache), v2.logits(make_step(PARTS), v2.cache()), 1e-5)
    decodes = [Part(0, 9, [5]), idle, Part(1, 5, [6])]
    together = v2.logits(make_step(decodes), cache)
    for row, decode in enumerate((decodes[0], decodes[2])):
        assert_close(together[row : row + 1], v2.logits(make_step([decode]), cache), 1e-5)
    assert torch.equal(cache.entries(1)[2], before)


@pytest.mark.parametrize("padding", [0, 3])
def test_a_step_without_tokens(v2: Loaded, padding: int) -> None:
    step = make_step([Part(0, 4, []), Part(1, 2, [])], padding=padding)
    cache = v2.cache()
    assert v2.logits(step, cache).shape == (padding, 64)
    assert not filled(cache).any()
    assert v2.model(idle_step(), cache).shape == (0, 32)


def test_many_decodes_equal_each_alone(v2: Loaded) -> None:
    prompts = [token_ids(3 + 2 * row, row) for row in range(16)]
    cache = v2.cache(rows=16)
    v2.logits(make_step([Part(row, 0, ids) for row, ids in enumerate(prompts)]), cache)
    order = torch.randperm(16, generator=torch.Generator().manual_seed(1)).tolist()
    decodes = [Part(row, len(prompts[row]), [row]) for row in order]
    together = v2.logits(make_step(decodes), cache)
    alone = torch.cat([v2.logits(make_step([decode]), cache) for decode in decodes])
    assert_close(together, alone)


@pytest.mark.parametrize("scores", [1, 4 * 40 * 3, 4 * 40 * 7 + 1])
def test_a_prefill_in_chunks(v2: Loaded, monkeypatch: pytest.MonkeyPatch, scores: int) -> None:
    # 4 heads, 40 positions: 1, 3 and 7 query tokens at a time.
    ids = token_ids(40)
    whole = v2.full_logits(ids)
    monkeypatch.setattr(step_plan, "MAX_SCORES", scores)
    assert_close(v2.full_logits(ids), whole, 1e-5)
    cache = v2.cache()
    first = v2.logits(make_step([Part(0, 0, ids[:13])]), cache)
    second = v2.logits(make_step([Part(0, 13, ids[13:])]), cache)
    assert_close(torch.cat((first, second)), whole, 1e-5)


def test_static_shapes_read_the_whole_row_and_give_the_same(v2: Loaded) -> None:
    logits = []
    for static in (False, True):
        cache = v2.cache(static_shapes=static)
        v2.logits(make_step(PARTS), cache)
        decode = make_step([Part(0, 9, [1]), Part(3, 1, [2])])
        plan = step_plan.plan_step(decode, cache, 4, torch.float32)
        assert plan.decode is not None and plan.decode.context == (MAX_LEN if static else 10)
        logits.append(v2.logits(decode, cache))
    assert_close(logits[0], logits[1], 1e-5)


def test_padding_requests_of_a_graph_batch(v2: Loaded) -> None:
    cache = v2.cache()
    v2.logits(make_step(PARTS), cache)
    decodes = [Part(0, 9, [1]), Part(3, 1, [2])]
    padded = make_step(decodes, padding=2, request_padding=2)
    plan = step_plan.plan_step(padded, cache, 4, torch.float32)
    # Shapes as for four decoding requests, whatever is real.
    assert plan.decode is not None and plan.decode.tokens is None and plan.decode.rows.tolist() == [0, 3, 0, 0]
    written = filled(cache)
    logits = v2.logits(padded, cache)
    assert torch.isfinite(logits).all()
    assert_close(logits[:2], v2.logits(make_step(decodes), cache), 1e-5)
    written[0, 9] = written[3, 1] = True
    assert torch.equal(filled(cache), written)


def test_decodes_padded_by_tokens_only(v2: Loaded) -> None:
    cache = v2.cache()
    v2.logits(make_step(PARTS), cache)
    decodes = [Part(0, 9, [1]), Part(3, 1, [2])]
    logits = v2.logits(make_step(decodes, padding=3), cache)
    assert logits.shape[0] == 5 and torch.isfinite(logits).all()
    assert_close(logits[:2], v2.logits(make_step(decodes), cache), 1e-5)


def test_one_padding_request_for_one_idle_request_is_no_graph_batch(v2: Loaded) -> None:
    # As many tokens as requests, but token 1 belongs to request 2.
    cache = v2.cache()
    v2.logits(make_step(PARTS), cache)
    parts = [Part(0, 9, [1]), Part(1, 5, []), Part(3, 1, [2])]
    step = make_step(parts, padding=1)
    assert step.num_requests == step.num_padded_tokens
    logits = v2.logits(step, cache)
    assert_close(logits[:2], v2.logits(make_step([parts[0], parts[2]]), cache), 1e-5)


def test_a_context_longer_than_the_cache_is_refused(v2: Loaded) -> None:
    cache = KVCache(v2.model.config, 2, 8)
    step = make_step([Part(0, 0, token_ids(3)), Part(0, 7, token_ids(2))])
    with pytest.raises(ConfigurationError, match=r"request 1 .* context of 9 tokens.* holds 8"):
        v2.model(step, cache)


def test_what_the_model_cannot_read_is_refused(v2: Loaded) -> None:
    step = make_step([Part(0, 0, token_ids(3))])
    fields = step.__dict__
    with pytest.raises(ConfigurationError, match="input_ids"):
        v2.model(type(step)(**{**fields, "input_ids": None}), v2.cache())
    with pytest.raises(ConfigurationError, match="one position per token"):
        v2.model(type(step)(**{**fields, "positions": step.positions.expand(3, -1)}), v2.cache())


def test_cache_views_and_limits(v2: Loaded) -> None:
    config = v2.model.config
    cache = v2.cache()
    assert cache.latent(2).shape == (4, MAX_LEN, 16)
    assert cache.rope_key(2).shape == (4, MAX_LEN, 4)
    cache.write(2, cache.write_slots(torch.tensor([MAX_LEN + 3, -1])), torch.ones(2, 16), torch.full((2, 4), 2.0))
    assert cache.latent(2)[1, 3].tolist() == [1.0] * 16 and cache.rope_key(2)[1, 3].tolist() == [2.0] * 4
    assert cache.entries(2).count_nonzero() == 20
    cache.clear()
    assert cache.entries(2).count_nonzero() == 0
    with pytest.raises(ConfigurationError, match="at least 1"):
        KVCache(config, 0, 8)
    with pytest.raises(ConfigurationError, match="max_position_embeddings"):
        KVCache(config, 1, 129)


def test_a_cache_made_in_inference_mode_serves_outside_it(v2: Loaded) -> None:
    with torch.inference_mode():
        cache = v2.cache()
    v2.logits(make_step(PARTS), cache)
    assert filled(cache).any()
