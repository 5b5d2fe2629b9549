"""The one question about a device by which the forms of the statistics are chosen."""

from __future__ import annotations

import torch


def is_cpu(device: torch.device) -> bool:
    """True where work is best done in blocks that fit a cache, False where each operation is a launch that costs."""
    return device.type == "cpu"
