"""Attention by hand, or by torch's own function: followed in each forward from the products of q and k to a softmax.

`watching` gets every call of torch and hands it on: a product to `matrices`, which gives it beta if it may make scores;
a softmax to `softmaxes`, which records the scores that reach it; any other call to `following`. What is known of a
tensor is its trace, see `traces`: for each function of torch `handlers` has one that derives new traces from old ones.
`forward` holds all that one forward knows, `plan` what the next one goes by.

The first forward of an attention, with the trace of what each line returns:

    q, k, v = project(x).chunk(3, -1)                      # None
    q, k, v = (split(part) for part in (q, k, v))          # None
    scores = q @ k.transpose(-2, -1)                       # Scores(factor=1.0), for which q is multiplied by the gain
    logits = scores * 0.5                                  # Scores(factor=0.5)
    logits = logits.masked_fill(future, float("-inf"))     # Scores(factor=0.5), now without the pairs that are masked
    weights = F.softmax(logits, dim=-1)                    # Weights; 0.5 is beta_default, and the scores are recorded
    output = weights @ v                                   # Operand(from_values=True), which is no q or k

That `q @ k` makes scores shows at the softmax only. So the first forward runs with the model's own beta; later ones go
by what it showed, and where one contradicts it, the module is left alone.
"""
