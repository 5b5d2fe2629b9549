"""Dtypes in which the statistics are computed: float32 or better for products, float64 for sums.

The other files of `measure` use these functions, and so does any other code that computes by the same rules.
"""

from __future__ import annotations

import math
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

from betahook import compat


def sum_dtype(device: torch.device) -> torch.dtype:
    """The dtype of sums: float64, or float32 on devices without it, such as Apple's GPUs and some of Intel's."""
    lacks = device.type == "mps" or (device.type == "xpu" and not _has_float64(device))
    return torch.float32 if lacks else torch.float64


def _has_float64(device: torch.device) -> bool:
    """Return True for an Intel GPU that computes in float64; the Arc A-series does not."""
    return bool(torch.xpu.get_device_properties(device).has_fp64)


setattr(_has_float64, compat.CALLED_BY_GRAPHS, True)  # torch.compile cannot trace the query


def to_sum_dtype(tensor: Tensor) -> Tensor:
    """Convert a tensor to the dtype of sums on its device."""
    return tensor.to(sum_dtype(tensor.device))


def product_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype for products of tensors of `dtype`: float64 for float64, else float32."""
    return dtype if dtype == torch.float64 else torch.float32


def at_least_float32(tensor: Tensor) -> Tensor:
    """The tensor itself, or a float32 copy of one in half precision."""
    return tensor.to(product_dtype(tensor.dtype))


def no_autocast(device: torch.device) -> AbstractContextManager[object]:
    """Suspend the autocast of the model, which would compute float32 products in half precision."""
    acts = device.type != "meta" and torch.is_autocast_enabled(device.type)  # torch has no autocast for meta
    return torch.autocast(device.type, enabled=False) if acts else nullcontext()


def overflow_logit(dtype: torch.dtype) -> float:
    """Largest logit whose exponential is finite, in the dtype in which a softmax over `dtype` logits is computed.

    709 in float64 and 88.7 in every narrower dtype, since their softmax runs in float32. (Paper, section 2: the upper
    end of the search for beta.)
    """
    return math.log(torch.finfo(product_dtype(dtype)).max)
