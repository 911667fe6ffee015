"""How a rank tells the others that it failed, and how they notice one that cannot tell.

One plain TCP connection between every two ranks, and one thread on each rank that sleeps in `select` until something
arrives. Three things can:

* a message that a rank failed: who, in which microbatch, why;
* the end of a connection without a farewell: the process is gone. The operating system closes the sockets of a killed
  process, so this needs no cooperation and no time limit;
* the question "are you waiting in a collective?", answered by the thread. A rank whose collective timed out asks it to
  find out which rank is the stalled one.

The first failure wins; it is told to every rank and handed to `on_failure`, which ends the pending collectives.

Why connections of our own. Gloo's error says "connection closed by peer" and gives a port, not a rank, and a rank that
waits for a third one gets no error at all. A key in the rendezvous store is lost with the process that hosts the store,
and says nothing of a killed rank. Heartbeats were rejected: a step that holds Python's interpreter lock for seconds (a
compilation, say) would look dead, and choosing their period trades speed of detection against false alarms.

What it cannot see is a host that vanishes without closing its connections; the group's timeout finds that.
"""

from __future__ import annotations

import contextlib
import json
import secrets
import selectors
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from .errors import RankFailedError

if TYPE_CHECKING:
    from torch.distributed import Store

__all__ = ["Failure", "RankAlarm", "connect_ranks", "local_address"]

# A message is a few hundred bytes and fits the socket's buffer; a peer that does not read it is stalled, and must not
# stall us.
_SEND_SECONDS = 1.0
_LONGEST_REASON = 2000
# A rank greets as soon as it is connected; a stranger that says nothing must not keep the others waiting for long.
_GREETING_SECONDS = 10.0


@dataclass(frozen=True)
class Failure:
    """Rank `rank` failed, in `microbatch` where that is known, because of `reason`."""

    rank: int
    microbatch: int | None
    reason: str

    def error(self) -> RankFailedError:
        return RankFailedError(self.rank, self.microbatch, self.reason)


class RankAlarm:
    """This rank's end of the connections; `peers` maps each other rank to its socket.

    `waiting` is for the owner to set while it waits in a collective. `on_failure` runs once, on whichever thread brings
    the first failure.
    """

    def __init__(self, rank: int, peers: dict[int, socket.socket], on_failure: Callable[[], None]) -> None:
        self.rank = rank
        self.waiting = False
        self.failure: Failure | None = None
        self._peers = peers
        self._on_failure = on_failure
        self._left: set[int] = set()
        self._answers: dict[int, str] = {}
        self._unread = dict.fromkeys(peers, b"")
        self._changed = threading.Condition()
        self._sending = threading.Lock()
        self._selector = selectors.DefaultSelector()
        for peer, connection in peers.items():
            connection.settimeout(_SEND_SECONDS)
            self._selector.register(connection, selectors.EVENT_READ, peer)
        self._stop, stopped = socket.socketpair()
        self._selector.register(stopped, selectors.EVENT_READ, None)
        self._stopped = stopped
        self._thread = threading.Thread(target=self._listen, name="dbo_greenlet rank alarm", daemon=True)
        self._thread.start()

    def raise_alarm(self, failure: Failure) -> None:
        """Record `failure` and tell every rank, unless another one came first."""
        if self._record(failure):
            self._tell("failed", failure=asdict(failure))
            self._on_failure()

    def roll_call(self, seconds: float) -> dict[int, str]:
        """What every other rank is doing: "waiting" in a collective, "busy" elsewhere, "gone", or "silent".

        Returns at once when a failure becomes known, and after `seconds` at the latest.
        """
        with self._changed:
            self._answers.clear()
        self._tell("who is waiting?")
        with self._changed:
            self._changed.wait_for(
                lambda: self.failure is not None or self._answers.keys() | self._left >= self._peers.keys(), seconds
            )
            return {
                peer: "gone" if peer in self._left else self._answers.get(peer, "silent")
                for peer in sorted(self._peers)
            }

    def close(self) -> None:
        """Say farewell and end the thread; the other ranks take it for a departure, not for a failure."""
        self._tell("farewell")
        self._stop.close()
        self._thread.join()
        for connection in self._peers.values():
            # Closing with something unread resets the connection, and the peer might lose what it has not read yet.
            connection.setblocking(False)
            with contextlib.suppress(OSError):
                while connection.recv(65536):
                    continue
            connection.close()
        self._stopped.close()
        self._selector.close()

    def _record(self, failure: Failure) -> bool:
        with self._changed:
            if self.failure is not None:
                return False
            self.failure = failure
            self._changed.notify_all()
            return True

    def _tell(self, kind: str, *, to: int | None = None, **content: Any) -> None:
        line = json.dumps({"kind": kind, **content}).encode() + b"\n"
        for peer in self._peers if to is None else (to,):
            # OSError: gone or stalled. Its connection ends, or the group's timeout comes; there is nobody to tell.
            with self._sending, contextlib.suppress(OSError):
                self._peers[peer].sendall(line)

    def _listen(self) -> None:
        while True:
            for ready, _ in self._selector.select():
                if ready.data is None:
                    return
                self._read(ready.data)

    def _read(self, peer: int) -> None:
        try:
            received = self._peers[peer].recv(65536)
        except OSError:
            # A reset connection is as much of an end as a closed one.
            received = b""
        if not received:
            self._selector.unregister(self._peers[peer])
            if peer not in self._left:
                self.raise_alarm(Failure(peer, None, "its process ended without announcing a failure"))
            return
        *lines, self._unread[peer] = (self._unread[peer] + received).split(b"\n")
        try:
            for line in lines:
                self._hear(peer, json.loads(line))
        except (ValueError, KeyError, TypeError) as error:
            # Ranks of different versions meet here before they can compare their versions.
            self.raise_alarm(Failure(peer, None, f"it sent a message that this version cannot read: {error!r}"))

    def _hear(self, peer: int, message: dict[str, Any]) -> None:
        kind = message["kind"]
        if kind == "failed":
            if self._record(Failure(**message["failure"])):
                self._on_failure()
        elif kind == "who is waiting?":
            self._tell("answer", to=peer, state="waiting" if self.waiting else "busy")
        elif kind == "answer":
            with self._changed:
                self._answers[peer] = message["state"]
                self._changed.notify_all()
        elif kind == "farewell":
            with self._changed:
                self._left.add(peer)
                self._changed.notify_all()


def shorten(reason: str) -> str:
    """`reason`, cut where it would not fit a message."""
    return reason if len(reason) <= _LONGEST_REASON else reason[:_LONGEST_REASON] + " ..."


def local_address(host: str) -> str:
    """The address under which this machine talks to `host`: what other ranks can reach it by."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        # Connecting a datagram socket sends nothing; it only chooses the interface. The port plays no part.
        probe.connect((host, 9))
        return str(probe.getsockname()[0])


def connect_ranks(store: Store, rank: int, world_size: int, address: str, seconds: float) -> dict[int, socket.socket]:
    """One connection to every other rank of the group; they meet through `store`, which is used for nothing else.

    Raises `OSError` (a `TimeoutError` after `seconds`) or the store's `RuntimeError` if not all of them come.
    """
    deadline = time.monotonic() + seconds
    peers: dict[int, socket.socket] = {}
    # The token keeps out whoever else connects to the port: a port scanner, a rank of another job.
    token = secrets.token_hex(16)
    with socket.create_server((address, 0), backlog=world_size) as server:
        port = server.getsockname()[1]
        store.set(f"alarm/{rank}", json.dumps([address, port, token]))
        for peer in range(rank):
            peer_address, peer_port, peer_token = json.loads(store.get(f"alarm/{peer}"))
            connection = socket.create_connection((peer_address, peer_port), _remaining(deadline))
            connection.sendall(json.dumps([peer_token, rank]).encode() + b"\n")
            peers[peer] = connection
        while len(peers) < world_size - 1:
            server.settimeout(_remaining(deadline))
            connection, _ = server.accept()
            connection.settimeout(min(_remaining(deadline), _GREETING_SECONDS))
            greeted = _greeting(connection, token)
            if greeted is None:
                connection.close()
            else:
                peers[greeted] = connection
    for connection in peers.values():
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return peers


def _remaining(deadline: float) -> float:
    remaining = deadline - time.monotonic()
    if remaining <= 0:
        raise TimeoutError("not every rank connected in time")
    return remaining


def _greeting(connection: socket.socket, token: str) -> int | None:
    """The rank at the other end of a new connection, or None for whoever does not know the token."""
    line = b""
    try:
        # One byte at a time: what follows the line belongs to the alarm's own reader.
        while not line.endswith(b"\n") and len(line) < 200:
            byte = connection.recv(1)
            if not byte:
                return None
            line += byte
        their_token, rank = json.loads(line)
    except (OSError, ValueError, TypeError):
        # A stranger may send anything, or nothing, or hang up.
        return None
    return int(rank) if their_token == token else None
