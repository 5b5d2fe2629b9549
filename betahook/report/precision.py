"""Number formats compared with the logits of each head: overflow of scores, and rounding of attention weights.

Pure functions of numbers; `betahook.examination` calls them. Kernels such as flash attention keep scores in float32,
so this concerns attention that computes its scores or its softmax in the format itself.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from betahook.report.names import format_number

FORMATS = (torch.float16, torch.bfloat16, torch.float8_e4m3fn)
NEAR = 0.25
"""Share of a format's range above which a score is near the overflow: another batch may have four times that score."""
COARSE = 0.1
"""Relative error of an attention weight above which rounding is a concern."""


@dataclass(frozen=True)
class Precision:
    """A number format for the scores and logits of one layer.

    Attributes:
        layer: module name.
        dtype: the format.
        range_used: the largest absolute score, before beta, over the largest number of the format, `[heads]`.
        weight_error: largest relative error of an attention weight if the largest logit is rounded to nearest:
            `exp(ulp / 2) - 1`, where `ulp` is the spacing of the format's numbers at that logit, `[heads]`.
    """

    layer: str
    dtype: torch.dtype
    range_used: Tensor
    weight_error: Tensor

    @property
    def name(self) -> str:
        """The name of the format, such as `float16`."""
        return str(self.dtype).removeprefix("torch.")

    @property
    def overflowing(self) -> list[int]:
        """Heads whose scores overflow."""
        return _where(self.range_used > 1)

    @property
    def near_overflow(self) -> list[int]:
        """Heads whose scores do not overflow, but use more than `NEAR` of the range."""
        return _where((self.range_used > NEAR) & (self.range_used <= 1))

    @property
    def coarse(self) -> list[int]:
        """Heads whose attention weights are wrong by more than `COARSE`."""
        return _where(self.weight_error > COARSE)

    @property
    def unmeasured(self) -> list[int]:
        """Heads of which nothing is known: no forward pass was measured, or it had a NaN."""
        return _where(self.range_used.isnan())

    @property
    def is_concern(self) -> bool:
        """True if any head overflows, is near the overflow or is coarse; False if nothing was measured."""
        return bool(self.overflowing or self.near_overflow or self.coarse)

    @property
    def gravity(self) -> tuple[float, float]:
        """Sort key, larger for the worse of two layers: the range used if it is beyond `NEAR`, then the error."""
        share = _largest(self.range_used)
        return share if share > NEAR else 0.0, _largest(self.weight_error)

    @property
    def verdict(self) -> str:
        """The worst problem in a few words."""
        share, error = _largest(self.range_used), _largest(self.weight_error)
        if share > NEAR:
            return "overflows" if share > 1 else f"near overflow ({share:.0%} of the range)"
        if error > COARSE:
            return f"weights off by {error:.0%}" if error < 1 else f"weights off {format_number(1 + error, 2)}-fold"
        return "not measured" if self.unmeasured else "fine"


def judge(head_metrics: Mapping[str, Tensor]) -> Iterator[Precision]:
    """Judge every format for every layer, from `Hook.head_metrics` of forward passes that all had the same beta."""
    for key, max_logit in head_metrics.items():
        quantity, layer = key.split("/", 1)
        if quantity != "max_logit":
            continue
        max_score = max_logit / head_metrics[f"beta/{layer}"]
        for dtype in FORMATS:
            limits = torch.finfo(dtype)
            yield Precision(layer, dtype, max_score / limits.max, torch.expm1(_half_ulp(max_logit, limits.eps)))


def _half_ulp(numbers: Tensor, eps: float) -> Tensor:
    """Return half the spacing of a format's numbers at `numbers`, the largest rounding error there; inf for inf."""
    half = torch.ldexp(torch.full_like(numbers, eps / 2), torch.frexp(numbers).exponent - 1)
    return half.where(numbers.isfinite() & (numbers > 0), numbers)  # other numbers have no exponent


def _largest(heads: Tensor) -> float:
    """Return the largest number that is not NaN; NaN if there is none."""
    return max(heads[~heads.isnan()].tolist(), default=math.nan)


def _where(heads: Tensor) -> list[int]:
    return [int(head) for head in heads.nonzero().flatten()]
