"""The condition for a dry run of a forward.

`watching` makes one if a beta was set or loaded before any forward has shown on which products it acts.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


def is_repeatable(module: nn.Module, inputs: Any) -> bool:
    """Return True if a dry run has no side effects: no input is an object like a cache, and no submodule has a hook."""
    return _is_plain(inputs) and not any(part._forward_hooks for part in module.modules() if part is not module)


def _is_plain(nested: Any) -> bool:
    if type(nested) in (list, tuple, dict):
        return all(map(_is_plain, nested.values() if isinstance(nested, dict) else nested))
    return isinstance(nested, Tensor | torch.Size | bool | int | float | str | None)
