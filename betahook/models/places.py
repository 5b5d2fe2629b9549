"""Places of W_q and W_k in an attention module: the parameter, and the rows of it, that produced q, or k, in a forward.

`trial` and the first forward of a layer compute them from `labels`; `projections.at_place` later finds the weight at a
place. Nothing here reads an entry of a weight.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from betahook import compat
from betahook.models import materialise
from betahook.models.code import argument_names
from betahook.models.labels import FeaturePair, Features, Linear

ModuleCall = tuple[Sequence[Any], Any]
"""The positional arguments that a module was called with, and what it returned."""
Calls = Mapping[nn.Module, Sequence[ModuleCall]]
"""The calls of each module."""
QUERY, KEY = re.compile(r"w?q(s|uery|ueries)?"), re.compile(r"w?k(s|ey|eys)?")
"""Words in the names of modules and parameters that produce q, and k."""


@dataclass(frozen=True)
class Place:
    """The place of W_q or W_k in an attention module.

    Attributes:
        owner: name of the module that owns the parameter, without wrappers; empty for the attention itself.
        weight: name of the parameter in its owner.
        rows: int64 `[heads, d_k]`, numbers of the features in the parameter.
        axes: axes of the parameter along which the features lie; the inputs lie along the others.
        bias: name of the owner's bias; None if none is known.
        bias_offset: index of a feature's bias entry, minus the number of the feature.
        argument: index of the owner's positional argument that is the input; None if it is unknown.
    """

    owner: str
    weight: str
    rows: Tensor
    axes: tuple[int, ...]
    bias: str | None
    bias_offset: int
    argument: int | None

    def is_that(self, other: Place) -> bool:
        """True if both are the same rows of the same parameter."""
        return (self.owner, self.weight) == (other.owner, other.weight) and torch.equal(self.rows, other.rows)

    def select(self, weight: Tensor) -> Tensor:
        """Select the rows from a weight `[out, d_x]`, as `[heads, d_k, d_x]`."""
        return weight[self.rows.to(weight.device, non_blocking=True)]  # without making the host wait for a GPU


def takes_key_first(module: nn.Module, features: FeaturePair, linears: Sequence[Linear | None]) -> bool:
    """True if the names of the projections say that the left operand of a product is k and the right one is q."""
    sides = []
    for each in features:
        linear = None if each is None else linears[each.projection]
        found = None if linear is None else _find(module, linear.weight)
        words = [] if found is None else re.split("[^a-z]+", ".".join(found[:2]).lower())
        sides.append([any(map(side.fullmatch, words)) for side in (QUERY, KEY)])
    return sides == [[False, True], [True, False]]


def places_of(
    module: nn.Module,
    features: Sequence[FeaturePair],
    linears: Sequence[Linear | None],
    calls: Calls = MappingProxyType({}),
) -> tuple[Place | None, Place | None]:
    """The places of W_q and of W_k that all products of an attention share; None for one that they do not share.

    A place is also None if q, or k, was not produced by a parameter of the module alone.

    Args:
        module: the attention.
        features: those of both operands of each product.
        linears: the linear maps of the projections, by number.
        calls: recorded calls of the module and of its parts, if there are any.
    """
    found = []
    for pair in features:
        in_order = pair[::-1] if takes_key_first(module, pair, linears) else pair
        sides = zip(("query", "key"), in_order, strict=True)
        found.append([_place_of(module, side, each, linears, calls) for side, each in sides])
    query, key = map(_common, zip(*found, strict=True))
    return query, key


def _common(places: Sequence[Place | None]) -> Place | None:
    first, *others = places
    return first if first and all(other and first.is_that(other) for other in others) else None


def _place_of(
    module: nn.Module, side: str, features: Features | None, linears: Sequence[Linear | None], calls: Calls
) -> Place | None:
    linear = None if features is None else linears[features.projection]
    if features is None or linear is None:
        return None
    found = _find(module, linear.weight)
    if found is None:
        return None
    path, name, whole = found
    owner = module.get_submodule(path)
    own_calls, rows_of = calls.get(owner, ()), _rows_in(whole, linear.weight, linear.axes)
    if rows_of is None or getattr(owner, "groups", 1) != 1:
        return None
    returned = (_is_all_of(made, output) for made in linear.outputs for _, output in own_calls)
    if path and own_calls and not any(returned):
        return None  # the owner does more than multiply
    axes, rows = rows_of
    # An attribute `bias` of the attention itself may be a causal mask.
    bias, offset = _bias(owner, linear.bias, rows) or ("bias" if path else None, 0)
    argument = _argument(side, linear.source, owner, own_calls)
    return Place(path, name, rows[features.rows.cpu()], axes, bias, offset, argument)


def _find(module: nn.Module, weight: Tensor) -> tuple[str, str, Tensor] | None:
    """Find the parameter that `weight` is, or is a view of: the name of its owner, its own name, and the tensor."""
    for path, part in module.named_modules():
        for name in (*part._parameters, "weight"):  # a hook of torch may compute "weight" from other parameters
            whole = materialise.stored(part, name)
            if isinstance(whole, Tensor) and (whole is weight or whole is compat.base_of(weight)):
                return path, name, whole
    return None


def _rows_in(whole: Tensor, part: Tensor, axes: tuple[int, ...]) -> tuple[tuple[int, ...], Tensor] | None:
    """The axes of a parameter along which the rows of a view of it lie, and their numbers; None if they are not rows.

    Args:
        whole: the parameter.
        part: a view of it, or the parameter itself.
        axes: axes of the view along which its rows lie.
    """
    if part is whole:
        return axes, torch.arange(math.prod(part.shape[axis] for axis in axes), device="cpu")
    others = [axis for axis, size in enumerate(part.shape) if axis not in axes and size > 1]
    summed = [_axes_along(whole, part.shape[axis], part.stride(axis)) for axis in others]
    own = tuple(axis for axis, size in enumerate(whole.shape) if size > 1 and not any(axis in each for each in summed))
    if not all(summed) or not own:
        return None
    # The offset of each row in memory; the strides of the parameter convert it to the number of the row.
    starts = torch.tensor([part.storage_offset() - whole.storage_offset()], device="cpu")
    for axis in axes:
        steps = torch.arange(part.shape[axis], device="cpu") * part.stride(axis)
        starts = (starts[:, None] + steps).flatten()
    numbers, left = torch.zeros_like(starts), starts
    for axis in own:
        along = starts // whole.stride(axis) % whole.shape[axis]
        numbers, left = numbers * whole.shape[axis] + along, left - along * whole.stride(axis)
    return None if left.any() else (own, numbers)  # a remainder: this row starts inside one of the parameter


def _axes_along(whole: Tensor, size: int, step: int) -> list[int]:
    """The axes of a tensor that an axis of a view covers, given its size, above 1, and its stride; none if in part."""
    axes = [axis for axis, n in enumerate(whole.shape) if n > 1 and step <= whole.stride(axis) < size * step]
    return axes if math.prod(whole.shape[axis] for axis in axes) == size else []


def _bias(owner: nn.Module, bias: Tensor | None, rows: Tensor) -> tuple[str, int] | None:
    """The name of the parameter that holds a bias, and the offset of its entries from the `rows` of the weight.

    None if no parameter of the owner holds it, or if its entries are in another order.
    """
    if bias is None:
        return None
    for name, whole in owner._parameters.items():
        if whole is not None and whole is compat.base_of(bias):
            entries = _rows_in(whole, bias, tuple(range(bias.dim())))
            offsets = [] if entries is None else (entries[1] - rows).unique().tolist()
            return (name, offsets[0]) if len(offsets) == 1 else None
    return None


def _argument(side: str, source: Tensor, owner: nn.Module, calls: Sequence[ModuleCall]) -> int | None:
    """Index of the owner's argument that a projection received; if several are the same, that of the name `side`."""
    names = argument_names(owner)
    for args, _ in calls:
        alike = [index for index, x in enumerate(args) if _is_all_of(source, x)]
        if len(alike) > 1:
            alike = [index for index in alike if names[index : index + 1] == [side]]
        if alike:
            return alike[0]
    return None


def _is_all_of(tensor: Tensor, other: Any) -> bool:
    """True if a tensor has all entries of the other, in whatever shape."""
    if not isinstance(other, Tensor):
        return False
    return compat.base_of(tensor) is compat.base_of(other) and tensor.numel() == other.numel()
