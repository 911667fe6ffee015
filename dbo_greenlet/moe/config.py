"""The numbers that describe one DeepSeek-V2 model, read from a Hugging Face folder and checked once.

The rest of `moe/` reads a frozen dataclass instead of transformers' configuration object. That object accepts any
attribute, fills what is missing with the defaults of the 236B model, and changes its layout between releases
(`rope_scaling` became `rope_parameters`); all of that is dealt with here and nowhere else.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from dbo_greenlet.errors import CheckpointError, ConfigurationError

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

__all__ = ["DeepseekV2Config", "RopeConfig"]

_ARCHITECTURE = "DeepseekV2ForCausalLM"
_ROPE_TYPES = ("default", "linear", "yarn")
_TOPK_METHODS = ("greedy", "group_limited_greedy")


@dataclass(frozen=True)
class RopeConfig:
    """Rotary position embedding: `kind` is "default", "linear" or "yarn"; the other fields count only where used.

    `factor` is the context extension (unitless), `original_max_position_embeddings` the context in tokens before it,
    `beta_fast` and `beta_slow` rotations over that context (YaRN, arXiv 2309.00071, section 3.2), `mscale` and
    `mscale_all_dim` the weights of DeepSeek's attention temperature, `attention_factor` an explicit replacement for
    the factor on cos and sin that would follow from them.
    """

    kind: str = "default"
    theta: float = 10000.0
    factor: float = 1.0
    original_max_position_embeddings: int = 4096
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float = 1.0
    mscale_all_dim: float = 0.0
    attention_factor: float | None = None
    truncate: bool = True


@dataclass(frozen=True)
class DeepseekV2Config:
    """One DeepSeek-V2 model. Names and units are those of its config.json (sizes in elements, ranks in dimensions).

    `eos_token_ids` holds every id that ends an answer; `n_shared_experts` is 0 where the model has none;
    `q_lora_rank` is None where queries are projected in one piece.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    moe_intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    q_lora_rank: int | None
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    n_routed_experts: int
    n_shared_experts: int
    num_experts_per_tok: int
    first_k_dense_replace: int
    moe_layer_freq: int
    topk_method: str
    n_group: int
    topk_group: int
    norm_topk_prob: bool
    routed_scaling_factor: float
    rms_norm_eps: float
    attention_bias: bool
    mlp_bias: bool
    tie_word_embeddings: bool
    max_position_embeddings: int
    rope: RopeConfig
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]

    @property
    def qk_head_dim(self) -> int:
        """Width of one head's query: the part without and the part with rotary position."""
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    @property
    def cache_dim(self) -> int:
        """What the KV cache holds per token and layer: compressed latent and rotated key, in elements."""
        return self.kv_lora_rank + self.qk_rope_head_dim

    def is_moe_layer(self, layer: int) -> bool:
        """Whether decoder layer `layer` (0-based) routes to experts, by the rule of DeepSeek's published code.

        transformers 5.17 looks at `first_k_dense_replace` only; the two differ where `moe_layer_freq` is not 1.
        """
        return layer >= self.first_k_dense_replace and layer % self.moe_layer_freq == 0

    @classmethod
    def from_folder(cls, folder: str | Path) -> DeepseekV2Config:
        """Read `folder`/config.json through transformers.

        Raises `CheckpointError` if the file is missing, unreadable or describes a model that this package cannot run;
        the message names the file, the key and what to do. Raises `ConfigurationError` without transformers.
        """
        path = Path(folder) / "config.json"
        # Checked here because AutoConfig takes a folder that is not there for the name of a model to download.
        if not path.is_file():
            raise CheckpointError(
                f"{path} does not exist; give the folder of a Hugging Face checkpoint "
                "(config.json, safetensors files, tokenizer.json)"
            )
        # Imported late: it takes seconds, and a caller that builds its own configuration does not need it.
        try:
            from huggingface_hub.errors import StrictDataclassError
            from transformers import AutoConfig
        except ImportError as error:
            raise ConfigurationError(
                f"reading {path} needs transformers 5, which cannot be imported ({error}); "
                'install it with: pip install "dbo-greenlet[run]"'
            ) from error

        try:
            # Remote code is refused, not asked about: a folder must not run code by being opened.
            loaded = AutoConfig.from_pretrained(path.parent, trust_remote_code=False, local_files_only=True)
        except (OSError, ValueError, KeyError, TypeError, AttributeError, StrictDataclassError) as error:
            raise CheckpointError(f"{path} cannot be read as a model configuration: {error}") from error
        return cls.from_transformers(loaded, path)

    @classmethod
    def from_transformers(cls, source: PreTrainedConfig, path: str | Path = "config.json") -> DeepseekV2Config:
        """Take over and check a transformers configuration; `path` is what error messages call it.

        Raises `CheckpointError` naming the key that cannot be served.
        """
        read = _Reader(source, Path(path))
        read.check_supported()
        n_routed_experts = read.integer("n_routed_experts")
        grouped = source.topk_method == "group_limited_greedy"
        config = cls(
            vocab_size=read.integer("vocab_size"),
            hidden_size=read.integer("hidden_size"),
            intermediate_size=read.integer("intermediate_size"),
            moe_intermediate_size=read.integer("moe_intermediate_size"),
            num_hidden_layers=read.integer("num_hidden_layers"),
            num_attention_heads=read.integer("num_attention_heads"),
            q_lora_rank=read.integer("q_lora_rank") if source.q_lora_rank is not None else None,
            kv_lora_rank=read.integer("kv_lora_rank"),
            qk_nope_head_dim=read.integer("qk_nope_head_dim"),
            qk_rope_head_dim=read.integer("qk_rope_head_dim"),
            v_head_dim=read.integer("v_head_dim"),
            n_routed_experts=n_routed_experts,
            n_shared_experts=source.n_shared_experts or 0,
            num_experts_per_tok=read.integer("num_experts_per_tok", highest=n_routed_experts),
            first_k_dense_replace=read.integer("first_k_dense_replace", lowest=0),
            moe_layer_freq=read.integer("moe_layer_freq", default=1),
            topk_method=source.topk_method,
            n_group=read.integer("n_group", highest=n_routed_experts) if grouped else 1,
            topk_group=read.integer("topk_group", highest=source.n_group) if grouped else 1,
            norm_topk_prob=bool(source.norm_topk_prob),
            routed_scaling_factor=float(source.routed_scaling_factor),
            rms_norm_eps=float(source.rms_norm_eps),
            attention_bias=bool(source.attention_bias),
            mlp_bias=bool(getattr(source, "mlp_bias", False)),
            tie_word_embeddings=bool(source.tie_word_embeddings),
            max_position_embeddings=read.integer("max_position_embeddings"),
            rope=read.rope(),
            bos_token_id=source.bos_token_id,
            eos_token_ids=_as_ids(source.eos_token_id),
        )
        if n_routed_experts % config.n_group:
            read.refuse("n_group", config.n_group, f"a divisor of n_routed_experts ({n_routed_experts})")
        if config.qk_rope_head_dim % 2:
            read.refuse("qk_rope_head_dim", config.qk_rope_head_dim, "an even number: rotary pairs")
        return config


def _as_ids(value: int | list[int] | None) -> tuple[int, ...]:
    if value is None:
        return ()
    return tuple(value) if isinstance(value, list) else (value,)


class _Reader:
    """Reads keys of a transformers configuration and refuses, naming file and key, what cannot be served."""

    def __init__(self, source: PreTrainedConfig, path: Path) -> None:
        self._source = source
        self._path = path

    def refuse(self, key: str, value: object, supported: str) -> NoReturn:
        raise CheckpointError(f"{self._path}: {key} is {value!r}, supported is {supported}")

    def integer(self, key: str, *, lowest: int = 1, highest: int | None = None, default: int | None = None) -> int:
        value = getattr(self._source, key, default)
        too_high = highest is not None and isinstance(value, int) and value > highest
        if not isinstance(value, int) or isinstance(value, bool) or value < lowest or too_high:
            limit = f"an integer >= {lowest}" + (f" and <= {highest}" if highest is not None else "")
            self.refuse(key, value, limit)
        return value

    def check_supported(self) -> None:
        source = self._source
        if source.model_type != "deepseek_v2":
            self.refuse("model_type", source.model_type, "'deepseek_v2' (DeepSeek-V2, V2-Lite, Coder-V2, V2.5)")
        architectures = getattr(source, "architectures", None)
        if architectures and _ARCHITECTURE not in architectures:
            self.refuse("architectures", architectures, f"[{_ARCHITECTURE!r}]")
        quantization = getattr(source, "quantization_config", None)
        if quantization is not None:
            self.refuse("quantization_config", quantization, "none: use a float32, float16 or bfloat16 checkpoint")
        for key, fallback, supported in (
            ("hidden_act", "silu", ("silu",)),
            ("scoring_func", "softmax", ("softmax",)),
            ("topk_method", "greedy", _TOPK_METHODS),
            ("partial_rotary_factor", 1.0, (1.0, None)),
        ):
            value = getattr(source, key, fallback)
            if value not in supported:
                self.refuse(key, value, " or ".join(repr(choice) for choice in supported))

    def rope(self) -> RopeConfig:
        given: dict[str, Any] = dict(self._source.rope_parameters or {})
        kind = given.get("rope_type", given.get("type", "default"))
        if kind not in _ROPE_TYPES:
            self.refuse("rope_parameters.rope_type", kind, " or ".join(repr(choice) for choice in _ROPE_TYPES))
        if kind != "default" and not isinstance(given.get("factor"), (int, float)):
            self.refuse("rope_parameters.factor", given.get("factor"), f"a number, which {kind!r} needs")
        given["kind"] = kind
        given["theta"] = given.get("rope_theta")
        names = {field.name for field in dataclasses.fields(RopeConfig)}
        return RopeConfig(**{key: value for key, value in given.items() if key in names and value is not None})
