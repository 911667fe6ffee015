"""The chain that set a step's length, and what shortening each stage would give.

graph        what had to come before what; its longest path, and with stages shortened
report       the report: the path by stage, the what-ifs
trace        a trace of ours -> the report
steps        one step of it -> the graph, by host and by GPU (`host`, `gpu`)
profile      a profile -> the report (`activities`: its events as a graph)
program      a virtual device's program -> the graph
names        what a piece of the path is called
notes        what the recording cannot tell
ranks        how much waiting was for a late rank
text         the report as text and JSON
lanes        the path over the lanes of a step
"""
