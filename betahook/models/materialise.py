"""Materialise a weight as it acts: gather its shards, dequantise it, apply LoRA or DoRA.

`Projection` and `Weight` call this; nothing here changes a weight or knows which of its rows are needed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from betahook import compat
from betahook.models.modes import evaluating


def stored(module: nn.Module, name: str = "weight") -> Any:
    """Look up an attribute of a module, None if it has none, without changing the buffers of a parametrization.

    In training mode, each access to a weight under spectral norm would advance its power iteration.
    """
    if not parametrize.is_parametrized(module, name):
        return getattr(module, name, None)
    with evaluating(module.parametrizations[name]):  # type: ignore[index, arg-type]
        return getattr(module, name)


def obstacle(weight: Tensor, module: nn.Module, adapter: nn.Module | None) -> str | None:
    """Reason why `read` cannot read a weight now; None if it can.

    Args:
        weight: the weight, as its module stores it.
        module: the module that owns it.
        adapter: the layer around the module that adds to its output, such as LoRA's; None if there is none.
    """
    if weight.is_meta:
        return "offloaded, on the meta device outside the forward"
    if not weight.is_floating_point() and _dequantised(weight, module) is None:
        return f"quantised in an unknown way, a {type(weight).__name__} of {weight.dtype}"
    if weight.is_floating_point() and (weight.dim() < 2 or not is_whole(weight, module) or _is_freed(weight)):
        return "sharded outside the forward"
    if adapter is not None and compat.is_active_adapter(adapter) and not compat.is_known_adapter(adapter):
        return f"under an adapter of an unknown kind, {type(adapter).__name__}"
    return None


def is_sharded(weight: Tensor) -> bool:
    """True if `read` is a collective operation, in which every rank must take part."""
    return hasattr(weight, "full_tensor")  # a DTensor; torch need not be built with distributed


def is_in_parts(parameter: Tensor) -> bool:
    """True for a parameter sharded by FSDP 1 or ZeRO-3: outside the forward, it holds part of a weight, or nothing."""
    return compat.is_flattened(parameter) or compat.is_zero3(parameter)


def is_plain(weight: Tensor) -> bool:
    """True for a weight that can be changed in place: a plain tensor, or one sharded by FSDP 2 or a device mesh."""
    return type(weight.data) is Tensor or is_sharded(weight)


def local(tensor: Tensor) -> Tensor:
    """This rank's part of a tensor: all of it unless it is sharded."""
    part: Tensor = tensor.to_local() if is_sharded(tensor) else tensor  # type: ignore[attr-defined]
    return part


def whole(tensor: Tensor) -> Tensor:
    """The whole tensor, gathered if FSDP 2 or a device mesh shards it."""
    gathered: Tensor = tensor.full_tensor() if is_sharded(tensor) else tensor  # type: ignore[attr-defined]
    return gathered


def reshard(model: nn.Module) -> None:
    """Let FSDP 2 free the weights that a forward left gathered: only their shards may be written to."""
    for module in model.modules():
        if compat.is_fsdp2(module):
            module.reshard()  # type: ignore[operator]


def replicated_like(values: Tensor, weight: Tensor) -> Tensor:
    """Turn `values`, the same on all ranks, into an operand for `weight`: each rank uses the part for its shard."""
    if not is_sharded(weight):
        return values
    from torch.distributed.tensor import DTensor, Replicate

    mesh = weight.device_mesh  # type: ignore[attr-defined]
    return DTensor.from_local(values, mesh, [Replicate()] * mesh.ndim, run_check=False)


def read(weight: Tensor, module: nn.Module, adapter: nn.Module | None) -> Tensor:
    """The weight in floating point, with its adapter; its dimensions are in the order in which the module stores them.

    The arguments are those of `obstacle`.
    """
    dequantised = _dequantised(weight, module)
    weight = whole(weight.detach() if dequantised is None else dequantised)
    if adapter is not None and compat.is_active_adapter(adapter):
        for added in compat.adapter_weights(adapter):
            weight = weight + whole(added.detach()).to(weight)
        for magnitude in compat.magnitudes(adapter):
            of_row = 0 if getattr(adapter, "fan_in_fan_out", False) else 1
            norms = torch.linalg.vector_norm(weight, dim=of_row, keepdim=True)
            weight = weight * (whole(magnitude.weight.detach()).to(weight).view_as(norms) / norms)
    return weight


def is_whole(weight: Tensor, module: nn.Module) -> bool:
    """False for the weight of a linear module with fewer entries than it states: under FSDP 1, ZeRO-3, in 4 bits."""
    out, width = getattr(module, "out_features", None), getattr(module, "in_features", None)
    # An attention may state these sizes too, but its own parameters under other names do not have them.
    parameters = dict(module.named_parameters(recurse=False))
    is_of_linear = parameters.get("weight", vars(module).get("weight")) is weight
    return not is_of_linear or out is None or width is None or weight.numel() == out * width


def _is_freed(weight: Tensor) -> bool:
    """True for a plain tensor whose memory is freed, like FSDP 1's views of its flat parameter outside the forward."""
    return type(weight.data) is Tensor and weight.untyped_storage().nbytes() < weight.nbytes


def _dequantised(weight: Tensor, module: nn.Module) -> Tensor | None:
    """A quantised weight in floating point; None if it is not quantised (yet), or by an unknown library."""
    if type(weight).__module__.startswith("torchao."):
        return weight.detach().dequantize()
    dequantise = DEQUANTISERS.get(type(weight).__name__)
    return None if dequantise is None else dequantise(weight, module)


def _from_4_bits(weight: Any, module: Any) -> Tensor | None:
    """A weight of bitsandbytes' `Linear4bit`; None before its first move to a device, which quantises it."""
    if getattr(weight, "quant_state", None) is None:
        return None
    from bitsandbytes.functional import dequantize_4bit

    found: Tensor = dequantize_4bit(weight.data, weight.quant_state)
    return found


def _from_8_bits(weight: Any, module: Any) -> Tensor | None:
    """A weight of bitsandbytes' `Linear8bitLt`, whose scales move to the module in the first forward."""
    if weight.is_floating_point():
        return None
    scale = weight.SCB if getattr(weight, "SCB", None) is not None else module.state.SCB
    return None if scale is None else weight.detach() * scale[:, None] / 127


DEQUANTISERS: dict[str, Callable[[Any, Any], Tensor | None]] = {
    "Params4bit": _from_4_bits,
    "Int8Params": _from_8_bits,
}
"""Functions that dequantise a weight, by the name of its class; each returns None if it is not quantised yet."""
