"""One rank of an expert-parallel run; prints for each batch how far its rows are from those of one rank alone.

Arguments: rank, world size, port of the store, checkpoint folder.
"""

from __future__ import annotations

import sys
from functools import partial

import torch

from dbo_greenlet import Scheduler
from dbo_greenlet.all2all.loopback import Loopback
from dbo_greenlet.all2all.torch_distributed import TorchDistributed
from dbo_greenlet.batching.inputs import StepInput, UBatchBuffers, pad_step, slice_all
from dbo_greenlet.batching.slices import split_step
from dbo_greenlet.moe import DeepseekV2Config, DeepseekV2Model, KVCache, load_model
from dbo_greenlet.moe.experts import LocalExperts
from dbo_greenlet.ranks import RankGroup

ROWS, MAX_LEN = 4, 32
# Batch -> rank -> (cache row, tokens) of its requests. In the second batch rank 1 has nothing to do.
BATCHES = [{0: [(0, 13), (1, 4)], 1: [(2, 6)]}, {0: [(3, 9)], 1: []}]
PADDED = 18  # tokens: as in serving, all ranks pad to the same number before they split


def prompt_step(requests: list[tuple[int, int]], seed: int) -> StepInput:
    lengths = [count for _, count in requests]
    total = sum(lengths)
    slots = [row * MAX_LEN + j for row, count in requests for j in range(count)]
    return StepInput(
        positions=torch.tensor([j for count in lengths for j in range(count)], dtype=torch.int64),
        query_start_loc=torch.tensor([sum(lengths[:r]) for r in range(len(lengths) + 1)], dtype=torch.int32),
        seq_lens=torch.tensor(lengths, dtype=torch.int32),
        slot_mapping=torch.tensor(slots, dtype=torch.int64),
        request_rows=torch.tensor([row for row, _ in requests], dtype=torch.int64),
        num_tokens=total,
        num_padded_tokens=total,
        input_ids=torch.randint(0, 64, (total,), generator=torch.Generator().manual_seed(seed)),
    )


def split_run(model: DeepseekV2Model, step: StepInput) -> torch.Tensor:
    cache = KVCache(model.config, ROWS, MAX_LEN)
    slices = slice_all(step, split_step(step, 2), UBatchBuffers(8, 2))
    return torch.cat(Scheduler().run([partial(model, part, cache) for part in slices]).outputs)


def error(ours: torch.Tensor, expected: torch.Tensor) -> float:
    return (ours - expected).abs().amax().item() if expected.numel() else 0.0


def main(rank: int, world_size: int, port: int, folder: str) -> None:
    torch.set_num_threads(1)
    num_experts = DeepseekV2Config.from_folder(folder).n_routed_experts
    alone = load_model(folder, Loopback(num_experts))
    with RankGroup.connect(rank, world_size, port, timeout=60.0) as group, torch.inference_mode():
        all_to_all = TorchDistributed(group, num_experts)
        model = load_model(folder, all_to_all)
        held = {(m.first, m.count) for m in model.modules() if isinstance(m, LocalExperts)}
        print(f"experts {held}")
        for requests in BATCHES:
            step = prompt_step(requests[rank], seed=rank)
            expected = alone(step, KVCache(model.config, ROWS, MAX_LEN))
            for capacity in (None, PADDED):
                all_to_all.capacity = capacity
                unsplit = model(step, KVCache(model.config, ROWS, MAX_LEN))
                split = split_run(model, pad_step(step, PADDED))[: step.num_tokens]
                print(f"{step.num_tokens} tokens, {error(unsplit, expected):.1e}, {error(split, expected):.1e}")


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4])
