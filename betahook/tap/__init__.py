"""The tap: how a query gets its factor, and how q and k get to the recorder.

`install` puts it on: `interface` where transformers computes the attention, `by_hand` anywhere else. Both ask `gain`
for the factor and hand q, k and the mask to the `recorder`, through `opaque` where a compiler looks on.
"""
