"""One small bug of each kind in the layer programs, as somebody might write it."""

from __future__ import annotations

from typing import Any

from dbo_greenlet.stream_program import Access, Transfer
from dbo_greenlet.testing.layer_programs import HighThroughput, LowLatency, high_throughput, low_latency
from dbo_greenlet.yields import (
    dbo_switch_to_comm,
    dbo_switch_to_comm_sync,
    dbo_switch_to_compute,
    dbo_yield,
)


class ReadsTooEarly(LowLatency):
    """race in disguise: the experts run before the recv hook, which comes with the next send."""

    def moe(self, i: int, layer: int) -> None:
        plan, costs, device = self.plan, self.costs, self.device
        self.receive_due()
        sent = device.send("D", costs.dispatch, accesses=plan.d_send[i])
        dbo_yield(f"layer{layer}.dispatch")
        self.experts(i, layer)
        self.receive(sent, plan.d_receive[i])
        self.receive_due()
        sent = device.send("C", costs.combine, accesses=plan.c_send[i])
        self.shared(i, layer)
        self.leave(sent, plan.c_receive[i], f"layer{layer}.combine")


class ReceivesTwice(LowLatency):
    """The hook is left to the sibling, and called once more after the yield."""

    def leave(self, sent: Transfer, accesses: tuple[Access, ...], site: str) -> None:
        super().leave(sent, accesses, site)
        if sent.name == "C":
            self.receive(sent, accesses)


class NeverReceives(LowLatency):
    """The yield without the hook."""

    def leave(self, sent: Transfer, accesses: tuple[Access, ...], site: str) -> None:
        if sent.name == "D":
            dbo_yield(site)
        else:
            super().leave(sent, accesses, site)


class SharesRows(LowLatency):
    """All microbatches receive their rows into the same buffer."""

    def leave(self, sent: Transfer, accesses: tuple[Access, ...], site: str) -> None:
        super().leave(sent, self.plan.d_receive[0] if sent.name == "D" else accesses, site)

    def experts(self, i: int, layer: int) -> None:
        self.device.work("MLP", self.costs.mlp, reads=[self.plan.rows[0]], writes=[self.plan.outputs[i]])


class YieldsInsideAttention(LowLatency):
    """A yield between the two halves of attention, which share one workspace."""

    def attention(self, i: int, layer: int) -> None:
        plan, costs, work = self.plan, self.costs, self.device.work
        work("A0", costs.a0, accesses=plan.a0[i][layer])
        dbo_yield(f"layer{layer}.attention")
        work("A1", costs.a1, accesses=plan.a1[i][layer])


class ForgetsToWait(HighThroughput):
    """Back to the compute stream without waiting for the dispatch."""

    def back_to_compute(self) -> None:
        dbo_switch_to_compute()


class ForgetsToRecord(HighThroughput):
    """Over to the comm stream without an event."""

    def over_to_comm(self, site: str) -> None:
        dbo_yield(site)
        dbo_switch_to_comm()


class RecordsAfterTheSwitch(HighThroughput):
    """The event that the dispatch waits for is recorded when the yield has returned."""

    def over_to_comm(self, site: str) -> None:
        if not site.endswith("before_dispatch"):
            return super().over_to_comm(site)
        dbo_yield(site)
        dbo_switch_to_comm_sync()
        return None


class LogsOnComm(HighThroughput):
    """Something is left on the comm stream by the last one to return, and nobody waits for it."""

    def result(self, i: int) -> Any:
        value = super().result(i)
        comm = self.device.new_stream("log")
        self.device.work("log", 5.0, reads=[self.plan.results[i]], stream=self._forked(comm))
        return value

    def _forked(self, stream: Any) -> Any:
        event = self.device.new_event()
        self.device.record(event, self.device.current_stream())
        self.device.wait(stream, event)
        return stream


PLANTED: dict[str, Any] = {
    "race": high_throughput(1, numerics=False, kind=ForgetsToWait),
    "receive-before-use": low_latency(1, numerics=False, kind=ReadsTooEarly),
    "hook-twice": low_latency(1, numerics=False, kind=ReceivesTwice),
    "hook-never": low_latency(1, numerics=False, kind=NeverReceives),
    "workspace-reused": low_latency(1, numerics=False, kind=YieldsInsideAttention),
    "event-after-switch": high_throughput(1, numerics=False, kind=RecordsAfterTheSwitch),
    "unjoined-stream": high_throughput(1, numerics=False, kind=LogsOnComm),
    "race with a transfer in flight": low_latency(1, numerics=False, kind=SharesRows),
    "race without an event": high_throughput(1, numerics=False, kind=ForgetsToRecord),
}
