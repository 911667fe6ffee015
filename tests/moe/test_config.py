"""Reading config.json: the hub's own layout, what transformers writes, and what is refused."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from dbo_greenlet.errors import CheckpointError, ConfigurationError
from dbo_greenlet.moe.config import DeepseekV2Config, RopeConfig
from tests.moe.support import BASE, Loaded, rope

# The keys and values of DeepSeek-V2-Lite's config.json on the hub that decide what is computed.
V2_LITE = {
    "architectures": ["DeepseekV2ForCausalLM"],
    "attention_bias": False,
    "auto_map": {
        "AutoConfig": "configuration_deepseek.DeepseekV2Config",
        "AutoModelForCausalLM": "modeling_deepseek.DeepseekV2ForCausalLM",
    },
    "aux_loss_alpha": 0.001,
    "bos_token_id": 100000,
    "eos_token_id": 100001,
    "first_k_dense_replace": 1,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "intermediate_size": 10944,
    "kv_lora_rank": 512,
    "max_position_embeddings": 163840,
    "model_type": "deepseek_v2",
    "moe_intermediate_size": 1408,
    "moe_layer_freq": 1,
    "n_group": 1,
    "n_routed_experts": 64,
    "n_shared_experts": 2,
    "norm_topk_prob": False,
    "num_attention_heads": 16,
    "num_experts_per_tok": 6,
    "num_hidden_layers": 27,
    "q_lora_rank": None,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "rms_norm_eps": 1e-06,
    "rope_scaling": {
        "beta_fast": 32,
        "beta_slow": 1,
        "factor": 40,
        "mscale": 0.707,
        "mscale_all_dim": 0.707,
        "original_max_position_embeddings": 4096,
        "type": "yarn",
    },
    "rope_theta": 10000,
    "routed_scaling_factor": 1.0,
    "scoring_func": "softmax",
    "tie_word_embeddings": False,
    "topk_group": 1,
    "topk_method": "greedy",
    "torch_dtype": "bfloat16",
    "v_head_dim": 128,
    "vocab_size": 102400,
}


def read(folder: Path, keys: dict[str, object]) -> DeepseekV2Config:
    (folder / "config.json").write_text(json.dumps(keys))
    return DeepseekV2Config.from_folder(folder)


def test_the_hub_layout_of_v2_lite(tmp_path: Path) -> None:
    config = read(tmp_path, V2_LITE)
    names = DeepseekV2Config.__dataclass_fields__.keys() & V2_LITE.keys()
    assert len(names) > 20
    assert {name: getattr(config, name) for name in names} == {name: V2_LITE[name] for name in names}
    assert config.rope == RopeConfig("yarn", 10000, 40, 4096, 32, 1, 0.707, 0.707)
    assert (config.eos_token_ids, config.qk_head_dim, config.cache_dim) == ((100001,), 192, 576)
    assert [config.is_moe_layer(layer) for layer in range(3)] == [False, True, True]


def test_what_transformers_writes_reads_back(checkpoint: Callable[..., Loaded]) -> None:
    loaded = checkpoint(rope_parameters=rope("yarn", mscale=0.5, mscale_all_dim=0.7), eos_token_id=[2, 5])
    config = DeepseekV2Config.from_folder(loaded.folder)
    assert {name: getattr(config, name) for name in BASE} == BASE
    assert config.rope == RopeConfig("yarn", 100.0, 8.0, 16, 32, 1, 0.5, 0.7)
    assert config.eos_token_ids == (2, 5)


REFUSED = {
    "model_type": ({"model_type": "llama"}, "model_type is 'llama'"),
    "unknown model_type": ({"model_type": "deepseek_v99"}, "config.json"),
    "architectures": ({"architectures": ["DeepseekV2ForSequenceClassification"]}, "architectures"),
    "quantised": ({"quantization_config": {"quant_method": "fp8", "fmt": "e4m3"}}, "quantization_config"),
    "scoring": ({"scoring_func": "sigmoid"}, "scoring_func is 'sigmoid', supported is 'softmax'"),
    "routing": ({"topk_method": "noaux_tc"}, "'greedy' or 'group_limited_greedy'"),
    "activation": ({"hidden_act": "gelu"}, "hidden_act"),
    "rope kind": ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "rope_type is 'dynamic'"),
    "rope factor": ({"rope_scaling": {"type": "yarn", "original_max_position_embeddings": 64}}, "factor"),
    "partial rotary": ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
    "odd rope": ({"qk_rope_head_dim": 63}, "qk_rope_head_dim is 63"),
    "no choice": ({"num_experts_per_tok": None}, "num_experts_per_tok is None, supported is an integer >= 1"),
    "too many": ({"num_experts_per_tok": 65}, "num_experts_per_tok is 65, supported is an integer >= 1 and <= 64"),
    "no groups": ({"topk_method": "group_limited_greedy", "n_group": None}, "n_group is None"),
    "groups": ({"topk_method": "group_limited_greedy", "n_group": 7}, "n_group is 7, supported is a divisor"),
    "topk_group": ({"topk_method": "group_limited_greedy", "n_group": 4, "topk_group": 5}, "topk_group is 5"),
    "moe_layer_freq": ({"moe_layer_freq": [0, 1]}, r"moe_layer_freq is \[0, 1\]"),
    "heads": ({"num_attention_heads": 17}, "config.json"),
    "type": ({"hidden_size": "wide"}, "config.json"),
}


@pytest.mark.parametrize(("keys", "message"), REFUSED.values(), ids=REFUSED.keys())
def test_what_cannot_be_served_is_refused_by_name(tmp_path: Path, keys: dict[str, object], message: str) -> None:
    with pytest.raises(CheckpointError, match=message) as raised:
        read(tmp_path, {**V2_LITE, **keys})
    assert "config.json" in str(raised.value)


@pytest.mark.parametrize("text", ["", "{", "[]", '"deepseek_v2"', "{}", "\x00\xff"])
def test_an_unreadable_file_is_named(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(CheckpointError, match=r"config\.json"):
        DeepseekV2Config.from_folder(tmp_path)


def test_a_missing_file_or_folder_is_named(tmp_path: Path) -> None:
    for folder in (tmp_path, tmp_path / "absent", "absent/model"):
        with pytest.raises(CheckpointError, match=r"config\.json does not exist; give the folder"):
            DeepseekV2Config.from_folder(folder)


def test_without_transformers_the_remedy_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ConfigurationError, match=r"pip install .*run"):
        read(tmp_path, V2_LITE)
