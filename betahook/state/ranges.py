"""Ranges of the heads of each layer in tensors that are flat over all layers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from betahook.measure.groups import LayerSize


@dataclass(frozen=True)
class HeadRange:
    """Range of consecutive heads of one layer in the flat tensors.

    Attributes:
        layer: index of the layer.
        heads: columns of the heads in tensors `[..., heads]`.
        components: columns of the heads in tensors `[..., components]`, `head_dim` for each head.
        head_dim: d_k.
    """

    layer: int
    heads: slice
    components: slice
    head_dim: int

    def part(self, first: int, count: int) -> HeadRange:
        """Return the range of `count` of these heads, beginning with number `first`."""
        return HeadRange(
            self.layer,
            _part(self.heads, first, count),
            _part(self.components, first * self.head_dim, count * self.head_dim),
            self.head_dim,
        )


def head_ranges(layers: Sequence[LayerSize]) -> list[HeadRange]:
    """Return the range of each layer, with layers laid out one after another."""
    ranges, head, component = [], 0, 0
    for index, layer in enumerate(layers):
        width = layer.heads * layer.head_dim
        heads, columns = slice(head, head + layer.heads), slice(component, component + width)
        ranges.append(HeadRange(index, heads, columns, layer.head_dim))
        head, component = heads.stop, columns.stop
    return ranges


def heads_of(ranges: Sequence[HeadRange], layers: range) -> slice:
    """The heads of consecutive layers."""
    return slice(ranges[layers[0]].heads.start, ranges[layers[-1]].heads.stop) if layers else slice(0, 0)


def _part(whole: slice, first: int, count: int) -> slice:
    return slice(whole.start + first, whole.start + first + count)
