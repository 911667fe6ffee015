"""A Mixtral of two layers with random weights and a tokenizer of as many words as it has tokens, as vLLM loads it."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

HIDDEN, VOCABULARY, LAYERS, EXPERTS, HEADS, KV_HEADS, HEAD_SIZE = 64, 128, 2, 4, 2, 2, 32

CONFIG = {
    "architectures": ["MixtralForCausalLM"],
    "model_type": "mixtral",
    "hidden_size": HIDDEN,
    "intermediate_size": HIDDEN,
    "vocab_size": VOCABULARY,
    "num_hidden_layers": LAYERS,
    "num_local_experts": EXPERTS,
    "num_experts_per_tok": 2,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": HEAD_SIZE,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "sliding_window": None,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def write(folder: Path, seed: int = 0) -> None:
    """config.json, model.safetensors, tokenizer.json and tokenizer_config.json in the folder, made if need be."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(CONFIG))
    save_file(_weights(seed), folder / "model.safetensors", metadata={"format": "pt"})
    words = {f"w{i}": i for i in range(VOCABULARY)}
    tokenizer = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [],
        "normalizer": None,
        "pre_tokenizer": {"type": "WhitespaceSplit"},
        "post_processor": None,
        "decoder": None,
        "model": {"type": "WordLevel", "vocab": words, "unk_token": "w0"},
    }
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    names = {"unk_token": "w0", "bos_token": "w1", "eos_token": "w2"}
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", **names}))


def _weights(seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)

    def matrix(rows: int, columns: int) -> torch.Tensor:
        # Large enough that the next token depends on the whole prompt and not on the last word alone.
        return (torch.randn(rows, columns, generator=generator) * 0.2).bfloat16()

    ones = torch.ones(HIDDEN, dtype=torch.bfloat16)
    weights = {
        "model.embed_tokens.weight": matrix(VOCABULARY, HIDDEN),
        "model.norm.weight": ones.clone(),
        "lm_head.weight": matrix(VOCABULARY, HIDDEN),
    }
    for layer in range(LAYERS):
        name = f"model.layers.{layer}"
        weights[f"{name}.input_layernorm.weight"] = ones.clone()
        weights[f"{name}.post_attention_layernorm.weight"] = ones.clone()
        for part, heads in (("q", HEADS), ("k", KV_HEADS), ("v", KV_HEADS)):
            weights[f"{name}.self_attn.{part}_proj.weight"] = matrix(heads * HEAD_SIZE, HIDDEN)
        weights[f"{name}.self_attn.o_proj.weight"] = matrix(HIDDEN, HEADS * HEAD_SIZE)
        weights[f"{name}.block_sparse_moe.gate.weight"] = matrix(EXPERTS, HIDDEN)
        for expert in range(EXPERTS):
            for part in ("w1", "w2", "w3"):
                weights[f"{name}.block_sparse_moe.experts.{expert}.{part}.weight"] = matrix(HIDDEN, HIDDEN)
    return weights
