"""Statistics that need whole rows of scores: the largest one, the entropy, and moments under an unstructured mask.

They come from a fixed, evenly spaced subset of query rows against all keys. A layer calls `row_sums` for every
attention call that it measures, and `choose` picks between these moments and the exact ones of
`betahook.measure.scores`. Nothing here may draw random numbers, read a value back to the host, or need autograd;
everything is computed in float32 or better.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

from betahook.measure.masks import Mask
from betahook.measure.scores import ScoreSums, at_least_float32, sum_dtype

ROWS = 32
"""Number of query rows that are sampled; up to this length all rows, so that the statistics are exact."""

CACHED = 2**17
"""Scores that the CPU works on at once, so that they stay in its cache."""

LOWEST = -80.0
"""Floor of the logits, relative to the largest of their row: `exp(-80)` vanishes beside 1, and the exponential of a
lower logit would be a denormal number, which takes ten times as long."""

Position = TypeVar("Position", int, Tensor)


@dataclass(frozen=True)
class RowSums:
    """Sums over the sampled query rows, pooled over the batch; tensors of shape `[heads]`.

    Attributes:
        scores: moments of the scores in these rows.
        rows: number of rows with at least one key.
        entropy: sum of their Shannon entropies, in nats.
        flat_entropy: what that sum would be if all keys that a row may use had the same weight.
        max_score: largest absolute score.
    """

    scores: ScoreSums
    rows: Tensor
    entropy: Tensor
    flat_entropy: Tensor
    max_score: Tensor


def row_sums(
    query: Tensor,
    key: Tensor,
    mask: Mask,
    beta: Tensor,
    *,
    position_bias: Tensor | None = None,
    softcap: float | None = None,
) -> RowSums:
    """Scores, largest score and entropy of `ROWS` evenly spaced query rows against all keys.

    Args:
        query: `[batch, heads, queries, d_k]`.
        key: `[batch, key_heads, keys, d_k]`.
        mask: `mask.pairs` where given, else band, padding and documents.
        beta: `[heads]` or a scalar, the inverse temperature in force; used for the entropy only.
        position_bias: `[batch or 1, heads or 1, queries or 1, keys]`, added to the logits as the attention does.
        softcap: the model's soft cap of its logits, `softcap * tanh(logit / softcap)`.

    The entropy is that of the attention row itself: mask, biases and soft cap included, attention sinks not.

    For a sequence longer than `ROWS` these are estimates from `n` rows (`ROWS` times the batch), as good as random rows
    unless attention is periodic in the distance between them. The largest score is never overestimated, and with 95 %
    confidence at most a share `3 / n` of all rows holds a larger one. The standard error of the mean entropy is at most
    `log(keys) / (2 sqrt(n))`, since the entropy of a row lies between 0 and `log(keys)`.
    """
    batch, heads, queries, _ = query.shape
    keys = key.shape[-2]
    picked = sampled_rows(queries, query.device)
    rows = at_least_float32(query[:, :, picked]).unflatten(1, (key.shape[1], -1))
    scores = (rows.flatten(2, 3) @ at_least_float32(key).mT).view(batch, heads, len(picked), keys)
    allowed = _allowed_rows(mask, picked, keys)
    biases = [bias for bias in (mask.bias, position_bias) if bias is not None]
    biases = [bias.expand(*bias.shape[:2], queries, keys)[..., picked, :] for bias in biases]
    scale = beta.to(scores.dtype).view(-1, 1, 1)
    parts = [
        _reduce_rows(scores[part], allowed[part], [bias[part] for bias in biases], scale, softcap)
        for part in _slabs(mask, queries, scores)
    ]
    mean, square, largest, entropy = (torch.cat(part, -1) for part in zip(*parts, strict=True))

    pairs, wide = allowed.sum(-1).expand(batch, heads, -1), sum_dtype(query.device)
    filled = pairs > 0
    return RowSums(
        ScoreSums.of_rows(pairs.to(wide), mean.to(wide), square.to(wide)),
        filled.sum((0, 2)).to(wide),
        entropy.masked_fill(~filled, 0).sum((0, 2), dtype=wide),
        pairs.clamp(min=1).log().sum((0, 2), dtype=wide),
        largest.amax((0, 2)).to(wide),
    )


def _slabs(mask: Mask, queries: int, scores: Tensor) -> Iterator[tuple[Any, ...]]:
    """Indices of the parts of `scores [batch, heads, rows, keys]` to work on at once: some rows and their keys."""
    _, _, rows, keys = scores.shape
    if scores.device.type != "cpu" or torch.compiler.is_compiling():
        yield (...,)
        return
    slab = max(1, rows * CACHED // scores.numel())
    for start in range(0, rows, slab):
        stop = min(start + slab, rows)
        low, high = 0, keys
        if mask.pairs is None and mask.band.low is not None:
            low = min(max(_row(start, queries) + mask.band.low + 1, 0), keys - 1)
        if mask.pairs is None and mask.band.high is not None:
            high = min(max(_row(stop - 1, queries) + mask.band.high + 1, low + 1), keys)
        yield ..., slice(start, stop), slice(low, high)


def _reduce_rows(
    scores: Tensor, allowed: Tensor, biases: list[Tensor], beta: Tensor, softcap: float | None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Reduce `scores [batch, heads, rows, keys]`, which is overwritten, to `[batch, heads, rows]`.

    Returns:
        Mean, sum of squares about it and largest magnitude of the allowed scores, and the entropy of each row.
    """
    used = allowed.to(scores.dtype)
    scores *= used
    mean = scores.sum(-1) / used.sum(-1).clamp(min=1)
    square = torch.linalg.vector_norm(torch.addcmul(scores, used, mean[..., None], value=-1), dim=-1).square()
    largest = torch.maximum(scores.amax(-1), -scores.amin(-1))

    # Finite, not minus infinity, so that a row without a key gives no NaN.
    added = torch.zeros_like(allowed, dtype=scores.dtype).masked_fill_(~allowed, torch.finfo(scores.dtype).min / 4)
    for bias in biases:
        added = added + bias
    if softcap is None:
        logits = torch.addcmul(added, scores, beta)
    else:
        logits = softcap * torch.tanh(scores * beta / softcap) + added
    logits -= logits.amax(-1, keepdim=True)
    logits.clamp_(min=LOWEST)
    weight = logits.exp()
    norm = weight.sum(-1)
    return mean, square, largest, norm.log() - weight.mul_(logits).sum(-1) / norm


def sampled_rows(queries: int, device: torch.device) -> Tensor:
    """Positions of the query rows that `row_sums` samples: all up to `ROWS`, else evenly spaced with both ends."""
    return _row(torch.arange(min(queries, ROWS), device=device), queries)


def _row(index: Position, queries: int) -> Position:
    """Position of the sampled row with this index."""
    return index if queries <= ROWS else index * (queries - 1) // (ROWS - 1)


def _allowed_rows(mask: Mask, rows: Tensor, keys: int) -> Tensor:
    """Boolean `[batch or 1, heads or 1, rows, keys]`."""
    if mask.pairs is not None:
        return mask.pairs[..., rows, :]
    pairs = mask.band.allowed(rows, torch.arange(keys, device=rows.device))[None, None]
    if mask.queries is not None:
        pairs = pairs & mask.queries[:, None, rows, None]
    if mask.keys is not None:
        pairs = pairs & mask.keys[:, None, None, :]
    if mask.documents is not None:
        pairs = pairs & (mask.documents[:, None, rows, None] == mask.documents[:, None, None, :])
    return pairs


def choose(exact: ScoreSums, rows: ScoreSums, mask: Mask) -> ScoreSums:
    """The exact sums where the mask has the structure that they assume, else those of the sampled rows."""
    if mask.structured is None:
        return exact
    return ScoreSums(
        torch.where(mask.structured, exact.pairs, rows.pairs),
        torch.where(mask.structured, exact.score, rows.score),
        torch.where(mask.structured, exact.score_square, rows.score_square),
        torch.where(mask.structured, exact.row_square, rows.row_square),
    )


def is_exact(mask: Mask, queries: int) -> bool | Tensor:
    """True if the sums that `choose` returns cover every pair; a boolean scalar tensor where the mask decides."""
    return mask.structured is None or queries <= ROWS or mask.structured
