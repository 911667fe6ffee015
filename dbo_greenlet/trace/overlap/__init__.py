"""Hidden and exposed communication.

report     the report, and the measure behind it
profile    a profile -> the report
trace      a trace of ours -> the report
sums       reports of parts of a trace, added up
text       the report as text and JSON
"""
