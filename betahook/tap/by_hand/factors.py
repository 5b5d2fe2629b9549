"""Factors on scores and operands: numbers, or tensors, which are read from the device only if necessary."""

from __future__ import annotations

import math
from numbers import Real
from typing import Any

import torch
from torch import Tensor

Factor = float | Tensor
"""A number, a 0-dim tensor, or one that broadcasts over heads."""

ALIKE = 1e-4
"""Relative difference up to which two numbers count as equal, to allow for rounding."""


def same_factor(a: Factor, b: Factor) -> bool:
    """Return True if two factors are known to be equal, without reading a tensor."""
    return a is b or (not isinstance(a, Tensor) and not isinstance(b, Tensor) and a == b)


def are_alike(one: Factor, other: Factor, *, are_read: bool) -> bool:
    """Return True if two factors differ by rounding at most; tensors count as alike unless `are_read`."""
    # Not by a quotient: scores may be scaled by 0 for another use.
    if not (isinstance(one, Tensor) or isinstance(other, Tensor)):
        return math.isclose(one, other, rel_tol=ALIKE)
    if not are_read:
        return True
    return bool((torch.as_tensor(one - other).abs() <= ALIKE * torch.as_tensor(other).abs()).all())


def is_zero(factor: Factor) -> bool:
    """Return True for the number 0, e.g. the log of a single token: all keys then have equal weight, for any beta."""
    return not isinstance(factor, Tensor) and factor == 0


def number(factor: Any) -> Factor | None:
    """Return a factor as a number or 0-dim tensor; None if it is neither a number nor a tensor of one element."""
    if isinstance(factor, Tensor):
        if factor.numel() != 1:
            return None
        alone = factor.detach().reshape(())
        return float(alone) if factor.device.type == "cpu" and not factor.requires_grad else alone
    return float(factor) if isinstance(factor, Real) else None  # a NumPy number would not multiply a tensor


def divided(tensor: Tensor, factor: Factor) -> Tensor:
    """Return `tensor / factor`, or the tensor itself, not a copy, if the factor is 1."""
    return tensor if isinstance(factor, float) and factor == 1 else tensor / factor
