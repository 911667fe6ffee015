"""The clocks of ranks on one axis, from the collectives that they share.

bounds      collectives -> what the differences of clocks can be
rank_clock  what to add to the times of one rank
hosts       ranks that share a clock
room        what collectives leave open for one clock that runs straight
drift       clocks whose speeds differ
wander      clocks whose speeds change faster than can be followed
offsets     the ranks' clocks on one axis
profiles    the same for profiles, by their collective kernels
arrivals    who waits for whom in a collective
"""
