"""What has one beta of its own, a layer or a head, as runs of heads in the flat tensors."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from betahook import theory
from betahook.layers import Layers
from betahook.measure import statistics
from betahook.measure.statistics import Statistics


@dataclass(frozen=True)
class HeadGroups:
    """What has one beta: every layer, or every head. A unit is a run of heads in the flat tensors.

    Attributes:
        lengths: heads in each unit, `[units]`.
        heads: their sum.
        head_dim: d_k, `[units]`.
        query_width, key_width: d_x of the two projections, `[units]`; NaN where they were not found.
    """

    lengths: Tensor
    heads: int
    head_dim: Tensor
    query_width: Tensor
    key_width: Tensor

    @classmethod
    def of(cls, layers: Layers, *, per_head: bool, device: torch.device) -> HeadGroups:
        rows = []
        for layer in layers.values():
            widths = [p.width for p in layer.projections] if layer.projections else [math.nan, math.nan]
            rows += (
                layer.heads * [[1, layer.head_dim, *widths]] if per_head else [[layer.heads, layer.head_dim, *widths]]
            )
        lengths, head_dim, query_width, key_width = torch.tensor(rows, dtype=torch.float32, device=device).T
        heads = sum(layer.heads for layer in layers.values())
        return cls(lengths.long(), heads, head_dim, query_width, key_width)

    def first(self, values: Tensor) -> Tensor:
        """`[heads] -> [units]`, the value of the first head of each."""
        return statistics.first_of_each(values, self.lengths)

    def largest(self, values: Tensor) -> Tensor:
        """`[heads] -> [units]`, the largest value in each."""
        return statistics.by_segment(values, "max", self.lengths)

    def geometric_mean(self, values: Tensor) -> Tensor:
        """`[heads] -> [units]`, of positive values."""
        return statistics.geometric_mean(values, self.lengths)

    def spread(self, values: Tensor) -> Tensor:
        """`[units] -> [heads]`."""
        return values.repeat_interleave(self.lengths, output_size=self.heads)

    def observe(self, table: Tensor) -> Statistics:
        """Statistics of each unit from sums over all heads, `[quantities, heads]`."""
        return Statistics.from_table(statistics.pool(table, self.lengths))

    def projected_variances(self, observed: Statistics) -> tuple[Tensor, Tensor]:
        """Variance of a component of q, and of k, that the weights and their input predict, `[units]` each."""
        return (
            theory.projected_variance(self.query_width, observed.input_std_q, observed.weight_std_q),
            theory.projected_variance(self.key_width, observed.input_std_k, observed.weight_std_k),
        )

    def predicted_std(self, observed: Statistics) -> Tensor:
        """What W_q, W_k and their inputs predict, `[units]`; see `theory.predicted_std`."""
        return theory.predicted_std(self.head_dim, *self.projected_variances(observed))
