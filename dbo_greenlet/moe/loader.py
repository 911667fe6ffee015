"""From a Hugging Face checkpoint folder to a `DeepseekV2Model` with this rank's weights.

Two layouts of the routed experts are read: one tensor per expert and matrix, as on the hub and as `save_pretrained`
writes it, and all experts stacked, which is transformers' layout in memory (`save_original_format=False`).
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from dbo_greenlet.errors import CheckpointError
from dbo_greenlet.moe.checkpoint import CheckpointFiles
from dbo_greenlet.moe.config import DeepseekV2Config
from dbo_greenlet.moe.experts import LocalExperts
from dbo_greenlet.moe.model import DeepseekV2Model

if TYPE_CHECKING:
    from dbo_greenlet.all2all import AllToAll

__all__ = ["load_model", "model_hash"]

# What decides a model's answers; a README beside it does not.
_HASHED = ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "*.safetensors*")
_HASH_BLOCK = 1 << 20  # bytes


def load_model(
    folder: str | Path,
    all2all: AllToAll,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
) -> DeepseekV2Model:
    """Load the model in `folder`, with only the routed experts that `all2all` places on this rank.

    Floating-point weights are converted to `dtype`.

    Raises `CheckpointError` naming the file if one is missing, truncated or of another model, and
    `ConfigurationError` if the experts cannot be dealt out evenly to the ranks.
    """
    model = DeepseekV2Model(DeepseekV2Config.from_folder(folder), all2all, dtype, device)
    with CheckpointFiles(folder) as files, torch.no_grad():
        loaded: set[str] = set()
        for name, module in model.named_modules():
            if isinstance(module, LocalExperts):
                _load_experts(files, f"model.{name}", module, model.config.n_routed_experts)
                loaded.update(f"{name}.{leaf}" for leaf, _ in module.named_parameters())
        for name, parameter in model.named_parameters():  # a tied output head is not listed twice
            if name not in loaded:
                _load_parameter(files, name, parameter)
    return model.eval()


def model_hash(folder: str | Path) -> str:
    """SHA-256 (64 hex digits) over configuration, tokenizer and weights, read in blocks of 1 MiB.

    Names and lengths are hashed along with the contents, files in the order of their names.

    Raises `CheckpointError` if the folder has no such file or one cannot be read.
    """
    folder = Path(folder)
    paths = sorted({path for pattern in _HASHED for path in folder.glob(pattern)})
    if not paths:
        raise CheckpointError(f"{folder} has no model files to hash; give the folder of a Hugging Face checkpoint")
    digest = hashlib.sha256()
    for path in paths:
        try:
            with path.open("rb") as file:
                digest.update(f"{path.name}\0{path.stat().st_size}\0".encode())
                while block := file.read(_HASH_BLOCK):
                    digest.update(block)
        except OSError as error:
            raise CheckpointError(f"{path} cannot be read ({error}); check its permissions") from error
    return digest.hexdigest()


def _load_parameter(files: CheckpointFiles, name: str, parameter: Tensor) -> None:
    """Copy one parameter; gate and up projections, one matrix here, are two in the file."""
    stored = name if name.startswith("lm_head.") else f"model.{name}"
    if ".gate_up_proj." in name:
        halves = zip(("gate_proj", "up_proj"), parameter.chunk(2), strict=True)
        parts = [(stored.replace("gate_up_proj", half_name), half) for half_name, half in halves]
    else:
        parts = [(stored, parameter)]
    for part_name, part in parts:
        part.copy_(files.read(part_name, tuple(part.shape)))


def _load_experts(files: CheckpointFiles, prefix: str, experts: LocalExperts, num_experts: int) -> None:
    """Copy this rank's block of one layer's routed experts, from either layout."""
    block = slice(experts.first, experts.first + experts.count)
    if f"{prefix}.gate_up_proj" in files:
        for leaf, stacked in experts.named_parameters():
            shape = (num_experts, *stacked.shape[1:])
            stacked.copy_(files.read(f"{prefix}.{leaf}", shape, block))
        return
    for local, expert in enumerate(range(block.start, block.stop)):
        gate, up = experts.gate_up_proj[local].chunk(2)
        for leaf, part in (("gate_proj", gate), ("up_proj", up), ("down_proj", experts.down_proj[local])):
            part.copy_(files.read(f"{prefix}.{expert}.{leaf}.weight", tuple(part.shape)))
