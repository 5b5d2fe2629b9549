"""Traces of the tensors in an attention written by hand: a type each for operands, scores and weights.

`Traces` holds those of one forward. `handlers` says what a function makes of a traced tensor; the functions of
`matrices`, `softmaxes` and `following` write it down. Nothing here runs a function of the model.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from betahook import compat
from betahook.models.by_tensor import ByTensor
from betahook.models.torch_calls import tensors_in
from betahook.tap.by_hand.factors import Factor
from betahook.tap.by_hand.products import Product
from betahook.tap.by_hand.sites import Site, find_line


class Operand(NamedTuple):
    """An activation that carries a factor as a whole.

    Attributes:
        factor: the factor.
        learned: the tensor is a parameter, see `is_learned`.
        mixed: weighted values went into it.
        unread: a product of activations in it that is not understood, and so no scores; None for none.
    """

    factor: Factor = 1.0
    learned: bool = False
    mixed: bool = False
    unread: str | None = None


class Scores(NamedTuple):
    """Scores on their way to the softmax: a tensor equal to `factor * value + bias` with `value = prescale * q . k`.

    Attributes:
        factor: the factor put on the product since.
        value: the scores in the layout that they have by now, without masks and biases; None where nobody asks.
        allowed: boolean, the pairs that are not masked, of the shape of `value`; None for all.
        prescale: the factors that the operands of the product carried.
        operands: q and k of the product without these factors, of the first of several.
        products: the products that were summed or put together, in order.
        axis: the axis of the heads, counted from the last; None if it is not known or there is none.
        pure: nothing was added but masks.
        linear: nothing but factors, masks and biases came upon them.
        shifted: rows, along the last axis, were shifted by a number of their own, which the softmax does not see.
        scaled: the sites of the scalings that it went through.
        lost: the operation after which they are no scores any more, None for none.
    """

    factor: Factor = 1.0
    value: Tensor | None = None
    allowed: Tensor | None = None
    prescale: Factor = 1.0
    operands: tuple[Tensor, Tensor] | None = None
    products: tuple[Product, ...] = ()
    axis: int | None = None
    pure: bool = True
    linear: bool = True
    shifted: bool = False
    scaled: frozenset[Site] = frozenset()
    lost: str | None = None

    @property
    def is_learned(self) -> bool:
        """True if the left operand of every product is a parameter, see `is_learned`."""
        return all(product.learned for product in self.products)

    @property
    def pairs(self) -> Tensor:
        """The pairs that are not masked, boolean, of the shape of `value`, which must be known."""
        assert self.value is not None
        return torch.ones_like(self.value, dtype=torch.bool) if self.allowed is None else self.allowed

    def folded(self) -> Scores:
        """The same scores with the factor moved into the value."""
        value = None if self.value is None else self.value * self.factor
        return self._replace(factor=1.0, value=value, prescale=self.prescale * self.factor)

    def expanded(self, shape: torch.Size) -> Scores:
        """The same scores broadcast to a shape."""
        if self.value is None or self.value.shape == shape:
            return self
        allowed = None if self.allowed is None else self.allowed.expand(shape)
        return self._replace(value=self.value.expand(shape), allowed=allowed)

    def without(self, masked: Tensor | None) -> Scores:
        """The same scores without the pairs that are True in a mask, which broadcasts to them."""
        if self.value is None or masked is None:
            return self
        shape = torch.broadcast_shapes(self.value.shape, masked.shape)
        allowed = ~masked if self.allowed is None else self.allowed & ~masked
        return self._replace(value=self.value.expand(shape), allowed=allowed.expand(shape))

    def losing(self, operation: str) -> Scores:
        """The same scores after an operation that makes something else of them."""
        for product in self.products:
            product.lost = product.lost or operation
        return self._replace(value=None, allowed=None, lost=self.lost or operation)


@dataclass(frozen=True)
class Shift:
    """A number made of scores for each row or all, as the largest: a softmax does not see it taken off its row."""


class Weights(NamedTuple):
    """Attention weights, the output of a softmax, and whatever was made of them; never q or k.

    Attributes:
        projected: a product with a parameter or other weights made them, which might have been one with values.
        before: the scores over which they were written, perhaps in part: a slice may still have to come to its softmax.
    """

    projected: bool = False
    before: Scores | None = None


Trace = Operand | Scores | Shift | Weights
Derived = Trace | list[Trace] | None
"""The trace of all that a function returns, of each of its parts, or of nothing."""


class Exponential(NamedTuple):
    """The exponentials of logits.

    Attributes:
        scores: the trace of the logits.
        logits: the logits.
    """

    scores: Scores
    logits: Tensor


class Traces(ByTensor[Trace]):
    """Traces by tensor. Scores are lost where the memory that they share with others is changed.

    Attributes:
        exponentials: those of logits that were not changed since, by tensor.
        row_sums: their sums over the last axis, which they keep, to the exponentials.
    """

    def __init__(self) -> None:
        super().__init__()
        self.exponentials = ByTensor[Exponential]()
        self.row_sums = ByTensor[Tensor]()
        # The view whose change lost scores, and their trace until then.
        self._before = ByTensor[tuple[Tensor, Scores]]()

    def note(self, output: Any, derived: Derived) -> None:
        """Remember the traces of what a function returned."""
        parts = tensors_in(output)
        for part in parts:
            self._forget_parts(part)
        if derived is None:
            return
        if not isinstance(derived, list):
            parts = [part for part in parts if part.is_floating_point() or part.is_complex()]
        traces = derived if isinstance(derived, list) else [derived] * len(parts)
        for part, trace in zip(parts, traces, strict=True):
            self[part] = trace.expanded(part.shape) if isinstance(trace, Scores) else trace

    def changed(self, tensor: Any) -> None:
        """Lose the scores that share the memory of a tensor that was changed in place."""
        # Tensors of a transform show no memory, and no layer is left alone for what happens there.
        if compat.is_transformed() or not isinstance(tensor, Tensor):
            return
        trace, base = self.get(tensor), compat.base_of(tensor)
        if not isinstance(trace, Scores) and base is tensor:
            return
        memory = tensor.untyped_storage().data_ptr()
        for other, of_other in self.items():
            if other is tensor or other.untyped_storage().data_ptr() != memory:
                continue
            self._forget_parts(other)
            if isinstance(of_other, Scores):
                if of_other.lost is None:
                    self._before[other] = tensor, of_other
                self[other] = of_other.losing(f"an in-place operation on a view of them at {find_line()}")
        if isinstance(trace, Scores) and base not in self:
            self[base] = trace.losing(f"an in-place operation on a view at {find_line()}")

    def release(self) -> None:
        """Let go of the tensors that live as long as others do, which may be until the backward."""
        self.exponentials.clear()
        self.row_sums.clear()

    def _forget_parts(self, tensor: Tensor) -> None:
        """Forget that a tensor, which is another one now, may be a part of a softmax that is written out."""
        if self.exponentials.ids or self.row_sums.ids:
            self.exponentials.pop(tensor)
            self.row_sums.pop(tensor)

    def before_change(self, tensor: Tensor, view: Tensor) -> Scores | None:
        """Look up the trace of scores before a change of this view of them."""
        found = self._before.get(tensor)
        return found[1] if found is not None and found[0] is view else None


def is_learned(tensor: Any, trace: Trace | None) -> bool:
    """Return True for a parameter, a view of one, or what was made of parameters alone."""
    return isinstance(tensor, nn.Parameter) or (isinstance(trace, Operand) and trace.learned)
