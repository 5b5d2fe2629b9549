"""The factor on the query by which beta acts, and whose gradient is the sensitivity; both taps call `scale_query`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Protocol

import torch
from torch import Tensor

from betahook import compat
from betahook.tap.recorder import Recorder

SMALL = 2**18
"""Entries of the largest query that is multiplied by a leaf, whose gradient gives the sensitivity. Autograd keeps the
unscaled query for it, beside the scaled one, but runs no Python, which takes longer than all else for a small query."""


class ScaledProduct(Protocol):
    """A product of attention by hand, as far as the factor on its query is concerned; see `by_hand.traces.Product`."""

    acts: bool
    settled: bool
    counts: bool
    acting: Tensor | None


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
        recorder: of the layer whose beta it is.
        query: heads lie along `axis`.
        others: what else goes into the attention: where one of them asks for a gradient, the logits have one too.
        default: the model's own beta, where this call shows it: the layer has just noted it.
        axis: of the heads.
        product: what the query goes into, where that is yet to show whether it makes scores.
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
        product.acting = gain.detach().flatten()
    # The gradient of a leaf is the sensitivity; and in a transform only what the model computes may run.
    if gain.requires_grad or not has_gradient or compat.is_transformed():
        return _times(query, gain)
    probe = recorder.probe
    probe = probe if probe.device == query.device else probe.to(query.device)
    # Also while paused: gradient checkpointing counts what a forward saves, and its recomputation comes later.
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
    """Return the gain that the recorder has at hand, `[heads, 1, 1]`; None where it has to be made in the forward."""
    if default is None or isinstance(default, Tensor):  # what is at hand was made by a number that was noted
        return None
    if axis != query.dim() - 3:  # along which it would not broadcast
        return None
    if product is not None and not product.settled:  # it might make no scores, but what reaches a leaf counts
        return None
    if compat.is_captured(query.device) or compat.is_transformed():  # a graph is run again, with another beta
        return None
    gain = recorder.ready_gain(as_leaf=as_leaf)
    return gain if gain is None or gain.device == query.device else gain.to(query.device)


def _times(values: Tensor, gain: Tensor) -> Tensor:
    """`values * gain` in the dtype of `values`."""
    has_no_out = torch.is_grad_enabled() or torch.compiler.is_compiling() or compat.is_batched(values)
    if values.dtype == gain.dtype or has_no_out:
        product = values * gain
        return product if product.dtype == values.dtype else product.to(values.dtype)
    # Rounded while it is written: a wider product, to be read again, would be most of the cost.
    return torch.mul(values, gain, out=torch.empty_like(values))


class ScaleQuery(torch.autograd.Function):
    """`query * gain`, whose backward also gives the sensitivity to `log gain`, as the gradient of a probe.

    For queries larger than `SMALL`, and where the gain is made in the forward.

    Logits are linear in the query, so `dL/d log beta = <query * gain, dL/d(query * gain)>`, for each head. Both factors
    are at hand: the scaled query is what the attention keeps for its own backward, hence no further memory.
    """

    # Not in two parts, `forward` and `setup_context`: torch takes twice the time of all of this for them.
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
            ctx: keeps what the backward needs.
            query: of any shape, heads along `axis`.
            gain: float32, broadcasts to the query.
            probe: float32 `[heads]`.
            axis: of the heads.
            measured: True if the backward gives the sensitivity.
            product: what the query goes into; its `counts` says later whether that is a part of the sensitivity.
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
            if torch.is_grad_enabled():  # this backward is differentiated in turn, and beta acts in it once more
                gain = gain * probe.exp().view(gain.shape)
            others = [axis for axis in range(gradient.dim()) if axis != ctx.axis]
            # 0 + gradient * scaled: so the products are in float32 or better without a copy of their factors.
            products = torch.addcmul(probe.detach().view(gain.shape), gradient, scaled)
            sensitivity = products.sum(others, dtype=gain.dtype)
        of_query = _times(gradient, gain) if ctx.needs_input_grad[0] else None
        return of_query, None, sensitivity, None, None, None
