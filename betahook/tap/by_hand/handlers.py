"""The table of handlers: for each torch function, one that derives the traces of its results.

`following.follow` calls a handler before the function runs, under `no_grad`. A handler may run functions on detached
tensors, and must change neither arguments nor traces. Functions that are not in the table have the handler
`situation.other`, which loses scores. The longer handlers are in `arithmetic` and `rearranging`.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from betahook.models.torch_calls import DIVIDING, PERMUTING, PICKING, REGROUPING, SPLITTING
from betahook.tap.by_hand.arithmetic import add, divide, multiply, negate, subtract, subtract_from
from betahook.tap.by_hand.rearranging import fill, keep, move, pad, permute, pick, regroup, triangle, where
from betahook.tap.by_hand.situation import Handler, Situation, other
from betahook.tap.by_hand.traces import Derived, Operand, Scores, Shift


def nonlinear(situation: Situation) -> Derived:
    """Follow a non-linear function of each element, such as a soft cap."""
    trace = situation.first_trace
    if sum(isinstance(each, Scores) for each in situation.traces) > 1:
        return other(situation)
    if isinstance(trace, Scores):
        return trace._replace(linear=False, unbiased=False)
    return other(situation)


def dropout(situation: Situation) -> Derived:
    """Follow a dropout, which loses scores unless it is inactive."""
    call, trace = situation.call, situation.first_trace
    share, training, *_ = *call.operands[1:], 0.5, True
    share, training = call.kwargs.get("p", share), call.kwargs.get("training", training)
    if isinstance(trace, Scores) and training and share:
        return situation.lose(trace)
    return trace


def max_or_min(situation: Situation) -> Derived:
    """Follow `max` or `min`, either with another tensor, which bounds each score, or as a reduction."""
    if sum(isinstance(x, Tensor) for x in situation.call.operands) > 1:
        return nonlinear(situation)
    return reduce(situation)


def reduce(situation: Situation) -> Derived:
    """Follow a reduction: along rows of scores, e.g. their maximum, it gives a `Shift`; along others scores are lost.

    A mean or sum of q, as in a pooled query, carries the factor of q.
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
    """Follow nothing: the result only depends on the shape of the arguments."""
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
        (nonlinear, "clamp clamp_ clamp_min clamp_min_ clamp_max clamp_max_ clip clip_ tanh tanh_ nan_to_num"),
        (nonlinear, "nan_to_num_ maximum minimum hardtanh softsign fmin fmax"),
        (max_or_min, "max min"),
        (reduce, "amax amin mean sum logsumexp median"),
        (dropout, "dropout dropout_"),
        (where, "where"),
        (fill, "masked_fill masked_fill_"),
        (triangle, "tril triu tril_ triu_"),
        (ignore, "zeros_like ones_like empty_like full_like rand_like randn_like randint_like new_zeros new_ones"),
        (ignore, "new_empty new_full new_tensor numel size dim stride is_contiguous __len__"),
    ]
    for name in names.split()
}
"""Function name to handler; any other function has the handler `other`."""
