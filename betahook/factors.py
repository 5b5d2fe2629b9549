"""Factor on the query of every layer, and the probe whose gradient is its sensitivity: ready when a forward asks.

A part of `betahook.state.State`; the tap asks for both in every forward of every layer, so that what does not change
between two steps is made once for all layers. Nothing here reads a value back to the host.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from betahook import compat


class Factors:
    """Gains and probes of all layers.

    Attributes:
        own: float32 `[heads]`, the inverse temperature that the model itself applied in the last forward of each layer
            on this rank; NaN where that was not a number.
        probes: float32 `[heads of the layer]` each, zeros that require grad; the gradient is the sensitivity (see
            `tap.gain.ScaleQuery`). A leaf for each layer: a slice of a common one would add to it in every backward.
    """

    def __init__(self, lengths: Sequence[int], device: torch.device) -> None:
        self._lengths = list(lengths)
        self.own = torch.full((sum(lengths),), torch.nan, dtype=torch.float32, device=device)
        self.probes = [torch.zeros(heads, dtype=torch.float32, device=device, requires_grad=True) for heads in lengths]
        self._noted = [math.nan] * len(lengths)
        self._gains: Sequence[Tensor] = ()
        self._made_of: tuple[int, int] | None = None

    def to(self, device: torch.device) -> None:
        """Follow the model to another device."""
        gradients = [probe.grad for probe in self.probes]
        self.own, self._made_of = self.own.to(device), None
        self.probes = [probe.detach().to(device).requires_grad_() for probe in self.probes]
        for probe, gradient in zip(self.probes, gradients, strict=True):
            probe.grad = None if gradient is None else gradient.to(device)

    def note(self, layer: int, heads: slice, beta: float) -> bool:
        """Remember the inverse temperature that a layer itself applies; return False if it is that of the last call.

        Compared on the host, where it nearly always is the same number: nothing is then launched.
        """
        if self._noted[layer] == beta:
            return False
        self._noted[layer] = beta
        self.own[heads] = beta
        return True

    def forget(self) -> None:
        """Take every inverse temperature for new when it is next noted."""
        self._noted = [math.nan] * len(self._noted)

    def gain(self, layer: int, beta: Tensor) -> Tensor:
        """Return `beta / own` of a layer, `[heads of the layer, 1, 1]`: 1 where beta is NaN.

        Made for all layers at once, and anew only after `beta [heads]` or `own` was written to. It is never written to
        itself: a backward that is yet to come holds on to it.
        """
        made_of = compat.owner_and_version(beta)[1], compat.owner_and_version(self.own)[1]
        if made_of != self._made_of:
            self._made_of = made_of
            with torch.inference_mode(False), torch.no_grad():  # made in a forward, of which it must know nothing
                gains = torch.where(beta.isnan(), 1.0, beta / self.own)
                self._gains = gains[:, None, None].split(self._lengths)
        return self._gains[layer]

    def sensitivity(self) -> Tensor:
        """Return the gradients of all probes, `[heads]`, zero where there is none."""
        return torch.cat([probe if probe.grad is None else probe.grad for probe in self.probes]).detach()

    def set_sensitivity(self, values: Tensor | None) -> None:
        """Replace the gradients of all probes by `values [heads]`, or by none."""
        parts = [None] * len(self.probes) if values is None else values.to(self.own).split(self._lengths)
        for probe, part in zip(self.probes, parts, strict=True):
            probe.grad = part
