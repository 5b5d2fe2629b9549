"""The training loss of a step, for controllers that look at it; without one nothing of it is recorded.

`Hook` connects the model and hands over what the user gives to `Hook.step`; `betahook.step.stages` reads it. Like all
sums the loss is kept on the device, in the table of `betahook.measure.statistics`, and read back by nobody.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from contextlib import ExitStack
from numbers import Real
from typing import Any

import torch
from torch import Tensor, nn

from betahook import compat, rerun
from betahook.control.base import Controller
from betahook.measure.statistics import OF_STEP, ROW
from betahook.models import materialise, selective
from betahook.state.state import State
from betahook.tap import copies


def connect(model: nn.Module, state: State, controllers: Sequence[Controller], undo: ExitStack) -> None:
    """Record the loss in the outputs of the model until `undo` is closed, for controllers that look at it.

    For those that get along without it, in their `loss_batches` only.
    """
    is_judged, batches = demand(controllers)
    if is_judged or batches:
        record = functools.partial(_record, state, is_judged, batches)
        copies.keep_hook(model, model.register_forward_hook(record, with_kwargs=True), undo)


def demand(controllers: Sequence[Controller]) -> tuple[bool, int]:
    """Tell if a controller is judged by the loss, and in how many batches others look at it."""
    is_judged = any(controller.uses_loss for controller in controllers)
    return is_judged, max((controller.loss_batches for controller in controllers), default=0)


def _sums(loss: Tensor, state: State, is_judged: bool) -> Tensor:
    """Return the rows of a loss in the table, `[2, 1]`: one loss, and what it is.

    To controllers that are not judged by it, a loss that is not finite, and perhaps not that of the training, is none.
    """
    loss = materialise.whole(loss.detach()).mean()  # of a mesh under tensor parallelism
    sums = torch.stack([loss.new_ones(()), loss]).to(state.table)[:, None]
    return sums if is_judged else torch.where(sums.isfinite().all(), sums, 0)


def _record(
    state: State,
    is_judged: bool,
    batches: int,
    module: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    output: Any,
) -> None:
    """Add the loss in an output to those of the step: the forward hook.

    A forward that is told the number of items in the batch, as by the Trainer, returns its share of the loss of a step:
    the shares add up to one loss, those of several ranks too where these are the items of all of them.
    """
    if compat.is_transformed():
        return
    # In compiled code the number of the batch would be a reason to compile again.
    if not (is_judged or torch.compiler.is_compiling() or state.batch < batches):
        return
    loss = rerun.loss_in(output)
    # A loss without a graph is one of an evaluation, one on the meta device that of a look at shapes.
    if not (isinstance(loss, Tensor) and loss.requires_grad) or state.paused or loss.is_meta:
        return
    is_share = kwargs.get("num_items_in_batch") is not None
    with selective.uncounted():
        if is_share and state.loss_ranks > 1:  # the mean over ranks is to be their sum
            loss = loss.detach() * state.loss_ranks
        state.table[OF_STEP] += _sums(loss, state, is_judged)
        if is_share:
            state.table[ROW["losses"]].clamp_(max=1)  # none, if no share was finite
    state.has_loss |= is_judged


def take(state: State, controllers: Sequence[Controller], given: Tensor | float | None) -> None:
    """Let what the user gave replace the losses of the outputs.

    Raises:
        TypeError: what was given is no loss.
    """
    if given is None:
        return
    if not isinstance(given, Tensor | Real):
        raise TypeError(f"step(loss=...) takes the loss, a tensor or a number; got {type(given).__name__}")
    is_judged, batches = demand(controllers)
    if is_judged or state.batch < batches:
        loss = torch.as_tensor(given, dtype=state.table.dtype, device=state.device)
        state.table[OF_STEP] = _sums(loss, state, is_judged)
        state.has_loss |= is_judged


@torch.no_grad()
def forget(state: State, controllers: Sequence[Controller]) -> None:
    """Forget the losses of the step that ended: where it was not pooled, the next one would add its own to them."""
    is_judged, batches = demand(controllers)
    if is_judged or state.batch <= batches:
        state.table[OF_STEP].zero_()


@torch.no_grad()
def forget_unfinished(state: State) -> None:
    """Forget loss and sensitivity of a step that was broken off, where a training begins again."""
    state.table[OF_STEP].zero_()
    state.gains.set_sensitivity(None)


def pooled(state: State) -> Tensor:
    """Return the loss of the last step, a scalar: the mean over its forwards, or the sum of shares, and over all ranks.

    NaN if there was none.
    """
    count, total = state.recent[OF_STEP].sum(1)
    mean: Tensor = total / count
    return mean


def was_recorded(state: State) -> Tensor:
    """Tell if the last step had a loss on any rank, a scalar; a loss of NaN is one, too."""
    return state.recent[ROW["losses"]].any()
