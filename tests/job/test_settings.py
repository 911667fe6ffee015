"""Settings: what is refused before anything starts, the sizes of graphs, the passes, and traces of earlier versions."""

from __future__ import annotations

from typing import Any

import pytest

from dbo_greenlet.errors import ConfigurationError, TraceFileError
from dbo_greenlet.job.spec import CLOSE_CALLS, DTYPES, Settings, passes_of
from dbo_greenlet.policies import policy_from_text, text_of
from tests.job.command import in_process, one_sentence

ON_GPU: dict[str, Any] = {"device": "cuda", "dtype": "bfloat16", "token_budget": 256}


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--all2all", "nccl"], "--all2all nccl runs on GPUs, --device is cpu; use --device cuda, or --all2all torch"),
        (["--all2all", "deepep_ht"], "--all2all deepep_ht runs on GPUs, --device is cpu"),
        (
            ["--all2all", "deepep_ll", "--device", "cuda"],
            "--all2all deepep_ll sends bfloat16, --dtype is float32; use --dtype bfloat16",
        ),
        (
            ["--all2all", "deepep_ht", "--device", "cuda", "--dtype", "bfloat16", "--ranks", "1"],
            "--all2all deepep_ht connects two ranks or more, --ranks is 1; use --ranks 2",
        ),
        (
            ["--all2all", "deepep_ll", "--device", "cuda", "--dtype", "bfloat16", "--max-num-batched-tokens", "511"],
            "--max-num-batched-tokens is 511, but DeepEP's low-latency kernels take at most 510 tokens of a rank at "
            "once; use 510 or less",
        ),
        (
            [
                *(
                    "--all2all",
                    "deepep_ll",
                    "--device",
                    "cuda",
                    "--dtype",
                    "bfloat16",
                    "--max-num-batched-tokens",
                    "256",
                ),
                *("--num-microbatches", "3", "--policy", "phase_offset:2"),
            ],
            "--policy is 'phase_offset:2': DeepEP's low-latency kernels take one receive at a time, to which 3 "
            "microbatches (--num-microbatches) keep only under round_robin or in_turn",
        ),
        (
            ["--policy", "phase_offset"],
            "--policy is 'phase_offset'; use one of round_robin, in_turn, phase_offset:YIELDS",
        ),
        (["--policy", "random:-1"], "--policy is 'random:-1'; use one of round_robin, in_turn, phase_offset:YIELDS"),
        (["--policy", "pct:1,depth=0"], "--policy is 'pct:1,depth=0': a depth of 0; use a whole number, 1 or more"),
        (["--all2all", "pigeon"], "use one of auto, loopback, torch, nccl, deepep_ll, deepep_ht"),
        (["--gpu-timeline", "--trace", "t.jsonl"], "--gpu-timeline times a GPU, --device is cpu; use --device cuda"),
        (["--memory"], "--memory writes into the trace, and there is none; name it with --trace"),
        (
            ["--gpu-timeline", "--device", "cuda"],
            "--gpu-timeline writes into the trace, and there is none; name it with --trace",
        ),
        (["--cudagraph-sizes", "8,lots"], "--cudagraph-sizes is '8,lots'; use token counts such as 8,16,32"),
        (["--cudagraph-sizes", "0,8"], "--cudagraph-sizes is '0,8'; use token counts"),
        (
            ["--cudagraph-sizes", "8,1024"],
            "--cudagraph-sizes holds 1024, but no step has more than 512 tokens (--max-num-batched-tokens)",
        ),
    ],
)
def test_what_cannot_work_is_refused_in_one_sentence(words: list[str], sentence: str) -> None:
    done = in_process("run", *words)
    assert (done.returncode, done.stdout) == (2, "")
    assert sentence in one_sentence(done.stderr)


def test_the_default_of_the_token_budget_is_one_that_low_latency_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    monkeypatch.setattr("dbo_greenlet.job.spec.Settings.check", lambda self: seen.append(self.token_budget))
    for words in (["--all2all", "deepep_ll"], ["--all2all", "torch"], ["--max-num-batched-tokens", "300"]):
        # It ends at the prompt file, right behind the settings.
        in_process("run", *words, "--prompts", "absent.jsonl")
    assert seen == [510, 512, 300]


@pytest.mark.parametrize("all2all", ["deepep_ll", "deepep_ht", "nccl"])
def test_what_can_work_on_a_gpu_is_not_refused(all2all: str) -> None:
    Settings(all2all=all2all, **ON_GPU).check()


@pytest.mark.parametrize("policy", ["round_robin", "in_turn", "phase_offset:2", "random:7", "pct:7,depth=3,length=40"])
def test_policies_are_written_down_and_read_back(policy: str) -> None:
    settings = Settings(policy=policy)
    settings.check()
    read = Settings.from_json(settings.as_json())
    assert read == settings and text_of(policy_from_text(read.policy)) == policy
    # Two microbatches keep to one receive at a time under all of them.
    Settings(policy=policy, all2all="deepep_ll", **ON_GPU).check()


def test_a_policy_of_a_later_version_in_a_trace_is_refused() -> None:
    data = {**Settings().as_json(), "policy": "longest_first"}
    with pytest.raises(ConfigurationError, match="--policy is 'longest_first'; use one of round_robin"):
        Settings.from_json(data).check()


@pytest.mark.parametrize(
    ("chosen", "requests", "sizes"),
    [
        ("auto", 64, (8, 16, 32, 64)),
        ("auto", 48, (8, 16, 32, 48)),
        ("auto", 5, (5,)),
        ("16, 4,16", 64, (4, 16)),
        ("none", 64, ()),
    ],
)
def test_sizes_of_graphs(chosen: str, requests: int, sizes: tuple[int, ...]) -> None:
    assert Settings(cudagraph_sizes=chosen, max_requests=requests).graph_sizes == sizes


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({}, None),
        ({"device": "cpu"}, "needs a CUDA device"),
        ({"cudagraph_sizes": "none"}, "switched off"),
        ({"carrier": "thread"}, "needs --carrier greenlet"),
    ],
)
def test_passes_with_graphs_are_there_where_the_settings_allow_them(changes: dict[str, Any], why: str | None) -> None:
    settings = Settings(**{**ON_GPU, "all2all": "nccl", **changes})
    with_graphs = [each.run for each in passes_of(settings) if each.graphs]
    if why is None:
        assert settings.no_graphs is None
        # Each eager run comes before the graphs that are compared with it.
        assert [each.run for each in passes_of(settings)] == [
            "dbo",
            "unsplit",
            "dbo-graph",
            "unsplit-graph",
            "thread",
        ]
        assert with_graphs == ["dbo-graph", "unsplit-graph"]
    else:
        assert settings.no_graphs is not None and settings.no_graphs.startswith(why)
        assert with_graphs == []


def test_every_precision_has_a_close_call() -> None:
    assert set(CLOSE_CALLS) == set(DTYPES)


def test_what_operations_do_is_recorded_of_eager_steps_only() -> None:
    assert Settings(**ON_GPU).no_graphs is None
    assert Settings(memory=True, **ON_GPU).no_graphs == "a replay has no operations of its own to record (--memory)"


def test_settings_survive_a_trace() -> None:
    settings = Settings(cudagraph_sizes="8,16", all2all="deepep_ht", **ON_GPU)
    assert Settings.from_json({**settings.as_json(), "processor": "abacus"}) == settings


def test_settings_of_an_earlier_version_had_no_graphs() -> None:
    older = Settings(**ON_GPU).as_json()
    del older["cudagraph_sizes"], older["gpu_timeline"], older["memory"]
    assert Settings.from_json(older) == Settings(cudagraph_sizes="none", **ON_GPU)
    del older["rule"]
    with pytest.raises(TraceFileError, match='the settings in the header lack "rule"'):
        Settings.from_json(older)


def test_a_wrong_list_of_sizes_in_a_trace_is_refused() -> None:
    data = {**Settings().as_json(), "cudagraph_sizes": "8;16"}
    with pytest.raises(ConfigurationError, match="--cudagraph-sizes is '8;16'"):
        Settings.from_json(data).check()
