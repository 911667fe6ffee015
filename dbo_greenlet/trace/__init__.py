"""Recording a run, reading it back, and drawing one step of it. Nothing in here imports torch.

What is in it:

    schema       the record kinds, and their JSON
    recorder     the instrument that the scheduler calls
    writer       a growing trace file that never stops the run
    rolling      a trace without an end in a bounded space, for servers; and finding it again
    reader       a trace file, line by line or with an index of its steps
    notation     schedule -> order of work, in vLLM's notation
    timetable    order of work -> Comp, Comm and Order lines
    step_text    a recorded step as text, with its timetable
    rows         boxes on a line of characters, and the axis above them
    lanes        slices -> one row per microbatch over host time
    gpu_lanes    GPU times -> one row per stream and microbatch over GPU time
    gpu_busy     GPU times -> how long each stream was in use, and both at once

What measures needs numpy, and to read other tools' profiles msgspec (the extra `trace`), so this module does not import
it; its modules are imported by name:

    intervals        stretches of time as arrays
    kernels          what the names in a profile mean, by kernels.toml
    profile          a GPU profile as columns, and its file
    importers        torch.profiler and Nsight Systems -> a profile
    step_columns     a trace of ours -> columns
    launches         which call launched what
    attribution      whose work it is: stage, layer, microbatch
    idle             why there was no compute, and how long launches took
    overlap          hidden and exposed communication: the report and its parts
    overlap_profile  a profile -> the report
    overlap_trace    a trace of ours -> the report
    overlap_text     the report as text and JSON
"""

from __future__ import annotations

from .gpu_busy import GpuUse, gpu_use
from .gpu_lanes import render_gpu
from .lanes import render_lanes
from .reader import StepTrace, Trace, TraceReader, read_trace
from .recorder import StepRecorder, make_header
from .rolling import RollingTrace, newest_trace
from .schema import (
    SCHEMA_VERSION,
    EndRecord,
    GpuRecord,
    HeaderRecord,
    PromptRecord,
    Record,
    RecvRecord,
    SliceRecord,
    StepRecord,
)
from .step_text import render_step
from .timetable import parse_layers, render_order
from .writer import TraceWriter

__all__ = [
    "SCHEMA_VERSION",
    "EndRecord",
    "GpuRecord",
    "GpuUse",
    "HeaderRecord",
    "PromptRecord",
    "Record",
    "RecvRecord",
    "RollingTrace",
    "SliceRecord",
    "StepRecord",
    "StepRecorder",
    "StepTrace",
    "Trace",
    "TraceReader",
    "TraceWriter",
    "gpu_use",
    "make_header",
    "newest_trace",
    "parse_layers",
    "read_trace",
    "render_gpu",
    "render_lanes",
    "render_order",
    "render_step",
]
