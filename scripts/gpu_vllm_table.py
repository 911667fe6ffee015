"""The tables of scripts/gpu_vllm.py in Markdown, from the merged results."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from gpu_vllm_rows import DROP_IN, MODES, NO_DBO, RANKS, THREADS, requests_of

BACKENDS = {"deepep_low_latency": "LL", "deepep_high_throughput": "HT"}
EXECUTION = {"eager": "eager", "compile": "torch.compile", "graph": "full graph"}
GPUS = {1: "one GPU", 2: "a GPU each"}  # of the ranks
Modes = dict[str, list[dict[str, Any]]]  # mode -> what each rank found


def tables(results: dict[str, Any]) -> list[str]:
    """Markdown tables, each under its title, the machine and versions first; what was not run is left out."""
    rows = results["rows"]
    parts = [_machine(rows)]
    for title, make in (
        ("Tokens and log-probabilities, threads beside drop-in", _tokens),
        ("Host time of a step", _times),
        ("Capture and process", _process),
        ("Faults", _faults),
        ("Accuracy", _accuracy),
        ("Not done", _not_done),
    ):
        lines = list(make(rows))
        if len(lines) > 2:
            parts.append("\n".join([f"**{title}**", "", *lines]))
    return parts


def _machine(rows: dict[str, Any]) -> str:
    facts = [
        (session["date"], session["gpus"], rank["machine"])
        for entry in rows.values()
        for session in entry["sessions"].values()
        for rank in session["ranks"]
        if "machine" in rank
    ]
    if not facts:
        return "Nothing has been run."
    lines = []
    for gpus in sorted({gpus for _, gpus, _ in facts}):
        dates = sorted({date.split()[0] for date, used, _ in facts if used == gpus})
        machine = max((fact for fact in facts if fact[1] == gpus), key=lambda fact: fact[0])[2]
        versions = ", ".join(f"{name} {version}" for name, version in machine["versions"].items())
        when = dates[0] if len(dates) == 1 else f"{dates[0]} to {dates[-1]}"
        gpu = f"{gpus} {machine['gpu']} (driver {machine['driver']})"
        lines.append(f"{gpu}, {machine['cores']} cores; {versions}; {when}.")
    return "\n".join(lines)


def modes_of(entry: dict[str, Any], gpus: int, requests: int) -> Modes:
    """The modes of a row that were done on so many GPUs with so many requests a rank: each one's latest session."""
    found: Modes = {}
    for session in sorted(entry["sessions"].values(), key=lambda session: session["date"]):
        known = requests_of(session)
        if session["status"] != "done" or session["gpus"] != gpus or requests not in known:
            continue
        of_ranks = [
            rank.get("modes", {}) if requests == known[0] else rank.get("modes_at", {}).get(str(requests), {})
            for rank in session["ranks"]
        ]
        for mode in session["modes"]:
            ranks = [modes[mode] for modes in of_ranks if mode in modes]
            if len(ranks) == RANKS:
                found[mode] = ranks
    return found


def _of_kind(rows: dict[str, Any], kind: str) -> Iterator[tuple[str, dict[str, Any], Modes]]:
    """Each row of that kind, by number of GPUs and of requests, and its modes."""
    for entry in rows.values():
        row = entry["row"]
        if row["kind"] != kind:
            continue
        name = _name(row)
        cases = {
            (session["gpus"], requests) for session in entry["sessions"].values() for requests in requests_of(session)
        }
        for gpus, requests in sorted(cases):
            words = [name, GPUS[gpus]] if kind == "accuracy" else [name, f"{requests} requests", GPUS[gpus]]
            yield ", ".join(words), entry, modes_of(entry, gpus, requests)


def _name(row: dict[str, Any]) -> str:
    words = [BACKENDS[row["all2all"]], EXECUTION[row["execution"]]]
    if row["kind"] != "accuracy":
        words.append(row["shape"])
    if row["options"].get("phase") == "prefill":
        words.append(f"prefill, {row['options']['prompt']} tokens a request")
    return ", ".join(words)


def _tokens(rows: dict[str, Any]) -> Iterator[str]:
    yield "| row | threads with itself | drop-in with itself | threads and drop-in | no DBO and drop-in |"
    yield "|---|---|---|---|---|"
    for name, _, modes in _of_kind(rows, "serve"):
        if THREADS in modes and DROP_IN in modes:
            cells = [_repeats(modes[THREADS]), _repeats(modes[DROP_IN]), _compare(modes[THREADS], modes[DROP_IN])]
            other = _compare(modes[NO_DBO], modes[DROP_IN]) if NO_DBO in modes else "-"
            yield f"| {name} | {' | '.join(cells)} | {other} |"


def _repeats(ranks: list[dict[str, Any]]) -> str:
    counts = [count for rank in ranks for count in rank["rounds_like_the_first"]]
    total = sum(len(rank["answers"]) for rank in ranks)
    if not counts:
        return "-"
    least = sum(min(rank["rounds_like_the_first"]) for rank in ranks)
    return "identical" if least == total else f"{least} of {total}"


def _compare(one: list[dict[str, Any]], other: list[dict[str, Any]]) -> str:
    """How many requests have the same tokens and log-probabilities; where not, how many start with the same token."""
    pairs = [pair for a, b in zip(one, other, strict=True) for pair in zip(a["answers"], b["answers"], strict=True)]
    same = sum(a == b for a, b in pairs)
    if same == len(pairs):
        return f"identical ({same} requests)"
    first = sum(a[0][0] == b[0][0] for a, b in pairs)
    apart = max((abs(a[1][0] - b[1][0]) for a, b in pairs if a[0][0] == b[0][0]), default=math.nan)
    return f"{same} of {len(pairs)}; first token {first}, its log-probability within {apart:.2f}"


def _times(rows: dict[str, Any]) -> Iterator[str]:
    yield (
        "| row | mode | model call, ms (p10 / p50 / p90) | step, ms (p10 / p50) | hand-off, us (p10 / p50 / p90) "
        "| yields a step | threads started a step |"
    )
    yield "|---|---|---|---|---|---|---|"
    for name, entry, modes in _of_kind(rows, "serve"):
        for mode in MODES:
            if mode in modes and entry["row"]["timed"]:
                ranks = modes[mode]
                yields = ranks[0]["yields_per_step"]["p50"] if ranks[0]["yields_per_step"] else 0
                started = ranks[0]["threads_started_per_step"]
                cells = [
                    _three(ranks, "forward_ms"),
                    _three(ranks, "step_ms", ("p10", "p50")),
                    _three(ranks, "hand_off_us") if yields else "-",
                ]
                yield f"| {name} | {mode} | {' | '.join(cells)} | {yields:.0f} | {started:.0f} |"


def _three(ranks: list[dict[str, Any]], what: str, names: tuple[str, ...] = ("p10", "p50", "p90")) -> str:
    """Percentiles, the mean of the two ranks'."""
    if any(rank[what] is None for rank in ranks):
        return "-"
    return " / ".join(f"{sum(rank[what][name] for rank in ranks) / len(ranks):.1f}" for name in names)


def _process(rows: dict[str, Any]) -> Iterator[str]:
    yield (
        "| row | mode | microbatched graph captured in, s | all graphs, s | graph memory, MB (allocator / driver) "
        "| resident, MB | of it private, MB | threads at rest / most in a step |"
    )
    yield "|---|---|---|---|---|---|---|---|"
    for entry in rows.values():
        for session in entry["sessions"].values():
            if entry["row"]["kind"] != "serve" or session["status"] != "done" or len(session["modes"]) > 1:
                continue
            name = f"{_name(entry['row'])}, {GPUS[session['gpus']]}"
            (mode,) = session["modes"]
            rank = session["ranks"][0]
            captures = ", ".join(f"{seconds:.2f}" for seconds in rank["captures_s"]) or "-"
            memory = f"{rank['graph_mb']['allocator']:.0f} / {rank['graph_mb'].get('driver', math.nan):.0f}"
            facts = rank["after_serving"]
            threads = f"{facts['threads']} / {rank['modes'][mode]['most_threads'] or facts['threads']}"
            yield (
                f"| {name} | {mode} | {captures} | {rank['capture_model_s']:.2f} | {memory} | "
                f"{facts['resident_mb']:.0f} | {facts['private_mb']:.0f} | {threads} |"
            )


FAULTS = {
    "fault-one-rank": "LL: a layer raises in the second microbatch, on rank 0",
    "fault-killed": "LL: rank 1 is killed in the second microbatch",
    "fault-killed-ht": "HT: the same",
    "fault-both-ranks": "LL: the layer raises on both ranks",
    "fault-both-ranks-ht": "HT: the same on both ranks",
    "fault-queue-depth": "LL: `max_num_batched_tokens=1024`, more than DeepEP's queue",
    "stock-queue-depth": "LL: `max_num_batched_tokens=1024`, more than DeepEP's queue",
}


def _faults(rows: dict[str, Any]) -> Iterator[str]:
    yield "| fault | ranks on | mode | what the caller of the engine gets | after | printed by a thread | rank 1 |"
    yield "|---|---|---|---|---|---|---|"
    for name in FAULTS:
        sessions = rows[name]["sessions"].values() if name in rows else ()
        for session in sorted(sessions, key=lambda session: (session["gpus"], MODES.index(session["modes"][0]))):
            first, second = session["ranks"]
            gets, after = _fate(first, session)
            other, other_after = _fate(second, session)
            printed = "; ".join(f"`{_cell(text)}`" for text in first.get("printed_by_threads", [])) or "-"
            other = "the same" if other == gets else f"{other}, {other_after}"
            where, modes = GPUS[session["gpus"]], ", ".join(session["modes"])
            yield f"| {FAULTS[name]} | {where} | {modes} | {gets} | {after} | {printed} | {other} |"


def _fate(rank: dict[str, Any], session: dict[str, Any]) -> tuple[str, str]:
    """What became of a rank, and after how many seconds."""
    outcome = rank.get("outcome")
    if outcome == "error":
        # The package's error ends with the text of its cause, unless that has none.
        outer, *inner = rank["user_reads"]
        chain = [outer, *(text for text in inner if text not in outer)]
        return ", from ".join(f"`{_cell(text)}`" for text in chain), f"{rank['after_s']:.1f} s"
    if outcome == "hang":
        return f"nothing; it waits in `{rank['main_thread'][-1].split()[-1]}`", f"ended after {rank['waited_s']:.0f} s"
    if outcome == "killed":
        return "killed", "-"
    if outcome == "none":
        return f"no error; {rank.get('complete', '?')} of {rank.get('requests', '?')} answers", "-"
    return session["status"], "-"


def _cell(text: str) -> str:
    return " ".join(text.replace("|", "\\|").replace("`", "'").split())[:260]


def _accuracy(rows: dict[str, Any]) -> Iterator[str]:
    yield "| row | mode | exact match | standard error | problems | same answers as without DBO | steps split |"
    yield "|---|---|---|---|---|---|---|"
    for name, _, modes in _of_kind(rows, "accuracy"):
        for mode in (NO_DBO, THREADS, DROP_IN):
            if mode in modes:
                ranks = modes[mode]
                exact, problems = (sum(rank[key] for rank in ranks) for key in ("exact", "problems"))
                share = exact / problems
                error = math.sqrt(share * (1 - share) / problems)
                same = "-"
                if NO_DBO in modes:
                    pairs = zip(ranks, modes[NO_DBO], strict=True)
                    same = str(sum(a == b for x, y in pairs for a, b in zip(x["answers"], y["answers"], strict=True)))
                split = f"{ranks[0]['steps_split']} of {ranks[0]['steps']}"
                if replayed := ranks[0].get("steps_replayed"):
                    split += f", {replayed} of them replays"
                yield f"| {name} | {mode} | {share:.4f} | {error:.4f} | {problems} | {same} | {split} |"


def _not_done(rows: dict[str, Any]) -> Iterator[str]:
    yield "| row | ranks on | modes | status | error |"
    yield "|---|---|---|---|---|"
    for name, entry in rows.items():
        for session in entry["sessions"].values():
            if session["status"] != "done":
                errors = [rank["error"][0] for rank in session["ranks"] if rank.get("error")]
                error = _cell(errors[0]) if errors else ""
                where, modes = GPUS[session["gpus"]], ", ".join(session["modes"])
                yield f"| {name} | {where} | {modes} | {session['status']} | {error} |"
