"""The choice of the beta to fold, where training ended while a controller was still moving it.

`fold` calls `choose` before anything else.
"""

from __future__ import annotations

import logging
import math
from contextlib import ExitStack
from typing import Literal, get_args

import torch

from betahook import rerun
from betahook.control.search import Search
from betahook.hook import Hook
from betahook.measure.statistics import is_distributed

Unfinished = Literal["keep", "own", "better"]

logger = logging.getLogger(__name__)


def check(choice: str) -> None:
    """Refuse a choice that is not one of `Unfinished`, with a ValueError."""
    if choice not in get_args(Unfinished):
        raise ValueError(f'unfinished must be "keep", "own" or "better"; got {choice!r}')


def choose(hook: Hook, choice: Unfinished, undo: ExitStack) -> None:
    """Let the chosen beta act in all layers until `undo` is closed, if beta is on its way, and say which it is."""
    check(choice)
    if not hook.in_transition:
        return
    losses = _losses(hook) if choice == "better" else (torch.nan, torch.nan)
    # A loss that is NaN beside one that is not is the worse one; two of them, or two alike, say nothing.
    own_is_better = not math.isnan(losses[1]) and not losses[0] <= losses[1]
    own = choice == "own" or own_is_better
    if own:
        _let_own_act(hook, undo)
    if is_distributed() and torch.distributed.get_rank() > 0:  # all ranks choose alike
        return
    other = "the beta in force" if own else "the model's own"
    digits = _digits(*losses)
    compared = (
        f" (loss of the last batch: {losses[int(own)]:.{digits}g}; {losses[int(not own)]:.{digits}g} with {other})"
    )
    logger.warning(
        "fold() at step %d, while %s was still moving beta: folding %s%s. Train a few hundred steps longer%s, or "
        "choose another beta with unfinished=%s",
        hook.steps,
        ", ".join(map(repr, hook.controllers)),
        "the model's own beta, which leaves the weights as they are" if own else "the beta in force",
        "" if math.isnan(losses[0]) and math.isnan(losses[1]) else compared,
        ", or use Search(rise=False)" if any(isinstance(x, Search) for x in hook.controllers) else "",
        " or ".join(f'"{each}"' for each in get_args(Unfinished) if each != choice),
    )


def _digits(first: float, second: float) -> int:
    """Return how many digits show which of two losses is the lower one: four at least, nine at most, as float32 has."""
    return next((digits for digits in range(4, 9) if f"{first:.{digits}g}" != f"{second:.{digits}g}"), 9)


def _let_own_act(hook: Hook, undo: ExitStack) -> None:
    for layer in hook.layers.values():
        undo.enter_context(layer.acting(torch.ones_like(layer.current_gain)))


def _losses(hook: Hook) -> tuple[float, float]:
    """The loss with the beta in force and with the model's own, over all ranks; NaN where there is none."""
    with rerun.without_side_effects(hook), ExitStack() as undo:
        in_force = rerun.loss(hook)
        _let_own_act(hook, undo)
        losses = torch.stack([in_force, rerun.loss(hook)])
    if is_distributed():
        torch.distributed.all_reduce(losses)
        losses /= torch.distributed.get_world_size()
    return float(losses[0]), float(losses[1])
