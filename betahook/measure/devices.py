"""The one question about a device, which decides between two forms of the same statistics."""

from __future__ import annotations

import torch


def is_cpu(device: torch.device) -> bool:
    """True where work is best done in blocks that fit a cache, False where each operation is a launch that costs."""
    return device.type == "cpu"
