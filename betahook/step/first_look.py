"""The first look at W_q and W_k: before the first update, which at a high learning rate leaves nothing random in them.

`Hook` connects it for controllers with an opening; `betahook.step.stages` hands over what it saw in the first batch.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from betahook.control.base import Controller
from betahook.layer import Layers
from betahook.state.state import State

_registered: dict[weakref.ref[State], RemovableHandle] = {}
"""The hook on all optimizers that looks for each state."""


def connect(state: State, layers: Layers, controllers: Sequence[Controller], undo: ExitStack) -> None:
    """Look at W_q and W_k once, in the first step of an optimizer after a forward, unless `undo` is closed before.

    In a loop without an optimizer of torch, or with one that is compiled, controllers look at them in `Hook.step`.
    """
    if not any(controller.opening_batches for controller in controllers):
        return
    # The hook is one of all optimizers, and would keep the model; and none may be removed while they run.
    references = weakref.ref(state), weakref.ref(layers)
    _forget_what_is_gone()

    @torch.no_grad()
    def look(*call: Any) -> None:
        state, layers = references[0](), references[1]()
        if state is None or layers is None or torch.compiler.is_compiling():
            return
        # Unseen: it is another model's optimizer.
        if state.seen and state.batch == 0 and state.first_spectral_ratio is None:
            state.first_spectral_ratio = layers.spectral_ratio()

    handle = _registered[references[0]] = register_optimizer_step_pre_hook(look)
    undo.callback(handle.remove)


def _forget_what_is_gone() -> None:
    """Remove the hooks of states that were collected without `detach`; the collector may run within an optimizer."""
    for reference in [each for each in _registered if each() is None]:
        _registered.pop(reference).remove()
