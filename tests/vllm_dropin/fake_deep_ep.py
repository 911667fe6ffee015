"""A stand-in `deep_ep`: the calls that vLLM's DeepEP classes make, with one rank that holds every expert.

Tokens really go to the experts' rows and back, so outputs mean something. What a real all-to-all has not delivered yet
is filled with NaN here: rows of a low-latency dispatch and the output of its combine are right only after the recv hook
ran, and a hook that runs twice is an error.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any
from unittest.mock import patch

import torch

from tests.vllm_dropin.fake_cuda import FakeEvent, recorder, who_runs


class Config:
    def __init__(self, *args: Any) -> None:
        self.args = args


class EventOverlap:
    """DeepEP's handle on an event; `event` is None where the call was synchronous."""

    def __init__(self, event: FakeEvent | None = None) -> None:
        self.event = event

    def current_stream_wait(self) -> None:
        self.event.wait()


def _names(event: EventOverlap | None) -> str:
    return "none" if event is None or event.event is None else event.event.name


class Buffer:
    num_sms = 20

    def __init__(self, num_experts: int, num_slots: int) -> None:
        self.num_experts = num_experts
        self.num_slots = num_slots

    @staticmethod
    def set_num_sms(sms: int) -> None:
        recorder().write("deep_ep.set_num_sms", sms)

    @staticmethod
    def get_dispatch_config(ranks: int) -> Config:
        return Config("dispatch", ranks)

    get_combine_config = get_dispatch_config

    @staticmethod
    def capture() -> EventOverlap:
        recorder().write("ht.capture")
        event = FakeEvent()
        event.record()
        return EventOverlap(event)

    # High throughput: the call returns when the counts are known.

    def _wait(self, previous_event: EventOverlap | None) -> None:
        if previous_event is not None and previous_event.event is not None:
            previous_event.event.wait()

    def _done(self, asynchronous: bool) -> EventOverlap:
        if not asynchronous:
            return EventOverlap()
        event = FakeEvent()
        event.record()
        return EventOverlap(event)

    def get_dispatch_layout(
        self,
        topk_idx: torch.Tensor,
        num_experts: int,
        previous_event: EventOverlap | None = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> tuple:
        self._wait(previous_event)
        recorder().work("ht.layout", len(topk_idx), _names(previous_event), async_finish)
        counts = torch.bincount(topk_idx.flatten(), minlength=num_experts)
        in_rank = torch.ones(len(topk_idx), 1, dtype=torch.bool)
        return torch.tensor([len(topk_idx)]), None, counts, in_rank, self._done(async_finish)

    def dispatch(
        self,
        x: torch.Tensor,
        handle: Any = None,
        num_tokens_per_rank: torch.Tensor | None = None,
        num_tokens_per_rdma_rank: torch.Tensor | None = None,
        is_token_in_rank: torch.Tensor | None = None,
        num_tokens_per_expert: torch.Tensor | None = None,
        topk_idx: torch.Tensor | None = None,
        topk_weights: torch.Tensor | None = None,
        expert_alignment: int = 1,
        config: Config | None = None,
        previous_event: EventOverlap | None = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> tuple:
        self._wait(previous_event)
        recorder().work("ht.dispatch", len(x), _names(previous_event), async_finish)
        # Arrival order is not sending order: the combine has to undo it.
        order = torch.arange(len(x) - 1, -1, -1)
        return (
            x[order],
            topk_idx[order],
            topk_weights[order],
            num_tokens_per_expert.tolist(),
            order,
            self._done(async_finish),
        )

    def combine(
        self,
        x: torch.Tensor,
        handle: torch.Tensor,
        topk_weights: torch.Tensor | None = None,
        config: Config | None = None,
        previous_event: EventOverlap | None = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> tuple:
        self._wait(previous_event)
        recorder().work("ht.combine", len(x), _names(previous_event), async_finish)
        combined = torch.empty_like(x)
        combined[handle] = x
        return combined, None, self._done(async_finish)

    # Low latency: the call sends; the hook receives.

    def low_latency_dispatch(
        self,
        x: torch.Tensor,
        topk_idx: torch.Tensor,
        num_max_dispatch_tokens_per_rank: int,
        num_experts: int,
        use_fp8: bool = True,
        async_finish: bool = False,
        return_recv_hook: bool = False,
        **quantization: Any,
    ) -> tuple:
        recorder().work("ll.dispatch_send", len(x))
        if len(x) > num_max_dispatch_tokens_per_rank:
            raise RuntimeError(f"{len(x)} tokens do not fit into {num_max_dispatch_tokens_per_rank} slots")
        received = torch.full((num_experts, self.num_slots, x.size(1)), float("nan"), dtype=x.dtype)
        counts = torch.full((num_experts,), -1, dtype=torch.int32)
        sent, ids = x.clone(), topk_idx.clone()
        rows = [(ids == expert).any(dim=1).nonzero().flatten() for expert in range(num_experts)]

        def receive() -> None:
            for expert, tokens in enumerate(rows):
                received[expert] = 0
                received[expert, : len(tokens)] = sent[tokens]
                counts[expert] = len(tokens)

        hook = _hook("ll.dispatch_recv", receive, wanted=return_recv_hook)
        return received, counts, rows, self._done(async_finish), hook

    def low_latency_combine(
        self,
        x: torch.Tensor,
        topk_idx: torch.Tensor,
        topk_weights: torch.Tensor,
        handle: list[torch.Tensor],
        use_logfmt: bool = False,
        zero_copy: bool = False,
        async_finish: bool = False,
        return_recv_hook: bool = False,
        out: torch.Tensor | None = None,
    ) -> tuple:
        recorder().work("ll.combine_send", len(topk_idx))
        sent = x.clone()
        out.fill_(float("nan"))

        def receive() -> None:
            total = torch.zeros(out.shape, dtype=torch.float32)
            for expert, tokens in enumerate(handle):
                weights = (topk_weights * (topk_idx == expert)).sum(dim=1)[tokens]
                total[tokens] += weights[:, None] * sent[expert, : len(tokens)].float()
            out.copy_(total)

        hook = _hook("ll.combine_recv", receive, wanted=return_recv_hook)
        return out, self._done(async_finish), hook


def _hook(name: str, receive: Callable[[], None], *, wanted: bool) -> Callable[[], None] | None:
    owner, log, ran = who_runs(), recorder(), []

    def hook() -> None:
        if ran:
            raise RuntimeError(f"the hook of {name} of microbatch {owner} ran twice")
        ran.append(True)
        log.work(name, f"of {owner}")
        receive()

    if wanted:
        return hook
    hook()
    return None


def module() -> ModuleType:
    """The module that `import deep_ep` finds."""
    made = ModuleType("deep_ep")
    made.Buffer = made.ElasticBuffer = Buffer
    made.Config, made.EventOverlap = Config, EventOverlap
    made.EPHandle = object
    return made


@functools.cache
def import_deep_ep_classes() -> tuple[type, type]:
    """vLLM's own DeepEP classes (high throughput, low latency), imported with the stand-in in the place of `deep_ep`.

    The stand-in is gone from `sys.modules` afterwards: the rest of vLLM looks there to see what is installed.
    """
    with patch.dict(sys.modules, {"deep_ep": module()}):
        from vllm.model_executor.layers.fused_moe.prepare_finalize.deepep_ht import DeepEPHTPrepareAndFinalize
        from vllm.model_executor.layers.fused_moe.prepare_finalize.deepep_ll import DeepEPLLPrepareAndFinalize
    return DeepEPHTPrepareAndFinalize, DeepEPLLPrepareAndFinalize
