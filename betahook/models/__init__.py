"""`nn.Module` in, facts out: which modules are attention, and where their W_q and W_k are.

`discovery` classifies modules by their `code`, asks `heads` for their size and, where neither tells, runs a `trial`
without data. `projections` finds W_q and W_k by the names in `families`, or at the `places` that a forward showed by
`labels`; `materialise` reads a weight however it is kept, `scaling` puts factors into it.
"""
