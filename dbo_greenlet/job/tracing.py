"""What a rank of a job writes into the trace, as lines: its header, its requests, and each of its steps."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..policies import policy_from_text, text_and_seed
from ..policy import Scripted
from ..step_output import StepOutput
from ..trace.recorder import StepRecorder
from ..trace.run_header import make_header
from ..trace.schema import EndRecord, PromptRecord, StepRecord, to_json
from .requests import Request
from .spec import JobSpec

__all__ = ["RankTrace", "checksum"]


class RankTrace:
    """The recorders of one rank.

    Args:
        spec: the job. With its setting `memory`, what operations do to memory is recorded as well.
        rank: this rank.
        device: where the model runs.

    Attributes:
        device: the same device, telling of what it enqueues: for the runner.
        instruments: for the runner.
    """

    def __init__(self, spec: JobSpec, rank: int, device: Any) -> None:
        self._spec = spec
        self._rank = rank
        self._recorder = StepRecorder()
        self._memory: Any = None
        self.instruments: tuple[Any, ...] = (self._recorder,)
        if spec.settings.memory:
            from ..memory_recorder import MemoryRecorder

            self._memory = MemoryRecorder(device)
            self.device = self._memory.device
            self.instruments += (self._memory,)
        else:
            self.device = self._recorder.device(device)

    def all_to_all(self, inner: Any) -> Any:
        """The all-to-all to use in the place of `inner`."""
        return inner if self._memory is None else self._memory.all_to_all(inner)

    def header(self, model_hash: str, processor: str, requests: Iterable[tuple[int, Request, list[int]]]) -> bytes:
        """The lines with which the trace begins.

        Args:
            model_hash: of the model's files.
            processor: what the model runs on, for people.
            requests: number, request and token ids of each that this rank serves.
        """
        settings = self._spec.settings
        header = make_header(
            rank=self._rank,
            world=settings.ranks,
            threads=torch.get_num_threads(),
            model={"path": str(Path(self._spec.model).resolve()), "sha256": model_hash},
            settings={**settings.as_json(), "processor": processor},
            origin_ns=self._recorder.origin_ns,
        )
        prompts = [
            PromptRecord(number, self._rank, request.arrival, request.prompt, ids) for number, request, ids in requests
        ]
        return _lines(header, *prompts)

    def step_record(
        self,
        run: str,
        step: int,
        out: StepOutput,
        span: tuple[int, int],
        voted: tuple[int, int] | None,
        *,
        tokens: int,
        execution: str,
        requests: list[int],
        sampled: list[int],
    ) -> StepRecord:
        """The record of a step that succeeded.

        Args:
            run, step, tokens, execution, requests, sampled: as in `StepRecord`.
            out: what the runner gave.
            span, voted: nanoseconds around the step, and around its vote where there was one.
        """
        decision = out.decision
        begin, end = self._microseconds(span)
        vote_begin, vote_end = self._microseconds(voted)
        policy, seed = self._chosen_by(out, step)
        return StepRecord(
            step=step,
            rank=self._rank,
            run=run,
            tokens=tokens,
            padded=out.tokens,
            split=decision.split,
            reason=str(decision.reason),
            votes=[vote.to_row().tolist() for vote in decision.votes],
            slices=[
                [s.token_slice.start, s.token_slice.stop, s.request_slice.start, s.request_slice.stop]
                for s in out.slices
            ],
            schedule="" if out.schedule is None else out.schedule.encode(),
            hash="" if out.schedule is None else out.schedule.hash,
            yields=list(out.yields),
            output=checksum(out.output),
            requests=requests,
            sampled=sampled,
            begin=begin,
            end=end,
            execution=execution,
            policy=policy,
            seed=seed,
            vote_begin=vote_begin,
            vote_end=vote_end,
        )

    def step(self, record: StepRecord, out: StepOutput) -> bytes:
        """The lines of a step: its record and what was recorded while it ran, which is the latest step."""
        who: dict[str, Any] = {"step": record.step, "rank": self._rank, "run": record.run}
        origin = self._recorder.origin_ns
        lines = _lines(record)
        # A replayed step ran no slices; what the recorders hold then is of the capture, or of an eager step before.
        if out.schedule is not None and out.execution == "eager":
            lines += self._recorder.json_lines(**who)
            if self._memory is not None:
                lines += self._memory.json_lines(**who, origin_ns=origin)
        if out.timeline is not None:
            lines += _lines(*out.timeline.records(**who, origin_ns=origin))
        return lines

    def end(self, error: BaseException | None) -> bytes:
        """The last line."""
        text = None if error is None else f"{type(error).__name__}: {error}"
        return _lines(EndRecord(error is None, self._rank, text))

    def _microseconds(self, span: tuple[int, int] | None) -> tuple[float, float] | tuple[None, None]:
        if span is None:
            return None, None
        origin = self._recorder.origin_ns
        return (span[0] - origin) / 1000, (span[1] - origin) / 1000

    def _chosen_by(self, out: StepOutput, step: int) -> tuple[str, int | None]:
        """The policy and its seed, as the record of the step names them."""
        if out.schedule is None:
            return "", None
        recorded = (self._spec.recorded or {}).get(step)
        scripted = recorded is not None and recorded.schedule is not None
        return (Scripted.name, None) if scripted else text_and_seed(policy_from_text(self._spec.settings.policy))


def checksum(output: Tensor) -> str:
    """16 hex characters (BLAKE2b) over the bytes of a step's output [T, H], as they lie in memory row by row."""
    flat = output.detach().contiguous().view(torch.uint8).cpu()
    return hashlib.blake2b(flat.numpy().tobytes(), digest_size=8).hexdigest()


def _lines(*records: Any) -> bytes:
    return "".join(to_json(record) + "\n" for record in records).encode("ascii")
