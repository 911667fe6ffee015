"""A stand-in for DeepEP 1.2 on CPUs: the calls that the two transports make, and tokens that really go to other ranks.

A kernel that sends puts its data into a mailbox and returns, as the real one writes it into another GPU's memory. One
that receives must block here until every rank has sent, because a CPU has no stream that could wait in its place; it
gives up when a rank has failed, and is done later, as the GPU would have. What has not been received yet is NaN, and a
send that would make the real kernels wait forever is an error. `calls` lists what was called, in order.
"""

from __future__ import annotations

import itertools
import pickle
import time
from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from dbo_greenlet.yields import dbo_current_ubatch_id

calls: list[tuple[Any, ...]] = []
_buffers = itertools.count()


class Event:
    """Its number says how many calls were made before it; waiting for it does what it stands behind."""

    def __init__(self, work: Callable[[], None] | None = None) -> None:
        self.after = len(calls)
        self.work = work

    def current_stream_wait(self) -> None:
        calls.append(("wait", self.after))
        if self.work is not None:
            self.work()
            self.work = None


class Config:
    def __init__(self, sms: int) -> None:
        self.sms = sms

    def get_nvl_buffer_size_hint(self, row_bytes: int, ranks: int) -> int:
        return self.sms * row_bytes * ranks


class Buffer:
    num_sms = 20

    def __init__(self, group: None, comm: Any, explicitly_destroy: bool, **sizes: Any) -> None:
        calls.append(("made", sizes))
        self.comm = comm
        self.rank, self.world = comm.Get_rank(), comm.Get_size()
        if comm.allgather(f"address of {self.rank}") != [f"address of {rank}" for rank in range(self.world)]:
            raise RuntimeError("the ranks' objects are not in order")
        self._group = comm._group
        self._mailbox = f"deep_ep/{next(_buffers)}"  # ranks make their buffers in the same order
        self._letters = {"ll": 0, "combine": 0}
        self._unreceived: list[Callable[[], None]] = []
        self._outstanding: object | None = None

    def _post(self, kind: str, sent: Any) -> Callable[[], list[Any]]:
        """Send to all ranks; returns what receives from all, blocking."""
        prefix = f"{self._mailbox}/{kind}/{self._letters[kind]}"
        self._letters[kind] += 1
        store, generation = self._group._store, self._group.generation
        store.set(f"{prefix}/{self.rank}", pickle.dumps(sent))
        keys = [f"{prefix}/{rank}" for rank in range(self.world)]

        def receive() -> list[Any]:
            while not store.check(keys):
                if self._group.generation == generation:
                    self._group.check()
                time.sleep(0.001)
            return [pickle.loads(store.get(key)) for key in keys]

        return receive

    def destroy(self) -> None:
        calls.append(("destroyed",))

    @staticmethod
    def set_num_sms(sms: int) -> None:
        Buffer.num_sms = sms

    @staticmethod
    def get_dispatch_config(ranks: int) -> Config:
        return Config(Buffer.num_sms)

    get_combine_config = get_dispatch_config

    @staticmethod
    def capture() -> Event:
        calls.append(("capture", dbo_current_ubatch_id()))
        return Event()

    @staticmethod
    def get_low_latency_rdma_size_hint(tokens: int, hidden: int, ranks: int, experts: int) -> int:
        return tokens * hidden * ranks * experts

    # Low latency.

    def low_latency_dispatch(
        self,
        x: Tensor,
        topk_idx: Tensor,
        max_tokens: int,
        num_experts: int,
        *,
        use_fp8: bool,
        return_recv_hook: bool,
    ) -> tuple[Tensor, Tensor, Any, None, Callable[[], None]]:
        calls.append(("ll dispatch", tuple(x.shape), dbo_current_ubatch_id()))
        local, places = num_experts // self.world, self.world * max_tokens
        received = torch.full((local, places, x.shape[1]), float("nan"), dtype=x.dtype)
        counts = torch.full((local,), -1, dtype=torch.int32)
        source = torch.zeros(local, places, dtype=torch.int32)
        ranges = torch.zeros(local, self.world, dtype=torch.int64)
        self._may_send()
        letters = self._post("ll", (x.clone(), topk_idx.clone()))

        def receive() -> None:
            counts.zero_()
            for rank, (rows, ids) in enumerate(letters()):
                for expert in range(local):
                    tokens = (ids == self.rank * local + expert).any(1).nonzero().flatten()
                    begin = int(counts[expert])
                    received[expert, begin : begin + len(tokens)] = rows[tokens]
                    source[expert, begin : begin + len(tokens)] = tokens.to(torch.int32)
                    ranges[expert, rank] = (begin << 32) + len(tokens)
                    counts[expert] += len(tokens)

        handle = (source, ranges, max_tokens, x.shape[1], num_experts)
        return received, counts, handle, None, self._hook("ll dispatch received", receive)

    def low_latency_combine(
        self,
        x: Tensor,
        topk_idx: Tensor,
        topk_weights: Tensor,
        handle: tuple[Tensor, Tensor, int, int, int],
        *,
        return_recv_hook: bool,
    ) -> tuple[Tensor, None, Callable[[], None]]:
        calls.append(("ll combine", tuple(x.shape), dbo_current_ubatch_id()))
        source, ranges, _, width, _ = handle
        local = x.shape[0]
        if not x.is_contiguous() or x.shape[2] != width:
            raise RuntimeError(f"outputs of shape {tuple(x.shape)}")
        # For each rank, the rows that answer it: (expert, token) -> row.
        answers: list[dict[tuple[int, int], Tensor]] = []
        for rank in range(self.world):
            mine = {}
            for expert in range(local):
                begin, count = int(ranges[expert, rank]) >> 32, int(ranges[expert, rank]) & 0xFFFFFFFF
                for place in range(begin, begin + count):
                    key = (self.rank * local + expert, int(source[expert, place]))
                    mine[key] = x[expert, place].clone()
            answers.append(mine)
        combined = torch.full((topk_idx.shape[0], width), float("nan"), dtype=x.dtype)
        self._may_send()
        letters = self._post("ll", answers)

        def receive() -> None:
            rows: dict[tuple[int, int], Tensor] = {}
            for of_rank in letters():
                rows |= of_rank[self.rank]
            for token in range(topk_idx.shape[0]):
                total = torch.zeros(width)
                for expert, weight in zip(topk_idx[token].tolist(), topk_weights[token], strict=True):
                    if expert >= 0 and (expert, token) in rows:
                        total += weight * rows[expert, token].float()
                combined[token] = total.to(x.dtype)

        return combined, None, self._hook("ll combine received", receive)

    def _may_send(self) -> None:
        if self._outstanding is not None:
            raise RuntimeError("DeepEP would wait forever: a send before the receive of the one before it")

    def _hook(self, name: str, receive: Callable[[], None]) -> Callable[[], None]:
        self._outstanding = receive
        generation = self._group.generation

        def hook() -> None:
            calls.append((name, dbo_current_ubatch_id()))
            if self._group.generation != generation:
                # The step failed: on a GPU the kernel waits for ranks that are yet to send, and the host goes on.
                self._unreceived.append(receive)
            else:
                while self._unreceived:
                    self._unreceived.pop(0)()
                receive()
            self._outstanding = None

        return hook

    def replay(self, layers: int) -> None:
        """What a captured graph of so many layers does: sends and receives of which the host knows nothing."""
        nothing = (torch.zeros(0, 2048, dtype=torch.bfloat16), torch.zeros(0, 1, dtype=torch.int64))
        for _ in range(layers):
            self._unreceived += [self._post("ll", nothing), self._post("ll", [{}] * self.world)]

    # High throughput.

    def get_dispatch_layout(
        self, topk_idx: Tensor, num_experts: int, *, previous_event: Event, async_finish: bool, **_: Any
    ) -> tuple[Tensor, None, Tensor, Tensor, Event]:
        calls.append(("ht layout", previous_event.after))
        self.local = num_experts // self.world
        owner = torch.div(topk_idx, self.local, rounding_mode="floor")
        in_rank = torch.stack([(owner == rank).any(1) for rank in range(self.world)], 1)
        per_expert = torch.stack([(topk_idx == expert).sum() for expert in range(num_experts)])
        return in_rank.sum(0), None, per_expert, in_rank, Event()

    def dispatch(
        self,
        x: Tensor,
        *,
        num_tokens_per_rank: Tensor,
        is_token_in_rank: Tensor,
        num_tokens_per_expert: Tensor,
        topk_idx: Tensor,
        topk_weights: Tensor,
        config: Config,
        previous_event: Event,
        **_: Any,
    ) -> tuple[Tensor, Tensor, Tensor, list[int], Any, Event]:
        calls.append(("ht dispatch", x.shape[0], config.sms, dbo_current_ubatch_id()))
        rows, ids, weights, source = [], [], [], []
        for rank, (theirs, in_rank, chosen, weighed) in enumerate(
            self.comm.allgather((x, is_token_in_rank, topk_idx, topk_weights))
        ):
            tokens = in_rank[:, self.rank].nonzero().flatten()
            local = chosen[tokens] - self.rank * self.local
            rows.append(theirs[tokens])
            ids.append(torch.where((local >= 0) & (local < self.local) & (chosen[tokens] >= 0), local, -1))
            weights.append(weighed[tokens])
            source += [(rank, token) for token in tokens.tolist()]
        local_ids = torch.cat(ids)
        counts = [int((local_ids == expert).sum()) for expert in range(self.local)]
        return torch.cat(rows), local_ids, torch.cat(weights), counts, (source, x.shape[0]), Event()

    def combine(
        self, x: Tensor, handle: Any, *, config: Config, previous_event: Event, **_: Any
    ) -> tuple[Tensor, None, Event]:
        calls.append(("ht combine", x.shape[0], config.sms, dbo_current_ubatch_id()))
        source, tokens = handle
        combined = torch.full((tokens, x.shape[1]), float("nan"), dtype=x.dtype)
        letters = self._post("combine", (x.clone(), source))

        def receive() -> None:
            total = torch.zeros(combined.shape)
            for theirs, places in letters():
                for row, (rank, token) in zip(theirs, places, strict=True):
                    if rank == self.rank:
                        total[token] += row.float()
            combined.copy_(total)

        return combined, None, Event(receive)


def module() -> ModuleType:
    """What `import deep_ep` finds."""
    made: Any = ModuleType("deep_ep")
    made.Buffer = Buffer
    return made


def cuda_on_cpu() -> Any:
    """Patches under which the transports take ranks on CPUs, and `deep_ep` is this stand-in. Not for GPUs."""
    stack = ExitStack()
    stack.enter_context(patch.dict("sys.modules", {"deep_ep": module()}))
    stack.enter_context(patch("dbo_greenlet.all2all.deepep.DEVICE_TYPE", "cpu"))
    stack.enter_context(patch("torch.cuda.device", lambda device: nullcontext()))
    stack.enter_context(patch("torch.cuda.get_device_name", lambda: "stand-in"))
    properties = SimpleNamespace(multi_processor_count=132)
    stack.enter_context(patch("torch.cuda.get_device_properties", lambda device: properties))
    stack.enter_context(patch("torch.cuda.current_stream", lambda device=None: "the stream"))
    stack.enter_context(patch("torch.cuda.is_current_stream_capturing", lambda: False))
    stack.enter_context(patch("torch.cuda.synchronize", lambda device=None: None))
    return stack
