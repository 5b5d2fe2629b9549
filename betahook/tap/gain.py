"""The gain, a factor on the query through which beta acts; its gradient is the sensitivity.

Both taps call `scale_query` on every query, and pass the result to the model's own attention.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Protocol

import torch
from torch import Tensor

from betahook import compat
from betahook.tap.recorder import Recorder

SMALL = 2**18
"""Maximum number of query entries for which the gain is an autograd leaf, whose gradient gives the sensitivity.
With a leaf, autograd saves the unscaled query as well as the scaled one, but runs no Python, which would dominate the
cost of a small query."""


class ScaledProduct(Protocol):
    """The attributes of a product in attention by hand that scaling its query needs, see `by_hand.products.Product`."""

    acts: bool
    settled: bool
    counts: bool
    gain: Tensor | None


def scale_query(
    recorder: Recorder,
    query: Tensor,
    others: Iterable[Tensor],
    default: float | Tensor | None,
    axis: int = 1,
    product: ScaledProduct | None = None,
) -> Tensor:
    """`query * beta / beta_default`, bit-identical to `query` while beta is the model's own.

    Args:
        recorder: the recorder of the layer.
        query: the query, with heads along `axis`.
        others: the other inputs of the attention: if any of them requires grad, the logits receive a gradient too.
        default: the model's own beta, if this call shows it; the layer has just noted it then.
        axis: axis of the heads.
        product: the product that the query enters, if it is yet to be seen whether that makes scores.
    """
    recorder.move_state_to(query.device)
    has_gradient = torch.is_grad_enabled() and (query.requires_grad or any(x.requires_grad for x in others))
    gain = _gain_at_hand(recorder, query, default, axis, product, as_leaf=has_gradient and query.numel() <= SMALL)
    if gain is None:
        gain = recorder.local_gain(default).detach().to(query.device)
        if product is not None and not product.acts:
            gain = torch.ones_like(gain)
        gain = gain.view([-1 if dim == axis else 1 for dim in range(query.dim())])
    if product is not None:
        product.gain = gain.detach().flatten()
    # The gradient of a leaf gives the sensitivity; and in a transform only the model's own computation may run.
    if gain.requires_grad or not has_gradient or compat.is_transformed():
        return _times(query, gain)
    probe = recorder.probe
    probe = probe if probe.device == query.device else probe.to(query.device)
    # Also while paused: checkpointing compares the tensors saved by a forward with those of its later recomputation.
    scaled: Tensor = ScaleQuery.apply(query, gain, probe, axis, not recorder.state.paused, product)  # type: ignore[no-untyped-call]
    return scaled


def _gain_at_hand(
    recorder: Recorder,
    query: Tensor,
    default: float | Tensor | None,
    axis: int,
    product: ScaledProduct | None,
    *,
    as_leaf: bool,
) -> Tensor | None:
    """Return the gain that the recorder has ready, `[heads, 1, 1]`; None if it must be computed in this forward."""
    if default is None or isinstance(default, Tensor):  # the ready gain is for a default that is a number
        return None
    if axis != query.dim() - 3:  # `[heads, 1, 1]` would not broadcast along it
        return None
    if product is not None and not product.settled:  # it may make no scores, but a leaf's gradient always counts
        return None
    if compat.is_captured(query.device) or compat.is_transformed():  # a graph runs again, with another beta
        return None
    gain = recorder.ready_gain(as_leaf=as_leaf)
    return gain if gain is None or gain.device == query.device else gain.to(query.device)


def _times(values: Tensor, gain: Tensor) -> Tensor:
    """`values * gain` in the dtype of `values`."""
    has_no_out = torch.is_grad_enabled() or torch.compiler.is_compiling() or compat.is_batched(values)
    if values.dtype == gain.dtype or has_no_out:
        product = values * gain
        return product if product.dtype == values.dtype else product.to(values.dtype)
    # Round while writing: storing a wider product and reading it again would be most of the cost.
    return torch.mul(values, gain, out=torch.empty_like(values))


class ScaleQuery(torch.autograd.Function):
    """`query * gain`, whose backward also returns the sensitivity to `log gain`, as the gradient of a probe.

    Used for queries larger than `SMALL`, and where the gain is computed in the forward.

    Logits are linear in the query, so `dL/d log beta = <query * gain, dL/d(query * gain)>`, for each head. This takes
    no extra memory, because the attention saves the scaled query for its own backward anyway.
    """

    # Not split into `forward` and `setup_context`, for which alone torch takes twice as long as for all of this.
    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        gain: Tensor,
        probe: Tensor,
        axis: int,
        measured: bool,
        product: ScaledProduct | None = None,
    ) -> Tensor:
        """Scale a query.

        Args:
            ctx: saves what the backward pass needs.
            query: any shape, with heads along `axis`.
            gain: float32, broadcasts to the query.
            probe: float32 `[heads]`.
            axis: axis of the heads.
            measured: True if the backward pass is to return the sensitivity.
            product: the product that the query enters; the backward pass reads from its `counts` whether the gradient
                is a part of the sensitivity.
        """
        scaled = _times(query, gain)
        ctx.axis, ctx.measured, ctx.product = axis, measured, product
        ctx.save_for_backward(scaled, gain, probe)
        return scaled

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, None, Tensor | None, None, None, None]:
        scaled, gain, probe = ctx.saved_tensors
        sensitivity = None
        if ctx.measured and (ctx.product is None or ctx.product.counts):
            if torch.is_grad_enabled():  # double backward: beta acts in this backward pass too
                gain = gain * probe.exp().view(gain.shape)
            others = [axis for axis in range(gradient.dim()) if axis != ctx.axis]
            # 0 + gradient * scaled: the float32 zeros make the products float32 or better without copying the factors.
            products = torch.addcmul(probe.detach().view(gain.shape), gradient, scaled)
            sensitivity = products.sum(others, dtype=gain.dtype)
        of_query = _times(gradient, gain) if ctx.needs_input_grad[0] else None
        return of_query, None, sensitivity, None, None, None
