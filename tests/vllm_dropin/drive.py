"""Runs one case through vLLM's real `UBatchWrapper` (V1) or `UBatchRunner` (V2): eager, captured and replayed.

`run_case` gives outputs and the log. It says nothing about who carries the microbatches: the caller installs the
drop-in or not. `run_in_turn` is the reference: the same microbatches, one after the other, without any step.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from vllm.config import CUDAGraphMode, VllmConfig
from vllm.distributed import parallel_state
from vllm.forward_context import BatchDescriptor, DPMetadata, create_forward_context, override_forward_context
from vllm.v1.worker.gpu import cudagraph_utils, ubatch_utils
from vllm.v1.worker.gpu_ubatch_wrapper import UBatchWrapper

from dbo_greenlet.vllm import patching
from tests.vllm_dropin import fake_cuda
from tests.vllm_dropin.batches import Batch, ModelState
from tests.vllm_dropin.fake_cuda import Call, Recorder
from tests.vllm_dropin.model import TinyMoe, tensors_of

MAX_REQUESTS = 16
_config: VllmConfig | None = None


@dataclass(frozen=True)
class Case:
    """What to run: `runner` "V1" or "V2", `backend` "LL" or "HT", `mode` "eager" or "capture" (with two replays)."""

    runner: str = "V1"
    backend: str = "LL"
    mode: str = "eager"
    layers: int = 1
    inputs: str = "ids"
    output: str = "hidden"
    shared: bool = True
    dcp: int = 1
    batch: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        plain = Case()
        extra = [f"{n}={getattr(self, n)}" for n in ("inputs", "output", "shared", "dcp", "batch")
                 if getattr(self, n) != getattr(plain, n)]  # fmt: skip
        return "-".join([self.runner, self.backend, self.mode, f"{self.layers}layers", *extra])


@dataclass
class Outcome:
    """`outputs`: of each forward (eager: two; capture: the replays); `log`: every call."""

    outputs: list[list[torch.Tensor]]
    log: list[Call]


def vllm_config(dcp: int = 1) -> VllmConfig:
    """A real configuration with microbatches on; vLLM's CPU platform switches them off at construction."""
    global _config
    if _config is None:
        _config = VllmConfig()
    config = copy.deepcopy(_config)
    parallel = config.parallel_config
    parallel.data_parallel_size, parallel.enable_dbo, parallel.is_moe_model = 2, True, True
    parallel.decode_context_parallel_size = dcp
    return config


# Its name since vLLM 0.31, and before.
_DCP_LENGTHS = "prepare_dcp_local_seq_lens"
DCP_LENGTHS = _DCP_LENGTHS if hasattr(ubatch_utils, _DCP_LENGTHS) else f"maybe_{_DCP_LENGTHS}"


def dcp_local_seq_lens(out, seq_lens, num_reqs, size, rank, interleave, *, num_reqs_padded=None):
    """In place of vLLM's Triton kernel: tokens [0, interleave) of each round of size * interleave belong to rank 0."""
    rounds, rest = seq_lens // (size * interleave), seq_lens % (size * interleave)
    mine = (rest - rank * interleave).clamp(0, interleave)
    out.zero_()
    out[:num_reqs] = (rounds * interleave + mine)[:num_reqs]
    return out[:num_reqs_padded]


@contextmanager
def harness() -> Iterator[Recorder]:
    """The stand-ins, and the process groups of a single rank."""
    group = SimpleNamespace(world_size=1, rank_in_group=1, all_reduce=lambda x: x, device_communicator=None)
    with (
        fake_cuda.installed() as log,
        patch.object(parallel_state, "_TP", group),
        patch.object(ubatch_utils, "get_dcp_group", lambda: group),
        patch.object(ubatch_utils, DCP_LENGTHS, dcp_local_seq_lens),
        patch.object(cudagraph_utils, "graph_capture", lambda device: nullcontext()),
        patch.object(cudagraph_utils, "is_global_first_rank", lambda: False),
        torch.inference_mode(),
    ):
        yield log


@contextmanager
def drop_in(decide: Callable[[Any], bool] = lambda config: True) -> Iterator[None]:
    """The drop-in in the place of vLLM's threads, for runners that are constructed inside."""
    patching.install(decide=decide)
    try:
        yield
    finally:
        patching.uninstall()


class Drive:
    """A model and the runner of its case, for as many steps as wanted."""

    def __init__(self, case: Case, log: Recorder, *, runnable: Callable[..., Any] | None = None,
                 wrapper_class: type[UBatchWrapper] = UBatchWrapper) -> None:  # fmt: skip
        self.case, self.log = case, log
        self.config = vllm_config(case.dcp)
        self.model = TinyMoe(
            self.config, backend=case.backend, layers=case.layers, output=case.output, shared=case.shared
        )
        #: what the runner calls: the model, or what a test puts in its place
        self.runnable = runnable or self.model
        mode = CUDAGraphMode.FULL if case.mode == "capture" else CUDAGraphMode.NONE
        if case.runner == "V1":
            self.wrapper = wrapper_class(self.runnable, self.config, mode, torch.device("cpu"))
        else:
            names = [f"layer{n}" for n in range(case.layers)]
            caches = SimpleNamespace(kv_cache_groups=[SimpleNamespace(layer_names=names)])
            self.runner = ubatch_utils.UBatchRunner(
                self.config, torch.device("cpu", 0), ModelState(), [], caches, MAX_REQUESTS
            )
        self.graphs: dict[int, Any] = {}
        self.batch(Batch(**case.batch))

    def batch(self, batch: Batch) -> None:
        """The next steps run this one."""
        self.current = batch
        self.inputs = batch.model_inputs(self.case.inputs, self.model.hidden_size)
        if self.case.runner == "V2":
            # V2 hands keyword arguments that it does not know through to the model.
            self.inputs["scale"] = torch.tensor(1.25, dtype=torch.bfloat16)
        batch.fill_context(self.model)

    def use(self, runnable: Callable[..., Any]) -> None:
        """From now on the runner calls `runnable`."""
        self.runnable = runnable
        if self.case.runner == "V1":
            self.wrapper.runnable = runnable

    # One step

    def step(self, mode: CUDAGraphMode = CUDAGraphMode.NONE) -> Any:
        if self.case.runner == "V1":
            with override_forward_context(self.context_v1(mode)):
                return self.wrapper(**self.inputs)
        return self.runner.run(self.runnable, self.inputs, self.prepared())

    def context_v1(self, mode: CUDAGraphMode) -> Any:
        batch, config = self.current, self.config
        slices = batch.slices()
        return create_forward_context(
            batch.metadata_v1(slices),
            config,
            dp_metadata=self.dp_metadata(batch.padded),
            cudagraph_runtime_mode=mode,
            batch_descriptor=BatchDescriptor(batch.padded),
            ubatch_slices=slices,
            slot_mapping=batch.slot_mappings_v1(slices, self.case.layers),
            is_padding=batch.tensors["is_padding"],
        )

    def dp_metadata(self, tokens: int) -> DPMetadata:
        return DPMetadata.make(self.config.parallel_config, tokens, torch.tensor([tokens] * 2))

    def prepared(self, for_capture: bool = False) -> Any:
        batch = self.current
        tables, slots = (batch.tensors["block_table"],), batch.tensors["slots"][None]
        mode = CUDAGraphMode.FULL if for_capture else CUDAGraphMode.NONE
        return self.runner.prepare(batch.input_batch(), tables, slots, mode, for_capture)

    # Capture and replay

    def capture(self) -> Any:
        """V1: the wrapper's first FULL call. V2: `CudaGraphManager.capture`, vLLM's own, with one descriptor."""
        if self.case.runner == "V1":
            return self.step(CUDAGraphMode.FULL)
        manager = cudagraph_utils.ModelCudaGraphManager.__new__(cudagraph_utils.ModelCudaGraphManager)
        tokens = self.current.padded
        descriptor = cudagraph_utils.BatchExecutionDescriptor(
            cg_mode=CUDAGraphMode.FULL, num_tokens=tokens, num_reqs=len(self.current.queries), num_ubatches=2
        )
        manager.__dict__.update(
            vllm_config=self.config, device=torch.device("cpu"), ubatch_runner=self.runner, graphs={}, pool="pool",
            _capture_descs={CUDAGraphMode.FULL: [descriptor]}, _max_full_descs_to_capture=None,
            _capture_mem_samples=None, use_breakable_cg=False, breakable_cg_runner=None,
        )  # fmt: skip
        kept: list[torch.Tensor] = []

        def create_forward_fn(desc: Any, warmup: bool) -> Callable[[CUDAGraphMode], None]:
            state = self.prepared(for_capture=True)
            finish = self.runner.begin_capturable_run(self.runnable, self.inputs, state, for_capture=True)

            def forward(mode: CUDAGraphMode) -> None:
                # Into persistent tensors, as vLLM's ModelCudaGraphManager does it; the copy is part of the graph.
                out = tensors_of(finish())
                if not kept:
                    kept.extend(torch.empty_like(one) for one in out)
                self.store(kept, out)

            return forward

        # What the class adds to this is the model's inputs, which are the case's here.
        cudagraph_utils.CudaGraphManager.capture(manager, create_forward_fn)
        manager.__dict__.update(is_last_pp_rank=True, use_aux_hidden_state_outputs=False, hidden_states=kept[0])
        self.graphs[tokens] = (manager, descriptor, kept)
        return kept

    def store(self, kept: list[torch.Tensor], out: list[torch.Tensor]) -> None:
        def program() -> None:
            for old, new in zip(kept, out, strict=True):
                old.copy_(new)

        self.log.work("store_capture_output")
        if self.log.graph is not None:
            self.log.graph.programs.append(program)
        program()

    def replay(self) -> Any:
        if self.case.runner == "V1":
            return self.step(CUDAGraphMode.FULL)
        self.prepared()
        manager, descriptor, kept = self.graphs[self.current.padded]
        manager.run_fullgraph(descriptor)
        return kept

    def change_inputs(self, seed: int) -> None:
        """New values in the same tensors."""
        other = replace(self.current, seed=seed, contexts=list(self.current.contexts))
        values = other.model_inputs(self.case.inputs, self.model.hidden_size)
        for name, value in values.items():
            if value is not None:
                for old, new in zip(tensors_of(self.inputs[name]), tensors_of(value), strict=True):
                    old.copy_(new)

    def in_turn(self) -> list[torch.Tensor]:
        """The step's microbatches one after the other, outside of any step, merged as vLLM does it."""
        return tensors_of(ubatch_utils.merge_ubatch_outputs(self.microbatches_in_turn([0, 1])))

    def microbatches_in_turn(self, which: list[int]) -> list[Any]:
        """What some of the step's microbatches return, run in that order outside of any step."""
        if self.case.runner == "V1":
            whole = self.context_v1(CUDAGraphMode.NONE)
            parts = whole.ubatch_slices
            contexts = [
                create_forward_context(
                    whole.attn_metadata[i],
                    self.config,
                    dp_metadata=self.dp_metadata(part.num_tokens),
                    slot_mapping=whole.slot_mapping[i],
                    is_padding=whole.is_padding[part.token_slice],
                )
                for i, part in enumerate(parts)
            ]
        else:
            parts, contexts = self.prepared()
        outputs = []
        for index in which:
            with override_forward_context(contexts[index]):
                inputs = ubatch_utils.slice_model_inputs(self.inputs, parts[index].token_slice)
                outputs.append(self.runnable(**inputs))
        return outputs


def run_case(case: Case) -> Outcome:
    """Eager: the step twice, with other inputs the second time. Capture: the same with replays of one capture."""
    with harness() as log:
        drive = Drive(case, log)
        outputs = []

        def keep(out: Any) -> None:
            outputs.append([one.clone() for one in tensors_of(out)])

        if case.mode == "eager":
            keep(drive.step())
            drive.change_inputs(seed=1)
            keep(drive.step())
        else:
            with torch.cuda.stream(fake_cuda.FakeStream(name="capture", recorder=log)):
                drive.capture()
            keep(drive.replay())
            drive.change_inputs(seed=1)
            keep(drive.replay())
        return Outcome(outputs, list(log.log))


def run_in_turn(case: Case) -> list[list[torch.Tensor]]:
    """The outputs that `run_case` has to give."""
    with harness() as log:
        drive = Drive(case, log)
        first = [one.clone() for one in drive.in_turn()]
        drive.change_inputs(seed=1)
        return [first, drive.in_turn()]
