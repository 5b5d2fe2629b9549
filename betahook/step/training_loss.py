"""The training loss of a step, recorded only if a controller uses it.

`Hook` connects this to the model and passes on a loss given to `Hook.step`; `betahook.step.stages` reads the result.
Like all sums, the loss stays on the device, in the table of `betahook.measure.statistics`, and is never read back.
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
    """Record the loss in the outputs of the model until `undo` is closed, if a controller uses it.

    For controllers that can do without it, record it in their `loss_batches` only.
    """
    is_judged, batches = demand(controllers)
    if is_judged or batches:
        record = functools.partial(_record, state, is_judged, batches)
        copies.keep_hook(model, model.register_forward_hook(record, with_kwargs=True), undo)


def demand(controllers: Sequence[Controller]) -> tuple[bool, int]:
    """Return whether a controller judges by the loss, and in how many batches others use it."""
    is_judged = any(controller.uses_loss for controller in controllers)
    return is_judged, max((controller.loss_batches for controller in controllers), default=0)


def _sums(loss: Tensor, state: State, is_judged: bool) -> Tensor:
    """Return the rows of a loss for the table, `[2, 1]`: the number 1 and the loss.

    If no controller judges by it, a loss that is not finite, perhaps not the training loss at all, counts as none.
    """
    loss = materialise.whole(loss.detach()).mean()  # a DTensor under tensor parallelism
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

    A forward pass that receives the number of items in the batch, as from the Trainer, returns its share of the step's
    loss. The shares add up to one loss, also over ranks if that number counts the items of all ranks.
    """
    if compat.is_transformed():
        return
    # In compiled code, a look at the batch number would trigger recompilation.
    if not (is_judged or torch.compiler.is_compiling() or state.batch < batches):
        return
    loss = rerun.loss_in(output)
    # A loss without a graph comes from an evaluation, and one on the meta device from a run for shapes only.
    if not (isinstance(loss, Tensor) and loss.requires_grad) or state.paused or loss.is_meta:
        return
    is_share = kwargs.get("num_items_in_batch") is not None
    with selective.uncounted():
        if is_share and state.loss_ranks > 1:  # so that the mean over ranks is the sum of shares
            loss = loss.detach() * state.loss_ranks
        state.table[OF_STEP] += _sums(loss, state, is_judged)
        if is_share:
            state.table[ROW["losses"]].clamp_(max=1)  # 0 if no share was finite
    state.has_loss |= is_judged


def take(state: State, controllers: Sequence[Controller], given: Tensor | float | None) -> None:
    """Replace the losses of the outputs by the one that the user gave, if any.

    Raises:
        TypeError: `given` is neither a tensor nor a number.
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
    """Forget the losses of the step that ended; if it was not pooled, the next step would add its own to them."""
    is_judged, batches = demand(controllers)
    if is_judged or state.batch <= batches:
        state.table[OF_STEP].zero_()


@torch.no_grad()
def forget_unfinished(state: State) -> None:
    """Forget loss and sensitivity of a step that was interrupted, when training starts again."""
    state.table[OF_STEP].zero_()
    state.gains.set_sensitivity(None)


def pooled(state: State) -> Tensor:
    """Return the loss of the last step, a scalar: the mean over forward passes, or the sum of shares, and over ranks.

    NaN if there was none.
    """
    count, total = state.recent[OF_STEP].sum(1)
    mean: Tensor = total / count
    return mean


def was_recorded(state: State) -> Tensor:
    """Return whether the last step had a loss on any rank, a boolean scalar; a loss of NaN counts."""
    return state.recent[ROW["losses"]].any()
