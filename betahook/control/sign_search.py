"""The search phase of `betahook.control.search`: a sign descent on log beta. Pure functions of tensors `[units]`."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from betahook.control.base import Memory


@dataclass(frozen=True)
class SignSearch:
    """Step log beta against the sign of the sensitivity, summed over a window.

    Rprop's rule (Riedmiller and Braun, 1993): the step halves when the sign changes, and grows while it persists. The
    options are those of `Search`.
    """

    window: int
    opening: float
    growth: float
    smallest: float
    largest: float

    def start(self, beta: Tensor) -> Memory:
        """Create the memory before the first batch."""
        zero = torch.zeros_like(beta)
        return {
            "batches": zero,  # batches of the window so far
            "total": zero,  # sensitivity summed over them
            "direction": zero,  # sign of the last step
            "step": zero + self.opening,  # its size
        }

    def advance(self, searching: Tensor, sensitivity: Tensor, state: Memory) -> tuple[Tensor, Memory]:
        """Count a batch in units where `searching` is true; each unit has windows of its own.

        Returns:
            The step in decades, which is 0 except at the end of a window, and the memory.
        """
        elsewhere = ~searching
        batches = (state["batches"] + 1).masked_fill(elsewhere, 0)
        total = (state["total"] + sensitivity).masked_fill(elsewhere, 0)
        due = batches >= self.window
        decades, moved = self._step(-total.sign() * due, state)
        return decades, {"batches": batches.masked_fill(due, 0), "total": total.masked_fill(due, 0), **moved}

    def finish(self, total: Tensor, state: Memory) -> tuple[Tensor, Memory]:
        """End the windows of all units at once, given the sensitivity summed over each; returns as `advance` does."""
        decades, moved = self._step(-total.sign(), state)
        zero = torch.zeros_like(total)
        return decades, {"batches": zero, "total": zero, **moved}

    def _step(self, direction: Tensor, state: Memory) -> tuple[Tensor, Memory]:
        """Return a step in `direction`, 0 for no step, and the new direction and step size for the memory."""
        agreement = direction * state["direction"]
        # Where no window ends, `agreement` is 0 and the step size stays as it was.
        step = state["step"] * (self.growth**agreement).masked_fill(agreement < 0, 0.5)
        step = step.clamp(self.smallest, self.largest)
        return direction * step, {"direction": torch.where(direction != 0, direction, state["direction"]), "step": step}
