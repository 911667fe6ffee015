"""Recording a run, reading it back, and drawing one step of it. Nothing in here imports torch.

What is in it:

    records      the record kinds
    schema       their JSON, and its versions
    recorder     the instrument that the scheduler calls
    run_header   the header of a run: versions, and the environment that matters
    op_records   a stream program -> operation records
    writer       a growing trace file that never stops the run
    rolling      a trace without an end in a bounded space, for servers; and finding it again
    reader       a trace file, line by line or with an index of its steps
    files        what an argument of a command may be: files, folders, several of them
    file_kinds   traces of ours or profiles, and never both
    not_ours     refusing a profile where only a trace of ours will do
    quick_records    its records as msgspec makes them: many times faster, for `diff` and `export`
    step_stream  its steps one after the other
    clocks       the clocks of ranks on one axis, from the collectives that they share
    process_trace    the trace that the environment asks for
    recorded_step    one step of it
    whole_file   its file, where somebody wants all of it
    record_output    what `dbo-greenlet record` has a program write, and where
    process_summary  what a process recorded, at a glance
    record_summary   the same in words, or why there is nothing
    notation     schedule -> order of work, in vLLM's notation
    timetable    order of work -> Comp, Comm and Order lines
    step_choice  which steps somebody asks to see
    step_text    a recorded step as text, with its timetable
    op_text      a recorded operation as text
    rows         boxes on a line of characters, and the axis above them
    lanes        slices -> one row per microbatch over host time
    gpu_lanes    GPU times -> one row per stream and microbatch over GPU time
    lint         rules for what is wrong with a recorded run
    gpu_busy     GPU times -> how long each stream was in use, and both at once
    diff         two recordings of one job: where they part, and their times
    export       what viewers are shown of a trace or a profile, and its formats
    page         an export as an HTML page; `page_data` is what its scripts (assets/timeline) are given
    plot         an export as a picture (needs matplotlib)
    item_stages  the stages that both colour by
    stream_lanes a profile's export on the terminal: a row per GPU stream

What measures needs numpy, and to read other tools' profiles msgspec (the extra `trace`), so this module does not import
it; its modules are imported by name:

    intervals        stretches of time as arrays
    kernels          what the names in a profile mean, by kernels.toml
    profile          a GPU profile as columns, and its file
    importers        torch.profiler and Nsight Systems -> a profile
    step_columns     a trace of ours -> columns
    launches         which call launched what
    attribution      whose work it is: stage, layer, microbatch
    no_communication that there is none, in words
    idle             why there was no compute, and how long launches took
    overlap          hidden and exposed communication
    critical_path    the chain that set a step's length, and what shortening each stage would give
    profile_edges    what in a profile came before what of necessity
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
    OpRecord,
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
    "OpRecord",
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
