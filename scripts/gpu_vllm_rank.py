"""One data-parallel rank of a session of scripts/gpu_vllm.py, which starts two of them and reads what they wrote.

A rank writes its result again after every part of its work, so that what it had found is there also when it hangs and
is ended from outside.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import math
import os
import signal
import sys
import threading
import time
import traceback
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from gpu_vllm_engine import (
    Modes,
    RowFailed,
    draw_weights,
    environment,
    executed,
    make_engine,
    model_runner,
    most_tokens,
    serve,
    uses_drop_in,
)
from gpu_vllm_probe import Probe, gpu_memory_mb, in_words, machine_facts, process_facts, quantiles
from gpu_vllm_rows import DROP_IN, DROP_IN_ONE_CORE, INJECTED, NO_DBO, requests_of


class Report:
    """The rank's result, a JSON file that is whole at every moment."""

    def __init__(self, path: str) -> None:
        self.path = Path(path)
        self.contents: dict[str, Any] = {}

    def add(self, **parts: Any) -> None:
        self.contents.update(parts)
        partial = self.path.with_suffix(".part")
        partial.write_text(json.dumps(self.contents))
        partial.replace(self.path)


class InjectedFault(RuntimeError):
    """What a layer raises in the rows that make a microbatch fail."""


def main(rank: int, job: dict[str, Any], result: str, log: str) -> None:
    """Run one rank and end the process: 0 done, 1 failed, 2 done but not what the row says, 3 hung."""
    os.setsid()
    with open(log, "w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    faulthandler.enable()
    faulthandler.dump_traceback_later(max(job["seconds"] - 5, 5), exit=False)
    os.environ.update(environment(rank, job))
    report = Report(result)
    code = 1
    try:
        KINDS[job["kind"]](rank, job, report)
        code = 0
    except RowFailed as failure:
        report.add(error=[f"not what the row says: {failure}"])
        code = 2
    except BaseException as error:
        traceback.print_exc()
        report.add(error=in_words(error))
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        # Neither vLLM's nor DeepEP's tear-down is under test, and both may wait for a peer that has gone.
        os._exit(code)


def count_gpus(answer: Any) -> None:
    """Put the number of GPUs that torch sees into a queue."""
    import torch

    answer.put(torch.cuda.device_count())


def prepare(rank: int, job: dict[str, Any], report: Report) -> tuple[Probe, Modes, Any]:
    """Plug-ins, then what measures, then the engine."""
    begin = time.perf_counter()
    import vllm.model_executor.models.registry as registry
    from vllm.plugins import load_general_plugins

    # vLLM looks at a model's class in a process of its own, whose start takes longer than all else here.
    registry._run_in_subprocess = lambda function: function()
    load_general_plugins()
    probe = Probe()
    probe.watch_model(captures=job["execution"] == "graph")
    if job["kind"] != "accuracy":
        draw_weights(rank)
    modes = Modes(job, rank, probe)
    report.add(rank=rank, stage="starting the engine")
    engine = make_engine(job)
    report.add(
        stage="engine up",
        machine=machine_facts(),
        engine_s=round(time.perf_counter() - begin, 2),
        capture_model_s=probe.capture_model_s,
        graph_mb=probe.graph_mb,
        captures_s=probe.captures_s,
        graphs=probe.watch_replays(model_runner(engine).model),
        after_start=process_facts(),
        gpu_mb=gpu_memory_mb(),
    )
    print(f"rank {rank}: engine up after {time.perf_counter() - begin:.1f} s", flush=True)
    return probe, modes, engine


def leave_together(rank: int) -> None:
    """Wait for the other rank; rank 0 keeps the rendezvous and goes last."""
    import torch
    from vllm.distributed.parallel_state import get_world_group

    torch.distributed.barrier(group=get_world_group().cpu_group)
    time.sleep(0.0 if rank else 0.5)


def check_mode(job: dict[str, Any], mode: str, taken: dict[str, Any], by_drop_in: int) -> None:
    """Raises RowFailed unless the steps since the last check were split, and carried, as `mode` says."""
    graph = job["execution"] == "graph"
    split = taken["replays"] if graph else taken["yields"]
    what = "replays of microbatched graphs" if graph else "yields"
    if mode == NO_DBO:
        if taken["yields"] or taken["replays"]:
            raise RowFailed(f"{taken['yields']} yields and {taken['replays']} replays in a mode without microbatches")
        return
    if not split:
        raise RowFailed(f"no {what}: the steps were not split in mode {mode!r}")
    if mode in (DROP_IN, DROP_IN_ONE_CORE):
        if not by_drop_in:
            raise RowFailed(f"the drop-in counted no step in mode {mode!r}")
        if taken["threads_started"]:
            raise RowFailed(f"{taken['threads_started']} threads were started for microbatches in mode {mode!r}")
    elif by_drop_in:
        raise RowFailed(f"the drop-in counted {by_drop_in} steps in mode {mode!r}")


def run_serve(rank: int, job: dict[str, Any], report: Report) -> None:
    """Greedy tokens with log-probabilities, and times, of each mode in turn, with each number of requests."""
    prepared = prepare(rank, job, report)
    first, *others = requests_of(job["options"])
    report.add(modes=_take_turns(rank, job, prepared, first, rounds := job["options"].get("rounds", 3)))
    at: dict[str, Any] = {}
    for requests in others:
        at[str(requests)] = _take_turns(rank, job, prepared, requests, max(2, rounds // 2))
        report.add(modes_at=at)
    report.add(stage="done", executed=executed(), after_serving=process_facts())
    leave_together(rank)


def _take_turns(
    rank: int, job: dict[str, Any], prepared: tuple[Probe, Modes, Any], requests: int, rounds: int
) -> dict[str, Any]:
    """What each mode gave with so many requests in flight on each rank."""
    import torch

    probe, modes, engine = prepared
    tokens, prefill = job["options"].get("tokens", 24), job["options"].get("phase") == "prefill"
    # All prompts in one step: each of the steps after it decodes all requests.
    length = min(job["options"].get("prompt", 4), most_tokens(job) // requests)
    generator = torch.Generator().manual_seed(100 + rank)
    prompts = torch.randint(10, 50000, (requests, length), generator=generator).tolist()
    sampling = {"ignore_eos": True, "logprobs": 1}
    found: dict[str, dict[str, Any]] = {mode: defaultdict(list) for mode in job["modes"]}

    def one_round(mode: str, tag: str, length: int, keep: bool) -> None:
        modes.enter(mode, engine.vllm_config)
        probe.take()
        counted = sum(executed().values())
        outputs, steps = serve(engine, probe, tag, prompts, max_tokens=length, **sampling)
        taken = probe.take()
        check_mode(job, mode, taken, sum(executed().values()) - counted)
        if not keep:
            return
        here = found[mode]
        here["answers"].append([_answer(outputs[index]) for index in range(requests)])
        # The first steps hold prefills, the last one may be short.
        timed = steps[:1] if prefill else steps[3:-1]
        here["step_ms"] += [step["step_ms"] for step in timed]
        here["forward_ms"] += [step["forward_ms"] for step in timed]
        here["yields"] += [step["yields"] for step in timed]
        here["hand_offs_us"] += taken["hand_offs_us"]
        here["threads_started"].append(taken["threads_started"] / max(1, len(taken["forward_ms"])))
        here["most_threads"].append(taken["most_threads"])

    for mode in job["modes"]:
        one_round(mode, f"{requests} warm {mode}", 8, keep=False)
    for number in range(rounds):
        # Every other round in the opposite order: what drifts must not favour the one that comes first.
        order = job["modes"] if number % 2 == 0 else job["modes"][::-1]
        for mode in order:
            one_round(mode, f"{requests} {mode} {number}", tokens, keep=True)
    print(f"rank {rank}: {requests} requests done", flush=True)
    return {mode: _summary(values) for mode, values in found.items()}


def _answer(output: Any) -> list[list[float]]:
    """The tokens of one request and their log-probabilities."""
    of_tokens = [next(iter(at.values())).logprob for at in output.logprobs]
    return [list(output.token_ids), [round(value, 5) for value in of_tokens]]


def _summary(values: dict[str, Any]) -> dict[str, Any]:
    first = values["answers"][0]
    return {
        "step_ms": quantiles(values["step_ms"]),
        "forward_ms": quantiles(values["forward_ms"]),
        "hand_off_us": quantiles(values["hand_offs_us"]),
        "yields_per_step": quantiles(values["yields"], 0),
        "threads_started_per_step": max(values["threads_started"]),
        "most_threads": max(values["most_threads"]),
        "rounds_like_the_first": [sum(map(_same, first, other)) for other in values["answers"][1:]],
        "answers": first,
    }


def _same(one: Any, other: Any) -> bool:
    return one == other


def run_accuracy(rank: int, job: dict[str, Any], report: Report) -> None:
    """Exact matches of a trained checkpoint on its held-out problems, half of them on each rank."""
    lines = Path(job["model"], "eval.jsonl").read_text().splitlines()
    problems = [json.loads(line) for line in lines]
    new_tokens = problems[0]["max_new_tokens"]
    job["options"]["max_model_len"] = max(len(problem["prompt_ids"]) for problem in problems) + new_tokens
    probe, modes, engine = prepare(rank, job, report)
    from training_text import answered

    mine = problems[rank::2]
    prompts = [problem["prompt_ids"] for problem in mine]
    stop = problems[0]["stop_id"]
    sampling = {"max_tokens": new_tokens, "ignore_eos": True, "stop_token_ids": [stop]}
    found: dict[str, Any] = {}
    for mode in job["modes"]:
        modes.enter(mode, engine.vllm_config)
        probe.take()
        counted = sum(executed().values())
        begin = time.perf_counter()
        outputs, steps = serve(engine, probe, mode, prompts, **sampling)
        check_mode(job, mode, probe.take(), sum(executed().values()) - counted)
        answers = [_with_stop(outputs[index], stop) for index in range(len(mine))]
        exact = sum(map(answered, mine, answers))
        share = exact / len(mine)
        found[mode] = {
            "exact": exact,
            "problems": len(mine),
            "exact_match": share,
            "standard_error": math.sqrt(share * (1 - share) / len(mine)),
            "seconds": round(time.perf_counter() - begin, 1),
            "steps": len(steps),
            "steps_replayed": sum(bool(step["replays"]) for step in steps),
            "steps_split": sum(bool(step["yields"] or step["replays"]) for step in steps),
            "answers": [" ".join(map(str, answer)) for answer in answers],
        }
        print(f"rank {rank}: {mode}: {exact} of {len(mine)}", flush=True)
        report.add(modes=found)
    report.add(stage="done", executed=executed(), after_serving=process_facts())
    leave_together(rank)


def _with_stop(output: Any, stop: int) -> list[int]:
    tokens = list(output.token_ids)
    return [*tokens, stop] if output.finish_reason == "stop" and stop not in tokens else tokens


def run_fault(rank: int, job: dict[str, Any], report: Report) -> None:
    """Let a microbatch fail, at start or in the middle of decoding, and record what whoever calls the engine gets."""
    patience = job["options"].get("patience", 20)
    told: list[str] = []
    threading.excepthook = lambda event: told.extend(in_words(event.exc_value)[:1])
    began = time.perf_counter()

    def give_up_after(seconds: float, stage: str) -> threading.Timer:
        def give_up() -> None:
            report.add(
                outcome="hang", stage=stage, waited_s=seconds, printed_by_threads=told, main_thread=_main_stack()
            )
            os._exit(3)

        timer = threading.Timer(seconds, give_up)
        timer.daemon = True
        timer.start()
        return timer

    def attempt(what: Callable[[], Any], stage: str) -> Any:
        """The call's result, or None with its error reported."""
        try:
            return what()
        except Exception as error:
            traceback.print_exc()
            report.add(
                outcome="error",
                stage=stage,
                user_reads=in_words(error),
                printed_by_threads=told,
                after_s=round(time.perf_counter() - began, 2),
                at=time.time(),
                executed=executed(),
            )
            return None

    report.add(patience_s=patience, drop_in=uses_drop_in(job))
    if job["options"]["fault"] == "start":
        timer = give_up_after(job["seconds"] - 10, "start of the engine")
        if attempt(lambda: prepare(rank, job, report), "start of the engine") is not None:
            report.add(outcome="none", stage="the engine started")
        timer.cancel()
        return
    probe, modes, engine = prepare(rank, job, report)
    modes.enter(job["modes"][0], engine.vllm_config)
    prompts = [[11 + rank, 12 + index, 13] for index in range(64)]
    serve(engine, probe, "before", prompts, max_tokens=6, ignore_eos=True)
    check_mode(job, job["modes"][0], probe.take(), sum(executed().values()) if uses_drop_in(job) else 0)
    if rank in job["options"]["ranks"]:
        fail = partial(_die, report) if job["options"]["fault"] == "kill" else _raise
        _make_fail(model_runner(engine).model.unwrap(), fail, after_calls=40)
    began = time.perf_counter()
    timer = give_up_after(patience, "decoding")
    done = attempt(lambda: serve(engine, probe, "faulty", prompts, max_tokens=60, ignore_eos=True), "decoding")
    timer.cancel()
    if done is not None:
        complete = sum(len(output.token_ids) == 60 for output in done[0].values())
        report.add(outcome="none", stage="decoding", complete=complete, requests=len(prompts), printed_by_threads=told)


def _raise() -> None:
    raise InjectedFault(INJECTED)


def _die(report: Report) -> None:
    report.add(outcome="killed", stage="decoding", at=time.time())
    os.kill(os.getpid(), signal.SIGKILL)


def _make_fail(model: Any, fail: Callable[[], None], after_calls: int) -> None:
    """Make the model's third layer fail, once, in the second microbatch: mid-step, with the first one parked."""
    from vllm.v1.worker.ubatching import dbo_current_ubatch_id, dbo_enabled

    layer = model.model.layers[2]
    forward = layer.forward
    left = [after_calls]

    def failing(*args: Any, **kwargs: Any) -> Any:
        if dbo_enabled() and dbo_current_ubatch_id() == 1:
            left[0] -= 1
            if left[0] == 0:
                fail()
        return forward(*args, **kwargs)

    layer.forward = failing


def _main_stack() -> list[str]:
    """Where the main thread stands, innermost call last."""
    frame = sys._current_frames()[threading.main_thread().ident]
    return [f"{Path(f.filename).name}:{f.lineno} {f.name}" for f in traceback.extract_stack(frame)][-6:]


KINDS = {"serve": run_serve, "accuracy": run_accuracy, "fault": run_fault}

with contextlib.suppress(ImportError):
    # What a process of vLLM's front end has loaded before any plug-in runs: the parent that all ranks are forked from
    # imports this file, so that this is paid once. A failure shows in the first rank.
    if os.environ.get("GPU_VLLM_PRELOAD"):
        import torch  # noqa: F401
        import vllm.entrypoints.llm  # noqa: F401
