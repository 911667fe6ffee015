"""Should a step be split? Predicts split steps on the virtual device, from shapes or from an unsplit step.

What is in it:

    gpus       what GPUs and links can do
    models     shapes of models
    engines    how much of that kinds of programs reach, and what their hosts take
    costs      what each stage takes, by tokens
    program    a step with these times, run on the virtual device
    predict    unsplit and split steps, and which is the shortest
    measured   correcting all that by unsplit steps of one's own
    setup      from plain values to what `predict` takes
"""

from __future__ import annotations

from .costs import Communication, StageTimes, Workload, stage_times
from .engines import CARRIERS, ENGINES, Carrier, Engine
from .gpus import GPUS, LINKS, Gpu, Link
from .measured import UnsplitStep, readings
from .models import PRESETS, ModelShape, read_model
from .predict import Estimate, Option, Scale, Setup, estimate
from .program import Simulated, StepCosts, simulate
from .setup import make_setup

__all__ = [
    "CARRIERS",
    "ENGINES",
    "GPUS",
    "LINKS",
    "PRESETS",
    "Carrier",
    "Communication",
    "Engine",
    "Estimate",
    "Gpu",
    "Link",
    "ModelShape",
    "Option",
    "Scale",
    "Setup",
    "Simulated",
    "StageTimes",
    "StepCosts",
    "UnsplitStep",
    "Workload",
    "estimate",
    "make_setup",
    "read_model",
    "readings",
    "simulate",
    "stage_times",
]
