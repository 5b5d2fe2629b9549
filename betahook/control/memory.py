"""Checks of the memory of controllers, which refuse in the first step, not on loading, what no checkpoint could hold.

`betahook.control.base.apply` calls them. They look at shapes and dtypes only, and read no value back to the host.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

DTYPES = (torch.float32, torch.float64, torch.int64, torch.bool)
"""Dtypes that the tensors of a memory may have."""
SEPARATOR = "/"
"""Separator between the names that lead to a tensor in a checkpoint."""


def checked_start(owner: Any, beta: Tensor) -> dict[str, Tensor]:
    """Return the memory that a controller starts with, after checking it.

    Raises:
        ValueError: a checkpoint cannot hold one of its names.
        TypeError: it is not a dictionary of tensors, or one of them is not `[units]` or not of a dtype in `DTYPES`.
    """
    memory: dict[str, Tensor] = owner.start(beta)
    if not isinstance(memory, dict) or not all(isinstance(value, Tensor) for value in memory.values()):
        raise TypeError(f"start() of {owner} must return a dictionary of tensors, {{}} for no memory; got {memory!r}")
    for name, value in memory.items():
        if not isinstance(name, str) or not name or SEPARATOR in name:
            raise ValueError(
                f"start() of {owner} made a memory called {name!r}; expected a name without a {SEPARATOR}, which "
                "separates names in a checkpoint. Rename it"
            )
        if value.shape != beta.shape or value.dtype not in DTYPES:
            raise TypeError(
                f"start() of {owner} made the memory {name!r} {_described(value)}; expected the shape of beta, "
                f"{list(beta.shape)}, and {', '.join(map(str, DTYPES[:-1]))} or {DTYPES[-1]}. torch.zeros_like(beta) "
                "makes one"
            )
    return memory


def check_updated(owner: object, memory: Mapping[str, object], before: Mapping[str, Tensor]) -> None:
    """Check the memory that an update returned.

    Raises:
        ValueError: its names differ from those before.
        TypeError: a tensor has another shape or kind of dtype than before.
    """
    if memory.keys() != before.keys():
        raise ValueError(
            f"update() of {owner} made the memory {sorted(memory)}, but start() {sorted(before)}; start() must return "
            "every name of the memory"
        )
    for name, value in memory.items():
        like = before[name]
        if not isinstance(value, Tensor) or value.shape != like.shape or not is_of_kind(value, like):
            raise TypeError(
                f"update() of {owner} made the memory {name!r} {_described(value)}; expected {_described(like)}, as it "
                "got. Return the shape and dtype that start() makes"
            )


def is_of_kind(value: Tensor, like: Tensor) -> bool:
    """Return whether two tensors of a memory have the same dtype, or are both float32 or float64."""
    return value.dtype == like.dtype or {value.dtype, like.dtype} <= {torch.float32, torch.float64}


def _described(value: object) -> str:
    """Describe a value for a message: a tensor by its dtype and shape."""
    return f"a {value.dtype} tensor of shape {list(value.shape)}" if isinstance(value, Tensor) else repr(value)
