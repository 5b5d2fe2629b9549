"""Softmaxes of an attention module, separate or in a fused kernel: the scores that reach one are recorded.

The tap in `watching` calls these functions in place of torch's.
"""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from betahook import compat
from betahook.measure.masks import Band, GivenMask
from betahook.measure.rows import ScoreMod
from betahook.models.torch_calls import Call
from betahook.tap import compiled
from betahook.tap.by_hand import contraction
from betahook.tap.by_hand.contraction import Axis
from betahook.tap.by_hand.factors import divided, is_zero
from betahook.tap.by_hand.forward import FollowedForward
from betahook.tap.by_hand.head_axes import REMEDY, feature_pair, misfit_of_scale
from betahook.tap.by_hand.hidden import find_hidden_product
from betahook.tap.by_hand.sites import Site, find_line, find_site
from betahook.tap.by_hand.traces import LogSoftmax, Operand, Scores, Shift, Trace, Weights
from betahook.tap.gain import scale_query
from betahook.tap.kernels import KERNELS, Arguments, Kernel, find_band

REDUCED = "reduced along its last axis, which is not followed"
HIDDEN = "through a function that torch hides, such as one compiled by torch.jit.script: keep that function in Python"


def softmax(forward: FollowedForward, call: Call) -> Tensor:
    """Run a softmax, and record the scores that reach it."""
    output: Tensor = call.run()
    logits, dim = call.operands[0], call.dim
    scores = forward.traces.get(logits)
    # A log_softmax shifts each row by a number, which cancels in a softmax that may follow.
    is_shift = call.name == "log_softmax" and dim in (-1, logits.dim() - 1) and not call.has_target
    if not (is_shift and isinstance(scores, Scores) and scores.lost is None):
        note_softmax(forward, output, logits, dim)
        return output
    log_softmax = LogSoftmax()
    note_softmax(forward, output, logits, dim, log_softmax)
    forward.traces.note(output, scores._replace(shifted=True, log_softmaxes=(log_softmax,)))
    if forward.shadows is not None:
        forward.shadows.follow(call, output)
    return output


def note_softmax(
    forward: FollowedForward, output: Tensor, logits: Tensor, dim: int, log_softmax: LogSoftmax | None = None
) -> None:
    """Process a softmax of `logits` along `dim` that returned `output`: record its scores, or refuse the module.

    Those of a `log_softmax` that is given are recorded when the forward ends.
    """
    trace = forward.traces.get(logits)
    forward.traces.note(output, Weights())
    if isinstance(trace, Operand):
        forward.plan.takes_values |= trace.from_values
        forward.unread_product = forward.unread_product or trace.unread_product
    if _may_be_missed(trace):
        line = find_line()
        forward.refuse(
            f"its softmax at {line} takes a tensor computed from attention weights, and may be another attention"
        )
    forward.has_softmax, forward.fused_only = True, False
    forward.attended |= isinstance(trace, Scores | Weights)
    if isinstance(trace, Scores):
        for passed in trace.log_softmaxes:
            passed.record = None  # the scores are those of this softmax
        _note_scores(forward, trace, logits, dim, log_softmax)
    if (product := find_hidden_product(logits, forward.nodes)) is not None:
        by = REDUCED if isinstance(trace, Shift) else HIDDEN
        forward.refuse(f"the product at {product.site.line} reaches its softmax at {find_line()} {by}")


def _may_be_missed(trace: Trace | None) -> bool:
    """Return True for a tensor without known scores that a product computed from attention weights."""
    return (isinstance(trace, Weights) and trace.projected) or (isinstance(trace, Operand) and trace.from_values)


def _note_scores(
    forward: FollowedForward, scores: Scores, logits: Tensor, dim: int, log_softmax: LogSoftmax | None
) -> None:
    """Process scores that reach a softmax as `logits`: learn from them, and record them."""
    for product in scores.products:
        product.reach()
    own_beta = scores.factor * scores.prescale
    if scores.shifted and dim not in (-1, logits.dim() - 1):
        scores = scores.losing(f"a softmax at {find_line()} along another axis than their rows were shifted")
    if isinstance(own_beta, float) and own_beta < 0:
        scores = scores.losing(f"a negative factor before {find_line()}")
    if scores.lost is not None:
        forward.refuse(f"its scores reach {scores.lost}, which is not followed")
        return
    if forward.shadows is not None and forward.shadows.contradict(scores, logits, dim):
        forward.refuse(f"the logits at {find_line()} do not follow beta as its operations say")
    forward.note_default(own_beta)
    in_order = sorted(scores.products, key=lambda product: product.index)
    leader = in_order[0]
    leader.total = None if is_zero(own_beta) else own_beta
    for product in in_order:
        product.history.leader = leader.site
        product.sites_to_softmax |= scores.scaling_sites
    if forward.labels is not None:
        forward.features += [each.features for each in in_order if each.features is not None]
    is_recorded = forward.is_recording and scores.value is not None and logits.numel() > 0 and not is_zero(own_beta)
    if not is_recorded and forward.labels is None:
        return
    # With labels the axis is found even if nothing is recorded: the first recorded forward may be one without labels.
    axis = forward.score_axis(logits, "softmax", dim)
    if (axis.dim if isinstance(axis, contraction.Shared) else axis) == logits.dim() - 1:  # score_axis moved rows there
        forward.refuse(f"its softmax at {find_line()} runs over its heads, too")
    if is_recorded:
        _record(forward, scores, logits, dim, axis, log_softmax)


@torch.no_grad()
def _record(
    forward: FollowedForward,
    scores: Scores,
    logits: Tensor,
    dim: int,
    axis: Axis | None,
    log_softmax: LogSoftmax | None = None,
) -> None:
    recorder = forward.recorder
    assert scores.value is not None
    assert scores.operands is not None
    first = scores.products[0]
    if axis is None or first.gain is None:
        forward.refuse(f"its heads cannot be told from the batch in the softmax at {find_line()}: {REMEDY}")
        return
    if log_softmax is not None:
        # What the forward does until it ends may change them in place.
        kept = scores._replace(value=scores.value.clone())
        log_softmax.record = functools.partial(_record, forward, kept, logits.detach().clone(), dim, axis)
        forward.traces.log_softmaxes.append(log_softmax)
        return

    def laid_out(tensor: Tensor) -> Tensor:
        return contraction.batched(tensor.detach().movedim(dim, -1), axis, recorder.heads)

    prescale = scores.prescale.view(-1, 1, 1) if isinstance(scores.prescale, Tensor) else scores.prescale
    factor = prescale * first.gain.view(-1, 1, 1)  # as it acted, whatever the model's own beta is in this call
    recorder.record_pairs(laid_out(scores.value), laid_out(logits), laid_out(scores.pairs), scores.operands, factor)


def fused(forward: FollowedForward, call: Call) -> Any:
    """Run a fused attention kernel with beta on its query, and record its scores."""
    recorder, kernel = forward.recorder, KERNELS[call.name]
    given = kernel.read(call)
    query, key, value = (given[name] for name in kernel.names[:3])
    site, scale = find_site("fused"), given.get(kernel.scale)
    factors = forward.factors_of(forward.plan.histories[site], query, key)
    default = factors[0] * factors[1] * (query.shape[-1] ** -0.5 if scale is None else scale)
    axis = _fused_axis(forward, call, kernel, given, site)
    if (features := feature_pair(forward.labels, query, key, recorder)) is not None:
        forward.features.append(features)
    is_plain = (
        call.name == "scaled_dot_product_attention" and axis in (1, "single") and compiled.fits(recorder, query, key)
    )
    forward.fused_only &= is_plain and all(isinstance(factor, float) and factor == 1 for factor in factors)
    query, key = map(kernel.heads_before_tokens, (query, key))
    forward.attended = True
    if axis is not None:
        forward.note_default(default)
        own = None if is_zero(default) else default  # scale_query then takes that of the last call
        if forward.is_recording and own is not None:
            raw = divided(query.detach(), factors[0]), divided(key.detach(), factors[1])
            q_of_all, k_of_all, axis_of_all = contraction.broadcast(*raw, axis)
            q, k = (contraction.batched(x, axis_of_all, recorder.heads) for x in (q_of_all, k_of_all))
            mask = _pairs(forward, kernel, given, q_of_all, k_of_all, axis_of_all)
            recorder.record(q, k, mask, ScoreMod(softcap=given.get("softcap") or None))
        query = contraction.on_heads(
            query, axis, recorder.heads, lambda query, axis: scale_query(recorder, query, (key, value), own, axis)
        )
    output = kernel.run(call, kernel.heads_before_tokens(query))
    forward.traces.note(output, forward.trace_of_values())
    return output


def _pairs(
    forward: FollowedForward, kernel: Kernel, given: Arguments, query: Tensor, key: Tensor, axis: Axis
) -> GivenMask:
    """Describe the pairs that a kernel uses; the band found in its first mask tensor is expected of later ones."""
    mask = kernel.describe(given, query, key, lambda pairs: contraction.batched(pairs, axis, forward.recorder.heads))
    if mask.kind != "pairs" or mask.tensor is None:
        return mask
    plan = forward.plan
    if plan.band is None and not compat.is_captured(query.device):
        plan.band = find_band(mask.tensor)
    return replace(mask, band=plan.band or Band())


def _fused_axis(forward: FollowedForward, call: Call, kernel: Kernel, given: Arguments, site: Site) -> Axis | None:
    """Find the axis of the heads in a kernel's query, with heads before tokens; None if the module is refused."""
    query, heads = given[kernel.names[0]], forward.recorder.heads
    sizes = kernel.heads_before_tokens(query).shape[:-2]
    if site.obstacle is not None:
        forward.refuse(f"its attention lies in {site.obstacle}")
    elif (obstacle := kernel.obstacle(given)) is not None:
        forward.refuse(f"{call.name} at {site.line} gets {obstacle}")
    elif (misfit := misfit_of_scale(forward.recorder, query.shape[-1])) is not None:
        forward.refuse(f"{call.name} at {site.line} gets {misfit}")
    elif not kernel.states_heads(query):
        summed = query.dim() - 1
        axis = forward.head_axis(query, forward.labels_of(query, summed), summed, range(len(sizes)), site)
        if axis is None:
            forward.refuse(f"its heads cannot be told from the batch at {site.line}: {REMEDY}")
        return axis
    elif sizes[-1] == heads:
        return len(sizes) - 1
    else:
        forward.refuse(f"{call.name} at {site.line}: {contraction.misfit(sizes, heads)}")
    return None
