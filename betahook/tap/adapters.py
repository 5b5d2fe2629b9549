"""Switch beta off together with PEFT adapters, since the model without them is the one before training.

`Hook` calls `connect` and `follow`. DPO and GRPO, for instance, use `disable_adapter` as their reference model.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn

from betahook import compat
from betahook.state.state import State
from betahook.tap.override import Override


def connect(model: nn.Module, state: State, undo: ExitStack) -> None:
    """Make PEFT's `disable_adapter` restore the model's own beta and pause measuring, until `undo` is closed."""
    follow(model, state, undo)
    original: Any = getattr(model, "disable_adapter", None)
    if original is None:
        return

    @contextmanager
    def disable_adapter() -> Iterator[None]:
        with original(), ExitStack() as stack:
            if override.active:  # else somebody kept a reference to this function
                stack.enter_context(_switched_off(state))
            yield

    override = Override(model, "disable_adapter", disable_adapter, undo)


def follow(model: nn.Module, state: State, undo: ExitStack) -> None:
    """Do the same for a PEFT model around the hooked model, perhaps made after `attach`; arguments as for `connect`.

    Its `disable_adapter` is out of reach, but switches each adapter inside the model, so the first one is watched.
    """
    if not isinstance(vars(model).get("peft_config"), dict):  # PEFT sets it on the model that it wraps
        return
    adapter = first_adapter(model)
    if adapter is None or "enable_adapters" in vars(adapter):
        return
    original, off = adapter.enable_adapters, ExitStack()
    undo.callback(off.close)

    def enable_adapters(enabled: bool) -> None:
        original(enabled)
        if not override.active:
            return
        off.close()
        if not enabled:
            off.enter_context(_switched_off(state))

    override = Override(adapter, "enable_adapters", enable_adapters, undo)


def first_adapter(model: nn.Module) -> Any:
    """Return the first adapter in a model that PEFT can switch on and off; None without any."""
    adapters = filter(compat.is_adapter, model.modules())  # a model of transformers has the method too
    return next((adapter for adapter in adapters if hasattr(adapter, "enable_adapters")), None)


@contextmanager
def _switched_off(state: State) -> Iterator[None]:
    """Let the model's own beta act, and measure nothing, inside this context."""
    kept = state.beta.clone()
    with state.pause():
        state.beta.fill_(torch.nan)
        try:
            yield
        finally:
            state.beta.copy_(kept)
