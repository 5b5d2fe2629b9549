"""Softmaxes that are written out, as `e = logits.exp(); e / e.sum(-1, keepdim=True)`: the division completes them.

The tap in `watching` calls these functions in place of torch's. Until the division the exponentials count as lost
scores, so a module in which no such division follows is left alone.
"""

from __future__ import annotations

from typing import Any

from betahook.models.torch_calls import Call
from betahook.tap.by_hand import arithmetic, handlers, softmaxes
from betahook.tap.by_hand.following import follow
from betahook.tap.by_hand.forward import FollowedForward
from betahook.tap.by_hand.situation import other
from betahook.tap.by_hand.traces import Exponential, Scores


def exponentiate(forward: FollowedForward, call: Call) -> Any:
    """Run `exp`, and remember its result if the argument holds scores."""
    logits = call.operands[0]
    scores = forward.traces.get(logits)
    output = follow(forward, call, other)
    if isinstance(scores, Scores) and not call.has_target:
        forward.traces.exponentials[output] = Exponential(scores, logits)
    return output


def add_up(forward: FollowedForward, call: Call) -> Any:
    """Run a sum, and remember its result if these are the row sums of exponentials."""
    output = follow(forward, call, handlers.reduce)
    terms, (dims, keepdim) = call.operands[0], call.reduced
    dim = dims[0] if isinstance(dims, (tuple, list)) and len(dims) == 1 else dims
    if terms in forward.traces.exponentials and keepdim and dim in (-1, terms.dim() - 1) and not call.has_target:
        forward.traces.row_sums[output] = terms
    return output


def divide(forward: FollowedForward, call: Call) -> Any:
    """Run a division; if it completes a softmax, process that."""
    numerator, denominator, *_ = call.operands
    traces, found = forward.traces, forward.traces.exponentials.get(numerator)
    if (
        found is None
        or traces.row_sums.get(denominator) is not numerator
        or traces.get(found.logits) is not found.scores  # the logits were changed since
        or not call.kwargs.keys() <= {"input", "other"}
    ):
        return follow(forward, call, arithmetic.divide)
    output = call.run()
    softmaxes.note_softmax(forward, output, found.logits, dim=-1)
    return output
