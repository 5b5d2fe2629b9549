"""Which query-key pairs an attention may use, and whether that set has a structure that exact statistics can exploit.

Almost every mask is a band (full, causal, sliding window) whose padded rows and columns are struck out. Such a mask is
described by two integers and two validity vectors, and the score moments follow in linear time (`scores`).
Whether a given mask tensor really is of that form is decided on its device: the answer is a tensor, never a branch.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

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
        documents: integer `[batch or 1, tokens]`, in packed sequences the document of each token, which pairs do not
            leave; None where there is but one.
        structured: boolean scalar tensor, whether the pairs are those of band, queries and keys taken together; None
            stands for a structure that holds by construction.
    """

    band: Band
    queries: Tensor | None = None
    keys: Tensor | None = None
    pairs: Tensor | None = None
    bias: Tensor | None = None
    documents: Tensor | None = None
    structured: Tensor | None = None


def from_tensor(mask: Tensor, band: Band) -> Mask:
    """Describe the 4-D `mask` of an attention call, `[batch or 1, heads or 1, queries, keys]`.

    A boolean mask is True where a pair may be used. A floating one is added to the logits; a pair counts as masked
    where that takes off `MASKED` or more. `band` is the structure to be expected; `Mask.structured` says whether the
    mask has it.
    """
    structure = _shared_structure(mask, band)
    mask = mask.detach()
    return replace(structure, pairs=_pairs(mask), bias=None if mask.dtype == torch.bool else mask)


def _pairs(mask: Tensor) -> Tensor:
    return mask if mask.dtype == torch.bool else mask > MASKED


def _structure(mask: Tensor, band: Band) -> Mask:
    """The rows and columns that take part, and whether the mask is the band without the others."""
    pairs = _pairs(mask)
    first = pairs[:, 0]
    queries, keys = first.any(-1), first.any(-2)
    positions = [torch.arange(size, device=mask.device) for size in pairs.shape[-2:]]
    expected = band.allowed(*positions) & queries[:, :, None] & keys[:, None, :]
    return Mask(band, queries, keys, structured=(pairs == expected[:, None]).all())


_structures: Any = WeakTensorKeyDictionary()
"""Tensors that are alive, to their version and the structures of their views."""


def _shared_structure(mask: Tensor, band: Band) -> Mask:
    """`_structure`, found out once for all layers that are given the same tensor and as long as that is unchanged."""
    if torch.compiler.is_compiling() or mask.is_inference():  # neither counts its changes
        return _structure(mask, band)
    owner = mask if mask._base is None else mask._base  # the views that layers make are new each time
    version, known = _structures.get(owner, (None, {}))
    if version != owner._version:
        known = {}
        _structures[owner] = owner._version, known
    view = mask.storage_offset(), mask.shape, mask.stride(), band
    structure: Mask = known[view] if view in known else known.setdefault(view, _structure(mask, band))
    return structure


def from_padding(mask: Tensor, band: Band, queries: int) -> Mask:
    """Describe a 2-D padding mask `[batch, keys]`, nonzero at real tokens, as flash attention takes it."""
    keys = mask != 0
    return Mask(band, keys if keys.shape[-1] == queries else None, keys)


def from_documents(documents: Tensor, band: Band) -> Mask:
    """Describe sequences that are packed into one, `documents [1, tokens]`: exact where there is but one."""
    return Mask(band, documents=documents, structured=(documents == documents[:, :1]).all())
