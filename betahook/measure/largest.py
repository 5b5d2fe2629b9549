"""The largest scores over all pairs, without an N x N matrix: exact, or bounded from above.

The sampled rows of `betahook.measure.rows` only show the largest score among themselves. `betahook.measure.calls` uses
one of the two forms here for every long sequence, so that a limit on the logits holds for all of them.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from betahook.measure import devices
from betahook.measure.dtypes import at_least_float32, product_dtype, sum_dtype
from betahook.measure.masks import Band, Mask
from betahook.measure.scores import extremes

HEIGHT = 128
"""Queries in a block: more would waste work at the edge of a causal mask, fewer would waste time on launches."""


def norm_bound(query: Tensor, key: Tensor, mask: Mask) -> Tensor:
    """Bound the absolute scores of each head from above, `[heads]`: `max |q_i| * max |k_j|` in each sequence.

    This is the Cauchy-Schwarz inequality. A token counts in all heads if any of them uses it.
    """
    longest: list[Tensor] = []
    for tokens, valid in ((query, mask.queries), (key, mask.keys)):
        norms = torch.linalg.vector_norm(tokens, dim=-1, dtype=product_dtype(tokens.dtype))
        if valid is not None:
            norms = torch.where(valid[:, None], norms, 0)
        longest.append(norms.amax(-1))
    of_query, of_key = longest
    grouped: Tensor = of_query.unflatten(1, (key.shape[1], -1))
    products = grouped * of_key[..., None]
    return (products[0] if len(products) == 1 else products.amax(0)).flatten()


def extreme_scores(query: Tensor, key: Tensor, mask: Mask) -> Tensor:
    """The `scores.extremes` of each head over all pairs of a mask, `[2, heads]`, float64; 0 where none is positive.

    Blocks outside the band are not computed. Products are computed in float32 or better, since in float16 one could
    overflow where the model's own does not.

    Args:
        query: `[batch, heads, queries, d_k]`, any floating dtype.
        key: `[batch, key_heads, keys, d_k]`; `heads` is a multiple of `key_heads`.
        mask: the pairs in use; `mask.pairs` where given, else band, padding and documents.
    """
    batch, heads, queries, width = query.shape
    key_heads, keys = key.shape[1:3]
    band = mask.band if mask.pairs is None else Band()
    query, key = at_least_float32(query), at_least_float32(key)
    if mask.pairs is None:  # zeros in q or k give masked pairs the score 0, which is never an extreme
        query, key = _without(query, mask.queries), _without(key, mask.keys)
    key = key.flatten(0, 1)
    grouped = query.unflatten(1, (key_heads, heads // key_heads))
    found = [query.new_zeros(2, heads)]
    for rows, columns in _blocks(band, queries, keys, _area(query.device, batch * heads)):
        block_of_query = grouped[:, :, :, rows].reshape(batch * key_heads, -1, width)
        scores = torch.bmm(block_of_query, key[:, columns].mT).view(batch, heads, -1, columns.stop - columns.start)
        masked = _masked(mask, band, rows, columns, query.device)
        if masked is not None:
            scores.masked_fill_(masked, 0)
        found.append(torch.stack(extremes(scores)))
    return torch.stack(found).amax(0).to(sum_dtype(query.device))


def _without(tokens: Tensor, valid: Tensor | None) -> Tensor:
    """Set tokens `[batch, heads, tokens, d_k]` that take no part to zero."""
    return tokens if valid is None else tokens.masked_fill(~valid[:, None, :, None], 0)


def _area(device: torch.device, matrices: int) -> int:
    """Number of scores of one head to process at once: few enough for a CPU's cache, enough for a GPU launch to pay."""
    return (2**18 if devices.is_cpu(device) else 2**24) // matrices


def _blocks(band: Band, queries: int, keys: int, area: int) -> Iterator[tuple[slice, slice]]:
    """Yield rows and columns of blocks that cover a band over `queries x keys`, with about `area` pairs each."""
    width = max(area // HEIGHT, HEIGHT)
    for start in range(0, queries, HEIGHT):
        stop = min(start + HEIGHT, queries)
        seen = band.visible(start, stop, keys)
        for column in range(seen.start, seen.stop, width):
            yield slice(start, stop), slice(column, min(column + width, seen.stop))


def _masked(mask: Mask, band: Band, rows: slice, columns: slice, device: torch.device) -> Tensor | None:
    """Boolean `[batch or 1, heads or 1, rows, columns]`, True at pairs not in use; None if all are in use."""
    if mask.pairs is not None:
        return ~mask.pairs[..., rows, columns]
    masked = None
    lowest, highest = columns.start - (rows.stop - 1), columns.stop - 1 - rows.start
    if (band.low is not None and lowest <= band.low) or (band.high is not None and highest > band.high):
        positions = (torch.arange(part.start, part.stop, device=device) for part in (rows, columns))
        masked = ~band.allowed(*positions)[None, None]
    if mask.documents is not None:
        other = (mask.documents[:, rows, None] != mask.documents[:, None, columns])[:, None]
        masked = other if masked is None else masked | other
    return masked
