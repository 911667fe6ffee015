"""The shape of a model, as far as its times depend on it: presets, a Hugging Face config.json, or a TOML file."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from ..errors import ConfigurationError

__all__ = ["PRESETS", "ModelShape", "read_model", "toml_of"]


@dataclass(frozen=True)
class ModelShape:
    """A Mixture-of-Experts model. Sizes are in elements.

    Attributes:
        layers: all of them; `dense_layers` of these have no experts, and come first.
        hidden: the residual stream.
        experts, top_k, inner: routed experts of a layer, how many a token takes, and their inner size.
        shared_inner: inner size of all shared experts together; 0: none.
        dense_inner: of the dense layers.
        heads: of queries.
        kv_heads, head_dim: of grouped-query attention; `kv_heads` 0: multi-head latent attention.
        q_rank, kv_rank, rope_dim, nope_dim, value_dim: of latent attention; `q_rank` 0 where queries are projected at
            once.
        weight_bytes: bytes of a weight; 2 for bfloat16, 1 for fp8.
        cache_bytes: bytes of an element of the KV cache.
    """

    name: str
    layers: int
    hidden: int
    experts: int
    top_k: int
    inner: int
    heads: int
    dense_layers: int = 0
    shared_inner: int = 0
    dense_inner: int = 0
    kv_heads: int = 0
    head_dim: int = 128
    q_rank: int = 0
    kv_rank: int = 512
    rope_dim: int = 64
    nope_dim: int = 128
    value_dim: int = 128
    weight_bytes: float = 2
    cache_bytes: float = 2

    def __post_init__(self) -> None:
        least = {"hidden": 1, "experts": 1, "top_k": 1, "inner": 1, "heads": 1, "layers": 1}
        for each in fields(self):
            value = getattr(self, each.name)
            if each.name == "name":
                if not isinstance(value, str):
                    raise ConfigurationError(f"a model's name is {value!r}; use a text")
                continue
            if each.name in ("weight_bytes", "cache_bytes"):
                if type(value) not in (int, float) or not 0 < value <= 8:
                    raise ConfigurationError(f"{self.name}: {each.name}={value!r}; use a number above 0, up to 8")
            elif type(value) is not int or not least.get(each.name, 0) <= value < 1e9:
                raise ConfigurationError(
                    f"{self.name}: {each.name}={value!r}; use a whole number from {least.get(each.name, 0)}"
                )
        if self.top_k > self.experts or self.dense_layers >= self.layers:
            raise ConfigurationError(
                f"{self.name}: {self.top_k} of {self.experts} experts a token, {self.dense_layers} of {self.layers} "
                "layers dense; a token takes at most all experts, and a layer at least has some"
            )

    @property
    def moe_layers(self) -> int:
        return self.layers - self.dense_layers

    @property
    def attention_weights(self) -> int:
        """Elements of one layer's projections."""
        if self.kv_heads:
            return self.hidden * self.head_dim * (2 * self.heads + 2 * self.kv_heads)
        queries = self.heads * (self.nope_dim + self.rope_dim)
        query = self.hidden * self.q_rank + self.q_rank * queries if self.q_rank else self.hidden * queries
        keys = self.hidden * (self.kv_rank + self.rope_dim) + self.kv_rank * self.heads * (
            self.nope_dim + self.value_dim
        )
        return query + keys + self.heads * self.value_dim * self.hidden

    def with_layers(self, layers: int) -> ModelShape:
        return replace(self, layers=layers)


PRESETS = {
    shape.name: shape
    for shape in (
        # Sizes: the config.json that each model is published with.
        ModelShape(
            "deepseek-v2-lite", 27, 2048, 64, 6, 1408, 16,
            dense_layers=1, shared_inner=2816, dense_inner=10944,
        ),
        ModelShape(
            "deepseek-v3", 61, 7168, 256, 8, 2048, 128,
            dense_layers=3, shared_inner=2048, dense_inner=18432, q_rank=1536, weight_bytes=1,
        ),
        ModelShape("qwen3-30b-a3b", 48, 2048, 128, 8, 768, 32, kv_heads=4),
        ModelShape("qwen3-235b-a22b", 94, 4096, 128, 8, 1536, 64, kv_heads=4),
    )
}  # fmt: skip
PRESETS["qwen3-moe"] = PRESETS["qwen3-30b-a3b"]


def read_model(text: str) -> ModelShape:
    """A preset by its name, a config.json of Hugging Face (the file or its folder), or a TOML file of these fields.

    Raises:
        ConfigurationError: no such preset or file, no model with experts in it, or a key that is none.
    """
    if text in PRESETS:
        return PRESETS[text]
    path = Path(text)
    if path.is_dir():
        path = path / "config.json"
    if not path.is_file():
        raise ConfigurationError(f"no model {text!r}; use a file (config.json, TOML) or one of {', '.join(PRESETS)}")
    try:
        if path.suffix == ".toml":
            return _of_toml(path)
        return _of_config(json.loads(path.read_text("utf-8")), str(path))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigurationError(f"{path} describes no model with experts: {type(error).__name__}: {error}") from error


def toml_of(path: Path) -> dict[str, Any]:
    """Raises `OSError`, and `ValueError` where it is no TOML."""
    if sys.version_info >= (3, 11):
        import tomllib
    else:
        import tomli as tomllib

    return tomllib.loads(path.read_text("utf-8"))  # type: ignore[no-any-return, unused-ignore]


def _of_toml(path: Path) -> ModelShape:
    table = toml_of(path)
    base = PRESETS[table.pop("like")] if "like" in table else None
    unknown = set(table) - {each.name for each in fields(ModelShape)}
    if unknown:
        raise ConfigurationError(f"{path}: unknown keys {', '.join(sorted(unknown))}")
    table.setdefault("name", path.stem)
    return replace(base, **table) if base is not None else ModelShape(**table)


def _of_config(config: Mapping[str, Any], path: str) -> ModelShape:
    """DeepSeek's, Qwen's and Mixtral's names for the same things."""

    def first(*names: str, default: Any = None) -> Any:
        for name in names:
            if config.get(name) is not None:
                return config[name]
        if default is None:
            raise KeyError(f"none of {', '.join(names)} in it")
        return default

    inner = first("moe_intermediate_size", "intermediate_size")
    common = {
        "name": config.get("_name_or_path") or config.get("model_type") or Path(path).stem,
        "layers": first("num_hidden_layers"),
        "hidden": first("hidden_size"),
        "experts": first("n_routed_experts", "num_local_experts", "num_experts"),
        "top_k": first("num_experts_per_tok"),
        "inner": inner,
        "heads": first("num_attention_heads"),
        "dense_layers": first("first_k_dense_replace", default=0),
        "shared_inner": first("shared_expert_intermediate_size", default=0)
        or first("n_shared_experts", default=0) * inner,
        "dense_inner": first("intermediate_size", default=0),
        "weight_bytes": 1 if "fp8" in json.dumps(config.get("quantization_config") or {}) else 2,
    }
    if config.get("kv_lora_rank"):
        return ModelShape(
            **common,
            q_rank=config.get("q_lora_rank") or 0,
            kv_rank=config["kv_lora_rank"],
            rope_dim=first("qk_rope_head_dim"),
            nope_dim=first("qk_nope_head_dim"),
            value_dim=first("v_head_dim"),
        )
    return ModelShape(
        **common,
        kv_heads=first("num_key_value_heads", "num_attention_heads"),
        head_dim=config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"],
    )
