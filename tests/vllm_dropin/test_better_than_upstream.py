"""What goes better than with vLLM's threads; every test has a counterpart that shows what the threads do.

Where theirs hangs or dies, it runs in children of `script_upstream_failures.py` (`upstream` below); the rest runs here,
once without and once with the drop-in.
"""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm", reason="needs vLLM, which is driven here (make test-vllm)")

import torch
from vllm.v1.worker import ubatching

from dbo_greenlet.errors import MicrobatchFailed
from tests.vllm_dropin.drive import Case, Drive, drop_in, harness
from tests.vllm_dropin.fake_cuda import Call, FakeStream
from tests.vllm_dropin.model import tensors_of
from tests.vllm_dropin.scenarios import SCENARIOS, BrokenExpertError, break_at, captured, mend

pytestmark = pytest.mark.vllm

ROOT = Path(__file__).parents[2]
BROKEN_FIRST = "torch.cat(): expected a non-empty list of Tensors"
NO_PEER = "AttributeError: 'NoneType' object has no attribute 'recv_hook'"
HANGS = "hangs: 1 thread(s) parked in _cpu_yield"


@pytest.fixture(scope="module")
def upstream() -> dict[str, str]:
    """What callers of vLLM's own runners see, by scenario."""
    script = [sys.executable, "-m", "tests.vllm_dropin.script_upstream_failures"]
    done = subprocess.run(script, cwd=ROOT, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


# A microbatch that raises ends the step with its own error

RAISING = {
    # scenario: what the caller of the threads sees
    "V1 microbatch 0 raises in begin": BROKEN_FIRST,
    "V1 microbatch 0 raises in layer1": BROKEN_FIRST,
    "V1 microbatch 0 raises in end": "4 rows",
    "V1 microbatch 1 raises in begin": BROKEN_FIRST,
    "V1 microbatch 1 raises in layer1": BROKEN_FIRST,
    "V1 microbatch 1 raises in end": "4 rows",
    "V2 microbatch 1 raises in begin": f"Microbatch 0 of 2 failed <- {NO_PEER}",
    "V2 microbatch 1 raises in layer1": f"Microbatch 0 of 2 failed <- {NO_PEER}",
    "V1 HT microbatch 0 raises in layer1": HANGS,
    "V1 HT microbatch 1 raises in layer1": HANGS,
    "V1 HT microbatch 0 raises in end": "4 rows",
    "V1 HT microbatch 1 raises in end": "4 rows",
    "V2 HT microbatch 0 raises in layer1": HANGS,
    "V2 HT microbatch 1 raises in layer1": HANGS,
    "V1 microbatch 1 raises in layer1 of a capture": BROKEN_FIRST,
    "V1 microbatch 1 raises in end of a capture": "4 rows",
    "V2 microbatch 1 raises in layer1 of a capture": f"Microbatch 0 of 2 failed <- {NO_PEER}",
}
RIGHT_UPSTREAM_TOO = {
    "V2 microbatch 0 raises in begin",
    "V2 microbatch 0 raises in layer1",
    "V2 microbatch 0 raises in end",
    "V2 microbatch 1 raises in end",
    "V2 HT microbatch 0 raises in end",
    "V2 HT microbatch 1 raises in end",
    "V2 microbatch 1 raises in end of a capture",
}


def test_every_scenario_with_a_raising_microbatch_is_expected_somewhere() -> None:
    assert {name for name in SCENARIOS if " raises " in name} == {*RAISING, *RIGHT_UPSTREAM_TOO}


@pytest.mark.parametrize("name", [*RAISING, *sorted(RIGHT_UPSTREAM_TOO)])
def test_a_raising_microbatch_ends_the_step_with_its_own_error(name: str, upstream: dict[str, str]) -> None:
    words = name.split()
    microbatch, place = words[words.index("microbatch") + 1], words[words.index("in") + 1]
    with drop_in():
        ours = SCENARIOS[name]()
    assert ours.startswith(f"MicrobatchFailed: Microbatch {microbatch} of 2 failed")
    assert ours.endswith(f"<- BrokenExpertError: expert broke in {place}")
    if name in RAISING:
        assert RAISING[name] in upstream[name]
        assert "BrokenExpertError" not in upstream[name]
    else:
        expected = f"RuntimeError: Microbatch {microbatch} of 2 failed <- BrokenExpertError: expert broke in {place}"
        assert upstream[name] == expected


def test_an_error_of_both_microbatches_is_reported_as_it_is(upstream: dict[str, str]) -> None:
    """As with `max_num_batched_tokens` above what DeepEP's low-latency buffers take."""
    original = "RuntimeError: 10 tokens do not fit into 8 slots"
    for runner in ("V1", "V2"):
        with drop_in():
            ours = SCENARIOS[f"{runner} too many tokens"]()
        assert ours.startswith("MicrobatchFailed: Microbatch 0 of 2 failed")
        assert ours.endswith(f"<- {original}")
    assert BROKEN_FIRST in upstream["V1 too many tokens"]
    assert original not in upstream["V1 too many tokens"]
    assert upstream["V2 too many tokens"].endswith(f"<- {original}")


@pytest.mark.parametrize("backend", ["LL", "HT"])
@pytest.mark.parametrize("runner", ["V1", "V2"])
def test_a_failed_step_leaves_nothing_behind(runner: str, backend: str) -> None:
    """The next step, an eager or a captured one, is as if it had not been; also if the failed one was a capture."""
    with drop_in(), harness() as log:
        for mode in ("eager", "capture"):
            drive = Drive(Case(runner, backend, mode, layers=2), log)
            right = [one.clone() for one in drive.in_turn()]
            for microbatch in (0, 1):
                for place in ("begin", "layer1", "end"):
                    break_at(drive, microbatch, place)
                    with pytest.raises(MicrobatchFailed) as raised:
                        captured(drive) if mode == "capture" else drive.step()
                    assert isinstance(raised.value.__cause__, BrokenExpertError)
                    assert ubatching._THREAD_ID_TO_CONTEXT == {}
                    assert not any(ubatching._CURRENT_CONTEXTS)
                    assert log.current().name == "compute"
                    mend(drive)
                    after = drive.step()
                    assert all(torch.equal(a, b) for a, b in zip(tensors_of(after), right, strict=True))
            if mode == "capture":
                assert runner == "V2" or drive.wrapper.cudagraphs == {}, "a capture that failed must not be replayed"
                captured(drive)
                assert all(torch.equal(a, b) for a, b in zip(tensors_of(drive.replay()), right, strict=True))


@pytest.mark.parametrize("place", ["layer1", "shared_experts", "end"])
@pytest.mark.parametrize("backend", ["LL", "HT"])
@pytest.mark.parametrize("runner", ["V1", "V2"])
def test_a_capture_that_fails_says_why_and_can_be_repeated(runner: str, backend: str, place: str) -> None:
    """The microbatch raises in the captured pass only, with HT also while work on the comm stream is not joined."""
    with drop_in(), harness() as log:
        drive = Drive(Case(runner, backend, "capture", layers=2), log)
        right = [one.clone() for one in drive.in_turn()]
        break_at(drive, 1, place, only_in_capture=True)
        with pytest.raises(RuntimeError) as raised:
            captured(drive)
        failed = raised.value
        if (runner, backend, place) == ("V2", "HT", "shared_experts"):
            # V2's capture is ended by vLLM itself, and the end of a broken one raises as well. (vLLM does not capture
            # high throughput; there it would read so.)
            assert "forked by the capture" in str(failed)
            failed = failed.__context__
        assert isinstance(failed, MicrobatchFailed)
        assert f"expert broke in {place}" in str(failed)
        assert log.current().name == "compute"
        mend(drive)
        captured(drive)
        assert all(torch.equal(a, b) for a, b in zip(tensors_of(drive.replay()), right, strict=True))


# Peers that are gone, runs that are dropped


# V1's caller gets the rows of microbatch 0 and nothing else.
GONE = [("V1", "[0.0, 0.0, 0.0, 0.0]"), ("V2", f"Microbatch 1 of 2 failed <- {NO_PEER}")]


@pytest.mark.parametrize(("runner", "theirs"), GONE)
def test_a_peer_that_finished_early_is_not_dereferenced(runner: str, theirs: str, upstream: dict[str, str]) -> None:
    name = f"{runner} early finisher"
    with drop_in():
        assert SCENARIOS[name]() == "8 rows"
    assert theirs in upstream[name]


def test_an_aborted_run_does_not_run_the_model(upstream: dict[str, str]) -> None:
    with drop_in():
        assert SCENARIOS["V2 aborted"]() == "0 microbatches ran; given back"
    assert upstream["V2 aborted"] == "2 microbatches ran; given back"


# What a step creates


def _created(case: Case, steps: int) -> dict[str, int]:
    with harness() as log:
        drive = Drive(case, log)
        drive.step()
        log.log.clear()
        threads = len(log.step_threads.started)
        for _ in range(steps):
            drive.step()
        made = sum(call.what == "stream.new" for call in log.log)
        return {"threads": len(log.step_threads.started) - threads, "streams": made}


@pytest.mark.parametrize("runner", ["V1", "V2"])
def test_a_step_creates_no_thread_and_no_stream(runner: str) -> None:
    assert _created(Case(runner), steps=3) == {"threads": 6, "streams": 6}
    with drop_in():
        before = threading.active_count()
        assert _created(Case(runner), steps=3) == {"threads": 0, "streams": 0}
        assert threading.active_count() == before


# Threads that have nothing to do with the step

FOREIGN = {
    "dbo_enabled": False,
    "dbo_current_ubatch_id": 0,
    "dbo_yield": None,
    "dbo_maybe_run_recv_hook": None,
    "dbo_switch_to_comm": None,
    "dbo_switch_to_compute": None,
    "dbo_switch_to_comm_sync": None,
    "dbo_switch_to_compute_sync": None,
    "dbo_yield_and_switch_from_compute_to_comm": None,
    "dbo_yield_and_switch_from_comm_to_compute": None,
    "dbo_register_recv_hook": None,
    "dbo_get_previous_event": None,
}


def _asked_by_a_foreign_thread(runner: str) -> dict[str, Any]:
    """What a thread of somebody else's gets from each function while microbatch 1 runs."""
    answers: dict[str, Any] = {}

    def ask() -> None:
        for name in FOREIGN:
            arguments = [list] if name in ("dbo_register_recv_hook", "dbo_get_previous_event") else []
            try:
                answers[name] = getattr(ubatching, name)(*arguments)
            except Exception as error:
                answers[name] = type(error).__name__

    with harness() as log:
        drive = Drive(Case(runner), log)

        def hook(place: str) -> None:
            if place == "end" and not answers:
                thread = threading.Thread(target=ask)
                thread.start()
                thread.join()

        drive.model.hook = hook
        drive.step()
    return answers


@pytest.mark.parametrize("runner", ["V1", "V2"])
def test_foreign_threads_are_told_that_there_is_no_step(runner: str) -> None:
    theirs = _asked_by_a_foreign_thread(runner)
    assert theirs.pop("dbo_enabled") is True
    assert set(theirs.values()) == {"KeyError"}
    with drop_in():
        assert _asked_by_a_foreign_thread(runner) == FOREIGN


# Captures


def _capture_modes(runner: str, given: str | None = None) -> list[str]:
    with harness() as log:
        drive = Drive(Case(runner, mode="capture"), log)
        if given is None:
            captured(drive)
        else:
            state, stream = drive.prepared(for_capture=True), drive.runner.capture_stream
            finish = drive.runner.begin_capturable_run(drive.runnable, drive.inputs, state, for_capture=True)
            with torch.cuda.graph(torch.cuda.CUDAGraph(), stream=stream, capture_error_mode=given):
                finish()
        # Whoever captures after this step gets torch's own default again.
        with torch.cuda.graph(torch.cuda.CUDAGraph(), stream=FakeStream(name="other", recorder=log)):
            pass
        return [call.detail[-1] for call in log.log if call.what == "graph.begin"]


@pytest.mark.parametrize("runner", ["V1", "V2"])
def test_captures_do_not_fear_the_cuda_calls_of_other_threads(runner: str) -> None:
    assert _capture_modes(runner) == ["global", "global"]
    with drop_in():
        assert _capture_modes(runner) == ["thread_local", "global"]


@pytest.mark.parametrize("given", ["relaxed", "global"])
def test_a_capture_mode_that_the_caller_states_is_kept(given: str) -> None:
    with drop_in():
        assert _capture_modes("V2", given) == [given, "global"]


# Ids and tables, also while a receive is run for a peer


def _ids_in_leftover_hooks() -> list[Any]:
    """Which id code sees that runs in a leftover recv hook at the end of microbatch 0."""
    ids: list[Any] = []

    def look(call: Call) -> None:
        if call.what == "ll.combine_recv" and call.who == "0":
            try:
                ids.append(ubatching.dbo_current_ubatch_id())
            except KeyError:
                ids.append("KeyError")

    with harness() as log:
        drive = Drive(Case(layers=1), log)
        log.observers.append(look)
        drive.step()
    return ids


def test_a_leftover_receive_sees_an_id() -> None:
    assert _ids_in_leftover_hooks() == ["KeyError"]
    with drop_in():
        assert _ids_in_leftover_hooks() == [0]
