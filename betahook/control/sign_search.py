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

    def advance(self, searching: Tensor, sensitivity: Tensor, state: Memory) -> tuple[Tensor, Memory]:
        """Count a batch where `searching`; each unit has windows of its own.

        Returns:
            The step in decades, 0 but at the end of a window, and the memory.
        """
        elsewhere = ~searching
        batches = (state["batches"] + 1).masked_fill(elsewhere, 0)
        total = (state["total"] + sensitivity).masked_fill(elsewhere, 0)
        due = batches >= self.window
        decades, moved = self._step(-total.sign() * due, state)
        return decades, {"batches": batches.masked_fill(due, 0), "total": total.masked_fill(due, 0), **moved}

    def finish(self, total: Tensor, state: Memory) -> tuple[Tensor, Memory]:
        """End the windows of all units, in which the sensitivity was `total`; the rest is as in `advance`."""
        decades, moved = self._step(-total.sign(), state)
        zero = torch.zeros_like(total)
        return decades, {"batches": zero, "total": zero, **moved}

    def _step(self, direction: Tensor, state: Memory) -> tuple[Tensor, Memory]:
        """Return a step in some direction, 0 for none, and what is remembered of it."""
        agreement = direction * state["direction"]
        # Where no window ends there is neither agreement nor a turn, and the step stays as it was.
        step = state["step"] * (self.growth**agreement).masked_fill(agreement < 0, 0.5)
        step = step.clamp(self.smallest, self.largest)
        return direction * step, {"direction": torch.where(direction != 0, direction, state["direction"]), "step": step}
