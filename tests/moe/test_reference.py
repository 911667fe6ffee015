"""Logits against transformers' DeepseekV2ForCausalLM: every variant of the architecture, with and without a cache."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from transformers import DeepseekV2ForCausalLM
from transformers.models.deepseek_v2.modeling_deepseek_v2 import DeepseekV2MLP

import dbo_greenlet
from dbo_greenlet.all2all.loopback import Loopback
from dbo_greenlet.moe import KVCache, Tokenizer, load_model
from tests.moe.support import (
    Loaded,
    Part,
    assert_close,
    make_reference,
    make_step,
    randomise,
    reference_logits,
    rope,
    token_ids,
)

VARIANTS = {
    "plain rope, query latent, greedy": {},
    "queries in one piece": {"q_lora_rank": None},
    "linear rope": {"rope_parameters": rope("linear")},
    "yarn, equal mscale": {"rope_parameters": rope("yarn", mscale=0.707, mscale_all_dim=0.707)},
    "yarn, mscale unlike mscale_all_dim": {"rope_parameters": rope("yarn", mscale=1.0, mscale_all_dim=0.5)},
    "yarn without mscale": {"rope_parameters": rope("yarn")},
    "yarn, attention_factor": {"rope_parameters": rope("yarn", attention_factor=0.8)},
    "yarn, ramp not truncated": {"rope_parameters": rope("yarn", truncate=False, beta_fast=4)},
    "group limited": {"topk_method": "group_limited_greedy", "n_group": 4, "topk_group": 2},
    "one expert per token": {"num_experts_per_tok": 1},
    "all experts": {"num_experts_per_tok": 8},
    "routed scaling": {"routed_scaling_factor": 2.5},
    "attention bias": {"attention_bias": True},
    "bias of dense layers and shared experts": {"mlp_bias": True},
    "no shared experts": {"n_shared_experts": 0},
    "every layer routes": {"first_k_dense_replace": 0},
    "no layer routes": {"first_k_dense_replace": 3},
    "tied embeddings": {"tie_word_embeddings": True},
    "other head and latent sizes": {"qk_nope_head_dim": 10, "kv_lora_rank": 20, "v_head_dim": 9},
    "large epsilon": {"rms_norm_eps": 0.3},
}


@pytest.mark.parametrize("overrides", VARIANTS.values(), ids=VARIANTS.keys())
def test_a_prefill_equals_the_reference(checkpoint: Callable[..., Loaded], overrides: dict[str, object]) -> None:
    loaded = checkpoint(**overrides)
    ids = token_ids(40)
    assert_close(loaded.full_logits(ids), reference_logits(loaded.reference, ids))


def test_variants_are_told_apart(checkpoint: Callable[..., Loaded]) -> None:
    # The variants above would prove nothing if the option they turn did not show in the reference's logits. Left out
    # is what changes the shape of the weights, and so everything.
    ids = token_ids(40)
    plain = reference_logits(checkpoint().reference, ids)
    told = [name for name in VARIANTS if "rope" in name or "yarn" in name or "group" in name or "epsilon" in name]
    for name in told[1:]:
        other = reference_logits(checkpoint(**VARIANTS[name]).reference, ids)
        assert (plain - other).abs().max() > 0.01, name


def test_decoding_token_by_token_equals_the_full_forward(v2: Loaded) -> None:
    ids = token_ids(30)
    expected = reference_logits(v2.reference, ids)
    cache = v2.cache()
    rows = [v2.logits(make_step([Part(2, 0, ids[:11])]), cache)]
    rows += [v2.logits(make_step([Part(2, past, [ids[past]])]), cache) for past in range(11, 30)]
    assert_close(torch.cat(rows), expected)


def test_chunked_prefill_equals_the_full_forward(v2: Loaded) -> None:
    ids = token_ids(50)
    cache = v2.cache()
    bounds = [0, 7, 8, 31, 50]
    rows = [v2.logits(make_step([Part(0, begin, ids[begin:end])]), cache) for begin, end in pairwise(bounds)]
    assert_close(torch.cat(rows), reference_logits(v2.reference, ids))


def test_prefill_chunks_and_decodes_in_one_batch(v2: Loaded) -> None:
    sequences = [token_ids(count, seed) for seed, count in enumerate((20, 33, 5, 12))]
    cache = v2.cache()
    # What each request has computed before the mixed step: nothing, a chunk, all but the last token, all but one.
    v2.logits(make_step([Part(1, 0, sequences[1][:16]), Part(2, 0, sequences[2][:4])]), cache)
    v2.logits(make_step([Part(3, 0, sequences[3][:11])]), cache)
    mixed = make_step(
        [
            Part(2, 4, sequences[2][4:]),
            Part(0, 0, sequences[0]),
            Part(3, 11, sequences[3][11:]),
            Part(1, 16, sequences[1][16:]),
        ]
    )
    expected = [reference_logits(v2.reference, ids) for ids in sequences]
    wanted = torch.cat([expected[2][4:], expected[0], expected[3][11:], expected[1][16:]])
    assert_close(v2.logits(mixed, cache), wanted)


def test_the_shipped_checkpoint_equals_the_reference() -> None:
    folder = Path(dbo_greenlet.__file__).parent / "assets" / "checkpoint"
    reference = DeepseekV2ForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    text = "trained weights are not random ones"
    ids = Tokenizer.from_folder(folder).encode(text)
    assert len(ids) > 8
    assert_close(Loaded(folder, reference).full_logits(ids), reference_logits(reference, ids), 1e-3)


def test_embeddings_in_place_of_ids(v2: Loaded) -> None:
    ids = token_ids(9)
    step = make_step([Part(0, 0, ids)])
    embedded = v2.reference.model.embed_tokens.weight.detach()[step.input_ids]
    from_embeddings = type(step)(**{**step.__dict__, "input_ids": None, "inputs_embeds": embedded})
    assert torch.equal(v2.logits(from_embeddings, v2.cache()), v2.logits(step, v2.cache()))


def test_bfloat16_stays_near_float32(v2: Loaded) -> None:
    model = load_model(v2.folder, Loopback(8), torch.bfloat16)
    ids = token_ids(24)
    cache = KVCache(model.config, 2, 64, torch.bfloat16)
    ours = model.logits(model(make_step([Part(1, 0, ids)]), cache))
    assert ours.dtype == torch.bfloat16
    expected = reference_logits(v2.reference, ids)
    # Routing flips for single tokens in bfloat16, so most must be near, not all.
    near = ((ours.float() - expected).abs().amax(dim=-1) < 0.25).float().mean()
    assert near > 0.7


def test_normalised_weights_differ_from_transformers_which_ignores_the_setting(
    checkpoint: Callable[..., Loaded],
) -> None:
    setting = {"norm_topk_prob": True, "routed_scaling_factor": 2.0}
    loaded = checkpoint(**setting)
    ids = token_ids(20)
    ignoring = reference_logits(loaded.reference, ids)
    assert torch.equal(ignoring, reference_logits(checkpoint(routed_scaling_factor=2.0).reference, ids))
    # The reference with what it leaves out put in: the routed weights divided by their sum before the scaling.
    corrected = make_reference(**setting)
    for layer in corrected.model.layers[1:]:
        layer.mlp.gate.register_forward_hook(lambda _, __, out: (out[0], 2.0 * out[1] / out[1].sum(-1, True), out[2]))
    expected = reference_logits(corrected, ids)
    assert (expected - ignoring).abs().max() > 0.01
    assert_close(loaded.full_logits(ids), expected)


def test_moe_layer_freq_which_transformers_ignores(tmp_path: Path) -> None:
    # DeepSeek's code: layer l routes if l >= first_k_dense_replace and l % moe_layer_freq == 0. transformers makes
    # layers 1 and 3 of this model MoE layers too; here they get what the published code gives them.
    reference = make_reference(num_hidden_layers=4, first_k_dense_replace=0, moe_layer_freq=2)
    for layer in (1, 3):
        reference.model.layers[layer].mlp = DeepseekV2MLP(reference.config)
    randomise(reference)
    reference.save_pretrained(tmp_path)
    ids = token_ids(15)
    assert_close(Loaded(tmp_path, reference).full_logits(ids), reference_logits(reference, ids))
