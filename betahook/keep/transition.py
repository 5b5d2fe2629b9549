"""Training that ends while a controller is still moving beta: a warning, and the choice of the beta to fold.

`fold` calls `choose` before anything else; the Trainer's callback calls `warn_of_short_training`.
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
from betahook.measure.ranks import is_distributed, is_first_rank

logger = logging.getLogger(__name__)

Unfinished = Literal["keep", "own", "better"]


def warn_of_short_training(hook: Hook, steps: int) -> None:
    """Warn if a training of this many steps ends before beta has settled."""
    late = [controller for controller in hook.moving if controller.opening_batches > steps]
    if late:
        logger.warning(
            "training ends after %d steps, but %s may need %d to bring beta to its place: train longer, choose "
            'Search.brief() or Search(rise=False), or only watch, with "monitor"',
            steps,
            ", ".join(map(repr, late)),
            max(controller.opening_batches for controller in late),
        )


def check(choice: str) -> None:
    """Raise a ValueError unless `choice` is one of `Unfinished`."""
    if choice not in get_args(Unfinished):
        raise ValueError(f'unfinished must be "keep", "own" or "better"; got {choice!r}')


def choose(hook: Hook, choice: Unfinished, undo: ExitStack, *, is_best: bool) -> str:
    """If a controller is still moving beta, put the chosen beta in force in all layers until `undo` is closed.

    Returns:
        A warning that names the choice; empty if no controller moves beta, and on all ranks but the first one.
    """
    check(choice)
    moving = hook.moving
    if not moving:
        return ""
    in_force, of_own = _losses(hook) if choice == "better" and not is_best else (math.nan, math.nan)
    # If one loss is NaN, the other one is better; if both are NaN, or equal, the beta in force stays.
    takes_own = choice == "own" or not (math.isnan(of_own) or in_force <= of_own)
    if takes_own:
        _let_own_act(hook, undo)
    if not is_first_rank():  # all ranks make the same choice
        return ""
    folded = "the model's own beta, which leaves the weights as they are" if takes_own else "the beta in force"
    is_long = any(isinstance(controller, Search) and controller != Search.brief() for controller in moving)
    alike = ("keep", "better") if is_best and choice != "own" else (choice,)
    others = [each for each in get_args(Unfinished) if each not in alike]
    return (
        f"fold() at step {hook.steps}, while {', '.join(map(repr, moving))} was still moving beta: folding "
        f"{folded}{_compared(in_force, of_own, takes_own=takes_own)}. Train a few hundred steps longer"
        f"{', or use Search.brief()' if is_long else ''}, or choose another beta with unfinished="
        + " or ".join(f'"{each}"' for each in others)
    )


def _compared(in_force: float, of_own: float, *, takes_own: bool) -> str:
    """Return both losses in brackets, that of the chosen beta first; empty if there are none."""
    if math.isnan(in_force) and math.isnan(of_own):
        return ""
    digits = _digits(in_force, of_own)
    chosen, other = (of_own, in_force) if takes_own else (in_force, of_own)
    name = "the beta in force" if takes_own else "the model's own"
    return f" (loss of the last batch: {chosen:.{digits}g}; {other:.{digits}g} with {name})"


def _digits(first: float, second: float) -> int:
    """Return how many digits, from 4 to the 9 of float32, are needed to show which of two losses is lower."""
    return next((digits for digits in range(4, 9) if f"{first:.{digits}g}" != f"{second:.{digits}g}"), 9)


def _let_own_act(hook: Hook, undo: ExitStack) -> None:
    for layer in hook.layers.values():
        undo.enter_context(layer.acting(torch.ones_like(layer.current_gain)))


def _losses(hook: Hook) -> tuple[float, float]:
    """Return the loss with the beta in force and the loss with the model's own, as means over ranks; NaN for none."""
    with rerun.without_side_effects(hook), ExitStack() as undo:
        in_force = rerun.loss(hook)
        _let_own_act(hook, undo)
        losses = torch.stack([in_force, rerun.loss(hook)])
    if is_distributed():
        torch.distributed.all_reduce(losses)
        losses /= torch.distributed.get_world_size()
    return float(losses[0]), float(losses[1])
