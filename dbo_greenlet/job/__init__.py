"""The job behind `dbo-greenlet run`: ranks that answer prompts, a trace of what they did, and its replay.

    requests     the prompt file
    spec         what a job is: settings, prompts, passes; as JSON in the trace's header
    engine       continuous batching of one rank
    worker       what the process of one rank does
    launch       the parent: starts the ranks, follows them, stops them
    report       results as a table, as sentences and as JSON
    replay       the same job again, by the decisions of a trace

Nothing here imports torch except the worker and the engine, so that the command line starts at once.
"""

from __future__ import annotations
