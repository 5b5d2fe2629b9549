"""Moments of every component of q and of k: a second flat table of sums, over all components of all heads.

The score variance that independent components would give is no sum over batches: `describe` computes it once a step
from the moments of everything that was measured and writes it into the table of `betahook.measure.statistics`. Layers
call `add`, the hook `describe`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from betahook import theory
from betahook.measure.scores import Components, sum_dtype
from betahook.measure.statistics import ROW, by_segment

ROWS = ("query_sum", "query_square", "key_sum", "key_square")


def empty(components: int, device: torch.device) -> Tensor:
    """Zeros `[4, components]` for the sums of q, q^2, k and k^2 over tokens; the table holds the number of tokens."""
    return torch.zeros(4, components, dtype=sum_dtype(device), device=device)


def add(moments: Tensor, query: Components, key: Components) -> None:
    """Add the tokens of one attention call to `moments [4, heads * d_k]`, in place.

    The sums are about zero whatever the mean, so that they can be added over calls and ranks: float64 keeps the float32
    digits of a variance up to means ten thousand times the spread.
    """
    groups = moments.shape[1] // key.mean.numel()
    sums = [*query.sums(), *(sums.repeat_interleave(groups, 0) for sums in key.sums())]
    moments += torch.stack([part.flatten() for part in sums]).to(moments)


def describe(table: Tensor, moments: Tensor, widths: Tensor) -> None:
    """Write the averages over components into `table [quantities, heads]`; `widths [heads]` holds d_k of each head."""
    queries, keys = table[ROW["queries"]], table[ROW["keys"]]
    counts = torch.stack([queries, queries, keys, keys]).clamp(min=1)
    means = moments / counts.repeat_interleave(widths, 1, output_size=moments.shape[1])
    (query_mean, query_square, key_mean, key_square) = means
    query_variance, key_variance = query_square - query_mean.square(), key_square - key_mean.square()
    product = theory.product_variance(query_mean, query_variance, key_mean, key_variance)
    columns = torch.stack([query_mean.square(), query_variance, key_mean.square(), key_variance, product], 1)
    sums = by_segment(columns.clamp(min=0), "sum", widths).T
    table[ROW["query_mean_square"]] = queries * sums[0] / widths
    table[ROW["query_variance"]] = queries * sums[1] / widths
    table[ROW["key_mean_square"]] = keys * sums[2] / widths
    table[ROW["key_variance"]] = keys * sums[3] / widths
    table[ROW["independent_variance"]] = queries * sums[4]
