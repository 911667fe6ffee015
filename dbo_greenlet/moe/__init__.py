"""A DeepSeek-V2 model whose MoE layer yields, and what loads it from a Hugging Face checkpoint folder."""

from __future__ import annotations

from dbo_greenlet.moe.config import DeepseekV2Config
from dbo_greenlet.moe.kv_cache import KVCache
from dbo_greenlet.moe.loader import load_model, model_hash
from dbo_greenlet.moe.model import DeepseekV2Model
from dbo_greenlet.moe.tokenizer import Tokenizer

__all__ = ["DeepseekV2Config", "DeepseekV2Model", "KVCache", "Tokenizer", "load_model", "model_hash"]
