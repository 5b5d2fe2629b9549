"""The tap: multiplies the query by the gain, and passes q and k to the recorder.

`install` puts it on a model: `interface` where transformers computes the attention, `by_hand` anywhere else. Both let
`gain` scale the query, and pass q, k and the mask to the `recorder`, through `opaque` in compiled code.
"""
