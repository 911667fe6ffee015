"""What a job is: its settings, its requests, and the passes over them."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..errors import ConfigurationError, TraceFileError
from ..policies import policy_from_text
from ..schedule import Schedule
from .requests import Request

__all__ = [
    "CLOSE_CALLS",
    "GRAPH_RUNS",
    "PACKAGED_MODEL",
    "RUN_OF_CARRIER",
    "JobSpec",
    "Pass",
    "RecordedStep",
    "Settings",
    "default_token_budget",
    "passes_of",
]

PACKAGED_MODEL = Path(__file__).resolve().parent.parent / "assets" / "checkpoint"

ALL2ALLS = ("auto", "loopback", "torch", "nccl", "deepep_ll", "deepep_ht")
DEEPEP = ("deepep_ll", "deepep_ht")
DEVICES = ("cpu", "cuda")
DTYPES = ("float32", "bfloat16")
# Of more than two microbatches. Two do so under every policy: each, before it sends, receives what the other has sent.
ONE_RECEIVE_AT_A_TIME = ("round_robin", "in_turn")
RUN_OF_CARRIER = {"greenlet": "dbo", "thread": "thread"}
# The runs whose decode steps are graphs, and the eager ones they are compared with.
GRAPH_RUNS = {"dbo-graph": "dbo", "unsplit-graph": "unsplit"}

# Where the two best logits are closer than this, rounding may decide between them: two logits that are each off by d
# can change places where they are 2 d apart. Between split and unsplit, over 3,600 samples on an H200, d was up to 2e-5
# in float32 and, in bfloat16, up to 0.12 over DeepEP's low-latency kernels (logits of 8 to 16 are 0.06 apart).
CLOSE_CALLS = {"float32": 1e-3, "bfloat16": 0.25}

# The default, and what DeepEP's low-latency kernels take at once on any number of ranks: less than half of their send
# queue, in pairs where there are two ranks. (Four ranks could have 511, and a longer queue more.)
DEFAULT_TOKEN_BUDGET = 512
LOW_LATENCY_TOKENS = 510
SMALLEST_GRAPH = 8

MAX_THREADS = 1024
# Seconds; far beyond any use, and within what sockets and stores can count.
MAX_RANK_TIMEOUT = 1e6

GRAPH_NEEDS = (
    "needs a CUDA device and an all-to-all that reads no counts on the host while a step is captured "
    "(--device cuda --all2all nccl or deepep_ll)"
)

# The split steps that the other carrier runs, to compare host time per yield.
COMPARED_STEPS = 8


@dataclass(frozen=True)
class Settings:
    """What must be equal on every rank and in a replay.

    Attributes:
        ranks: processes, each with its block of the routed experts and its share of the requests.
        num_microbatches, decode_threshold, prefill_threshold, rule: see `batching.VoteSettings`.
        policy: who goes next, as text (`policies.names`). In graphs it has its say when they are captured.
        carrier, strict: see `Scheduler`.
        all2all: "torch" (torch.distributed with messages of exact size, also for one rank), "nccl" (torch.distributed
            on GPUs with messages of one size, so that steps can be graphs), "deepep_ll" and "deepep_ht" (DeepEP's
            low-latency and high-throughput kernels), "loopback" (one rank) or "auto" (the loopback for one rank, torch
            for several).
        device, dtype: where the model runs and in which precision. On "cuda", rank r has GPU r modulo their number.
        max_new_tokens: most tokens to generate for a request.
        max_requests: requests that a rank runs at once (KV cache rows).
        token_budget: most tokens in a step of a rank, at least `max_requests`.
        threads: torch's intra-op threads of a rank.
        rank_timeout: seconds for which a rank may keep the others waiting before it counts as stalled.
        cudagraph_sizes: token counts to which decode steps are padded and for which graphs are captured, as whole
            numbers separated by commas; "auto" takes powers of two from 8 up to `max_requests`, "none" has no graphs.
            Matters on a GPU only.
        gpu_timeline: write into the trace when each slice of a split step ran on the GPU, in graphs too.
        memory: write into the trace what each operation of a split step reads, writes, frees and holds.
    """

    ranks: int = 2
    num_microbatches: int = 2
    decode_threshold: int = 8
    prefill_threshold: int = 16
    rule: str = "v1"
    policy: str = "round_robin"
    carrier: str = "greenlet"
    strict: bool = False
    all2all: str = "auto"
    device: str = "cpu"
    dtype: str = "float32"
    max_new_tokens: int = 40
    max_requests: int = 64
    token_budget: int = DEFAULT_TOKEN_BUDGET
    threads: int = 1
    rank_timeout: float = 60.0
    cudagraph_sizes: str = "auto"
    gpu_timeline: bool = False
    memory: bool = False

    def check(self) -> None:
        """What can be said without torch and without the model.

        Raises:
            ConfigurationError: naming the option, its value and the values that work.
        """
        for flag, value in (
            ("--ranks", self.ranks),
            ("--max-new-tokens", self.max_new_tokens),
            ("--max-num-seqs", self.max_requests),
            ("--max-num-batched-tokens", self.token_budget),
        ):
            if value < 1:
                raise ConfigurationError(f"{flag} is {value}; use 1 or more")
        if self.token_budget < self.max_requests:
            raise ConfigurationError(
                f"--max-num-batched-tokens is {self.token_budget}, but {self.max_requests} running requests "
                "(--max-num-seqs) have a token each in a step; raise the one or lower the other"
            )
        if not 1 <= self.threads <= MAX_THREADS:
            raise ConfigurationError(f"--threads is {self.threads}; use 1 to {MAX_THREADS}")
        if not (math.isfinite(self.rank_timeout) and 0 < self.rank_timeout <= MAX_RANK_TIMEOUT):
            raise ConfigurationError(
                f"--rank-timeout is {self.rank_timeout}; use more than 0 and at most {MAX_RANK_TIMEOUT:.0f} seconds"
            )
        for flag, chosen, known in (
            ("--carrier", self.carrier, tuple(RUN_OF_CARRIER)),
            ("--all2all", self.all2all, ALL2ALLS),
            ("--device", self.device, DEVICES),
            ("--dtype", self.dtype, DTYPES),
        ):
            if chosen not in known:
                raise ConfigurationError(f"{flag} is {chosen!r}; use one of {', '.join(known)}")
        policy_from_text(self.policy, setting="--policy")
        n = self.num_microbatches
        if not 1 <= n <= min(self.decode_threshold, self.prefill_threshold) or self.rule not in ("v1", "v2"):
            # Something is wrong with the vote, and what it is is said in one place, which needs torch.
            from ..batching import VoteSettings

            VoteSettings(n, self.decode_threshold, self.prefill_threshold, self.rule)
        if self.all2all == "loopback" and self.ranks > 1:
            raise ConfigurationError(
                f"--all2all loopback serves one rank, --ranks is {self.ranks}; use --all2all torch"
            )
        self._check_gpu()
        self.graph_sizes  # noqa: B018 - for what it raises

    def _check_gpu(self) -> None:
        chosen = f"--all2all {self.all2all}"
        if self.all2all in ("nccl", *DEEPEP) and self.device != "cuda":
            raise ConfigurationError(
                f"{chosen} runs on GPUs, --device is {self.device}; use --device cuda, or --all2all torch"
            )
        if self.gpu_timeline and self.device != "cuda":
            raise ConfigurationError(f"--gpu-timeline times a GPU, --device is {self.device}; use --device cuda")
        if self.all2all not in DEEPEP:
            return
        if self.ranks < 2:
            raise ConfigurationError(
                f"{chosen} connects two ranks or more, --ranks is {self.ranks}; use --ranks 2, or --all2all loopback"
            )
        if self.dtype != "bfloat16":
            raise ConfigurationError(f"{chosen} sends bfloat16, --dtype is {self.dtype}; use --dtype bfloat16")
        if self.all2all == "deepep_ll" and self.token_budget > LOW_LATENCY_TOKENS:
            raise ConfigurationError(
                f"--max-num-batched-tokens is {self.token_budget}, but DeepEP's low-latency kernels take at most "
                f"{LOW_LATENCY_TOKENS} tokens of a rank at once; use {LOW_LATENCY_TOKENS} or less"
            )
        if self.all2all == "deepep_ll" and self.num_microbatches > 2 and self.policy not in ONE_RECEIVE_AT_A_TIME:
            raise ConfigurationError(
                f"--policy is {self.policy!r}: DeepEP's low-latency kernels take one receive at a time, to which "
                f"{self.num_microbatches} microbatches (--num-microbatches) keep only under "
                f"{' or '.join(ONE_RECEIVE_AT_A_TIME)}"
            )

    @property
    def graph_sizes(self) -> tuple[int, ...]:
        """`cudagraph_sizes` as numbers, ascending; () where there are to be no graphs.

        Raises:
            ConfigurationError: no list of token counts that a step can have.
        """
        if self.cudagraph_sizes == "none":
            return ()
        if self.cudagraph_sizes == "auto":
            powers = [1 << n for n in range(SMALLEST_GRAPH.bit_length() - 1, self.max_requests.bit_length())]
            # The largest decode step has a token of each request that runs.
            return tuple(sorted({*powers, self.max_requests}))
        words = self.cudagraph_sizes.split(",")
        # isdecimal alone would also take the digits of other scripts.
        if not all(word.strip().isascii() and word.strip().isdecimal() and int(word) > 0 for word in words):
            raise ConfigurationError(
                f"--cudagraph-sizes is {self.cudagraph_sizes!r}; use token counts such as 8,16,32, or auto, or none"
            )
        sizes = tuple(sorted({int(word) for word in words}))
        if sizes[-1] > self.token_budget:
            raise ConfigurationError(
                f"--cudagraph-sizes holds {sizes[-1]}, but no step has more than {self.token_budget} tokens "
                "(--max-num-batched-tokens); leave it out"
            )
        return sizes

    @property
    def no_graphs(self) -> str | None:
        """Why no step is to run as a graph, as far as the settings tell, as a clause; None where they do not object."""
        if self.device != "cuda":
            return GRAPH_NEEDS
        if not self.graph_sizes:
            return "switched off (--cudagraph-sizes none)"
        if self.carrier != "greenlet":
            return "needs --carrier greenlet: a step is captured on one thread"
        if self.memory:
            return "a replay has no operations of its own to record (--memory)"
        return None

    def as_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Settings:
        """Settings as a trace holds them; keys that this version does not know are passed over.

        Traces of earlier versions lack some (`_BEFORE`), and are read as what those versions did.

        Raises:
            TraceFileError: a missing key, or a value of another type. The message names no file.
        """
        values: dict[str, Any] = {}
        for each in dataclasses.fields(cls):
            if each.name not in data and each.name not in _BEFORE:
                raise TraceFileError(f'the settings in the header lack "{each.name}"')
            value, kind = data.get(each.name, _BEFORE.get(each.name)), type(each.default)
            if type(value) is not kind:
                raise TraceFileError(
                    f'"{each.name}" in the settings of the header is {value!r}, expected {kind.__name__}'
                )
            values[each.name] = value
        return cls(**values)


# What a setting was in the versions that did not write it down.
_BEFORE: dict[str, Any] = {"cudagraph_sizes": "none", "gpu_timeline": False, "memory": False}


def default_token_budget(all2all: str) -> int:
    """The default of --max-num-batched-tokens with that all-to-all."""
    return LOW_LATENCY_TOKENS if all2all == "deepep_ll" else DEFAULT_TOKEN_BUDGET


@dataclass(frozen=True)
class Pass:
    """One run over the requests.

    Attributes:
        run: its name in traces: "dbo", "thread", "unsplit", "dbo-graph" or "unsplit-graph".
        mode: see `Runner.step`.
        carrier: see `Scheduler`.
        graphs: capture decode steps and replay them. A rank leaves such a pass out where its all-to-all cannot be
            captured, as every rank then does.
        split_steps: end after so many split steps; None answers all requests.
        last_step: end after this step; None answers all requests.
    """

    run: str
    mode: str
    carrier: str
    split_steps: int | None = None
    last_step: int | None = None
    graphs: bool = False

    @property
    def whole(self) -> bool:
        """Whether it answers all requests."""
        return self.split_steps is None and self.last_step is None


def passes_of(settings: Settings) -> tuple[Pass, ...]:
    """The passes of `dbo-greenlet run`: split, unsplit, both with graphs, a few split steps with the other carrier."""
    main = settings.carrier
    other = next(carrier for carrier in RUN_OF_CARRIER if carrier != main)
    graphs = (
        Pass("dbo-graph", "auto", main, graphs=True),
        Pass("unsplit-graph", "never", main, graphs=True),
    )
    return (
        Pass(RUN_OF_CARRIER[main], "auto", main),
        Pass("unsplit", "never", main),
        *(() if settings.no_graphs else graphs),
        Pass(RUN_OF_CARRIER[other], "auto", other, COMPARED_STEPS),
    )


@dataclass(frozen=True)
class RecordedStep:
    """What a replay takes from the trace about one step of one rank.

    Attributes:
        schedule: None where the step was not split. With the sites, where the trace holds its slices.
        sampled: the tokens that were sampled. They are taken over, so that the next step has the recorded input even
            where another processor rounds otherwise.
    """

    schedule: Schedule | None
    sampled: list[int]


@dataclass(frozen=True)
class JobSpec:
    """One job, as one rank gets it.

    Attributes:
        settings: the same on every rank.
        model: checkpoint folder.
        prompts: what the prompt file is called in messages.
        requests: all of them; request i is served by rank i % ranks.
        passes: what to run, in order.
        recorded: for a replay: step -> what to repeat, this rank's.
        model_sha256: for a replay: the hash that the model must have; "" takes any.
    """

    settings: Settings
    model: str
    prompts: str
    requests: tuple[Request, ...]
    passes: tuple[Pass, ...]
    recorded: Mapping[int, RecordedStep] | None = field(default=None, repr=False)
    model_sha256: str = ""
