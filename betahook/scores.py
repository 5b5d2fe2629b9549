"""Moments, extremes and entropy of attention scores, without an N x N tensor.

A score is `s_ij = q_i . k_j`. Its first two moments over all pairs are products of sums over tokens,

    sum s = (sum_i q_i) . (sum_j k_j)            sum s^2 = <Q^T Q, K^T K>_F

and a causal mask only replaces `K^T K` by its prefix up to each query, taken block by block. The cost is O(N d^2)
instead of O(N^2 d). What has no such form (maximum, entropy, masks without structure) is read off a fixed, evenly
spaced subset of query rows against all keys.

Nothing here draws random numbers, reads a value back to the host, or needs autograd; everything is computed in
float32 or better.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from betahook.masks import Band, Mask

BLOCK = 64
"""Queries per block of the causal sum: about d_k, where the work inside blocks equals the work between them."""

ROWS = 32
"""Query rows that are looked at in full; all of them, hence exactly, up to this length."""


@dataclass(frozen=True)
class ScoreSums:
    """Sums over the pairs that a mask allows, pooled over the batch; every tensor is float64 of shape `[heads]`."""

    pairs: Tensor
    score: Tensor
    score_square: Tensor


@dataclass(frozen=True)
class RowSums:
    """What the sampled query rows show, pooled over the batch; tensors of shape `[heads]`.

    `max_score` is the largest absolute score, `rows` the number of rows with at least one key and `entropy` the sum of
    their Shannon entropies in nats.
    """

    scores: ScoreSums
    rows: Tensor
    entropy: Tensor
    max_score: Tensor


def sum_dtype(device: torch.device) -> torch.dtype:
    """The dtype of sums: float64, except where the device has none."""
    return torch.float32 if device.type == "mps" else torch.float64


def at_least_float32(tensor: Tensor) -> Tensor:
    """The tensor itself, or a float32 copy of one in half precision."""
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


@dataclass(frozen=True)
class Components:
    """Mean and variance of each component of q or k over batch and tokens, `[heads, d_k]`, float32 or better."""

    mean: Tensor
    variance: Tensor


def components(tokens: Tensor, valid: Tensor | None) -> Components:
    """Moments of `tokens [batch, heads, tokens, d_k]`, over those where `valid [batch or 1, tokens]` is True."""
    tokens = at_least_float32(tokens)
    if valid is None:
        mean = tokens.mean((0, 2))
        return Components(mean, (tokens - mean[:, None, :]).square_().mean((0, 2)))
    weight = _per_token(valid, tokens).expand(tokens.shape[0], -1, -1, -1)
    count = weight.sum().clamp(min=1)
    mean = (tokens * weight).sum((0, 2)) / count
    return Components(mean, ((tokens - mean[:, None, :]).square_() * weight).sum((0, 2)) / count)


def _per_token(valid: Tensor, tokens: Tensor) -> Tensor:
    """`[batch or 1, tokens]` as a factor for `[batch, ..., tokens, d]`."""
    shape = (valid.shape[0], *[1] * (tokens.dim() - 3), valid.shape[1], 1)
    return valid.view(shape).to(tokens.dtype)


def _dot(a: Tensor, b: Tensor) -> Tensor:
    """Inner product of the last two dimensions."""
    dot: Tensor = torch.linalg.vecdot(a.flatten(-2), b.flatten(-2))
    return dot


def _blocks(tokens: Tensor) -> Tensor:
    """`[..., n, d] -> [..., blocks, BLOCK, d]`, the last block filled up with zeros."""
    missing = -tokens.shape[-2] % BLOCK
    if missing:
        tokens = F.pad(tokens, (0, 0, 0, missing))
    blocks: Tensor = tokens.unflatten(-2, (-1, BLOCK))
    return blocks


def _rectangle(query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
    """Sum of s and of s^2 over all pairs of `query [..., n, d]` and `key [..., m, d]`."""
    total = torch.linalg.vecdot(query.sum(-2), key.sum(-2))
    return total, _dot(query.mT @ query, key.mT @ key)


def _triangle(query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
    """The same over the pairs with `j <= i`, for equally many queries and keys."""
    query, key = _blocks(query), _blocks(key)
    inside = (query @ key.mT).tril_()
    total, square = inside.sum((-3, -2, -1)), _dot(inside, inside).sum(-1)
    if query.shape[-3] > 1:
        # Block b meets every earlier block: exclusive prefixes are the inclusive ones, one block late.
        total = total + _dot(query.sum(-2)[..., 1:, :], key.sum(-2).cumsum(-2)[..., :-1, :])
        grams, prefix = query.mT @ query, _running_sum(key.mT @ key)
        square = square + _dot(grams[..., 1:, :, :], prefix[..., :-1, :, :]).sum(-1)
    return total, square


def _running_sum(matrices: Tensor) -> Tensor:
    """Inclusive prefix sums over the blocks of `[..., blocks, d, d]`; may reuse its argument's memory."""
    if matrices.device.type != "cpu" or torch.compiler.is_compiling():
        return matrices.cumsum(-3)
    # On the CPU cumsum walks with a stride of d^2 and takes four to five times as long.
    for before, block in itertools.pairwise(matrices.unbind(-3)):
        block += before
    return matrices


def _below(query: Tensor, key: Tensor, high: int) -> tuple[Tensor, Tensor]:
    """The same over the pairs with `j - i <= high`, for any number of queries and keys."""
    query = query[..., max(-high, 0) :, :]
    high = max(high, 0)
    seen_by_all, key = key[..., :high, :], key[..., high:, :]
    rows = query.shape[-2]
    if key.shape[-2] < rows:
        # Rows past the last key see every key; zero keys stand for those that are not there.
        key = F.pad(key, (0, 0, 0, rows - key.shape[-2]))
    total, square = _triangle(query, key[..., :rows, :])
    if seen_by_all.shape[-2]:
        more, more_square = _rectangle(query, seen_by_all)
        total, square = total + more, square + more_square
    return total, square


def _banded(query: Tensor, key: Tensor, band: Band) -> tuple[Tensor, Tensor]:
    """The same over a band: what lies below its upper edge less what lies below its lower one."""
    queries, keys = query.shape[-2], key.shape[-2]
    if band.high is None or band.high >= keys - 1:
        total, square = _rectangle(query, key)
    elif band.high <= -queries:
        total = square = (query[..., :0, :].sum(-2) * key[..., :0, :].sum(-2)).sum(-1)
    else:
        total, square = _below(query, key, band.high)
    if band.low is not None and band.low > -queries:
        less, less_square = _below(query, key, band.low)
        total, square = total - less, square - less_square
    return total, square


def score_sums(query: Tensor, key: Tensor, mask: Mask, query_mean: Tensor, key_mean: Tensor) -> ScoreSums:
    """Exact number, sum and sum of squares of the scores over the pairs of a structured mask.

    Args:
        query: `[batch, heads, queries, d_k]`, any floating dtype.
        key: `[batch, key_heads, keys, d_k]`; `heads` is a multiple of `key_heads` (grouped-query attention), and the
            Gram matrix of each key head is computed once.
        mask: band and padding are used; `mask.pairs` is not.
        query_mean: `[heads, d_k]`, about the mean query. Any value gives the same sums; the mean makes them accurate.
        key_mean: `[key_heads, d_k]`, likewise.
    """
    batch, heads, queries, _ = query.shape
    groups = heads // key.shape[1]
    query = at_least_float32(query).unflatten(1, (-1, groups))
    key = at_least_float32(key).unsqueeze(2)
    wide = sum_dtype(query.device)

    # Centre the keys, so that a large mean score does not cancel the digits of the variance:
    # s - shift = [q, q . key_mean - shift] . [k - key_mean, 1]   with   shift = query_mean . key_mean.
    key_mean = key_mean[:, None, None, :]
    shift = (query_mean.unflatten(0, (-1, groups))[..., None, :] * key_mean).sum(-1, keepdim=True)
    query = torch.cat([query, query @ key_mean.mT - shift], -1)
    key = torch.cat([key - key_mean, torch.ones_like(key[..., :1])], -1)
    if mask.queries is not None:
        query = query * _per_token(mask.queries, query)
    if mask.keys is not None:
        key = key * _per_token(mask.keys, key)

    total, square = (x.to(wide).sum(0).flatten() for x in _banded(query, key, mask.band))
    pairs = _pair_count(mask, batch, queries, key.shape[-2], query.device).to(wide).expand(heads)
    shift = shift.flatten().to(wide)
    return ScoreSums(pairs, total + pairs * shift, square + 2 * shift * total + pairs * shift.square())


def _pair_count(mask: Mask, batch: int, queries: int, keys: int, device: torch.device) -> Tensor:
    """Number of pairs, a scalar: for each query, the valid keys between the two edges of the band."""
    valid_queries = torch.ones(1, queries, device=device) if mask.queries is None else mask.queries
    valid_keys = torch.ones(1, keys, device=device) if mask.keys is None else mask.keys
    before = F.pad(valid_keys.long().cumsum(-1), (1, 0))
    positions = torch.arange(queries, device=device)
    last = positions.new_full((), keys) if mask.band.high is None else (positions + mask.band.high + 1).clamp(0, keys)
    first = positions.new_zeros(()) if mask.band.low is None else (positions + mask.band.low + 1).clamp(0, keys)
    seen = (before[:, last.expand(queries)] - before[:, first.expand(queries)]).clamp(min=0)
    return (seen * valid_queries.long()).sum(-1).expand(batch).sum()


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
        mask: `mask.pairs` where given, else band and padding.
        beta: `[heads]` or a scalar, the inverse temperature in force; used for the entropy only.
        position_bias: `[batch or 1, heads or 1, queries or 1, keys]`, added to the logits as the attention does.
        softcap: the model's soft cap of its logits, `softcap * tanh(logit / softcap)`.

    The entropy is that of the attention row itself: mask, biases and soft cap included, attention sinks not.
    """
    batch, heads, queries, _ = query.shape
    keys = key.shape[-2]
    picked = sampled_rows(queries, query.device)
    rows = at_least_float32(query[:, :, picked]).unflatten(1, (key.shape[1], -1))
    scores = (rows.flatten(2, 3) @ at_least_float32(key).mT).view(batch, heads, len(picked), keys)

    allowed = _allowed_rows(mask, picked, keys)
    wide = sum_dtype(scores.device)
    pairs = allowed.expand(batch, heads, -1, -1).sum((0, 2, 3)).to(wide)
    used = scores.masked_fill(~allowed, 0)
    total, square = used.sum((0, 2, 3), dtype=wide), used.square().sum((0, 2, 3), dtype=wide)

    logits = scores * beta.to(scores.dtype).view(-1, 1, 1)
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    for bias in (mask.bias, position_bias):
        if bias is not None:
            logits = logits + bias.expand(*bias.shape[:2], queries, keys)[..., picked, :]
    # Finite, so that a masked pair contributes 0 and not 0 * inf.
    logits = logits.masked_fill(~allowed, torch.finfo(logits.dtype).min / 4)
    logits = logits - logits.amax(-1, keepdim=True)
    weight = logits.exp()
    norm = weight.sum(-1)
    entropy = norm.log() - (weight * logits).sum(-1) / norm
    seen = allowed.any(-1).expand(batch, heads, -1)
    return RowSums(
        ScoreSums(pairs, total, square),
        seen.sum((0, 2)).to(wide),
        entropy.masked_fill(~seen, 0).sum((0, 2), dtype=wide),
        used.abs().amax((0, 2, 3)).to(wide),
    )


def sampled_rows(queries: int, device: torch.device) -> Tensor:
    """Positions of the query rows that `row_sums` looks at: all up to `ROWS`, else evenly spaced with both ends."""
    if queries <= ROWS:
        return torch.arange(queries, device=device)
    return torch.arange(ROWS, device=device) * (queries - 1) // (ROWS - 1)


def _allowed_rows(mask: Mask, rows: Tensor, keys: int) -> Tensor:
    """Boolean `[batch or 1, heads or 1, rows, keys]`."""
    if mask.pairs is not None:
        return mask.pairs[..., rows, :]
    pairs = mask.band.allowed(rows, torch.arange(keys, device=rows.device))[None, None]
    if mask.queries is not None:
        pairs = pairs & mask.queries[:, None, rows, None]
    if mask.keys is not None:
        pairs = pairs & mask.keys[:, None, None, :]
    return pairs


def choose(exact: ScoreSums, rows: ScoreSums, mask: Mask) -> ScoreSums:
    """The exact sums where the mask has the structure they assume, those of the sampled rows where it has not."""
    if mask.structured is None:
        return exact
    return ScoreSums(
        torch.where(mask.structured, exact.pairs, rows.pairs),
        torch.where(mask.structured, exact.score, rows.score),
        torch.where(mask.structured, exact.score_square, rows.score_square),
    )


def is_exact(mask: Mask, queries: int) -> bool | Tensor:
    """Whether the sums that `choose` returns cover every pair; a boolean scalar tensor where the mask decides."""
    return mask.structured is None or queries <= ROWS or mask.structured


def overflow_logit(dtype: torch.dtype) -> float:
    """The largest logit whose exponential is finite, in the dtype in which a softmax over `dtype` logits is taken.

    709 in float64 and 88.7 in every narrower dtype, since their softmax runs in float32. (Paper, section 3: the upper
    end of the search for beta.)
    """
    return math.log(torch.finfo(torch.promote_types(dtype, torch.float32)).max)
