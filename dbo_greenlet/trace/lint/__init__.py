"""What is wrong with a recorded run: rules with ids, each with a bug behind it that somebody had to find by eye.

    report = lint_trace(TraceFiles(["trace.jsonl"]))
    for finding in report.findings: print(finding.rule.id, finding.what, finding.place)

What is in it:

    findings           what a rule finds, and what it could not look at
    checks             what a rule is, and what it is given of a step
    engine             runs rules over steps and groups what they find; knows none of them
    rules              the rules for traces of ours, as a table
    programs           the operations of a recorded step -> its stream program
    hazard_checks      what the search for hazards finds in it
    early_events       an event recorded after a switch, where nobody recorded what was enqueued
    streams            which stream communication runs on, and whether all are joined
    receives           receives that never ran
    frees              memory given back while another stream uses it
    host_blocks        the host waits, and nothing of a sibling is queued
    long_hold          one microbatch keeps the thread
    parked             a step that is over with a microbatch still in it
    order_mismatch     ranks that communicate in different orders
    batches            microbatches without tokens
    environment        variables that serialise streams
    messages           messages that splitting made too small
    overlap_share      two microbatches, and nothing hidden
    profile_rules      the rules for profiles (needs the extra `trace`, as profile_view and profile_events do)
    text               the report as text and as JSON

A rule that cannot look, because the trace lacks what it needs, says so: a rule that is silent has looked.
"""

from __future__ import annotations

from .engine import lint_trace
from .findings import Finding, Place, Report
from .rules import RULES, choose_rules

__all__ = ["RULES", "Finding", "Place", "Report", "choose_rules", "lint_trace"]
