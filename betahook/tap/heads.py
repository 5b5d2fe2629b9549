"""Places of the heads in a tensor, found out from what the module did and not from sizes, which may coincide.

In the first forward each entry that comes out of a projection gets a label, the number of its feature. The labels are
moved along with the tensor. An axis of a query along which they vary, other than that of its components, is the axis of
the heads. Used by the tap in `products`.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from betahook.compat import WeakIdKeyDictionary
from betahook.models.code import PRODUCTS
from betahook.models.torch_calls import Call, tensors_in
from betahook.tap.contraction import Axis, on_heads

PROJECTIONS = {"linear": -1, "addmm": -1, "conv1d": 1, "conv2d": 1, "conv3d": 1}
"""Functions that make features, to the axis along which these lie."""
FAR = 2**31
"""More features than a projection has, so that those of two differ."""
UNKNOWN = -1
"""The label of entries that come from elsewhere."""
REMEDY = "make q and k [batch, heads, tokens, d_k]"
"""The remedy where the axis of the heads is not found."""


def _pad(labels: Tensor, sides: Sequence[int], mode: str = "constant", value: float | None = None) -> Tensor:
    """Pad labels: a constant has none."""
    return F.pad(labels, sides, mode, UNKNOWN if mode == "constant" else value)


ON_LABELS: dict[str, Callable[..., Tensor]] = {
    "pad": _pad,
    "view_as_complex": lambda labels: labels[..., 0],
    "view_as_real": lambda labels: torch.stack([labels, labels], -1),
}
"""Functions that do to labels what others do to numbers, by the names of these."""


class Labels:
    """The labels of the tensors in one forward."""

    def __init__(self) -> None:
        self._of = WeakIdKeyDictionary()
        self._numbers = itertools.count()

    def get(self, tensor: Tensor) -> Tensor | None:
        """The labels of a tensor, of the same shape, or None."""
        labels: Tensor | None = self._of.get(tensor)
        return labels

    def put_heads(self, scores: Tensor, axis: Axis, heads: int) -> None:
        """Label scores by the numbers of their heads."""
        if axis != "single":
            self._of[scores] = on_heads(scores, axis, heads, lambda x, own: _along(own, torch.arange(heads), x))

    def note(self, call: Call, output: Any, moves: bool) -> None:
        """Label what a call returned.

        Args:
            call: the call.
            output: what it returned.
            moves: it only moves entries.
        """
        name = call.name
        if name in PROJECTIONS or (name in ("matmul", "__matmul__") and call.operands[1].dim() == 2):
            axis = PROJECTIONS.get(name, -1)
            features = torch.arange(output.shape[axis]) + FAR * next(self._numbers)
            self._of[output] = _along(axis, features, output)
        elif name == "__setitem__":
            self._assign(*call.args)
        elif name not in PRODUCTS and any(self.get(tensor) is not None for tensor in call.tensors):
            self._follow(call, output, moves)

    def _assign(self, target: Tensor, index: Any, source: Any) -> None:
        labels = self.get(source) if isinstance(source, Tensor) else None
        if labels is not None:
            changed = self._labels_or_none(target).clone()
            changed[index] = labels
            self._of[target] = changed

    def put_features(self, tensor: Tensor, axes: list[int]) -> None:
        """Label a tensor that a product with a parameter made, whose features lie along some of its axes."""
        shape = [size if axis in axes else 1 for axis, size in enumerate(tensor.shape)]
        numbers = torch.arange(math.prod(shape), device=tensor.device) + FAR * next(self._numbers)
        self._of[tensor] = numbers.view(shape).expand(tensor.shape).contiguous()

    def _follow(self, call: Call, output: Any, moves: bool) -> None:
        parts = list(tensors_in(output))
        if moves:
            same = Call(ON_LABELS.get(call.name, call.function), call.args, call.kwargs)
            labels = list(tensors_in(_attempt(lambda: same.run_on(self._labels_or_none))))
            if len(labels) == len(parts):
                for part, moved in zip(parts, labels, strict=True):
                    self._of[part] = moved
            return
        labelled = [found for tensor in call.tensors if (found := self.get(tensor)) is not None]
        for part in parts:
            alike = next((found for found in labelled if found.shape == part.shape), None)
            if alike is not None and (part.is_floating_point() or part.is_complex()):
                self._of[part] = alike

    def _labels_or_none(self, tensor: Tensor) -> Tensor:
        labels = self.get(tensor)
        return torch.full_like(tensor, UNKNOWN, dtype=torch.long, requires_grad=False) if labels is None else labels


def _along(axis: int, numbers: Tensor, tensor: Tensor) -> Tensor:
    """Numbers along an axis of a tensor, the same along all others: of its shape."""
    shape = [1] * tensor.dim()
    shape[axis] = -1
    return numbers.to(tensor.device).view(shape).expand(tensor.shape).contiguous()


def _attempt(run: Callable[[], Any]) -> Any:
    """The result of a function, None where it does not work on labels."""
    try:
        return run()
    except (RuntimeError, TypeError, ValueError, IndexError):
        return None


def varying(labels: Tensor, summed: int | None) -> list[int]:
    """The axes of a tensor other than that of the components along which its labels vary."""
    if labels.numel() == 0:
        return []
    least = labels.masked_fill(labels == UNKNOWN, FAR * FAR)
    axes = (axis for axis in range(labels.dim()) if axis != summed)
    return [
        axis for axis in axes if bool((labels.amax(axis) > least.amin(axis)).logical_and(labels.amax(axis) >= 0).any())
    ]


def find(labels: Tensor, summed: int | None, heads: int) -> Axis | None:
    """The axis of the heads in a tensor with labels; None if they do not tell.

    Args:
        labels: of the shape of the tensor.
        summed: the axis of the components, which has labels of its own; None if there is none.
        heads: number of heads.
    """
    found = varying(labels, summed)
    if len(found) > 1:  # sequences of two projections lie one behind the other, as where an image attends to a text
        labels = torch.where(labels == UNKNOWN, labels, labels % FAR)
        found = varying(labels, summed)
    if len(found) != 1:
        return None
    axis, size = found[0], labels.shape[found[0]]
    if size == heads:
        return axis
    if size % heads or axis != 0:
        return None
    along = labels.movedim(axis, 0).flatten(1).amax(1)
    if torch.equal(along, along[:heads].repeat(size // heads)):
        return "flat"
    if torch.equal(along, along[:: size // heads].repeat_interleave(size // heads)):
        return "heads first"
    return None
