"""Two recordings of one job: where they part, and how their times differ.

traces         two traces of ours: the first decision that differs (`program`: whether they are of one program)
times          their times by stage and by step
text           the comparison as text and JSON
profiles       two profiles: kernels that came and went, times by stage
profiles_text  the same as text and JSON
"""
