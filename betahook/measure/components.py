"""Moments of every component of q and of k: a second flat table of sums, over all components of all heads.

The score variance that independent components would give does not add up over batches, so `with_averages` computes it
from the moments of everything that was measured, and from the sums of `betahook.measure.statistics`.
`betahook.measure.calls` calls `add`; `Statistics` call `with_averages` when a value that needs these moments is read.
"""

from __future__ import annotations

import torch
from torch import Tensor

from betahook import theory
from betahook.measure.scores import Components
from betahook.measure.statistics import ROW, by_segment

ROWS = ("query_sum", "query_square", "key_sum", "key_square")
"""Sums of q, q^2, k and k^2 over tokens; the table holds the number of tokens."""


def add(moments: Tensor, query: Components, key: Components, tokens: Tensor) -> None:
    """Add the components of one attention call to `moments [4, heads * d_k]`, in place.

    The sums are about zero, not about the mean, so that they can be added over calls and ranks: float64 keeps the
    float32 digits of a variance up to means ten thousand times the spread. A key head may serve several query heads;
    `tokens [2, heads]` are the numbers of their queries and keys.
    """
    key_heads, width = key.mean.shape
    shape = key_heads, len(query.mean) // key_heads, width
    parts = [query.mean.view(shape), query.variance.view(shape)]
    parts += [part[:, None].expand(shape) for part in (key.mean, key.variance)]
    means = torch.stack(parts).to(moments).view(2, 2, *shape)
    means[:, 1].addcmul_(means[:, 0], means[:, 0])  # of the squares
    moments.view(2, 2, *shape).addcmul_(means, tokens.to(moments).view(2, 1, *shape[:2], 1))


def with_averages(table: Tensor, moments: Tensor, widths: Tensor) -> Tensor:
    """Return `table [quantities, heads]` with the averages over components filled in.

    Args:
        table: the table, which holds the numbers of tokens. Heads without moments keep the averages that it has.
        moments: moments from `add`.
        widths: d_k of each head, `[heads]`.
    """
    known = by_segment((moments != 0).any(0).to(table), "max", widths) > 0
    queries, keys = table[ROW["queries"]], table[ROW["keys"]]
    counts = torch.stack([queries, queries, keys, keys]).clamp(min=1)
    means = moments / counts.repeat_interleave(widths, 1, output_size=moments.shape[1])
    (query_mean, query_square, key_mean, key_square) = means
    query_variance, key_variance = query_square - query_mean.square(), key_square - key_mean.square()
    product = theory.product_variance(query_mean, query_variance, key_mean, key_variance)
    columns = torch.stack([query_mean.square(), query_variance, key_mean.square(), key_variance, product], 1)
    sums = by_segment(columns.clamp(min=0), "sum", widths).T
    filled = table.clone()
    filled[ROW["query_mean_square"]] = queries * sums[0] / widths
    filled[ROW["query_variance"]] = queries * sums[1] / widths
    filled[ROW["key_mean_square"]] = keys * sums[2] / widths
    filled[ROW["key_variance"]] = keys * sums[3] / widths
    filled[ROW["independent_variance"]] = queries * sums[4]
    return torch.where(known, filled, table)
