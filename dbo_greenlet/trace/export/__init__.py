"""What viewers are shown of traces and profiles, and its formats.

items        what it is made of: processes, tracks, slices, arrows, counters
open_export  files -> a model of what they show
model        a trace of ours -> items (`step`: one step, `tracks`: slices that do not overlap)
profile      a profile -> items
write        a model into a file
chrome       as Chrome's JSON
perfetto     as Perfetto's TrackEvent packets
"""
