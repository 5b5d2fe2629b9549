"""Statistics that need whole rows of scores: the maximum, the entropy, and moments under an unstructured mask.

A short sequence is examined as a whole, which is faster than any other form and exact whatever the mask is. From a
longer one, a fixed, evenly spaced subset of query rows is examined against all keys. `betahook.measure.calls` weights
them by the rows that they stand for, and takes the moments under a structured mask from elsewhere. A score matrix that
the model itself computed is summed as a whole.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from betahook.measure import devices
from betahook.measure.dtypes import at_least_float32, sum_dtype
from betahook.measure.masks import Mask, once_per_mask
from betahook.measure.pairs import RowPairs, row_at, row_pairs
from betahook.measure.scores import extremes, pool_rows

CACHED = 2**17
"""Number of scores that the CPU processes at once, so that they stay in its cache."""

AT_ONCE = 2**24
"""Number of scores that an accelerator processes at once, so that memory does not grow with the batch."""

FEW = 2**14
"""Up to this many scores, the form with the fewest operations is the fastest on the CPU too."""

LOWEST = -80.0
"""Floor of the logits on the CPU, relative to the largest of their row: `exp(-80)` is negligible next to 1, and the
exponential of a lower logit would be a denormal number, which takes the CPU ten times as long."""


class ScoreMod(NamedTuple):
    """Everything that is done to scaled scores before the softmax, except masking; the name is that of flex attention.

    Attributes:
        position_bias: `[batch or 1, heads or 1, queries or 1, keys]`, added to the logits.
        softcap: the model's soft cap of its logits, `softcap * tanh(logit / softcap)`.
        sinks: `[batch or 1, heads, queries or 1]`, logits that take part in the softmax without a key, as in gpt-oss.
    """

    position_bias: Tensor | None = None
    softcap: float | None = None
    sinks: Tensor | None = None


PLAIN = ScoreMod()
"""Nothing is done to the scores: the logits are beta times the scores."""


def row_sums(
    query: Tensor, key: Tensor, mask: Mask, beta: Tensor, score_mod: ScoreMod, *, moments: bool
) -> tuple[list[Tensor], tuple[Tensor, Tensor]]:
    """Scores, largest score and entropy of all rows of a short sequence, or of `pairs.ROWS` evenly spaced ones.

    Args:
        query: `[batch, heads, queries, d_k]`.
        key: `[batch, key_heads, keys, d_k]`.
        mask: `mask.pairs` where given, else band, padding and documents.
        beta: `[heads]` or a scalar, the acting inverse temperature; used for entropy and sink only.
        score_mod: what the model does to its logits.
        moments: False to leave out the moments of the scores.

    Returns:
        The sums over these rows: if `moments`, those of `scores.pool_rows`, `[3, heads]`, then those of entropy and
        sink, one `[2, heads]` in float64 or two `[heads]`; and the `scores.extremes` of the scores in them.

    Entropy and sink are those of the attention row itself, including mask and `score_mod`.

    For a sequence that is not short these are estimates from `n` rows (`ROWS` times the batch), as good as random rows
    unless attention is periodic in the distance between them. The largest score is never overestimated, and with 95 %
    confidence at most a share `3 / n` of all rows holds a larger one. The standard error of the mean entropy is at most
    `log(keys) / (2 sqrt(n))`, since the entropy of a row lies between 0 and `log(keys)`.
    """
    queries, keys = query.shape[2], key.shape[2]
    query, key = at_least_float32(query), at_least_float32(key)
    pairs = _with_terms(once_per_mask(row_pairs, mask, query, queries, keys), score_mod, queries, keys)
    if pairs.picked is not None:
        query = query[:, :, pairs.picked]
    scale = beta.to(query.dtype).view(-1, 1, 1)
    cached = devices.is_cpu(query.device) and query.shape[:-1].numel() * keys > FEW
    parts = _parts(query, key, mask, queries, pairs)
    found = [_reduce(scores, of, scale, score_mod.softcap, moments=moments, cached=cached) for scores, of in parts]
    if len(found) == 1:
        return found[0]
    sums, largest = ([torch.stack(part) for part in zip(*one, strict=True)] for one in zip(*found, strict=True))
    return [x.sum(0) for x in sums], (largest[0].amax(0), largest[1].amax(0))


def _with_terms(pairs: RowPairs, score_mod: ScoreMod, queries: int, keys: int) -> RowPairs:
    """Add the position bias and the sinks of this call to the rows."""
    position_bias, _, sinks = score_mod
    rows = slice(None) if pairs.picked is None else pairs.picked
    if position_bias is not None:
        bias = position_bias.expand(*position_bias.shape[:2], queries, keys)
        pairs = replace(pairs, added=pairs.added + bias[:, :, rows])
    if sinks is not None:
        pairs = replace(pairs, sinks=sinks.expand(-1, -1, queries)[..., rows])
    return pairs


def _parts(query: Tensor, key: Tensor, mask: Mask, queries: int, pairs: RowPairs) -> Iterator[tuple[Tensor, RowPairs]]:
    """Yield scores `[batch, heads, rows, keys]` in parts to process at once, each with the same part of `pairs`."""
    batch, heads, rows, _ = query.shape
    keys, on_cpu = key.shape[2], devices.is_cpu(query.device)
    each, at_once = heads * rows * keys, CACHED if on_cpu else AT_ONCE
    if batch * each <= at_once:
        yield _scores(query, key), pairs
        return
    step = max(1, at_once // each)
    slab = max(1, rows * CACHED // each) if on_cpu else rows
    for sequence in range(0, batch, step):
        some = slice(sequence, sequence + step)
        scores = _scores(query[some], key[some])
        for start in range(0, rows, slab):
            row = slice(start, start + slab)
            visible = _visible(mask, queries, keys, start, min(start + slab, rows) - 1) if on_cpu else slice(0, keys)
            yield scores[..., row, visible], pairs.part(some, row, visible)


def _visible(mask: Mask, queries: int, keys: int, first: int, last: int) -> slice:
    """The keys that a run of picked rows may see within the band, at least one."""
    if mask.pairs is not None:
        return slice(0, keys)
    seen = mask.band.visible(row_at(first, queries, keys), row_at(last, queries, keys) + 1, keys)
    low = min(seen.start, keys - 1)
    return slice(low, max(seen.stop, low + 1))


def _scores(query: Tensor, key: Tensor) -> Tensor:
    """Scores `[batch, heads, rows, keys]`; several query heads may share a key head."""
    batch, heads, rows, width = query.shape
    if heads == key.shape[1]:
        return query @ key.mT
    grouped = query.reshape(batch, key.shape[1], -1, width) @ key.mT
    return grouped.view(batch, heads, rows, -1)


def _reduce(
    scores: Tensor, pairs: RowPairs, beta: Tensor, softcap: float | None, *, moments: bool, cached: bool
) -> tuple[list[Tensor], tuple[Tensor, Tensor]]:
    """Reduce a part from `_parts`, see `row_sums`. Its scores are overwritten."""
    scores *= pairs.used
    if softcap is None:
        logits = torch.addcmul(pairs.added, scores, beta)
    else:
        logits = softcap * torch.tanh(scores * beta / softcap) + pairs.added
    if pairs.sinks is not None:
        sinks = pairs.sinks.to(logits.dtype)[..., None]
        logits = torch.cat([logits, sinks.expand(*logits.shape[:-1], 1)], -1)
    largest = extremes(scores)
    sums = _attention(logits, pairs) if cached else _small_attention(logits, pairs)
    if moments:
        # Centred in each row: a large mean score would cancel the digits of the variance.
        mean = scores.sum(-1) * pairs.share
        rest = torch.addcmul(scores, pairs.used, mean[..., None], value=-1)
        sums = [pool_rows(pairs.count, mean, torch.linalg.vector_norm(rest, dim=-1).square_()), *sums]
    return sums, largest


def _small_attention(logits: Tensor, pairs: RowPairs) -> list[Tensor]:
    """Compute the same as `_attention` in fewer operations."""
    weight = logits.softmax(-1)
    entropy, begins = torch.special.entr(weight), pairs.begins
    if pairs.sinks is not None:
        entropy = entropy * pairs.filled[..., None]  # a row without a key still has its sink
        weight = weight[..., :-1]
    if begins.shape[:2] == (1, 1) == (len(weight), 1) and pairs.sinks is None:
        sink = torch.mv(weight.flatten(2)[0], begins.flatten())
    else:
        sink = (weight * begins).sum((0, 2, 3))
    return [entropy.sum((0, 2, 3)), sink]


def _attention(logits: Tensor, pairs: RowPairs) -> list[Tensor]:
    """Sums over the rows of the Shannon entropy of their softmax and of its weight of their first key; see `row_sums`.

    The logits `[batch, heads, rows, keys]`, followed by those of sinks, are overwritten. A row without a key
    does not count.
    """
    logits -= logits.amax(-1, keepdim=True)
    weight = logits.clamp_(min=LOWEST).exp()
    norm = weight.sum(-1)
    share = weight.gather(-1, pairs.first.expand(norm.shape)[..., None]).squeeze(-1).div_(norm)
    mean = weight.mul_(logits).sum(-1).div_(norm)
    of_rows = torch.stack([norm.log_().sub_(mean), share]).mul_(pairs.filled)
    return [of_rows.sum((1, 3), dtype=sum_dtype(logits.device))]


def pair_sums(scores: Tensor, logits: Tensor, allowed: Tensor) -> tuple[Tensor, Tensor, tuple[Tensor, Tensor]]:
    """Exact sums over the allowed pairs of a score matrix that the model itself computed.

    Args:
        scores: raw scores `[batch, heads, queries, keys]`.
        logits: the same shape, the input of the softmax.
        allowed: boolean, the same shape.

    Returns:
        The first four of `pairs.COUNTS`, `[4, heads]`, and the sums of `scores.pool_rows`, `[5, heads]`, in float64;
        and the `scores.extremes` of the scores.
    """
    wide, masked = sum_dtype(scores.device), ~allowed
    used = at_least_float32(scores).masked_fill(masked, 0)
    largest = extremes(used)
    # Centred, as a large mean would cancel digits of the variance; in place, as a new matrix costs more than a sum.
    count = allowed.sum(-1, dtype=torch.int32)  # int64 would copy every pair to int64 first
    mean = used.sum(-1) / count.clamp(min=1)
    rest = used.sub_(mean[..., None]).masked_fill_(masked, 0)
    mean = mean.to(wide) + rest.sum(-1) / count.clamp(min=1)  # plus its rounding error
    square = torch.linalg.vector_norm(rest, dim=-1).square_()

    log_weights = at_least_float32(logits).log_softmax(-1).clamp_(min=LOWEST)
    weights = log_weights.exp()
    sink = weights.gather(-1, allowed.byte().argmax(-1, keepdim=True)).squeeze(-1)
    entropy = -weights.mul_(log_weights).sum(-1)  # over all that a row attends to, including sinks, which are no pairs
    seen = count > 0
    of_rows = (x.masked_fill(~seen, 0) for x in (entropy, sink))
    sums = pool_rows(count, mean, square, *of_rows)
    pairs, rows, flat = (x.sum((0, 2), dtype=wide) for x in (count, seen, count.clamp(min=1).log()))
    return torch.stack([pairs, pairs, rows, flat]), sums, largest
