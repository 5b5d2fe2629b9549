"""Traces of the tensors in an attention written by hand: one type each for operands, scores, row shifts and weights.

A trace is what is known about a tensor, e.g. that it holds scores, and by which factor they were scaled. `Traces` holds
those of one forward. Handlers derive the traces of a function's results, and `matrices`, `softmaxes` and `following`
store them. Nothing here runs a function of the model.
"""

from __future__ import annotations

from collections.abc import Callable
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
    """An activation, such as q or k, that was multiplied as a whole by a known factor.

    Attributes:
        factor: the factor.
        learned: True for a parameter or a tensor computed from parameters alone, see `is_learned`.
        from_values: True if it was computed from weighted values, the product of attention weights and values.
        unread_product: name and line of an unrecognised product of activations, not traced as scores, from which the
            tensor was computed; None for none.
    """

    factor: Factor = 1.0
    learned: bool = False
    from_values: bool = False
    unread_product: str | None = None


@dataclass(eq=False)
class LogSoftmax:
    """A log_softmax of scores. They are recorded when the forward ends, unless they reach another softmax.

    Attributes:
        record: records the scores; None if there is nothing to record here.
    """

    record: Callable[[], None] | None = None


class Scores(NamedTuple):
    """Scores between their product and the softmax: a tensor `factor * value + bias` with `value = prescale * q.k`.

    For example, `(0.5 * q) @ k.mT * 0.25 + bias` has the prescale 0.5 and the factor 0.25.

    Attributes:
        factor: the factor applied since the product.
        value: the scores in their present layout, gain included, no masks or biases; None if lost or not recorded.
        allowed: boolean, of the shape of `value`, True for pairs that are not masked; None if all are allowed.
        prescale: the factor that q and k carried into the product.
        operands: q and k of the product without that factor; those of one product if there are several.
        products: the products that were summed or joined into these scores, in order.
        axis: the axis of the heads as a negative index; None if it is unknown or heads have none of their own.
        unbiased: True unless a bias or mask was added, or a non-linear function applied; masks that replace entries and
            shifts of rows do not count.
        linear: True if nothing but factors, masks and biases was applied.
        shifted: True if each row, along the last axis, was shifted by a number of its own, which cancels in a softmax.
        scaling_sites: the sites of the scalings that were applied.
        log_softmaxes: those that the scores passed; after one, they are followed in case they reach another softmax,
            and count as weights otherwise.
        lost: the first operation that could not be followed; None for none.
    """

    factor: Factor = 1.0
    value: Tensor | None = None
    allowed: Tensor | None = None
    prescale: Factor = 1.0
    operands: tuple[Tensor, Tensor] | None = None
    products: tuple[Product, ...] = ()
    axis: int | None = None
    unbiased: bool = True
    linear: bool = True
    shifted: bool = False
    scaling_sites: frozenset[Site] = frozenset()
    log_softmaxes: tuple[LogSoftmax, ...] = ()
    lost: str | None = None

    @property
    def is_learned(self) -> bool:
        """True if the left operand of every product is learned, see `is_learned`."""
        return all(product.learned for product in self.products)

    @property
    def pairs(self) -> Tensor:
        """Boolean, True for pairs that are not masked, of the shape of `value`, which must be known."""
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
        """The same scores with further pairs masked: those that are True in `masked`, which broadcasts to them."""
        if self.value is None or masked is None:
            return self
        shape = torch.broadcast_shapes(self.value.shape, masked.shape)
        allowed = ~masked if self.allowed is None else self.allowed & ~masked
        return self._replace(value=self.value.expand(shape), allowed=allowed.expand(shape))

    def losing(self, operation: str) -> Scores:
        """The same scores, marked as lost at an operation that cannot be followed, as are their products."""
        for product in self.products:
            product.lost = product.lost or operation
        return self._replace(value=None, allowed=None, lost=self.lost or operation)


@dataclass(frozen=True)
class Shift:
    """A number computed from scores, for each row or for all, such as a maximum: subtracted, it cancels in softmax."""


class Weights(NamedTuple):
    """Attention weights, the output of a softmax, or a tensor computed from them; never q or k.

    Attributes:
        projected: True if they come from a product of weights with a parameter or with other weights, which may in fact
            have been a product with values.
        before: the trace of the scores that they overwrote, perhaps in part, as in `x[i] = x[i].softmax(-1)`: other
            slices may still reach a softmax.
    """

    projected: bool = False
    before: Scores | None = None


Trace = Operand | Scores | Shift | Weights
Derived = Trace | list[Trace] | None
"""One trace for all tensors that a function returns, a list with one for each, or None if they have no trace."""


class Exponential(NamedTuple):
    """The exponentials of logits.

    Attributes:
        scores: the trace of the logits.
        logits: the logits.
    """

    scores: Scores
    logits: Tensor


class Traces(ByTensor[Trace]):
    """The traces by tensor. Scores are lost when a tensor that shares their memory is changed in place.

    Attributes:
        exponentials: for each result of `exp` on scores, the logits and their trace.
        row_sums: for each sum of exponentials over the last axis, with `keepdim`, these exponentials.
        log_softmaxes: those whose scores are recorded when the forward ends, unless they reach another softmax.
    """

    def __init__(self) -> None:
        super().__init__()
        self.exponentials = ByTensor[Exponential]()
        self.row_sums = ByTensor[Tensor]()
        self.log_softmaxes: list[LogSoftmax] = []
        # For scores that were lost when a view of them was changed: that view, and their trace before.
        self._before = ByTensor[tuple[Tensor, Scores]]()

    def note(self, output: Any, derived: Derived) -> None:
        """Store the traces of what a function returned; scores that are lost after a log_softmax become weights."""
        parts = tensors_in(output)
        if self.exponentials.ids or self.row_sums.ids:  # seldom
            for part in parts:
                self._forget_parts(part)
        if derived is None:
            return
        if not isinstance(derived, list):
            parts = [part for part in parts if part.is_floating_point() or part.is_complex()]
        traces = derived if isinstance(derived, list) else [derived] * len(parts)
        for part, trace in zip(parts, traces, strict=True):
            if isinstance(trace, Scores):
                trace = Weights() if trace.lost and trace.log_softmaxes else trace.expanded(part.shape)
            self[part] = trace

    def changed(self, tensor: Any) -> None:
        """Mark scores as lost that share memory with a tensor that was changed in place."""
        # Under a transform tensors have no storage to compare, and no layer is left alone for what happens there.
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
                self.note(other, of_other.losing(f"an in-place operation on a view of them at {find_line()}"))
        if isinstance(trace, Scores) and base not in self:
            self.note(base, trace.losing(f"an in-place operation on a view at {find_line()}"))

    def record_log_softmaxes(self) -> None:
        """Record the scores of log_softmaxes that reached no other softmax."""
        for log_softmax in self.log_softmaxes:
            if log_softmax.record is not None:
                log_softmax.record()
        self.log_softmaxes.clear()  # they would keep the scores

    def release(self) -> None:
        """Drop references that would otherwise keep tensors alive until the backward pass."""
        self.exponentials.clear()
        self.row_sums.clear()

    def _forget_parts(self, tensor: Tensor) -> None:
        """Forget that a tensor, whose contents are new, was part of a softmax written out with `exp`."""
        self.exponentials.pop(tensor)
        self.row_sums.pop(tensor)

    def before_change(self, tensor: Tensor, view: Tensor) -> Scores | None:
        """Return the trace of scores before they were lost by a change of this view; None if it did not lose them."""
        found = self._before.get(tensor)
        return found[1] if found is not None and found[0] is view else None


def are_weights(trace: Trace | None) -> bool:
    """Return True for attention weights and for their logarithms, which a log_softmax returned."""
    return isinstance(trace, Weights) or (isinstance(trace, Scores) and bool(trace.log_softmaxes))


def is_learned(tensor: Any, trace: Trace | None) -> bool:
    """Return True for a parameter, a view of one, or a tensor computed from parameters alone."""
    return isinstance(tensor, nn.Parameter) or (isinstance(trace, Operand) and trace.learned)
