"""Exact sums over a score matrix that the model itself has computed: moments, largest score and entropy.

A layer calls `pair_sums` for an attention whose scores the tap has seen. Nothing here may draw random numbers or read a
value back to the host.
"""

from __future__ import annotations

from torch import Tensor

from betahook.measure.rows import RowSums
from betahook.measure.scores import ScoreSums, at_least_float32, sum_dtype


def pair_sums(scores: Tensor, logits: Tensor, allowed: Tensor) -> RowSums:
    """Exact sums over all allowed pairs.

    Args:
        scores: raw scores `[batch, heads, queries, keys]`.
        logits: the same shape, the input of the softmax.
        allowed: boolean, the same shape.
    """
    wide = sum_dtype(scores.device)
    used = at_least_float32(scores).masked_fill(~allowed, 0)
    # Centred: a large mean score would cancel the digits of the variance.
    count = allowed.sum(-1)
    mean = used.sum(-1, dtype=wide) / count.clamp(min=1)
    rest = (used - mean.to(used.dtype)[..., None]).masked_fill_(~allowed, 0)

    log_weights = at_least_float32(logits).log_softmax(-1)
    # A masked pair would give 0 * inf.
    entropy = -(log_weights.exp() * log_weights.masked_fill(~allowed, 0)).sum(-1)
    seen = count > 0
    return RowSums(
        ScoreSums.of_rows(count.to(wide), mean, rest.square().sum(-1, dtype=wide)),
        seen.sum((0, 2)).to(wide),
        entropy.masked_fill(~seen, 0).sum((0, 2), dtype=wide),
        count.clamp(min=1).log().sum((0, 2), dtype=wide),
        used.abs().amax((0, 2, 3)).to(wide),
    )
