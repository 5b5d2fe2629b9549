"""The query-key pairs that an attention may use, and the structure by which exact statistics can exploit them.

Almost every mask is a band (full, causal, sliding window) without its padded rows and columns. Two integers and two
validity vectors describe such a mask, and the moments of the scores follow in linear time (`betahook.measure.scores`).
The tap makes a `Mask` of whatever an attention call was given. Whether a mask tensor has the expected structure is
decided on its device: the answer is a tensor, never a branch.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor

from betahook import compat

GAPS = (math.log(torch.finfo(torch.float32).tiny), -9000.0)
"""Upper bounds of masks by large negative numbers, such as -100 or -1e4 plus a bias. Added to a logit, the first,
-87.3, makes the weight of a pair vanish in float32."""

NO_BIAS = -1e8
"""No position bias is below this: ALiBi takes off at most as much as there are tokens."""

KEPT = 16
"""Facts that are kept about one mask, and bands whose facts are kept: more than one model needs."""

T = TypeVar("T")
Kind = Literal["none", "padding", "documents", "pairs"]
"""Forms in which an attention call is told its pairs, see `GivenMask`."""


@dataclass(frozen=True)
class Band:
    """The pairs with `low < key - query <= high`; `None` leaves a side open."""

    low: int | None = None
    high: int | None = None

    def allowed(self, queries: Tensor, keys: Tensor) -> Tensor:
        """Boolean `[len(queries), len(keys)]` for the given positions."""
        # Keys are compared with the edges of each query: distances of pairs would take eight bytes each.
        below = None if self.high is None else keys <= (queries + self.high)[:, None]
        if self.low is None:
            return torch.ones(len(queries), len(keys), dtype=torch.bool, device=keys.device) if below is None else below
        above = keys > (queries + self.low)[:, None]
        return above if below is None else above & below

    def visible(self, start: int, stop: int, keys: int) -> slice:
        """The keys, of so many, that some query from `start` to `stop` may use."""
        first = 0 if self.low is None else min(max(start + self.low + 1, 0), keys)
        return slice(first, keys if self.high is None else min(max(stop + self.high, 0), keys))

    def edges(self, keys: int) -> list[int]:
        """The edges of the two prefixes of the keys whose difference a query sees; a single one where `low` is open."""
        upper = keys if self.high is None else self.high
        return [upper] if self.low is None else [upper, self.low]


@dataclass(frozen=True)
class Mask:
    """The pairs that one attention call may use.

    Attributes:
        band: the static part, known without looking at any tensor.
        queries: boolean `[batch or 1, queries]`, rows that take part; None for all.
        keys: boolean `[batch or 1, keys]`, columns that take part; None for all.
        pairs: boolean `[batch or 1, heads or 1, queries, keys]`, the mask that the attention was given; None if it
            was given none.
        bias: the same shape, added to the logits by the attention where `pairs` holds; None for nothing.
        documents: integer `[batch or 1, tokens]`, the document of each token in packed sequences, where no pair
            crosses from one document to another; None for a single document.
        structured: boolean scalar tensor on the device: True if the pairs are exactly those of band, queries and keys,
            so that exact sums count, False if those of sampled rows do; None where it is True by construction.
        of_graph: True in a run of a compiled graph, whose memory nothing that is made of the mask may outlive.
        cache: what `once_per_mask` made of the mask, shared by all layers that are given it.
    """

    band: Band
    queries: Tensor | None = None
    keys: Tensor | None = None
    pairs: Tensor | None = None
    bias: Tensor | None = None
    documents: Tensor | None = None
    structured: Tensor | None = None
    of_graph: bool = False
    cache: dict[Any, Any] = field(default_factory=dict, compare=False, repr=False)

    @property
    def is_band(self) -> bool:
        """True if the pairs are known without any tensor."""
        return self.pairs is self.queries is self.keys is self.documents is None


@dataclass(frozen=True)
class GivenMask:
    """A mask as an attention call is given it: the tensor and numbers that tell its pairs, not yet looked at.

    Attributes:
        kind: "none" for nothing but the band; "padding" and "documents" for the tensors of `from_padding` and
            `from_documents`; "pairs" for that of `from_tensor`, which may have more keys than the call, and may leave a
            dimension at 1.
        tensor: of that kind, None for nothing.
        band: the expected structure.
    """

    kind: Kind
    tensor: Tensor | None = None
    band: Band = field(default_factory=Band)  # as torch 2.11 has no way to trace a default that is an object

    def describe(self, queries: int, keys: int, *, of_graph: bool = False) -> Mask:
        """Make a `Mask` of it, for a call of so many queries and keys.

        A tensor of pairs is looked at once for all layers that are given it, except `of_graph`, in a run of a compiled
        graph, whose memory is used again.
        """
        tensor = self.tensor
        if tensor is None:
            mask = Mask(self.band)
        elif self.kind == "documents":
            mask = from_documents(tensor, self.band)
        elif self.kind == "padding":
            mask = from_padding(tensor, self.band, queries)
        else:
            pairs = tensor[..., :keys].expand(*tensor.shape[:2], queries, keys)
            mask = from_tensor(pairs, self.band, cached=not of_graph)
        return replace(mask, of_graph=True) if of_graph else mask


def once_per_mask(make: Callable[..., T], mask: Mask, like: Tensor, *sizes: int) -> T:
    """Return `make(mask, like, *sizes)`, made once for all calls with the same mask, device, dtype and sizes.

    Args:
        make: a function that reads the dtype and the device of its second argument, and nothing else of it.
        mask: of the call. Calls with the same tensor of pairs have one description; of padding and documents, each has
            its own.
        like: a tensor of the attention call.
        sizes: of the attention call, as `make` needs them.
    """
    if type(like) is not Tensor:  # a fake tensor stands for no data
        return make(mask, like, *sizes)
    has_own = not mask.is_band or mask.of_graph or compat.is_captured(like.device)
    cache = mask.cache if has_own else _of_band(mask.band).cache
    name = make, like.device, like.dtype, sizes
    made: T | None = cache.get(name)  # once: another thread may clear the cache
    if made is None:
        if len(cache) >= KEPT:
            cache.clear()
        cache[name] = made = make(mask, like, *sizes)
    return made


@lru_cache(maxsize=KEPT)
def _of_band(band: Band) -> Mask:
    return Mask(band)


def forget_bands() -> None:
    """Forget what `once_per_mask` made of bands alone, which no tensor ends with its own life."""
    _of_band.cache_clear()


def from_tensor(mask: Tensor, band: Band, *, cached: bool = True) -> Mask:
    """Describe the 4-D `mask` of an attention call, `[batch or 1, heads or 1, queries, keys]`.

    A boolean mask is True where a pair may be used. A floating-point mask is added to the logits, and may hold a bias:
    see `masked_by` for the pairs that it masks. `band` is the expected structure; `Mask.structured` says if it is that
    of the mask. `cached` is False to look at the tensor anew, though it was looked at for another layer.
    """
    mask = _once(mask)
    structure = _shared_structure(mask, band) if cached else _structure(mask, band)
    mask = mask.detach()
    return replace(structure, pairs=mask) if mask.dtype == torch.bool else replace(structure, bias=mask)


def _once(mask: Tensor) -> Tensor:
    """A mask that was expanded over batch or heads, without the repetitions."""
    for dim in (0, 1):
        mask = mask.narrow(dim, 0, 1) if mask.stride(dim) == 0 and len(mask) else mask
    return mask


def masked_by(addend: Tensor) -> Tensor:
    """The pairs that a floating-point addend of the logits masks, boolean of its shape.

    It may hold a bias, in which a small number is not a mask: ALiBi reaches -1000 and less. What is minus infinity, the
    least number of a dtype, or too low for a bias is masked in any case. Other numbers below one of `GAPS` are masked
    where a gap parts them from higher ones, as -100 added to a learned bias is; ALiBi has no gap. An addend that lowers
    all logits, or that is constant along each row, does not mask.
    """
    least_half = torch.finfo(torch.float16).min
    too_low = least_half / 2 if addend.dtype == torch.float16 else NO_BIAS
    masked = (addend <= too_low) | (addend == least_half)
    for bound in GAPS if addend.shape[-1:] != (1,) else ():
        low = addend <= bound
        has_gap = (low | (addend > bound / 2)).all() & ~low.all()
        masked |= has_gap & low
    return masked


def _structure(mask: Tensor, band: Band) -> Mask:
    """Find the rows and columns that take part, and compare the mask with the band over them.

    The pairs are in it where they are another tensor than the mask, which it would keep alive.
    """
    is_boolean = mask.dtype == torch.bool
    pairs = mask if is_boolean else ~masked_by(mask)
    first = pairs[:, 0]
    queries, keys = first.any(-1), first.any(-2)
    positions = [torch.arange(size, device=mask.device) for size in pairs.shape[-2:]]
    expected = band.allowed(*positions) & queries[:, :, None] & keys[:, None, :]
    structured = (pairs == expected[:, None]).all()
    return Mask(band, queries, keys, None if is_boolean else pairs, structured=structured)


_structures: Any = compat.WeakTensorKeyDictionary()
"""Tensors that are alive, to their version and the structures of their views."""


def _shared_structure(mask: Tensor, band: Band) -> Mask:
    """`_structure`, computed once for all layers that are given the same, unchanged tensor."""
    base, version = compat.base_of(mask), compat.version(mask)  # the views that layers make are new each time
    if version is None or compat.is_captured(mask.device):  # nothing tells of changes, as in later runs of a graph
        return _structure(mask, band)
    known_version, known = _structures.get(base, (None, {}))
    view = mask.storage_offset(), mask.shape, mask.stride(), band
    if known_version != version or (len(known) >= KEPT and view not in known):
        known = {}
        _structures[base] = version, known
    structure: Mask = known[view] if view in known else known.setdefault(view, _structure(mask, band))
    return structure


def from_padding(mask: Tensor, band: Band, queries: int) -> Mask:
    """Describe a 2-D padding mask `[batch, keys]`, nonzero at real tokens, as used with flash attention.

    Of several queries behind cached keys, flash attention drops the padded ones; it keeps a single one, as in decoding.
    """
    keys = mask != 0
    drops = queries == keys.shape[-1] or 1 < queries < keys.shape[-1]
    return Mask(band, keys[:, -queries:] if drops else None, keys)


def from_documents(documents: Tensor, band: Band) -> Mask:
    """Describe sequences packed into one, `documents [1, tokens]`; structured only with a single document."""
    return Mask(band, documents=documents, structured=(documents == documents[:, :1]).all())
