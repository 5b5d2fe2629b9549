"""Statistics of attention without N x N matrices: functions of tensors, and a queue of calls to be measured as one.

`calls` adds an attention call to the tables. The moments of its scores come from `scores`, or from `prefix` on an
accelerator; entropy and whatever else needs whole rows from `rows`; `masks` and `pairs` determine which pairs count.
`statistics` and `groups` turn the tables into numbers.

Nothing here may draw random numbers or need autograd. Only `correlations`, for the audit, and `ranges_over_ranks` of
`ranks` read a value back to the host. Products are computed in float32 or better, sums in float64, see `dtypes`.
"""
