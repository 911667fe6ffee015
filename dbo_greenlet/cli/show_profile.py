"""What `dbo-greenlet show` prints of a profile: which stage ran when on which GPU stream."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from ..errors import ConfigurationError, TraceFileError
from ..trace.export.open_export import open_export
from ..trace.stream_lanes import gpu_streams, render_streams
from .trace_extra import needs_trace_extra

if TYPE_CHECKING:
    from .show import Asked

__all__ = ["show_profile"]


def show_profile(asked: Asked, *, width: int, as_json: bool) -> None:
    """Print the rows, or the spans as JSON (microseconds)."""
    if asked.last:
        raise ConfigurationError("--last: a profile has no steps to choose from; leave it out")
    with needs_trace_extra():
        model = open_export(asked.files, run=asked.run, rank=asked.rank, steps=asked.steps)
        try:
            streams = gpu_streams(model)
        except TraceFileError as error:
            raise TraceFileError(str(error) if model.path in str(error) else f"{model.path}: {error}") from None
    if as_json:
        objects = [
            {
                "rank": stream.process.rank,
                "stream": stream.name,
                "stages_us": {stage: time / 1000 for stage, time in stream.stages.items()},
                "spans": [[begin / 1000, end / 1000, stage] for begin, end, stage in stream.spans],
            }
            for stream in streams
        ]
        print(json.dumps({"streams": objects, "axis": model.axis_text(), "notes": model.notes}))
        return
    print(render_streams(streams, width=width))
    for line in [*model.axis_text(), *(f"note: {note}" for note in model.notes)]:
        print(line)
