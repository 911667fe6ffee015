"""Trains a DeepSeek-V2 checkpoint on arithmetic word problems, and measures it.

    python scripts/train_checkpoint.py --out dbo_greenlet/assets/checkpoint --device cuda     (the one in the package)
    python scripts/train_checkpoint.py --preset vllm --out out/vllm_checkpoint                (one that vLLM can serve)
    python scripts/train_checkpoint.py --out out/checkpoint --device cpu --steps 2000 --batch 48 --report-seconds 600

The model is transformers' DeepseekV2ForCausalLM (multi-head latent attention, shared and routed experts, first layer
dense) over bytes; the text is made by dbo_greenlet.problems. It prints a table with the exact match of the untrained
and the trained weights on held-out problems, whose operands and sentences training never shows, and leaves a Hugging
Face folder: config.json, generation_config.json, model.safetensors (bfloat16, one tensor an expert, as on the hub),
tokenizer.json, tokenizer_config.json, training.json (the table as JSON, with settings and learning curve).

--preset small is what the package carries: 2.5 million parameters, six minutes on an H200, hours on two cores.
--preset vllm has the sizes that vLLM's latent attention and DeepEP's low-latency kernels take (training_model.py says
which), and adds eval.jsonl: held-out problems as token ids for whatever program serves it. Its score is measured with
transformers in bfloat16. It wants a GPU.

Exact match compares the last integer the model writes (greedy decoding) with the answer; the model may, and does,
write the calculation before it. Training ends at --steps or --minutes, whichever comes first, and the learning rate
follows a cosine over that, so a run that is limited by minutes depends on the machine's speed. A folder is also written
every minute, so that a run that is cut short leaves one. The last weights are kept, not the best: nothing is selected
on held-out problems. (The training sentences were widened once after a look at what an earlier model got wrong on
held-out problems; the held-out sentences stayed.)

Needs torch, transformers, tokenizers and safetensors.
"""

from __future__ import annotations

import argparse
import json
import math
import pathlib
import sys
import time
from collections.abc import Iterator, Sequence

import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn
from transformers import DeepseekV2ForCausalLM

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))

from training_model import (
    PRESETS,
    balance_loss,
    build_model,
    exact_match,
    largest_logit_difference,
    mixed_precision,
    prepare_for_training,
    save_folder,
    summary,
)
from training_text import BOS, EOS, PAD, POOL_SHARDS, Shards, prompt_ids, write_evaluation

from dbo_greenlet.problems import PROMPT_COUNT, PROMPT_SEED, held_out_problems

PROMPT_LOSS_WEIGHT = 0.05  # names and numbers of a story cannot be predicted; the words around them are worth a little
BALANCE_LOSS_WEIGHT = 0.01
BUCKET = 16  # batches that share out their rows by length
# Lengths are rounded up to this: for every new length cuDNN plans its attention anew, a tenth of a second each.
LENGTH_STEP = 16


def batches(pool: Tensor, size: int, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Endless batches: ids int64 [size, L] (<bos> prompt worked <eos>, padded) and loss weights float32 [size, L - 1].

    Weight j belongs to the prediction of token j + 1. The pool is taken in a new order again and again; BUCKET batches
    at a time share out their rows by length, which spares a third of the padding.
    """
    generator = torch.Generator().manual_seed(seed)
    lengths = pool[:, 1].cpu()  # on the host, so that no step waits for the device to learn how long its batch is
    while True:
        order = torch.randperm(len(pool), generator=generator)
        for start in range(0, len(order) - BUCKET * size + 1, BUCKET * size):
            rows = order[start : start + BUCKET * size]
            by_length = rows[lengths[rows].argsort()].view(BUCKET, size)
            for which in torch.randperm(BUCKET, generator=generator).tolist():
                chosen = by_length[which]
                yield as_batch(pool[chosen.to(pool.device)], int(lengths[chosen].max()))


def as_batch(rows: Tensor, longest: int) -> tuple[Tensor, Tensor]:
    """What `batches` yields, of rows as `encode_shard` makes them, none with more than `longest` bytes."""
    prompt, both, text = rows[:, :1].long(), rows[:, 1:2].long(), rows[:, 2 : 2 + longest].long()
    ids = F.pad(text, (1, 1 + -(longest + 1) % LENGTH_STEP), value=BOS)  # <bos> in front and room for <eos>
    column = torch.arange(ids.shape[1], device=ids.device)
    ids = ids.where(column <= both, PAD).where(column != both + 1, EOS)
    target = column[1:]
    weights = torch.where(target <= prompt, PROMPT_LOSS_WEIGHT, 1.0).where(target <= both + 1, 0.0)
    return ids, weights


def optimizers_for(model: DeepseekV2ForCausalLM, kind: str, lr: float) -> list[torch.optim.Optimizer]:
    """AdamW for everything, or Muon (Jordan et al. 2024) for the layers' matrices and AdamW for the rest.

    Norms get no weight decay. Muon's step is scaled to the size of AdamW's (arXiv 2502.16982, section 2.2), so that
    one learning rate serves both. Stacks of experts stay with AdamW: torch's Muon takes matrices only.
    """
    muon, matrices, vectors = [], [], []
    for name, parameter in model.named_parameters():
        layers = kind == "muon" and name.startswith("model.layers.") and not name.endswith("gate.weight")
        (vectors if parameter.dim() == 1 else muon if layers and parameter.dim() == 2 else matrices).append(parameter)
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    fused = next(model.parameters()).is_cuda
    found: list[torch.optim.Optimizer] = [torch.optim.AdamW(groups, lr=lr, betas=(0.9, 0.98), fused=fused)]
    if muon:
        found.append(torch.optim.Muon(muon, lr=lr, weight_decay=0.1, adjust_lr_fn="match_rms_adamw"))
    return found


def learning_rate(peak: float, progress: float) -> float:
    """Linear warm-up over the first 3 % of the run, then a cosine to zero; `progress` is 0..1."""
    warm = 0.03
    return peak * (
        progress / warm if progress < warm else 0.5 * (1 + math.cos(math.pi * (progress - warm) / (1 - warm)))
    )


def train(
    model: DeepseekV2ForCausalLM, pool: Tensor, options: argparse.Namespace
) -> tuple[list[dict[str, float]], int]:
    """Trains in place on `pool`, both on one device; returns the learning curve and the number of steps taken."""
    device = pool.device
    narrow = PRESETS[options.preset].serving and device.type == "cuda"
    router_logits = prepare_for_training(model)
    optimizers = optimizers_for(model, options.optimizer, options.lr)
    monitor = held_out_problems(120, seed=1)
    curve: list[dict[str, float]] = []
    tokens = 0
    start = saved = reported = time.monotonic()
    for step, (batch, weight) in enumerate(batches(pool, options.batch, options.seed)):
        elapsed = time.monotonic() - start
        progress = max(step / options.steps, elapsed / (60 * options.minutes))
        if progress >= 1:
            return curve, step
        model.train()
        rate = learning_rate(options.lr, progress)
        for group in [group for optimizer in optimizers for group in optimizer.param_groups]:
            group["lr"] = rate
        router_logits.clear()
        with mixed_precision(device):
            # The residual stream has the dtype of the embeddings: autocast narrows products, not sums.
            embedded = model.model.embed_tokens(batch[:, :-1]).to(torch.bfloat16 if narrow else torch.float32)
            logits = model(inputs_embeds=embedded, use_cache=False).logits
        losses = F.cross_entropy(logits.float().flatten(0, 1), batch[:, 1:].flatten(), reduction="none")
        loss = (losses * weight.flatten()).sum() / weight.sum()
        real = (batch[:, :-1] != PAD).flatten().float()
        balance = balance_loss(router_logits, real, model.config.num_experts_per_tok)
        (loss + BALANCE_LOSS_WEIGHT * balance).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        tokens += batch.numel()
        if time.monotonic() - reported > options.report_seconds:
            worked = weight.flatten() == 1.0
            point = {"step": step, "worked_loss": round(losses[worked].mean().item(), 4)}
            seconds = time.monotonic() - start  # read after .item(), which waits for the device
            point |= {"seconds": round(seconds, 1), "tokens": tokens, "balance": round(balance.item(), 3)}
            with mixed_precision(device):
                point["held_out"] = summary(exact_match(model, monitor))["exact_match"]
            curve.append(point)
            print(" ".join(f"{key} {value}" for key, value in point.items()), f"lr {rate:.2e}", flush=True)
            reported = time.monotonic()
            if reported - saved > 60:
                save_folder(model, options.out)
                saved = reported
    raise RuntimeError("the batches ended before the training")


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Options; what the command line leaves open is filled in from the preset. `shape` is its shape with --set."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", "--output", type=pathlib.Path, required=True, help="folder to write")
    parser.add_argument("--preset", choices=sorted(PRESETS), default="small")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int)
    parser.add_argument("--minutes", type=float, help="limit on the training loop")
    parser.add_argument("--batch", type=int, help="problems a step")
    parser.add_argument("--optimizer", choices=("adamw", "muon"))
    parser.add_argument("--lr", type=float, help="peak of the learning rate")
    parser.add_argument("--pool", type=int, help="training problems generated, then reused")
    parser.add_argument(
        "--set", metavar="KEY=NUMBER", action="append", default=[], help="another size than the preset's"
    )
    parser.add_argument("--eval-problems", type=int, default=480, help="held-out problems for the table")
    parser.add_argument("--report-seconds", type=float, default=20.0)
    options = parser.parse_args(arguments)
    preset = PRESETS[options.preset]
    for name, value in preset.training.items():
        if getattr(options, name) is None:
            setattr(options, name, value)
    options.shape = dict(preset.shape)
    for setting in options.set:
        key, _, number = setting.partition("=")
        if key not in options.shape or not number.isdecimal():
            parser.error(f"--set {setting}: give one of {', '.join(options.shape)}, '=' and a whole number")
        options.shape[key] = int(number)
    if options.pool // POOL_SHARDS * POOL_SHARDS < BUCKET * options.batch:
        parser.error(
            f"a pool of {options.pool} problems is too small for batches of {options.batch}: {BUCKET} are drawn at once"
        )
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    began = time.monotonic()
    options = parse(arguments)
    device, preset = torch.device(options.device), PRESETS[options.preset]
    problems = held_out_problems(options.eval_problems, PROMPT_SEED)
    with Shards(options.pool, options.seed + 1) as shards:
        model = build_model(options.shape, options.seed).to(device)
        count = sum(parameter.numel() for parameter in model.parameters())
        untrained = summary(exact_match(model, problems))
        pool = torch.from_numpy(shards.result()).to(device)
    seconds = time.monotonic() - began
    print(f"preset {options.preset}: {count} parameters; untrained {untrained['exact_match']}", flush=True)
    print(f"pool: {len(pool)} problems; ready to train after {seconds:.0f} s", flush=True)

    curve, steps = train(model, pool, options)
    save_folder(model, options.out)
    text = torch.tensor([prompt_ids(problem)[:65] for problem in problems[:8]])
    difference = largest_logit_difference(model, options.out, text)
    # The score is that of the folder with transformers' own experts, in the way it is used: float32 on a CPU, or in
    # bfloat16 where a server will run it.
    how = {"dtype": torch.bfloat16 if preset.serving else torch.float32, "experts_implementation": "eager"}
    loaded = DeepseekV2ForCausalLM.from_pretrained(options.out, **how)
    trained = summary(exact_match(loaded.to(device if preset.serving else "cpu"), problems))
    if preset.serving:
        write_evaluation(held_out_problems(PROMPT_COUNT, PROMPT_SEED), options.out / "eval.jsonl")

    print(f"\n{'weights':<10} {'exact match':>12} {'std. error':>11} {'n':>5}")
    for name, row in (("untrained", untrained), ("trained", trained)):
        print(f"{name:<10} {row['exact_match']:>12.1%} {row['standard_error']:>11.1%} {row['n']:>5}")
    print("\n".join(f"  {kind:<16} {right}" for kind, right in trained["by_kind"].items()))
    print(f"largest logit difference between training and the loaded folder: {difference:.2e}")
    print(f"{time.monotonic() - began:.0f} s in all")
    kept = {key: value for key, value in vars(options).items() if key not in ("out", "report_seconds", "set")}
    record = {
        "task": "arithmetic word problems of dbo_greenlet.problems; exact match of the final integer, greedy decoding",
        "held_out_seed": PROMPT_SEED,
        "untrained": untrained,
        "trained": trained,
        "scored_in": str(how["dtype"]).removeprefix("torch."),
        "parameters": count,
        "steps": steps,
        "settings": kept,
        "logit_difference": difference,
        "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
        "device": torch.cuda.get_device_name() if device.type == "cuda" else "cpu",
        "curve": curve,
    }
    (options.out / "training.json").write_text(json.dumps(record, indent=2) + "\n", encoding="ascii")
    if not difference < 1e-3:
        print("the saved folder does not give the trained model's logits", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
