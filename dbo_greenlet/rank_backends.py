"""The process groups of one generation of ranks, and how to make everything that is pending on them fail at once.

They are made directly rather than through `init_process_group`: a host program may have a default group of its own, and
after a failure ours must be thrown away and made anew, which the default one cannot be.

`ProcessGroupGloo.abort` does nothing (torch 2.9 to 2.13), and dropping such a group waits for what is pending. But a
receive that times out closes all connections of its group, on both sides, and every operation on them fails at once. So
a receive that nobody sends to, with a timeout of a millisecond, is our abort.

Rejected: waiting in short slices and looking at a flag in between, which taxes every collective and leaves the buffers
of the abandoned ones in the hands of gloo's threads; and leaving it to the connections of the rank that failed, because
a rank that waits for a third one does not notice them.
"""

from __future__ import annotations

import threading
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

__all__ = ["Backends"]

# Long enough for an end that nothing holds up, and short beside the time in which a failure is to be known.
_END_SECONDS = 2.0

# No collective uses this tag: theirs have a prefix in the upper half.
_NEVER_SENT = 0x0DB0


class Backends:
    """`votes`: gloo, for small CPU tensors. `data`: gloo or, on a CUDA `device`, NCCL, for the tokens.

    `address` is this machine's, as the other ranks reach it. Raises `RuntimeError` if the ranks cannot connect.
    """

    def __init__(
        self, store: dist.Store, rank: int, world_size: int, address: str, device: torch.device, seconds: float
    ) -> None:
        self._others = [other for other in range(world_size) if other != rank]
        self._gloo = [_gloo(dist.PrefixStore("votes", store), rank, world_size, address, seconds)]
        self.votes: dist.Backend = self._gloo[0]
        self.data: dist.Backend
        self._nccl_open = device.type == "cuda"
        if self._nccl_open:
            self.data = _nccl(dist.PrefixStore("data", store), rank, world_size, seconds)
        else:
            self._gloo.append(_gloo(dist.PrefixStore("data", store), rank, world_size, address, seconds))
            self.data = self._gloo[1]

    def gather(self, rows: Tensor, mine: Tensor) -> dist.Work:
        """All-gather of `mine` [n] into `rows` [world_size x n], on the CPU."""
        return self.votes._allgather_base(rows, mine)

    def all_to_all(self, received: Tensor, sent: Tensor, received_rows: list[int], sent_rows: list[int]) -> dist.Work:
        """Rows of `sent` to every rank, as many as `sent_rows` says or, if it is empty, the same number to each."""
        return self.data.alltoall_base(received, sent, received_rows, sent_rows)

    def cut(self) -> None:
        """Make every pending operation fail now, here and on the ranks at the other end. Any thread may call it."""
        for backend in self._gloo:
            for other in self._others:
                try:
                    backend.recv([torch.empty(1, dtype=torch.uint8)], other, _NEVER_SENT).wait(
                        timedelta(milliseconds=1)
                    )
                except RuntimeError:
                    # It must fail. A connection that is closed already fails without closing the rest, so ask them all.
                    continue
        self._close_nccl(abort=True)

    def close(self, pending: bool) -> None:
        """Give the groups up; `pending` says whether an operation may still be going on."""
        if pending:
            # Dropping a gloo group waits for what is pending on it.
            self.cut()
        else:
            self._close_nccl(abort=False)

    def _close_nccl(self, abort: bool) -> None:
        if self._nccl_open:
            self._nccl_open = False
            # NCCL does not give a communicator up as long as a CUDA graph holds operations of it. It stops them all the
            # same; only the thread that asked waits, until the graphs are gone, and that must not be ours.
            end = self.data.abort if abort else self.data.shutdown
            thread = threading.Thread(target=end, name="dbo_greenlet: end of NCCL", daemon=True)
            thread.start()
            thread.join(_END_SECONDS)


def _gloo(store: dist.Store, rank: int, world_size: int, address: str, seconds: float) -> dist.Backend:
    options = dist.ProcessGroupGloo._Options()
    options._timeout = timedelta(seconds=seconds)
    # Without a device gloo asks the resolver for the host's name, which in a container may lead nowhere.
    options._devices = [dist.ProcessGroupGloo.create_device(hostname=address)]
    return dist.ProcessGroupGloo(store, rank, world_size, options)


def _nccl(store: dist.Store, rank: int, world_size: int, seconds: float) -> dist.Backend:
    options = dist.ProcessGroupNCCL.Options()
    # NCCL's own watchdog ends the process. Ours, which names the stalled rank, must come first.
    options._timeout = timedelta(seconds=2 * seconds)
    return dist.ProcessGroupNCCL(store, rank, world_size, options)
