"""The alarm between ranks, over real sockets whose other end the test holds."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from dbo_greenlet.rank_alarm import Failure, RankAlarm

SECONDS = 20.0


class Rank0:
    """The alarm of rank 0 of three, and the other ends of its connections to ranks 1 and 2."""

    def __init__(self) -> None:
        pairs = {peer: socket.socketpair() for peer in (1, 2)}
        self.far = {peer: pair[1] for peer, pair in pairs.items()}
        self.failed = threading.Event()
        self.alarm = RankAlarm(0, {peer: pair[0] for peer, pair in pairs.items()}, self.failed.set)

    def say(self, peer: int, **message: Any) -> None:
        self.far[peer].sendall(json.dumps(message).encode() + b"\n")

    def heard_by(self, peer: int) -> dict[str, Any]:
        self.far[peer].settimeout(SECONDS)
        line = b""
        while not line.endswith(b"\n"):
            line += self.far[peer].recv(1)
        return json.loads(line)


@pytest.fixture
def rank0() -> Iterator[Rank0]:
    rank0 = Rank0()
    yield rank0
    rank0.alarm.close()
    for connection in rank0.far.values():
        connection.close()


def test_the_first_failure_wins_and_is_told_to_all(rank0: Rank0) -> None:
    first, second = Failure(0, 1, "first"), Failure(0, 0, "second")
    rank0.alarm.raise_alarm(first)
    assert rank0.failed.is_set()
    rank0.alarm.raise_alarm(second)
    assert rank0.alarm.failure == first
    for peer in (1, 2):
        assert rank0.heard_by(peer) == {"kind": "failed", "failure": {"rank": 0, "microbatch": 1, "reason": "first"}}


def test_a_closed_connection_is_a_failure_and_is_told_to_the_rest(rank0: Rank0) -> None:
    rank0.far[1].close()
    assert rank0.failed.wait(SECONDS)
    assert rank0.alarm.failure.rank == 1
    assert rank0.heard_by(2)["failure"]["rank"] == 1


def test_a_closed_connection_after_a_farewell_is_not(rank0: Rank0) -> None:
    rank0.say(1, kind="farewell")
    rank0.far[1].close()
    # Two answers later the end of the other connection, which came before the questions, was noticed for certain.
    for _ in range(2):
        rank0.say(2, kind="who is waiting?")
        assert rank0.heard_by(2)["kind"] == "answer"
    assert rank0.alarm.failure is None
    assert rank0.alarm.roll_call(0.1) == {1: "gone", 2: "silent"}


def test_a_message_may_arrive_in_pieces_and_several_at_once(rank0: Rank0) -> None:
    message = json.dumps({"kind": "failed", "failure": {"rank": 2, "microbatch": None, "reason": "r"}}).encode()
    question = json.dumps({"kind": "who is waiting?"}).encode()
    rank0.far[2].sendall(question + b"\n" + message[:10])
    # The answer to the question shows that the first piece was read.
    assert rank0.heard_by(2) == {"kind": "answer", "state": "busy"}
    assert rank0.alarm.failure is None
    rank0.far[2].sendall(message[10:] + b"\n")
    assert rank0.failed.wait(SECONDS)
    assert rank0.alarm.failure == Failure(2, None, "r")


@pytest.mark.parametrize("line", [b"no json\n", b"{}\n", b"3\n", b'{"kind": "failed", "failure": {"rang": 1}}\n'])
def test_a_message_that_cannot_be_read_is_a_failure_of_its_sender(rank0: Rank0, line: bytes) -> None:
    rank0.far[1].sendall(line)
    assert rank0.failed.wait(SECONDS)
    assert rank0.alarm.failure.rank == 1
    assert "cannot read" in rank0.alarm.failure.reason


def test_the_roll_call_tells_who_waits(rank0: Rank0) -> None:
    states: dict[int, str] = {}
    asking = threading.Thread(target=lambda: states.update(rank0.alarm.roll_call(SECONDS)))
    asking.start()
    for peer, state in ((1, "waiting"), (2, "busy")):
        assert rank0.heard_by(peer) == {"kind": "who is waiting?"}
        rank0.say(peer, kind="answer", state=state)
    asking.join(SECONDS)
    assert states == {1: "waiting", 2: "busy"}
    rank0.alarm.waiting = True
    rank0.say(1, kind="who is waiting?")
    assert rank0.heard_by(1) == {"kind": "answer", "state": "waiting"}


def test_a_failure_ends_the_roll_call(rank0: Rank0) -> None:
    asking = threading.Thread(target=lambda: rank0.alarm.roll_call(10 * SECONDS))
    asking.start()
    assert rank0.heard_by(1) == {"kind": "who is waiting?"}
    rank0.say(1, kind="failed", failure={"rank": 1, "microbatch": 0, "reason": "r"})
    asking.join(SECONDS)
    assert not asking.is_alive()
