"""Calls that are neither products nor softmaxes: each is run, and the traces of its results are stored.

The tap in `watching` calls these functions in place of torch's. The only results that they change are those of scalings
that differ from the last forward, see `_rescaled`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from betahook.models.torch_calls import Call
from betahook.tap.by_hand import handlers
from betahook.tap.by_hand.arithmetic import divide, multiply, united
from betahook.tap.by_hand.contraction import align_with_heads
from betahook.tap.by_hand.factors import Factor, is_zero, number, same_factor
from betahook.tap.by_hand.forward import FollowedForward
from betahook.tap.by_hand.rearranging import keep
from betahook.tap.by_hand.sites import find_line, find_site
from betahook.tap.by_hand.situation import Handler, other
from betahook.tap.by_hand.traces import Derived, Scores, Trace, Weights, are_weights


def follow(forward: FollowedForward, call: Call, handler: Handler) -> Any:
    """Run a function, and store the traces of its results as its handler derives them."""
    first: Any = call.operands[0] if call.operands else None
    if handler is other and not (forward.is_learned(first) or any(tensor in forward.traces for tensor in call.tensors)):
        return call.run()
    if call.has_target and any(isinstance(forward.traces.get(tensor), Scores) for tensor in call.tensors):
        handler = other  # other tensors may share the memory of the target, and change unseen
    before = forward.traces.get(first)
    if call.in_place and isinstance(before, Scores) and before.value is not None:
        # The value may share the memory that is about to change.
        forward.traces.note(first, before._replace(value=before.value.clone()))
    with torch.no_grad():
        derived = handler(forward.situation(call))
    if forward.shadows is not None and isinstance(derived, Scores):
        _unshadow_biases(forward, call, derived)
    output = call.run()
    if handler in (multiply, divide) and isinstance(derived, Scores):
        output, derived = _rescaled(forward, call, output, derived)
    forward.traces.note(output, derived)
    if call.in_place:
        if derived is None:
            forward.traces.pop(first)
        forward.traces.changed(first)
    elif call.has_target:
        forward.traces.changed(output)
    return output


def _unshadow_biases(forward: FollowedForward, call: Call, derived: Scores) -> None:
    """Reset the shadows of scores that turned out to be a bias of other scores: beta does not act on a bias."""
    for tensor in call.tensors:
        trace = forward.traces.get(tensor)
        if forward.shadows is not None and isinstance(trace, Scores) and not {*trace.products} <= {*derived.products}:
            forward.shadows.put(tensor, tensor.detach().clone())


def _rescaled(forward: FollowedForward, call: Call, output: Tensor, scores: Scores) -> tuple[Tensor, Scores]:
    """Correct the output of a scaling whose factor differs from the last forward's, which the gain on q assumed.

    Only for heads whose beta was set: their logits are beta times the scores, whatever the model scales by. Example: if
    the last forward scaled by 0.5 and this one by 0.25, the output is multiplied by 0.5 / 0.25.
    """
    operands = call.operands[:2]
    scaled, before = next((x, trace) for x in operands if isinstance(trace := forward.traces.get(x), Scores))
    if forward.labels is not None:
        forward.score_axis(scaled, "rescale")  # later forwards, without labels, look it up by the site
    is_scaled = before.factor is not scores.factor  # otherwise the handler counts it as part of the scores
    if not is_scaled or scores.lost is not None:
        return output, scores
    by = next(x for x in operands if not isinstance(forward.traces.get(x), Scores))
    site, factor = find_site("scale"), _factor(call, by)
    assumed = [product.expected(site) for product in scores.products]  # before this scaling is appended below
    for product in scores.products:
        product.scalings.append((site, factor))
    scores = scores._replace(scaling_sites=scores.scaling_sites | {site})
    has_changed = any(was is not None and not same_factor(was, factor) for was in assumed)
    may_change = isinstance(by, Tensor) and by.requires_grad
    if not before.unbiased and (has_changed or may_change):
        return output, scores.losing(f"a scale behind a bias at {find_line()} that changes")
    last = factor if assumed[0] is None else assumed[0]
    if is_zero(factor) or not forward.plan.varies(site, last, factor):
        return output, scores
    axis = forward.score_axis(scaled, "rescale")
    if axis is None:
        return output, scores.losing(f"a scale at {find_line()} that changes, where the heads cannot be told apart")
    ratio = torch.as_tensor(last / factor, device=output.device)
    is_set = align_with_heads(forward.recorder.is_set.to(output.device), axis, scaled)
    is_usable = ratio.isfinite() & (ratio != 0)  # a tensor may be 0 in either forward
    ratio = torch.where(is_set & is_usable, ratio, 1.0).to(output.dtype)
    forward.shadows = None  # they lack the ratio
    return (output.mul_(ratio) if call.in_place else output * ratio), scores


def _factor(call: Call, by: Any) -> Factor:
    factor = number(by)
    if factor is None:
        factor = by.detach()
    return 1 / factor if handlers.HANDLERS[call.name] is divide else factor


def read_property(forward: FollowedForward, call: Call) -> Any:
    """Read a property of a tensor; some, such as `.data`, are tensors themselves and are followed."""
    output = call.run()
    if not isinstance(output, Tensor):
        return output
    first = call.args[0]
    if first in forward.traces:
        handler = keep if output.shape == first.shape else other
        forward.traces.note(output, handler(forward.situation(call)))
    return output


def write_property(forward: FollowedForward, call: Call) -> None:
    """Write a property of a tensor, such as `.data`, after which its scores are lost."""
    call.run()
    scores = forward.traces.get(call.args[0])
    if isinstance(scores, Scores) and isinstance(call.args[1], Tensor):
        forward.traces.note(call.args[0], forward.situation(call).lose(scores))


def assign(forward: FollowedForward, call: Call) -> None:
    """Follow `target[index] = source`."""
    target, index, source = call.args
    into, trace = forward.traces.get(target), forward.traces.get(source)
    # `scores[index] += bias` changes a view in place, and then assigns it to where it already is.
    before_change = forward.traces.before_change(target, source)
    if before_change is not None and _is_same(target[index], source):
        into = before_change
    derived: Derived = None
    if isinstance(into, Weights) or are_weights(trace):
        before = into.before if isinstance(into, Weights) else into
        derived = Weights(before=before if isinstance(before, Scores) else None)
    elif isinstance(trace, Scores) or isinstance(into, Scores):
        with torch.no_grad():  # before the change, since values may share the memory
            derived = _assigned(call, into, trace)
    call.run()
    forward.traces.note(target, derived)
    if isinstance(derived, Scores):
        forward.traces.changed(target)


def _is_same(view: Tensor, other: Tensor) -> bool:
    """Return True for two views of the same entries."""
    return view.data_ptr() == other.data_ptr() and (view.shape, view.stride()) == (other.shape, other.stride())


def _is_whole(target: Tensor, index: Any) -> bool:
    """Return True for an index of slices that selects all entries."""
    parts = index if isinstance(index, tuple) else (index,)
    return all(part is ... or isinstance(part, slice) for part in parts) and target[index].shape == target.shape


def _assigned(call: Call, into: Trace | None, trace: Trace | None) -> Derived:
    target, index, _ = call.args
    old = into if isinstance(into, Scores) else None
    if not isinstance(trace, Scores):
        if old is None or old.value is None:
            return old
        masked = torch.zeros_like(old.value, dtype=torch.bool)
        masked[index] = True
        return old.without(masked)
    trace, old = trace.folded(), None if old is None or _is_whole(target, index) else old.folded()
    # The last operands: where a tensor is filled again, e.g. for each sample, the first are recorded already.
    new = trace if old is None else united(old, trace)._replace(operands=trace.operands)
    if new.lost is not None or trace.value is None:
        return new
    value = torch.zeros_like(target, requires_grad=False)
    allowed = torch.zeros_like(value, dtype=torch.bool)
    if old is not None and old.value is not None:
        value.copy_(old.value)
        allowed.copy_(old.pairs)
    value[index], allowed[index] = trace.value, trace.pairs
    return new._replace(value=value, allowed=allowed)
