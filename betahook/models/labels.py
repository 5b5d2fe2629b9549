"""Labels of tensor entries: the projection feature that each entry holds, followed through views and rearrangements.

Each entry of a projection's output is labelled with the number of its feature. Labels are reliable where names and
sizes, which may coincide, are not: the tap uses them to find the heads axis, `models.trial` the rows of W_q and W_k.

Example: a projection returns `[batch, tokens, 4]`, labelled 0, 1, 2, 3 in every token. After the split into two heads,
`[batch, 2, tokens, 2]`, the labels are 0, 1 in the first head and 2, 3 in the second. They vary along axis 1, so that
is the heads axis, even if there are two tokens as well; and rows 2 and 3 of the weight produced the second head.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from betahook.models.by_tensor import ByTensor
from betahook.models.code import PRODUCTS
from betahook.models.torch_calls import MOVING, Call, axes_of, tensors_in

PROJECTIONS = {"linear": -1, "addmm": -1, "conv1d": 1, "conv2d": 1, "conv3d": 1}
"""Functions that project, with the axis of their output along which the features lie."""
ADDING = {"add", "add_", "__add__", "__radd__", "__iadd__"}
"""Functions that may add a bias."""
REDUCING = {"max", "min", "amax", "amin", "mean", "sum"}
"""Functions whose result keeps a label if all entries that they reduce share it."""
PROJECTION_STRIDE = 2**31
"""Offset between the labels of two projections, larger than any number of features."""
UNKNOWN = -1
"""Label of entries that do not come from a labelled tensor."""
COMPLEX_OFFSET = PROJECTION_STRIDE // 2
"""Offset added to the label of a complex entry's real part if its imaginary part is the next feature."""


def _pad(labels: Tensor, sides: Sequence[int], mode: str = "constant", value: float | None = None) -> Tensor:
    """Pad labels; entries filled with a constant have none."""
    return F.pad(labels, sides, mode, UNKNOWN if mode == "constant" else value)


def _as_complex(labels: Tensor) -> Tensor:
    first, second = labels.unbind(-1)
    return first + COMPLEX_OFFSET * ((first != UNKNOWN) & (second == first + 1))


def _as_real(labels: Tensor) -> Tensor:
    paired = (labels != UNKNOWN) & (labels % PROJECTION_STRIDE >= COMPLEX_OFFSET)
    first = labels - COMPLEX_OFFSET * paired
    return torch.stack([first, first + 1 * paired], -1)


ON_LABELS: dict[str, Callable[..., Tensor]] = {
    "pad": _pad,
    "view_as_complex": _as_complex,
    "view_as_real": _as_real,
}
"""Substitutes that work on integer labels, by the name of the original function."""


@dataclass(frozen=True)
class Features:
    """The projection features that make up the heads of a query or a key.

    Attributes:
        projection: index of the projection in `Labels.linears`.
        rows: int64 `[heads, d_k]`, rows of its weight; query heads that share a key share one row of this tensor.
    """

    projection: int
    rows: Tensor


FeaturePair = tuple[Features | None, Features | None]
"""The features of q and of k, each None if its labels do not determine them."""


@dataclass(frozen=True)
class Linear:
    """The linear map of a projection.

    Attributes:
        source: its input.
        weight: the matrix, or the kernel of a convolution.
        axes: axes of the weight along which the features lie, numbered in this order.
        bias: the bias added to the features; None if there is none.
        outputs: the features; also their sum with the bias, if a separate call added it.
    """

    source: Tensor
    weight: Tensor
    axes: tuple[int, ...]
    bias: Tensor | None
    outputs: tuple[Tensor, ...]


class Labels(ByTensor[Tensor]):
    """The labels of the tensors in one forward, each with the shape of its tensor.

    Attributes:
        linears: the linear map of each projection, at index `label // PROJECTION_STRIDE`; None if it is unknown.
    """

    def __init__(
        self,
        is_learned: Callable[[Tensor], bool],
        context: Callable[[], AbstractContextManager[None]] = nullcontext,
        *,
        everywhere: bool = False,
    ) -> None:
        """Start without labels.

        Args:
            is_learned: returns True for a tensor that holds weights; the output of a product with it is labelled.
            context: the context in which labels are computed.
            everywhere: when one projection is applied to several heads, distinguish heads that lie along any leading
                axis, not only along the first.
        """
        super().__init__()
        self.linears: list[Linear | None] = []
        self._of_numbers: int | None = None  # index of the entry in `linears` for numbers that are not features
        self._is_learned, self._context, self._everywhere = is_learned, context, everywhere

    def put(self, tensor: Tensor, labels: Tensor) -> None:
        """Label a tensor, unless the labels are fake tensors without data."""
        if type(labels) is Tensor:
            self[tensor] = labels

    def put_numbers(self, tensor: Tensor, numbers: Tensor) -> None:
        """Label a tensor with numbers that are not features, as if one unknown projection had produced them all."""
        if self._of_numbers is None:
            self._of_numbers = len(self.linears)
            self.linears.append(None)
        self.put(tensor, numbers + PROJECTION_STRIDE * self._of_numbers)

    def _put_features(self, tensor: Tensor, axes: Sequence[int], linear: Linear | None) -> None:
        """Label the output of a projection, whose features lie along `axes`, numbered in that order."""
        sizes = [tensor.shape[axis] for axis in axes]
        numbers = torch.arange(math.prod(sizes), device=device_of(tensor)) + PROJECTION_STRIDE * len(self.linears)
        labels = torch.empty(tensor.shape, dtype=numbers.dtype, device=numbers.device)
        labels.movedim(tuple(axes), tuple(range(-len(axes), 0))).copy_(numbers.view(sizes))
        self.put(tensor, labels)
        self.linears.append(linear)

    def note_input(self, tensor: Tensor, *axes: int) -> None:
        """Label an input whose features, produced elsewhere, lie along `axes` and its last axis, in that order."""
        self._put_features(tensor, [*axes, tensor.dim() - 1], None)

    def _tell_heads_apart(self, tensor: Tensor, source: Tensor, shared_axes: int) -> None:
        """Give the features of different heads different labels, where one projection of all heads labelled them alike.

        Such heads lie in the leading axes that `tensor` and `source` have in common, `shared_axes` in number.
        """
        labels, of = self.get(tensor), self.get(source)
        shared_axes = shared_axes if self._everywhere else min(shared_axes, 1)
        if labels is None or of is None or of.numel() == 0 or not 0 < shared_axes < of.dim():
            return  # without axes beside those of the batch, nothing was projected
        if of.shape[:shared_axes] != labels.shape[:shared_axes]:
            return
        _, heads = (of.flatten(shared_axes).amin(shared_axes) % PROJECTION_STRIDE).unique(return_inverse=True)
        if heads.any():
            self.linears[-1] = None  # all heads share its weight
            offsets = heads * int(labels.max() - labels.min() + 1)
            self.put(tensor, labels + offsets.view(*heads.shape, *(1 for _ in labels.shape[shared_axes:])))

    def count_streams(self, query: Tensor, length: int) -> int:
        """Count the projections whose outputs, `length` tokens each, are concatenated along the tokens of a query."""
        labels = self.get(query)
        if labels is None:
            return 1
        with self._context():
            made_by = labels // PROJECTION_STRIDE
            count = len(made_by.unique())
            axes = (axis for axis, size in enumerate(labels.shape) if size == count * length)
            return count if any(bool((made_by.amax(axis) > made_by.amin(axis)).any()) for axis in axes) else 1

    def note(self, call: Call, output: Any) -> None:
        """Label the output of a call."""
        name = call.name
        with self._context():
            if name in PROJECTIONS:
                linear = _linear_of(call, output)
                axis = PROJECTIONS[name] % output.dim()
                self._put_features(output, [axis], linear)
                self._tell_heads_apart(output, linear.source, axis)
            elif name in PRODUCTS:
                self._note_product(call, output)
            elif name == "__setitem__":
                self._assign(*call.args)
            elif any(self.get(tensor) is not None for tensor in call.tensors):
                if name in ADDING:
                    self._note_bias(call.tensors, output)
                self._follow(call, output)
                if name == "batch_norm":  # it rescales features: the weight alone no longer determines them
                    self.put(output, self._of_unknown_weight(self._labels_or_none(output)))

    def _note_product(self, call: Call, output: Tensor) -> None:
        """Label the output of a product whose right operand is learned, or a matrix applied to a larger tensor."""
        axes = axes_of(call)
        if axes is None:
            return
        source, weight = itertools.islice(tensors_in(call.operands), 2)
        is_matrix = call.name != "einsum" and weight.dim() == 2 < source.dim()
        if is_matrix or self._is_learned(weight):
            of_source, of_weight, of_output = axes
            sizes = dict(zip(of_source, source.shape, strict=True))
            made = [axis for axis in of_weight if axis in of_output and sizes.get(axis, 1) == 1]
            linear = Linear(source, weight, tuple(map(of_weight.index, made)), None, (output,))
            is_linear = _sums_all_but(made, weight, *axes)
            self._put_features(output, [*map(of_output.index, made)], linear if is_linear else None)
            leading = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(of_source, of_output, strict=False))
            self._tell_heads_apart(output, source, sum(1 for _ in leading))

    def _note_bias(self, added: list[Tensor], output: Tensor) -> None:
        """Record the bias of a projection that only multiplies: a tensor added later, with one entry per feature."""
        for one, other in itertools.permutations(added, 2):
            labels = self.get(one)
            if labels is None or labels.numel() == 0 or other.dim() > labels.dim():
                continue
            number = int(labels.max()) // PROJECTION_STRIDE
            linear = self.linears[number] if number >= 0 else None
            if linear is not None and linear.bias is None and _has_one_for_each(other, labels):
                self.linears[number] = replace(linear, bias=other, outputs=(*linear.outputs, output))

    def _assign(self, target: Tensor, index: Any, source: Any) -> None:
        labels = self.get(source) if isinstance(source, Tensor) else None
        if labels is not None:
            changed = self._labels_or_none(target).clone()
            changed[index] = labels
            self.put(target, changed)

    def _follow(self, call: Call, output: Any) -> None:
        parts = [part for part in tensors_in(output) if not part.is_nested]  # nested sizes are not integers
        if call.name in REDUCING and len(call.tensors) == 1:
            return self._reduce(call, parts[0])
        if call.name in MOVING:
            same = Call(ON_LABELS.get(call.name, call.function), call.args, call.kwargs)
            try:
                labels = tensors_in(same.run_on(self._labels_or_none))
            except (RuntimeError, TypeError, ValueError, IndexError):  # the function does not accept labels
                return
            for part, moved in zip(parts, labels, strict=True):
                self.put(part, moved)
            return
        labelled = [found for tensor in call.tensors if (found := self.get(tensor)) is not None and found.numel()]
        mixed = len(labelled) > 1 and len({int(found.amax()) // PROJECTION_STRIDE for found in labelled}) > 1
        # A real result of complex numbers, such as their modulus, mixes two features.
        mixed |= any(x.is_complex() for x in call.tensors) and not any(part.is_complex() for part in parts)
        for part in parts:
            of_part = next((found for found in labelled if found.shape == part.shape), None)
            if of_part is not None and (part.is_floating_point() or part.is_complex()):
                kept = self._of_unknown_weight(of_part) if mixed else of_part
                # Labels take the memory layout of their tensor, as `as_strided` depends on it.
                self.put(part, kept.contiguous() if part.is_contiguous() else kept)

    def _reduce(self, call: Call, output: Tensor) -> None:
        labels, (dim, keepdim) = self.get(call.operands[0]), call.reduced
        if labels is not None and dim is not None:
            least = labels.amin(dim, keepdim)
            if torch.equal(least, labels.amax(dim, keepdim)):
                self.put(output, least)

    def _of_unknown_weight(self, labels: Tensor) -> Tensor:
        """Relabel features as those of a new projection whose linear map is unknown."""
        self.linears.append(None)
        return labels.where(labels == UNKNOWN, labels % PROJECTION_STRIDE + PROJECTION_STRIDE * (len(self.linears) - 1))

    def _labels_or_none(self, tensor: Tensor) -> Tensor:
        labels = self.get(tensor)
        return torch.full(tensor.shape, UNKNOWN, device=device_of(tensor)) if labels is None else labels


def _linear_of(call: Call, output: Tensor) -> Linear:
    """Describe a call of a function in `PROJECTIONS` as a linear map."""
    if call.name == "addmm":
        bias, source, weight = call.operands[:3]
        return Linear(source, weight, (1,), bias, (output,))
    source, weight, *rest = call.operands
    return Linear(source, weight, (0,), rest[0] if rest and isinstance(rest[0], Tensor) else None, (output,))


def _sums_all_but(made: Sequence[str], weight: Tensor, of_source: str, of_weight: str, of_output: str) -> bool:
    """True if a product contracts every axis of the weight, except those of the features, with one of the source."""
    others = (axis for axis, size in zip(of_weight, weight.shape, strict=True) if axis not in made and size > 1)
    return all(axis in of_source and axis not in of_output for axis in others)


def _has_one_for_each(bias: Tensor, labels: Tensor) -> bool:
    """True if a tensor added to features has one entry per feature, in the order of their numbers."""
    sizes = [1] * (labels.dim() - bias.dim()) + list(bias.shape)
    along = labels[tuple(slice(None if n > 1 else 1) for n in sizes)].flatten() % PROJECTION_STRIDE
    return torch.equal(along, torch.arange(bias.numel(), device=along.device))


def device_of(tensor: Tensor) -> torch.device:
    """Device for the labels of a tensor: its own, or the CPU in place of the meta device, which holds no data."""
    return torch.device("cpu") if tensor.is_meta else tensor.device


def features_of_heads(
    labels: Tensor, components: Sequence[int], heads: int, head_dim: int, batch: int
) -> Features | None:
    """Determine the features that make up each head of a query or a key.

    Args:
        labels: labels of the query or the key.
        components: axes along which its components lie, over which the product of q and k sums.
        heads: number of query heads.
        head_dim: d_k.
        batch: number of sequences, which may share an axis with the heads.

    Returns:
        The features, or None if the entries come from several projections or no split into heads fits the labels.
    """
    last = range(-len(components), 0)
    labels = labels.movedim(tuple(components), tuple(last)).flatten(last[0])
    known = labels[labels != UNKNOWN].unique()
    own, left = divmod(len(known), head_dim)
    if not own or left or heads % own:
        return None
    projection = int(known[0]) // PROJECTION_STRIDE
    if int(known[-1]) // PROJECTION_STRIDE != projection:
        return None
    for parts in _by_head(labels, {own, heads}, batch):
        found = [part[part != UNKNOWN].unique() for part in parts]
        if any(len(rows) != head_dim for rows in found):
            continue
        every, shared = torch.stack(found), len(found) // own
        rows = every[::shared]
        if len(rows.unique()) == len(known) and torch.equal(rows.repeat_interleave(shared, 0), every):
            return Features(projection, rows % PROJECTION_STRIDE)
    return None


def _by_head(labels: Tensor, counts: set[int], batch: int) -> Iterator[Sequence[Tensor]]:
    """Yield possible splits of `[..., d_k]` into heads: one head, along an axis, or along one shared with the batch."""
    if 1 in counts:
        yield [labels]
    for axis, size in enumerate(labels.shape[:-1]):
        if size in counts:
            yield labels.unbind(axis)
    for count in counts:
        if labels.shape[0] == batch * count:
            yield [labels[head::count] for head in range(count)]
            yield labels.chunk(count)
