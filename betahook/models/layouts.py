"""Layouts of fused projections: which rows of one weight produce q, and which produce k.

`families.Facts.fused` names the layout of a class, `projections.fused` calls it for the rows. A layout reads no tensor.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

Select = Callable[[Tensor], Tensor]
"""Selects the rows of q, or of k, from a weight `[out, d_x]`, as `[heads, d_k, d_x]`."""
Selections = tuple[Select, Select]
"""The selection of the rows of q, and of those of k."""
Layout = Callable[[Any, int, int, int], Selections | None]
"""Function of an attention module, its query heads, d_k and the number of rows of its fused weight; returns the
selections of q and k, or None if the sizes do not fit."""


def run(start: int, heads: int, head_dim: int) -> Select:
    """Select one head after another, starting at row `start`."""
    return lambda weight: weight[start : start + heads * head_dim].unflatten(0, (heads, head_dim))


def stacked(module: Any, heads: int, head_dim: int, rows: int) -> Selections | None:
    """All of q, then all of k, then all of v; k and v may have fewer heads."""
    key_heads = (rows // head_dim - heads) // 2
    if key_heads <= 0 or (heads + 2 * key_heads) * head_dim != rows:
        return None
    return run(0, heads, head_dim), run(heads * head_dim, key_heads, head_dim)


def usual(module: Any, heads: int, head_dim: int, rows: int) -> Selections | None:
    """All of q first, unless `head_first`, or a separate width of v, says that the rows go head by head."""
    by_head = getattr(module, "head_first", False) is True or hasattr(module, "val_dim")
    return (head_by_head if by_head else stacked)(module, heads, head_dim, rows)


def head_by_head(module: Any, heads: int, head_dim: int, rows: int) -> Selections | None:
    """The query, key and value of one head after another; v may have another width (timm: MaxViT, TinyViT)."""
    if rows % heads or rows <= 2 * head_dim * heads:
        return None

    def select(part: slice) -> Select:
        return lambda weight: weight.unflatten(0, (heads, -1))[:, part]

    return select(slice(head_dim)), select(slice(head_dim, 2 * head_dim))


def grouped(groups: int, heads: int, head_dim: int, rows: int) -> Selections | None:
    """The queries of one group of heads, the key and the value that they share, then those of the next group."""
    if (heads + 2 * groups) * head_dim != rows:
        return None

    def select(part: slice) -> Select:
        return lambda weight: weight.unflatten(0, (groups, -1, head_dim))[:, part].flatten(0, 1)

    return select(slice(-2)), select(slice(-2, -1))
