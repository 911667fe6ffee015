"""Ranks that fail, die, stall or differ: the job ends within a stated time and names them; the trace can be read."""

from __future__ import annotations

import dataclasses
import json
import multiprocessing
import os
import shutil
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from dbo_greenlet.errors import (
    CheckpointError,
    ConfigurationError,
    DboError,
    PromptFileError,
    RankFailedError,
    RanksDisagreeError,
)
from dbo_greenlet.job import launch
from dbo_greenlet.job.launch import run_job
from dbo_greenlet.job.requests import PACKAGED_PROMPTS, read_requests
from dbo_greenlet.job.resources import open_kv_cache
from dbo_greenlet.job.spec import PACKAGED_MODEL, JobSpec, Settings, passes_of
from dbo_greenlet.job.worker import Rank
from dbo_greenlet.moe import DeepseekV2Config
from dbo_greenlet.ranks import RankGroup
from dbo_greenlet.trace import read_trace
from tests.job import failing_ranks

# From the failure to the end of the job. The ranks' own limit is 5 s, the parent's patience 6 s.
SECONDS = 20.0


def job(count: int = 8, model: Path | str = PACKAGED_MODEL, **settings: Any) -> JobSpec:
    chosen = Settings(**{"max_new_tokens": 8, "decode_threshold": 2, "prefill_threshold": 2, **settings})
    requests = tuple(read_requests(PACKAGED_PROMPTS, limit=count))
    return JobSpec(chosen, str(model), "prompts.jsonl", requests, passes_of(chosen)[:1])


def ranks_alive() -> list[str]:
    return [process.name for process in multiprocessing.active_children() if "rank" in process.name]


def fails(spec: JobSpec, kind: type[DboError], words: str, **options: Any) -> DboError:
    """Run a job that fails; returns the error, and checks that it came in time and left no process."""
    last_sign = time.monotonic()

    def follow(rank: int, message: object) -> None:
        nonlocal last_sign
        last_sign = time.monotonic()

    with pytest.raises(kind, match=words) as caught:
        run_job(spec, follow=follow, **options)
    assert time.monotonic() - last_sign < SECONDS
    assert ranks_alive() == []
    return caught.value


@pytest.mark.parametrize(
    ("main", "rank", "words"),
    [
        (
            failing_ranks.raising,
            1,
            "rank 1, microbatch . failed: .*ValueError: expert out of order in step 2 of run 'dbo'",
        ),
        (failing_ranks.dying, 1, "rank 1 failed: its process was killed by SIGKILL after step 1 of run 'dbo'"),
        (
            failing_ranks.aborting,
            0,
            "rank 0 failed: its process was killed by SIGABRT .*terminate called: internal error",
        ),
    ],
)
def test_a_failing_rank_is_named_and_the_others_stop(tmp_path: Path, main: Any, rank: int, words: str) -> None:
    path = tmp_path / "trace.jsonl"
    error = fails(job(), RankFailedError, words, rank_main=main, trace=path)
    assert isinstance(error, RankFailedError) and error.rank == rank
    if main is failing_ranks.raising:
        # Where it was raised, in its own process.
        assert "in fail\n" in str(error.__cause__) and "ValueError: expert out of order" in str(error.__cause__)
    trace = read_trace(path)
    assert not trace.torn
    assert {step for _, step, _ in trace.steps} == {0, 1}
    assert [trace.ends[each].ok for each in (0, 1)] == [False, False]


def test_a_stalled_rank_is_named_after_the_timeout() -> None:
    error = fails(job(rank_timeout=4.0), RankFailedError, "rank 1", rank_main=failing_ranks.stalling)
    assert isinstance(error, RankFailedError) and error.rank == 1


def test_ranks_that_were_started_differently_are_refused_with_the_difference() -> None:
    ours = job()
    other = dataclasses.replace(ours, settings=dataclasses.replace(ours.settings, decode_threshold=9, strict=True))
    fails(
        ours,
        RanksDisagreeError,
        "decode_threshold: rank 0 has 2, rank 1 has 9; .*strict: rank 0 has .*, rank 1 has",
        specs=[ours, other],
    )


def test_a_capture_that_fails_ends_the_job_with_the_reason() -> None:
    words = "rank 1 failed: the graph of 64 tokens cannot be captured: out of memory before the first step of run 'dbo'"
    fails(job(), RankFailedError, words, rank_main=failing_ranks.unable_to_capture)


def test_ranks_of_different_versions_are_refused() -> None:
    fails(
        job(),
        RanksDisagreeError,
        "dbo_greenlet version: rank 0 has .*rank 1 has .*0.0.9",
        rank_main=failing_ranks.of_another_version,
    )


def test_missing_libraries_are_named_before_anything_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    found = launch.find_spec
    monkeypatch.setattr(launch, "find_spec", lambda name: None if name in ("torch", "tokenizers") else found(name))
    fails(job(), ConfigurationError, r"torch, tokenizers cannot be imported; install dbo-greenlet\[run\]")


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    folder = tmp_path / "checkpoint"
    shutil.copytree(PACKAGED_MODEL, folder)
    return folder


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "model.safetensors"])
def test_a_missing_file_of_the_checkpoint_is_named(checkpoint: Path, name: str) -> None:
    (checkpoint / name).unlink()
    fails(job(ranks=1, model=checkpoint), CheckpointError, name.partition(".")[0])


def test_a_truncated_checkpoint_is_named(checkpoint: Path) -> None:
    os.truncate(checkpoint / "model.safetensors", 100_000)
    fails(job(ranks=1, model=checkpoint), CheckpointError, "model.safetensors")


def test_another_architecture_is_refused(checkpoint: Path) -> None:
    config = (checkpoint / "config.json").read_text(encoding="utf-8")
    (checkpoint / "config.json").write_text(
        config.replace("deepseek_v2", "qwen2_moe").replace("DeepseekV2ForCausalLM", "Qwen2MoeForCausalLM"),
        encoding="utf-8",
    )
    fails(job(ranks=1, model=checkpoint), CheckpointError, "config.json: model_type is 'qwen2_moe', supported is")


def test_a_prompt_longer_than_the_context_is_refused_with_its_line() -> None:
    spec = job(ranks=1)
    long = dataclasses.replace(spec.requests[2], prompt="7" * 300)
    requests = (*spec.requests[:2], long, *spec.requests[3:])
    fails(
        dataclasses.replace(spec, requests=requests),
        PromptFileError,
        r"prompts.jsonl, line 3: the prompt has 301 tokens, the model's context holds 256",
    )


def test_experts_that_cannot_be_dealt_out_are_refused() -> None:
    fails(job(ranks=3), ConfigurationError, "--ranks is 3, which does not divide the model's 8 routed experts")


def test_more_microbatches_than_tokens_fall_back_with_the_reason() -> None:
    result = run_job(job(count=2, num_microbatches=30, decode_threshold=30, prefill_threshold=30, ranks=1))
    reasons = {record.reason for record in result.steps if not record.split}
    assert reasons == {"too-few-tokens"}
    assert "tokens for 30 microbatches" in result.explanations["too-few-tokens"]
    split = [record for record in result.steps if record.split]
    assert split and all(len(record.yields) == 30 for record in split)


@pytest.mark.parametrize("target", ["folder", "full"])
def test_a_trace_that_cannot_be_written_does_not_stop_the_job(tmp_path: Path, target: str) -> None:
    path = tmp_path if target == "folder" else Path("/dev/full")
    if target == "full" and not path.exists():
        pytest.skip("needs /dev/full")
    result = run_job(job(count=2, ranks=1), trace=path)
    assert {run for run, _ in result.passes} == {"dbo"}
    assert result.trace_problem is not None
    assert str(path) in result.trace_problem
    reason = "is a directory" if target == "folder" else "no space left on device"
    assert result.trace_problem == f"The trace {path} was not written: {reason}; the run went on without it."


def test_a_job_that_does_not_start_leaves_an_earlier_trace(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text("an earlier run", encoding="utf-8")
    fails(job(ranks=1, model=tmp_path), CheckpointError, "config.json", trace=path)
    assert path.read_text(encoding="utf-8") == "an earlier run"


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device here")
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_missing_cuda_device_is_named_with_any_number_of_ranks(ranks: int) -> None:
    fails(job(ranks=ranks, device="cuda"), ConfigurationError, "torch sees no CUDA device; use --device cpu")


@pytest.mark.parametrize("timeout", [float("nan"), float("inf"), 0.0, 2e6])
def test_a_group_of_ranks_refuses_a_timeout_that_nobody_can_wait_for(timeout: float) -> None:
    with pytest.raises(ConfigurationError, match="timeout = .* it must be positive and at most 1000000 s"):
        RankGroup.connect(0, 1, 1, timeout=timeout)


def test_one_rank_may_use_torch_distributed() -> None:
    result = run_job(job(count=2, ranks=1, all2all="torch"), rank_main=failing_ranks.without_loopback)
    assert {run for run, _ in result.passes} == {"dbo"}


def test_a_row_of_the_cache_holds_the_longest_prompt_and_its_answer_only(tmp_path: Path) -> None:
    # The context of DeepSeek-V2-Lite; 64 rows of it fit no machine.
    folder = tmp_path / "checkpoint"
    shutil.copytree(PACKAGED_MODEL, folder)
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    (folder / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 163_840}), encoding="utf-8")
    rank = Rank(job(ranks=1, model=folder), 0, None, lambda message: None)
    assert rank.row_length == max(map(len, rank.prompts)) + 8
    assert Rank(job(ranks=1, max_new_tokens=10**6), 0, None, lambda message: None).row_length == 256


def test_a_cache_without_memory_for_it_is_named_with_its_size() -> None:
    config = DeepseekV2Config.from_folder(PACKAGED_MODEL)
    with pytest.raises(ConfigurationError, match=r"--max-num-seqs is 1000000000000, .* take [0-9,.]+ GiB, which cpu"):
        open_kv_cache(config, 10**12, 256, torch.float32, torch.device("cpu"))
