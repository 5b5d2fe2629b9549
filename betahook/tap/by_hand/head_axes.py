"""The axis of the heads in a tensor, found from what the module computed and not from sizes, which may coincide.

In the first forward each entry that comes out of a projection gets a label, see `models.labels`. The axis of a query
along which the labels vary, other than that of its components, is the axis of the heads. `forward` looks up the labels;
this file only interprets them.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from betahook.models.labels import (
    PROJECTION_STRIDE,
    UNKNOWN,
    FeaturePair,
    Features,
    Labels,
    device_of,
    features_of_heads,
)
from betahook.tap.by_hand.contraction import Axis, Shared, align_with_heads
from betahook.tap.recorder import Recorder

REMEDY = "make q and k [batch, num_heads, tokens, d_k], with num_heads as the module states it"
"""Advice appended when the axis of the heads is not found."""


def misfit_of_scale(recorder: Recorder, width: int) -> str | None:
    """Return how many components contradict a d_k that was inferred from the scale; None if they do not."""
    if not recorder.attention.is_by_scale or width == recorder.head_dim:
        return None
    return f"{width} components, where its scale says {recorder.head_dim} (set its attribute head_dim before attach)"


def feature_pair(
    labels: Labels | None, query: Tensor, key: Tensor, recorder: Recorder, components: tuple[int, int] = (-1, -1)
) -> FeaturePair | None:
    """Return the features that q and k of a layer come from; None in a forward without labels.

    Args:
        labels: the labels of the forward.
        query, key: q and k.
        recorder: the layer's recorder.
        components: the axis of the components in each.
    """
    if labels is None:
        return None

    def features(tensor: Tensor, axis: int) -> Features | None:
        own = labels.get(tensor)
        sizes = recorder.heads, recorder.head_dim, len(query) // recorder.heads
        return None if own is None else features_of_heads(own, [axis], *sizes)

    return features(query, components[0]), features(key, components[1])


def put_heads(labels: Labels, scores: Tensor, axis: Axis, heads: int) -> None:
    """Label each entry of scores with the number of its head."""
    if axis != "single":
        numbers = align_with_heads(torch.arange(heads, device=device_of(scores)), axis, scores)
        labels.put_numbers(scores, numbers.expand(scores.shape).contiguous())


def varying(labels: Tensor, summed: int | None) -> list[int]:
    """Return the axes along which the labels of a tensor vary, other than `summed`, that of the components."""
    if labels.numel() == 0:
        return []
    least = labels.masked_fill(labels == UNKNOWN, PROJECTION_STRIDE * PROJECTION_STRIDE)
    axes = (axis for axis in range(labels.dim()) if axis != summed)
    return [axis for axis in axes if bool((labels.amax(axis) > least.amin(axis)).any())]


def number_of_heads(labels: Tensor, summed: int) -> int | None:
    """Count the heads along the only axis of an operand, other than `summed`, along which its labels vary.

    Return None if there is no such axis, or more than one.
    """
    axes = varying(labels, summed)
    if len(axes) != 1:
        return None
    along_axis = labels.movedim(axes[0], 0).flatten(1).amax(1)
    return len(along_axis[along_axis != UNKNOWN].unique())


def of_inputs(shapes: Sequence[Sequence[int]], heads: int) -> int | None:
    """Find the axis of the heads in inputs `[..., ..., ..., d_k]` by its size; None if another axis may be it, too.

    All inputs are judged together. Keys with fewer heads have no axis of that size, unless there are as many sequences
    as heads; only the queries, with two such axes, then show that the size is ambiguous. The first axis is that of
    sequences or tokens.
    """
    found = {axis for shape in shapes for axis, size in enumerate(shape[:-1]) if size == heads}
    is_clear = len(found) == 1 and 0 not in found and all(shape[-1] not in shape[:-1] for shape in shapes)
    return found.pop() if is_clear else None


def find(labels: Tensor, summed: int | None, heads: int) -> Axis | None:
    """Find the axis of the heads in a tensor by its labels; None if they do not show it.

    Args:
        labels: the labels, of the shape of the tensor.
        summed: the axis of the components, along which labels vary as well; None if there is none.
        heads: number of heads.
    """
    found = varying(labels, summed)
    if len(found) > 1:  # the tokens of two projections were joined, e.g. those of an image and a text
        labels = torch.where(labels == UNKNOWN, labels, labels % PROJECTION_STRIDE)
        found = varying(labels, summed)
    if len(found) > 1 and summed is not None:  # rotary embeddings moved the components of one of them only
        least = labels.masked_fill(labels == UNKNOWN, PROJECTION_STRIDE).amin(summed, keepdim=True)
        labels = least.masked_fill(least == PROJECTION_STRIDE, UNKNOWN)
        found = varying(labels, summed)
    if len(found) != 1:
        return None
    axis, size = found[0], labels.shape[found[0]]
    if size == heads:
        return axis
    if size % heads:
        return None
    labels_along = labels.movedim(axis, 0).reshape(size, -1).amax(1)
    if torch.equal(labels_along, labels_along[:heads].repeat(size // heads)):
        return Shared(axis)
    if torch.equal(labels_along, labels_along[:: size // heads].repeat_interleave(size // heads)):
        return Shared(axis, heads_first=True)
    return None
