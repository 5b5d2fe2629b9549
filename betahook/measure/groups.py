"""Groups of heads that share one beta: maps between heads and groups, and the statistics of each group.

A `State` has one `HeadGroups` for the units that its controllers move, and one for the layers, which the metrics and
the audit report on. Tensors in, tensors out: nothing here knows about modules.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Literal

import torch
from torch import Tensor

from betahook import theory
from betahook.measure import components, statistics
from betahook.measure.statistics import Statistics
from betahook.measure.weights import WeightStd


@dataclass(frozen=True)
class LayerSize:
    """Sizes of one attention layer.

    Attributes:
        heads: number of query heads.
        head_dim: d_k.
        query_width, key_width: d_x, the number of input features of each projection; NaN if it was not found.
    """

    heads: int
    head_dim: int
    query_width: float = math.nan
    key_width: float = math.nan


@dataclass(frozen=True)
class GroupBeta:
    """The beta of each group, and how the heads differ from it.

    Attributes:
        of_group: the beta of each group, `[groups]`.
        of_head: for each head, the beta of its group, `[heads]`.
        ratios: beta of each head divided by that of its group, `[heads]`: exactly 1 where the heads of a group have the
            same, and where beta is not known yet. None if each head is its own group.
    """

    of_group: Tensor
    of_head: Tensor
    ratios: Tensor | None


@dataclass(frozen=True)
class HeadGroups:
    """Groups of heads that share one beta: all heads of a layer, or single heads.

    A group is a run of neighbouring columns in the flat tensors over all heads of all layers.

    Attributes:
        lengths: number of heads in each group, `[groups]`.
        head_dim: d_k, `[groups]`.
        query_width, key_width: d_x of each projection, `[groups]`; NaN where the projection was not found.
        of_head: the group of each head, int64 `[heads]`.
        widths: d_k of each head, int64 `[heads]`.
        powers: power of a factor on the query in each row of a table, see `statistics.POWERS`.
    """

    lengths: Tensor
    head_dim: Tensor
    query_width: Tensor
    key_width: Tensor
    of_head: Tensor
    widths: Tensor
    powers: Tensor

    @classmethod
    def of(cls, layers: Sequence[LayerSize], device: torch.device) -> HeadGroups:
        """Group the heads by layer."""
        rows = [[layer.heads, layer.head_dim, layer.query_width, layer.key_width] for layer in layers]
        lengths, head_dim, query_width, key_width = torch.tensor(rows, dtype=torch.float32, device=device).T
        heads = [(index, layer.head_dim) for index, layer in enumerate(layers) for _ in range(layer.heads)]
        of_head, widths = torch.tensor(heads, device=device).T
        powers = torch.tensor(statistics.POWERS, dtype=torch.float32, device=device)
        return cls(lengths.long(), head_dim, query_width, key_width, of_head.contiguous(), widths.contiguous(), powers)

    def by_head(self) -> HeadGroups:
        """Return the same heads, each as its own group."""
        head_dim, query_width, key_width = (
            values.index_select(0, self.of_head) for values in (self.head_dim, self.query_width, self.key_width)
        )
        each = torch.arange(len(self.of_head), device=self.of_head.device)
        return HeadGroups(torch.ones_like(each), head_dim, query_width, key_width, each, self.widths, self.powers)

    def to(self, device: torch.device) -> HeadGroups:
        """Return the same groups with their tensors on another device."""
        return HeadGroups(*(getattr(self, field.name).to(device) for field in fields(self)))

    @property
    def are_heads(self) -> bool:
        """True if each head is its own group."""
        return len(self.lengths) == len(self.of_head)

    def reduce(self, values: Tensor, reduction: Literal["sum", "max"]) -> Tensor:
        """The sum or the maximum of floating-point values in each group, `[heads] -> [groups]`."""
        return values if self.are_heads else statistics.by_segment(values, reduction, self.lengths)

    def geometric_mean(self, values: Tensor) -> Tensor:
        """The geometric mean of the positive values in each group, `[heads] -> [groups]`."""
        return values if self.are_heads else statistics.geometric_mean(values, self.lengths, self.of_head)

    def spread(self, values: Tensor) -> Tensor:
        """Give each head the value of its group, `[groups] -> [heads]`."""
        return values if self.are_heads else values.index_select(0, self.of_head)

    def compare(self, of_group: Tensor, beta: Tensor) -> GroupBeta:
        """Compare the beta of each group, `of_group [groups]`, with that of its heads, `beta [heads]`."""
        of_head = self.spread(of_group)
        return GroupBeta(of_group, of_head, None if self.are_heads else (beta / of_head).nan_to_num(nan=1.0))

    def observe(self, table: Tensor, moments: Tensor, ratios: Tensor | None = None) -> Statistics:
        """Statistics of each group from the sums over all heads.

        Args:
            table: `[quantities, heads]`, see `measure.statistics`; not modified from now on.
            moments: `[4, components]`, see `measure.components`.
            ratios: `GroupBeta.ratios`, by which the query of each head is multiplied, so that the beta of a group times
                these statistics equals what its heads have with their own betas. None for the query as it is.
        """

        def relative(sums: Tensor) -> Tensor:
            return sums if ratios is None else (ratios[:, None] ** self.powers * sums.T).T

        def with_averages() -> Tensor:
            return relative(components.with_averages(table, moments, self.widths))

        return Statistics.from_table(relative(table), None if self.are_heads else self.lengths, with_averages)

    def weight_std(self, sums: Tensor, ratios: Tensor | None = None) -> WeightStd:
        """The std of the entries of W_q and W_k of each group, from `[6, heads]`, see `measure.weights`.

        With `ratios`, as in `observe`, W_q is multiplied by them.
        """
        if ratios is not None:
            sums = torch.cat([sums[:1], sums[1:2] * ratios, sums[2:3] * ratios.square(), sums[3:]])
        query, key = statistics.by_segment(sums.T, "sum", self.lengths).T.split(3)
        return WeightStd(statistics.population_std(*query), statistics.population_std(*key))

    def projected_variances(self, observed: Statistics, weight_std: WeightStd) -> tuple[Tensor, Tensor]:
        """Variance of a component of q, and of k, that the weights and their inputs predict, `[groups]` each."""
        return (
            theory.projected_variance(self.query_width, observed.input_std_q, weight_std.query),
            theory.projected_variance(self.key_width, observed.input_std_k, weight_std.key),
        )

    def predicted_std(self, observed: Statistics, weight_std: WeightStd) -> Tensor:
        """Score std that W_q, W_k and their inputs predict, `[groups]`; see `theory.predicted_std`."""
        return theory.predicted_std(self.head_dim, *self.projected_variances(observed, weight_std))
