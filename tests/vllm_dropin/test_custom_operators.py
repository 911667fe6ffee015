"""vLLM's MoE operators with their yields inside: eager, compiled, and compiled for the first time inside a step.

A plain greenlet switch below `torch.ops.vllm.moe_forward` aborts the process; the drop-in calls the operator's Python
function directly while a microbatch runs. The models here are compiled whole: the yields are in the middle of a graph.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("vllm", reason="needs vLLM, whose operators are called here (make test-vllm)")

import torch

from tests.thread_state.programs import snapshot
from tests.vllm_dropin import model as models
from tests.vllm_dropin.drive import Case, Drive, drop_in, harness
from tests.vllm_dropin.fake_cuda import Recorder
from tests.vllm_dropin.model import EXPERTS, HIDDEN, TOP_K, moe_layer

pytestmark = pytest.mark.vllm

LAYERS = 2


class Counting:
    """A backend that runs graphs as they are and keeps their code."""

    def __init__(self) -> None:
        self.graphs: list[str] = []

    def __call__(self, graph: torch.fx.GraphModule, inputs: Any) -> Callable[..., Any]:
        self.graphs.append(graph.code)
        return graph.forward


class Plain(torch.nn.Module):
    """Embedding, then layers of elementwise work, gate and MoE: nothing in it but the operators is opaque."""

    def __init__(self, config: Any, backend: str, shared: bool) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(3)
        hidden = HIDDEN[backend]
        self.embedding = models._random(generator, 32, hidden)
        self.gates = [models._random(generator, EXPERTS, hidden) * 0.1 for _ in range(LAYERS)]
        self.layers = torch.nn.ModuleList(
            moe_layer(f"plain{n}", backend, config, generator, slots=8, shared=shared) for n in range(LAYERS)
        )

    def forward(self, input_ids, positions, intermediate_tensors=None, inputs_embeds=None, scale=None):
        x = self.embedding[input_ids.long()] + torch.sin(positions.float())[:, None].to(torch.bfloat16)
        for gate, moe in zip(self.gates, self.layers, strict=True):
            x = x * 1.25
            x = x + moe(x.clone(), x.float() @ gate.float().T)
        return x


class Compiled(Drive):
    """A drive whose runner calls a compiled `Plain`."""

    def __init__(self, case: Case, log: Recorder, backend: Any) -> None:
        torch.compiler.reset()
        super().__init__(case, log)
        self.plain = Plain(self.config, case.backend, case.shared)
        self.compiled = torch.compile(self.plain, backend=backend, fullgraph=True, dynamic=False)
        self.use(self.compiled)

    def in_turn_with(self, call: Callable[..., Any]) -> torch.Tensor:
        self.use(call)
        try:
            return self.in_turn()[0].clone()
        finally:
            self.use(self.compiled)


def check(case: Case, backend: Any, first: str) -> None:
    with harness() as log:
        drive = Compiled(case, log, backend)
        eager = drive.in_turn_with(drive.plain)
        if first == "outside":
            drive.in_turn_with(drive.compiled)
        before = snapshot()
        steps = [drive.step().clone()]
        log.log.clear()
        steps.append(drive.step().clone())
        step_log = list(log.log)
        assert snapshot() == before
        alone = drive.in_turn_with(drive.compiled)
        # Compiled and eager may round differently; interleaved and one after the other may not.
        assert all(torch.equal(step, alone) for step in steps)
        assert (alone.float() - eager.float()).abs().max() < 0.05 * eager.float().abs().max()
        assert not alone.isnan().any()
        # They were interleaved, layer by layer.
        order = [call.who for call in step_log if call.what == "experts"]
        assert order == ["0", "1"] * LAYERS
        assert log.step_threads.started == []


OPERATORS = pytest.mark.parametrize("shared", [False, True], ids=["moe_forward", "moe_forward_shared"])


@OPERATORS
@pytest.mark.parametrize("first", ["outside", "inside"])
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("case", [Case("V1", "LL"), Case("V2", "HT")], ids=str)
def test_compiled_models_yield(case: Case, backend: str, first: str, shared: bool) -> None:
    with drop_in():
        check(Case(case.runner, case.backend, shared=shared), backend, first)


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs g++")
def test_a_model_compiled_by_inductor_yields() -> None:
    """First compiled inside the microbatches, as V1's profile run does it."""
    with drop_in():
        check(Case("V1", "LL"), "inductor", "inside")


@OPERATORS
def test_a_step_compiles_nothing_anew_and_the_operator_stays_opaque(shared: bool) -> None:
    backend = Counting()
    with drop_in(), harness() as log:
        drive = Compiled(Case(shared=shared), log, backend)
        drive.in_turn_with(drive.compiled)
        assert len(backend.graphs) == 1
        for _ in range(3):
            drive.step()
            drive.in_turn_with(drive.compiled)
        assert len(backend.graphs) == 1
        name = "torch.ops.vllm.moe_forward_shared" if shared else "torch.ops.vllm.moe_forward"
        assert backend.graphs[0].count(f"{name}(") == LAYERS


# The operator of the transformers backend, round the other one


class RouterOfModel(models.Router):
    """Takes the ids that the model chose, as vLLM's transformers backend routes; the "logits" are the weights."""

    def __init__(self, state: Any) -> None:
        super().__init__(TOP_K, EXPERTS)
        self.state = state

    def _compute_routing(self, hidden_states, router_logits, indices_type, *, input_ids=None):
        return router_logits, self.state.topk_ids.to(indices_type)


class TransformersModel(torch.nn.Module):
    def __init__(self, config: Any, backend: str) -> None:
        super().__init__()
        from vllm.model_executor.models.transformers.moe import TransformersMoERunner, TransformersMoEState

        generator = torch.Generator().manual_seed(3)
        self.embedding = models._random(generator, 32, HIDDEN[backend])
        self.layers = []
        for n in range(LAYERS):
            state = TransformersMoEState()
            self.layers.append(
                moe_layer(f"transformers{n}", backend, config, generator, slots=8, shared=False,
                          runner_class=TransformersMoERunner, router=RouterOfModel(state), moe_state=state)
            )  # fmt: skip

    def forward(self, input_ids, positions, intermediate_tensors=None, inputs_embeds=None, scale=None):
        x = self.embedding[input_ids.long()]
        for layer in self.layers:
            weights, ids = torch.softmax(x[:, :EXPERTS].float(), dim=-1).topk(TOP_K, dim=-1)
            x = x + layer(x.clone(), ids, weights)
        return x


@pytest.mark.parametrize("backend", ["LL", "HT"])
@pytest.mark.parametrize("runner", ["V1", "V2"])
@pytest.mark.parametrize("compiler", [None, "aot_eager"])
def test_the_operator_of_the_transformers_backend_yields(runner: str, backend: str, compiler: str | None) -> None:
    pytest.importorskip("transformers")
    with drop_in(), harness() as log:
        torch.compiler.reset()
        drive = Drive(Case(runner, backend), log)
        model = TransformersModel(drive.config, backend)
        call = model if compiler is None else torch.compile(model, backend=compiler, fullgraph=True, dynamic=False)
        drive.use(call)
        steps = [drive.step().clone() for _ in range(2)]
        assert log.step_threads.started == []
        alone = drive.in_turn()[0]
        assert all(torch.equal(step, alone) for step in steps)
        assert not alone.isnan().any()
