"""The clocks of ranks on one axis, from the collectives that they share.

bounds      collectives -> what the differences of clocks can be
drift       clocks whose speeds differ
offsets     the ranks' clocks on one axis
profiles    the same for profiles, by their collective kernels
arrivals    who waits for whom in a collective
"""
