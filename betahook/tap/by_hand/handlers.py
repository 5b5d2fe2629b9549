"""A table of torch functions, each with a handler that derives the traces of what the function returns.

A handler is called before the function runs, under `no_grad`, by the tap in `watching`. It may run functions on
detached tensors, and changes neither arguments nor traces. What has no handler here goes to
`situation.other`, which loses scores.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from betahook.models.torch_calls import DIVIDING, PERMUTING, PICKING, REGROUPING, SPLITTING
from betahook.tap.by_hand.arithmetic import add, divide, multiply, negate, subtract, subtract_from
from betahook.tap.by_hand.rearranging import fill, keep, move, pad, permute, pick, regroup, triangle, where
from betahook.tap.by_hand.situation import Handler, Situation, other
from betahook.tap.by_hand.traces import Derived, Operand, Scores, Shift


def bend(situation: Situation) -> Derived:
    """Follow a function of each element that is not linear, as a soft cap is."""
    trace = situation.first_trace
    if sum(isinstance(each, Scores) for each in situation.traces) > 1:
        return other(situation)
    if isinstance(trace, Scores):
        return trace._replace(linear=False, pure=False)
    return other(situation)


def drop(situation: Situation) -> Derived:
    """Follow a dropout, which leaves scores as they are where it does nothing."""
    call, trace = situation.call, situation.first_trace
    share, training, *_ = *call.operands[1:], 0.5, True
    share, training = call.kwargs.get("p", share), call.kwargs.get("training", training)
    if isinstance(trace, Scores) and training and share:
        return situation.lose(trace)
    return trace


def largest(situation: Situation) -> Derived:
    """Follow a maximum with another tensor, a bound of each score, or one over the scores."""
    if sum(isinstance(x, Tensor) for x in situation.call.operands) > 1:
        return bend(situation)
    return reduce(situation)


def reduce(situation: Situation) -> Derived:
    """Follow what is the same for whole rows of scores, as the largest of a row; anything else mixes rows.

    A factor on q is one on its mean or sum, as in a pooled query.
    """
    trace, (dim, _) = situation.first_trace, situation.call.reduced
    if isinstance(trace, Operand) and situation.call.name in ("mean", "sum"):
        return trace
    if not isinstance(trace, Scores):
        return other(situation)
    dims, last = (dim,) if isinstance(dim, int) else dim, situation.call.operands[0].dim() - 1
    if dims is None or -1 in dims or last in dims:
        return Shift()
    return situation.lose(trace, "over another axis than that of the rows")


def ignore(situation: Situation) -> Derived:
    """Follow nothing: only the shape of the arguments counts."""
    return None


HANDLERS: Mapping[str, Handler] = {
    name: handler
    for handler, names in [
        (multiply, "mul mul_ multiply multiply_ __mul__ __rmul__ __imul__"),
        (divide, DIVIDING),
        (add, "add add_ __add__ __radd__ __iadd__"),
        (subtract, "sub sub_ subtract __sub__ __isub__"),
        (subtract_from, "rsub __rsub__"),
        (negate, "neg neg_ negative __neg__"),
        (permute, PERMUTING),
        (regroup, REGROUPING),
        (pick, PICKING),
        (move, SPLITTING),
        (pad, "pad"),
        (keep, "to float half bfloat16 double type type_as contiguous clone detach detach_ requires_grad_ cpu cuda"),
        (keep, "positive"),
        (bend, "clamp clamp_ clamp_min clamp_min_ clamp_max clamp_max_ clip clip_ tanh tanh_ nan_to_num"),
        (bend, "nan_to_num_ maximum minimum hardtanh softsign fmin fmax"),
        (largest, "max min"),
        (reduce, "amax amin mean sum logsumexp median"),
        (drop, "dropout dropout_"),
        (where, "where"),
        (fill, "masked_fill masked_fill_"),
        (triangle, "tril triu tril_ triu_"),
        (ignore, "zeros_like ones_like empty_like full_like rand_like randn_like randint_like new_zeros new_ones"),
        (ignore, "new_empty new_full new_tensor numel size dim stride is_contiguous __len__"),
    ]
    for name in names.split()
}
"""Function name to handler; for what is not here there is `other`."""
