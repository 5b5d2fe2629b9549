"""Which query-key pairs an attention may use, and whether that set has a structure that exact statistics can exploit.

Almost every mask is a band (full, causal, sliding window) whose padded rows and columns are struck out. Such a mask is
described by two integers and two validity vectors, and the score moments follow in linear time (`betahook.scores`).
Whether a given mask tensor really is of that form is decided on its device: the answer is a tensor, never a branch.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

MASKED = math.log(torch.finfo(torch.float32).tiny)
"""What takes a pair's share of its row down to nothing in float32, -87.3. Models write "masked" as infinity, as the
least number of a dtype, as -1e9, -1e4 or -100."""


@dataclass(frozen=True)
class Band:
    """The pairs with `low < key - query <= high`; `None` leaves a side open."""

    low: int | None = None
    high: int | None = None

    def allowed(self, queries: Tensor, keys: Tensor) -> Tensor:
        """Boolean `[len(queries), len(keys)]` for the given positions."""
        distance = keys[None, :] - queries[:, None]
        pairs = torch.ones_like(distance, dtype=torch.bool)
        if self.low is not None:
            pairs = pairs & (distance > self.low)
        if self.high is not None:
            pairs = pairs & (distance <= self.high)
        return pairs


@dataclass(frozen=True)
class Mask:
    """The pairs that one attention call may use.

    Attributes:
        band: the static part, known without looking at any tensor.
        queries: boolean `[batch or 1, queries]`, rows that take part; None for all.
        keys: boolean `[batch or 1, keys]`, columns that take part; None for all.
        pairs: boolean `[batch or 1, heads or 1, queries, keys]`, the mask that the attention was given; None if it
            was given none.
        bias: the same shape, what the attention adds to its logits where `pairs` holds; None for nothing.
        structured: boolean scalar tensor, whether `pairs` equals band, queries and keys taken together; None stands
            for a structure that holds by construction.
    """

    band: Band
    queries: Tensor | None = None
    keys: Tensor | None = None
    pairs: Tensor | None = None
    bias: Tensor | None = None
    structured: Tensor | None = None


def from_tensor(mask: Tensor, band: Band) -> Mask:
    """Describe the 4-D `mask` of an attention call, `[batch or 1, heads or 1, queries, keys]`.

    A boolean mask is True where a pair may be used. A floating one is added to the logits; a pair counts as masked
    where that takes off `MASKED` or more. `band` is the structure to be expected; `Mask.structured` says whether the
    mask has it.
    """
    bias = None
    if mask.dtype == torch.bool:
        pairs = mask
    else:
        pairs = mask > MASKED
        bias = mask
    first = pairs[:, 0]
    queries, keys = first.any(-1), first.any(-2)
    positions = [torch.arange(size, device=mask.device) for size in pairs.shape[-2:]]
    expected = band.allowed(*positions) & queries[:, :, None] & keys[:, None, :]
    structured = (pairs == expected[:, None]).all()
    return Mask(band, queries, keys, pairs, bias, structured)


def from_padding(mask: Tensor, band: Band, queries: int) -> Mask:
    """Describe a 2-D padding mask `[batch, keys]`, nonzero at real tokens, as flash attention takes it."""
    keys = mask != 0
    return Mask(band, keys if keys.shape[-1] == queries else None, keys)
