"""Facts about the pairs of an attention call that follow from its mask alone, computed once for all layers.

`betahook.measure.rows` examines the rows that are picked here, and `betahook.measure.calls` adds up the counts. The
functions of a mask are called through `masks.once_per_mask`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from betahook.measure.dtypes import product_dtype, sum_dtype
from betahook.measure.masks import Mask, once_per_mask

SHORT = 128
"""All rows are examined up to the pairs of this many queries and keys, where that is faster than any other form."""

ROWS = 32
"""Number of query rows sampled from a longer sequence; up to this many rows, all are examined, for any keys."""


def is_short(queries: int, keys: int) -> bool:
    """Return True if all rows are examined."""
    return queries <= ROWS or queries * keys <= SHORT**2


def sampled_rows(queries: int, keys: int, device: torch.device) -> Tensor:
    """Positions of the query rows to examine: all of a short sequence, else the middles of `ROWS` equal runs."""
    if is_short(queries, keys):
        return torch.arange(queries, device=device)
    return torch.arange(queries, 2 * ROWS * queries, 2 * queries, device=device) // (2 * ROWS)


def row_at(index: int, queries: int, keys: int) -> int:
    """Position of the row with this index among those that are examined."""
    return index if is_short(queries, keys) else (2 * index + 1) * queries // (2 * ROWS)


def sampling_weight(queries: int, keys: int) -> float:
    """Number of rows that each examined row stands for."""
    return 1.0 if is_short(queries, keys) else queries / ROWS


@dataclass(frozen=True)
class RowPairs:
    """The pairs of the picked rows; the shape `mask` below is `[batch or 1, heads or 1, rows, keys]`.

    Attributes:
        picked: positions of the rows, None for all of them.
        used: 1 for a pair that takes part and 0 for any other, of the shape `mask`.
        added: an addend of the logits, of the shape `mask`: the bias, and for pairs that take no part a number so low
            that their weight vanishes. It is always finite, and 0 at the first key of a row that may use none, so that
            no row gives a NaN, and such a row has no entropy.
        count: number of pairs in each row, of the shape `mask` without keys, in float64.
        share: `share_of` the count, in the dtype of `used`.
        first: the first key that each row may use, shaped like `count`, int64; 0 for a row without one.
        begins: 1 for the first key of a row that has one and 0 for any other, of the shape `mask`.
        filled: 1 for a row with a key and 0 for any other, shaped like `count`.
        sinks: logits that take part in the softmax without a key, `[batch or 1, heads, rows]`; None without any.
    """

    picked: Tensor | None
    used: Tensor
    added: Tensor
    count: Tensor
    share: Tensor
    first: Tensor
    begins: Tensor
    filled: Tensor
    sinks: Tensor | None = None

    def part(self, sequences: slice, rows: slice, keys: slice) -> RowPairs:
        """Return the part for some sequences, rows and keys; the keys must include all that these rows may use."""

        def of_rows(values: Tensor) -> Tensor:
            return of_sequences(values, sequences)[..., rows]

        used, added, begins = (
            of_sequences(x, sequences)[..., rows, keys] for x in (self.used, self.added, self.begins)
        )
        # A row without a key, which does not count, has its first one at 0, perhaps before this part.
        first = (of_rows(self.first) - keys.start).clamp_(min=0)
        count, share, filled = map(of_rows, (self.count, self.share, self.filled))
        sinks = None if self.sinks is None else of_rows(self.sinks)
        return RowPairs(None, used, added, count, share, first, begins, filled, sinks)


def row_pairs(mask: Mask, like: Tensor, queries: int, keys: int) -> RowPairs:
    """Describe the rows to examine, in float32 or better."""
    dtype = product_dtype(like.dtype)
    rows = sampled_rows(queries, keys, like.device)
    allowed = _allowed(mask, rows, keys)
    used, count = allowed.to(dtype), allowed.sum(-1)
    hidden = ~allowed
    hidden[..., 0] &= count > 0
    added = torch.zeros_like(used).masked_fill_(hidden, torch.finfo(dtype).min / 4)
    if mask.bias is not None:
        bias = mask.bias.expand(*mask.bias.shape[:2], queries, keys)[..., rows, :]
        added = added + bias.masked_fill(~allowed, 0)
    picked, filled = None if is_short(queries, keys) else rows, (count > 0).to(dtype)
    count, share = count.to(sum_dtype(like.device)), share_of(count).to(dtype)
    first = used.argmax(-1)  # the first of equal entries
    begins = torch.zeros_like(used).scatter_(-1, first[..., None], filled[..., None])
    return RowPairs(picked, used, added, count, share, first, begins, filled)


def share_of(count: Tensor) -> Tensor:
    """1 over each count, the factor that turns a sum into a mean; 1 for a count of 0, whose sum is 0."""
    return count.clamp(min=1).reciprocal()


def of_sequences(facts: Tensor, some: slice) -> Tensor:
    """Select the facts about some sequences of the batch from `[batch or 1, ...]`."""
    return facts if len(facts) == 1 else facts[some]


def _allowed(mask: Mask, rows: Tensor, keys: int) -> Tensor:
    """The pairs that these rows may use, boolean `[batch or 1, heads or 1, rows, keys]`."""
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


def keys_per_query(mask: Mask, like: Tensor, queries: int, keys: int) -> Tensor:
    """Number of valid keys between the two edges of the band for each query, `[batch or 1, queries]`, int64."""
    band, positions = mask.band, torch.arange(queries, device=like.device)
    last = positions.new_full((queries,), keys) if band.high is None else (positions + band.high + 1).clamp(0, keys)
    first = None if band.low is None else (positions + band.low + 1).clamp(0, keys)
    if mask.keys is None:
        seen = (last if first is None else last - first)[None]
    else:
        before = F.pad(mask.keys.cumsum(-1), (1, 0))
        seen = before[:, last] if first is None else before[:, last] - before[:, first]
    return seen if mask.queries is None else seen * mask.queries


COUNTS = ("pairs", "exact_pairs", "rows", "flat_entropy", "queries", "keys")
"""Number of pairs, and of those whose moments are exact; number of rows with a key, and the sum of their entropies
under uniform attention over all keys that a row may use; numbers of query and of key tokens."""


def call_counts(mask: Mask, like: Tensor, batch: int, heads: int, queries: int, keys: int) -> Tensor:
    """The `COUNTS` of one attention call, `[6, heads]`, float64; estimates if some rows stand for the others."""
    sampled = once_per_mask(row_pairs, mask, like, queries, keys)
    of_rows = torch.stack([sampled.count, sampled.filled.to(sampled.count), sampled.count.clamp(min=1).log()])
    pairs, rows, flat = sampling_weight(queries, keys) * of_rows.expand(3, batch, heads, -1).sum((1, 3))
    exact = pairs
    if not is_short(queries, keys):
        exact = once_per_mask(keys_per_query, mask, like, queries, keys).expand(batch, -1).sum(dtype=pairs.dtype)
        exact = exact.expand(heads)
        if mask.structured is None:
            pairs = exact
        else:
            pairs, exact = torch.where(mask.structured, exact, pairs), torch.where(mask.structured, exact, 0)
    tokens = count_tokens(pairs, mask.queries, batch, queries), count_tokens(pairs, mask.keys, batch, keys)
    return torch.stack([pairs, exact, rows, flat, *tokens])


def count_tokens(like: Tensor, valid: Tensor | None, batch: int, tokens: int) -> Tensor:
    """Number of tokens where `valid [batch or 1, tokens]` is True (None for all), as a tensor like `like`."""
    if valid is None:
        return torch.full_like(like, batch * tokens)
    return valid.expand(batch, tokens).sum(dtype=like.dtype).expand_as(like)
