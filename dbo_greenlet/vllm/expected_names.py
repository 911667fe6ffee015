"""Every name and signature of vLLM that the drop-in relies on, as a table.

`since` says from which version on a name has been there. How strictly a signature is compared depends on who calls
whom: what the drop-in replaces is called by vLLM, so it must have exactly these parameters; what the drop-in calls may
have further ones with defaults.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["EXPECTED", "OLDEST_V1", "OLDEST_V2", "Expected"]

OLDEST_V1 = (0, 20)
OLDEST_V2 = (0, 30)

_UBATCHING = "vllm.v1.worker.ubatching"
_WRAPPER = "vllm.v1.worker.gpu_ubatch_wrapper"
_RUNNER = "vllm.v1.worker.gpu.ubatch_utils"
_FORWARD_CONTEXT = "vllm.forward_context"
_MOE_RUNNER = "vllm.model_executor.layers.fused_moe.runner.moe_runner"
_TRANSFORMERS_MOE = "vllm.model_executor.models.transformers.moe"


@dataclass(frozen=True)
class Expected:
    """One line of the table.

    `kind`: "class", "function" (also a method), "property", "closure" (a function with the one free variable `func`,
    whose code is replaced in place), "attribute" (of instances) or "global" (anything the module has under that name).
    `use`: "replaced", "called" or "read". `parameters` holds the names, "*" and "**" included; None where they do not
    matter. `runner`: "V1", "V2" or None for what both need. `otherwise`: another name that will do. `optional`: it may
    be missing, but where it is there it must be as the table says. `lazy`: its module is imported by vLLM only for
    some models and takes seconds, so it is read and not imported for the comparison.
    """

    module: str
    name: str
    kind: str
    use: str
    parameters: tuple[str, ...] | None = None
    since: tuple[int, ...] = OLDEST_V1
    runner: str | None = None
    otherwise: str | None = None
    optional: bool = False
    lazy: bool = False

    @property
    def key(self) -> str:
        """The name as descriptions of a module have it: "Class#name" for an attribute of instances."""
        owner, dot, name = self.name.rpartition(".")
        return f"{owner}#{name}" if self.kind == "attribute" and dot else self.name

    @property
    def dotted(self) -> str:
        return f"{self.module}.{self.name}"


def _methods(module: str, owner: str, use: str, runner: str | None, methods: dict[str, str]) -> list[Expected]:
    since = OLDEST_V2 if runner == "V2" else OLDEST_V1
    return [
        Expected(module, f"{owner}.{name}", "function", use, ("self", *parameters.split()), since, runner)
        for name, parameters in methods.items()
    ]


def _names(
    module: str, kind: str, runner: str | None, names: str, owner: str = "", use: str = "read"
) -> list[Expected]:
    since = OLDEST_V2 if runner == "V2" else OLDEST_V1
    prefix = f"{owner}." if owner else ""
    return [Expected(module, prefix + name, kind, use, None, since, runner) for name in names.split()]


def _functions(module: str, use: str, runner: str | None, functions: dict[str, str]) -> list[Expected]:
    since = OLDEST_V2 if runner == "V2" else OLDEST_V1
    return [
        Expected(module, name, "function", use, tuple(parameters.split()), since, runner)
        for name, parameters in functions.items()
    ]


_CONTEXT_PARAMETERS = (
    "id comm_stream compute_stream forward_context ready_barrier cpu_wait_event cpu_signal_event "
    "gpu_comm_done_event gpu_compute_done_event schedule"
)
_RUNNER_PARAMETERS = "vllm_config device model_state attn_groups kv_cache_config max_num_reqs"
_OPERATOR_PARAMETERS = ("hidden_states", "router_logits", "shared_experts_input", "input_ids", "layer_name")

EXPECTED: tuple[Expected, ...] = (
    # The contexts of the microbatches, and the functions that the model's layers call.
    Expected(_UBATCHING, "UBatchContext", "class", "replaced"),
    *_methods(_UBATCHING, "UBatchContext", "replaced", None, {"_cpu_yield": ""}),
    *_methods(
        _UBATCHING,
        "UBatchContext",
        "called",
        None,
        {
            "__init__": _CONTEXT_PARAMETERS,
            "__enter__": "",
            "__exit__": "exc_type exc_val exc_tb",
            "_restore_context": "",
            "update_stream": "stream",
            "maybe_run_recv_hook": "",
            "yield_": "",
            "yield_and_switch_from_compute_to_comm": "",
            "yield_and_switch_from_comm_to_compute": "",
            "switch_to_comm": "",
            "switch_to_compute": "",
            "switch_to_comm_sync": "",
            "switch_to_compute_sync": "",
        },
    ),
    *_names(
        _UBATCHING,
        "attribute",
        None,
        "id comm_stream compute_stream current_stream forward_context ready_barrier cpu_wait_event cpu_signal_event "
        "gpu_comm_done_event gpu_compute_done_event recv_hook",
        owner="UBatchContext",
    ),
    *_names(
        _UBATCHING,
        "global",
        None,
        "_THREAD_ID_TO_CONTEXT _CURRENT_CONTEXTS _NUM_UBATCHES forward_context current_stream",
    ),
    *_functions(
        _UBATCHING,
        "replaced",
        None,
        {
            "dbo_enabled": "",
            "dbo_current_ubatch_id": "",
            "dbo_register_recv_hook": "recv_hook",
            "dbo_get_previous_event": "func *args **kwargs",
        },
    ),
    Expected(_UBATCHING, "dbo_current_ubatch_token_offset", "function", "replaced", (), since=(0, 33), optional=True),
    *_names(
        _UBATCHING,
        "closure",
        None,
        "dbo_maybe_run_recv_hook dbo_yield dbo_yield_and_switch_from_compute_to_comm "
        "dbo_yield_and_switch_from_comm_to_compute dbo_switch_to_comm dbo_switch_to_compute dbo_switch_to_comm_sync "
        "dbo_switch_to_compute_sync",
        use="replaced",
    ),
    *_functions(
        _UBATCHING,
        "called",
        None,
        {
            "make_ubatch_contexts": (
                "num_micro_batches compute_stream comm_stream forward_contexts ready_barrier schedule"
            )
        },
    ),
    *_names(_FORWARD_CONTEXT, "global", None, "_forward_context"),
    *_functions(
        _FORWARD_CONTEXT,
        "called",
        None,
        {
            "get_forward_context": "",
            "is_forward_context_available": "",
            "override_forward_context": "forward_context",
        },
    ),
    *_functions("vllm.utils.torch_utils", "called", None, {"current_stream": ""}),
    *_names("vllm.config", "global", "V1", "CUDAGraphMode"),
    # The operators through which a model reaches its MoE layers. Arguments are handed on as they come, so parameters
    # that follow (there is one more since 0.22) do not matter.
    Expected(_MOE_RUNNER, "_moe_forward", "function", "handed on", _OPERATOR_PARAMETERS),
    Expected(_MOE_RUNNER, "_moe_forward_shared", "function", "handed on", _OPERATOR_PARAMETERS),
    Expected(
        _TRANSFORMERS_MOE,
        "_transformers_moe_forward",
        "function",
        "handed on",
        ("hidden_states", "topk_ids", "topk_weights", "layer_name"),
        otherwise="transformers_moe_forward",  # its name before 0.26
        lazy=True,
    ),
    # The V1 runner.
    Expected(_WRAPPER, "UBatchWrapper", "class", "replaced", runner="V1"),
    *_methods(
        _WRAPPER,
        "UBatchWrapper",
        "replaced",
        "V1",
        {
            "__init__": "runnable vllm_config runtime_mode device",
            "__call__": "*args **kwargs",
            "_run_ubatches": "ubatch_metadata model",
            "_capture_ubatches": "ubatch_metadata model",
        },
    ),
    *_names(_WRAPPER, "property", "V1", "graph_pool", owner="UBatchWrapper"),
    *_names(
        _WRAPPER,
        "attribute",
        "V1",
        "runnable vllm_config comm_stream ready_barrier cudagraphs sm_control device",
        owner="UBatchWrapper",
    ),
    *_names(
        _WRAPPER,
        "attribute",
        "V1",
        "context input_ids positions inputs_embeds intermediate_tensors num_tokens",
        owner="UbatchMetadata",
    ),
    *_names(_WRAPPER, "attribute", "V1", "cudagraph ubatch_metadata outputs", owner="CUDAGraphMetaData"),
    *_names(_WRAPPER, "class", "V1", "UbatchMetadata CUDAGraphMetaData"),
    *_names(
        _WRAPPER, "global", "V1", "set_graph_pool_id get_offloader override_forward_context current_platform torch"
    ),
    Expected(
        _WRAPPER,
        "_cat_ubatch_outputs",
        "function",
        "called",
        ("sorted_results",),
        since=(0, 24),
        runner="V1",
        optional=True,
    ),
    # The V2 runner.
    Expected(_RUNNER, "UBatchRunner", "class", "replaced", since=OLDEST_V2, runner="V2"),
    *_methods(
        _RUNNER,
        "UBatchRunner",
        "replaced",
        "V2",
        {
            "__init__": _RUNNER_PARAMETERS,
            "begin_capturable_run": "model model_inputs ubatch_state for_capture",
            "abort_pending_run": "",
        },
    ),
    *_methods(_RUNNER, "UBatchRunner", "called", "V2", {"run": "model model_inputs ubatch_state"}),
    *_names(
        _RUNNER,
        "attribute",
        "V2",
        "vllm_config parallel_config num_ubatches device comm_stream capture_stream ready_barrier _pending_finish "
        "sm_control",
        owner="UBatchRunner",
    ),
    *_names(_RUNNER, "attribute", "V2", "slices forward_contexts", owner="UBatchState"),
    *_functions(
        _RUNNER,
        "called",
        "V2",
        {
            "maybe_build_ubatch_runner": _RUNNER_PARAMETERS,
            "slice_model_inputs": "model_inputs token_slice",
            "merge_ubatch_outputs": "outputs",
        },
    ),
    *_names(_RUNNER, "global", "V2", "make_ubatch_contexts override_forward_context current_stream"),
)
