"""`nn.Module` in, facts out: which modules are attention, and where their W_q and W_k are.

`discovery` classifies modules by their `code`, asks `heads` for their size and, where these are inconclusive, runs a
`trial` without data. `projections` finds W_q and W_k by the names in `families`, or at the `places` that the `labels`
of a forward revealed; `materialise` reads a weight however it is stored, `scaling` multiplies it by factors.
"""
