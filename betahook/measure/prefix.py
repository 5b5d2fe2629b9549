"""The sums of `betahook.measure.scores`, computed in a few large operations: the form for accelerators.

There a launch costs more than the work that it starts, and nothing is gained by staying in a cache, so all blocks of
queries are processed at once. The sums over the keys in front of each block, `[d, d]` for the squared scores and `[d]`
for the scores, are concatenated with the keys of the block itself, and one masked product of the queries with the
result gives both kinds of sums. `betahook.measure.calls` chooses between the forms.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from betahook.measure.dtypes import at_least_float32, product_dtype, sum_dtype
from betahook.measure.masks import Mask, once_per_mask
from betahook.measure.pairs import keys_per_query, of_sequences, share_of
from betahook.measure.scores import BLOCK, Components, padded, query_blocks, summed

SLAB = 4096
"""Maximum number of queries of a sequence that are processed at once, which bounds the memory."""

AT_ONCE = 2**26
"""Maximum size of the largest intermediate tensor, in entries; a batch that would exceed it is split."""


def score_sums(query: Tensor, key: Tensor, mask: Mask, of_key: Components) -> Tensor:
    """Exact sums over the scores of a structured mask, `[3, heads]`: see `scores.score_sums`.

    Args:
        query: `[batch, heads, queries, d_k]`, any floating dtype.
        key: `[batch, key_heads, keys, d_k]`.
        mask: only its band and padding are used.
        of_key: moments of the keys.
    """
    batch, heads, queries, width = query.shape
    each = heads * min(queries, SLAB) * (width + BLOCK)
    step = max(1, AT_ONCE // each)
    parts = [
        _sequences(query[some], key[some], mask, of_key, some)
        for some in (slice(first, first + step) for first in range(0, batch, step))
    ]
    return summed(parts)


def _sequences(query: Tensor, key: Tensor, mask: Mask, of_key: Components, some: slice) -> Tensor:
    """Compute `score_sums` for some sequences of the batch."""
    batch, heads, queries, width = query.shape
    key_heads, keys = key.shape[1:3]
    # Centred, so that a large mean score does not cancel the digits of the variance: s = q . (k - mean) + q . mean.
    centred = at_least_float32(key) - of_key.mean[:, None]
    if mask.keys is not None:
        centred = centred * of_sequences(mask.keys, some)[:, None, :, None]
    key = F.pad(centred, (0, 1), value=1).flatten(0, 1)
    mean = of_key.mean.expand(batch, -1, -1).reshape(-1, 1, width, 1)
    below = [_SlabSums(mask, edge, key, mean) for edge in mask.band.edges(keys)]
    valid = None if mask.queries is None else of_sequences(mask.queries, some)
    counts = [of_sequences(x, some) for x in once_per_mask(block_counts, mask, query, queries, keys)]
    parts = []
    for start in range(0, queries, SLAB):
        rows = query_blocks(query, valid, heads // key_heads, start, min(start + SLAB, queries))
        rows = rows.unflatten(0, (batch * key_heads, -1))
        offset, score, square = below[0](rows, start)
        if len(below) == 2:
            _, less, less_square = below[1](rows, start)
            score, square = score - less, square - less_square
        shape = batch, key_heads, -1, heads // key_heads, BLOCK
        offset, score, square = (x.view(shape) for x in (offset, score, square))
        first = start // BLOCK
        count, share = (x if queries <= SLAB else x[:, :, first : first + rows.shape[1]] for x in counts)
        mean = score * share
        sums = torch.empty(3, *mean.shape, dtype=count.dtype, device=mean.device)  # the sums of `scores.pool_rows`
        torch.addcmul(square, score, mean, value=-1, out=sums[2])  # the offset is the same for all keys of a query
        torch.mul(mean.add_(offset), count, out=sums[0])
        torch.addcmul(sums[2], sums[0], mean, out=sums[1])
        parts.append(sums.sum((1, 3, 5)).flatten(1))
    return summed(parts)


def block_counts(mask: Mask, like: Tensor, queries: int, keys: int) -> tuple[Tensor, Tensor]:
    """Number of keys of each query in float64, and its `share_of`: `[batch or 1, 1, blocks, 1, BLOCK]` each."""
    count = once_per_mask(keys_per_query, mask, like, queries, keys).to(sum_dtype(like.device))
    count = F.pad(count, (0, -queries % BLOCK)).view(len(count), 1, -1, 1, BLOCK)
    return count, share_of(count).to(product_dtype(like.dtype))


def block_factors(mask: Mask, like: Tensor, blocks: int) -> tuple[Tensor, Tensor]:
    """1 for each earlier block of a block, `[blocks, blocks]`; 1 for each key of its own block that a query sees."""
    earlier = torch.ones(blocks, blocks, dtype=like.dtype, device=like.device).tril(-1)
    return earlier, torch.ones(BLOCK, BLOCK, dtype=like.dtype, device=like.device).tril()


class _SlabSums:
    """Score sums of each query `i` over the keys `j <= i + edge`, for one slab of queries after another.

    Args:
        mask: the mask of the call, which caches the factors of blocks.
        edge: an edge of its band.
        key: centred keys with a 1 appended to each, `[batch * key_heads, keys, d + 1]`.
        mean: mean of the keys before centring, `[batch * key_heads, 1, d, 1]`.
    """

    def __init__(self, mask: Mask, edge: int, key: Tensor, mean: Tensor) -> None:
        self.mask = mask
        self.edge = edge
        self.key = key
        self.mean = mean
        self.seen = 0
        self.sums: Tensor | None = None

    def __call__(self, query: Tensor, start: int) -> tuple[Tensor, Tensor, Tensor]:
        """Sum over the queries `[batch * key_heads, blocks, groups * BLOCK, d]` from the one at `start` on.

        Returns:
            The product of each query with the mean key, the sum of its scores, and the sum of their squares,
            `[batch * key_heads, blocks, groups * BLOCK]` each.
        """
        _, blocks, _, width = query.shape
        first, last = (min(max(i + self.edge, 0), self.key.shape[1]) for i in (start, start + blocks * BLOCK))
        self._take(first)
        if first == last:
            return self._of_all(query)
        # The edge runs through these keys: in its own block, a query sees the keys up to its own position.
        key = padded(self.key[:, first:last], blocks * BLOCK, before=first - start - self.edge)
        key = key.view(len(key), blocks, BLOCK, -1)
        earlier, visible = once_per_mask(block_factors, self.mask, query, blocks)
        sums = self._in_front_of(key, earlier)
        parts = [sums[..., :-1], key[..., :-1].mT, sums[..., -1:], self.mean.expand(-1, blocks, -1, -1)]
        # Columns: the Gram matrix of the keys in front, which gives the squared scores; each key of the query's own
        # block; the sum of the keys in front; the mean key.
        in_front, own, every_score = slice(width), slice(width, width + BLOCK), slice(width, width + BLOCK + 1)
        products = query @ torch.cat(parts, -1)
        products.view(-1, BLOCK, width + BLOCK + 2)[..., own].mul_(visible)
        score = products[..., every_score].sum(-1)
        products[..., in_front].mul_(query)
        products[..., own].square_()
        return products[..., -1], score, products[..., : width + BLOCK].sum(-1)

    def _of_all(self, query: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Sum over the keys taken so far, all of which these queries see."""
        if self.sums is None:
            nothing = torch.zeros_like(query[..., 0])
            return nothing, nothing, nothing
        flat = query.flatten(1, 2)
        products = flat @ torch.cat([self.sums, self.mean[:, 0]], -1)
        square = (products[..., :-2] * flat).sum(-1)
        offset, score, square = (x.view(query.shape[:-1]) for x in (products[..., -1], products[..., -2], square))
        return offset, score, square

    def _take(self, stop: int) -> None:
        """Take in the keys up to `stop`, which every query from now on sees."""
        if stop > self.seen:
            key = self.key[:, self.seen : stop]
            sums = key[..., :-1].mT @ key
            self.sums, self.seen = sums if self.sums is None else self.sums + sums, stop

    def _in_front_of(self, key: Tensor, earlier: Tensor) -> Tensor:
        """Sums over the keys in front of each block of `key [n, blocks, BLOCK, d + 1]`: `[n, blocks, d, d + 1]`."""
        sums = key[..., :-1].mT @ key
        sums = torch.bmm(earlier.expand(len(key), -1, -1), sums.flatten(2)).view(sums.shape)
        return sums if self.sums is None else sums + self.sums[:, None]
