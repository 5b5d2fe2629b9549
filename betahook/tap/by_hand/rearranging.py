"""Handlers of functions that move, join or replace entries; the table in `handlers` assigns them to torch functions.

For scores, they run the same function on `Scores.value` and on the mask of the allowed pairs.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from betahook.models.torch_calls import tensors_in
from betahook.tap.by_hand.arithmetic import beside_unread, united
from betahook.tap.by_hand.factors import same_factor
from betahook.tap.by_hand.situation import Situation, other, unless_unread, unread_in
from betahook.tap.by_hand.traces import Derived, Operand, Scores, Shift, Weights, is_learned


def keep(situation: Situation) -> Derived:
    """Follow a function that leaves every entry in place, such as a copy or a cast: the trace stays the same."""
    first = situation.call.operands[0]
    trace = situation.trace_of(first)
    return Operand(learned=True) if trace is None and isinstance(first, nn.Parameter) else trace


def pick(situation: Situation) -> Derived:
    """Follow a function that may move the heads to another axis, but leaves rows whole, such as indexing."""
    trace = situation.first_trace
    if isinstance(trace, Weights) and trace.before is not None and situation.call.name == "__getitem__":
        before = trace.before
        situation = situation._replace(trace_of=lambda _: before)
    return move(situation, heads_stay=False)


def regroup(situation: Situation) -> Derived:
    """Follow a function that may put entries of several rows into one, such as `gather`."""
    return move(situation, rows_stay=False)


def permute(situation: Situation) -> Derived:
    """Follow a function that may move heads and rows to other axes, such as `transpose`."""
    return move(situation, heads_stay=False, rows_stay=_keeps_rows(situation))


RESHAPING = frozenset(["view", "reshape", "view_as", "reshape_as", "flatten", "unflatten"])
"""Functions that arrange the entries in other axes without changing their order."""


def _keeps_rows(situation: Situation) -> bool:
    """Return True for a reshape of shifted scores that leaves the last axis, and so every row, as it is."""
    call, trace = situation.call, situation.first_trace
    if call.name not in RESHAPING or not isinstance(trace, Scores) or not trace.shifted:
        return False
    shape = call.run_on(lambda tensor: torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")).shape
    return bool(shape[-1:] == call.operands[0].shape[-1:])


def move(situation: Situation, *, heads_stay: bool = True, rows_stay: bool = True) -> Derived:
    """Follow a function that moves entries; by default, heads keep their axis, and rows of scores stay whole."""
    first = situation.call.operands[0]
    trace = situation.trace_of(first)
    if isinstance(first, nn.Parameter):
        return Operand(learned=True)
    if isinstance(first, Tensor):  # further tensors, as in `view_as`, only give a shape
        if trace is None or isinstance(trace, Operand):
            return trace
        situation = situation._replace(trace_of=lambda tensor: trace if tensor is first else None)
    elif not situation.traces and not any(isinstance(x, nn.Parameter) for x in situation.call.tensors):
        return None
    if isinstance(trace, Scores) and trace.shifted and not rows_stay:
        return situation.lose(trace, "after a shift of rows")
    return linear(situation, heads_stay=heads_stay)


def pad(situation: Situation) -> Derived:
    """Follow padding of scores: the added rows and columns are not allowed pairs."""
    trace = situation.first_trace
    if not isinstance(trace, Scores):
        return move(situation)
    if trace.value is None:
        return trace
    sides = situation.call.operands[1]
    return trace._replace(value=F.pad(trace.value, sides), allowed=F.pad(trace.pairs, sides, value=False))


def where(situation: Situation) -> Derived:
    """Follow the choice between scores and a mask, or between two scores."""
    traces = situation.traces
    if not traces or len(situation.call.operands) < 3:  # `where(condition)` returns indices
        return None
    if len(traces) != 1 or not isinstance(traces[0], Scores):
        return linear(situation)
    condition, left, _ = situation.call.operands
    if isinstance(left, Tensor) and left.dtype == torch.bool:  # `left.where(condition, right)`
        condition, left = left, condition
    if not isinstance(condition, Tensor):
        return traces[0]
    return traces[0].without(~condition if situation.trace_of(left) is not None else condition)


def fill(situation: Situation) -> Derived:
    """Follow `masked_fill`, which replaces scores."""
    trace = situation.first_trace
    if not isinstance(trace, Scores):
        return unless_unread(situation)
    return trace.without(situation.call.operands[1].bool())


def triangle(situation: Situation) -> Derived:
    """Follow `tril` and `triu`, which replace scores by zeros."""
    trace = situation.first_trace
    if not isinstance(trace, Scores) or trace.value is None:
        return trace
    ones = torch.ones_like(trace.value)
    return trace.without(situation.call.run_on(lambda _: ones) == 0)


def linear(situation: Situation, *, heads_stay: bool = True) -> Derived:
    """Derive the traces of a linear function's results, from followed tensors and perhaps others."""
    traces, trace_of = situation.traces, situation.trace_of
    scores = [trace for trace in traces if isinstance(trace, Scores)]
    if not scores or any(isinstance(trace, Shift | Weights) for trace in traces):
        return _linear_in_operands(situation)
    if (beside := beside_unread(situation, scores[0], *traces)) is not None:
        return beside
    alone = len(scores) == 1
    # Several scores may have different factors, so these go into their values.
    first = functools.reduce(united, scores[1:], scores[0] if alone else scores[0].folded())
    if first.value is None:
        return first if heads_stay else first._replace(axis=None)

    def value(tensor: Tensor) -> Tensor:
        trace = trace_of(tensor)
        if not isinstance(trace, Scores) or trace.value is None:
            return torch.zeros_like(tensor)
        return trace.value if alone else trace.folded().value  # type: ignore[return-value]

    def pairs(tensor: Tensor) -> Tensor:
        trace = trace_of(tensor)
        return trace.pairs if isinstance(trace, Scores) else torch.zeros_like(tensor, dtype=torch.bool)

    parts = tensors_in(situation.call.run_on(value))
    masks: list[Any] = [None] * len(parts)
    others = any(x.is_floating_point() and not isinstance(trace_of(x), Scores) for x in situation.call.tensors)
    if others or any(trace.allowed is not None for trace in scores):
        masks = tensors_in(situation.call.run_on(pairs))
    if not heads_stay or any(part.dim() != first.value.dim() for part in parts):
        first = first._replace(axis=None)
    return [first._replace(value=part, allowed=mask) for part, mask in zip(parts, masks, strict=True)]


def _linear_in_operands(situation: Situation) -> Derived:
    traces = situation.traces
    operands = [trace for trace in traces if isinstance(trace, Operand)]
    if len(operands) < len(traces) or not all(same_factor(each.factor, operands[0].factor) for each in operands):
        return other(situation)
    numbers = [x for x in situation.call.tensors if x.is_floating_point()]
    learned = bool(numbers) and all(is_learned(x, situation.trace_of(x)) for x in numbers)
    if not operands:
        return Operand(learned=True) if learned else None
    # Untraced tensors that are joined with it, e.g. from a cache, are assumed to carry the same factor.
    from_values = any(each.from_values for each in operands)
    return operands[0]._replace(from_values=from_values, learned=learned, unread_product=unread_in(operands))
