"""W_q and W_k of an attention module: where it stores them, and how to read them.

`locate` tries one strategy after another: transformers has no convention, but few variations. `families` holds the
names and the layouts of known classes, `materialise` reads a weight however it is stored. Layers and `fold` work with
the `Projection`s that are found; nothing here writes to a weight.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.nn.parameter import UninitializedParameter

from betahook import compat
from betahook.models import families, layouts, materialise
from betahook.models.code import is_user_module
from betahook.models.layouts import Select
from betahook.models.places import Place


@dataclass(frozen=True)
class Projection:
    """The part of a linear map that produces q, or k.

    Attributes:
        module: the module that owns the weight.
        select: selects the rows of q or k from the weight `[out, d_x]`, as `[heads, d_k, d_x]`.
        adapter: the layer around `module` that adds to its output, such as LoRA's; None if there is none.
        weight: name of the weight in the module.
        bias: name of the bias in the module; None if none is known.
        bias_offset: index of a row's bias entry, minus the number of the row in the weight.
        axes: axes of the stored weight along which its features lie, numbered in this order: 0 in `[out, d_x]`, 1 in
            `[d_x, out]`, 0 and 2 in `[heads, d_x, d_k]`.
        argument: index of the module's positional argument that is the input; None if none is.
    """

    module: nn.Module
    select: Select
    adapter: nn.Module | None = None
    weight: str = "weight"
    bias: str | None = "bias"
    bias_offset: int = 0
    axes: tuple[int, ...] = (0,)
    argument: int | None = 0

    @property
    def stored(self) -> Tensor:
        """The weight that holds W_q or W_k, as the module stores it."""
        stored = materialise.stored(self.module, self.weight)
        assert isinstance(stored, Tensor)
        return stored

    @property
    def owners(self) -> list[nn.Module]:
        """The modules whose weights produce q or k now; they change as adapters come and go."""
        return [self.module, *compat.adapter_outputs(self.adapter), *compat.magnitudes(self.adapter)]

    @property
    def width(self) -> int:
        """d_x."""
        width = getattr(self.module, "in_features", None)  # a quantised weight may be stored in another shape
        if isinstance(width, int) and self.weight == "weight":
            return width
        return math.prod(size for axis, size in enumerate(self.stored.shape) if axis not in self.axes)

    @property
    def features(self) -> int:
        """Number of features that the whole weight produces; valid for a weight stored in its own shape."""
        return math.prod(self.stored.shape[axis] for axis in self.axes)

    @property
    def rows(self) -> Tensor:
        """Numbers of the features of q, or of k, `[heads, d_k]`; valid for a weight stored in its own shape."""
        return self.select(torch.arange(self.features, device="cpu")[:, None]).squeeze(-1)

    @property
    def obstacle(self) -> str | None:
        """Reason why `entries` cannot be read; None if it can."""
        return materialise.obstacle(self.stored, self.module, self.adapter)

    @property
    def is_sharded(self) -> bool:
        """True if every rank must take part in reading `entries`; the adapter alone may be sharded."""
        adapter = () if self.adapter is None else self.adapter.parameters()
        return any(map(materialise.is_sharded, (self.stored, *adapter)))

    @property
    def entries(self) -> Tensor:
        """W_q or W_k as it acts, `[heads, d_k, d_x]` in floating point: gathered, dequantised, with its adapter.

        For a convolution, d_x counts all entries of a patch.
        """
        weight = materialise.read(self.stored, self.module, self.adapter)
        features_first = weight.movedim(self.axes, tuple(range(len(self.axes))))
        return self.select(features_first.flatten(0, len(self.axes) - 1).flatten(1))


KNOWN_FORMS = "Known are linear modules called q_proj and k_proj, or qkv; betahook/models/families.py has more names"
"""Advice appended when `locate` finds no projections."""
Pair = tuple[Projection, Projection]
"""The query projection and the key projection."""


def at_places(module: nn.Module, places: tuple[Place, Place]) -> Pair | None:
    """The query and key projections at known places; None if something else is there now."""
    query, key = (at_place(module, place) for place in places)
    return None if query is None or key is None else (query, key)


def at_place(module: nn.Module, place: Place) -> Projection | None:
    """The projection at a known place; None if something else is there now."""
    try:
        owner = operator.attrgetter(place.owner)(module) if place.owner else module
    except AttributeError:  # the owner was removed, for instance when projections were fused
        return None
    adapter = owner if compat.is_adapter(owner) else None
    if place.owner and place.weight == "weight" and not isinstance(owner, nn.Conv1d | nn.Conv2d | nn.Conv3d):
        owner = _linear(owner)  # the owner may be wrapped by now
    if owner is None or not isinstance(materialise.stored(owner, place.weight), Tensor):
        return None
    found = Projection(
        owner, place.select, adapter, place.weight, place.bias, place.bias_offset, place.axes, place.argument
    )
    stored = found.stored
    is_whole = stored.is_floating_point() and found.obstacle is None
    return None if is_whole and int(place.rows.max()) >= found.features else found  # heads were pruned


def not_located(module: nn.Module) -> str:
    """Remark on an attention module whose projections `locate` does not find."""
    if any(map(materialise.is_in_parts, module.parameters())):
        return "W_q and W_k are sharded outside the forward, their std is not measured"
    return f"W_q and W_k have no known form, their std is not measured. {KNOWN_FORMS}"


def locate(module: nn.Module, heads: int, head_dim: int) -> Pair | None:
    """The query and key projections of an attention module, or None if they have no known form."""
    pairs = (strategy(module, heads, head_dim) for strategy in STRATEGIES)
    return next((pair for pair in pairs if pair is not None), None)


def added_queries(module: nn.Module, query: Projection) -> list[Projection]:
    """The query projections of further sequences in joint attention, laid out like that of the first."""
    added = (_projection(module, [name], query.select) for name in families.ADDED_QUERIES)
    return [projection for projection in added if projection is not None]


def torch_attention(module: nn.Module, heads: int, head_dim: int) -> Pair | None:
    """`nn.MultiheadAttention`, which owns its weights: one for q, k and v, or one for each if their widths differ."""
    if not isinstance(module, nn.MultiheadAttention):
        return None
    width, first = heads * head_dim, layouts.run(0, heads, head_dim)
    if materialise.stored(module, "in_proj_weight") is None:
        query = Projection(module, first, weight="q_proj_weight", bias="in_proj_bias")
        return query, replace(query, weight="k_proj_weight", bias_offset=width, argument=1)
    whole = Projection(module, first, weight="in_proj_weight", bias="in_proj_bias")
    return whole, replace(whole, select=layouts.run(width, heads, head_dim), argument=1)


def separate(module: nn.Module, heads: int, head_dim: int) -> Pair | None:
    """Separate projections for q and k; a gated query projection has further rows after those of each head."""
    for names in families.SEPARATE:
        query = _projection(module, names[:1], lambda weight: weight.unflatten(0, (heads, -1))[:, :head_dim])
        key = _projection(module, names[1:], lambda weight: weight.unflatten(0, (-1, head_dim)))
        if query is not None and key is not None and _fit(module, query, key, heads, head_dim):
            return query, key
    return None


def _fit(module: nn.Module, query: Projection, key: Projection, heads: int, head_dim: int) -> bool:
    """True if two projections produce the features that the heads need; only known classes gate q with further ones."""
    of_query, of_key = (features_of(projection.module) for projection in (query, key))
    key_heads, left = divmod(of_key, head_dim)
    if left or not key_heads or heads % key_heads:
        return False
    return of_query == heads * head_dim or not is_user_module(module)


def latent(module: nn.Module, heads: int, head_dim: int) -> Pair | None:
    """The up-projections of latent attention (MLA), W_k without the rotary components.

    All heads share these components, and no up-projection produces them.
    """
    unturned = getattr(module, "qk_nope_head_dim", None)
    if unturned is None:
        return None
    key = _projection(module, ("kv_b_proj",), lambda weight: weight.unflatten(0, (heads, -1))[:, :unturned])
    query = _projection(module, ("q_b_proj", "q_proj"), layouts.run(0, heads, head_dim))
    return None if query is None or key is None else (query, key)


def cross_attention(module: nn.Module, heads: int, head_dim: int) -> Pair | None:
    """Cross-attention of GPT-2: a separate projection for q, a fused one for k and v."""
    select = layouts.run(0, heads, head_dim)
    query, key = _projection(module, ("q_attn",), select), _projection(module, families.FUSED, select)
    return None if query is None or key is None else (query, key)


def fused(module: nn.Module, heads: int, head_dim: int) -> Pair | None:
    """One projection for q, k and v, in the layout given by the facts about the class."""
    whole = _projection(module, families.FUSED, layouts.run(0, heads, head_dim))
    if whole is None:
        return None
    selections = families.facts(module).fused(module, heads, head_dim, features_of(whole.module))
    return None if selections is None else (replace(whole, select=selections[0]), replace(whole, select=selections[1]))


STRATEGIES = (torch_attention, separate, latent, cross_attention, fused)
"""Strategies of `locate`, in the order in which it tries them."""


def features_of(linear: nn.Module) -> int:
    """Number of features that a linear module produces; a quantised weight may be stored in another shape."""
    return getattr(linear, "out_features", None) or int(materialise.stored(linear).shape[_axis(linear)])


def _axis(linear: nn.Module) -> int:
    """The axis of the weight of a linear module along which its features lie."""
    return int(any(kind.__name__ in families.TRANSPOSED for kind in type(linear).__mro__))


def _projection(module: nn.Module, names: Iterable[str], select: Select) -> Projection | None:
    """A part of the first linear map that a module holds under one of `names`; None if it holds none."""
    for child in (getattr(module, name, None) for name in names):
        if (linear := _linear(child)) is not None:
            return Projection(linear, select, child if compat.is_adapter(child) else None, axes=(_axis(linear),))
    return None


def _linear(module: object) -> nn.Module | None:
    """The module that owns the matrix of a projection: the module itself or one that it wraps; None if neither does."""
    if not isinstance(module, nn.Module):
        return None
    # Inside first: an adapter exposes the weight of its base layer as its own, but not how that is stored.
    children = (getattr(module, name, None) for name in families.WRAPPED)
    wrapped = (_linear(child) for child in children if isinstance(child, nn.Module) and _only_wraps(module, child))
    inner = next((inner for inner in wrapped if inner is not None), None)
    weight = materialise.stored(module)
    is_matrix = isinstance(weight, Tensor) and not isinstance(weight, UninitializedParameter) and weight.dim() == 2
    return module if inner is None and is_matrix else inner


def _only_wraps(wrapper: nn.Module, inside: nn.Module) -> bool:
    """False if a wrapper changes the effect of the weight inside, by a norm (LeViT) or a LoRA written by hand."""
    normed = any("norm" in type(child).__name__.lower() for child in wrapper.children())
    added = len(list(wrapper.parameters())) > len(list(inside.parameters())) and not compat.is_adapter(wrapper)
    return not (normed or added)
