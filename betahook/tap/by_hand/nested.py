"""Nested tensors: `nn.MultiheadAttention` takes them in evaluation, on the fast path that goes past the tap.

The tap in `watching` runs such a batch here, one sequence at a time; attention written by hand it leaves alone.
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
    """Run each sequence of a nested batch, and nest the outputs; padding would be measured as queries.

    Args:
        forward: of `nn.MultiheadAttention`; it tells if torch takes the batch at all, and raises its own error if not.
        watched: the same, with beta.
        args: of the forward.
        kwargs: of the forward.

    Returns:
        The output, nested, and the attention weights `[batch, heads, queries, keys]` or `[batch, queries, keys]`, which
        torch pads; None where they are not asked for.
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
