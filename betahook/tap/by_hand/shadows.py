"""A check by numbers: the input of the softmax under another beta, computed along with a forward.

In the first forward that is measured, each score product gets a shadow, the same product with a larger gain. Whatever
the module does to the product is repeated on its shadow, and at the softmax the two must differ as the traces predict.
Nothing random is run twice, and no tensor of the module is touched.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from betahook.measure.dtypes import to_sum_dtype
from betahook.models.by_tensor import ByTensor
from betahook.models.torch_calls import Call, tensors_in
from betahook.tap.by_hand.traces import Scores

GAIN = 1.5
"""The gain of the shadows, relative to that of the forward."""


class Shadows:
    """The shadows of the tensors in one forward."""

    def __init__(self) -> None:
        self._of = ByTensor[Tensor]()
        self._eps = 0.0  # of the coarsest dtype so far: scores may be in half precision before a softmax in float32

    def put(self, tensor: Tensor, shadow: Tensor) -> None:
        """Give a tensor a shadow."""
        self._of[tensor] = shadow
        self._eps = max(self._eps, torch.finfo(shadow.dtype).eps)

    def prepare(self, call: Call) -> None:
        """Give a shadow to a tensor that a call is about to change in place, if another argument has one."""
        first = call.operands[0] if call.operands else None
        if not isinstance(first, Tensor) or not call.in_place or first in self._of:
            return
        if any(tensor in self._of for tensor in call.tensors):
            self._of[first] = first.detach().clone()

    @torch.no_grad()
    def follow(self, call: Call, output: Any) -> None:
        """Repeat a call on the shadows of its arguments."""
        if "dropout" in call.name or not any(tensor in self._of for tensor in call.tensors):
            return
        shadow = call.run_on(lambda tensor: tensor if (own := self._of.get(tensor)) is None else own)
        if call.name == "__setitem__":
            return
        parts, shadows = tensors_in(output), tensors_in(shadow)
        for part, moved in zip(parts, shadows, strict=True):
            if part.is_floating_point():
                self.put(part, moved)

    @torch.no_grad()
    def contradict(self, scores: Scores, logits: Tensor, dim: int) -> bool:
        """Return True if the softmax of the logits' shadow is not what the traces predict for the larger beta."""
        shadow = self._of.get(logits)
        several = isinstance(scores.factor, Tensor) and scores.factor.numel() > 1 and scores.axis is None
        if shadow is None or scores.value is None or not scores.linear or several or logits.numel() == 0:
            return False
        change = (GAIN - 1) * scores.factor * to_sum_dtype(scores.value)
        if scores.allowed is not None:
            change = change.masked_fill(~scores.allowed, 0)
        promised = (to_sum_dtype(logits) + change).softmax(dim).nan_to_num()
        got = to_sum_dtype(shadow).softmax(dim).nan_to_num()
        largest = change.abs().amax(dim, keepdim=True) + logits.amax(dim, keepdim=True).abs()
        differs = (promised - got).abs() > 1e-4 + 20 * self._eps * (1 + largest)
        if scores.allowed is not None:  # rows without a pair do not count: an added mask left their scores there
            differs &= scores.allowed.any(dim, keepdim=True)
        return bool(differs.any())
