"""The property of a device that decides between two forms of the same statistics."""

from __future__ import annotations

import torch


def is_cpu(device: torch.device) -> bool:
    """Return True if work is best done in blocks that fit a cache, False if every launch of an operation is costly."""
    return device.type == "cpu"
