"""Exact moments of attention scores, and of their factors q and k, without an N x N tensor.

A score is `s_ij = q_i . k_j`. The first two moments of a query's scores only need sums over its keys,

    sum_j s_ij = q_i . (sum_j k_j)            sum_j s_ij^2 = q_i^T (sum_j k_j k_j^T) q_i

and under a causal mask those sums are carried from one block of queries to the next. The cost is O(N d^2) instead of
O(N^2 d), the extra memory O(d^2). The maximum, the entropy and unstructured masks have no such form; they are handled
in `betahook.measure.rows`.

`betahook.measure.calls` calls `components` and `score_sums` for each attention call.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from betahook.measure import devices
from betahook.measure.dtypes import at_least_float32, product_dtype, sum_dtype
from betahook.measure.masks import Mask, once_per_mask
from betahook.measure.pairs import keys_per_query

BLOCK = 64
"""Queries per block of the causal sum: about d_k, where the work inside blocks equals the work between them."""

FEW_TOKENS = 2**12
"""Maximum number of tokens of a batch whose moments the CPU computes at once."""


@dataclass(frozen=True)
class Components:
    """Mean and population variance of each component of q or k over batch and tokens, `[heads, d_k]` each."""

    mean: Tensor
    variance: Tensor


def components(tokens: Tensor, valid: Tensor | None) -> Components:
    """Moments of `tokens [batch, heads, tokens, d_k]` where `valid [batch or 1, tokens]` is True; None for all.

    Zeros if there is no token. Computed in float32 or better.
    """
    if valid is None and not devices.is_cpu(tokens.device):
        variance, mean = torch.var_mean(at_least_float32(tokens), (0, 2), correction=0)
        return Components(mean, variance)
    if valid is None and len(tokens) * tokens.shape[2] <= FEW_TOKENS:
        mean = tokens.mean((0, 2), dtype=product_dtype(tokens.dtype))
        return Components(mean, (tokens - mean[:, None]).square_().mean((0, 2)))
    count, mean = _count_and_mean(tokens, valid)
    length = tokens.shape[2]
    slabs = _slabs(length) if devices.is_cpu(tokens.device) else [(0, length)]
    squares = [_centred(tokens, mean, valid, start, stop).square_().sum((0, 2)) for start, stop in slabs]
    return Components(mean, summed(squares) / count)


def _count_and_mean(tokens: Tensor, valid: Tensor | None) -> tuple[Tensor | int, Tensor]:
    count, dtype = _count(tokens, valid), product_dtype(tokens.dtype)
    used = tokens if valid is None else tokens * _per_token(valid)
    return count, used.sum((0, 2), dtype=dtype) / count


def _count(tokens: Tensor, valid: Tensor | None) -> Tensor | int:
    """Number of tokens that take part, at least 1."""
    batch, _, length, _ = tokens.shape
    return batch * length if valid is None else valid.expand(batch, -1).sum().clamp(min=1)


def _approximate_mean(tokens: Tensor, valid: Tensor | None) -> Tensor:
    """Mean of each component over some evenly spaced tokens, including the last: `[heads, d_k]`."""
    length = tokens.shape[2]
    step = length // BLOCK + 1
    some = slice((length - 1) % step, None, step)
    return _count_and_mean(tokens[:, :, some], None if valid is None else valid[:, some])[1]


def _per_token(valid: Tensor) -> Tensor:
    """Reshape `[batch or 1, tokens]` to a factor for `[batch, heads, tokens, d]`."""
    return valid[:, None, :, None]


def _centred(tokens: Tensor, mean: Tensor, valid: Tensor | None, start: int, stop: int) -> Tensor:
    """Tokens `start` to `stop` minus the mean of their head, `[heads, d]`: a new tensor, zero where not valid."""
    part = tokens[:, :, start:stop] - mean[:, None, :]
    return part if valid is None else part.mul_(_per_token(valid[:, start:stop]))


def _slabs(length: int) -> Iterator[tuple[int, int]]:
    """Yield start and stop of the runs of tokens to process at once; all but the last are whole blocks."""
    for start in range(0, length, BLOCK):
        yield start, min(start + BLOCK, length)


def padded(tokens: Tensor, length: int, before: int = 0) -> Tensor:
    """Pad with zeros, `[..., n, d] -> [..., length, d]`: `before` of them in front, the rest at the end."""
    after = length - before - tokens.shape[-2]
    return F.pad(tokens, (0, 0, before, after)) if before or after else tokens


def _rounded_up(length: int) -> int:
    return length + -length % BLOCK


class _PrefixSums:
    """Score sums of each query `i` over the centred keys `j <= i + edge`, from sums over prefixes of the keys.

    It is called with one block of queries after another, and carries the sums over the keys that every later query
    sees: `gram [batch * key_heads, d, d]`, and `vectors [batch * key_heads, d, 2]`, the sum of the keys next to their
    mean, because multiplying by both in one call costs hardly more.
    """

    def __init__(self, edge: int, key: Tensor, mean: Tensor, valid: Tensor | None) -> None:
        batch, _, self.keys, _ = key.shape
        self.edge = edge
        self.key, self.mean, self.valid = key, mean, valid
        self.seen = 0
        means = mean.repeat(batch, 1)
        self.vectors = torch.stack([torch.zeros_like(means), means], -1)
        self.gram = torch.zeros_like(means)[:, :, None].repeat(1, 1, mean.shape[-1])

    def __call__(self, query: Tensor, groups: int, start: int, stop: int) -> tuple[Tensor, Tensor]:
        """Sum over the queries of one block, from `start` to `stop`, `[batch * key_heads, groups * BLOCK, d]`.

        Returns:
            For each query the sum of its scores and its product with the mean key, `[..., groups * BLOCK, 2]`, and the
            sum of the squares of all scores, `[batch * key_heads, groups]`.
        """
        first = min(max(start + self.edge, 0), self.keys)
        last = min(max(stop + self.edge, 0), self.keys)
        self._take_until(first)
        if first == last:
            return self._of_all(query, groups)

        # The edge runs through these keys: in its own block, a query sees the keys up to its own position.
        key = padded(self._read(first, last), BLOCK, before=first - start - self.edge)
        self.seen = last
        score, square = self._of_all(query, groups)
        self._take(key)
        in_block = torch.bmm(query, key.mT).view(-1, groups, BLOCK, BLOCK).tril_()
        score.select(-1, 0).add_(in_block.sum(-1).flatten(1))
        return score, square.add_(torch.linalg.vector_norm(in_block, dim=(2, 3)).square_())

    def _of_all(self, query: Tensor, groups: int) -> tuple[Tensor, Tensor]:
        """Sum over the keys taken so far, all of which these queries see."""
        square = torch.bmm(query, self.gram).mul_(query)
        return torch.bmm(query, self.vectors), square.view(len(square), groups, -1).sum(-1)

    def components(self) -> Components:
        """Moments of all keys, including those that no query sees, from the sums at hand."""
        self._take_until(self.keys)
        count, wide = _count(self.key, self.valid), sum_dtype(self.key.device)
        sums = self.vectors.select(-1, 0), self.gram.diagonal(dim1=-2, dim2=-1)
        rest, square = (x.view(-1, *self.mean.shape).sum(0, dtype=wide) / count for x in sums)
        return Components(self.mean + rest, square - rest.square())

    def _take_until(self, stop: int) -> None:
        for start, end in _slabs(stop - self.seen):
            self._take(self._read(self.seen + start, self.seen + end))
        self.seen = max(self.seen, stop)

    def _read(self, start: int, stop: int) -> Tensor:
        return _centred(self.key, self.mean, self.valid, start, stop).flatten(0, 1)

    def _take(self, key: Tensor) -> None:
        """Add the keys `[batch * key_heads, n, d]` in place: copying the Gram matrices would double the cost."""
        self.vectors.select(-1, 0).add_(key.sum(1))
        self.gram.baddbmm_(key.mT, key)


def score_sums(query: Tensor, key: Tensor, mask: Mask, query_mean: Tensor) -> tuple[Tensor, Components]:
    """Exact sums over the scores of a structured mask; the moments of the keys come at no extra cost.

    Args:
        query: `[batch, heads, queries, d_k]`, any floating dtype.
        key: `[batch, key_heads, keys, d_k]`; `heads` is a multiple of `key_heads` (grouped-query attention).
        mask: band and padding are used; `mask.pairs` and `mask.documents` are not.
        query_mean: `[heads, d_k]`, an estimate of the mean query. It only affects the rounding of the sums.

    Returns:
        Sums of the scores, of their squares, and of their squared deviations from the mean of their row, `[3, heads]`
        in float64; and the moments of the keys.
    """
    batch, heads, queries, _ = query.shape
    key_heads, keys = key.shape[1:3]
    groups, wide = heads // key_heads, sum_dtype(query.device)
    # Keys below the upper edge of the band minus those below the lower one.
    key_mean = _approximate_mean(key, mask.keys)
    below = [_PrefixSums(edge, key, key_mean, mask.keys) for edge in mask.band.edges(keys)]

    # The keys are centred, so that a large mean score does not cancel the digits of the variance:
    # s - shift = q . (k - key_mean) + offset   with   offset = q . key_mean - shift.
    scores, squares = [], []
    for start, stop in _slabs(queries):
        rows = query_blocks(query, mask.queries, groups, start, stop)
        score, square = below[0](rows, groups, start, stop)
        if len(below) == 2:
            less, less_square = below[1](rows, groups, start, stop)
            score.select(-1, 0).sub_(less.select(-1, 0))
            square -= less_square
        scores.append(score.view(batch, key_heads, -1, groups, BLOCK, 2))
        squares.append(square.view(batch, key_heads, -1, groups))

    # Per query from here on, `[batch, key_heads, blocks, groups, BLOCK]`.
    shift = (query_mean.unflatten(0, (key_heads, groups)) * key_mean[:, None]).sum(-1)
    score, offset = torch.cat(scores, 2).unbind(-1)
    offset = offset - shift[:, None, :, None]
    count = once_per_mask(keys_per_query, mask, query, queries, keys)
    count_here = padded(count[..., None], _rounded_up(queries)).view(len(count), 1, -1, 1, BLOCK)
    total = (score + count_here * offset).sum((0, 2, 4), dtype=wide)
    square = torch.cat(squares, 2).sum((0, 2), dtype=wide)
    # The offset is the same for all keys of a query: it is not part of the spread within rows.
    row_square = square - (score.square() / count_here.clamp(min=1)).sum((0, 2, 4), dtype=wide)
    square = square + (offset * (2 * score + count_here * offset)).sum((0, 2, 4), dtype=wide)

    pairs, shift = count.expand(batch, -1).sum().to(wide), shift.to(wide)
    square = square + 2 * shift * total + pairs * shift.square()
    sums = [total + pairs * shift, square, row_square]
    return torch.stack(sums).flatten(1), below[0].components()


def summed(parts: list[Tensor]) -> Tensor:
    """Sum of tensors of one shape, at least one."""
    return parts[0] if len(parts) == 1 else torch.stack(parts).sum(0)


def pool_rows(count: Tensor, mean: Tensor, square: Tensor, *others: Tensor) -> Tensor:
    """Sum over rows the scores, their squares, their squared deviations from the row mean: `[3 + others, heads]`.

    Args:
        count: number of scores in each row, `[batch, heads, rows]`, in float64, the dtype of the sums.
        mean: mean of the scores in each row.
        square: sum of their squared deviations from it.
        others: further numbers to be summed, one for each row.
    """
    total = mean * count
    sums = torch.stack([total, torch.addcmul(square, total, mean), square, *others])
    return sums.sum((1, 3), dtype=sum_dtype(mean.device))


def extremes(scores: Tensor) -> tuple[Tensor, Tensor]:
    """Largest absolute score and largest score of each head, `[batch, heads, rows, keys] -> [heads]`."""
    over = 0, 2, 3
    positive = scores.amax(over)
    if devices.is_cpu(scores.device):  # whose norm processes one score at a time
        return torch.maximum(positive, 0 - scores.amin(over)), positive  # 0 - x: no -0 if all are 0
    return torch.linalg.vector_norm(scores, torch.inf, over), positive


def query_blocks(query: Tensor, valid: Tensor | None, groups: int, start: int, stop: int) -> Tensor:
    """Queries `start` to `stop`, zero where not valid: `[batch * key_heads * blocks, groups * BLOCK, d_k]`."""
    rows = at_least_float32(query[:, :, start:stop])
    if valid is not None:
        rows = rows * _per_token(valid[:, start:stop])
    batch, heads, _, width = query.shape
    rows = padded(rows, _rounded_up(stop - start))
    rows = rows.view(batch, heads // groups, groups, -1, BLOCK, width).transpose(2, 3)
    return rows.reshape(-1, groups * BLOCK, width)
