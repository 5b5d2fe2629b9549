"""Sums over the inputs of W_q and W_k, held back to be added with the scores of the same forward.

In a small model, a separate operation for each layer and side would cost more than the sums themselves. The recorder of
a layer calls `entries_of` and `note` at the projections, and `take` at the attention; compiled graphs do not wait.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from betahook.measure import devices, statistics
from betahook.measure.dtypes import product_dtype
from betahook.measure.masks import Mask, once_per_mask

Entries = tuple[int, Tensor, Tensor]
"""Number, sum and sum of squares of the entries that enter a projection."""

SIDES = "query", "key"

FEW = 2**16
"""Maximum number of entries whose squares the CPU sums precisely in one operation."""


def entries_of(inputs: Tensor) -> Entries:
    """Sum up the input of a projection, in float32 or better."""
    number, dtype = inputs.numel(), product_dtype(inputs.dtype)
    if number > FEW and devices.is_cpu(inputs.device):  # by row: over millions at once, it rounds most squares away
        square = torch.linalg.vector_norm(inputs, dim=-1, dtype=dtype).square().sum()
    elif inputs.dtype == dtype:
        flat = inputs.flatten()
        square = torch.dot(flat, flat)
    else:
        square = torch.linalg.vector_norm(inputs, dtype=dtype).square()
    return number, inputs.sum(dtype=dtype), square


def add(table: Tensor, side: str, entries: Entries) -> None:
    """Add the entries of a side to the `table [quantities, heads]`, in place."""
    number, total, square = entries
    values = F.pad(torch.stack([total, square]), (1, 0), value=number)
    statistics.add(table, f"{side}_inputs", values[:, None])


def joined(layers: Sequence[Sequence[Entries]]) -> list[Entries]:
    """Stack the entries of several layers: their numbers stay as they are, and each sum becomes `[layers]`.

    All layers must have the same sides, with the same numbers of entries.
    """
    if len(layers) == 1 or not layers[0]:
        return list(layers[0])
    sums = torch.stack([x for entries in layers for _, *of_side in entries for x in of_side])
    columns = sums.view(len(layers), -1).unbind(1)
    return [(number, columns[2 * side], columns[2 * side + 1]) for side, (number, *_) in enumerate(layers[0])]


def input_rows(mask: Mask, query: Tensor, entries: Sequence[Entries]) -> list[Tensor]:
    """Convert the entries of both sides to six rows `[heads]` of a table, on the device of `query [batch, heads, ...]`.

    Sums are scalars, or `[layers]` if the heads are those of several layers.
    """
    rows = [(once_per_mask(_scalar, mask, total, number), total, square) for number, total, square in entries]
    return [_by_head(x.to(query.device), query.shape[1]) for row in rows for x in row]


def _by_head(values: Tensor, heads: int) -> Tensor:
    """Expand a scalar or `[layers]` to `[heads]`."""
    return values.expand(heads) if values.dim() == 0 else values[:, None].expand(-1, heads // len(values)).flatten()


def _scalar(mask: Mask, like: Tensor, value: int) -> Tensor:
    return torch.full((), value, dtype=like.dtype, device=like.device)


class WaitingInputs:
    """Entries that are not in the table yet, by heads and side."""

    def __init__(self) -> None:
        self._entries: dict[tuple[int, int, str], Entries] = {}

    def note(self, table: Tensor, heads: slice, sides: Sequence[str], entries: Entries) -> None:
        """Keep the entries of some sides of a layer; earlier entries of the same go to the `table` of all heads."""
        for side in sides:
            name = heads.start, heads.stop, side
            self._add(table, name)
            self._entries[name] = entries

    def take(self, heads: slice) -> list[Entries]:
        """Return the entries of both sides to the caller, who adds them; an empty list if one is missing."""
        names = [(heads.start, heads.stop, side) for side in SIDES]
        # Threads of `nn.DataParallel` share the layer: another thread may take entries between a look and a pop.
        found = {name: each for name in names if (each := self._entries.pop(name, None)) is not None}
        if len(found) == len(names):
            return list(found.values())
        self._entries.update(found)
        return []

    def add_all(self, table: Tensor) -> None:
        """Add entries whose scores never came."""
        for name in list(self._entries):
            self._add(table, name)

    def _add(self, table: Tensor, name: tuple[int, int, str]) -> None:
        first, last, side = name
        if (entries := self._entries.pop(name, None)) is not None:  # none wait, or another thread has taken them
            add(table[:, first:last], side, entries)
