"""The query-key pairs that an attention may use, and the structure by which exact statistics can exploit them.

Almost every mask is a band (full, causal, sliding window) minus the padded rows and columns. Two integers and two
validity vectors describe such a mask, and the moments of the scores then take linear time (`betahook.measure.scores`).
The tap describes the mask arguments of an attention call as a `GivenMask`, from which a `Mask` is made. Whether a mask
tensor has the expected structure is decided on its device: the answer is a tensor, never a branch.
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
"""Upper bounds of masks that consist of large negative numbers, such as -100, or -1e4 plus a bias. The first, -87.3,
makes the weight of a pair vanish in float32 when it is added to the logit."""

NO_BIAS = -1e8
"""No position bias is below this: ALiBi subtracts at most the number of tokens."""

KEPT = 16
"""Maximum number of cached facts about one mask, and of bands with cached facts: more than one model needs."""

T = TypeVar("T")
Kind = Literal["none", "padding", "documents", "pairs"]
"""Forms in which an attention call specifies its pairs, see `GivenMask`."""


@dataclass(frozen=True)
class Band:
    """The pairs with `low < key - query <= high`; `None` leaves a side open.

    `Band()` is full attention, `Band(None, 0)` is causal, and `Band(-4, 0)` is causal with a window of 4 keys.
    """

    low: int | None = None
    high: int | None = None

    def allowed(self, queries: Tensor, keys: Tensor) -> Tensor:
        """Boolean `[len(queries), len(keys)]` for the given positions."""
        # Compare keys with the edges of each query: a matrix of distances would take eight bytes for each pair.
        below = None if self.high is None else keys <= (queries + self.high)[:, None]
        if self.low is None:
            return torch.ones(len(queries), len(keys), dtype=torch.bool, device=keys.device) if below is None else below
        above = keys > (queries + self.low)[:, None]
        return above if below is None else above & below

    def visible(self, start: int, stop: int, keys: int) -> slice:
        """The range of the `keys` keys that any query from `start` to `stop` may use."""
        first = 0 if self.low is None else min(max(start + self.low + 1, 0), keys)
        return slice(first, keys if self.high is None else min(max(stop + self.high, 0), keys))

    def edges(self, keys: int) -> list[int]:
        """The edges of the two key prefixes whose difference a query sees; only the upper one if `low` is open."""
        upper = keys if self.high is None else self.high
        return [upper] if self.low is None else [upper, self.low]


@dataclass(frozen=True)
class Mask:
    """The pairs that one attention call may use.

    Attributes:
        band: the static part, known without looking at any tensor.
        queries: boolean `[batch or 1, queries]`, rows that take part in any head; None for all.
        keys: boolean `[batch or 1, keys]`, columns that take part in any head; None for all.
        pairs: boolean `[batch or 1, heads or 1, queries, keys]`, from the mask tensor of the call; None without one.
        bias: the same shape, added to the logits by the attention where `pairs` is True; None without one.
        documents: integer `[batch or 1, tokens]`, the document of each token in packed sequences, where no pair
            crosses from one document to another; None for a single document.
        structured: boolean scalar tensor on the device: True if the pairs are exactly those of band, queries and keys,
            so that the exact sums are used, False to use those of sampled rows; None if it is True by construction.
        of_graph: True in a run of a compiled graph, which reuses memory: nothing computed from the mask may outlive it.
        cache: results of `once_per_mask`, shared by all layers that receive the mask.
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
        """True if the pairs follow from the band alone, without any tensor."""
        return self.pairs is self.queries is self.keys is self.documents is None


@dataclass(frozen=True)
class GivenMask:
    """A mask as an attention call receives it: a tensor and its interpretation, not yet examined.

    Attributes:
        kind: "none" for the band alone; "padding" and "documents" for the tensors of `from_padding` and
            `from_documents`; "pairs" for that of `from_tensor`, which may have more keys than the call, and dimensions
            of size 1.
        tensor: tensor of that kind; None without one.
        band: the expected structure.
    """

    kind: Kind
    tensor: Tensor | None = None
    band: Band = field(default_factory=Band)  # torch 2.11 cannot trace a default that is an object

    def describe(self, queries: int, keys: int, *, of_graph: bool = False) -> Mask:
        """Make a `Mask` for a call with this many queries and keys.

        A tensor of pairs is examined once for all layers that receive it. Pass `of_graph` in a run of a compiled graph,
        which reuses memory, to examine it every time.
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
    """Return `make(mask, like, *sizes)`, computed once for all calls with the same mask, device, dtype and sizes.

    Args:
        make: a function that uses only the dtype and the device of its second argument.
        mask: the mask of the call. Calls with the same tensor of pairs share what is cached; with padding or documents,
            each call has its own.
        like: a tensor of the attention call.
        sizes: sizes of the attention call, as `make` needs them.
    """
    if type(like) is not Tensor:  # a fake tensor has no data
        return make(mask, like, *sizes)
    has_own = not mask.is_band or mask.of_graph or compat.is_captured(like.device)
    cache = mask.cache if has_own else _of_band(mask.band).cache
    name = make, like.device, like.dtype, sizes
    made: T | None = cache.get(name)  # looked up once, since another thread may clear the cache
    if made is None:
        if len(cache) >= KEPT:
            cache.clear()
        cache[name] = made = make(mask, like, *sizes)
    return made


@lru_cache(maxsize=KEPT)
def _of_band(band: Band) -> Mask:
    return Mask(band)


def forget_bands() -> None:
    """Clear the cache of `once_per_mask` for bands alone, which does not expire with any tensor."""
    _of_band.cache_clear()


def from_tensor(mask: Tensor, band: Band, *, cached: bool = True) -> Mask:
    """Describe the 4-D `mask` of an attention call, `[batch or 1, heads or 1, queries, keys]`.

    A boolean mask is True where a pair may be used. A floating-point mask is added to the logits, and may hold a bias:
    see `masked_by` for the pairs that it masks. `band` is the expected structure; `Mask.structured` says if the mask
    has it. Pass `cached=False` to examine the tensor again even if that was done for another layer.
    """
    mask = _unexpanded(mask)
    structure = _shared_structure(mask, band) if cached else _structure(mask, band)
    mask = mask.detach()
    return replace(structure, pairs=mask) if mask.dtype == torch.bool else replace(structure, bias=mask)


def _unexpanded(mask: Tensor) -> Tensor:
    """Remove the repetitions of a mask that was expanded over batch or heads."""
    for dim in (0, 1):
        mask = mask.narrow(dim, 0, 1) if mask.stride(dim) == 0 and len(mask) else mask
    return mask


def masked_by(addend: Tensor) -> Tensor:
    """The pairs that a floating-point addend of the logits masks, boolean of its shape.

    The addend may contain a bias, in which a low number does not mask: ALiBi reaches -1000 and less. Entries that are
    minus infinity, the lowest number of a dtype, or too low for a bias always mask. Other entries below one of `GAPS`
    mask if a gap separates them from all higher ones, e.g. -100 added to a learned bias; ALiBi has no gap. Without
    higher ones, i.e. if the addend lowers all logits or is constant along each row, they do not mask.
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
    """Find the rows and columns that take part in any head, and compare the mask with the band over them.

    The result holds `pairs` only if they are another tensor than the mask, which it must not keep alive.
    """
    is_boolean = mask.dtype == torch.bool
    pairs = mask if is_boolean else ~masked_by(mask)
    of_any_head = pairs[:, 0] if pairs.shape[1] == 1 else pairs.any(1)
    queries, keys = of_any_head.any(-1), of_any_head.any(-2)
    positions = [torch.arange(size, device=mask.device) for size in pairs.shape[-2:]]
    expected = band.allowed(*positions) & queries[:, :, None] & keys[:, None, :]
    structured = (pairs == expected[:, None]).all()
    return Mask(band, queries, keys, None if is_boolean else pairs, structured=structured)


_structures: Any = compat.WeakTensorKeyDictionary()
"""Version and structures of the views of each mask tensor that is alive."""


def _shared_structure(mask: Tensor, band: Band) -> Mask:
    """Return `_structure`, computed once for all layers that receive the same, unchanged tensor."""
    base, version = compat.base_of(mask), compat.inplace_version(mask)  # layers make new views each time
    if version is None or compat.is_captured(mask.device):  # changes go unnoticed, as in later runs of a graph
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

    Flash attention drops padded queries, except a single one behind cached keys, as in decoding.
    """
    keys = mask != 0
    drops = queries == keys.shape[-1] or 1 < queries < keys.shape[-1]
    return Mask(band, keys[:, -queries:] if drops else None, keys)


def from_documents(documents: Tensor, band: Band) -> Mask:
    """Describe sequences packed into one, `documents [1, tokens]`; structured only if there is a single document."""
    return Mask(band, documents=documents, structured=(documents == documents[:, :1]).all())
