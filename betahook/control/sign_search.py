"""The search part of `betahook.control.search`: a sign descent on log beta. Pure functions of tensors `[units]`."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from betahook.control.base import Memory


@dataclass(frozen=True)
class SignSearch:
    """Step log beta against the sign of the sensitivity, summed over a window.

    Rprop's rule (Riedmiller and Braun, 1993): the step halves when the sign turns, and grows while it persists. The
    options are those of `Search`.
    """

    window: int
    opening: float
    growth: float
    smallest: float
    largest: float

    def start(self, beta: Tensor) -> Memory:
        """Make the memory before the first batch."""
        zero = torch.zeros_like(beta)
        return {
            "batches": zero,  # of the window so far, and the sensitivity summed over them
            "total": zero,
            "direction": zero,  # of the last step, and its size
            "step": zero + self.opening,
        }

    def advance(self, searching: Tensor | None, sensitivity: Tensor, state: Memory) -> tuple[Tensor, Memory]:
        """Count a batch where `searching`, None for everywhere.

        Returns:
            The step in decades, 0 but at the end of a window, and the memory.
        """
        batches, total = state["batches"] + 1, state["total"] + sensitivity
        if searching is not None:
            batches, total = torch.where(searching, batches, 0), torch.where(searching, total, 0)
        due = batches >= self.window
        direction = -total.sign() * due
        agreement = direction * state["direction"]
        step = torch.where(agreement < 0, state["step"] / 2, state["step"] * self.growth**agreement)
        step = step.clamp(self.smallest, self.largest)
        return direction * step, {
            "batches": batches.masked_fill(due, 0),
            "total": total.masked_fill(due, 0),
            "direction": torch.where(direction != 0, direction, state["direction"]),
            "step": step,  # as it was where no window ends: there is neither agreement nor a turn
        }
