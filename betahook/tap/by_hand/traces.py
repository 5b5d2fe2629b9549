"""Traces of the tensors in an attention written by hand: a type each for operands, scores and weights.

`Traces` holds those of one forward. `handlers` says what a function makes of a traced tensor; the functions of
`matrices`, `softmaxes` and `following` write it down. Nothing here runs a function of the model.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from numbers import Real
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from betahook import compat
from betahook.models.by_tensor import ByTensor
from betahook.models.labels import MadeOf
from betahook.models.torch_calls import tensors_in
from betahook.tap.by_hand.sites import Site, find_line

Factor = float | Tensor
"""A number, a 0-dim tensor, or one that broadcasts over heads."""


@dataclass(eq=False)
class History:
    """Facts on the products at one site that forwards have shown; each is None before one has.

    Attributes:
        makes_scores: True if they reach a softmax.
        since: the step in which one was first seen to.
        leader: the site of the first product before the same softmax, whose scale is the model's own beta.
        scalings: the factors that followed, see `Product.scalings`.
        way: see `Product.way`.
        key_factor: the factor that a key carried in the last forward in which that showed.
        key_first: the left operand is k, not q.
    """

    makes_scores: bool | None = None
    since: int | None = None
    leader: Site | None = None
    scalings: list[Factor] | None = None
    way: Factor | None = None
    key_factor: Factor | None = None
    key_first: bool | None = None

    def is_settled(self, step: int) -> bool:
        """Tell if steps before this one have shown that a product makes scores.

        Not in the same step: gradient checkpointing runs a forward again in its backward, when more is known, and what
        is then kept for the backward must be the same.
        """
        return self.since is not None and self.since < step


@dataclass(eq=False)
class Product:
    """One product of two activations in one forward, which makes scores if it reaches a softmax.

    Attributes:
        site: where the user's code calls it.
        history: of the products there.
        assured: both operands are activations that no weighted value went into, so that a lost trace is a lost score.
        makers: earlier products in whose results this one's operands lie.
        acts: its left operand gets the factor of beta.
        settled: steps before this one have shown that it makes scores.
        acting: that factor, `beta / beta_default`, `[heads]`; ones where it does not act, None where it cannot.
        scalings: the factors put on the product since, multiplied up: one entry after each scaling.
        prescale: the factor that its operands carry.
        way: the factor put on it on the way to its softmax, where it is scaled on other ways too; None elsewhere.
        reached: it came to a softmax.
        consumed: it made an operand of a product that did.
        lost: the operation after which nothing more is known, None for none.
        counts: its gradient is a part of the sensitivity.
        index: its number among the products of the forward.
        default: the model's own beta by which it is scaled; None for that of the last forward.
        made_of: the features that its operands are made of, see `head_axes.made_of`.
    """

    site: Site
    history: History
    assured: bool
    makers: tuple[Product, ...] = ()
    acts: bool = True
    settled: bool = False
    acting: Tensor | None = None
    scalings: list[Factor] = field(default_factory=list)
    prescale: Factor = 1.0
    way: Factor | None = None
    reached: bool = False
    consumed: bool = False
    lost: str | None = None
    counts: bool = False
    index: int = 0
    default: Factor | None = None
    made_of: MadeOf | None = None

    @property
    def after(self) -> Factor | None:
        """The factor that further scalings put on it up to its softmax in the last forward; None if none was."""
        scalings = self.history.scalings
        if scalings is None:
            return None
        if self.history.way is not None:
            return self.history.way / math.prod(self.scalings, start=1.0)
        return math.prod(scalings[len(self.scalings) :], start=1.0)

    @property
    def expected(self) -> Factor | None:
        """The scaling that came next upon it in the last forward; None if there was none."""
        scalings = self.history.scalings or []
        return scalings[len(self.scalings)] if len(self.scalings) < len(scalings) else None

    def learn(self, step: int) -> str | None:
        """Remember it when its forward has ended; return why the module is to be left alone, or None."""
        history = self.history
        if self.lost is not None and self.assured and not (self.reached or self.consumed):
            return f"its scores come to {self.lost}, which is not followed"
        if history.makes_scores not in (None, self.reached):
            return f"the product at {self.site.line} reaches a softmax at times and at times it does not"
        history.makes_scores = self.reached
        if self.reached:
            if not any(map(is_zero, self.scalings)):
                history.scalings = self.scalings
            if self.way is not None:
                history.way = self.way
            if history.since is None:
                history.since = step
        return None

    def reach(self) -> None:
        """Note that the product came to a softmax."""
        self.reached = True
        for maker in self.makers:
            maker.consumed = True


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
    lost: str | None = None

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
        parts = list(tensors_in(output))
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
        self.exponentials.pop(tensor)
        self.row_sums.pop(tensor)

    def before_change(self, tensor: Tensor, view: Tensor) -> Scores | None:
        """Look up the trace of scores before a change of this view of them."""
        found = self._before.get(tensor)
        return found[1] if found is not None and found[0] is view else None


def same_factor(a: Factor, b: Factor) -> bool:
    """Return True if two factors are known to be equal, without reading a tensor."""
    return a is b or (not isinstance(a, Tensor) and not isinstance(b, Tensor) and a == b)


def is_zero(factor: Factor) -> bool:
    """Return True for the number 0, as the log of a single token: all keys count alike then, whatever beta is."""
    return not isinstance(factor, Tensor) and factor == 0


def is_learned(tensor: Any, trace: Trace | None) -> bool:
    """Return True for a parameter, a view of one, or what was made of parameters alone."""
    return isinstance(tensor, nn.Parameter) or (isinstance(trace, Operand) and trace.learned)


def number(factor: Any) -> Factor | None:
    """The factor as a number or 0-dim tensor, None if it is neither a number nor a tensor of one element."""
    if isinstance(factor, Tensor):
        if factor.numel() != 1:
            return None
        alone = factor.detach().reshape(())
        return float(alone) if factor.device.type == "cpu" and not factor.requires_grad else alone
    return float(factor) if isinstance(factor, Real) else None  # one of numpy would not multiply a tensor


def divided(tensor: Tensor, factor: Factor) -> Tensor:
    """`tensor / factor`, without a copy where that is the tensor itself."""
    return tensor if isinstance(factor, float) and factor == 1 else tensor / factor
