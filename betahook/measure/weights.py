"""Sums over the entries of W_q and W_k, with one column per head, and the type of the std computed from them.

`AttentionLayer` writes the columns of its heads on demand; nothing here knows where a weight is stored.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from betahook.measure.dtypes import product_dtype

ROWS = ("query_count", "query_sum", "query_square", "key_count", "key_sum", "key_square")
"""Number, sum and sum of squares of the entries of W_q, then the same of W_k."""


@dataclass(frozen=True)
class WeightStd:
    """Population standard deviation of the entries of W_q and of W_k, `[groups]` each; NaN where they were not read."""

    query: Tensor
    key: Tensor


def entry_sums(weight: Tensor) -> Tensor:
    """Number, sum and sum of squares of the entries of each head: `[heads, d_k, d_x]` to `[3, heads]`."""
    # Without a copy, in float32 or better, along contiguous memory: copying a transposed weight takes longer than this.
    dtype = product_dtype(weight.dtype)
    along = 1 if weight.stride(1) == 1 else 2
    total = weight.sum(2, dtype=dtype).sum(1)
    square = torch.linalg.vector_norm(weight, dim=along, dtype=dtype).square().sum(1)
    return torch.stack([torch.full_like(total, weight[0].numel()), total, square])
