"""The CUDA device, thread state and a whole model on one GPU. Run where there is one: python -m pytest -m gpu"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device; run: python -m pytest -m gpu"),
]

CARRIERS = ["greenlet", "thread"]
ASSETS = Path(__file__).parents[2] / "dbo_greenlet" / "assets"


@pytest.fixture
def device() -> Any:
    from dbo_greenlet.devices.cuda import CudaDevice

    return CudaDevice()


def test_one_object_per_stream(device: Any) -> None:
    assert device.current_stream() is device.current_stream()
    stream = device.new_stream("comm")
    before = device.current_stream()
    with device.stream_scope(stream):
        assert device.current_stream() is stream
        assert torch.cuda.current_stream() == stream.raw
    assert device.current_stream() is before


def test_an_event_orders_two_streams(device: Any) -> None:
    comm, event = device.new_stream("comm"), device.new_event()
    compute = device.current_stream()
    x = torch.zeros(1, device="cuda")
    torch.cuda._sleep(50_000_000)  # about 30 ms: without the event the read below would come first
    x.fill_(1)
    device.record(event, compute)
    with device.stream_scope(comm):
        device.wait(comm, event)
        y = x.clone()
    device.synchronize()
    assert y.item() == 1


def test_without_raw_entry_points_the_public_ones_do(monkeypatch: pytest.MonkeyPatch) -> None:
    from dbo_greenlet.devices import cuda

    for name in ("_raw_current", "_raw_set"):
        monkeypatch.setattr(cuda, name, None)
    monkeypatch.setattr(cuda, "_event_base", torch.cuda.Event)
    device = cuda.CudaDevice()
    test_one_object_per_stream(device)
    test_an_event_orders_two_streams(device)
    assert device.stream_key() == torch.cuda.current_stream().cuda_stream


def test_a_replaced_set_stream_is_called(device: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines replace it to keep their own note of the current stream."""
    noted: list[Any] = []
    original = torch.cuda.set_stream

    def set_stream(stream: Any) -> None:
        noted.append(stream)
        original(stream)

    monkeypatch.setattr(torch.cuda, "set_stream", set_stream)
    stream = device.new_stream("comm")
    with device.stream_scope(stream):
        assert device.current_stream() is stream and noted == [stream.raw]
    assert len(noted) == 2


def test_a_stream_that_somebody_else_made_is_put_back(device: Any) -> None:
    """By its handle alone: the device has not made it, but met it."""
    theirs = torch.cuda.Stream()
    with torch.cuda.stream(theirs):
        key = device.stream_key()
        met = device.current_stream()
    assert key == theirs.cuda_stream and device.stream_key() != key
    device.put_stream(key)
    try:
        assert torch.cuda.current_stream() == theirs and device.current_stream() is met
    finally:
        torch.cuda.set_stream(torch.cuda.default_stream())


def test_events_are_used_again(device: Any) -> None:
    pool = device.event_pool
    first = pool.take()
    device.record(first, device.current_stream())
    pool.give_back(first)
    assert pool.take() is first and pool.take() is not first


@pytest.mark.parametrize("carrier", CARRIERS)
def test_high_throughput_layers_equal_the_same_in_turn(device: Any, carrier: str) -> None:
    """Sleeps on both streams make a missing wait show as a wrong number."""
    from dbo_greenlet import Scheduler, make_ubatch_contexts
    from dbo_greenlet import yields as y

    weights = [torch.randn(64, 64, device="cuda") / 8 for _ in range(4)]

    def model(x: torch.Tensor, streams: Any) -> torch.Tensor:
        for k, weight in enumerate(weights):
            torch.cuda._sleep(2_000_000)
            x = x @ weight
            y.dbo_yield_and_switch_from_compute_to_comm(f"layer{k}.dispatch")
            torch.cuda._sleep(1_000_000)
            received = x.flip(0).clone()
            received.record_stream(streams[0])
            y.dbo_switch_to_compute_sync()
            x = torch.relu(received)
            y.dbo_yield_and_switch_from_compute_to_comm(f"layer{k}.combine")
            torch.cuda._sleep(1_000_000)
            combined = x.flip(0).clone()
            combined.record_stream(streams[0])
            y.dbo_yield_and_switch_from_comm_to_compute(f"layer{k}.combined")
            x = combined + 1
        return x

    inputs = [torch.randn(32, 64, device="cuda") for _ in range(2)]
    streams = [device.current_stream().raw]
    expected = [model(x, streams) for x in inputs]
    contexts = make_ubatch_contexts(2, device=device)
    for _ in range(3):
        result = Scheduler(carrier=carrier, strict=True).run([lambda x=x: model(x, streams) for x in inputs], contexts)
        device.synchronize()
        for ours, theirs in zip(result.outputs, expected, strict=True):
            assert torch.equal(ours, theirs)
        assert result.yields == (12, 12)
    assert device.current_stream() is contexts[0].compute_stream


def test_streams_of_the_user_stay_with_the_microbatch(device: Any) -> None:
    from dbo_greenlet import Scheduler, dbo_yield

    side = [torch.cuda.Stream(), torch.cuda.Stream()]

    def entry(i: int) -> list[bool]:
        seen = [torch.cuda.current_stream() == torch.cuda.default_stream()]
        with torch.cuda.stream(side[i]):
            dbo_yield("inside")
            seen.append(torch.cuda.current_stream() == side[i])
            dbo_yield("inside again")
            seen.append(torch.cuda.current_stream() == side[i])
        dbo_yield("outside")
        seen.append(torch.cuda.current_stream() == torch.cuda.default_stream())
        return seen

    assert Scheduler(strict=True).run([lambda: entry(0), lambda: entry(1)]).outputs == [[True] * 4] * 2
    assert torch.cuda.current_stream() == torch.cuda.default_stream()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("count", [2, 3])
def test_the_model_split_equals_the_same_slices_in_turn(device: Any, dtype: str, count: int) -> None:
    from dbo_greenlet.all2all.loopback import Loopback
    from dbo_greenlet.batching import StepInput, VoteSettings
    from dbo_greenlet.moe import DeepseekV2Config, KVCache, load_model
    from dbo_greenlet.runner import Runner

    folder = ASSETS / "checkpoint"
    config = DeepseekV2Config.from_folder(folder)
    kind = getattr(torch, dtype)
    model = load_model(folder, Loopback(config.n_routed_experts), kind, "cuda")
    lengths = [17, 5, 31, 1, 9]
    starts = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32)
    total = int(starts[-1])
    positions = torch.cat([torch.arange(n) for n in lengths])
    rows = torch.arange(len(lengths))
    step = StepInput(
        positions=positions.cuda(),
        query_start_loc=starts.cuda(),
        seq_lens=torch.tensor(lengths, dtype=torch.int32).cuda(),
        slot_mapping=(torch.repeat_interleave(rows, torch.tensor(lengths)) * 64 + positions).cuda(),
        request_rows=rows.cuda(),
        num_tokens=total,
        num_padded_tokens=total,
        input_ids=torch.randint(0, 200, (total,), generator=torch.Generator().manual_seed(1)).cuda(),
        query_start_loc_cpu=starts,
        seq_lens_cpu=torch.tensor(lengths, dtype=torch.int32),
    )
    outputs = {}
    for mode in ("auto", "sequential", "never"):
        cache = KVCache(config, len(lengths), 64, kind, "cuda")
        runner = Runner(model, kv_cache=cache, settings=VoteSettings(count, count, count), device=device, strict=True)
        out = runner.step(step, mode=mode)
        outputs[mode] = out.output
        assert out.decision.split is (mode != "never")
    device.synchronize()
    assert torch.equal(outputs["auto"], outputs["sequential"])
    tolerance = 1e-4 if dtype == "float32" else 0.1
    assert (outputs["auto"] - outputs["never"]).abs().max().item() < tolerance * outputs[
        "never"
    ].abs().max().item() + tolerance
