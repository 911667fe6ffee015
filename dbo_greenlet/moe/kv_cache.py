"""The KV cache of multi-head latent attention: one compressed entry per token and layer."""

from __future__ import annotations

import torch
from torch import Tensor

from dbo_greenlet.errors import ConfigurationError
from dbo_greenlet.moe.config import DeepseekV2Config

__all__ = ["KVCache"]


class KVCache:
    """Room for `num_rows` requests of up to `max_len` tokens each; slot = row * max_len + position.

    Per layer and token it holds the normalised latent (kv_lora_rank elements) and the rotated key shared by all heads
    (qk_rope_head_dim elements), side by side in one tensor: a score needs both, and side by side one matrix product
    and one write serve them. `latent` and `rope_key` give them separately.

    Tokens with slot -1 (padding) are written to one spare slot behind the last row. Leaving them out instead would
    need a boolean index, whose result has a shape that depends on data: a device synchronisation per step, and no
    CUDA graph.

    `static_shapes`: decode attention reads all `max_len` positions of a row (masked) instead of the longest context
    of the step, so that the shapes of a pure decode step depend on the number of requests only.

    Raises `ConfigurationError` if `num_rows` or `max_len` is not positive or the model has no such positions.
    """

    def __init__(
        self,
        config: DeepseekV2Config,
        num_rows: int,
        max_len: int,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        *,
        static_shapes: bool = False,
    ) -> None:
        if num_rows < 1 or max_len < 1:
            raise ConfigurationError(f"a KV cache of {num_rows} rows of {max_len} tokens; both must be at least 1")
        if max_len > config.max_position_embeddings:
            raise ConfigurationError(
                f"a KV cache of {max_len} tokens a row, but the model has {config.max_position_embeddings} positions "
                "(max_position_embeddings in config.json); use a smaller max_len"
            )
        self.num_rows = num_rows
        self.max_len = max_len
        self.static_shapes = static_shapes
        self._latent_dim = config.kv_lora_rank
        self._spare_slot = num_rows * max_len
        # Ordinary tensors even if the caller is in inference mode: an inference tensor could not be written outside.
        with torch.inference_mode(False):
            # Zeros, not empty: a masked position is multiplied by 0, which does not remove a NaN.
            shape = (config.num_hidden_layers, self._spare_slot + 1, config.cache_dim)
            self._slots = torch.zeros(shape, dtype=dtype, device=device)

    def write_slots(self, slot_mapping: Tensor) -> Tensor:
        """slot_mapping int64 [T] (-1: padding) -> the slots to pass to `write`, int64 [T]."""
        return torch.where(slot_mapping < 0, self._spare_slot, slot_mapping)

    def write(self, layer: int, slots: Tensor, latent: Tensor, rope_key: Tensor) -> None:
        """Store latent [T, kv_lora_rank] and rope_key [T, qk_rope_head_dim] of layer `layer` at `slots` [T]."""
        self._slots[layer].index_copy_(0, slots, torch.cat((latent, rope_key), dim=-1))

    def entries(self, layer: int) -> Tensor:
        """All entries of one layer, a view [num_rows, max_len, kv_lora_rank + qk_rope_head_dim]."""
        return self._slots[layer, : self._spare_slot].view(self.num_rows, self.max_len, -1)

    def latent(self, layer: int) -> Tensor:
        """The latents of one layer, a view [num_rows, max_len, kv_lora_rank]."""
        return self.entries(layer)[..., : self._latent_dim]

    def rope_key(self, layer: int) -> Tensor:
        """The rotated keys of one layer, a view [num_rows, max_len, qk_rope_head_dim]."""
        return self.entries(layer)[..., self._latent_dim :]

    def clear(self) -> None:
        """Zero every slot: needed before rows are used again if a step wrote NaN or infinity, else never."""
        self._slots.zero_()
