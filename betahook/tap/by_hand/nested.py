"""Nested tensors, which `nn.MultiheadAttention` takes in evaluation, on a fast path that bypasses the tap.

The tap in `watching` passes such a batch to `run_each`, which runs one sequence at a time. Attention written by hand
that receives a nested tensor is left alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor


def is_nested(value: object) -> bool:
    """Return True for a nested tensor."""
    return isinstance(value, Tensor) and value.is_nested


def has_nested(args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Return True if an argument is a nested tensor."""
    return any(map(is_nested, (*args, *kwargs.values())))


def run_each(
    forward: Callable[..., Any], watched: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[Tensor, Tensor | None]:
    """Run each sequence of a nested batch, and nest the outputs; if padded, the padding would be measured as queries.

    Args:
        forward: the forward of `nn.MultiheadAttention`, run first; it raises torch's own error for a wrong batch.
        watched: the same forward with the tap.
        args: the positional arguments of the forward.
        kwargs: the keyword arguments of the forward.

    Returns:
        The nested output, and the attention weights `[batch, heads, queries, keys]` or `[batch, queries, keys]`, which
        torch pads; None if they were not asked for.
    """
    output, weights = forward(*args, **kwargs)
    parts = []
    for index in range(output.size(0)):

        def pick(value: Any, index: int = index) -> Any:
            return value[index][None] if is_nested(value) else value

        part, of_part = watched(*map(pick, args), **{name: pick(value) for name, value in kwargs.items()})
        parts.append(part[0])
        if weights is not None:
            weights[index, ..., : of_part.shape[-2], : of_part.shape[-1]] = of_part[0]
    return torch.nested.as_nested_tensor(parts), weights
