"""Switch beta off with the adapters of PEFT: without them the model is the one before training.

`Hook` connects the model. DPO and GRPO get their reference model by `disable_adapter`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn

from betahook.state import State
from betahook.tap.override import Override


def connect(model: nn.Module, state: State, undo: ExitStack) -> None:
    """Let the model's own beta act, and nothing be measured, in `disable_adapter` of PEFT, until `undo` is closed."""
    original: Any = getattr(model, "disable_adapter", None)
    if original is None:
        return

    @contextmanager
    def disable_adapter() -> Iterator[None]:
        with original(), ExitStack() as stack:
            if override.active:  # else this is a reference that was kept
                kept = state.beta.clone()
                stack.callback(lambda: state.beta.copy_(kept))
                stack.enter_context(state.pause())
                state.beta.fill_(torch.nan)
            yield

    override = Override(model, "disable_adapter", disable_adapter, undo)
