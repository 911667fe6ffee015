"""The job behind `dbo-greenlet run`: ranks that answer prompts, a trace of what they did, and its replay.

    requests     the prompt file
    spec         what a job is: settings, prompts, passes; as JSON in the trace's header
    engine       continuous batching of one rank
    resources    what a rank computes with: device, all-to-all, KV cache
    logits       how far the logits of two passes are apart
    worker       what the process of one rank does
    launch       the parent: starts the ranks, follows them, stops them
    report       results as a table, as sentences and as JSON
    graph_report graphs beside eager steps, carriers and logits
    replay       the same job again, by the decisions of a trace

Nothing here imports torch except what only a rank imports (engine, logits, resources, worker), so that the command
line starts at once.
"""

from __future__ import annotations
