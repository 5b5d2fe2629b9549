"""Several ranks: if there are any, and numbers that they ask of one another.

What is measured travels in one collective of its own, see `statistics.all_reduce`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def is_distributed() -> bool:
    """True if there are several ranks."""
    distributed = torch.distributed
    return distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1


def is_first_rank() -> bool:
    """True on one rank of several, and without others."""
    return not is_distributed() or torch.distributed.get_rank() == 0


def range_over_ranks(number: int, device: torch.device) -> tuple[int, int]:
    """Return the least and the largest number that a rank gives; every rank must ask. Reads the device back."""
    return ranges_over_ranks([number], device)[0] if is_distributed() else (number, number)


def ranges_over_ranks(numbers: Sequence[int | None], device: torch.device) -> list[tuple[int, int]]:
    """Return the least and the largest that a rank gives for each number; None is for one that this rank leaves out.

    Every rank of several must ask. Where all leave a number out, the least is larger than the largest.
    """
    both = torch.tensor([[-(2**62)] * 2 if number is None else [-number, number] for number in numbers], device=device)
    torch.distributed.all_reduce(both, torch.distributed.ReduceOp.MAX)
    return [(-negative, largest) for negative, largest in both.tolist()]


def largest_over_ranks(value: Tensor, like: Tensor) -> Tensor:
    """Return the largest number that a rank knows, NaN where none does, as `like`; every rank of several must call."""
    largest = value.to(like).nan_to_num(-torch.inf, torch.inf, -torch.inf)
    torch.distributed.all_reduce(largest, torch.distributed.ReduceOp.MAX)
    return largest.masked_fill(largest == -torch.inf, torch.nan)
