"""Several ranks: if there are any, and numbers that they ask of one another.

What is measured travels in one collective of its own, see `statistics.all_reduce`.
"""

from __future__ import annotations

import torch


def is_distributed() -> bool:
    """True if there are several ranks."""
    distributed = torch.distributed
    return distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1


def is_first_rank() -> bool:
    """True on one rank of several, and without others."""
    return not is_distributed() or torch.distributed.get_rank() == 0


def range_over_ranks(number: int, device: torch.device) -> tuple[int, int]:
    """Return the least and the largest number that a rank gives; every rank must ask. Reads the device back."""
    if not is_distributed():
        return number, number
    both = torch.tensor([-number, number], device=device)
    torch.distributed.all_reduce(both, torch.distributed.ReduceOp.MAX)
    negative, largest = both.tolist()
    return -negative, largest
