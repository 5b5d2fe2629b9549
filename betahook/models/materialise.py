"""A weight as it acts, however it is kept: sharded over ranks, quantised, under an adapter."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn


def obstacle(weight: Tensor, module: nn.Module, adapter: nn.Module | None) -> str | None:
    """Why a weight cannot be read now; None where `read` does.

    Args:
        weight: as its module stores it.
        module: the module that owns it.
        adapter: what stands around that and adds to what it returns, if anything does.
    """
    if weight.is_meta:
        return "offloaded, on the meta device outside the forward"
    if not weight.is_floating_point() and _dequantised(weight, module) is None:
        return f"quantised in an unknown way, a {type(weight).__name__} of {weight.dtype}"
    if weight.is_floating_point() and (weight.numel() != _entries(weight, module) or _is_freed(weight)):
        return "sharded outside the forward"
    if adapter is not None and _is_active(adapter) and not _adds(adapter):
        return f"under an adapter that does more than add to it, {type(adapter).__name__}"
    return None


def is_sharded(weight: Tensor) -> bool:
    """Whether `read` is a collective operation, in which every rank must take part."""
    return hasattr(weight, "full_tensor")  # a DTensor; torch need not be built with distributed


def read(weight: Tensor, module: nn.Module, adapter: nn.Module | None) -> Tensor:
    """The weight in floating point, with its adapter; its dimensions are in the order in which the module stores them.

    Args: as of `obstacle`.
    """
    dequantised = _dequantised(weight, module)
    weight = _gathered(weight.detach() if dequantised is None else dequantised)
    if adapter is None or not _is_active(adapter):
        return weight
    peft: Any = adapter
    for name in peft.active_adapters:
        if name in peft.lora_A:
            weight = weight + _gathered(peft.get_delta_weight(name).detach()).to(weight)
    return weight


def _entries(weight: Tensor, module: nn.Module) -> int:
    """Entries of the whole weight; FSDP 1 and ZeRO-3 leave fewer, or none, outside the forward."""
    out, width = getattr(module, "out_features", None), getattr(module, "in_features", None)
    return int(weight.numel() if out is None or width is None else out * width)


def _is_freed(weight: Tensor) -> bool:
    """Whether a plain tensor has lost its memory, as the views of the flat parameter of FSDP 1 outside the forward."""
    return type(weight.data) is Tensor and weight.untyped_storage().nbytes() < weight.nbytes


def _gathered(weight: Tensor) -> Tensor:
    """A weight that FSDP 2 shards, whole."""
    whole: Tensor = weight.full_tensor() if hasattr(weight, "full_tensor") else weight
    return whole


def _dequantised(weight: Any, module: Any) -> Tensor | None:
    """The weight of a linear module of bitsandbytes or torchao in floating point; None for any other."""
    kind = type(weight).__name__
    found: Tensor | None = None
    if kind == "Params4bit" and getattr(weight, "quant_state", None) is not None:
        from bitsandbytes.functional import dequantize_4bit

        found = dequantize_4bit(weight.data, weight.quant_state)
    elif kind == "Int8Params" and not weight.is_floating_point():
        scale = weight.SCB if getattr(weight, "SCB", None) is not None else module.state.SCB
        found = None if scale is None else weight.detach() * scale[:, None] / 127
    elif type(weight).__module__.startswith("torchao."):
        found = weight.detach().dequantize()
    return found


def _is_active(adapter: Any) -> bool:
    """Whether an adapter of PEFT acts now: not when it is merged into the weight, or disabled."""
    return not (getattr(adapter, "merged", False) or getattr(adapter, "disable_adapters", False))


def _adds(adapter: Any) -> bool:
    """Whether an adapter does no more than add to the weight: LoRA, and not DoRA."""
    return hasattr(adapter, "lora_A") and not any(getattr(adapter, "use_dora", {}).values())
