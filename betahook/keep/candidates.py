"""Candidate places for folding beta into a layer: the query's norms, its projection and a separate query bias.

Logits are linear in the query, so a factor on beta equals the same factor on the weights of the last learned, linear
operation on the query. Names do not reveal which operation that is, so `verification` tries every candidate. Only
`keep` uses this file; nothing here runs the model or writes to it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from torch import Tensor

from betahook.layer import AttentionLayer, query_projection
from betahook.models.families import QUERY_NORMS
from betahook.models.scaling import Norm, Scaling, added_query_norms, learned_norm, query_weights


def find_candidates(layer: AttentionLayer) -> Iterator[Scaling]:
    """Yield the places where the beta of a layer may go: first its query norms, without and with an offset of 1.

    A norm with an offset multiplies by `1 + w`, so that scaling its effect by `g` means `w -> g * (1 + w) - 1`.

    Raises:
        NoScalingError: a weight cannot be written to.
    """
    for norms in query_norms(layer):
        weights = [weight for norm in norms for weight in norm.weights(layer.head_dim, 1.0, offset=0.0)]
        yield Scaling(weights)
        yield Scaling([replace(weight, offset=float(weight.name == "weight")) for weight in weights])
    if (query := query_projection(layer)) is not None:
        yield from map(Scaling, query_weights(layer.module, query, layer.heads, layer.head_dim, 1.0))


def query_norms(layer: AttentionLayer) -> list[list[Norm]]:
    """Return the query norms with a learned weight per component, each followed by those of a further sequence."""
    module, heads, head_dim = layer.module, layer.heads, layer.head_dim
    norms = (learned_norm(module, name, heads, head_dim) for name in QUERY_NORMS)
    return [[norm, *added_query_norms(module, heads, head_dim)] for norm in norms if norm is not None]


def overlap(one: Tensor, other: Tensor) -> bool:
    """Return True if two tensors in one storage overlap in memory; gaps between strided entries count as occupied."""
    starts, ends = [], []
    for tensor in (one, other):
        steps = sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True))
        starts.append(tensor.storage_offset() * tensor.element_size())
        ends.append(starts[-1] + (steps + 1) * tensor.element_size())
    return max(starts) < min(ends)
