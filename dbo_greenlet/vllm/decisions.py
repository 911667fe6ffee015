"""What vLLM decided for each step, and why: an observer of its vote, which never changes it.

Every data-parallel step of vLLM begins with a vote of the ranks. `install` puts a function around it that lets it run,
looks at what the ranks sent each other where that lies in host memory (reading it from a device would wait for the
device), and counts the decision with its reason (reasons.py).

Nothing here raises into vLLM. What goes wrong in observing is logged once, and the observer is taken off.
"""

from __future__ import annotations

import functools
import inspect
import logging
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from time import perf_counter_ns
from typing import Any

from dbo_greenlet.batching.vote import RankVote, Veto
from dbo_greenlet.vllm import reasons
from dbo_greenlet.vllm.counters import counters
from dbo_greenlet.vllm.model_calls import around_forward_context, around_replay

__all__ = ["StepDecision", "install", "last", "listeners", "uninstall"]

logger = logging.getLogger("vllm.plugins.dbo_greenlet")  # below vLLM's own logger: its handlers and level apply

V1_VOTE = "vllm.v1.worker.dp_utils"
V1_RUNNER = "vllm.v1.worker.gpu_model_runner"
V2_VOTE = "vllm.v1.worker.gpu.dp_utils"
V2_RUNNER = "vllm.v1.worker.gpu.model_runner"
V2_GRAPHS = "vllm.v1.worker.gpu.cudagraph_utils"
WORKER = "vllm.v1.worker.gpu_worker"


@dataclass(frozen=True)
class StepDecision:
    """Whether vLLM splits a step into microbatches.

    Attributes:
        split: vLLM's own decision.
        reason: why, as a stable word (reasons.py).
        tokens: this rank's tokens, without padding where vLLM tells them.
        padded: the tokens that this rank runs, with all padding.
        tokens_of_ranks: each rank's `tokens`, where they could be read without waiting for a device; else None.
        voted: nanoseconds (`time.perf_counter_ns`) around the ranks' exchange, where the host waited for all of them.
        requests: number of this rank's requests, where vLLM tells.
    """

    split: bool
    reason: str
    tokens: int
    padded: int
    tokens_of_ranks: tuple[int, ...] | None
    voted: tuple[int, int] | None = field(default=None, compare=False)
    requests: int | None = field(default=None, compare=False)


listeners: list[Callable[[StepDecision], None]] = []


class _Now:
    """What the observers of one process know about the step that it is in. vLLM runs its steps on one thread."""

    def __init__(self) -> None:
        self.last: StepDecision | None = None
        self.rows: reasons.Rows | None = None  # what the ranks sent in the vote that is running
        self.voted: tuple[int, int] | None = None  # when they did
        self.requests: int | None = None  # of the batch that the vote is about
        self.starting_up = False
        self.dummy_run = False
        self.shared_prefix = False  # the runner has just refused to split for that reason


_now = _Now()
# (owner, attribute, what was there, what we put there), in the order of replacement
_replaced: list[tuple[Any, str, Any, Any]] = []
# Changed by each `uninstall`: a function that others still hold (vLLM imports by name) knows by it that it is retired.
_generation = object()


def last() -> StepDecision | None:
    """The decision of the latest step of this process, or None before the first."""
    return _now.last


def install() -> None:
    """Observe vLLM's vote in this process.

    Observed is what is loaded: call it where the model runner exists, and again for what is loaded later; what is
    observed already stays so. A name that this vLLM does not have is not observed.
    """
    try:
        _observe_v1_vote()
        _observe_v2_vote()
        for runner in (V1_RUNNER, V2_RUNNER):
            _replace(_attribute(runner, "GPUModelRunner"), "_dummy_run", _flagging("dummy_run"))
        _replace(_attribute(V1_RUNNER, "GPUModelRunner"), "_determine_batch_execution_and_padding", _around_v1_dispatch)
        for name in ("determine_available_memory", "compile_or_warm_up_model"):
            _replace(_attribute(WORKER, "Worker"), name, _flagging("starting_up"))
        _replace(_attribute(V1_RUNNER, "GPUModelRunner"), "_allow_microbatching", _around_prefix_check)
        _replace(_attribute(V2_GRAPHS, "ModelCudaGraphManager"), "run_fullgraph", _while_on(around_replay))
        _replace(sys.modules.get(V2_RUNNER), "set_forward_context", _while_on(around_forward_context))
    except Exception as error:
        _give_up("installing the observer of the vote", error)


def uninstall() -> None:
    """Put back what `install` replaced, except what somebody has replaced since; forget the last decision."""
    global _generation, _now
    _generation, _now = object(), _Now()
    while _replaced:
        owner, name, original, ours = _replaced.pop()
        if _own_attribute(owner, name) is ours:
            setattr(owner, name, original)


def _observe_v1_vote() -> None:
    votes = sys.modules.get(V1_VOTE)
    if votes is None or not {"allow_microbatching", "uniform_decode"} <= _parameters(
        votes, "coordinate_batch_across_dp"
    ):
        return
    _replace(votes, "_run_ar", _around_v1_exchange)
    for module in (votes, sys.modules.get(V1_RUNNER)):
        _replace(module, "coordinate_batch_across_dp", _around_v1_vote)


def _observe_v2_vote() -> None:
    votes = sys.modules.get(V2_VOTE)
    # Before 0.30 the newer runner has a vote, but not about microbatches.
    if votes is None or not {"allow_ubatching", "parallel_config"} <= _parameters(votes, "dispatch_cg_and_sync_dp"):
        return
    _replace(votes, "dist", _Exchange)
    for module in (votes, sys.modules.get(V2_RUNNER)):
        _replace(module, "dispatch_cg_and_sync_dp", _around_v2_vote)


# --- the older runner's vote --------------------------------------------------------------------------------------


def _around_v1_exchange(original: Callable[..., Any]) -> Callable[..., Any]:
    generation = _generation

    @functools.wraps(original)
    def run_ar(*args: Any, **kwargs: Any) -> Any:
        begin = perf_counter_ns()
        tensor = original(*args, **kwargs)
        _keep_rows(generation, tensor, begin)
        return tensor

    return run_ar


def _around_v1_vote(original: Callable[..., Any]) -> Callable[..., Any]:
    generation, names = _generation, list(inspect.signature(original).parameters)

    @functools.wraps(original)
    def coordinate_batch_across_dp(*args: Any, **kwargs: Any) -> Any:
        _now.rows = _now.voted = None
        answer = original(*args, **kwargs)
        try:
            if generation is _generation:
                _decided_v1(dict(zip(names, args, strict=False)) | kwargs, answer)
        except Exception as error:
            _give_up("observing the vote", error)
        return answer

    return coordinate_batch_across_dp


def _decided_v1(arguments: dict[str, Any], answer: tuple[Any, ...]) -> None:
    config = arguments["parallel_config"]
    shared_prefix, _now.shared_prefix = _now.shared_prefix, False
    if not config.use_ubatching:
        return
    split, after_padding = bool(answer[0]), answer[1]
    allowed = arguments["allow_microbatching"]
    tokens = arguments["num_tokens_unpadded"]
    padded = arguments.get("num_tokens_padded")
    padded = tokens if padded is None else padded
    rank = config.data_parallel_rank
    veto = Veto.NONE if allowed else (Veto.SHARED_PREFIX if shared_prefix else Veto.SWITCHED_OFF)
    own = RankVote(tokens, padded, min(1, tokens) if arguments.get("uniform_decode") else 0, veto)
    of_ranks = after_padding.tolist() if after_padding is not None and after_padding.is_cpu else None
    rows = _now.rows
    if rows is not None and not (len(rows) >= 3 and rows[0][rank] == tokens and rows[1][rank] == padded):
        rows = None  # of a layout that we do not know
    _decided(
        split,
        lambda: reasons.name_v1(own, rank, rows, reasons.vote_settings(config, "v1"), split, max(of_ranks or [padded])),
        tokens=tokens,
        padded=of_ranks[rank] if of_ranks else padded,
        tokens_of_ranks=rows[0] if rows else None,
        ranks=config.data_parallel_size,
        veto=veto,
    )


def _around_v1_dispatch(original: Callable[..., Any]) -> Callable[..., Any]:
    """Of the method that votes: the vote itself is not told of the requests."""
    names = list(inspect.signature(original).parameters)

    @functools.wraps(original)
    def determine_batch_execution_and_padding(*args: Any, **kwargs: Any) -> Any:
        given = kwargs.get("num_reqs", dict(zip(names, args, strict=False)).get("num_reqs"))
        _now.requests = given if isinstance(given, int) else None
        try:
            return original(*args, **kwargs)
        finally:
            _now.requests = None

    return determine_batch_execution_and_padding


def _around_prefix_check(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def allow_microbatching(*args: Any, **kwargs: Any) -> Any:
        allowed = original(*args, **kwargs)
        _now.shared_prefix = not allowed
        return allowed

    return allow_microbatching


# --- the newer runner's vote --------------------------------------------------------------------------------------


class _Exchange:
    """Stands for torch.distributed inside the module of the vote: the all-reduce is its own, and its result is kept."""

    def __init__(self, original: Any) -> None:
        self._original = original
        self._generation = _generation

    def __getattr__(self, name: str) -> Any:
        return getattr(self._original, name)

    def all_reduce(self, tensor: Any, *args: Any, **kwargs: Any) -> Any:
        begin = perf_counter_ns()
        work = self._original.all_reduce(tensor, *args, **kwargs)
        _keep_rows(self._generation, tensor, begin)
        return work


def _around_v2_vote(original: Callable[..., Any]) -> Callable[..., Any]:
    generation, names = _generation, list(inspect.signature(original).parameters)
    reused = "dp_sync_state" if "dp_sync_state" in names else "dp_sync"  # its name in 0.30

    @functools.wraps(original)
    def dispatch_cg_and_sync_dp(*args: Any, **kwargs: Any) -> Any:
        _now.rows = _now.voted = None
        answer = original(*args, **kwargs)
        try:
            arguments = dict(zip(names, args, strict=False)) | kwargs
            # With an earlier answer there is no vote: a drafter goes by the decision of its step.
            if generation is _generation and arguments.get(reused) is None:
                _now.requests = arguments["num_reqs"]
                _decided_v2(arguments, answer[0])
        except Exception as error:
            _give_up("observing the vote", error)
        return answer

    return dispatch_cg_and_sync_dp


def _decided_v2(arguments: dict[str, Any], description: Any) -> None:
    config = arguments.get("parallel_config")
    if config is None or not config.use_ubatching:  # a drafter's own batch comes without the config
        return
    split = description.num_ubatches > 1
    tokens, rank, ranks = arguments["num_tokens"], arguments["dp_rank"], arguments["dp_size"]
    uniform = (arguments["uniform_token_count"] or 0) if arguments.get("uniform_decode") else 0
    veto = Veto.NONE if arguments.get("allow_ubatching") else Veto.SWITCHED_OFF
    own = RankVote(tokens, tokens, min(uniform, tokens), veto)
    rows = _now.rows
    if rows is not None and not (len(rows) >= 5 and rows[0][rank] == tokens and rows[4][rank] == (veto is Veto.NONE)):
        rows = None
    _decided(
        split,
        lambda: reasons.name_v2(
            own, rank, rows, reasons.vote_settings(config, "v2"), split, max(rows[0]) if rows else tokens
        ),
        tokens=tokens,
        padded=description.num_tokens,
        tokens_of_ranks=rows[0] if rows else None,
        ranks=ranks,
        veto=veto,
    )


# --- steps that serve nobody --------------------------------------------------------------------------------------


def _flagging(flag: str) -> Callable[[Any], Any]:
    """Of a method: that the process is inside it."""

    def around(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def method(*args: Any, **kwargs: Any) -> Any:
            now = _now
            outer = getattr(now, flag)
            setattr(now, flag, True)
            try:
                return original(*args, **kwargs)
            finally:
                setattr(now, flag, outer)

        return method

    return around


# --- common to both -----------------------------------------------------------------------------------------------


def _decided(
    split: bool,
    explain: Callable[[], str],
    *,
    tokens: int,
    padded: int,
    tokens_of_ranks: tuple[int, ...] | None,
    ranks: int,
    veto: Veto,
) -> None:
    if ranks == 1:
        reason = reasons.ONE_RANK
    elif _now.starting_up:
        reason = reasons.WARM_UP
    elif _now.dummy_run and not split:
        reason = reasons.RANK_IDLE  # a dummy run of a server that serves is an idle rank's share of a step
    elif veto is Veto.SHARED_PREFIX and not split:
        reason = reasons.SHARED_PREFIX
    else:
        reason = explain()
    decision = StepDecision(split, reason, tokens, padded, tokens_of_ranks, _now.voted, _now.requests)
    _now.last = decision
    counters.decided(split, reason)
    for listener in tuple(listeners):
        try:
            listener(decision)
        except Exception as error:
            if listener in listeners:
                listeners.remove(listener)
            logger.warning("dbo_greenlet: a listener to the decisions failed and is taken off: %r", error)


def _keep_rows(generation: object, tensor: Any, begin: int) -> None:
    """Copied at once: vLLM pads the numbers in place. For a tensor of a device the host has not waited yet."""
    try:
        if generation is _generation:
            end = perf_counter_ns()
            _now.rows, _now.voted = None, None
            if tensor.is_cpu:
                _now.rows, _now.voted = tuple(map(tuple, tensor.tolist())), (begin, end)
    except Exception as error:
        _give_up("reading the vote", error)


def _give_up(doing: str, error: Exception) -> None:
    uninstall()
    logger.warning("dbo_greenlet: steps are not counted by reason from here on; %s failed: %r", doing, error)


def _while_on(around: Callable[[Any, Callable[[], bool]], Any]) -> Callable[[Any], Any]:
    """`around` of a function that asks whether it is retired."""
    generation = _generation
    return lambda original: around(original, lambda: generation is _generation)


def _replace(owner: Any, name: str, around: Callable[[Any], Any]) -> None:
    """Put `around(original)` in the original's place, unless there is none or it is ours already."""
    original = _own_attribute(owner, name)
    if original is None or any(original is ours for _, _, _, ours in _replaced):
        return
    ours = around(original)
    setattr(owner, name, ours)
    _replaced.append((owner, name, original, ours))


def _own_attribute(owner: Any, name: str) -> Any:
    """What the owner itself defines: an inherited method must not be copied into a subclass."""
    return None if owner is None else vars(owner).get(name)


def _attribute(module: str, name: str) -> Any:
    return getattr(sys.modules.get(module), name, None)


def _parameters(module: Any, function: str) -> set[str]:
    found = getattr(module, function, None)
    return set() if found is None else set(inspect.signature(found).parameters)
