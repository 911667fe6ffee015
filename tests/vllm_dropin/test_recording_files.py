"""The files of a server's trace: their bound, their names, and reading them while they grow. Needs no vLLM."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dbo_greenlet.errors import TraceFileError
from dbo_greenlet.trace import newest_trace, read_trace, render_step
from tests.vllm_dropin.servers import running, serving, step, tell

# -- the bound ---------------------------------------------------------------------------------------------------------


def total(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.iterdir())


def test_the_older_part_is_a_trace_by_itself_and_follows_on(tmp_path: Path) -> None:
    with serving(tmp_path, megabytes=0.1) as server:
        for _ in range(30):
            server.step(4)
        path = Path(server.trace.path)
    older = path.with_name(f"{path.stem}.older.jsonl")
    assert {p.name for p in tmp_path.iterdir()} == {path.name, older.name}
    before, now = read_trace(older), read_trace(path)
    numbers = [s.step for s in before.steps.values()] + [s.step for s in now.steps.values()]
    assert numbers == list(range(numbers[0], 30)) and numbers[0] > 0
    # A step is never divided between two parts.
    assert all(len(s.slices) == 18 for s in [*before.steps.values(), *now.steps.values()])
    parts = [t.header.settings["trace"]["part"] for t in (before, now)]
    assert parts[1] == parts[0] + 1 > 1
    assert before.header.started == now.header.started and not before.ends and now.ends[0].ok


@settings(deadline=None, max_examples=25)
@given(
    megabytes=st.floats(0.1, 0.3),
    lives=st.lists(st.lists(st.integers(1, 60), max_size=25), min_size=1, max_size=4),
)
def test_a_rank_never_has_more_than_its_megabytes(tmp_path_factory, megabytes: float, lives: list[list[int]]) -> None:
    """Servers one after the other, each with steps of so many layers; steps of 30 layers and more fill a part."""
    folder = tmp_path_factory.mktemp("trace")
    for life, steps in enumerate(lives):
        with serving(folder, megabytes=megabytes) as server:
            for layers in steps:
                server.step(layers)
                assert total(folder) <= megabytes * 1e6
            latest = server.trace.path
        assert server.trace.problem is None, life
    assert total(folder) <= megabytes * 1e6
    # Bounded, and not by writing nothing: the latest step is there.
    if lives[-1]:
        assert max(s.step for s in read_trace(latest).steps.values()) == len(lives[-1]) - 1


def test_a_step_that_is_larger_than_a_part_leaves_its_record_and_its_order(tmp_path: Path) -> None:
    with serving(tmp_path, megabytes=0.1) as server:
        server.step(500)
        server.step(1)
        path = server.trace.path
    huge, small = read_trace(path).steps.values()
    assert huge.slices == [] and huge.record.yields == [1000, 1000]
    assert "microbatches in the order in which they ran: 0 1 0 1" in render_step(huge)
    assert len(small.slices) == 6


def test_what_a_crashed_server_wrote_survives_restarts_but_not_for_ever(tmp_path: Path) -> None:
    def crash() -> Path:
        with running(tmp_path, 1, 0.1, 6) as (process, path):
            for _ in range(12):
                step(process)
            tell(process, "die")
            process.wait(timeout=60)
        return path

    first = crash()
    assert len(list(tmp_path.iterdir())) == 2
    second = crash()
    # Half of the megabytes are for the dead: the parts of the first fit, and both are still there.
    assert first.exists() and second.exists() and len(list(tmp_path.iterdir())) == 4
    with serving(tmp_path, megabytes=0.1):
        assert not first.exists() and second.exists()


def test_a_live_process_of_the_same_rank_is_left_alone(tmp_path: Path) -> None:
    with running(tmp_path, 1, 0.1, 6) as (process, path):
        for _ in range(12):
            step(process)
        alive = {p: p.read_bytes() for p in tmp_path.iterdir()}
        assert len(alive) == 2
        for _ in range(3):
            with serving(tmp_path, megabytes=0.1) as server:
                for _ in range(12):
                    server.step(6)
        assert {p: p.read_bytes() for p in alive} == alive
        step(process)
        assert read_trace(path).steps


def test_a_process_number_that_comes_again_overwrites_nothing(tmp_path: Path) -> None:
    paths = []
    for _ in range(3):
        with serving(tmp_path) as server:
            server.step()
            paths.append(Path(server.trace.path))
    base = f"dbo-rank0-{os.getpid()}"
    assert [path.name for path in paths] == [f"{base}.jsonl", f"{base}-2.jsonl", f"{base}-3.jsonl"]
    assert all(len(read_trace(path).steps) == 1 for path in paths)


def test_small_files_of_many_restarts_do_not_add_up(tmp_path: Path) -> None:
    for _ in range(30):
        with serving(tmp_path, megabytes=64.0):
            pass
    assert len(list(tmp_path.iterdir())) <= 17


def test_other_files_in_the_folder_are_nobodys_business(tmp_path: Path) -> None:
    others = ["notes.txt", "dbo-rank1-5.jsonl", "dbo-rank0-5.jsonl.gz", "my-dbo-rank0-5.jsonl", "dbo-rank0-x.jsonl"]
    for name in others:
        (tmp_path / name).write_bytes(b"x" * 100_000)
    (tmp_path / "dbo-rank0-6.jsonl").symlink_to(tmp_path / "notes.txt")
    (tmp_path / "dbo-rank0-7.jsonl").write_bytes(b"x" * 100_000)
    with serving(tmp_path, megabytes=0.1):
        pass
    assert not (tmp_path / "dbo-rank0-7.jsonl").exists()
    assert all((tmp_path / name).exists() for name in [*others, "dbo-rank0-6.jsonl"])


# -- reading while it grows --------------------------------------------------------------------------------------------


def test_every_step_can_be_read_as_soon_as_it_is_over(tmp_path: Path) -> None:
    with running(tmp_path, 2, 1) as (process, path):
        for count in range(1, 6):
            step(process)
            trace = read_trace(path)
            assert [s.step for s in trace.steps.values()] == list(range(0, count, 2))
            assert not trace.torn and not trace.ends
        process.stdin.close()
        assert process.wait(timeout=60) == 0
    assert read_trace(path).ends[0].ok


@pytest.mark.parametrize("end", ["die", "torn"])
def test_a_killed_server_leaves_a_trace(tmp_path: Path, end: str) -> None:
    with running(tmp_path, 1, 1) as (process, path):
        for _ in range(3):
            step(process)
        tell(process, end)
        process.wait(timeout=60)
    trace = read_trace(path)
    assert len(trace.steps) == 3 and not trace.ends
    assert trace.torn is (end == "torn")


def test_reading_at_any_moment_while_parts_are_replaced(tmp_path: Path) -> None:
    """A reader in the middle of writes and renames sees whole steps, but for what is being written right now."""
    stop = threading.Event()
    seen: list[int] = []
    wrong: list[str] = []

    def read() -> None:
        while not stop.is_set():
            try:
                trace = read_trace(newest_trace(tmp_path))
            except TraceFileError as error:
                # The moment between two parts, or before the header.
                if "no such file" not in str(error) and "no trace yet" not in str(error):
                    wrong.append(str(error))
                continue
            steps = list(trace.steps.values())
            seen.append(len(steps))
            wrong.extend(f"step {s.step}" for s in steps[:-1] if len(s.slices) != 26)

    with running(tmp_path, 1, 0.1, 6) as (process, _):
        reader = threading.Thread(target=read)
        reader.start()
        try:
            for _ in range(150):
                step(process)
        finally:
            stop.set()
            reader.join(timeout=60)
        assert not reader.is_alive()
    assert wrong == [] and max(seen) > 1


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_a_worker_that_multiprocessing_started_ends_its_trace(tmp_path: Path, method: str) -> None:
    with running(tmp_path, 1, 1) as (process, path):
        step(process, method)
        process.stdin.close()
        assert process.wait(timeout=60) == 0
    ends = {p: read_trace(p) for p in tmp_path.iterdir()}
    assert len(ends) == 2
    assert all(trace.ends[0].ok for trace in ends.values())
    assert sorted(len(trace.steps) for trace in ends.values()) == [0, 1] and not ends[path].steps


def test_a_forked_child_does_not_write_into_its_parents_trace(tmp_path: Path) -> None:
    with running(tmp_path, 1, 1) as (process, path):
        step(process)
        step(process, "fork on")
        step(process)
        process.stdin.close()
        assert process.wait(timeout=60) == 0
    trace = read_trace(path)
    assert [s.step for s in trace.steps.values()] == [0, 1] and len(list(tmp_path.iterdir())) == 1
