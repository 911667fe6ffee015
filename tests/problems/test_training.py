"""The training script: its text, its replaced forwards, its optimisers, and the folder that others can load.

Trained is the preset for vLLM with small numbers for its sizes, a few steps, on the CPU: what is looked at is that the
parts fit, not that it learns to calculate.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from types import ModuleType

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("tokenizers")
transformers = pytest.importorskip("transformers")
safetensors = pytest.importorskip("safetensors")

from dbo_greenlet.problems import PROMPT_SEED, held_out_problems, train_problems  # noqa: E402

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"
SIZES = {
    "hidden_size": 64,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "moe_intermediate_size": 32,
}
TINY = [argument for key, value in SIZES.items() for argument in ("--set", f"{key}={value}")]


@pytest.fixture(scope="module")
def scripts() -> Iterator[dict[str, ModuleType]]:
    """The script's three modules by name; they import each other as programs in one folder do."""
    sys.path.insert(0, str(SCRIPTS))
    try:
        import train_checkpoint
        import training_model
        import training_text

        yield {"train": train_checkpoint, "model": training_model, "text": training_text}
    finally:
        sys.path.remove(str(SCRIPTS))


def run_script(*arguments: str, folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(SCRIPTS / "train_checkpoint.py"), "--preset", "vllm", "--output", str(folder), *arguments],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("trained")
    options = ["--device", "cpu", "--steps", "4", "--batch", "4", "--pool", "64", "--eval-problems", "2"]
    finished = run_script(*TINY, *options, "--report-seconds", "1000", folder=folder)
    assert finished.returncode == 0, finished.stderr
    assert "trained" in finished.stdout
    return folder


@pytest.fixture
def model(scripts: dict[str, ModuleType]):
    shape = {**scripts["model"].PRESETS["vllm"].shape, **SIZES}
    model = scripts["model"].build_model(shape, seed=3)
    with torch.no_grad():  # larger than at the start of training, so that every part shows in the logits
        for name, parameter in model.named_parameters():
            parameter.mul_(3.0 if parameter.dim() > 1 and "embed" not in name else 1.0)
    return model


def test_the_folder_gives_the_same_logits_in_transformers_and_in_our_model(folder: Path) -> None:
    from dbo_greenlet.moe.tokenizer import Tokenizer
    from tests.moe.support import Loaded, assert_close, reference_logits

    reference = transformers.DeepseekV2ForCausalLM.from_pretrained(
        folder, dtype=torch.float32, experts_implementation="eager"
    ).eval()
    ours = Loaded(folder, reference)
    ids = Tokenizer.from_folder(folder).encode("Tom has 17 apples. Then he buys 25 more apples.")
    expected = reference_logits(reference, ids)
    assert expected.abs().max() > 0.1
    assert_close(ours.full_logits(ids), expected, 1e-4)


def test_the_folder_has_the_weights_of_the_training_not_those_it_began_with(
    folder: Path, scripts: dict[str, ModuleType]
) -> None:
    record = json.loads((folder / "training.json").read_text())
    assert record["logit_difference"] < 1e-4  # the script's own comparison, of the model in memory with the folder
    assert (record["steps"], record["settings"]["seed"]) == (4, 0)
    began = scripts["model"].build_model(record["settings"]["shape"], 0).state_dict()
    loaded = transformers.DeepseekV2ForCausalLM.from_pretrained(folder, dtype=torch.float32).state_dict()
    assert loaded.keys() == began.keys()
    for name, tensor in loaded.items():
        if tensor.dim() > 1:  # a norm's 1.0 plus four small steps rounds to 1.0
            assert not torch.equal(tensor, began[name].bfloat16().float()), name


def test_tensors_and_configuration_are_as_on_the_hub(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    assert config["architectures"] == ["DeepseekV2ForCausalLM"]
    assert (config["model_type"], config["dtype"], config["q_lora_rank"]) == ("deepseek_v2", "bfloat16", None)
    with safetensors.safe_open(folder / "model.safetensors", "pt") as file:
        dtypes = {name: file.get_tensor(name).dtype for name in file.keys()}  # noqa: SIM118 (no mapping)
    assert set(dtypes.values()) == {torch.bfloat16}
    parts = ("gate_proj", "up_proj", "down_proj")
    for layer in range(1, config["num_hidden_layers"]):
        named = {name for name in dtypes if name.startswith(f"model.layers.{layer}.mlp.experts.")}
        assert named == {
            f"model.layers.{layer}.mlp.experts.{expert}.{part}.weight"
            for expert in range(config["n_routed_experts"])
            for part in parts
        }
    assert {f"model.layers.0.mlp.{part}.weight" for part in parts} <= dtypes.keys()


def test_the_vllm_preset_has_sizes_that_the_kernels_take(scripts: dict[str, ModuleType]) -> None:
    shape = scripts["model"].PRESETS["vllm"].shape
    # DeepEP's low-latency kernels: 2048 is the smallest width; experts are dealt out evenly to two ranks.
    assert shape["hidden_size"] == 2048
    assert shape["n_routed_experts"] % 2 == 0
    assert shape["moe_intermediate_size"] % 128 == 0
    # The latent attention of DeepSeek-V2: a cache entry of 512 + 64.
    assert (shape["kv_lora_rank"], shape["qk_nope_head_dim"], shape["qk_rope_head_dim"]) == (512, 128, 64)


def test_the_evaluation_file_holds_the_held_out_problems_as_ids(folder: Path, scripts: dict[str, ModuleType]) -> None:
    from dbo_greenlet.moe.tokenizer import Tokenizer

    tokenizer = Tokenizer.from_folder(folder)
    records = [json.loads(line) for line in (folder / "eval.jsonl").read_text().splitlines()]
    problems = held_out_problems(240, PROMPT_SEED)
    assert len(records) == 240
    answered = scripts["text"].answered
    for record, problem in zip(records, problems, strict=True):
        assert record["prompt_ids"] == tokenizer.encode(problem.prompt)
        assert record["stop_id"] == tokenizer.eos_id
        worked = record["answer_ids"]
        assert bytes(worked).decode() == problem.worked
        assert len(worked) < record["max_new_tokens"]
        assert answered(record, [*worked, record["stop_id"]])
        assert answered(record, [*worked, record["stop_id"], 7, 7])
        assert not answered(record, worked)  # never stops
        assert not answered(record, [*worked, ord("0"), record["stop_id"]])
        assert not answered(record, [*worked[:-1], record["stop_id"]])
    # Only the result counts: a sum written the other way round is right.
    total = problems.index(next(problem for problem in problems if problem.kind == "total"))
    left, right = problems[total].operands
    turned = list(f" {right}+{left}={problems[total].answer}".encode())
    assert turned != records[total]["answer_ids"]
    assert answered(records[total], [*turned, records[total]["stop_id"]])
    # A longer number that ends in the answer is another number.
    assert not answered(records[0], [*f" 1=9{problems[0].answer}".encode(), records[0]["stop_id"]])


def test_training_forwards_give_the_values_and_gradients_of_the_original(model, scripts: dict[str, ModuleType]) -> None:
    ids = torch.randint(0, 256, (3, 24), generator=torch.Generator().manual_seed(0))

    def logits_and_gradients() -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        model.zero_grad()
        logits = model(ids, use_cache=False).logits
        logits.logsumexp(-1).mean().backward()
        return logits.detach(), {name: p.grad.clone() for name, p in model.named_parameters()}

    model.set_experts_implementation("eager")
    logits, gradients = logits_and_gradients()
    seen = scripts["model"].prepare_for_training(model)
    fast_logits, fast_gradients = logits_and_gradients()
    assert logits.abs().max() > 0.5
    torch.testing.assert_close(fast_logits, logits, atol=1e-4, rtol=1e-4)
    for name, gradient in gradients.items():
        torch.testing.assert_close(fast_gradients[name], gradient, atol=1e-5, rtol=1e-3, msg=name)
    assert [tuple(router.shape) for router in seen] == [(3 * 24, 8)] * 3


def test_balance_loss_is_one_for_an_even_load_and_grows_to_the_number_of_experts(
    scripts: dict[str, ModuleType],
) -> None:
    balance = scripts["model"].balance_loss
    even = 50.0 * torch.eye(4).repeat(3, 1)
    assert balance([even], torch.ones(12), 1).item() == pytest.approx(1.0, abs=1e-4)
    uneven = 50.0 * torch.eye(4)[[0] * 12]
    assert balance([uneven], torch.ones(12), 1).item() == pytest.approx(4.0, abs=1e-4)
    # Padding does not count: of the tokens of the first half alone, all went to expert 0.
    mixed = torch.cat([uneven[:6], even[:6]])
    assert balance([mixed], torch.tensor([1.0] * 6 + [0.0] * 6), 1).item() == pytest.approx(4.0, abs=1e-4)


def test_batches_hold_every_text_once_with_weights_on_what_is_predicted(scripts: dict[str, ModuleType]) -> None:
    train, text = scripts["train"], scripts["text"]
    problems = list(islice(train_problems(9), 32))
    seen = []
    for ids, weights in islice(train.batches(torch.from_numpy(text.encode_shard(9, 32)), 2, seed=0), 16):
        assert (ids.shape[1] - 1) % train.LENGTH_STEP == 0
        for row, weight in zip(ids.tolist(), weights.tolist(), strict=True):
            end = row.index(text.EOS)
            assert row[0] == text.BOS
            assert set(row[end + 1 :]) <= {text.PAD}
            seen.append(bytes(row[1:end]).decode())
            solved = next(p for p in problems if p.prompt + p.worked == seen[-1])
            asked = len(solved.prompt)
            assert weight[:asked] == pytest.approx([train.PROMPT_LOSS_WEIGHT] * asked)
            assert weight[asked:end] == [1.0] * (end - asked)
            assert not any(weight[end:])
    assert sorted(seen) == sorted(p.prompt + p.worked for p in problems)


def test_shards_are_the_text_of_their_seeds_in_order(scripts: dict[str, ModuleType]) -> None:
    text = scripts["text"]
    with text.Shards(32, seed=2) as shards:
        rows = shards.result()
    assert rows.shape == (32, 2 + text.LENGTH)
    for shard in (0, 1, 15):
        assert (rows[2 * shard : 2 * shard + 2] == text.encode_shard(2 * 16 + shard, 2)).all()


@pytest.mark.parametrize("kind", ["adamw", "muon"])
def test_every_parameter_is_optimised_once_and_the_loss_falls(kind: str, model, scripts: dict[str, ModuleType]) -> None:
    train, text = scripts["train"], scripts["text"]
    optimizers = train.optimizers_for(model, kind, 1e-3)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    with_muon = {names[id(p)] for o in optimizers[1:] for group in o.param_groups for p in group["params"]}
    # The layers' matrices, without routers (whose rows are classes) and without stacks of experts.
    assert with_muon == (
        set()
        if kind == "adamw"
        else {n for n in names.values() if n.endswith("_proj.weight")}
        | {n for n in names.values() if n.endswith("kv_a_proj_with_mqa.weight")}
    )
    groups = [group for optimizer in optimizers for group in optimizer.param_groups]
    optimised = [parameter for group in groups for parameter in group["params"]]
    assert len(optimised) == len({id(p) for p in optimised})
    assert {id(p) for p in optimised} == {id(p) for p in model.parameters()}
    assert all(p.dim() == 1 for group in groups if group["weight_decay"] == 0 for p in group["params"])

    pool = torch.from_numpy(text.encode_shard(1, 64))
    ids, _ = next(train.batches(pool, 4, seed=5))

    def loss() -> float:
        with torch.no_grad():
            logits = model(ids[:, :-1], use_cache=False).logits
        return torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten()).item()

    before = loss()
    options = argparse.Namespace(
        preset="vllm", optimizer=kind, lr=3e-3, batch=4, seed=0, steps=12, minutes=10.0, report_seconds=1e9
    )
    curve, steps = train.train(model, pool, options)
    assert (curve, steps) == ([], 12)
    assert loss() < before - 0.5


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--set", "hidden_size=wide"], "hidden_size=wide: give one of hidden_size, "),
        (["--set", "colour=3"], "colour=3: give one of hidden_size, "),
        (["--pool", "100", "--batch", "64"], "a pool of 100 problems is too small for batches of 64"),
    ],
)
def test_what_cannot_be_trained_is_refused_in_a_sentence(
    arguments: list[str], said: str, tmp_path: Path, scripts, capsys
):
    with pytest.raises(SystemExit) as stopped:
        scripts["train"].parse(["--preset", "vllm", "--out", str(tmp_path), *arguments])
    assert stopped.value.code == 2
    assert said in capsys.readouterr().err
