"""One step's batch: requests with their context, in the forms that vLLM's two runners take."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from functools import cached_property
from typing import Any

import numpy as np
import torch
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.worker.gpu.input_batch import InputBatch
from vllm.v1.worker.ubatch_utils import maybe_create_ubatch_slices, split_attn_metadata

MAX_LEN = 32


DECODE_GRAPHS_ARE_MARKED = "decode_graph_eligible" in {each.name for each in fields(InputBatch)}


@dataclass
class Batch:
    """Requests by tokens of this step (`queries`) and tokens already in the cache (`contexts`), padded to `padded`."""

    queries: list[int] = field(default_factory=lambda: [1] * 8)
    contexts: list[int] | None = None
    padded: int | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        if self.contexts is None:
            self.contexts = [3 + i % 5 for i in range(len(self.queries))]
        self.num_tokens = sum(self.queries)
        self.padded = self.padded or self.num_tokens

    @cached_property
    def tensors(self) -> dict[str, torch.Tensor]:
        """Per token [P]: input_ids, positions, slots (-1: padding), is_padding. Per request: query_start_loc [R+1],
        seq_lens [R], block_table [R, 1]."""
        generator = torch.Generator().manual_seed(100 + self.seed)
        positions = torch.cat([torch.arange(c, c + q) for c, q in zip(self.contexts, self.queries, strict=True)])
        rows = torch.repeat_interleave(torch.arange(len(self.queries)), torch.tensor(self.queries))
        lengths = [c + q for c, q in zip(self.contexts, self.queries, strict=True)]
        padding = self.padded - self.num_tokens
        return {
            "input_ids": torch.randint(0, 32, (self.padded,), generator=generator, dtype=torch.int32),
            "positions": torch.cat([positions, torch.zeros(padding, dtype=torch.int64)]),
            "slots": torch.cat([rows * MAX_LEN + positions, torch.full((padding,), -1)]),
            "is_padding": torch.arange(self.padded) >= self.num_tokens,
            "query_start_loc": torch.tensor([0, *np.cumsum(self.queries)], dtype=torch.int32),
            "seq_lens": torch.tensor(lengths, dtype=torch.int32),
            "block_table": torch.arange(len(self.queries), dtype=torch.int32)[:, None],
        }

    def fill_context(self, model: Any) -> None:
        """The keys of earlier steps; what this step has to write stays NaN."""
        generator = torch.Generator().manual_seed(5)
        for layer in model.layers:
            keys = torch.randn(layer.attention.cache.shape, generator=generator)
            for row, context in enumerate(self.contexts):
                layer.attention.cache[row * MAX_LEN : row * MAX_LEN + context] = keys[:context]

    def model_inputs(self, kind: str, hidden: int) -> dict[str, Any]:
        """The arguments of the model: `kind` "ids", "mrope", "embeds" or "intermediate"."""
        from vllm.sequence import IntermediateTensors

        generator = torch.Generator().manual_seed(200 + self.seed)

        def random() -> torch.Tensor:
            return torch.randn(self.padded, hidden, generator=generator).to(torch.bfloat16)

        ids, positions = self.tensors["input_ids"].clone(), self.tensors["positions"].clone()
        if kind == "mrope":
            positions = torch.stack([positions, positions // 2, positions % 3])
        return {
            "input_ids": ids if kind in ("ids", "mrope") else None,
            "positions": positions,
            "intermediate_tensors": IntermediateTensors({"hidden_states": random(), "residual": random()})
            if kind == "intermediate"
            else None,
            "inputs_embeds": random() if kind == "embeds" else None,
        }

    def slices(self, count: int = 2) -> list[Any]:
        """vLLM's slices of the padded batch."""
        queries = np.array(self.queries, dtype=np.int32)
        return maybe_create_ubatch_slices(True, queries, self.padded, len(queries), count)[1]

    # V1: attention metadata cut by vLLM's `split_attn_metadata`

    def metadata_v1(self, slices: list[Any]) -> list[dict[str, Any]]:
        t = self.tensors
        common = CommonAttentionMetadata(
            query_start_loc=t["query_start_loc"],
            query_start_loc_cpu=t["query_start_loc"].clone(),
            seq_lens=t["seq_lens"],
            seq_lens_cpu_upper_bound=t["seq_lens"].clone(),
            num_reqs=len(self.queries),
            num_actual_tokens=self.padded,
            max_query_len=max(self.queries),
            max_seq_len=MAX_LEN,
            block_table_tensor=t["block_table"],
            slot_mapping=t["slots"],
        )
        return [
            {
                "ubatch": index,
                "query_start_loc": part.query_start_loc,
                "seq_lens": part.seq_lens,
                "block_table": part.block_table_tensor,
                "max_len": MAX_LEN,
            }
            for index, part in enumerate(split_attn_metadata(slices, common))
        ]

    def whole_v1(self) -> dict[str, Any]:
        """Attention metadata of the batch that is not split."""
        return {name: self.tensors[name] for name in ("query_start_loc", "seq_lens", "block_table")}

    def slot_mappings_v1(self, slices: list[Any], layers: int) -> list[dict[str, torch.Tensor]]:
        slots = self.tensors["slots"]
        return [{f"layer{n}": slots[s.token_slice] for n in range(layers)} for s in slices]

    # V2: vLLM's `UBatchRunner.prepare` cuts this one

    def input_batch(self) -> InputBatch:
        t, count = self.tensors, len(self.queries)
        queries, contexts = np.array(self.queries, dtype=np.int32), np.array(self.contexts, dtype=np.int32)
        return InputBatch(
            req_ids=[f"request{i}" for i in range(count)],
            num_reqs=count,
            num_reqs_after_padding=count,
            idx_mapping=torch.arange(count),
            idx_mapping_np=np.arange(count),
            expanded_idx_mapping=torch.arange(count),
            expanded_local_pos=torch.zeros(count, dtype=torch.int32),
            num_scheduled_tokens=queries,
            num_tokens=self.num_tokens,
            num_tokens_after_padding=self.padded,
            num_draft_tokens=0,
            num_draft_tokens_per_req=None,
            query_start_loc=t["query_start_loc"],
            query_start_loc_np=t["query_start_loc"].numpy(),
            seq_lens=t["seq_lens"],
            seq_lens_cpu_upper_bound=t["seq_lens"].clone(),
            dcp_local_seq_lens=None,
            num_computed_tokens_np=contexts,
            prefill_len_np=queries + contexts,
            num_computed_prefill_tokens_np=contexts,
            is_prefilling_np=queries > 1,
            has_prefill=bool((queries > 1).any()),
            # Since vLLM 0.31.
            **({"decode_graph_eligible": bool((queries == 1).all())} if DECODE_GRAPHS_ARE_MARKED else {}),
            input_ids=t["input_ids"],
            positions=t["positions"],
            is_padding=t["is_padding"],
            logits_indices=t["query_start_loc"][1:] - 1,
            cu_num_logits=torch.arange(count + 1, dtype=torch.int32),
            cu_num_logits_np=np.arange(count + 1, dtype=np.int32),
            has_structured_output_reqs=False,
            prompt_lens=None,
        )


class ModelState:
    """What `UBatchRunner.prepare` asks for attention metadata."""

    def prepare_attn(self, batch: Any, cg_mode: Any, block_tables: Any, slot_mappings: Any, groups: Any, kv_config: Any,
                     ubatch_idx: int = 0, for_capture: bool = False) -> dict[str, Any]:  # fmt: skip
        return {
            "ubatch": ubatch_idx,
            "query_start_loc": batch.query_start_loc,
            "seq_lens": batch.seq_lens,
            "block_table": block_tables[0],
            "max_len": MAX_LEN,
            "dcp_local_seq_lens": batch.dcp_local_seq_lens,
        }
