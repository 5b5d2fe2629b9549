"""The products of torch that can make a score matrix, read as `left [..., n, d]` times `right [..., m, d]`.

Also where their heads lie: along an axis of their own, mostly the second, or folded into the first, one axis being
batch and heads then ("flat") or heads and batch ("heads first"); a single head needs no axis ("single").
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from betahook.models.torch_calls import Call

Axis = int | Literal["flat", "heads first", "single"]


class UnknownHeadsError(ValueError):
    """No axis of an operand can be that of the heads, of those before the last two with these `sizes`."""

    def __init__(self, sizes: Sequence[int], heads: int) -> None:
        super().__init__(f"expected an axis of {heads} heads before the last two, got axes of {list(sizes)}")


@dataclass(frozen=True)
class Contraction:
    """One product of two tensors, and how to run it again with another left operand.

    Attributes:
        left, right: the operands as they were given.
        run: the product, addend included, for a left operand of the same shape.
        alone: the bare product, without addend and factor.
        left_axes, right_axes: a letter for each axis of an operand.
        batch: the letters of the axes that both have in common and keep, and one of which may be of heads.
        output_axes: a letter for each axis of the product.
        summed: the letter of the axis that is summed over, of size d.
        alpha: factor that the call itself puts on the product.
        equation: of an einsum.
    """

    left: Tensor
    right: Tensor
    run: Callable[[Tensor], Tensor]
    alone: Callable[[Tensor], Tensor]
    left_axes: str
    right_axes: str
    batch: str
    output_axes: str
    summed: str
    alpha: float = 1.0
    equation: str | None = None

    @property
    def size(self) -> int:
        """d, the number of terms of each sum."""
        return self.left.shape[self.left_axes.index(self.summed)]

    @property
    def has_batch(self) -> bool:
        """True if the left operand has an axis beside those of the product, where heads may lie."""
        return self.left.dim() > 2

    @property
    def biased(self) -> bool:
        """True if the call adds something to the product."""
        return self.run is not self.alone

    def head_axis(self, heads: int, known: Axis | None) -> Axis:
        """The axis of `left` that the heads lie along.

        Raises:
            UnknownHeadsError: there is none.
        """
        sizes = [self.left.shape[self.left_axes.index(axis)] for axis in self.batch]
        if heads not in sizes and self.equation is not None and known is None:
            # Not common to both operands, as where k has no heads of its own.
            own = [place for place, axis in enumerate(self.left_axes) if axis not in self.batch + self.summed]
            fitting = [place for place in own if self.left.shape[place] == heads]
            if fitting:
                return fitting[0]
        place = axis_by_size(sizes, heads, known)
        return self.left_axes.index(self.batch[place]) if isinstance(place, int) else place

    def output_axis(self, axis: Axis) -> Axis | None:
        """The axis of the heads in the product, from that in `left`; None if it has none."""
        letters = self.output_axes
        if not isinstance(axis, int):
            return axis
        return letters.index(self.left_axes[axis]) if self.left_axes[axis] in letters else None

    def laid_out(self, scaled: Tensor) -> Tensor:
        """The scaled left operand as the product lays out the unscaled one.

        Torch copies matrices whose batch is more than one axis in memory. Scaled, which closes gaps, they may need no
        copy, and are then multiplied as they lie, with another rounding.
        """
        if self.left.dim() < 4 or self.left.is_contiguous():
            return scaled
        batch = [self.left_axes.index(axis) for axis in self.batch]
        if _are_one(self.left, batch) or not _are_one(scaled, batch):
            return scaled
        own = [axis for axis in self.output_axes if axis not in self.batch]
        # An einsum multiplies the operand whose axes come first in its output from the left.
        is_right = bool(own) and own[0] not in self.left_axes
        matrix = [axis for axis in self.left_axes if axis not in self.batch + self.summed]
        matrix = [self.summed, *matrix] if is_right else [*matrix, self.summed]
        order = [*batch, *map(self.left_axes.index, matrix)]
        back = [order.index(place) for place in range(len(order))]
        return scaled.permute(order).contiguous().permute(back)

    def tokens(self, axis: Axis, heads: int) -> tuple[Tensor, Tensor]:
        """Both operands, detached, as `[1, heads, tokens, d]`; one head where an operand has no axis of heads."""
        letter = self.left_axes[axis] if isinstance(axis, int) else None

        def arrange(tensor: Tensor, axes: str) -> Tensor:
            tensor = tensor.detach().movedim(axes.index(self.summed), -1)
            here = axes.replace(self.summed, "").find(letter) if letter else axis
            tensor, place = _apart(tensor, "single" if here == -1 else here, heads)
            return tensor.movedim(place, 0).flatten(1, -2)[None]

        return arrange(self.left, self.left_axes), arrange(self.right, self.right_axes)


def _are_one(tensor: Tensor, axes: Sequence[int]) -> bool:
    """True if some axes of a tensor can be viewed as one."""
    long = [axis for axis in axes if tensor.shape[axis] > 1]
    return all(tensor.stride(a) == tensor.shape[b] * tensor.stride(b) for a, b in itertools.pairwise(long))


def read(call: Call) -> Contraction | None:
    """The product that a call of a function in `PRODUCTS` computes; None if it cannot be a score matrix."""
    if call.name == "einsum":
        return _read_einsum(*call.args)
    if call.name == "baddbmm":
        return _read_baddbmm(*call.args, **call.kwargs)
    left, right = call.operands[:2]
    if min(left.dim(), right.dim()) < 2 or (left.dim() == 2) != (right.dim() == 2):
        return None
    options = {name: value for name, value in call.kwargs.items() if value is not left and value is not right}

    def run(x: Tensor) -> Tensor:
        product: Tensor = call.function(x, right, **options)
        return product

    batch = "abcdefgh"[: max(left.dim(), right.dim()) - 2]
    left_batch, right_batch = batch[len(batch) - left.dim() + 2 :], batch[len(batch) - right.dim() + 2 :]
    return Contraction(left, right, run, run, f"{left_batch}xz", f"{right_batch}zy", left_batch, f"{batch}xy", "z")


def _read_baddbmm(
    input: Tensor, batch1: Tensor, batch2: Tensor, *, beta: float = 1.0, alpha: float = 1.0, **options: Any
) -> Contraction:
    def run(x: Tensor) -> Tensor:
        return torch.baddbmm(input, x, batch2, beta=beta, alpha=alpha, **options)

    def alone(x: Tensor) -> Tensor:
        return torch.bmm(x, batch2)

    return Contraction(batch1, batch2, run, alone, "axz", "azy", "a", "axy", "z", alpha)


def _read_einsum(equation: str, *operands: Any) -> Contraction | None:
    if len(operands) == 1 and isinstance(operands[0], (list, tuple)):
        operands = tuple(operands[0])
    inputs, _, output = equation.replace(" ", "").partition("->")
    specs = inputs.split(",")
    if len(specs) != 2 or len(operands) != 2 or not all(isinstance(x, Tensor) for x in operands):
        return None
    dots = "ABCDEFGH"[: operands[0].dim() - len(specs[0].replace("...", ""))]
    left_axes, right_axes, output = (spec.replace("...", dots) for spec in (*specs, output))
    summed = set(left_axes) & set(right_axes) - set(output)
    rows, columns = set(left_axes) - set(right_axes), set(right_axes) - set(left_axes)
    if not output and "->" not in equation:
        letters = left_axes + right_axes
        output = "".join(sorted(x for x in set(letters) if letters.count(x) == 1))
    fits = all(len(axes) == x.dim() for axes, x in zip((left_axes, right_axes), operands, strict=True))
    # With keys of its own for each query, a query is not a row of a matrix: its axis is one more of the batch.
    per_query = left_axes[:-1] + "".join(columns) if not rows and len(columns) == 1 else None
    if len(summed) != 1 or not (rows or output == per_query) or not columns or not fits:
        return None
    left, right = operands

    def run(x: Tensor) -> Tensor:
        return torch.einsum(equation, x, right)

    batch = "".join(axis for axis in output if axis in left_axes and axis in right_axes)
    return Contraction(left, right, run, run, left_axes, right_axes, batch, output, summed.pop(), equation=equation)


def axis_by_size(sizes: Sequence[int], heads: int, known: Axis | None) -> Axis:
    """The axis of the heads among those before the last two, by their `sizes`; `known` goes before.

    Raises:
        UnknownHeadsError: none of them does.
    """
    if known is not None and len(sizes) > 1:
        return known
    fitting = [axis for axis, size in enumerate(sizes) if size == heads]
    if fitting:
        return 1 if 1 in fitting else fitting[-1]
    if len(sizes) == 1 and sizes[0] % heads == 0:
        return "flat"
    raise UnknownHeadsError(sizes, heads)


def _apart(tensor: Tensor, axis: Axis, heads: int) -> tuple[Tensor, int]:
    """A view in which the heads have an axis of their own, and that axis."""
    if axis == "flat":
        return tensor.unflatten(0, (-1, heads)), 1
    if axis == "heads first":
        return tensor.unflatten(0, (heads, -1)), 0
    return (tensor[None], 0) if axis == "single" else (tensor, axis)


def on_heads(tensor: Tensor, axis: Axis, heads: int, function: Callable[[Tensor, int], Tensor]) -> Tensor:
    """`function(tensor, axis)`, where heads without an axis of their own get one meanwhile."""
    output = function(*_apart(tensor, axis, heads))
    if axis == "single":
        return output.squeeze(0)  # the gradient keeps its layout in memory, which `output[0]` changes
    return output if isinstance(axis, int) else output.flatten(0, 1)


def batched(tensor: Tensor, axis: Axis, heads: int) -> Tensor:
    """`[..., n, x]` with its heads anywhere among the dots, as `[batch, heads, n, x]`."""
    apart, place = _apart(tensor, axis, heads)
    apart = apart.movedim(place, -3)
    return apart.flatten(0, -4) if apart.dim() > 3 else apart[None]
