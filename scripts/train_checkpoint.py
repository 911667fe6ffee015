"""Trains the small DeepSeek-V2 checkpoint that the package carries, and measures it.

    python scripts/train_checkpoint.py --out dbo_greenlet/assets/checkpoint --device cuda
    python scripts/train_checkpoint.py --out out/checkpoint --device cpu --steps 2000 --batch 48 --report-seconds 600

The model is transformers' DeepseekV2ForCausalLM (multi-head latent attention, shared and routed experts, first layer
dense) over bytes; the text is made by dbo_greenlet.problems. It prints a table with the exact match of the untrained
and the trained weights on held-out problems, whose operands and sentences training never shows, and leaves a Hugging
Face folder: config.json, generation_config.json, model.safetensors (bfloat16, one tensor an expert, as on the hub),
tokenizer.json, tokenizer_config.json, training.json (the table as JSON, with settings and learning curve).

Exact match compares the last integer the model writes (greedy decoding) with the answer; the model may, and does,
write the calculation before it. Training ends at --steps or --minutes, whichever comes first, and the learning rate
follows a cosine over that, so a run that is limited by minutes depends on the machine's speed. A folder is also written
every minute, so that a run that is cut short leaves one. The last weights are kept, not the best: nothing is selected
on held-out problems. (The training sentences were widened once after a look at what an earlier model got wrong on
held-out problems; the held-out sentences stayed.)

Needs torch, transformers, tokenizers and safetensors. Six minutes on an H200, hours on two cores.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import multiprocessing
import os
import pathlib
import sys
import time
from collections.abc import Iterator, Sequence
from functools import partial

import numpy
import torch
import torch.nn.functional as F
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from torch import Tensor, nn
from transformers import DeepseekV2Config, DeepseekV2ForCausalLM

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))

from dbo_greenlet.problems import (
    MAX_PROMPT_BYTES,
    MAX_WORKED_BYTES,
    PROMPT_SEED,
    Problem,
    final_answer,
    held_out_problems,
    train_problems,
)

BOS, EOS, PAD = 256, 257, 258  # ids 0..255 are the bytes themselves
SPECIAL_TOKENS = {"<bos>": BOS, "<eos>": EOS, "<pad>": PAD}

# Shapes by name. Every preset is trained and saved the same way.
PRESETS: dict[str, dict[str, int]] = {
    "small": {
        "hidden_size": 128,
        "intermediate_size": 384,
        "num_hidden_layers": 5,
        "first_k_dense_replace": 1,
        "num_attention_heads": 4,
        "kv_lora_rank": 64,
        "qk_nope_head_dim": 32,
        "qk_rope_head_dim": 16,
        "v_head_dim": 32,
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "n_shared_experts": 2,
        "moe_intermediate_size": 128,
    },
}

PROMPT_LOSS_WEIGHT = 0.05  # names and numbers of a story cannot be predicted; the words around them are worth a little
BALANCE_LOSS_WEIGHT = 0.01
LENGTH = MAX_PROMPT_BYTES + MAX_WORKED_BYTES
POOL_SHARDS = 16  # fixed, so that the training text does not depend on the number of cores


def build_model(preset: str, seed: int) -> DeepseekV2ForCausalLM:
    """A model with random weights, float32, on the CPU."""
    torch.manual_seed(seed)
    config = DeepseekV2Config(
        vocab_size=256 + len(SPECIAL_TOKENS),
        bos_token_id=BOS,
        eos_token_id=EOS,
        pad_token_id=PAD,
        q_lora_rank=None,
        max_position_embeddings=256,
        topk_method="greedy",
        norm_topk_prob=False,
        n_group=1,
        topk_group=1,
        moe_layer_freq=1,
        scoring_func="softmax",
        **PRESETS[preset],
    )
    return DeepseekV2ForCausalLM(config).float()


def save_tokenizer(folder: pathlib.Path) -> None:
    """A byte-level tokenizer without merges: id = byte, and <bos> in front of every text."""
    # The library writes bytes as printable characters: those that are Latin-1 printable stay, the others follow from
    # U+0100 on, in the order of the bytes (GPT-2's table).
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = itertools.count(0x100)
    vocabulary = {chr(byte) if byte in printable else chr(next(others)): byte for byte in range(256)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.add_special_tokens(list(SPECIAL_TOKENS))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", BOS)])
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<bos>",
        "eos_token": "<eos>",
        "pad_token": "<pad>",
        "model_max_length": 256,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n", encoding="ascii")


def dense_experts(experts: nn.Module, hidden: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """All experts for all tokens, then zero for those the router did not pick: [T, H] -> [T, H].

    For experts this small two large products beat sorting the tokens; the values are those of transformers' own
    forward up to rounding, which `main` checks on the saved folder.
    """
    count, twice_inner, width = experts.gate_up_proj.shape
    weights = torch.zeros(hidden.shape[0], count, dtype=hidden.dtype, device=hidden.device)
    weights = weights.scatter(1, top_k_index, top_k_weights.to(hidden.dtype))
    gate, up = F.linear(hidden, experts.gate_up_proj.reshape(-1, width)).view(-1, count, 2, twice_inner // 2).unbind(2)
    inner = F.silu(gate) * up * weights.unsqueeze(-1).to(gate.dtype)
    return F.linear(inner.flatten(1), experts.down_proj.transpose(0, 1).reshape(width, -1)).to(hidden.dtype)


def float32_gate(gate: nn.Module, seen: list[Tensor], hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The router outside autocast, as it runs at inference; appends its logits [T, E] to `seen`."""
    with torch.autocast(hidden.device.type, enabled=False):
        logits, weights, index = type(gate).forward(gate, hidden)
    seen.append(logits)
    return logits, weights, index


def prepare_for_training(model: DeepseekV2ForCausalLM) -> list[Tensor]:
    """Puts `dense_experts` and `float32_gate` in; returns the list in which each forward leaves the router logits."""
    seen: list[Tensor] = []
    for layer in model.model.layers:
        if hasattr(layer.mlp, "experts"):
            layer.mlp.experts.forward = partial(dense_experts, layer.mlp.experts)
            layer.mlp.gate.forward = partial(float32_gate, layer.mlp.gate, seen)
    return seen


def balance_loss(router_logits: Sequence[Tensor], real: Tensor, top_k: int) -> Tensor:
    """Mean over layers of E * sum_e f_e P_e, 1 for an even load (Switch Transformer, arXiv 2101.03961, eq. 4).

    f_e is the share of the picks that expert e got, P_e its mean probability, both over tokens where `real` [T] is 1.
    """
    losses = []
    for logits in router_logits:
        probabilities = logits.softmax(-1)
        picked = torch.zeros_like(probabilities).scatter(1, probabilities.topk(top_k, dim=-1).indices, 1.0 / top_k)
        share = (picked * real.unsqueeze(1)).sum(0) / real.sum()
        mean = (probabilities * real.unsqueeze(1)).sum(0) / real.sum()
        losses.append(logits.shape[1] * (share * mean).sum())
    return torch.stack(losses).mean()


def encode_shard(seed: int, count: int) -> numpy.ndarray:
    """uint8 [count, 2 + LENGTH]: bytes of the prompt, bytes of both, and both as bytes, padded with zeros."""
    rows = numpy.zeros((count, 2 + LENGTH), dtype=numpy.uint8)
    for row, problem in zip(rows, itertools.islice(train_problems(seed), count), strict=True):
        text = (problem.prompt + problem.worked).encode()
        row[0], row[1] = len(problem.prompt), len(text)
        row[2 : 2 + len(text)] = numpy.frombuffer(text, dtype=numpy.uint8)
    return rows


def make_pool(size: int, seed: int) -> Tensor:
    """The training text as `encode_shard` makes it, [size, 2 + LENGTH]."""
    tasks = [(seed * POOL_SHARDS + shard, size // POOL_SHARDS) for shard in range(POOL_SHARDS)]
    context = multiprocessing.get_context("spawn")  # not fork: torch has threads by now
    with context.Pool(min(POOL_SHARDS, os.cpu_count() or 1)) as workers:
        return torch.from_numpy(numpy.concatenate(workers.starmap(encode_shard, tasks, chunksize=1)))


def batches(pool: Tensor, size: int, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Endless batches: ids int64 [size, L] (<bos> prompt worked <eos>, padded) and loss weights float32 [size, L - 1].

    Weight j belongs to the prediction of token j + 1. The pool is taken in a new order again and again; 16 batches at a
    time share out their rows by length, which spares a third of the padding.
    """
    generator = torch.Generator().manual_seed(seed)
    while len(pool) >= 16 * size:
        order = torch.randperm(len(pool), generator=generator)
        for start in range(0, len(order) - 16 * size + 1, 16 * size):
            rows = order[start : start + 16 * size].to(pool.device)
            by_length = rows[pool[rows, 1].argsort()].view(16, size)
            for which in torch.randperm(16, generator=generator).tolist():
                yield as_batch(pool[by_length[which]])


def as_batch(rows: Tensor) -> tuple[Tensor, Tensor]:
    prompt, both, text = rows[:, :1].long(), rows[:, 1:2].long(), rows[:, 2:].long()
    text = text[:, : int(both.max())]
    ids = F.pad(text, (1, 1), value=BOS)
    column = torch.arange(ids.shape[1], device=ids.device)
    ids = ids.where(column <= both, PAD).where(column != both + 1, EOS)
    target = column[1:]
    weights = torch.where(target <= prompt, PROMPT_LOSS_WEIGHT, 1.0).where(target <= both + 1, 0.0)
    return ids, weights


@torch.no_grad()
def exact_match(model: DeepseekV2ForCausalLM, problems: Sequence[Problem]) -> dict[str, list[bool]]:
    """Greedy decoding of every problem; per kind of problem, whether each final answer was right."""
    model.eval()
    results: dict[str, list[bool]] = {}
    device = model.lm_head.weight.device
    for start in range(0, len(problems), 240):
        group = problems[start : start + 240]
        length = 1 + max(len(problem.prompt) for problem in group)
        ids = torch.full((len(group), length), PAD)
        for row, problem in enumerate(group):  # padded on the left: generation goes on at the right
            prompt = [BOS, *problem.prompt.encode()]
            ids[row, length - len(prompt) :] = torch.tensor(prompt)
        ids = ids.to(device)
        written = model.generate(
            ids, attention_mask=(ids != PAD).long(), max_new_tokens=MAX_WORKED_BYTES + 2, do_sample=False
        )
        for problem, row_ids in zip(group, written[:, length:].tolist(), strict=True):
            text = bytes(token for token in itertools.takewhile(lambda token: token != EOS, row_ids) if token < 256)
            right = final_answer(text.decode("ascii", "replace")) == problem.answer
            results.setdefault(problem.kind, []).append(right)
    return results


def summary(results: dict[str, list[bool]]) -> dict[str, object]:
    """Exact match, its binomial standard error and n, overall and per kind."""
    overall = [right for kind in results.values() for right in kind]
    share = sum(overall) / len(overall)
    return {
        "exact_match": round(share, 4),
        "standard_error": round(math.sqrt(share * (1 - share) / len(overall)), 4),
        "n": len(overall),
        "by_kind": {kind: f"{sum(right)}/{len(right)}" for kind, right in sorted(results.items())},
    }


def save_folder(model: DeepseekV2ForCausalLM, folder: pathlib.Path) -> None:
    """The Hugging Face folder; weights rounded to bfloat16. The model itself is left as it is."""
    folder.mkdir(parents=True, exist_ok=True)
    rounded = DeepseekV2ForCausalLM(model.config).to(torch.bfloat16)
    rounded.load_state_dict(model.state_dict())
    rounded.save_pretrained(folder)
    save_tokenizer(folder)


def optimizer_for(model: nn.Module, lr: float) -> torch.optim.AdamW:
    """AdamW; norms get no weight decay."""
    matrices = [p for p in model.parameters() if p.dim() > 1]
    vectors = [p for p in model.parameters() if p.dim() == 1]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=lr, betas=(0.9, 0.98), fused=next(model.parameters()).is_cuda)


def learning_rate(peak: float, progress: float) -> float:
    """Linear warm-up over the first 3 % of the run, then a cosine to zero; `progress` is 0..1."""
    warm = 0.03
    return peak * (
        progress / warm if progress < warm else 0.5 * (1 + math.cos(math.pi * (progress - warm) / (1 - warm)))
    )


def train(model: DeepseekV2ForCausalLM, options: argparse.Namespace) -> tuple[list[dict[str, float]], int]:
    """Trains in place; returns the learning curve and the number of steps taken."""
    device = torch.device(options.device)
    began = time.monotonic()
    pool = make_pool(options.pool, options.seed + 1).to(device)
    print(f"pool: {len(pool)} problems, {time.monotonic() - began:.0f} s", flush=True)
    model.to(device)
    router_logits = prepare_for_training(model)
    optimizer = optimizer_for(model, options.lr)
    monitor = held_out_problems(120, seed=1)
    curve: list[dict[str, float]] = []
    start = saved = reported = time.monotonic()
    for step, (batch, weight) in enumerate(batches(pool, options.batch, options.seed)):
        elapsed = time.monotonic() - start
        progress = max(step / options.steps, elapsed / (60 * options.minutes))
        if progress >= 1:
            return curve, step
        model.train()
        rate = learning_rate(options.lr, progress)
        for group in optimizer.param_groups:
            group["lr"] = rate
        router_logits.clear()
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            logits = model(batch[:, :-1], use_cache=False).logits
        losses = F.cross_entropy(logits.float().flatten(0, 1), batch[:, 1:].flatten(), reduction="none")
        loss = (losses * weight.flatten()).sum() / weight.sum()
        real = (batch[:, :-1] != PAD).flatten().float()
        balance = balance_loss(router_logits, real, model.config.num_experts_per_tok)
        (loss + BALANCE_LOSS_WEIGHT * balance).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if time.monotonic() - reported > options.report_seconds:
            worked = weight.flatten() == 1.0
            share = summary(exact_match(model, monitor))["exact_match"]
            point = {"step": step, "seconds": round(elapsed, 1), "balance": round(balance.item(), 3), "held_out": share}
            curve.append({**point, "worked_loss": round(losses[worked].mean().item(), 4)})
            print(" ".join(f"{key} {value}" for key, value in curve[-1].items()), f"lr {rate:.2e}", flush=True)
            reported = time.monotonic()
            if reported - saved > 60:
                save_folder(model, options.out)
                saved = reported
    raise RuntimeError(f"a pool of {len(pool)} problems is too small for batches of {options.batch}")


def largest_logit_difference(model: DeepseekV2ForCausalLM, loaded: DeepseekV2ForCausalLM, text: Tensor) -> float:
    """Between the trained model with its weights rounded as saved and the folder as loaded; [B, L] ids."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.bfloat16())
        ours, theirs = (m.eval().cpu()(text, use_cache=False).logits for m in (model, loaded))
        return (ours - theirs).abs().max().item()


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=pathlib.Path, required=True, help="folder to write")
    parser.add_argument("--preset", choices=sorted(PRESETS), default="small")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=9000)
    parser.add_argument("--minutes", type=float, default=60.0, help="limit on the training loop")
    parser.add_argument("--batch", type=int, default=512)
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--pool", type=int, default=1_000_000, help="training problems generated, then reused")
    parser.add_argument("--eval-problems", type=int, default=480, help="held-out problems for the table")
    parser.add_argument("--report-seconds", type=float, default=20.0)
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    model = build_model(options.preset, options.seed)
    count = sum(parameter.numel() for parameter in model.parameters())
    problems = held_out_problems(options.eval_problems, PROMPT_SEED)
    untrained = summary(exact_match(model.to(options.device), problems))
    print(f"preset {options.preset}: {count} parameters; untrained {untrained['exact_match']}", flush=True)

    curve, steps = train(model, options)
    save_folder(model, options.out)
    # The score is that of the folder, in float32 on the CPU and with transformers' own experts: the way it is used.
    loaded = DeepseekV2ForCausalLM.from_pretrained(options.out, dtype=torch.float32, experts_implementation="eager")
    text = torch.tensor([[BOS, *problem.prompt.encode()[:64]] for problem in problems[:8]])
    difference = largest_logit_difference(model, loaded, text)
    trained = summary(exact_match(loaded, problems))

    print(f"\n{'weights':<10} {'exact match':>12} {'std. error':>11} {'n':>5}")
    for name, row in (("untrained", untrained), ("trained", trained)):
        print(f"{name:<10} {row['exact_match']:>12.1%} {row['standard_error']:>11.1%} {row['n']:>5}")
    print("\n".join(f"  {kind:<16} {right}" for kind, right in trained["by_kind"].items()))
    print(f"largest logit difference between training and the loaded folder: {difference:.2e}")
    kept = {key: value for key, value in vars(options).items() if key not in ("out", "report_seconds")}
    record = {
        "task": "arithmetic word problems of dbo_greenlet.problems; exact match of the final integer, greedy decoding",
        "held_out_seed": PROMPT_SEED,
        "untrained": untrained,
        "trained": trained,
        "parameters": count,
        "steps": steps,
        "settings": kept,
        "logit_difference": difference,
        "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
        "device": torch.cuda.get_device_name() if options.device.startswith("cuda") else "cpu",
        "curve": curve,
    }
    (options.out / "training.json").write_text(json.dumps(record, indent=2) + "\n", encoding="ascii")
    if not difference < 1e-3:
        print("the saved folder does not give the trained model's logits", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
