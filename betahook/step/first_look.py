"""The first look at W_q and W_k: before the first update, since after one at a high learning rate nothing looks random.

`Hook` connects it for controllers with an opening; `betahook.step.stages` passes the result on in the first batch.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from betahook.control.base import Controller
from betahook.layer import Layers
from betahook.state.state import State

_waiting: dict[weakref.ref[State], weakref.ref[Layers]] = {}
"""States that wait for their first look, with their layers; weak references, so that no model is kept alive."""


def connect(state: State, layers: Layers, controllers: Sequence[Controller], undo: ExitStack) -> None:
    """Look at W_q and W_k once, before the first optimizer step after a forward pass, unless `undo` is closed before.

    In a loop without a torch optimizer, or with a compiled one, controllers look at them in `Hook.step` instead.
    """
    if not any(controller.opening_batches for controller in controllers):
        return
    _watch_optimizers()
    reference = weakref.ref(state, _forget)
    _waiting[reference] = weakref.ref(layers)
    undo.callback(_forget, reference)


def _forget(reference: weakref.ref[State]) -> None:
    _waiting.pop(reference, None)


@functools.cache
def _watch_optimizers() -> None:
    """Look before every step of every optimizer from now on; removing such a hook would disturb other threads."""
    register_optimizer_step_pre_hook(_look)


def _look(*call: Any) -> None:
    if torch.compiler.is_compiling():
        return
    for reference, layers in _waiting.copy().items():  # other threads or the garbage collector may change the original
        _look_at(reference(), layers())


@torch.no_grad()
def _look_at(state: State | None, layers: Layers | None) -> None:
    # If no attention was seen, this is another model's optimizer.
    if state is None or layers is None or not state.seen or state.batch > 0 or state.first_spectral_ratio is not None:
        return
    ratio = layers.spectral_ratio()
    if state.first_spectral_ratio is None:  # another thread's optimizer may have looked and begun its update
        state.first_spectral_ratio = ratio
