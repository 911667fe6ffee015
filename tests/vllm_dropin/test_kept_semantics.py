"""What vLLM's own and out-of-tree code relies on, with the drop-in installed."""

from __future__ import annotations

import inspect
import threading
from typing import Any

import pytest

pytest.importorskip("vllm", reason="needs vLLM, which is driven here (make test-vllm)")

import torch
from vllm import forward_context
from vllm.config import CUDAGraphMode
from vllm.forward_context import get_forward_context
from vllm.v1.worker import gpu_ubatch_wrapper, ubatching
from vllm.v1.worker.gpu import ubatch_utils
from vllm.v1.worker.gpu_ubatch_wrapper import UBatchWrapper

from dbo_greenlet.errors import ConfigurationError, MicrobatchFailed
from dbo_greenlet.vllm import patching
from tests.thread_state.programs import snapshot
from tests.vllm_dropin.drive import Case, Drive, drop_in, harness, run_case
from tests.vllm_dropin.fake_cuda import Call, who_runs
from tests.vllm_dropin.model import tensors_of
from tests.vllm_dropin.scenarios import break_at, captured

pytestmark = pytest.mark.vllm

BOTH = pytest.mark.parametrize("runner", ["V1", "V2"])
KINDS = pytest.mark.parametrize("backend", ["LL", "HT"])


@BOTH
@KINDS
def test_ids_tables_and_forward_context_are_right_at_every_call(runner: str, backend: str) -> None:
    seen: list[tuple[str, int, int | None, Any]] = []

    def look(call: Call) -> None:
        if call.what not in ("set_stream", "sm.give_back") and call.who != "-":
            in_table = ubatching._THREAD_ID_TO_CONTEXT.get(threading.get_ident())
            seen.append((call.who, ubatching.dbo_current_ubatch_id(), in_table, ubatching.dbo_enabled()))

    with drop_in(), harness() as log:
        drive = Drive(Case(runner, backend, layers=3), log)
        log.observers.append(look)
        drive.step()
        assert len(seen) > 40
        assert all((str(number), table, on) == (who, number, True) for who, number, table, on in seen)
        assert {who for who, *_ in seen} == {"0", "1"}
        assert ubatching.dbo_current_ubatch_id() == 0
        assert not ubatching.dbo_enabled()
        assert ubatching._THREAD_ID_TO_CONTEXT == {}
        assert ubatching._CURRENT_CONTEXTS == [None, None]


def _switching_model(log: list[Any]) -> Any:
    """Knows by its own inputs which microbatch it is, and looks at what the switches restored."""

    def model(positions: torch.Tensor, **other: Any) -> torch.Tensor:
        own = get_forward_context()
        number = ubatching.dbo_current_ubatch_id()
        contexts = list(ubatching._CURRENT_CONTEXTS)
        log.append(("registered", number, [None if c is None else c.id for c in contexts]))
        stream = torch.cuda.current_stream()
        for turn in range(4):
            log.append(("turn", number, turn))
            ubatching.dbo_yield()
            assert get_forward_context() is own
            assert own.attn_metadata["ubatch"] == number == ubatching.dbo_current_ubatch_id()
            assert torch.cuda.current_stream() is stream
            assert torch.is_inference_mode_enabled()
        return positions.float()

    return model


@BOTH
def test_contexts_are_all_registered_before_the_first_one_runs(runner: str) -> None:
    log: list[Any] = []
    with drop_in(), harness() as recorder:
        drive = Drive(Case(runner), recorder, runnable=_switching_model(log))
        out = drive.step()
        assert torch.equal(out, drive.inputs["positions"].float())
    assert log[0] == ("registered", 0, [0, 1])
    assert [entry for entry in log if entry[0] == "turn"] == [("turn", i, turn) for turn in range(4) for i in (0, 1)]


@BOTH
@pytest.mark.parametrize("fails", [False, True])
def test_the_callers_forward_context_and_torch_state_are_there_afterwards(runner: str, fails: bool) -> None:
    inside: list[bool] = []
    with drop_in(), harness() as log:
        drive = Drive(Case(runner), log)
        if fails:
            break_at(drive, 1, "end")
        look = drive.model.hook
        drive.model.hook = lambda place: (inside.append(torch.is_inference_mode_enabled()), look(place))
        state = drive.prepared() if runner == "V2" else None
        for inference in (True, False):
            with torch.inference_mode(inference), forward_context.override_forward_context(None):
                own = drive.context_v1(CUDAGraphMode.NONE)
                with forward_context.override_forward_context(own):
                    before = snapshot()
                    try:
                        if runner == "V1":
                            drive.wrapper(**drive.inputs)
                        else:
                            drive.runner.run(drive.runnable, drive.inputs, state)
                        assert not fails
                    except MicrobatchFailed:
                        assert fails
                    assert snapshot() == before
                    assert forward_context._forward_context is own
    # Microbatches run in inference mode, as vLLM's threads do, whatever the caller is in.
    assert inside
    assert all(inside)


def test_a_leftover_receive_is_run_once_at_the_end_of_the_microbatch_that_holds_it() -> None:
    order: list[str] = []

    def model(input_ids: torch.Tensor, **other: Any) -> torch.Tensor:
        who = who_runs()
        ubatching.dbo_yield()
        if who == "1":
            ubatching.dbo_register_recv_hook(lambda: order.append(f"receive of 1, run by {who_runs()}"))
        ubatching.dbo_yield()
        order.append(f"{who} goes on")
        return input_ids

    with drop_in(), harness() as log:
        Drive(Case(), log, runnable=model).step()
    assert order == ["0 goes on", "receive of 1, run by 0", "1 goes on"]


@BOTH
def test_a_step_may_run_on_any_thread(runner: str) -> None:
    """Executors run the model on a thread of theirs, and the next step maybe on another one."""
    outputs: list[Any] = []
    with drop_in(), harness() as log:
        drive = Drive(Case(runner, "HT", layers=2), log)
        right = drive.in_turn()[0].clone()

        def run() -> None:
            with torch.inference_mode():
                torch.cuda.set_stream(stream)
                outputs.append(drive.step())
                outputs.append(log.current() is stream)
                outputs.append(ubatching.dbo_enabled())

        stream = log.current()
        for _ in range(2):
            thread = threading.Thread(target=run)
            thread.start()
            thread.join()
        outputs += [drive.step(), log.current() is stream, ubatching.dbo_enabled()]
    assert all(torch.equal(out, right) for out in outputs[0::3])
    assert outputs[1::3] == [True] * 3
    assert outputs[2::3] == [False] * 3


def _unsplit(engaged: bool) -> tuple[list[Call], torch.Tensor]:
    with drop_in(decide=lambda config: engaged), harness() as log:
        drive = Drive(Case(mode="capture", layers=2), log)
        captured(drive)
        log.log.clear()
        whole = drive.context_v1(CUDAGraphMode.FULL)
        context = forward_context.create_forward_context(
            {**whole.attn_metadata[0], **drive.current.whole_v1()},
            drive.config,
            dp_metadata=drive.dp_metadata(8),
            cudagraph_runtime_mode=CUDAGraphMode.FULL,
            batch_descriptor=whole.batch_descriptor,
            slot_mapping=drive.current.slot_mappings_v1([slice_of_all()], 2)[0],
        )
        with forward_context.override_forward_context(context):
            return log.log, drive.wrapper(**drive.inputs)


def slice_of_all() -> Any:
    return ubatch_utils.UBatchSlice(slice(0, 8), slice(0, 8))


def test_a_step_that_is_not_split_goes_straight_to_the_model() -> None:
    """Also where a graph of the split step of that size exists, which vLLM must not replay for it."""
    theirs, out = _unsplit(engaged=False)
    ours, same = _unsplit(engaged=True)
    assert torch.equal(out, same)
    assert ours == theirs
    assert [call.what for call in ours][:2] == ["layer0.attention", "router"]


# Out-of-tree users


# Since vLLM 0.31.
SLICES_PADDING = "is_padding" in inspect.signature(UBatchWrapper._make_ubatch_metadata).parameters


class OutOfTreeWrapper(UBatchWrapper):
    """Slices and chooses for itself, and calls the two methods that are replaced."""

    def __call__(self, **inputs: Any) -> Any:
        context = get_forward_context()
        metadata = self._make_ubatch_metadata(
            ubatch_slices=context.ubatch_slices,
            attn_metadata=context.attn_metadata,
            slot_mapping=context.slot_mapping,
            compute_stream=torch.cuda.current_stream(),
            dp_metadata=[None, None],
            batch_descriptor=None,
            cudagraph_runtime_mode=CUDAGraphMode.NONE,
            **({"is_padding": context.is_padding} if SLICES_PADDING else {}),
            **inputs,
        )
        capture = context.cudagraph_runtime_mode is CUDAGraphMode.FULL
        run = self._capture_ubatches if capture else self._run_ubatches
        return run(ubatch_metadata=metadata, model=self.runnable)


@pytest.mark.parametrize("mode", ["eager", "capture"])
def test_a_subclass_may_call_the_replaced_methods(mode: str) -> None:
    with drop_in(), harness() as log:
        drive = Drive(Case(mode=mode, layers=2), log, wrapper_class=OutOfTreeWrapper)
        right = drive.in_turn()[0].clone()
        out = captured(drive) if mode == "capture" else drive.step()
        assert isinstance(drive.wrapper, UBatchWrapper)
        assert torch.equal(out, right)
        assert log.step_threads.started == []
        assert list(drive.wrapper.cudagraphs) == ([8] if mode == "capture" else [])


def test_a_wrapper_still_hands_attributes_through_to_the_model() -> None:
    with drop_in(), harness() as log:
        drive = Drive(Case(mode="capture"), log)
        wrapper = drive.wrapper
        assert wrapper.hidden_size == drive.model.hidden_size
        assert wrapper.unwrap() is drive.model
        with pytest.raises(AttributeError):
            _ = wrapper.no_such_attribute
        captured(drive)
        assert wrapper.graph_pool == "global"
        assert wrapper.ready_barrier.parties == 3
        assert list(wrapper.cudagraphs) == [8]
        wrapper.clear_graphs()
        assert wrapper.cudagraphs == {}


def test_an_out_of_tree_runner_with_threads_of_its_own_still_works() -> None:
    """Contexts entered by threads: hand-overs, streams and receives are vLLM's, as without the drop-in."""

    def run() -> list[Any]:
        order: list[Any] = []
        with harness() as log, forward_context.override_forward_context(None):  # the runner puts the caller's back
            drive = Drive(Case(), log)
            slices = drive.current.slices()
            comm = torch.cuda.Stream()
            contexts = ubatching.make_ubatch_contexts(
                num_micro_batches=2,
                compute_stream=torch.cuda.current_stream(),
                comm_stream=comm,
                forward_contexts=[
                    forward_context.create_forward_context(part, drive.config)
                    for part in drive.current.metadata_v1(slices)
                ],
                ready_barrier=threading.Barrier(3),
            )

            def body(context: Any) -> None:
                with context:
                    for turn in range(3):
                        order.append((turn, ubatching.dbo_current_ubatch_id(), who_runs()))
                        ubatching.dbo_maybe_run_recv_hook()
                        ubatching.dbo_register_recv_hook(lambda t=turn, c=context: order.append(("receive", t, c.id)))
                        ubatching.dbo_yield()
                        ubatching.dbo_yield_and_switch_from_compute_to_comm()
                        order.append(("on the comm stream", log.current().name == comm.name))
                        ubatching.dbo_switch_to_compute_sync()

            threads = [threading.Thread(target=body, args=(context,)) for context in contexts]
            for thread in threads:
                thread.start()
            contexts[0].ready_barrier.wait()
            contexts[0].cpu_wait_event.set()
            for thread in threads:
                thread.join(20)
                assert not thread.is_alive()
        return order

    stock = run()
    assert [entry for entry in stock if entry[0] == "receive"] == [("receive", t, c) for t in range(3) for c in (0, 1)]
    with drop_in():
        assert run() == stock


# Installing and taking out


@BOTH
@pytest.mark.parametrize("mode", ["eager", "capture"])
def test_a_runner_that_is_not_engaged_goes_vllms_own_way(runner: str, mode: str) -> None:
    case = Case(runner, "HT", mode, layers=2)
    stock = run_case(case)
    with drop_in(decide=lambda config: False):
        installed = run_case(case)
    assert installed.log == stock.log
    assert [[one.tolist() for one in step] for step in installed.outputs] == [
        [one.tolist() for one in step] for step in stock.outputs
    ]


def _what_is_replaced() -> dict[str, Any]:
    context, wrapper, runner = ubatching.UBatchContext, gpu_ubatch_wrapper.UBatchWrapper, ubatch_utils.UBatchRunner
    functions = {name: value for name, value in vars(ubatching).items() if name.startswith("dbo_")}
    return {
        **{name: (id(function), function.__code__) for name, function in functions.items()},
        **{
            f"{owner.__name__}.{name}": value
            for owner in (context, wrapper, runner)
            for name, value in vars(owner).items()
            if not name.startswith("__") or name in ("__init__", "__call__", "__enter__", "__exit__")
        },
        "ubatching": set(vars(ubatching)),
    }


def test_uninstall_puts_everything_back() -> None:
    before = _what_is_replaced()
    assert not patching.is_installed()
    with drop_in():
        assert patching.is_installed()
        inside = _what_is_replaced()
        changed = {name for name in before if inside[name] != before[name]}
        assert changed > {"UBatchContext._cpu_yield", "UBatchWrapper._run_ubatches", "UBatchRunner.abort_pending_run"}
        # Function objects stay the same: others hold them.
        assert all(inside[name][0] == before[name][0] for name in before if name.startswith("dbo_"))
        patching.install(decide=lambda config: False)  # twice is harmless
    assert not patching.is_installed()
    assert _what_is_replaced() == before
    patching.uninstall()  # and so is this


@BOTH
def test_a_runner_that_was_engaged_goes_on_with_threads_after_uninstall(runner: str) -> None:
    with harness() as log:
        with drop_in():
            drive = Drive(Case(runner, layers=2), log)
            first = [one.clone() for one in tensors_of(drive.step())]
            assert log.step_threads.started == []
        second = tensors_of(drive.step())
        assert len(log.step_threads.started) == 2
        assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_uninstall_waits_for_the_step_to_end() -> None:
    """Its next yield would find nobody to hand over to."""
    with drop_in(), harness() as log:
        drive = Drive(Case(), log)
        told = []

        def model(**inputs: Any) -> torch.Tensor:
            with pytest.raises(ConfigurationError, match="a step is running") as caught:
                patching.uninstall()
            told.append(caught.value)
            return drive.model(**inputs)

        drive.wrapper.runnable = model
        drive.step()
    assert len(told) == 2
