"""What `dbo-greenlet estimate` predicts, beside what was measured: every row of scripts/measured_steps.json.

    python scripts/check_estimate.py [--all] [--json out/check_estimate.json] [--rows FILE.json]

A row is a step that was timed unsplit and split into two microbatches. It is predicted twice:

    shapes    from the model's shape, the data sheet, the link and the calibration, and nothing that was measured of it
    unsplit   the same, corrected by the row's unsplit step, or by those of its series with other numbers of tokens, and
              its host's time where the row has it: what a user who has not split yet can know. Where two explanations
              are left open, the less favourable one counts.

The gain is the unsplit step over the split one. A row that is off by more than 10 points is missed, and listed.
Worse is to recommend a split that lost, and the script ends with 1 where that happened. No split step was used to fit
anything but what threads cost, by the rows marked "fitted".
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from dbo_greenlet.estimate import Estimate, Setup, UnsplitStep, estimate, make_setup, readings

ROWS = Path(__file__).with_name("measured_steps.json")
POINTS = 0.10
POLICY = "round_robin"  # of every row


@dataclass
class Checked:
    """One row; gains are unsplit over split, times in milliseconds."""

    group: str
    name: str
    measured: float
    by_shapes: float
    by_unsplit: float | None
    unsplit_by_shapes_ms: float
    split_by_shapes_ms: float
    split_by_unsplit_ms: float | None
    verdict_by_shapes: str
    verdict_by_unsplit: str | None
    unsplit_ms: float | None
    split_ms: float | None
    fitted: bool

    @property
    def wrong(self) -> list[str]:
        """Recommendations of what lost."""
        verdicts = {"shapes": self.verdict_by_shapes, "unsplit": self.verdict_by_unsplit}
        return [how for how, verdict in verdicts.items() if verdict == "split" and self.measured < 1]

    def off(self, how: str) -> float:
        """By how much the gain is off; 0 where nothing was predicted so."""
        predicted = getattr(self, f"by_{how}")
        return 0.0 if predicted is None else float(predicted) - self.measured


def setup_of(row: dict[str, Any], group: dict[str, Any]) -> Setup:
    given, own = group["setup"], row["setup"]
    return make_setup({**given, **own, "shape": {**given.get("shape", {}), **own.get("shape", {})}})


def check(row: dict[str, Any], group: dict[str, Any]) -> Checked:
    setup = setup_of(row, group)
    plain = estimate(setup, (2,), (POLICY,))
    corrected = _by_unsplit(setup, row)
    return Checked(
        group=group["name"],
        name=row["name"],
        measured=row["gain"] if "gain" in row else row["unsplit_ms"] / row["split_ms"],
        by_shapes=plain.best.gain,
        by_unsplit=None if corrected is None else corrected.best.gain,
        unsplit_by_shapes_ms=plain.unsplit.step / 1e3,
        split_by_shapes_ms=plain.best.step / 1e3,
        split_by_unsplit_ms=None if corrected is None else corrected.best.step / 1e3,
        verdict_by_shapes=plain.verdict,
        verdict_by_unsplit=None if corrected is None else corrected.verdict,
        unsplit_ms=row.get("unsplit_ms"),
        split_ms=row.get("split_ms"),
        fitted=bool(row.get("fitted")),
    )


def _by_unsplit(setup: Setup, row: dict[str, Any]) -> Estimate | None:
    if "unsplit_ms" not in row:
        return None
    host = row.get("unsplit_host_ms")
    series = {int(tokens): ms for tokens, ms in row.get("unsplit_series_ms", {}).items()}
    steps = [
        UnsplitStep(
            tokens, ms * 1e3, None if host is None or setup.graph or tokens != setup.work.tokens else host * 1e3
        )
        for tokens, ms in (series or {setup.work.tokens: row["unsplit_ms"]}).items()
    ]
    found = [estimate(reading, (2,), (POLICY,)) for reading in readings(setup, steps).values()]
    return min(found, key=lambda each: each.best.gain)


def table(rows: list[Checked], every: bool) -> Iterator[str]:
    yield "| measured steps | rows | within 10 points by shapes | by unsplit steps | furthest off | recommended, lost |"
    yield "|---|---|---|---|---|---|"
    for group in dict.fromkeys(row.group for row in rows):
        mine = [row for row in rows if row.group == group]
        predicted = {"shapes": mine, "unsplit": [row for row in mine if row.by_unsplit is not None]}
        cells, far = [], []
        for how, found in predicted.items():
            cells.append(str(sum(abs(row.off(how)) <= POINTS for row in found)) if found else "-")
            far.append(f"{100 * max((row.off(how) for row in found), key=abs):+.0f}" if found else "-")
        wrong = sum(bool(row.wrong) for row in mine)
        yield f"| {group} | {len(mine)} | {cells[0]} | {cells[1]} | {' / '.join(far)} | {wrong} |"
    yield ""
    for group in dict.fromkeys(row.group for row in rows):
        shown = [
            row for row in rows if row.group == group
            if every or max(abs(row.off("shapes")), abs(row.off("unsplit"))) > POINTS
        ]  # fmt: skip
        if shown:
            yield f"{group}: {'all rows' if every else 'off by more than 10 points'}"
            yield f"  {'':58} {'gain':>6} {'shapes':>6} {'unsplit':>7}   verdicts"
        for row in shown:
            marks = [" *"[abs(row.off(how)) > POINTS] for how in ("shapes", "unsplit")]
            name = row.name + (" (fitted)" if row.fitted else "")
            yield (
                f"  {name:58} {row.measured:6.2f} {row.by_shapes:5.2f}{marks[0]} "
                f"{'-' if row.by_unsplit is None else f'{row.by_unsplit:.2f}':>6}{marks[1]}   "
                f"{row.verdict_by_shapes} / {row.verdict_by_unsplit or '-'}"
            )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--all", action="store_true", help="print every row, and not only those that are off")
    parser.add_argument("--rows", type=Path, default=ROWS)
    parser.add_argument("--json", type=Path, default=Path("out/check_estimate.json"))
    arguments = parser.parse_args()
    groups = json.loads(arguments.rows.read_text())["groups"]
    rows = [check(row, group) for group in groups for row in group["rows"]]
    print("\n".join(table(rows, arguments.all)))
    wrong = [row for row in rows if row.wrong]
    for row in wrong:
        print(f"Recommended, and lost: {row.group}: {row.name} ({', '.join(row.wrong)})")
    arguments.json.parent.mkdir(parents=True, exist_ok=True)
    arguments.json.write_text(
        json.dumps([{**asdict(row), "recommended_what_lost": row.wrong} for row in rows], indent=1)
    )
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
