"""Moments, extremes and entropy of scores that exist already, since the model itself makes the N x N matrix."""

from __future__ import annotations

from torch import Tensor

from betahook.measure.rows import RowSums
from betahook.measure.scores import ScoreSums, at_least_float32, sum_dtype


def pair_sums(scores: Tensor, logits: Tensor, allowed: Tensor) -> RowSums:
    """Exact sums over all allowed pairs.

    Args:
        scores: raw scores `[batch, heads, queries, keys]`.
        logits: the same shape, what the softmax gets.
        allowed: boolean, the same shape.
    """
    wide = sum_dtype(scores.device)
    used = at_least_float32(scores).masked_fill(~allowed, 0)
    # Centred, so that a large mean score does not cancel the digits of the variance.
    pairs = allowed.sum((0, 2, 3)).to(wide)
    mean = used.sum((0, 2, 3), dtype=wide) / pairs.clamp(min=1)
    rest = (used - mean.to(used.dtype).view(-1, 1, 1)).masked_fill_(~allowed, 0)
    shift = mean.to(used.dtype).to(wide)
    less = rest.sum((0, 2, 3), dtype=wide)
    square = rest.square().sum((0, 2, 3), dtype=wide) + 2 * shift * less + pairs * shift.square()

    log_weights = at_least_float32(logits).log_softmax(-1)
    # 0 where a masked pair would give 0 * inf.
    entropy = -(log_weights.exp() * log_weights.masked_fill(~allowed, 0)).sum(-1)
    seen = allowed.any(-1)
    return RowSums(
        ScoreSums(pairs, less + pairs * shift, square),
        seen.sum((0, 2)).to(wide),
        entropy.masked_fill(~seen, 0).sum((0, 2), dtype=wide),
        used.abs().amax((0, 2, 3)).to(wide),
    )
