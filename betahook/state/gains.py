"""The gains (factors on the queries) of all layers, and the tensors whose gradients give their sensitivities.

`Gains` is a part of `betahook.state.State`. The tap needs them in every forward of every layer, so they are computed
for all layers at once, when beta has changed. Only `recall` reads a value back to the host.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence

import torch
from torch import Tensor

from betahook import compat


def gain_of(beta: Tensor, default: Tensor | float) -> Tensor:
    """Return `beta / default`, 1 where beta is NaN."""
    return torch.where(beta.isnan(), 1.0, beta / default)


def _copy_gradient(probe: Tensor) -> None:
    """Replace the gradient of a probe by a copy."""
    if probe.grad is not None:
        probe.grad = probe.grad.clone()


class Gains:
    """Gains and probes of all layers.

    Attributes:
        beta: the `beta` of the `State`, `[heads]`, which is written in place.
        default: float32 `[heads]`, the inverse temperature that the model itself applied in the last forward of each
            layer on this rank; NaN where that was a tensor, not a number.
        probes: float32 `[heads of the layer]` each, zeros that require grad; the gradient is a part of the sensitivity
            (see `tap.gain.ScaleQuery`). One for each layer, since the backward of a slice would add to the whole.
    """

    def __init__(self, lengths: Sequence[int], beta: Tensor) -> None:
        self._lengths = list(lengths)
        self.beta = beta
        self.default = torch.full_like(beta, torch.nan)
        self.probes = [beta.new_zeros(heads, requires_grad=True) for heads in lengths]
        self._host_defaults: list[float | None] = [math.nan] * len(lengths)  # by layer; None for a tensor
        self._gains: Sequence[Tensor] = ()
        self._known = self.default
        self._leaves: dict[int, Tensor] = {}
        self._scales = self.default
        self._source_versions: tuple[int | None, int | None] | None = None
        self._outlive_graphs = False

    def follow(self, beta: Tensor) -> None:
        """Move to the device of `beta`, the new tensor of the state.

        This may happen within a forward, between a layer on the CPU and one on the GPU: the sensitivity of the former
        is then still to come, and must not be lost.
        """
        self._retire_leaves()  # into these probes, and they into the new ones
        probes = self.probes
        self.beta, self.default, self._source_versions, self._leaves = beta, self.default.to(beta.device), None, {}
        self.probes = [probe.detach().to(beta.device).requires_grad_() for probe in probes]
        # Otherwise they would hold memory of the old device.
        self._gains, self._known, self._scales = (), self.default, self.default
        self._outlive_graphs = False
        for layer, probe in enumerate(probes):
            self._retire(layer, probe)

    def note(self, layer: int, heads: slice, default: float | None) -> bool:
        """Remember the inverse temperature that a layer itself applies; return True unless it is that of the last call.

        None stands for a tensor. Numbers are compared on the host and nearly always equal, so that nothing is launched.
        """
        if self._host_defaults[layer] == default:
            return False
        is_new = default is None or self._host_defaults[layer] != ctypes.c_float(default).value
        self._host_defaults[layer] = default
        if not is_new:  # after a resume, the number is only known in float32
            return False
        self.default[heads] = math.nan if default is None else default
        self._source_versions = None  # writes by a compiled graph do not change the version
        return True

    def is_number(self, layer: int) -> bool:
        """Return False if the inverse temperature that a layer itself applied last was a tensor."""
        return self._host_defaults[layer] is not None

    def recall(self, default: Tensor) -> None:
        """Take `default [heads]` as that of the last forward, in layers whose heads all have the same.

        The first forward after a resume then computes exactly what it would have without. Reads the device back.
        """
        layers = [values.tolist() for values in default.split(self._lengths)]
        self._host_defaults = [values[0] if len({*values}) == 1 else math.nan for values in layers]
        known = [value for value, heads in zip(self._host_defaults, self._lengths, strict=True) for _ in range(heads)]
        self.default.copy_(torch.tensor(known, dtype=torch.float32, device="cpu"))

    def gain(self, layer: int) -> Tensor:
        """Return `beta / default` of a layer, `[heads of the layer, 1, 1]`: 1 where beta is NaN.

        It is never modified in place, since a pending backward pass may need it.
        """
        self._make()
        return self._gains[layer]

    def scales(self) -> Tensor:
        """Return 1 and the acting inverse temperature, `[2, heads]`."""
        self._make()
        return self._scales

    def _make(self) -> None:
        """Compute what `gain` and `scales` return, for all layers, if `beta` or `default` has been written to."""
        versions = compat.inplace_version(self.beta), compat.inplace_version(self.default)
        if versions != self._source_versions:
            with torch.inference_mode(False), torch.no_grad():  # called in a forward, but no part of its graph
                self._retire_leaves()
                acting = torch.where(self.beta.isnan(), self.default, self.beta)
                gains = gain_of(self.beta, self.default)
                self._scales = torch.stack([torch.ones_like(acting), acting])
                self._gains = gains[:, None, None].split(self._lengths)
                self._known, self._leaves = gains.nan_to_num(), {}
            self._source_versions = versions  # last, so that an error or another thread finds nothing half done

    def leaf(self, layer: int) -> Tensor:
        """Return `gain` as a leaf that requires grad; its gradient times the gain is a part of the sensitivity."""
        gain = self.gain(layer)
        if layer not in self._leaves:
            self._leaves[layer] = gain.detach().requires_grad_()
        return self._leaves[layer]

    def _retire_leaves(self) -> None:
        """Replace the leaves by the probes: their gradients times the gains are gradients by log beta."""
        for layer, leaf in self._leaves.items():
            self._retire(layer, leaf, leaf.detach())

    def _retire(self, layer: int, tensor: Tensor, factor: Tensor | float = 1.0) -> None:
        """Move the gradient of a former leaf or probe, times a factor, to the present probe of its layer.

        This happens now, and again whenever a graph that still holds the tensor runs backward.
        """

        def move(tensor: Tensor) -> None:
            if tensor.grad is not None:
                probe = self.probes[layer]
                part = (tensor.grad * factor).detach().flatten().to(probe.device)
                probe.grad, tensor.grad = part if probe.grad is None else probe.grad + part, None

        move(tensor)
        tensor.register_post_accumulate_grad_hook(move)

    def outlive_graphs(self) -> None:
        """From now on keep the gradients of the probes in separate memory.

        The next replay of a CUDA graph overwrites its memory, and with gradient accumulation comes before the step.
        """
        if not self._outlive_graphs:
            self._outlive_graphs = True
            for probe in self.probes:
                probe.register_post_accumulate_grad_hook(_copy_gradient)

    def sensitivity(self) -> Tensor:
        """Return the derivative of the loss with respect to log beta, `[heads]`, zero where no backward has run."""
        of_leaves = self._joined(self._of_leaves(range(len(self.probes))))
        of_probes = self._joined([probe.grad for probe in self.probes])
        if of_leaves is None:
            return torch.zeros_like(self.default) if of_probes is None else of_probes
        return of_leaves * self._known if of_probes is None else torch.addcmul(of_probes, of_leaves, self._known)

    def gradients(self, layers: range, heads: slice) -> tuple[Sequence[Tensor], Tensor | None]:
        """Return gradients and gains of some layers with these heads, whose product is the sensitivity.

        The gradients are `[heads, 1, 1]`, one for each layer, or one for all; the gains are `[heads]`, None for 1.
        Launches nothing if every layer has the gradient of a leaf, and none that of a probe.
        """
        found = self._of_leaves(layers)
        ready = [gradient for gradient in found if gradient is not None and not gradient.requires_grad]
        if len(ready) == len(found) and all(self.probes[layer].grad is None for layer in layers):
            return ready, self._known if len(layers) == len(self.probes) else self._known[heads]
        return [self.sensitivity()[heads, None, None]], None

    def drop(self, layer: int) -> None:
        """Drop a layer's sensitivity since the last step, and what pending backward passes will add to its leaf."""
        self.probes[layer].grad = None
        self._leaves.pop(layer, None)

    def _of_leaves(self, layers: range) -> list[Tensor | None]:
        """The gradient of the leaf of each of these layers, None without one."""
        return [getattr(self._leaves.get(layer), "grad", None) for layer in layers]

    def _joined(self, gradients: list[Tensor | None]) -> Tensor | None:
        """Return the gradients of all layers, `[heads]`, zero for a layer without one; None if there is none at all."""
        like = next((gradient for gradient in gradients if gradient is not None), None)
        if like is None:
            return None
        shape = -1, *like.shape[1:]
        parts = [p.view(shape) if g is None else g for g, p in zip(gradients, self.probes, strict=True)]
        return torch.cat(parts).detach().flatten()

    def set_sensitivity(self, values: Tensor | None) -> None:
        """Replace the sensitivity by `values [heads]`; None clears it."""
        parts = [None] * len(self.probes) if values is None else values.to(self.default).split(self._lengths)
        for probe, part in zip(self.probes, parts, strict=True):
            probe.grad = part
        for leaf in self._leaves.values():
            leaf.grad = None
