"""What the process of one rank does: load, meet the others, run the passes step by step, tell the parent.

Every rank takes part in every step's vote until all have answered all their requests. Nobody has to say when that is:
all ranks know all arrivals, so a step in which no rank has a token is the last one, or one to skip until the next
arrival.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..batching import VoteSettings
from ..errors import CheckpointError, ConfigurationError, PolicyError, PromptFileError, ReplayMismatch
from ..moe import DeepseekV2Config, DeepseekV2Model, Tokenizer, load_model, model_hash
from ..policies import policy_from_text
from ..policy import Scripted
from ..runner import Runner, StepOutput
from .engine import NOT_SAMPLED, Batch, Engine, RequestState, Sample, pick
from .handoff import HandOffClock
from .logits import LogitRows
from .messages import CapturedGraph, GraphsCaptured, Lines, Message, PassDone, Ready, StepDone
from .resources import open_all2all, open_device, open_kv_cache, processor_name, ranks_on_device
from .spec import CLOSE_CALLS, GRAPH_RUNS, JobSpec, Pass, RecordedStep
from .tracing import RankTrace

if TYPE_CHECKING:
    from ..ranks import RankGroup

__all__ = ["Rank"]

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class Rank:
    """One rank of a job, loaded and connected.

    Args:
        spec: the job.
        rank: this rank.
        group: its connection to the others; None where it is alone.
        send: takes the messages to the parent.

    Raises what loading raises: `CheckpointError`, `PromptFileError`, `ConfigurationError`; `RanksDisagreeError` if
    another rank was started differently.
    """

    def __init__(self, spec: JobSpec, rank: int, group: RankGroup | None, send: Callable[[Message], None]) -> None:
        began = time.monotonic()
        settings = spec.settings
        self.spec = spec
        self.rank = rank
        self.group = group
        self.send = send
        self.step = -1
        self.run_name = ""
        self.device, self.torch_device = open_device(settings.device, rank)
        config = DeepseekV2Config.from_folder(spec.model)
        if config.n_routed_experts % settings.ranks:
            raise ConfigurationError(
                f"--ranks is {settings.ranks}, which does not divide the model's {config.n_routed_experts} routed "
                "experts; every rank gets the same number of them"
            )
        self.tokenizer = Tokenizer.from_folder(spec.model, config.eos_token_ids)
        self.prompts = self._encode(config)
        self.row_length = self._row_length(config)
        self.model_hash = model_hash(spec.model)
        if spec.model_sha256 not in ("", self.model_hash):
            raise CheckpointError(
                f"{spec.model} is not the model of the trace: its hash is {self.model_hash[:12]}, the recorded one "
                f"{spec.model_sha256[:12]}; give the recorded model's folder (--model)"
            )
        votes = VoteSettings(
            settings.num_microbatches, settings.decode_threshold, settings.prefill_threshold, settings.rule
        )
        if group is not None:
            group.agree({**settings.as_json(), "model": self.model_hash, "torch": torch.__version__})
        self.trace = RankTrace(spec, rank, self.device)
        self.clock = HandOffClock(self.trace.all_to_all(open_all2all(settings, group, config)))
        self.model: DeepseekV2Model = load_model(spec.model, self.clock, _DTYPES[settings.dtype], self.torch_device)
        self.config = config
        self.votes = votes
        # Why no step can be a graph, and the sizes to which decode steps are padded where one can: in eager passes
        # too, so that an eager step and its graph compute the same shapes.
        self.no_graphs = settings.no_graphs or self.clock.not_capturable
        self.graph_sizes = () if self.no_graphs else settings.graph_sizes
        self._logits: dict[str, LogitRows] = {}
        mine = [(number, self.spec.requests[number], ids) for number, ids in self._mine()]
        send(Lines(self.trace.header(self.model_hash, processor_name(self.torch_device), mine)))
        send(
            Ready(
                time.monotonic() - began,
                str(self.torch_device),
                processor_name(self.torch_device),
                ranks_on_device(settings, rank),
                self.no_graphs,
            )
        )

    def run(self) -> None:
        """All passes that can be; raises what ends the job."""
        for each in self.spec.passes:
            if not (each.graphs and self.no_graphs):
                self._run_pass(each)

    def close(self) -> None:
        """Give up what the all-to-all holds; every rank calls it, when none uses it any more."""
        self.clock.close()

    # -- the beginning -----------------------------------------------------------------------------------------------

    def _encode(self, config: DeepseekV2Config) -> list[list[int]]:
        """Token ids of all requests, also those of other ranks: so that all refuse the same ones."""
        prompts = []
        for request in self.spec.requests:
            ids = self.tokenizer.encode(request.prompt)
            where = f"{self.spec.prompts}, line {request.line}"
            if len(ids) > config.max_position_embeddings:
                raise PromptFileError(
                    f"{where}: the prompt has {len(ids)} tokens, the model's context holds "
                    f"{config.max_position_embeddings} (max_position_embeddings in config.json); shorten it"
                )
            if not ids:
                raise PromptFileError(f"{where}: the tokenizer makes no token of the prompt")
            if max(ids) >= config.vocab_size:
                raise ConfigurationError(
                    f"the tokenizer in {self.spec.model} gives id {max(ids)}, the model has {config.vocab_size} ids; "
                    "are they of the same checkpoint?"
                )
            prompts.append(ids)
        return prompts

    def _row_length(self, config: DeepseekV2Config) -> int:
        """Tokens that a KV cache row must hold: those of this rank's longest prompt with its answer.

        Not the model's whole context: rows of 163,840 positions (DeepSeek-V2-Lite) fit no machine 64 times. The ranks
        need not agree on it, since nothing that they exchange depends on it.
        """
        longest = max((len(ids) for _, ids in self._mine()), default=1)
        return min(config.max_position_embeddings, longest + self.spec.settings.max_new_tokens)

    def _mine(self) -> list[tuple[int, list[int]]]:
        """(number, token ids) of the requests that this rank serves."""
        ranks = self.spec.settings.ranks
        return [(number, ids) for number, ids in enumerate(self.prompts) if number % ranks == self.rank]

    # -- one pass ----------------------------------------------------------------------------------------------------

    def _run_pass(self, each: Pass) -> None:
        settings = self.spec.settings
        self.run_name, self.step = each.run, -1
        began = time.monotonic()
        states = [RequestState(number, self.spec.requests[number].arrival, ids) for number, ids in self._mine()]
        engine = Engine(
            states,
            rows=settings.max_requests,
            row_length=self.row_length,
            token_budget=settings.token_budget,
            max_new_tokens=settings.max_new_tokens,
            eos_ids=self.tokenizer.eos_ids,
            close_call=CLOSE_CALLS[settings.dtype],
            device=self.torch_device,
        )
        runner = self._make_runner(each)
        if each.graphs:
            self._capture(each, runner)
        rows = self._rows_of(each)
        # A timeline records its events between a yield and what the clock takes for its end, and so do others.
        self.clock.running = not (each.graphs or settings.gpu_timeline or settings.memory)
        self._steps(each, engine, runner, rows)
        self.clock.running = False
        whole = each.split_steps is None
        self.send(
            PassDone(
                each.run,
                time.monotonic() - began,
                {s.number: self.tokenizer.decode(s.generated) for s in states} if whole else {},
                {s.number: s.generated for s in states} if whole else {},
                {s.number: s.close_calls for s in states if s.close_calls} if whole else {},
                rows.result(),
            )
        )
        if each.graphs:
            # NCCL does not close while a graph holds its operations, and a captured step is part of a cycle.
            del runner
            gc.collect()

    def _make_runner(self, each: Pass) -> Runner:
        settings = self.spec.settings
        cache = open_kv_cache(
            self.config,
            settings.max_requests,
            self.row_length,
            _DTYPES[settings.dtype],
            self.torch_device,
            static_shapes=bool(self.graph_sizes),
        )
        timeline = None
        if settings.gpu_timeline:
            from ..gpu_timeline import GpuTimeline

            timeline = GpuTimeline(self.trace.device)
        return Runner(
            self.model,
            kv_cache=cache,
            settings=self.votes,
            group=self.group,
            device=self.trace.device,
            policy=policy_from_text(settings.policy),
            carrier=each.carrier,
            strict=settings.strict,
            instruments=(*self.trace.instruments, self.clock),
            max_requests=max((settings.max_requests, *self.graph_sizes)),
            graph_sizes=self.graph_sizes,
            use_graphs=each.graphs,
            all2all=self.clock,
            timeline=timeline,
        )

    def _capture(self, each: Pass, runner: Runner) -> None:
        """The graphs of a pass: every rank captures the same ones in the same order."""
        told = tuple(
            CapturedGraph(step.size, step.microbatches, step.captured.seconds, step.captured.pool_bytes)
            for step in runner.capture_graphs(each.mode)
        )
        self.send(GraphsCaptured(each.run, told))

    def _rows_of(self, each: Pass) -> LogitRows:
        """The pass's logits, and the pass to compare them with: the first one, and for a graph its eager twin."""
        if not each.whole:
            return LogitRows(each.run)
        first = next(iter(self._logits.values()), None)
        against = self._logits.get(GRAPH_RUNS[each.run]) if each.run in GRAPH_RUNS else first
        rows = LogitRows(each.run, against, keep=not each.graphs)
        self._logits[each.run] = rows
        return rows

    def _steps(self, each: Pass, engine: Engine, runner: Runner, rows: LogitRows) -> None:
        arrivals = sorted({request.arrival for request in self.spec.requests})
        recorded = self.spec.recorded or {}
        split_steps = 0
        step = 0
        while split_steps != each.split_steps and (each.last_step is None or step <= each.last_step):
            self.step = step
            batch = engine.next_batch(step)
            began = time.perf_counter_ns()
            out = self._run_step(runner, batch, each.mode, recorded.get(step))
            if out.output is None:
                later = [arrival for arrival in arrivals if arrival > step]
                if not later:
                    return
                step = later[0]
                continue
            if self.group is not None:
                # Reading from a GPU waits for it, and hangs with it if a rank fails; this finds that out.
                self.group.wait_for_device()
            logits = self._logits_of(batch, out.output)
            samples = [] if logits is None else pick(logits)
            ended = time.perf_counter_ns()
            if logits is not None:
                rows.take([batch.parts[part][0] for part in batch.sampling], logits)
            answered = engine.advance(batch, _forced(samples, batch, recorded.get(step)))
            self._report(each, step, batch, out, samples, (began, ended), runner.voted, len(answered))
            split_steps += out.decision.split
            step += 1

    def _run_step(self, runner: Runner, batch: Batch, mode: str, recorded: RecordedStep | None) -> StepOutput:
        policy = None if recorded is None or recorded.schedule is None else Scripted(recorded.schedule)
        try:
            return runner.step(batch.input, mode=mode, policy=policy)
        except (ReplayMismatch, PolicyError) as error:
            if policy is None:
                raise
            raise ReplayMismatch(f"step {self.step}, rank {self.rank}: {error}") from error

    @torch.inference_mode()
    def _logits_of(self, batch: Batch, hidden: Tensor) -> Tensor | None:
        """[N, vocabulary] to sample from, a row for each of `batch.sampling`; None where there is none."""
        if not batch.last_tokens:
            return None
        rows = torch.tensor(batch.last_tokens, device=hidden.device)
        return self.model.logits(hidden[rows])

    def _report(
        self,
        each: Pass,
        step: int,
        batch: Batch,
        out: StepOutput,
        samples: list[Sample],
        span: tuple[int, int],
        voted: tuple[int, int] | None,
        answered: int,
    ) -> None:
        sampled = [NOT_SAMPLED] * len(batch.parts)
        for part, sample in zip(batch.sampling, samples, strict=True):
            sampled[part] = sample.token
        # Where no step can be replayed, the word would distinguish nothing.
        execution = out.execution if self.graph_sizes else ""
        record = self.trace.step_record(
            each.run,
            step,
            out,
            span,
            voted,
            tokens=batch.input.num_tokens,
            execution=execution,
            requests=batch.requests,
            sampled=sampled,
        )
        self.send(
            StepDone(record, self.trace.step(record, out), answered, out.decision.message, self.clock.take_times())
        )

    def last_words(self, error: BaseException | None) -> bytes:
        """The trace's last line of this rank."""
        return self.trace.end(error)


def _forced(samples: list[Sample], batch: Batch, recorded: RecordedStep | None) -> list[Sample]:
    """The samples with the recorded tokens in their place; as they are where the record does not fit the batch."""
    if recorded is None or len(recorded.sampled) != len(batch.parts):
        return samples
    return [Sample(recorded.sampled[part], sample.gap) for part, sample in zip(batch.sampling, samples, strict=True)]
