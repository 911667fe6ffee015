"""What a job is: its settings, its requests, and the passes over them."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..errors import ConfigurationError, TraceFileError
from ..schedule import Schedule
from .requests import Request

__all__ = ["CLOSE_CALL", "PACKAGED_MODEL", "JobSpec", "Pass", "RecordedStep", "Settings", "passes_of"]

PACKAGED_MODEL = Path(__file__).resolve().parent.parent / "assets" / "checkpoint"

ALL2ALLS = ("auto", "loopback", "torch")
DEVICES = ("cpu", "cuda")
DTYPES = ("float32", "bfloat16")
POLICIES = ("round_robin",)
RUN_OF_CARRIER = {"greenlet": "dbo", "thread": "thread"}

# Where the two best logits are closer than this, rounding may decide between them.
CLOSE_CALL = 1e-3

MAX_THREADS = 1024
# Seconds; far beyond any use, and within what sockets and stores can count.
MAX_RANK_TIMEOUT = 1e6

# The split steps that the other carrier runs, to compare host time per yield.
COMPARED_STEPS = 8


@dataclass(frozen=True)
class Settings:
    """What must be equal on every rank and in a replay.

    Attributes:
        ranks: processes, each with its block of the routed experts and its share of the requests.
        num_microbatches, decode_threshold, prefill_threshold, rule: see `batching.VoteSettings`.
        policy, carrier, strict: see `Scheduler`.
        all2all: "torch" (torch.distributed, also for one rank), "loopback" (one rank) or "auto" (the loopback for one
            rank, torch.distributed for several).
        device, dtype: where the model runs and in which precision.
        max_new_tokens: most tokens to generate for a request.
        max_requests: requests that a rank runs at once (KV cache rows).
        token_budget: most tokens in a step of a rank, at least `max_requests`.
        threads: torch's intra-op threads of a rank.
        rank_timeout: seconds for which a rank may keep the others waiting before it counts as stalled.
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
    token_budget: int = 512
    threads: int = 1
    rank_timeout: float = 60.0

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
            ("--policy", self.policy, POLICIES),
            ("--carrier", self.carrier, tuple(RUN_OF_CARRIER)),
            ("--all2all", self.all2all, ALL2ALLS),
            ("--device", self.device, DEVICES),
            ("--dtype", self.dtype, DTYPES),
        ):
            if chosen not in known:
                raise ConfigurationError(f"{flag} is {chosen!r}; use one of {', '.join(known)}")
        n = self.num_microbatches
        if not 1 <= n <= min(self.decode_threshold, self.prefill_threshold) or self.rule not in ("v1", "v2"):
            # Something is wrong with the vote, and what it is is said in one place, which needs torch.
            from ..batching import VoteSettings

            VoteSettings(n, self.decode_threshold, self.prefill_threshold, self.rule)
        if self.all2all == "loopback" and self.ranks > 1:
            raise ConfigurationError(
                f"--all2all loopback serves one rank, --ranks is {self.ranks}; use --all2all torch"
            )

    def as_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Settings:
        """Settings as a trace holds them; keys that this version does not know are passed over.

        Raises:
            TraceFileError: a missing key, or a value of another type. The message names no file.
        """
        values: dict[str, Any] = {}
        for each in dataclasses.fields(cls):
            if each.name not in data:
                raise TraceFileError(f'the settings in the header lack "{each.name}"')
            value, kind = data[each.name], type(each.default)
            if type(value) is not kind:
                raise TraceFileError(
                    f'"{each.name}" in the settings of the header is {value!r}, expected {kind.__name__}'
                )
            values[each.name] = value
        return cls(**values)


@dataclass(frozen=True)
class Pass:
    """One run over the requests.

    Attributes:
        run: its name in traces: "dbo", "thread" or "unsplit".
        mode: see `Runner.step`.
        carrier: see `Scheduler`.
        split_steps: end after so many split steps; None answers all requests.
        last_step: end after this step; None answers all requests.
    """

    run: str
    mode: str
    carrier: str
    split_steps: int | None = None
    last_step: int | None = None


def passes_of(settings: Settings) -> tuple[Pass, ...]:
    """The passes of `dbo-greenlet run`: split, unsplit, and a few split steps with the other carrier."""
    main = settings.carrier
    other = next(carrier for carrier in RUN_OF_CARRIER if carrier != main)
    return (
        Pass(RUN_OF_CARRIER[main], "auto", main),
        Pass("unsplit", "never", main),
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
