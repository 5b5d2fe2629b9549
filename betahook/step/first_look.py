"""The first look at W_q and W_k: before the first update, since after one at a high learning rate nothing looks random.

`Hook` connects it for controllers with an opening; `betahook.step.stages` passes the result on in the first batch.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

from betahook.control.base import Controller
from betahook.layer import Layers
from betahook.state.state import State

_Arguments = tuple[tuple[Any, ...], dict[str, Any]]
_waiting: dict[weakref.ref[State], weakref.ref[Layers]] = {}
"""States that wait for their first look, with their layers; weak references, so that no model is kept alive."""


def connect(state: State, layers: Layers, controllers: Sequence[Controller], undo: ExitStack) -> None:
    """Look at W_q and W_k once, after a forward pass and before the first update, unless `undo` is closed before.

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
    register_optimizer_step_pre_hook(_before_step)


def _before_step(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Arguments | None:
    """Look now, and if the step has a closure, in which a model may run for the first time, also after that.

    Args:
        optimizer: the optimizer that is about to step.
        args: positional arguments of its `step`, the optimizer itself included.
        kwargs: keyword arguments of its `step`.

    Returns:
        The arguments with another closure; None to leave them as they are.
    """
    if torch.compiler.is_compiling():
        return None
    _look()
    if not any(_is_due(reference()) for reference in _waiting.copy()):
        return None
    if callable(closure := kwargs.get("closure")):
        return args, {**kwargs, "closure": _looking_after(closure)}
    if callable(closure := next(iter(args[1:]), None)):
        return (args[0], _looking_after(closure), *args[2:]), kwargs
    return None


def _looking_after(closure: Callable[..., Any]) -> Callable[..., Any]:
    """Return a closure that looks when the given one has run the model, before the optimizer updates its weights."""

    @functools.wraps(closure)
    def looking(*args: Any, **kwargs: Any) -> Any:
        loss = closure(*args, **kwargs)
        _look()
        return loss

    return looking


def _look() -> None:
    for reference, layers in _waiting.copy().items():  # other threads or the garbage collector may change the original
        _look_at(reference(), layers())


def _is_due(state: State | None) -> bool:
    return state is not None and state.batch == 0 and state.first_spectral_ratio is None


@torch.no_grad()
def _look_at(state: State | None, layers: Layers | None) -> None:
    # If no attention was seen, this is another model's optimizer, or the model is yet to run in the closure.
    if state is None or layers is None or not state.seen or not _is_due(state):
        return
    ratio = layers.spectral_ratio()
    if state.first_spectral_ratio is None:  # another thread's optimizer may have looked and begun its update
        state.first_spectral_ratio = ratio
