"""Torch's products that can make a score matrix, read as contractions of `left [..., n, d]` with `right [..., m, d]`.

Also the position of the heads: an axis of their own, usually the second, or one that they share with the batch. Pure
functions of calls and tensors, used by `matrices`, `softmaxes` and `head_axes`.
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
        heads_first: True if the axis is `(heads, batch)` flattened, False if it is `(batch, heads)` flattened.
    """

    dim: int
    heads_first: bool = False


Axis = int | Shared | Literal["single"]
"""The axis of the heads: the number of their own axis, or a shared one; a single head needs none."""


@dataclass(frozen=True)
class Contraction:
    """One product of two tensors, and how to run it again with another left operand.

    Attributes:
        left, right: the operands as they were given.
        run: computes the product, addend included, for another left operand of the same shape.
        left_axes, right_axes: a letter for each axis of an operand.
        batch: the letters of the batch axes; one of them may be that of the heads.
        output_axes: a letter for each axis of the product.
        summed: the letter of the axis that is summed over, of size d.
        alpha: the factor by which the call itself multiplies the product.
        biased: True if the call adds something to the product.
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
        """The axes of the left and the right operand that are summed over."""
        return self.left_axes.index(self.summed), self.right_axes.index(self.summed)

    @property
    def has_batch(self) -> bool:
        """True if the left operand has more axes than a matrix, one of which may be that of the heads."""
        return self.left.dim() > 2

    def alone(self, left: Tensor) -> Tensor:
        """Compute a biased product for a left operand, without its addend and factor."""
        return torch.bmm(left, self.right)

    def output_axis(self, axis: Axis) -> Axis | None:
        """Return the axis of the heads in the product, given that in `left`; None if the product has none."""
        return _moved(axis, self.left_axes, self.output_axes)

    def laid_out(self, scaled: Tensor) -> Tensor:
        """Return the scaled left operand in the memory layout in which the product multiplies the unscaled one.

        Torch copies an operand if its batch axes cannot be viewed as one. Scaling closes gaps in memory, so the scaled
        operand may need no copy, and would be multiplied in a different layout, with different rounding.
        """
        if self.left.dim() < 4 or self.left.is_contiguous():
            return scaled
        batch = [self.left_axes.index(axis) for axis in self.batch]
        if _are_one(self.left, batch) or not _are_one(scaled, batch):
            return scaled
        own = [axis for axis in self.output_axes if axis not in self.batch]
        # An einsum multiplies from the left with the operand whose axes come first in its output.
        is_right = bool(own) and own[0] not in self.left_axes
        matrix = [axis for axis in self.left_axes if axis not in self.batch + self.summed]
        matrix = [self.summed, *matrix] if is_right else [*matrix, self.summed]
        order = [*batch, *map(self.left_axes.index, matrix)]
        back = [order.index(dim) for dim in range(len(order))]
        return scaled.permute(order).contiguous().permute(back)

    def tokens(self, axis: Axis, heads: int) -> tuple[Tensor, Tensor]:
        """Return both operands, detached, as `[1, heads, tokens, d]`; one without an axis of heads has one head."""

        def arrange(tensor: Tensor, axes: str) -> Tensor:
            tensor = tensor.detach().movedim(axes.index(self.summed), -1)
            here = _moved(axis, self.left_axes, axes.replace(self.summed, ""))
            if here is None or (isinstance(here, Shared) and tensor.shape[here.dim] == 1):  # the same for all heads
                here = "single"
            tensor, dim = _split_heads(tensor, here, heads)
            return tensor.movedim(dim, 0).flatten(1, -2)[None]

        return arrange(self.left, self.left_axes), arrange(self.right, self.right_axes)


def _are_one(tensor: Tensor, axes: Sequence[int]) -> bool:
    """Return True if these axes of a tensor can be viewed as one."""
    long = [axis for axis in axes if tensor.shape[axis] > 1]
    return all(tensor.stride(a) == tensor.shape[b] * tensor.stride(b) for a, b in itertools.pairwise(long))


def _moved(axis: Axis, before: str, after: str) -> Axis | None:
    """Return the axis of the heads, given by the letters `before`, among those of `after`; None if it is not there."""
    if axis == "single":
        return axis
    dim = after.find(before[axis.dim if isinstance(axis, Shared) else axis])
    if dim == -1:
        return None
    return axis._replace(dim=dim) if isinstance(axis, Shared) else dim


def read(call: Call) -> Contraction | None:
    """Read the product that a call of a function in `PRODUCTS` computes; None if it cannot be a score matrix."""
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
    # If each query has keys of its own, queries are not the rows of a matrix: theirs is one more batch axis.
    per_query = left_axes[:-1] + "".join(columns) if not rows and len(columns) == 1 else None
    if len(summed) != 1 or not (rows or output == per_query) or not columns:
        return None
    batch = "".join(axis for axis in output if axis in left_axes and axis in right_axes)
    letters = left_axes, right_axes, batch, output, summed.pop()
    return Contraction(left, right, lambda x: torch.einsum(equation, x, right), *letters)


def _split_heads(tensor: Tensor, axis: Axis, heads: int) -> tuple[Tensor, int]:
    """Return a view in which the heads have an axis of their own, and that axis."""
    if axis == "single":
        return tensor[None], 0
    if not isinstance(axis, Shared):
        return tensor, axis
    if axis.heads_first:
        return tensor.unflatten(axis.dim, (heads, -1)), axis.dim
    return tensor.unflatten(axis.dim, (-1, heads)), axis.dim + 1


def misfit(sizes: Sequence[int], heads: int) -> str:
    """Return the message that none of the axes before the last two, of these `sizes`, can be that of the heads."""
    return f"expected an axis of {heads} heads before the last two, got axes of {list(sizes)}"


def on_heads(tensor: Tensor, axis: Axis, heads: int, function: Callable[[Tensor, int], Tensor]) -> Tensor:
    """Apply `function(tensor, axis)` to a view in which the heads have an axis of their own, and undo the view."""
    output = function(*_split_heads(tensor, axis, heads))
    if axis == "single":
        return output.squeeze(0)  # `output[0]` would change the memory layout of the gradient
    return output.flatten(axis.dim, axis.dim + 1) if isinstance(axis, Shared) else output


def align_with_heads(numbers: Tensor, axis: Axis, tensor: Tensor) -> Tensor:
    """Reshape numbers `[heads]` to broadcast to a tensor whose heads lie along `axis`."""
    if axis == "single":
        return numbers
    dim = axis
    if isinstance(axis, Shared):
        dim, others = axis.dim, tensor.shape[axis.dim] // len(numbers)
        numbers = numbers.repeat_interleave(others) if axis.heads_first else numbers.repeat(others)
    return numbers.view([-1 if each == dim else 1 for each in range(tensor.dim())])


def broadcast(query: Tensor, key: Tensor, axis: Axis) -> tuple[Tensor, Tensor, Axis]:
    """Broadcast q and k over all batch axes but that of the heads, of which k may have fewer; return that axis too."""
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
    """Rearrange `[..., n, x]`, with the heads along any of the leading axes, to `[batch, heads, n, x]`."""
    split, dim = _split_heads(tensor, axis, heads)
    split = split.movedim(dim, -3)
    return split.flatten(0, -4) if split.dim() > 3 else split[None]
