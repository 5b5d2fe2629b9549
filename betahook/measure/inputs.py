"""Moments of what enters W_q and W_k, which wait for the scores of the same forward to be added with them.

An operation for each layer and side would cost a small model more than the moments themselves. The recorder of a layer
calls `entries_of` and `Waiting.note` where the inputs are, and `Waiting.take` where the scores are; a compiled graph
adds at once. Squares are taken about the mean, which would cancel the digits of the std, and become sums that add up
only in the dtype of the table. Nothing here may read a value back to the host.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from betahook.measure import devices, statistics
from betahook.measure.dtypes import product_dtype, sum_dtype
from betahook.measure.masks import Mask, derive
from betahook.measure.scores import summed

Entries = tuple[int, Tensor, Tensor]
"""Number, mean and variance of the entries that enter a projection."""

SLAB = 2**18
"""Entries on the CPU from which the mean is taken at once: a new tensor of that size stays in a cache."""

SIDES = "query", "key"


def entries_of(inputs: Tensor) -> Entries:
    """Describe what enters a projection, in float32 or better."""
    number, dtype, flat = inputs.numel(), product_dtype(inputs.dtype), inputs.flatten()
    if number and not devices.is_cpu(inputs.device):
        variance, mean = torch.var_mean(flat.to(dtype), correction=0)
        return number, mean, variance
    mean = flat.sum(dtype=dtype) / max(1, number)
    squares = [torch.dot(x, x) for x in (part.to(dtype) - mean for part in flat.split(SLAB))]
    return number, mean, summed(squares) / max(1, number)


def add(table: Tensor, side: str, entries: Entries) -> None:
    """Add the entries of a side to the `table [quantities, heads]`, in place."""
    number, mean, variance = entries
    sums = number * _sums_of_one(torch.stack([mean, variance]).to(table))
    statistics.add(table, f"{side}_inputs", sums[:, None])


def _sums_of_one(moments: Tensor) -> Tensor:
    """Mean and variance of numbers, to what each of them adds to their number, sum and sum of squares.

    From `[2, ...]` to `[3, ...]`; the moments are written over.
    """
    moments[1].addcmul_(moments[0], moments[0])
    return torch.cat([torch.ones_like(moments[:1]), moments])


def joined(layers: Sequence[Sequence[Entries]]) -> list[Entries]:
    """Put the entries of layers, of as many each, into one for each side: moments `[layers]`, in one tensor for all."""
    if len(layers) == 1 or not layers[0]:
        return list(layers[0])
    moments = torch.stack([x for entries in layers for _, *of_side in entries for x in of_side])
    columns = moments.view(len(layers), -1).unbind(1)
    return [(number, columns[2 * side], columns[2 * side + 1]) for side, (number, *_) in enumerate(layers[0])]


def input_rows(mask: Mask, query: Tensor, entries: Sequence[Entries]) -> Tensor:
    """Entries of both sides as rows of a table, `[6, heads]`, on the device of a query `[batch, heads, ...]`.

    Moments are scalars, or `[layers]` where the heads are those of as many layers.
    """
    means = [mean.to(query.device) for _, mean, _ in entries]
    variances = [variance.to(query.device) for _, _, variance in entries]
    moments = torch.stack([*means, *variances]).to(sum_dtype(query.device))
    sums = _sums_of_one(moments.view(2, len(entries), -1))
    sums = sums * derive(_numbers, mask, sums, *(number for number, *_ in entries))
    rows = sums.transpose(0, 1).flatten(0, 1)
    return rows.repeat_interleave(query.shape[1] // rows.shape[1], 1)


def _numbers(mask: Mask, like: Tensor, *values: int) -> Tensor:
    return torch.stack([torch.full((1,), value, dtype=like.dtype, device=like.device) for value in values])


class Waiting:
    """Entries that are not in the table yet, by heads and side."""

    def __init__(self) -> None:
        self._entries: dict[tuple[int, int, str], Entries] = {}

    def note(self, table: Tensor, heads: slice, sides: Sequence[str], entries: Entries) -> None:
        """Keep the entries of some sides of a layer; what is kept of them already goes to the table of all heads."""
        for side in sides:
            name = heads.start, heads.stop, side
            if name in self._entries:
                self._add(table, name)
            self._entries[name] = entries

    def take(self, heads: slice) -> list[Entries]:
        """Hand the entries of both sides to the caller, who adds them; none if one is missing."""
        names = [(heads.start, heads.stop, side) for side in SIDES]
        return [self._entries.pop(name) for name in names] if all(name in self._entries for name in names) else []

    def add_all(self, table: Tensor) -> None:
        """Add what no scores came for."""
        for name in list(self._entries):
            self._add(table, name)

    def _add(self, table: Tensor, name: tuple[int, int, str]) -> None:
        first, last, side = name
        add(table[:, first:last], side, self._entries.pop(name))
