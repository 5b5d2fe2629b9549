"""Checks before a step counts: attention was seen, there is a loss if a controller needs one, and ranks agree.

Single ranks may be idle, but not all of them. So the ranks communicate in their first step, and all raise or none does.
"""

from __future__ import annotations

import logging
import zlib
from collections.abc import Sequence

import torch

from betahook.control import base
from betahook.control.base import Controller
from betahook.layer import Layers
from betahook.measure import ranks
from betahook.options import Settings
from betahook.state.state import State, is_pooled

logger = logging.getLogger(__name__)


def check(state: State, layers: Layers, controllers: Sequence[Controller], settings: Settings) -> None:
    """Raise if attention, or a loss that a controller needs, was never seen; warn if the first step measured nothing.

    Ranks communicate once, so all of them must call this.

    Raises:
        RuntimeError: no rank has seen attention or the loss, or ranks differ; raised on all ranks.
    """
    if state.ranks_agree:
        return
    seen, measured, has_loss = state.seen, state.recorded or bool(state.refused), state.has_loss
    is_of_ranks = is_pooled(state)
    if is_of_ranks:
        decisive = _decisive(controllers, settings)
        seen, measured, has_loss = _ask_ranks(state, layers, decisive, (seen, measured, has_loss))
    if state.steps == 0:
        _check_seen(layers, seen=seen, measured=measured)
    if not has_loss:
        _check_unjudged(controllers)
    state.ranks_agree = is_of_ranks


def _check_seen(layers: Layers, *, seen: bool, measured: bool) -> None:
    if not seen:
        bypassed = ""
        if layers.use_interface:
            from betahook.tap.interface import UNKNOWN

            bypassed = f". If it did not, {UNKNOWN}"
        raise RuntimeError(
            "hook.step() was called, but no forward has reached a hooked layer. Run hook.model first. If you did, it "
            "ran on another model object, such as a copy, or called parts of the hooked modules and not the modules"
            f"{bypassed}"
        )
    if not measured:
        logger.warning(
            "no attention was measured before the first step(): the hooked layers ran in evaluation mode, under "
            "torch.no_grad or in torch.func only, and beta stays where it is. Call model.train() and run the forward "
            'with gradients, or attach(..., when="always")'
        )


def _check_unjudged(controllers: Sequence[Controller]) -> None:
    """Raise if a controller judges by the loss, of which there is none."""
    judge = next((controller for controller in controllers if controller.uses_loss), None)
    if judge is not None:
        raise RuntimeError(
            f"{judge} is judged by the training loss, and the model returned none: give it the model's labels, so "
            "that its output has a loss, or call step(loss=...). The Trainer keeps the labels from it with "
            "label_smoothing_factor, or with compute_loss_func"
        )


def _decisive(controllers: Sequence[Controller], settings: Settings) -> dict[str, object]:
    """Return the options of `attach` that determine when ranks communicate, and which beta each of them chooses."""
    written = [base.format_controller(type(each).__qualname__, base.options(each), type(each)) for each in controllers]
    return {"controller": ", ".join(written), "interval": settings.interval, "per_head": settings.per_head}


def _ask_ranks(state: State, layers: Layers, options: dict[str, object], here: tuple[bool, bool, bool]) -> list[bool]:
    """Return each flag of `here`, True if it is on any rank; raise if ranks differ in layers, `options` or state."""
    sizes = [f"{name}: {layer.heads} heads of {layer.head_dim}" for name, layer in layers.items()]
    given = [f"{name}={value}" for name, value in options.items()]
    asked = [_hash("\n".join(sizes)), *map(int, here), *map(_hash, given)]
    hooked, *found = ranks.ranges_over_ranks(asked, state.device)
    answers, chosen = found[: len(here)], found[len(here) :]
    if _differ(hooked):
        raise RuntimeError(
            f"statistics are pooled over all ranks, which must have the same attention layers; ranks differ, and this "
            f"one has {len(sizes)}, from {sizes[0]} to {sizes[-1]}. Stages of a pipeline and several models in one job "
            "cannot be measured: hook a model that all ranks hold, or train each model in a job of its own"
        )
    if differing := [option for option, each in zip(given, chosen, strict=True) if _differ(each)]:
        raise RuntimeError(
            "all ranks must have the same controllers, interval and per_head; ranks differ, and this one has "
            f"{', '.join(differing)}. Give every rank the same options of attach. Alerts may stand on one rank alone "
            "if every rank is given the same interval=, whose default Alerts(max_logit=...) changes"
        )
    # NaN, the model's own beta, becomes 0, which no beta is. Heads left alone here have lost the beta they were given.
    bits = state.beta.nan_to_num(0.0).view(torch.int32).tolist()
    betas = [None if alone else of_head for of_head, alone in zip(bits, state.left_alone.tolist(), strict=True)]
    if any(map(_differ, ranks.ranges_over_ranks([state.steps, state.skipped_steps, *betas], state.device))):
        raise RuntimeError(
            f"all ranks must begin with the same beta and the same step; ranks differ, and this one is at step "
            f"{state.steps}. Call load_state_dict, or set beta, on every rank alike"
        )
    return [largest > 0 for _, largest in answers]


def _hash(text: str) -> int:
    return zlib.crc32(text.encode())


def _differ(found: tuple[int, int]) -> bool:
    least, largest = found
    return least < largest
