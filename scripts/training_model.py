"""The model that a training script trains: shapes by name, fast training forwards, scoring, and the folder it leaves.

The model is transformers' DeepseekV2ForCausalLM. `prepare_for_training` replaces the forward of three of its layers by
faster ones with the same values up to rounding; what is saved and scored is transformers' own model.
"""

from __future__ import annotations

import itertools
import json
import math
import pathlib
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from training_text import BOS, EOS, MAX_NEW_TOKENS, PAD, SPECIAL_TOKENS, answered, evaluation_record
from transformers import DeepseekV2Config, DeepseekV2ForCausalLM

from dbo_greenlet.problems import Problem


@dataclass(frozen=True)
class Preset:
    """A shape, how it is trained unless the command line says otherwise, and what it is for.

    `shape`: keys of config.json. `training`: steps, minutes (limit on the loop), batch (problems a step), optimizer, lr
    (peak), pool (training problems that are generated, then reused). `serving`: for a server that computes in bfloat16.
    Then the residual stream is bfloat16 in training as it will be in use, the score is measured in bfloat16 on the
    training device, and eval.jsonl lies in the folder.
    """

    shape: Mapping[str, int]
    training: Mapping[str, float | str]
    serving: bool = False


PRESETS: dict[str, Preset] = {
    # The package carries this one: it runs on a CPU and is a few megabytes.
    "small": Preset(
        shape={
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
            "max_position_embeddings": 256,
        },
        training={"steps": 9000, "minutes": 60.0, "batch": 512, "optimizer": "adamw", "lr": 2e-3, "pool": 1_000_000},
    ),
    # For vLLM with DeepEP's low-latency kernels, which take no hidden size below 2048, and a latent attention of the
    # dimensions that its kernels are made for. Everything else is as small as it goes: a training step costs by it.
    "vllm": Preset(
        shape={
            "hidden_size": 2048,
            "intermediate_size": 1024,
            "num_hidden_layers": 4,
            "first_k_dense_replace": 1,
            "num_attention_heads": 8,
            "kv_lora_rank": 512,
            "qk_nope_head_dim": 128,
            "qk_rope_head_dim": 64,
            "v_head_dim": 128,
            "n_routed_experts": 8,
            "num_experts_per_tok": 2,
            "n_shared_experts": 2,
            "moe_intermediate_size": 128,
            "max_position_embeddings": 512,
        },
        training={"steps": 2400, "minutes": 4.0, "batch": 256, "optimizer": "muon", "lr": 1e-3, "pool": 1_000_000},
        serving=True,
    ),
}


def build_model(shape: Mapping[str, int], seed: int) -> DeepseekV2ForCausalLM:
    """A model with random weights, float32, on the CPU."""
    torch.manual_seed(seed)
    config = DeepseekV2Config(
        vocab_size=256 + len(SPECIAL_TOKENS),
        bos_token_id=BOS,
        eos_token_id=EOS,
        pad_token_id=PAD,
        q_lora_rank=None,
        topk_method="greedy",
        norm_topk_prob=False,
        n_group=1,
        topk_group=1,
        moe_layer_freq=1,
        scoring_func="softmax",
        **shape,
    )
    return DeepseekV2ForCausalLM(config).float()


def mixed_precision(device: torch.device) -> AbstractContextManager[object]:
    """bfloat16 matrix products over float32 weights on a GPU; plain float32 on a CPU."""
    return torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda")


def dense_experts(experts: nn.Module, hidden: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """All experts for all tokens, then zero for those the router did not pick: [T, H] -> [T, H].

    For experts this small two large products beat sorting the tokens; the values are those of transformers' own
    forward up to rounding.
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


def fused_norm(norm: nn.Module, hidden: Tensor) -> Tensor:
    """RMS norm [..., H] -> [..., H] in one kernel and in the input's dtype, summed in float32.

    The original is eight kernels over the widest tensors of the model, and under autocast it widens them to float32:
    with a hidden size of 2048 it takes as long as the matrix products.
    """
    with torch.autocast(hidden.device.type, enabled=False):
        return F.rms_norm(hidden, norm.weight.shape, norm.weight.to(hidden.dtype), norm.variance_epsilon)


def prepare_for_training(model: DeepseekV2ForCausalLM) -> list[Tensor]:
    """Puts the three forwards above in; returns the list in which each forward leaves the router logits."""
    seen: list[Tensor] = []
    norm_class = type(model.model.norm)
    for module in model.modules():
        if isinstance(module, norm_class):
            module.forward = partial(fused_norm, module)
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


@torch.no_grad()
def exact_match(model: DeepseekV2ForCausalLM, problems: Sequence[Problem]) -> dict[str, list[bool]]:
    """Greedy decoding of every problem; per kind of problem, whether each was `answered`."""
    model.eval()
    results: dict[str, list[bool]] = {}
    device = model.lm_head.weight.device
    for start in range(0, len(problems), 240):
        group = [(problem.kind, evaluation_record(problem)) for problem in problems[start : start + 240]]
        length = max(len(record["prompt_ids"]) for _, record in group)
        ids = torch.full((len(group), length), PAD)
        for row, (_, record) in zip(ids, group, strict=True):  # padded on the left: generation goes on at the right
            row[length - len(record["prompt_ids"]) :] = torch.tensor(record["prompt_ids"])
        ids = ids.to(device)
        # Not cuDNN's attention, which is planned anew for every length, that is, for every token.
        with sdpa_kernel([SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]):
            written = model.generate(
                ids, attention_mask=(ids != PAD).long(), max_new_tokens=MAX_NEW_TOKENS, do_sample=False
            )
        for (kind, record), row_ids in zip(group, written[:, length:].tolist(), strict=True):
            results.setdefault(kind, []).append(answered(record, row_ids))
    return results


def summary(results: Mapping[str, Sequence[bool]]) -> dict[str, object]:
    """Exact match, its binomial standard error and n, overall and per kind."""
    overall = [right for kind in results.values() for right in kind]
    share = sum(overall) / len(overall)
    return {
        "exact_match": round(share, 4),
        "standard_error": round(math.sqrt(share * (1 - share) / len(overall)), 4),
        "n": len(overall),
        "by_kind": {kind: f"{sum(right)}/{len(right)}" for kind, right in sorted(results.items())},
    }


def save_tokenizer(folder: pathlib.Path, max_length: int) -> None:
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
        "model_max_length": max_length,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n", encoding="ascii")


def save_folder(model: DeepseekV2ForCausalLM, folder: pathlib.Path) -> None:
    """The Hugging Face folder; weights rounded to bfloat16. The model itself is left as it is."""
    folder.mkdir(parents=True, exist_ok=True)
    # On "meta" nothing is allocated or filled at random: the rounded tensors take the place of the parameters.
    with torch.device("meta"):
        rounded = DeepseekV2ForCausalLM(model.config)
    rounded.load_state_dict({name: t.to("cpu", torch.bfloat16) for name, t in model.state_dict().items()}, assign=True)
    rounded.generation_config = model.generation_config
    rounded.save_pretrained(folder)
    save_tokenizer(folder, model.config.max_position_embeddings)


def largest_logit_difference(model: DeepseekV2ForCausalLM, folder: pathlib.Path, text: Tensor) -> float:
    """Between the trained model, its weights rounded as saved, and the folder as loaded, float32, CPU; ids [B, L].

    Rounds the parameters of `model` and moves it to the CPU.
    """
    loaded = DeepseekV2ForCausalLM.from_pretrained(folder, dtype=torch.float32, experts_implementation="eager")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.bfloat16())
        ours, theirs = (m.eval().cpu()(text, use_cache=False).logits for m in (model, loaded))
        return (ours - theirs).abs().max().item()
