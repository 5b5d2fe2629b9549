"""Labels of entries: the features of projections that they come from, followed through whatever moves them.

Each entry that comes out of a projection gets a label, the number of its feature. They tell what names and sizes, which
may coincide, do not: the tap finds the axis of the heads by them, `models.trial` the rows of W_q and W_k.

An example: a projection makes `[batch, tokens, 4]`, labelled 0, 1, 2, 3 in every token. Divided into two heads,
`[batch, 2, tokens, 2]`, the labels are 0, 1 in the first and 2, 3 in the second. They vary along axis 1, so that is the
axis of the heads, even if there are two tokens as well; and rows 2 and 3 of the weight made the second head.
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
"""Functions that make features, to the axis along which these lie."""
ADDING = {"add", "add_", "__add__", "__radd__", "__iadd__"}
"""Functions by which a bias is added."""
REDUCING = {"max", "min", "amax", "amin", "mean", "sum"}
"""Functions whose results keep a label that all of their entries have in common."""
FAR = 2**31
"""Offset between the labels of two projections, above any number of features."""
UNKNOWN = -1
"""The label of entries that come from elsewhere."""
PAIR = FAR // 2
"""Offset of the label of a complex entry that two neighbouring features make: the first is its real part."""


def _pad(labels: Tensor, sides: Sequence[int], mode: str = "constant", value: float | None = None) -> Tensor:
    """Pad labels: a constant has none."""
    return F.pad(labels, sides, mode, UNKNOWN if mode == "constant" else value)


def _as_complex(labels: Tensor) -> Tensor:
    first, second = labels.unbind(-1)
    return first + PAIR * ((first != UNKNOWN) & (second == first + 1))


def _as_real(labels: Tensor) -> Tensor:
    paired = (labels != UNKNOWN) & (labels % FAR >= PAIR)
    first = labels - PAIR * paired
    return torch.stack([first, first + 1 * paired], -1)


ON_LABELS: dict[str, Callable[..., Tensor]] = {
    "pad": _pad,
    "view_as_complex": _as_complex,
    "view_as_real": _as_real,
}
"""Replacements on integer labels, by the name of the function."""


@dataclass(frozen=True)
class Features:
    """The features that the heads of a query or a key are made of.

    Attributes:
        projection: the number of the projection that made them.
        rows: int64 `[heads, d_k]`, of its weight; one head for all query heads that share a key.
    """

    projection: int
    rows: Tensor


MadeOf = tuple[Features | None, Features | None]
"""The features that q and k are made of, each None where labels do not show it."""


@dataclass(frozen=True)
class Linear:
    """The linear map of a projection.

    Attributes:
        source: its input.
        weight: the matrix, or the kernel of a convolution.
        axes: of the weight, along which its features lie; numbered in this order.
        bias: what was added to the features at once, None for nothing.
        outputs: the features, and with a bias that was added by a call of its own.
    """

    source: Tensor
    weight: Tensor
    axes: tuple[int, ...]
    bias: Tensor | None
    outputs: tuple[Tensor, ...]


class Labels(ByTensor[Tensor]):
    """The labels of the tensors in one forward, each of the shape of its tensor.

    Attributes:
        linears: that of each projection, at index `label // FAR`; None where it is not known.
    """

    def __init__(
        self,
        is_learned: Callable[[Tensor], bool],
        apart: Callable[[], AbstractContextManager[None]] = nullcontext,
        *,
        everywhere: bool = False,
    ) -> None:
        """Begin without labels.

        Args:
            is_learned: tells if a tensor holds weights: what a product with it makes is labelled.
            apart: the context in which labels are computed.
            everywhere: tell features apart that one projection makes of others along any axis, not only the batch.
        """
        super().__init__()
        self.linears: list[Linear | None] = []
        self._of_numbers: int | None = None  # the index of the entry in `linears` for numbers that are no features
        self._is_learned, self._apart, self._everywhere = is_learned, apart, everywhere

    def put(self, tensor: Tensor, labels: Tensor) -> None:
        """Label a tensor, unless the labels were computed without data."""
        if type(labels) is Tensor:
            self[tensor] = labels

    def put_numbers(self, tensor: Tensor, numbers: Tensor) -> None:
        """Label a tensor by numbers that are no features: as if one projection, which is not known, made them all."""
        if self._of_numbers is None:
            self._of_numbers = len(self.linears)
            self.linears.append(None)
        self.put(tensor, numbers + FAR * self._of_numbers)

    def _put_features(self, tensor: Tensor, axes: Sequence[int], linear: Linear | None) -> None:
        """Label a tensor that a projection made, whose features lie along some of its axes, numbered in that order."""
        sizes = [tensor.shape[axis] for axis in axes]
        numbers = torch.arange(math.prod(sizes), device=device_of(tensor)) + FAR * len(self.linears)
        labels = torch.empty(tensor.shape, dtype=numbers.dtype, device=numbers.device)
        labels.movedim(tuple(axes), tuple(range(-len(axes), 0))).copy_(numbers.view(sizes))
        self.put(tensor, labels)
        self.linears.append(linear)

    def note_input(self, tensor: Tensor, *axes: int) -> None:
        """Label an input, along whose last axis, and `axes` before it, lie features that something else made."""
        self._put_features(tensor, [*axes, tensor.dim() - 1], None)

    def _tell_heads_apart(self, tensor: Tensor, source: Tensor, alike: int) -> None:
        """Tell apart the features of heads that lie in the batch, and that one projection makes alike.

        `alike` is the number of the first axes that tensor and source have in common, which are all of the batch here.
        """
        labels, of = self.get(tensor), self.get(source)
        alike = alike if self._everywhere else min(alike, 1)
        if labels is None or of is None or of.numel() == 0 or not 0 < alike < of.dim():
            return  # with nothing else than the batch in the source, nothing was projected
        if of.shape[:alike] != labels.shape[:alike]:
            return
        _, heads = (of.flatten(alike).amin(alike) % FAR).unique(return_inverse=True)
        if heads.any():
            self.linears[-1] = None  # which all of them share
            apart = heads * int(labels.max() - labels.min() + 1)
            self.put(tensor, labels + apart.view(*heads.shape, *(1 for _ in labels.shape[alike:])))

    def streams(self, query: Tensor, length: int) -> int:
        """Count the projections whose features lie one behind the other in a query, with so many tokens of each."""
        labels = self.get(query)
        if labels is None:
            return 1
        with self._apart():
            made_by = labels // FAR
            count = len(made_by.unique())
            axes = (axis for axis, size in enumerate(labels.shape) if size == count * length)
            return count if any(bool((made_by.amax(axis) > made_by.amin(axis)).any()) for axis in axes) else 1

    def note(self, call: Call, output: Any) -> None:
        """Label what a call returned."""
        name = call.name
        with self._apart():
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
                if name == "batch_norm":  # behind which the weight alone is not what acts
                    self.put(output, self._of_unknown_weight(self._labels_or_none(output)))

    def _note_product(self, call: Call, output: Tensor) -> None:
        """Label what a product with something learned, or with a matrix, makes of its left operand."""
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
            alike = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(of_source, of_output, strict=False))
            self._tell_heads_apart(output, source, sum(1 for _ in alike))

    def _note_bias(self, added: list[Tensor], output: Tensor) -> None:
        """Note the bias of a projection that multiplies only: what is added to its features, one number for each."""
        for one, other in itertools.permutations(added, 2):
            labels = self.get(one)
            if labels is None or labels.numel() == 0 or other.dim() > labels.dim():
                continue
            number = int(labels.max()) // FAR
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
        parts = [part for part in tensors_in(output) if not part.is_nested]  # whose sizes are no numbers
        if call.name in REDUCING and len(call.tensors) == 1:
            return self._reduce(call, parts[0])
        if call.name in MOVING:
            same = Call(ON_LABELS.get(call.name, call.function), call.args, call.kwargs)
            try:
                labels = tensors_in(same.run_on(self._labels_or_none))
            except (RuntimeError, TypeError, ValueError, IndexError):  # it does not work on labels
                return
            for part, moved in zip(parts, labels, strict=True):
                self.put(part, moved)
            return
        labelled = [found for tensor in call.tensors if (found := self.get(tensor)) is not None and found.numel()]
        mixed = len(labelled) > 1 and len({int(found.amax()) // FAR for found in labelled}) > 1
        # As the modulus of a complex number, which has the label of two features.
        mixed |= any(x.is_complex() for x in call.tensors) and not any(part.is_complex() for part in parts)
        for part in parts:
            alike = next((found for found in labelled if found.shape == part.shape), None)
            if alike is not None and (part.is_floating_point() or part.is_complex()):
                kept = self._of_unknown_weight(alike) if mixed else alike
                # In the layout of the tensor, by which `as_strided` goes.
                self.put(part, kept.contiguous() if part.is_contiguous() else kept)

    def _reduce(self, call: Call, output: Tensor) -> None:
        labels, (dim, keepdim) = self.get(call.operands[0]), call.reduced
        if labels is not None and dim is not None:
            least = labels.amin(dim, keepdim)
            if torch.equal(least, labels.amax(dim, keepdim)):
                self.put(output, least)

    def _of_unknown_weight(self, labels: Tensor) -> Tensor:
        """The same features, as if another projection had made them."""
        self.linears.append(None)
        return labels.where(labels == UNKNOWN, labels % FAR + FAR * (len(self.linears) - 1))

    def _labels_or_none(self, tensor: Tensor) -> Tensor:
        labels = self.get(tensor)
        return torch.full(tensor.shape, UNKNOWN, device=device_of(tensor)) if labels is None else labels


def _linear_of(call: Call, output: Tensor) -> Linear:
    """The linear map that a call of a function in `PROJECTIONS` is."""
    if call.name == "addmm":
        bias, source, weight = call.operands[:3]
        return Linear(source, weight, (1,), bias, (output,))
    source, weight, *rest = call.operands
    return Linear(source, weight, (0,), rest[0] if rest and isinstance(rest[0], Tensor) else None, (output,))


def _sums_all_but(made: Sequence[str], weight: Tensor, of_source: str, of_weight: str, of_output: str) -> bool:
    """True if a product sums over every axis of the weight but those of the features, each with one of the source."""
    others = (axis for axis, size in zip(of_weight, weight.shape, strict=True) if axis not in made and size > 1)
    return all(axis in of_source and axis not in of_output for axis in others)


def _has_one_for_each(bias: Tensor, labels: Tensor) -> bool:
    """True if a tensor that is added to features has one entry for each, in the order of their numbers."""
    sizes = [1] * (labels.dim() - bias.dim()) + list(bias.shape)
    along = labels[tuple(slice(None if n > 1 else 1) for n in sizes)].flatten() % FAR
    return torch.equal(along, torch.arange(bias.numel(), device=along.device))


def device_of(tensor: Tensor) -> torch.device:
    """The device for the labels of a tensor: its own, but for the meta device, on which nothing could be read."""
    return torch.device("cpu") if tensor.is_meta else tensor.device


def features_of_heads(
    labels: Tensor, components: Sequence[int], heads: int, head_dim: int, batch: int
) -> Features | None:
    """Tell which features the heads of a query or a key are made of.

    Args:
        labels: of the query or the key.
        components: the axes along which its components lie, over which the product with the other sums.
        heads: of the query.
        head_dim: d_k.
        batch: the number of sequences, which may share an axis with the heads.

    Returns:
        None where the entries come from several projections, or where it is not to be seen which make which head.
    """
    last = range(-len(components), 0)
    labels = labels.movedim(tuple(components), tuple(last)).flatten(last[0])
    known = labels[labels != UNKNOWN].unique()
    own, left = divmod(len(known), head_dim)
    if not own or left or heads % own:
        return None
    projection = int(known[0]) // FAR
    if int(known[-1]) // FAR != projection:
        return None
    for parts in _by_head(labels, {own, heads}, batch):
        found = [part[part != UNKNOWN].unique() for part in parts]
        if any(len(rows) != head_dim for rows in found):
            continue
        every, shared = torch.stack(found), len(found) // own
        rows = every[::shared]
        if len(rows.unique()) == len(known) and torch.equal(rows.repeat_interleave(shared, 0), every):
            return Features(projection, rows % FAR)
    return None


def _by_head(labels: Tensor, counts: set[int], batch: int) -> Iterator[Sequence[Tensor]]:
    """Divide a tensor `[..., d_k]` into heads, as its sizes allow: a single one, along an axis, or in its first."""
    if 1 in counts:
        yield [labels]
    for axis, size in enumerate(labels.shape[:-1]):
        if size in counts:
            yield labels.unbind(axis)
    for count in counts:
        if labels.shape[0] == batch * count:
            yield [labels[head::count] for head in range(count)]
            yield labels.chunk(count)
