"""The products of torch that can make a score matrix, read as `left [..., n, d]` times `right [..., m, d]`.

Also where their heads lie: along an axis of their own, mostly the second, or along one that they share with the batch.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from betahook.models.torch_calls import Call, axes_of


class Shared(NamedTuple):
    """An axis that heads share with the batch, or with tokens.

    Attributes:
        dim: the number of the axis.
        heads_first: all of the first head come before all of the second; else the heads of the first sequence before
            those of the second.
    """

    dim: int
    heads_first: bool = False


Axis = int | Shared | Literal["single"]
"""The axis of the heads: one of their own, or one that they share; a single head needs none."""


@dataclass(frozen=True)
class Contraction:
    """One product of two tensors, and how to run it again with another left operand.

    Attributes:
        left, right: the operands as they were given.
        run: the product, addend included, for a left operand of the same shape.
        left_axes, right_axes: a letter for each axis of an operand.
        batch: the letters of the axes that both have in common and keep, and one of which may be of heads.
        output_axes: a letter for each axis of the product.
        summed: the letter of the axis that is summed over, of size d.
        alpha: factor that the call itself puts on the product.
        biased: the call adds something to the product.
    """

    left: Tensor
    right: Tensor
    run: Callable[[Tensor], Tensor]
    left_axes: str
    right_axes: str
    batch: str
    output_axes: str
    summed: str
    alpha: float = 1.0
    biased: bool = False

    @property
    def size(self) -> int:
        """d, the number of terms of each sum."""
        return self.left.shape[self.components[0]]

    @property
    def components(self) -> tuple[int, int]:
        """The axis of either operand that is summed over."""
        return self.left_axes.index(self.summed), self.right_axes.index(self.summed)

    @property
    def has_batch(self) -> bool:
        """True if the left operand has an axis beside those of the product, where heads may lie."""
        return self.left.dim() > 2

    def alone(self, left: Tensor) -> Tensor:
        """A biased product for a left operand, without addend and factor."""
        return torch.bmm(left, self.right)

    def output_axis(self, axis: Axis) -> Axis | None:
        """The axis of the heads in the product, from that in `left`; None if it has none."""
        return _moved(axis, self.left_axes, self.output_axes)

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
        back = [order.index(dim) for dim in range(len(order))]
        return scaled.permute(order).contiguous().permute(back)

    def tokens(self, axis: Axis, heads: int) -> tuple[Tensor, Tensor]:
        """Both operands, detached, as `[1, heads, tokens, d]`; one head where an operand has no axis of heads."""

        def arrange(tensor: Tensor, axes: str) -> Tensor:
            tensor = tensor.detach().movedim(axes.index(self.summed), -1)
            here = _moved(axis, self.left_axes, axes.replace(self.summed, ""))
            if here is None or (isinstance(here, Shared) and tensor.shape[here.dim] == 1):  # the same for all heads
                here = "single"
            tensor, dim = _apart(tensor, here, heads)
            return tensor.movedim(dim, 0).flatten(1, -2)[None]

        return arrange(self.left, self.left_axes), arrange(self.right, self.right_axes)


def _are_one(tensor: Tensor, axes: Sequence[int]) -> bool:
    """True if some axes of a tensor can be viewed as one."""
    long = [axis for axis in axes if tensor.shape[axis] > 1]
    return all(tensor.stride(a) == tensor.shape[b] * tensor.stride(b) for a, b in itertools.pairwise(long))


def _moved(axis: Axis, before: str, after: str) -> Axis | None:
    """The axis of the heads among other letters; None if it is not there."""
    if axis == "single":
        return axis
    dim = after.find(before[axis.dim if isinstance(axis, Shared) else axis])
    if dim == -1:
        return None
    return axis._replace(dim=dim) if isinstance(axis, Shared) else dim


def read(call: Call) -> Contraction | None:
    """The product that a call of a function in `PRODUCTS` computes; None if it cannot be a score matrix."""
    if call.name == "baddbmm":
        return _read_baddbmm(*call.args, **call.kwargs)
    axes = axes_of(call)
    if axes is None:
        return None
    if call.name == "einsum":
        return _read_einsum(call, *axes)
    left, right = call.operands[:2]
    if (left.dim() == 2) != (right.dim() == 2):
        return None
    options = {name: value for name, value in call.kwargs.items() if value is not left and value is not right}
    left_axes, right_axes, output = axes
    letters = left_axes, right_axes, left_axes[:-2], output, "z"
    return Contraction(left, right, lambda x: call.function(x, right, **options), *letters)


def _read_baddbmm(
    input: Tensor, batch1: Tensor, batch2: Tensor, *, beta: float = 1.0, alpha: float = 1.0, **options: Any
) -> Contraction:
    options |= {"beta": beta, "alpha": alpha}
    letters = "axz", "azy", "a", "axy", "z"
    return Contraction(
        batch1, batch2, lambda x: torch.baddbmm(input, x, batch2, **options), *letters, alpha, biased=True
    )


def _read_einsum(call: Call, left_axes: str, right_axes: str, output: str) -> Contraction | None:
    equation, (left, right) = call.args[0], call.tensors
    summed = set(left_axes) & set(right_axes) - set(output)
    rows, columns = set(left_axes) - set(right_axes), set(right_axes) - set(left_axes)
    # With keys of its own for each query, a query is not a row of a matrix: its axis is one more of the batch.
    per_query = left_axes[:-1] + "".join(columns) if not rows and len(columns) == 1 else None
    if len(summed) != 1 or not (rows or output == per_query) or not columns:
        return None
    batch = "".join(axis for axis in output if axis in left_axes and axis in right_axes)
    letters = left_axes, right_axes, batch, output, summed.pop()
    return Contraction(left, right, lambda x: torch.einsum(equation, x, right), *letters)


def _apart(tensor: Tensor, axis: Axis, heads: int) -> tuple[Tensor, int]:
    """A view in which the heads have an axis of their own, and that axis."""
    if axis == "single":
        return tensor[None], 0
    if not isinstance(axis, Shared):
        return tensor, axis
    if axis.heads_first:
        return tensor.unflatten(axis.dim, (heads, -1)), axis.dim
    return tensor.unflatten(axis.dim, (-1, heads)), axis.dim + 1


def misfit(sizes: Sequence[int], heads: int) -> str:
    """Say that none of the axes before the last two, of these `sizes`, can be that of the heads."""
    return f"expected an axis of {heads} heads before the last two, got axes of {list(sizes)}"


def on_heads(tensor: Tensor, axis: Axis, heads: int, function: Callable[[Tensor, int], Tensor]) -> Tensor:
    """`function(tensor, axis)`, where heads without an axis of their own get one meanwhile."""
    output = function(*_apart(tensor, axis, heads))
    if axis == "single":
        return output.squeeze(0)  # the gradient keeps its layout in memory, which `output[0]` changes
    return output.flatten(axis.dim, axis.dim + 1) if isinstance(axis, Shared) else output


def along(numbers: Tensor, axis: Axis, tensor: Tensor) -> Tensor:
    """Numbers `[heads]`, in a shape that broadcasts to a tensor whose heads lie along an axis."""
    if axis == "single":
        return numbers
    dim = axis
    if isinstance(axis, Shared):
        dim, others = axis.dim, tensor.shape[axis.dim] // len(numbers)
        numbers = numbers.repeat_interleave(others) if axis.heads_first else numbers.repeat(others)
    return numbers.view([-1 if each == dim else 1 for each in range(tensor.dim())])


def broadcast(query: Tensor, key: Tensor, axis: Axis) -> tuple[Tensor, Tensor, Axis]:
    """q and k with all axes of both but those of heads, which may be shared, and the axis of the heads in them."""
    if query.shape[:-2] == key.shape[:-2]:
        return query, key, axis
    dims = max(query.dim(), key.dim())
    if not isinstance(axis, str):
        further = dims - query.dim()
        axis = axis._replace(dim=axis.dim + further) if isinstance(axis, Shared) else axis + further
    query, key = (x[(None,) * (dims - x.dim())] for x in (query, key))
    pairs = enumerate(zip(query.shape[:-2], key.shape[:-2], strict=True))
    kept = axis.dim if isinstance(axis, Shared) else axis
    sizes = [-1 if dim == kept else one if other == 1 else other for dim, (one, other) in pairs]
    return query.expand(*sizes, -1, -1), key.expand(*sizes, -1, -1), axis


def batched(tensor: Tensor, axis: Axis, heads: int) -> Tensor:
    """`[..., n, x]` with its heads anywhere among the dots, as `[batch, heads, n, x]`."""
    apart, dim = _apart(tensor, axis, heads)
    apart = apart.movedim(dim, -3)
    return apart.flatten(0, -4) if apart.dim() > 3 else apart[None]
