"""Loading weights: both layouts of experts, shards, expert blocks of ranks, and every way a folder can be broken."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from dbo_greenlet.all2all.loopback import Loopback
from dbo_greenlet.errors import CheckpointError, ConfigurationError
from dbo_greenlet.moe import load_model, model_hash
from dbo_greenlet.moe.model import DeepseekV2Model
from tests.moe.support import Loaded, assert_close, reference_logits, token_ids

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"


@dataclass
class Place:
    """Where a rank stands; as much of an all-to-all as loading looks at."""

    rank: int
    world_size: int
    num_experts: int = 8
    name: str = "place"

    @property
    def num_local_experts(self) -> int:
        return self.num_experts // self.world_size


def parameters(model: DeepseekV2Model) -> dict[str, torch.Tensor]:
    return dict(model.named_parameters())


@pytest.fixture
def folder(v2: Loaded, tmp_path: Path) -> Path:
    """A copy of a checkpoint in one file, to be broken."""
    return Path(shutil.copytree(v2.folder, tmp_path / "model"))


@pytest.fixture
def sharded(v2: Loaded, tmp_path: Path) -> Path:
    v2.reference.save_pretrained(tmp_path / "sharded", max_shard_size="20KB")
    return tmp_path / "sharded"


def rewrite(folder: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    tensors = load_file(folder / SINGLE)
    change(tensors)
    save_file(tensors, folder / SINGLE, metadata={"format": "pt"})


@pytest.mark.parametrize("original", [True, False], ids=["experts one by one", "experts stacked"])
@pytest.mark.parametrize("shard", ["20KB", "5GB"])
def test_every_layout_on_disk_gives_the_same_model(v2: Loaded, tmp_path: Path, original: bool, shard: str) -> None:
    v2.reference.save_pretrained(tmp_path, save_original_format=original, max_shard_size=shard)
    files = sorted(tmp_path.glob("*.safetensors"))
    assert (len(files) > 3) == (shard == "20KB")
    names = set()
    for file in files:
        with safe_open(file, "pt") as opened:
            names |= set(opened.keys())
    assert ("model.layers.1.mlp.experts.0.gate_proj.weight" in names) == original
    assert ("model.layers.1.mlp.experts.gate_up_proj" in names) != original
    expected = parameters(v2.model)
    loaded = parameters(load_model(tmp_path, Loopback(8)))
    assert loaded.keys() == expected.keys()
    assert all(torch.equal(loaded[name], expected[name]) for name in expected)


@pytest.mark.parametrize("original", [True, False], ids=["experts one by one", "experts stacked"])
def test_each_rank_gets_its_block_of_experts_and_all_the_rest(v2: Loaded, tmp_path: Path, original: bool) -> None:
    v2.reference.save_pretrained(tmp_path, save_original_format=original)
    expected = parameters(v2.model)
    for rank in range(4):
        for name, parameter in parameters(load_model(tmp_path, Place(rank, 4))).items():
            wanted = expected[name][2 * rank : 2 * rank + 2] if ".mlp.experts." in name else expected[name]
            assert torch.equal(parameter, wanted), name


def test_a_rank_reads_no_other_rank_s_experts(folder: Path) -> None:
    def drop(tensors: dict[str, torch.Tensor]) -> None:
        for name in [name for name in tensors if any(f".experts.{e}." in name for e in range(4))]:
            del tensors[name]

    rewrite(folder, drop)
    load_model(folder, Place(1, 2))
    with pytest.raises(CheckpointError, match=r"experts\.0\.gate_proj\.weight"):
        load_model(folder, Place(0, 2))


@pytest.mark.parametrize("stored", [torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("wanted", [torch.float32, torch.bfloat16])
def test_weights_are_converted(v2: Loaded, folder: Path, stored: torch.dtype, wanted: torch.dtype) -> None:
    rewrite(folder, lambda tensors: tensors.update({name: t.to(stored) for name, t in tensors.items()}))
    loaded = parameters(load_model(folder, Loopback(8), wanted))
    for name, parameter in parameters(v2.model).items():
        assert loaded[name].dtype == wanted
        assert torch.equal(loaded[name], parameter.to(stored).to(wanted))


def test_tied_embeddings_need_no_output_head(checkpoint: Callable[..., Loaded]) -> None:
    loaded = checkpoint(tie_word_embeddings=True)
    assert "lm_head.weight" not in load_file(loaded.folder / SINGLE)
    assert loaded.model.lm_head.weight is loaded.model.embed_tokens.weight
    assert_close(loaded.full_logits(token_ids(5)), reference_logits(loaded.reference, token_ids(5)))


def test_loading_moves_no_random_generator_and_needs_no_gradient(v2: Loaded) -> None:
    state = torch.get_rng_state()
    model = load_model(v2.folder, Loopback(8))
    assert torch.equal(torch.get_rng_state(), state)
    assert not any(parameter.requires_grad for parameter in model.parameters())
    assert not model.training


def test_uneven_experts_are_refused(v2: Loaded) -> None:
    with pytest.raises(ConfigurationError, match=r"8 routed experts .* 3 expert-parallel ranks; use 1, 2, 4, 8 ranks"):
        load_model(v2.folder, Place(0, 3))
    with pytest.raises(ConfigurationError, match=r"'loopback' was made for 16 experts.*the model has 8"):
        load_model(v2.folder, Loopback(16))


def expect(folder: Path, *parts: str) -> None:
    with pytest.raises(CheckpointError) as raised:
        load_model(folder, Loopback(8))
    for part in parts:
        assert part in str(raised.value)


def test_no_weights(folder: Path) -> None:
    (folder / SINGLE).rename(folder / "pytorch_model.bin")
    expect(folder, str(folder), "model.safetensors", "convert")


@pytest.mark.parametrize("keep", [0, 4, 100, 0.5, -1])
def test_a_truncated_file(folder: Path, keep: float) -> None:
    data = (folder / SINGLE).read_bytes()
    (folder / SINGLE).write_bytes(data[: int(len(data) * keep) if isinstance(keep, float) else keep])
    expect(folder, str(folder / SINGLE), "truncated", "again")


def test_a_truncated_shard(sharded: Path) -> None:
    shard = sorted(sharded.glob("*.safetensors"))[-1]
    shard.write_bytes(shard.read_bytes()[:-8])
    expect(sharded, str(shard), "truncated")


def test_a_missing_shard(sharded: Path) -> None:
    shard = sorted(sharded.glob("*.safetensors"))[1]
    shard.unlink()
    expect(sharded, str(shard), "does not exist", INDEX)


@pytest.mark.parametrize("text", ["", "{}", "[]", '{"weight_map": 3}', '{"weight_map": {"lm_head.weight": 3}}'])
def test_a_broken_index(sharded: Path, text: str) -> None:
    (sharded / INDEX).write_text(text)
    expect(sharded, INDEX)


def test_an_index_that_names_the_wrong_shard(sharded: Path) -> None:
    index = json.loads((sharded / INDEX).read_text())
    home = index["weight_map"]["model.norm.weight"]
    wrong = next(file for file in index["weight_map"].values() if file != home)
    index["weight_map"]["model.norm.weight"] = wrong
    (sharded / INDEX).write_text(json.dumps(index))
    expect(sharded, str(sharded / wrong), "model.norm.weight", "cannot be read")


@pytest.mark.parametrize(
    "name",
    ["model.norm.weight", "model.layers.0.mlp.up_proj.weight", "model.layers.2.mlp.experts.7.down_proj.weight"],
)
def test_a_missing_tensor(folder: Path, name: str) -> None:
    rewrite(folder, lambda tensors: tensors.pop(name))
    expect(folder, str(folder), repr(name), "config.json")


@pytest.mark.parametrize(
    "name", ["lm_head.weight", "model.layers.1.mlp.experts.3.up_proj.weight", "model.layers.1.mlp.gate.weight"]
)
def test_a_tensor_of_another_shape(folder: Path, name: str) -> None:
    rewrite(folder, lambda tensors: tensors.update({name: tensors[name][:-1].contiguous()}))
    shape = list(load_file(folder / SINGLE)[name].shape)
    expect(folder, str(folder / SINGLE), repr(name), str(shape), str([shape[0] + 1, shape[1]]))


def test_stacked_experts_of_another_number(v2: Loaded, tmp_path: Path) -> None:
    v2.reference.save_pretrained(tmp_path, save_original_format=False)
    name = "model.layers.1.mlp.experts.down_proj"
    rewrite(tmp_path, lambda tensors: tensors.update({name: tensors[name][:4].contiguous()}))
    expect(tmp_path, repr(name), "[4, 32, 16]", "[8, 32, 16]")


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.int8])
def test_quantised_weights(folder: Path, dtype: torch.dtype) -> None:
    name = "model.layers.0.mlp.down_proj.weight"
    rewrite(folder, lambda tensors: tensors.update({name: tensors[name].to(dtype)}))
    expect(folder, str(folder / SINGLE), repr(name), "not quantised")


def test_the_hash_covers_what_decides_the_answers(folder: Path) -> None:
    first = model_hash(folder)
    expected = hashlib.sha256()
    for file in sorted(folder.iterdir()):  # a checkpoint without tokenizer: all its files count
        expected.update(f"{file.name}\0{file.stat().st_size}\0".encode() + file.read_bytes())
    assert first == expected.hexdigest()
    (folder / "README.md").write_text("about")
    assert model_hash(folder) == first
    data = bytearray((folder / SINGLE).read_bytes())
    data[-1] ^= 1
    (folder / SINGLE).write_bytes(data)
    changed = model_hash(folder)
    assert changed != first
    (folder / "tokenizer.json").write_text("{}")
    assert model_hash(folder) != changed


def test_nothing_to_hash(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no model files"):
        model_hash(tmp_path / "absent")
