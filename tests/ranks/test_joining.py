"""Meeting, agreeing on settings, voting, and what is refused before it begins."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist

from dbo_greenlet.errors import ConfigurationError, RankFailedError, RanksDisagreeError
from dbo_greenlet.rank_alarm import connect_ranks
from dbo_greenlet.ranks import RankGroup, serve_store
from tests.ranks import rank_tasks
from tests.ranks.rank_pool import RankPool


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    pool = RankPool(3)
    pool.make_groups("three", 3)
    yield pool
    pool.close()


def test_a_vote_brings_every_ranks_row(pool: RankPool) -> None:
    assert pool.check(rank_tasks.one_step, name="three") == [True] * 3


def test_equal_settings_are_agreed_on(pool: RankPool) -> None:
    settings = {
        "microbatches": 2,
        "model": "tiny",
        "thresholds": {"decode": 32, "prefill": 512},
        "dtype": torch.float32,
    }
    other_order = dict(reversed(settings.items()))
    assert pool.check(rank_tasks.agree, name="three", settings=[settings, other_order, settings]) == [None] * 3


def test_every_difference_is_named_on_every_rank_and_the_group_lives_on(pool: RankPool) -> None:
    settings = [{"model": "tiny", "seed": 1, "n": 2}, {"model": "tiny", "seed": 1, "n": 3}, {"model": "large", "n": 2}]
    for error in pool.run(rank_tasks.agree, name="three", settings=settings):
        assert isinstance(error, RanksDisagreeError)
        text = str(error)
        assert 'model: rank 0 has "tiny", rank 1 has "tiny", rank 2 has "large"' in text
        assert "seed: rank 0 has 1, rank 1 has 1, rank 2 has nothing" in text
        assert "n: rank 0 has 2, rank 1 has 3, rank 2 has 2" in text
        assert "version" not in text
    assert pool.check(rank_tasks.one_step, name="three") == [True] * 3


def test_another_version_of_the_package_is_named(pool: RankPool) -> None:
    versions = ["1.0", "1.0", "1.1"]
    for error in pool.run(rank_tasks.agree, name="three", settings=[{}] * 3, versions=versions):
        assert isinstance(error, RanksDisagreeError)
        assert 'dbo_greenlet version: rank 0 has "1.0", rank 1 has "1.0", rank 2 has "1.1"' in str(error)


def test_joining_from_the_environment(pool: RankPool) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    assert pool.check(rank_tasks.join_from_env, range(2), port=port) == [[[0], [1]]] * 2


def test_an_environment_without_ranks_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(variable, raising=False)
    with pytest.raises(ConfigurationError, match="RANK"):
        RankGroup.from_env()


def test_a_rank_that_does_not_come_is_named() -> None:
    with pytest.raises(RankFailedError, match=r"did not join within 0.3 s \(ranks that did not: \[1, 2\]\)") as caught:
        RankGroup(serve_store(), 0, 3, timeout=0.3)
    assert caught.value.rank == 1


def test_a_second_process_of_one_rank_is_refused() -> None:
    store = serve_store()
    with RankGroup(store, 0, 1), pytest.raises(RankFailedError, match="another process is rank 0"):
        RankGroup(store, 0, 1, timeout=0.3)


def test_nobody_at_the_port_is_refused() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    with pytest.raises(ConfigurationError, match=f"no store answers at 127.0.0.1:{port}"):
        RankGroup.connect(0, 1, port, timeout=0.3)


@pytest.mark.parametrize(
    ("rank", "world_size", "device", "timeout", "complaint"),
    [
        (2, 2, "cpu", 60.0, "rank = 2 of world_size = 2"),
        (-1, 2, "cpu", 60.0, "rank = -1"),
        (0, 1, "cpu", 0.0, "timeout = 0.0 s"),
        (0, 1, "meta", 60.0, "device = meta"),
    ],
)
def test_impossible_arguments_are_refused(
    rank: int, world_size: int, device: str, timeout: float, complaint: str
) -> None:
    with pytest.raises(ConfigurationError, match=complaint):
        RankGroup(dist.HashStore(), rank, world_size, device=device, timeout=timeout)


def test_strangers_at_the_alarms_port_are_turned_away() -> None:
    store = dist.HashStore()
    connected: dict[int, dict[int, socket.socket]] = {}
    first = threading.Thread(target=lambda: connected.update({0: connect_ranks(store, 0, 2, "127.0.0.1", 20.0)}))
    first.start()
    address, port, _ = json.loads(store.get("alarm/0"))
    for greeting in (b"", b"GET / HTTP/1.1\n", b'["a wrong token", 1]\n', b"7\n", b"x" * 300):
        with socket.create_connection((address, port)) as stranger:
            stranger.sendall(greeting)
    connected[1] = connect_ranks(store, 1, 2, "127.0.0.1", 20.0)
    first.join(20.0)
    assert {rank: list(peers) for rank, peers in connected.items()} == {0: [1], 1: [0]}
    connected[1][0].sendall(b"hello")
    assert connected[0][1].recv(5) == b"hello"
    for peers in connected.values():
        for connection in peers.values():
            connection.close()
