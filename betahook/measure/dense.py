"""Exact sums over a score matrix that the model itself has computed: moments, largest score and entropy.

`betahook.measure.calls` calls `pair_sums` for an attention whose scores the tap has seen. Nothing here may draw random
numbers or read a value back to the host.
"""

from __future__ import annotations

import torch
from torch import Tensor

from betahook.measure.dtypes import at_least_float32, sum_dtype
from betahook.measure.scores import extremes, pool_rows


def pair_sums(scores: Tensor, logits: Tensor, allowed: Tensor) -> tuple[Tensor, Tensor, tuple[Tensor, Tensor]]:
    """Exact sums over all allowed pairs.

    Args:
        scores: raw scores `[batch, heads, queries, keys]`.
        logits: the same shape, the input of the softmax.
        allowed: boolean, the same shape.

    Returns:
        The first four of `pairs.COUNTS`, `[4, heads]`, and the sums of `scores.pool_rows`, `[5, heads]`, in float64;
        and the `scores.extremes` of the scores.
    """
    wide = sum_dtype(scores.device)
    used = at_least_float32(scores).masked_fill(~allowed, 0)
    # Centred: a large mean score would cancel the digits of the variance.
    count = allowed.sum(-1)
    mean = used.sum(-1, dtype=wide) / count.clamp(min=1)
    rest = (used - mean.to(used.dtype)[..., None]).masked_fill_(~allowed, 0)

    log_weights = at_least_float32(logits).log_softmax(-1)
    # A masked pair would give 0 * inf.
    weights = log_weights.exp()
    entropy = -(weights * log_weights.masked_fill(~allowed, 0)).sum(-1)
    sink = weights.gather(-1, allowed.byte().argmax(-1, keepdim=True)).squeeze(-1)
    seen = count > 0
    of_rows = (x.masked_fill(~seen, 0) for x in (entropy, sink))
    sums = pool_rows(count, mean, rest.square().sum(-1, dtype=wide), *of_rows)
    pairs, rows, flat = (x.sum((0, 2), dtype=wide) for x in (count, seen, count.clamp(min=1).log()))
    return torch.stack([pairs, pairs, rows, flat]), sums, extremes(used)
