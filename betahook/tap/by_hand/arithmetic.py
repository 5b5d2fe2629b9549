"""Handlers of factors, sums and biases; the table in `handlers` assigns them to torch functions."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from betahook.measure.masks import masked_by
from betahook.tap.by_hand.factors import Factor, number, same_factor
from betahook.tap.by_hand.situation import Situation, other, unless_unread, unread_in
from betahook.tap.by_hand.traces import Derived, Operand, Scores, Shift, Trace, Weights


def multiply(situation: Situation) -> Derived:
    """Follow a multiplication by a factor, or as part of a rotation or a mask."""
    return _scale(situation, *situation.call.operands[:2], divide=False)


def divide(situation: Situation) -> Derived:
    """Follow a division by a factor."""
    return _scale(situation, *situation.call.operands[:2], divide=True)


def _scale(situation: Situation, left: Any, right: Any, *, divide: bool) -> Derived:
    first, second = _activation(situation, left), _activation(situation, right)
    if not divide and first is None and (second is not None or number(left) is not None):
        (left, first), (right, second) = (right, second), (left, first)
    if second is not None or isinstance(first, Shift | Weights):
        return other(situation)
    factor = number(right)
    if isinstance(right, Tensor) and right.dim() > 0 and not isinstance(first, Scores):
        # With a single query or sample, a factor for each looks like one number.
        factor = factor if situation.always(factor is not None and not _may_be_by_sample(situation, right)) else None
    # A number times a number is still a number: it is read when it meets an activation.
    if first is None and (factor is None or number(left) is not None):
        return None
    if isinstance(first, Scores):
        if first.axis is None and factor is None and _may_be_by_head(right):
            first = first._replace(axis=situation.axis_of(left))
        return _scale_scores(situation, first, right, factor, divide=divide)
    trace = Operand() if first is None else first
    if factor is None or not isinstance(trace, Operand):
        return trace  # e.g. a rotation: it is linear, and its effect on the std belongs to the operand
    return trace._replace(factor=trace.factor / factor if divide else trace.factor * factor, learned=False)


def _activation(situation: Situation, tensor: Any) -> Trace | None:
    """Return the trace of a tensor; None for a learned one, which is a factor like any other."""
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
    if by.requires_grad and not scores.unbiased:
        return situation.lose(scores, "by a tensor, behind a bias,")
    if scores.value is None:
        return scores
    value = scores.value / by if divide else scores.value * by
    return scores.expanded(value.shape)._replace(value=value)


def _may_be_by_sample(situation: Situation, factor: Tensor) -> bool:
    """Return True for a factor that may be one for each sample or query, even if it has one element in this batch."""
    return factor.dim() > 1 and situation.is_activation(factor)


def _may_be_by_head(factor: Any) -> bool:
    return isinstance(factor, Tensor) and factor.shape[-2:] == (1, 1)


def _is_by_head(factor: Tensor, axis: int | None) -> bool:
    """Return True for a factor with one number for each head; any other tensor counts as part of the scores."""
    return axis is not None and factor.dim() >= -axis and factor.shape[axis] == factor.numel()


def negate(situation: Situation) -> Derived:
    """Follow a change of sign; in an operand, as for a rotation, it counts as part of the operand."""
    trace = situation.first_trace
    if isinstance(trace, Scores):
        return trace._replace(factor=-trace.factor)
    return trace if isinstance(trace, Operand) else other(situation)


def add(situation: Situation) -> Derived:
    """Follow a bias, a shift of rows, or the sum of several scores."""
    return _sum(situation, situation.call.kwargs.get("alpha", 1), *situation.call.operands[:2])


def subtract(situation: Situation) -> Derived:
    """Follow a difference with scores on either side."""
    return _sum(situation, -situation.call.kwargs.get("alpha", 1), *situation.call.operands[:2])


def subtract_from(situation: Situation) -> Derived:
    """Follow `__rsub__` and `rsub`, which subtract their first operand from the second."""
    return _sum(situation, -situation.call.kwargs.get("alpha", 1), *situation.call.operands[1::-1])


def _sum(situation: Situation, sign: float, left: Any, right: Any) -> Derived:
    """Follow `left + sign * right`."""
    first, second = situation.trace_of(left), situation.trace_of(right)
    if isinstance(first, Weights) or isinstance(second, Weights):
        return other(situation)
    if isinstance(first, Scores) and isinstance(second, Scores) and first.is_learned == second.is_learned:
        return _sum_of_scores((left, first), (right, second._replace(factor=second.factor * sign)))
    # A product with a parameter on the left is a learned query; added to other scores it is a bias, like one with a
    # parameter on the right.
    if isinstance(first, Scores) and not (isinstance(second, Scores) and first.is_learned):
        return _biased(situation, first, right, sign)
    if isinstance(second, Scores):
        return _biased(situation, second._replace(factor=second.factor * sign), left, 1)
    if isinstance(first, Operand) and isinstance(second, Operand) and same_factor(first.factor, second.factor):
        return first._replace(
            learned=first.learned and second.learned,
            from_values=first.from_values or second.from_values,
            unread_product=first.unread_product or second.unread_product,
        )
    return unless_unread(situation)


def _sum_of_scores(*summands: tuple[Tensor, Scores]) -> Scores:
    """The trace of the sum of two scores, each given with its tensor; the one with the earlier product leads."""
    first, second = (scores.folded() for _, scores in sorted(summands, key=lambda each: each[1].products[0].index))
    if first.value is None or second.value is None:
        return united(first, second)
    total = first.value + second.value
    trace = united(first, second)._replace(value=total, allowed=None)
    if first.allowed is None and second.allowed is None:
        return trace
    # A pair that one of them lacks may hold a zero there, as after a padded shift: then the other's score remains.
    hidden = first.pairs.logical_or(second.pairs).logical_not()
    for tensor, scores in summands:
        hidden = hidden | (masked_by(tensor) & ~scores.pairs)
    return trace.without(hidden)


def united(first: Scores, second: Scores) -> Scores:
    """The first scores, with the products and flags of both; lost if either is."""
    lost = first.lost or second.lost
    if lost is not None:
        first = first._replace(value=None, allowed=None, lost=lost)
    return first._replace(
        products=tuple(dict.fromkeys(first.products + second.products)),
        unbiased=first.unbiased and second.unbiased,
        linear=first.linear and second.linear,
        shifted=first.shifted or second.shifted,
        log_softmaxes=first.log_softmaxes + second.log_softmaxes,
        scaling_sites=first.scaling_sites | second.scaling_sites,
    )


def beside_unread(situation: Situation, scores: Scores, *traces: Trace | None) -> Scores | None:
    """Return the scores as lost if they are combined with an unrecognised product, which may be no bias; else None."""
    unread = unread_in(traces)
    return None if unread is None else situation.lose(scores, f"with what {unread} made,")


def _biased(situation: Situation, scores: Scores, addend: Any, sign: float) -> Derived:
    trace = situation.trace_of(addend)
    if isinstance(trace, Shift):
        # A number that is added to a whole row cancels in the softmax.
        if addend.numel() == 1 or addend.shape[-1] == 1:
            return scores._replace(shifted=scores.shifted or addend.numel() > 1)
        return situation.lose(scores, "of what was made of scores")
    if (lost := beside_unread(situation, scores, trace)) is not None:
        return lost
    if not isinstance(addend, Tensor) or scores.value is None:
        return scores._replace(unbiased=False)
    shape = torch.broadcast_shapes(scores.value.shape, addend.shape)
    scores = scores.expanded(shape)
    if addend.dtype != torch.bool:
        scores = scores.without(masked_by(addend.detach() * sign))
    return scores._replace(unbiased=False)
