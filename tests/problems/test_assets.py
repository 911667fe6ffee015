"""What the package carries: the prompt file is the generator's, and the checkpoint loads and can calculate."""

from __future__ import annotations

import json
from importlib.resources import files
from pathlib import Path

import pytest

from dbo_greenlet.problems import PROMPT_SEED, final_answer, held_out_problems, main, prompt_records

ASSETS = Path(str(files("dbo_greenlet"))) / "assets"
CHECKPOINT = ASSETS / "checkpoint"
MAX_NEW_TOKENS = 32


@pytest.fixture(scope="module")
def model():
    transformers = pytest.importorskip("transformers")
    torch = pytest.importorskip("torch")
    loaded = transformers.DeepseekV2ForCausalLM.from_pretrained(
        CHECKPOINT, dtype=torch.float32, experts_implementation="eager"
    )
    return loaded.eval()


@pytest.fixture(scope="module")
def tokenizer():
    return pytest.importorskip("transformers").AutoTokenizer.from_pretrained(CHECKPOINT, padding_side="left")


def test_the_prompt_file_is_what_the_generator_gives(tmp_path: Path) -> None:
    assert main(["--out", str(tmp_path / "prompts.jsonl")]) == 0
    assert (tmp_path / "prompts.jsonl").read_bytes() == (ASSETS / "prompts.jsonl").read_bytes()


def test_prompts_are_held_out_problems_that_arrive_over_many_steps() -> None:
    records = [json.loads(line) for line in (ASSETS / "prompts.jsonl").read_text().splitlines()]
    assert [(r["prompt"], r["answer"]) for r in records] == [
        (problem.prompt, problem.answer) for problem in held_out_problems(240, PROMPT_SEED)
    ]
    assert len({r["id"] for r in records}) == 240
    arrivals = [r["arrival"] for r in records]
    assert arrivals == sorted(arrivals)
    assert arrivals.count(0) == 48
    assert len(set(arrivals)) > 8


def test_a_prompt_file_of_one_problem_arrives_at_once() -> None:
    assert [record["arrival"] for record in prompt_records(1, 3)] == [0]


def test_the_checkpoint_is_a_small_deepseek_v2_with_one_tensor_an_expert() -> None:
    safetensors = pytest.importorskip("safetensors")
    config = json.loads((CHECKPOINT / "config.json").read_text())
    assert config["architectures"] == ["DeepseekV2ForCausalLM"]
    assert config["model_type"] == "deepseek_v2"
    assert (CHECKPOINT / "model.safetensors").stat().st_size <= 6_000_000
    with safetensors.safe_open(CHECKPOINT / "model.safetensors", "np") as tensors:
        names = set(tensors.keys())
    for layer in range(config["first_k_dense_replace"], config["num_hidden_layers"]):
        for expert in range(config["n_routed_experts"]):
            for part in ("gate_proj", "up_proj", "down_proj"):
                assert f"model.layers.{layer}.mlp.experts.{expert}.{part}.weight" in names


def test_the_tokenizer_maps_each_byte_to_its_own_id_and_back(tokenizer) -> None:
    text = "".join(map(chr, range(256))) + " 17+25=42 \u2603"
    ids = tokenizer(text).input_ids
    assert ids == [256, *text.encode()]
    assert tokenizer.decode(ids, skip_special_tokens=True) == text
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id) == (256, 257, 258)


def test_the_checkpoint_answers_most_problems_it_never_saw(model, tokenizer) -> None:
    problems = held_out_problems(24, seed=5)
    batch = tokenizer([problem.prompt for problem in problems], padding=True, return_tensors="pt")
    written = model.generate(
        batch.input_ids, attention_mask=batch.attention_mask, max_new_tokens=MAX_NEW_TOKENS, do_sample=False
    )
    texts = tokenizer.batch_decode(written[:, batch.input_ids.shape[1] :], skip_special_tokens=True)
    right = sum(final_answer(text) == problem.answer for text, problem in zip(texts, problems, strict=True))
    assert right >= 0.6 * len(problems)


def test_the_same_shape_without_training_answers_next_to_nothing(model, tokenizer) -> None:
    # The score above means something only if it is the weights that earn it.
    torch = pytest.importorskip("torch")
    torch.manual_seed(0)
    untrained = type(model)(model.config).eval()
    problems = held_out_problems(8, seed=5)
    batch = tokenizer([problem.prompt for problem in problems], padding=True, return_tensors="pt")
    written = untrained.generate(
        batch.input_ids, attention_mask=batch.attention_mask, max_new_tokens=MAX_NEW_TOKENS, do_sample=False
    )
    texts = tokenizer.batch_decode(written[:, batch.input_ids.shape[1] :], skip_special_tokens=True)
    assert sum(final_answer(text) == problem.answer for text, problem in zip(texts, problems, strict=True)) <= 1


def test_every_router_uses_all_its_experts(model, tokenizer) -> None:
    # A dispatch that sends everything to one or two experts would exercise nothing.
    torch = pytest.importorskip("torch")
    picked: dict[int, set[int]] = {}
    for number, layer in enumerate(model.model.layers):
        if hasattr(layer.mlp, "gate"):
            seen = picked.setdefault(number, set())
            layer.mlp.gate.register_forward_hook(lambda _, __, out, seen=seen: seen.update(out[2].unique().tolist()))
    batch = tokenizer([problem.prompt for problem in held_out_problems(8, seed=6)], padding=True, return_tensors="pt")
    with torch.no_grad():
        model(batch.input_ids, attention_mask=batch.attention_mask)
    assert picked
    assert all(len(seen) == model.config.n_routed_experts for seen in picked.values())
