"""Matrix products in an attention module: those that may make scores are scaled by beta, all others only followed.

The tap in `watching` calls `multiply` in place of torch's products.
"""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch import Tensor

from betahook.measure.masks import masked_by
from betahook.models import selective
from betahook.models.places import takes_key_first
from betahook.models.torch_calls import Call
from betahook.tap.by_hand import contraction
from betahook.tap.by_hand.contraction import Axis, Contraction
from betahook.tap.by_hand.factors import Factor, divided, is_zero
from betahook.tap.by_hand.forward import FollowedForward
from betahook.tap.by_hand.head_axes import REMEDY, feature_pair, misfit_of_scale, number_of_heads, put_heads, varying
from betahook.tap.by_hand.products import Product
from betahook.tap.by_hand.shadows import GAIN
from betahook.tap.by_hand.sites import Site, find_line, find_site
from betahook.tap.by_hand.situation import other
from betahook.tap.by_hand.traces import Derived, Operand, Scores, Shift, Weights, are_weights
from betahook.tap.gain import scale_query


def multiply(forward: FollowedForward, call: Call) -> Any:
    """Run a product, scaled by beta if it may make scores."""
    matmul = contraction.read(call)
    if matmul is not None and _may_make_scores(forward, matmul):
        return _score_product(forward, call, matmul)
    return follow_other(forward, call, is_read=matmul is not None and matmul.has_batch)


def follow_other(forward: FollowedForward, call: Call, *, is_read: bool = False) -> Any:
    """Run a product that gets no beta, and follow it.

    In the first forward, a product of activations whose form was not read (`is_read`) is noted: it may make scores.
    """
    output = call.run()
    with torch.no_grad():
        derived = _of_other_product(forward, call)
        if derived is None and forward.labels is not None and not is_read and _multiplies_activations(forward, call):
            line = find_line()
            forward.unscored_line = forward.unscored_line or line
            derived = Operand(unread_product=f"{call.name} at {line}")
        forward.traces.note(output, derived)
    return output


def _multiplies_activations(forward: FollowedForward, call: Call) -> bool:
    factors = [x for x in call.tensors if x.is_floating_point() and x.dim() > 0]
    return len(factors) > 1 and not any(forward.is_learned(x) for x in factors)


UNREAD = frozenset(
    (
        *("linear", "bilinear", "tensordot", "inner", "vecdot", "linalg_vecdot", "mv", "addmm", "addbmm", "addmv"),
        *("chain_matmul", "linalg_multi_dot", "__rmatmul__", "cosine_similarity"),
    )
)
"""Further functions that multiply tensors, in forms that are not read as score products."""


def _may_make_scores(forward: FollowedForward, matmul: Contraction) -> bool:
    """Return True for a product of activations that may make scores."""
    recorder, traces = forward.recorder, [forward.traces.get(operand) for operand in (matmul.left, matmul.right)]
    # If torch's own function computes the attention, products before it only make its bias.
    if recorder.route == "torch" or matmul.size == 1:
        return False
    if any(isinstance(trace, Shift) or are_weights(trace) for trace in traces):
        return False
    if not matmul.left.is_floating_point() or forward.is_learned(matmul.right):
        return False
    if not matmul.has_batch and recorder.heads > 1:
        forward.headless_line = forward.headless_line or find_line()
        return False
    return True


def _of_other_product(forward: FollowedForward, call: Call) -> Derived:
    weights = [x for x in call.tensors if are_weights(forward.traces.get(x))]
    others = [x for x in call.tensors if not are_weights(forward.traces.get(x))]
    if len(weights) == 1 and len(others) == 1:
        # A product with a parameter mixes the weights over heads; one with anything else weights values.
        return Weights(projected=True) if forward.is_learned(others[0]) else forward.trace_of_values()
    if len(weights) > 1:
        return Weights(projected=True)
    return other(forward.situation(call))


def _score_product(forward: FollowedForward, call: Call, matmul: Contraction) -> Any:
    """Run a product that may make scores, with beta on its left operand, and trace its result."""
    recorder, product = forward.recorder, _new_product(forward, matmul)
    forward.products.append(product)
    of_left, of_right = forward.factors_of(product.history, matmul.left, matmul.right)
    product.prescale = of_left * of_right
    scores = _new_scores(call, matmul, product)
    axis, obstacle = _head_axis(forward, matmul, product.site)
    if matmul.biased and isinstance(forward.traces.get(call.operands[0]), Scores):
        axis, obstacle = None, f"{call.name} at {product.site.line} on scores"
    if axis is None:
        output = call.run()
        forward.traces.note(output, scores.losing(obstacle))
        return output
    product.default = _default_of(forward, product, scores)
    if product.default is not None:
        recorder.note_default(product.default)
    query = _scaled_left(forward, call, matmul, product, axis)
    with selective.counted():
        output = matmul.run(query)
    if output.grad_fn is not None:
        forward.nodes[product] = output.grad_fn
    with torch.no_grad():  # a checkpointed forward must save as many tensors as its recomputation
        if forward.is_recording:
            left, right = matmul.tokens(axis, recorder.heads)
            value = matmul.alone(query) if matmul.biased else output.detach()
            left, right = divided(left, of_left), divided(right, of_right)
            operands = (right, left) if product.history.key_first else (left, right)
            scores = scores._replace(value=value, operands=operands)
            if forward.shadows is not None and not call.has_target:
                forward.shadows.put(output, output + (GAIN - 1) * matmul.alpha * value)
            if not scores.unbiased:
                scores = scores.without(masked_by(call.operands[0].detach()).expand(value.shape))
    moved = matmul.output_axis(axis)
    forward.traces.note(output, scores._replace(axis=moved - output.dim()) if isinstance(moved, int) else scores)
    if forward.labels is not None and moved is not None:
        put_heads(forward.labels, output, moved, recorder.heads)
    return output


def _new_scores(call: Call, matmul: Contraction, product: Product) -> Scores:
    """The trace of a product's result, without values yet; a factor of the call itself counts as the first scaling."""
    unbiased = not matmul.biased or call.kwargs.get("beta") == 0
    scores = Scores(matmul.alpha, prescale=product.prescale, products=(product,), unbiased=unbiased)
    if matmul.alpha == 1:
        return scores
    product.scalings.append((product.site, matmul.alpha))
    return scores._replace(scaling_sites=frozenset([product.site]))


def _scaled_left(forward: FollowedForward, call: Call, matmul: Contraction, product: Product, axis: Axis) -> Tensor:
    """The left operand, multiplied by the gain."""
    recorder = forward.recorder
    # Parameters stand for the values, not seen yet, which may require grad if q and k do not; with `out=` nothing does.
    others = itertools.chain([matmul.right], () if call.has_target else recorder.module.parameters())

    def scale(left: Tensor, axis: int) -> Tensor:
        return scale_query(recorder, left, others, product.default, axis, product)

    return matmul.laid_out(contraction.on_heads(matmul.left, axis, recorder.heads, scale))


def _new_product(forward: FollowedForward, matmul: Contraction) -> Product:
    site = find_site("product")
    history = forward.plan.histories[site]
    traces = [forward.traces.get(matmul.left), forward.traces.get(matmul.right)]
    forward.plan.takes_values |= any(isinstance(trace, Operand) and trace.from_values for trace in traces)
    makers = tuple(maker for trace in traces if isinstance(trace, Scores) for maker in trace.products)
    assured = not any(isinstance(trace, Operand) and (trace.from_values or trace.learned) for trace in traces)
    learned = forward.is_learned(matmul.left)
    features = feature_pair(forward.labels, matmul.left, matmul.right, forward.recorder, matmul.components)
    if forward.labels is not None and features is not None:
        with torch.no_grad():  # looking up a parametrised weight computes it, and a checkpoint counts what is saved
            if takes_key_first(forward.recorder.module, features, forward.labels.linears):
                history.key_first = True
    return Product(
        site,
        history,
        index=len(forward.products),
        assured=assured and not learned and all(maker.assured for maker in makers),
        learned=learned,
        makers=makers,
        acts=not forward.is_rehearsal and history.makes_scores is not False,
        features=features,
        settled=history.is_settled(forward.recorder.state.steps),
    )


def _default_of(forward: FollowedForward, product: Product, trace: Scores) -> Factor | None:
    """Return the model's own beta in this call, if it can be known already; None to use that of the last call."""
    leader = product.history.leader
    if leader not in (None, product.site):
        found = next((each.default for each in forward.products if each.site == leader), None)
        if found is not None:
            return found
    after = product.after
    default = None if after is None else trace.prescale * trace.factor * after
    return None if default is None or is_zero(default) else default


def _head_axis(forward: FollowedForward, matmul: Contraction, site: Site) -> tuple[Axis | None, str]:
    """Return the axis of the heads in the left operand, or None and the reason why there is none."""
    if site.obstacle is not None:
        return None, site.obstacle
    if (misfit := misfit_of_scale(forward.recorder, matmul.size)) is not None:
        return None, f"a product at {site.line} over {misfit}"
    count, summed = forward.recorder.heads, matmul.left_axes.index(matmul.summed)
    labels = forward.labels_of(matmul.left, summed)
    shared = [dim for dim, axis in enumerate(matmul.left_axes) if axis in matmul.batch]
    axis = forward.head_axis(matmul.left, labels, summed, shared, site)
    if axis is not None:
        return axis, ""
    found = [] if labels is None else varying(labels, None)
    if summed not in found and not {*found} <= {*shared}:
        return (
            None,
            f"a product at {site.line} that sums over tokens, as between channels or in linear attention",
        )
    if labels is not None and (own := number_of_heads(labels, summed)) not in (None, count):
        return None, f"a product at {site.line} of {own} heads, where the module states {count}"
    return None, f"a product at {site.line} whose heads cannot be told from the batch ({REMEDY})"
