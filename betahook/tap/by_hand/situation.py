"""`Situation`, the argument of every handler: a call with the traces of its tensors; and `other`, the default handler.

The other handlers are in `arithmetic`, `rearranging` and `handlers`, which has the table.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from torch import Tensor

from betahook.models.labels import PROJECTIONS
from betahook.models.torch_calls import Call
from betahook.tap.by_hand.sites import find_line
from betahook.tap.by_hand.traces import Derived, Operand, Scores, Shift, Trace, Weights, is_learned


class Situation(NamedTuple):
    """A call, and whatever else a handler needs to know.

    Attributes:
        call: the call.
        trace_of: looks up the trace of an argument; None if it is not a followed tensor.
        at_first: returns what held at this site in the first forward, given what holds now. This matters because, with
            a single query, a factor for each query looks like one number.
        always: returns True if something holds now and has held at this site in every forward.
        is_activation: returns True for a tensor computed from the inputs; after the first forward of a form, False.
        axis_of: looks up the axis of the heads in scores, as a negative index; None if it is not known.
    """

    call: Call
    trace_of: Callable[[Any], Trace | None]
    at_first: Callable[[bool], bool]
    always: Callable[[bool], bool]
    is_activation: Callable[[Tensor], bool]
    axis_of: Callable[[Tensor], int | None]

    @property
    def traces(self) -> list[Trace]:
        """The traces of all arguments that are followed."""
        return [trace for tensor in self.call.tensors if (trace := self.trace_of(tensor)) is not None]

    @property
    def first_trace(self) -> Trace | None:
        """The trace of the first operand; None if it is not followed."""
        return self.trace_of(self.call.operands[0])

    def lose(self, scores: Scores, why: str = "") -> Scores:
        """Trace of scores after an unrecognised operation."""
        return scores.losing(f"{self.call.name}{why and ' ' + why} at {find_line()}")


Handler = Callable[[Situation], Derived]


def other(situation: Situation) -> Derived:
    """Derive the trace of the results of a function that has no handler of its own.

    Weights stay weights, shifts stay shifts, and a function of parameters alone stays learned. Scores are lost, and
    operands have no trace any more, unless weighted values went into them.
    """
    traces = situation.traces
    weights = [trace for trace in traces if isinstance(trace, Weights)]
    if weights:
        return Weights(any(trace.projected for trace in weights))
    scores = next((trace for trace in traces if isinstance(trace, Scores)), None)
    if scores is not None:
        return situation.lose(scores, "with out=" if situation.call.has_target else "")
    if any(isinstance(trace, Shift) for trace in traces):
        return Shift()
    if any(isinstance(trace, Operand) and trace.from_values for trace in traces):
        return Operand(from_values=True)
    return Operand(learned=True) if _is_of_parameters(situation) else None


def _is_of_parameters(situation: Situation) -> bool:
    """Return True for a function of parameters alone, such as an interpolation, that is not a projection of them."""
    call, first = situation.call, situation.call.operands[0]
    numbers = [x for x in call.tensors if x.is_floating_point()]
    if call.name in PROJECTIONS or not any(x is first for x in numbers):  # e.g. an embedding of indices
        return False
    return all(is_learned(x, situation.trace_of(x)) for x in numbers)


def unread_in(traces: Iterable[Trace | None]) -> str | None:
    """Return the first unrecognised product in some traces; None if there is none."""
    return next((trace.unread_product for trace in traces if isinstance(trace, Operand) and trace.unread_product), None)


def unless_unread(situation: Situation) -> Derived:
    """Derive the trace that `other` does; if that is None, carry an unrecognised product along."""
    unread, derived = unread_in(situation.traces), other(situation)
    return derived if unread is None or derived is not None else Operand(unread_product=unread)
