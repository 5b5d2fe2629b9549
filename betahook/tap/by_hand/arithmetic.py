"""Handlers of factors, sums and biases, see `handlers`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from betahook.measure.masks import masked_by
from betahook.tap.by_hand.factors import Factor, number, same_factor
from betahook.tap.by_hand.situation import Situation, other, unless_unread, unread_in
from betahook.tap.by_hand.traces import Derived, Operand, Scores, Shift, Trace, Weights


def multiply(situation: Situation) -> Derived:
    """Follow a factor, or a rotation or mask."""
    return _scale(situation, *situation.call.operands[:2], divide=False)


def divide(situation: Situation) -> Derived:
    """Follow the inverse of a factor."""
    return _scale(situation, *situation.call.operands[:2], divide=True)


def _scale(situation: Situation, left: Any, right: Any, *, divide: bool) -> Derived:
    first, second = _activation(situation, left), _activation(situation, right)
    if not divide and first is None and (second is not None or number(left) is not None):
        (left, first), (right, second) = (right, second), (left, first)
    if second is not None or isinstance(first, Shift | Weights):
        return other(situation)
    factor = number(right)
    if isinstance(right, Tensor) and right.dim() > 0 and not isinstance(first, Scores):
        # Of a single query or sample, a factor of each looks like a number.
        factor = factor if situation.always(factor is not None and not _may_be_by_sample(situation, right)) else None
    # One number times another is a number still: it is read where it meets an activation.
    if first is None and (factor is None or number(left) is not None):
        return None
    if isinstance(first, Scores):
        if first.axis is None and factor is None and _may_be_by_head(right):
            first = first._replace(axis=situation.axis_of(left))
        return _scale_scores(situation, first, right, factor, divide=divide)
    trace = Operand() if first is None else first
    if factor is None or not isinstance(trace, Operand):
        return trace  # a rotation, say; it is linear, and what it does to the spread belongs to the operand
    return trace._replace(factor=trace.factor / factor if divide else trace.factor * factor, learned=False)


def _activation(situation: Situation, tensor: Any) -> Trace | None:
    """Look up the trace of a tensor; a parameter or a view of one is a factor like any other."""
    trace = situation.trace_of(tensor)
    return None if isinstance(trace, Operand) and trace.learned else trace


def _scale_scores(situation: Situation, scores: Scores, by: Any, factor: Factor | None, *, divide: bool) -> Derived:
    if factor is None and _may_be_by_head(by) and _is_by_head(by, scores.axis):
        factor = by.detach()
    if isinstance(by, Tensor):
        is_beta = situation.at_first(factor is not None and not _may_be_by_sample(situation, by))
        if is_beta and factor is None:
            return situation.lose(scores, "by a factor that was one number before, or one for each head,")
        factor = factor if is_beta else None
    if factor is not None:
        return scores._replace(factor=scores.factor / factor if divide else scores.factor * factor)
    if not isinstance(by, Tensor):
        return scores  # a mask
    if by.requires_grad and not scores.pure:
        return situation.lose(scores, "by a tensor, behind a bias,")
    if scores.value is None:
        return scores
    value = scores.value / by if divide else scores.value * by
    return scores.expanded(value.shape)._replace(value=value)


def _may_be_by_sample(situation: Situation, factor: Tensor) -> bool:
    """Return True for a factor that is one of each sample, or query, as far as a batch of one shows."""
    return factor.dim() > 1 and situation.is_activation(factor)


def _may_be_by_head(factor: Any) -> bool:
    return isinstance(factor, Tensor) and factor.shape[-2:] == (1, 1)


def _is_by_head(factor: Tensor, axis: int | None) -> bool:
    """Return True for a number for each head; any other factor is a part of the scores."""
    return axis is not None and factor.dim() >= -axis and factor.shape[axis] == factor.numel()


def negate(situation: Situation) -> Derived:
    """Follow a change of sign; that of an operand, as in a rotation, is a part of it."""
    trace = situation.first_trace
    if isinstance(trace, Scores):
        return trace._replace(factor=-trace.factor)
    return trace if isinstance(trace, Operand) else other(situation)


def add(situation: Situation) -> Derived:
    """Follow a bias, a shift of rows, or the sum of several scores."""
    return _sum(situation, situation.call.kwargs.get("alpha", 1), *situation.call.operands[:2])


def subtract(situation: Situation) -> Derived:
    """Follow the difference of scores, from a bias or from the other side."""
    return _sum(situation, -situation.call.kwargs.get("alpha", 1), *situation.call.operands[:2])


def subtract_from(situation: Situation) -> Derived:
    """Follow `__rsub__` and `rsub`, which take their first operand from the second."""
    return _sum(situation, -situation.call.kwargs.get("alpha", 1), *situation.call.operands[1::-1])


def _sum(situation: Situation, sign: float, left: Any, right: Any) -> Derived:
    """Follow `left + sign * right`."""
    first, second = situation.trace_of(left), situation.trace_of(right)
    if isinstance(first, Weights) or isinstance(second, Weights):
        return other(situation)
    if isinstance(first, Scores) and isinstance(second, Scores) and first.is_learned == second.is_learned:
        return _sum_of_scores((left, first), (right, second._replace(factor=second.factor * sign)))
    # Beside others, what a parameter makes from the left is a bias, as from the right; alone, it is a learned query.
    if isinstance(first, Scores) and not (isinstance(second, Scores) and first.is_learned):
        return _biased(situation, first, right, sign)
    if isinstance(second, Scores):
        return _biased(situation, second._replace(factor=second.factor * sign), left, 1)
    if isinstance(first, Operand) and isinstance(second, Operand) and same_factor(first.factor, second.factor):
        mixed, learned = first.mixed or second.mixed, first.learned and second.learned
        return first._replace(mixed=mixed, learned=learned, unread=first.unread or second.unread)
    return unless_unread(situation)


def _sum_of_scores(*summands: tuple[Tensor, Scores]) -> Scores:
    """The trace of the sum of two scores, each given with its tensor; that of the earlier product leads."""
    first, second = (scores.folded() for _, scores in sorted(summands, key=lambda each: each[1].products[0].index))
    if first.value is None or second.value is None:
        return united(first, second)
    total = first.value + second.value
    trace = united(first, second)._replace(value=total, allowed=None)
    if first.allowed is None and second.allowed is None:
        return trace
    # What hides a pair in one of them may be a zero, as of a padded shift, to which the score of the other is added.
    hidden = first.pairs.logical_or(second.pairs).logical_not()
    for tensor, scores in summands:
        hidden = hidden | (masked_by(tensor) & ~scores.pairs)
    return trace.without(hidden)


def united(first: Scores, second: Scores) -> Scores:
    """The first scores, with the history of the second: lost if one of both is."""
    lost = first.lost or second.lost
    if lost is not None:
        first = first._replace(value=None, allowed=None, lost=lost)
    return first._replace(
        products=tuple(dict.fromkeys(first.products + second.products)),
        pure=first.pure and second.pure,
        linear=first.linear and second.linear,
        shifted=first.shifted or second.shifted,
        scaled=first.scaled | second.scaled,
    )


def beside_unread(situation: Situation, scores: Scores, *traces: Trace | None) -> Scores | None:
    """The scores, lost, if they come together with a product that is not understood, which is no bias; else None."""
    unread = unread_in(traces)
    return None if unread is None else situation.lose(scores, f"with what {unread} made,")


def _biased(situation: Situation, scores: Scores, addend: Any, sign: float) -> Derived:
    trace = situation.trace_of(addend)
    if isinstance(trace, Shift):
        # The softmax sees no number that is the same for a row.
        if addend.numel() == 1 or addend.shape[-1] == 1:
            return scores._replace(shifted=scores.shifted or addend.numel() > 1)
        return situation.lose(scores, "of what was made of scores")
    if (lost := beside_unread(situation, scores, trace)) is not None:
        return lost
    if not isinstance(addend, Tensor) or scores.value is None:
        return scores._replace(pure=False)
    shape = torch.broadcast_shapes(scores.value.shape, addend.shape)
    scores = scores.expanded(shape)
    if addend.dtype != torch.bool:
        scores = scores.without(masked_by(addend.detach() * sign))
    return scores._replace(pure=False)
