"""Distributed ranks: checks if there are several, and small reductions of numbers over them.

The measured sums are reduced in a single collective elsewhere, see `statistics.all_reduce`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def is_distributed() -> bool:
    """Return True if there are several ranks."""
    distributed = torch.distributed
    return distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1


def is_first_rank() -> bool:
    """Return True on exactly one rank, and if there are no others."""
    return not is_distributed() or torch.distributed.get_rank() == 0


def range_over_ranks(number: int, device: torch.device) -> tuple[int, int]:
    """Return the smallest and the largest `number` of any rank; every rank must call. Reads the device back."""
    return ranges_over_ranks([number], device)[0] if is_distributed() else (number, number)


def ranges_over_ranks(numbers: Sequence[int | None], device: torch.device) -> list[tuple[int, int]]:
    """Return the smallest and the largest value of any rank for each number; None stands for one this rank leaves out.

    Every rank must call, and there must be several. If all leave a number out, the smallest exceeds the largest.
    """
    both = torch.tensor([[-(2**62)] * 2 if number is None else [-number, number] for number in numbers], device=device)
    torch.distributed.all_reduce(both, torch.distributed.ReduceOp.MAX)
    return [(-negative, largest) for negative, largest in both.tolist()]


def largest_over_ranks(value: Tensor, like: Tensor) -> Tensor:
    """Return the largest value that any rank knows, NaN where none does, like `like`; every rank must call."""
    largest = value.to(like).nan_to_num(-torch.inf, torch.inf, -torch.inf)
    torch.distributed.all_reduce(largest, torch.distributed.ReduceOp.MAX)
    return largest.masked_fill(largest == -torch.inf, torch.nan)
