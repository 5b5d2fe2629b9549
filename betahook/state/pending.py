"""Steps whose sensitivities are not in the window yet.

A small model is limited by how fast the host launches operations, so `Hook.step` only appends a note of the step, and
several notes are added up at once. `betahook.step.stages` makes the notes; `State.settle` adds them before the window
is read. Nothing here may read a value back to the host.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

MOST = 16
"""Largest number of steps that may wait."""


class Step(NamedTuple):
    """Note of one step.

    Attributes:
        number: number of the step, from 1 on.
        heads: the heads that it watched.
        gradients, gain: the factors of its sensitivity, see `gains.Gains.gradients`.
        loss_scale: factor on the gradients.
        sums: for each of these heads, a number that is not finite if anything measured since the last pooling is not.
    """

    number: int
    heads: slice
    gradients: Sequence[Tensor]
    gain: Tensor | None
    loss_scale: float
    sums: Tensor


def sensitivities(steps: Sequence[Step], like: Tensor) -> Tensor:
    """Return the sensitivity of each step, `[steps, heads]` in the dtype of `like`; cheap while beta is unchanged."""
    gain, scale = steps[0].gain, steps[0].loss_scale
    if any(step.gain is not gain or step.loss_scale != scale for step in steps[1:]):
        return torch.cat([sensitivities([step], like) for step in steps])
    joined = torch.cat([gradient for step in steps for gradient in step.gradients]).view(len(steps), -1)
    scaled = (joined if gain is None else joined * gain).to(like)
    return scaled if scale == 1 else scaled / scale


def add_steps(window: Tensor, nonfinite_since: Tensor, steps: Sequence[Step]) -> None:
    """Add consecutive steps that watched the same heads, in place.

    The cumulative sum adds one step after another, so that saving a run while steps wait changes no bit of the sums.

    Args:
        window: `[2, heads]`, sum and number of the sensitivities; a step does not count for a head that is not finite.
        nonfinite_since: int64 `[heads]`, the first step in which the head was not finite, 0 for none.
        steps: at least one.
    """
    window, nonfinite_since = window[:, steps[0].heads], nonfinite_since[steps[0].heads]
    sensitivity = sensitivities(steps, window)
    broken = (torch.stack([step.sums for step in steps]) + sensitivity) * 0 != 0  # NaN where anything is not finite
    total, batches = window
    total.copy_(torch.cat([total[None], sensitivity.masked_fill(broken, 0)]).cumsum(0)[-1])
    batches.add_((~broken).sum(0))
    is_broken, first = broken.int().max(0)
    nonfinite_since.add_((nonfinite_since == 0) * is_broken * (first + steps[0].number))
