"""Places at which the query of a layer may take a factor: its norms and its projection.

Logits are linear in the query, so a factor on beta is the same factor on the last learned, linear thing that the query
passes. Names do not tell which that is, so `verification` tries every place. Only `keep` uses this file; it refuses
nothing and runs nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from betahook.layer import AttentionLayer
from betahook.models.families import ADDED_QUERY_NORMS, QUERY_NORMS
from betahook.models.projections import Part, Projection, added_queries


@dataclass(frozen=True)
class Place:
    """Weights that scale the query.

    Attributes:
        parts: of parameters; of a norm that all heads share, those of one head.
        offset: what the module adds to the entries of the first part, 1 in norms whose factor is `1 + w`.
    """

    parts: list[Part]
    offset: float = 0.0

    def scaled(self, gain: Tensor, error: float = 0.0, seed: int = 0) -> list[Tensor]:
        """New values of the parts, for the factors `gain [heads]`; each entry is off by a relative `error`."""
        values = []
        generator = torch.Generator().manual_seed(seed)
        for index, entries in enumerate(self.read()):
            offset = self.offset if index == 0 else 0.0
            factor = gain[: len(entries), None, None].to(entries.device)
            if error:
                signs = 2 * torch.randint(2, entries.shape, generator=generator) - 1
                factor = factor * (1 + error * signs.to(entries.device))
            values.append(((entries.double() + offset) * factor - offset).to(entries.dtype))
        return values

    def read(self) -> list[Tensor]:
        """Copies of the parts."""
        return [part.read() for part in self.parts]

    def write(self, values: list[Tensor]) -> None:
        """Set the parts."""
        for part, value in zip(self.parts, values, strict=True):
            part.write(value)
        torch.clear_autocast_cache()  # a forward under autocast would go on with its copy of the old values


def find_places(layer: AttentionLayer) -> Iterator[Place]:
    """The places of a layer, the norms of its query first; all its `carriers` must be plain parameters."""
    for parameters in query_norms(layer):
        rows = torch.arange(parameters[0].numel(), device=parameters[0].device).view(-1, layer.head_dim)
        parts = [Part(parameter, parameter.detach().view(-1, 1), rows) for parameter in parameters]
        yield Place(parts)
        yield Place(parts, offset=1.0)
    if projections := _query_projections(layer):
        yield Place([part for projection in projections for part in projection.parts()])


def carriers(layer: AttentionLayer) -> list[Tensor]:
    """The tensors of a layer that a factor may go into."""
    stored = [projection.stored for projection in _query_projections(layer)]
    return [parameter for parameters in query_norms(layer) for parameter in parameters] + stored


def _query_projections(layer: AttentionLayer) -> list[Projection]:
    """The projections that make the query: one, or one of each sequence that attends."""
    if layer.projections is None:
        return []
    return [layer.projections[0], *added_queries(layer.module, layer.projections[0])]


def query_norms(layer: AttentionLayer) -> list[list[nn.Parameter]]:
    """Weight and bias of each norm of the query that learns an entry for each component, of one head or of all.

    With those of the norm of a further sequence in joint attention.
    """
    added = [parameter for name in ADDED_QUERY_NORMS for parameter in _learned(layer, name)]
    return [[*learned, *added] for name in QUERY_NORMS if (learned := _learned(layer, name))]


def _learned(layer: AttentionLayer, name: str) -> list[nn.Parameter]:
    norm = getattr(layer.module, name, None)
    weight, bias = getattr(norm, "weight", None), getattr(norm, "bias", None)
    if not isinstance(weight, nn.Parameter) or weight.numel() not in (layer.head_dim, layer.heads * layer.head_dim):
        return []
    return [weight, bias] if isinstance(bias, nn.Parameter) else [weight]


def overlap(one: Tensor, other: Tensor) -> bool:
    """Tell if two tensors on one storage overlap in memory; strided ones count as filling theirs."""
    starts, ends = [], []
    for tensor in (one, other):
        steps = sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True))
        starts.append(tensor.storage_offset() * tensor.element_size())
        ends.append(starts[-1] + (steps + 1) * tensor.element_size())
    return max(starts) < min(ends)
