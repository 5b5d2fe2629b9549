"""Bake beta into the weights, so that the model needs betahook no longer.

Logits are linear in the query, so a factor on beta is the same factor on whatever is the last learned, linear thing
that the query passes: the weight of its norm where there is one, else the q rows of the projection and its bias.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from betahook import tap
from betahook.hook import Hook
from betahook.layers import AttentionLayer

NORMS = ("q_norm", "q_layernorm", "q_b_norm", "query_layernorm", "query_norm")
"""Norms of the query between its projection and the scores."""
OBSTACLES = {
    "clip_qkv": "it clips q, k and v after the projection",
    "qk_norm": "it normalises q after its learned parts",
    "distance_embedding": "its query also makes the relative position bias",
    "linear_pos": "its query also makes the relative position scores",
}
"""Attributes of attention modules in which a factor on the query projection is not a factor on the scores alone."""


class FoldError(ValueError):
    """Beta cannot be folded exactly into a layer; the message says why and what to do."""


@dataclass(frozen=True)
class _Change:
    """New values for a parameter, or for a part of it."""

    parameter: nn.Parameter
    part: Tensor  # a view of the parameter's data
    values: Tensor


@torch.no_grad()
def fold(model: nn.Module | Hook) -> None:
    """Bake the current beta of a hooked model into its weights and detach: a plain model with the same outputs.

    Args:
        model: a hooked model, or its hook.

    Raises:
        FoldError: a layer has no exact fold, or its new weights would not be finite. Nothing is changed, the hook
            stays attached.
        ValueError: the model is not hooked.
    """
    hook = model if isinstance(model, Hook) else _hook_of(model)
    if not hook.attached:
        raise ValueError("fold() on a detached hook: beta is the model's own, there is nothing to fold")
    changes = [change for layer in hook.layers.values() for change in _changes(layer)]
    seen: set[int] = set()
    for change in changes:
        if id(change.parameter) in seen:
            raise FoldError("two hooked layers share a query weight, which cannot hold two factors; leave one out")
        if not bool(change.values.isfinite().all()):
            raise FoldError("a folded weight would be NaN or infinite; beta or the weight is not finite")
        seen.add(id(change.parameter))
    for change in changes:
        change.part.copy_(change.values)
    hook.detach()


def _hook_of(model: nn.Module) -> Hook:
    for module in model.modules():
        layer = getattr(module, tap.ATTRIBUTE, None)
        if isinstance(layer, AttentionLayer):
            return layer.hook
    raise ValueError(f"{type(model).__name__} is not hooked: call betahook.attach(model) first")


def _changes(layer: AttentionLayer) -> Iterator[_Change]:
    """What folding this layer would write."""
    gain = layer.current_gain.double()
    if bool(gain.isnan().any()):
        raise _refusal(layer, "its own beta is unknown before the first forward; run one")
    if bool((gain == 1).all()):
        return
    for attribute, reason in OBSTACLES.items():
        if getattr(layer.module, attribute, None) is not None:
            raise _refusal(layer, reason)
    norm = next((n for n in (getattr(layer.module, name, None) for name in NORMS) if n is not None), None)
    if norm is not None and not isinstance(norm, nn.Identity):
        yield from _norm_changes(layer, norm, gain)
    else:
        yield from _projection_changes(layer, gain)


def _projection_changes(layer: AttentionLayer, gain: Tensor) -> Iterator[_Change]:
    """Scale the q rows of the weight, and of the bias."""
    if layer.projections is None:
        raise _refusal(layer, "its query projection has no known form")
    query = layer.projections[0]
    if query.wrapped:
        raise _refusal(layer, "its query projection is wrapped by an adapter; merge that first")
    for parameter, part in query.parts():
        if not part.is_floating_point():
            raise _refusal(layer, f"its query weight is of {part.dtype}; dequantise it first")
        yield _Change(parameter, part, (part.double() * gain.to(part.device)[:, None, None]).to(part.dtype))


def _norm_changes(layer: AttentionLayer, norm: nn.Module, gain: Tensor) -> Iterator[_Change]:
    """Scale a query norm by its weight, `w` or `1 + w`, whichever scales its output."""
    weight, bias = getattr(norm, "weight", None), getattr(norm, "bias", None)
    if not isinstance(weight, nn.Parameter):
        raise _refusal(layer, "its query norm has no weight")
    if weight.numel() == layer.head_dim:
        if not bool((gain == gain[0]).all()):
            raise _refusal(layer, "its query norm is shared by all heads, whose betas differ")
        factor = gain[:1].to(weight.device)
    elif weight.numel() == layer.heads * layer.head_dim:
        factor = gain.to(weight.device).repeat_interleave(layer.head_dim).view_as(weight)
    else:
        raise _refusal(layer, f"its query norm has a weight of shape {list(weight.shape)}")
    example = torch.randn(weight.shape, dtype=weight.dtype, generator=torch.Generator().manual_seed(0)).to(
        weight.device
    )
    expected = norm(example) * factor
    for offset in (0.0, 1.0):
        changes = [_Change(weight, weight.data, ((weight.double() + offset) * factor - offset).to(weight.dtype))]
        if isinstance(bias, nn.Parameter):
            changes.append(_Change(bias, bias.data, (bias.double() * factor).to(bias.dtype)))
        trial = copy.deepcopy(norm)
        trial.load_state_dict({n: c.values for n, c in zip(("weight", "bias"), changes, strict=False)}, strict=False)
        if torch.allclose(trial(example).double(), expected.double(), rtol=1e-2, atol=1e-6):
            yield from changes
            return
    raise _refusal(layer, f"its query norm {type(norm).__name__} does not scale with its weight")


def _refusal(layer: AttentionLayer, reason: str) -> FoldError:
    return FoldError(
        f"cannot fold beta into {layer.name} ({type(layer.module).__name__}): {reason}. "
        "Until then keep the hook attached, or leave the layer out with layers=..."
    )
