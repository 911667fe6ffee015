"""Traces that a run may leave and traces that no run leaves, for tests that must hold for both."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

from dbo_greenlet.trace import GpuRecord, HeaderRecord, OpRecord, Record, RecvRecord, SliceRecord, StepRecord

SITES = ["layer1.dispatch", "layer1.combine", "layer12.dispatch", "layer2.before_combine", "somewhere", ""]
nanoseconds = st.integers(0, 30) | st.integers(0, 3_000_000) | st.integers(0, 10**14)
lengths = st.sampled_from([0, 1, 2]) | st.integers(0, 100_000)


@st.composite
def spans(draw: Any, begin: int, shortest: int = 0) -> tuple[float, float]:
    """Microseconds, whole nanoseconds each, from somewhere behind `begin`."""
    first = begin + draw(lengths)
    return first / 1000, (first + shortest + draw(lengths)) / 1000


@st.composite
def steps(draw: Any, rank: int, step: int, run: str) -> list[Record]:
    key = {"step": step, "rank": rank, "run": run}
    count = draw(st.integers(1, 3))
    now = begin = draw(nanoseconds)
    slices, passed = [], dict.fromkeys(range(count), 0)
    for index in draw(st.lists(st.integers(0, count - 1), max_size=8)):
        # A slice takes a tick of the clock at least: an arrow needs something to begin and to end in.
        span = draw(spans(now, shortest=1))
        failed = draw(st.integers(0, 20)) == 0
        slices.append(
            SliceRecord(
                **key,
                ubatch=index,
                slice=passed[index],
                site=draw(st.sampled_from(SITES)),
                begin=span[0],
                end=span[1],
                failed=failed,
            )
        )
        passed[index] += 1
        # Mostly one after the other; sometimes, as no run does it, at once.
        now = draw(st.sampled_from([round(span[1] * 1000)] * 4 + [begin]))
        if failed:
            break
    places = st.none() | st.integers(0, 9)
    sizes = st.none() | st.integers(0, 2**40)
    receives = []
    for _ in range(draw(st.integers(0, 6))):
        sent, at = draw(spans(begin))
        if slices and draw(st.booleans()):
            # One that was sent in one slice and received in another, as it should be.
            one, other = sorted(draw(st.tuples(*[st.integers(0, len(slices) - 1)] * 2)))
            owner, by = slices[one].ubatch, draw(st.sampled_from([slices[other].ubatch, None]))
            receives.append(
                RecvRecord(
                    **key,
                    ubatch=owner,
                    site=slices[one].site,
                    sent=slices[one].end,
                    by=by,
                    at=max(slices[other].end, slices[one].end),
                    decision=other,
                    sent_decision=one,
                    bytes=draw(sizes),
                )
            )
        else:
            receives.append(
                RecvRecord(
                    **key,
                    ubatch=draw(st.integers(0, 3)),
                    site=draw(st.sampled_from(SITES)),
                    sent=sent,
                    by=draw(st.none() | st.integers(0, 3)),
                    at=draw(st.sampled_from([None, at])),
                    decision=draw(places),
                    sent_decision=draw(places),
                    bytes=draw(sizes),
                )
            )
    gpu = []
    for _ in range(draw(st.integers(0, 5))):
        span = draw(spans(begin))
        gpu.append(
            GpuRecord(
                **key,
                ubatch=draw(st.integers(0, 3)),
                slice=draw(st.integers(0, 9)),
                site=draw(st.sampled_from(SITES)),
                stream=draw(st.sampled_from(["compute", "comm", "third"])),
                begin=span[0],
                end=span[1],
                waited=draw(lengths) / 1000,
                after=draw(st.sampled_from(SITES)),
                error=1.5,
            )
        )
    ops: list[OpRecord] = []
    for number in range(draw(st.integers(0, 6))):
        # Most of what is recorded and waited for happens in slices that the GPU was timed in.
        place = draw(st.sampled_from([(g.ubatch, g.slice, g.stream) for g in gpu] + [(None, None, "compute")]))
        earlier = [op.number for op in ops if op.op == "record"]
        of = draw(st.sampled_from([*earlier, None]))
        kind = draw(st.sampled_from(["record", "wait", "wait"] if earlier else ["record", "wait"]))
        where = {"ubatch": place[0], "slice": place[1], "stream": place[2]}
        ops.append(OpRecord(**key, number=number, op=kind, of=of if kind == "wait" else None, **where))
    out: list[Record] = [*slices, *receives, *gpu, *ops]
    if draw(st.integers(0, 9)):
        span = draw(spans(begin))
        times: dict[str, Any] = {"begin": span[0], "end": span[1]} if draw(st.booleans()) else {}
        parts = [[0, 1, 0, 1]] * draw(st.sampled_from([0, count]))
        out.insert(0, StepRecord(**key, tokens=8, padded=8, split=bool(parts), reason="r", slices=parts, **times))
    return out


@st.composite
def traces(draw: Any) -> list[Record]:
    """Records of one or two ranks with a common beginning of their clocks or without."""
    ranks = range(draw(st.integers(1, 2)))
    out: list[Record] = [HeaderRecord("0.1.0", rank, len(ranks), origin_ns=draw(nanoseconds)) for rank in ranks]
    for run in draw(st.sampled_from([["dbo"], ["dbo", "unsplit"]])):
        for step in draw(st.sampled_from([[0], [0, 1], [3, 4, 9]])):
            for rank in ranks:
                out += draw(steps(rank, step, run))
    return out
