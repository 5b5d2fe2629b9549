"""Attention by hand, or by torch's own function: followed in each forward from the products of q and k to a softmax.

`watching` gets every call of torch and hands it on: a product to `matrices`, which gives it beta if it may make scores;
a softmax to `softmaxes`, which records the scores that reach it; any other call to `following`. What is known of a
tensor is its trace, see `traces`: for each function of torch `handlers` has one that derives new traces from old ones.
`forward` holds all that one forward knows, `plan` what the next one goes by.
"""
