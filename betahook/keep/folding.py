"""`fold`: bake beta into the weights, so that the model no longer needs betahook.

Reads as refuse, find the exact places, write, detach. Until the whole model is checked, nothing stays written. The
callbacks of trainers fold by `fold_or_warn`.
"""

from __future__ import annotations

import logging
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn

from betahook import checkpoint
from betahook.hook import Hook, hooks_of
from betahook.keep import transition
from betahook.keep.refusals import FoldError, FoldPlan, foresee, refuse
from betahook.keep.transition import Unfinished
from betahook.keep.verification import exact_places
from betahook.layer import AttentionLayer, gain_lost_by
from betahook.measure.dtypes import for_sums
from betahook.measure.ranks import range_over_ranks
from betahook.models import materialise
from betahook.models.discovery import shown_name
from betahook.models.scaling import Scaling
from betahook.version import __version__

logger = logging.getLogger(__name__)
NOTE = "betahook_folded"
"""Key of the note in the config; `checkpoint.MARK`, another one, says that beta is not in the weights."""
TAG = "betahook"


def fold(model: nn.Module | Hook, *, unfinished: Unfinished = "keep") -> None:
    """Bake the current beta of a hooked model into its weights and detach: a plain model with the same outputs.

    Checks itself before anything is written for good: the model runs again, at least twice, on the input of its last
    forward, in evaluation mode. Up to rounding, each layer alone must give the same output from its folded weights, and
    so must the model, in every floating-point tensor that it returns; where only a part of it was ever called, that is
    `hook.last_call.module`. Uses of a query weight outside of that forward, as in a loss of your own, are not seen.

    If FSDP 2 or tensor parallelism divides the model over ranks, every rank must call this.

    The config of a model of transformers then says what was folded, under `betahook_folded`, and its card on the Hub
    has the tag "betahook". Nothing reads either: delete them as you like.

    Args:
        model: a hooked model, or its hook.
        unfinished: which beta to fold where training ended while a controller was still bringing it to where it wants
            it, as in the first 200 batches of a fresh model under `Search`. "keep": the one in force; "own": the
            model's own, which leaves the weights as they are; "better": that of the two which has the lower loss on the
            input of the last forward, the one in force where they are alike or the model returns no loss (with several
            ranks, all must call). A warning says which it was.

    Raises:
        FoldError: a layer has no exact fold, something else uses its weights, they would not be finite, or the model
            does not run again. Nothing is changed, the hook stays attached.
        ValueError: the model is not hooked, or has several hooks; or `unfinished` is none of these.
        TypeError: `model` is neither a module nor a hook.
    """
    hook = model if isinstance(model, Hook) else _only_hook(model)
    if not hook.attached:
        raise ValueError("fold() on a detached hook: beta is the model's own, there is nothing to fold")
    _fold(hook, hook.model if isinstance(model, Hook) else model, unfinished)


@torch.no_grad()
def _fold(
    hook: Hook, given: nn.Module, unfinished: Unfinished, *, is_best: bool = False, together: bool = False
) -> None:
    """Fold as `fold` does.

    `is_best` says that an evaluation has chosen the weights with the beta in force, `together` that every rank calls,
    of which all fold or none.
    """
    with ExitStack() as undo:
        choice = transition.choose(hook, unfinished, undo, is_best=is_best)
        gains = {layer: for_sums(layer.current_gain) for layer in hook.layers.values()}
        # NaN is no 1 either.
        changed = {layer: gain for layer, gain in gains.items() if bool((gain != 1).any()) or gain_lost_by(layer) != 1}
        materialise.reshard(hook.model)
        for layer, place in _find_places(FoldPlan(hook, given, changed), together).items():
            place.scale(changed[layer])
        if changed:
            _leave_note(hook, torch.cat(list(changed.values())))
        if choice:
            logger.warning("%s", choice)
        hook.detach()


def _find_places(plan: FoldPlan, together: bool) -> dict[AttentionLayer, Scaling]:
    """Return the place for each gain; refuse, also where a rank does of those that fold `together`."""
    places, error = dict[AttentionLayer, Scaling](), None
    try:
        if plan.gains:
            refuse(plan)
            places = exact_places(plan)
    except FoldError as found:
        error = found
    refusals = int(error is not None)
    if together:
        _, refusals = range_over_ranks(refusals, next(iter(plan.hook.layers.values())).current_gain.device)
    if refusals:
        raise error or plan.error("another rank cannot, whose log says why")
    return places


def check_end(on_end: str, unfinished: str) -> None:
    """Refuse options of a callback on the end of training that are none.

    Raises:
        ValueError: `on_end` is neither "fold" nor "keep", or `unfinished` is none of those of `fold`.
    """
    if on_end not in ("fold", "keep"):
        raise ValueError(f'on_end must be "fold" or "keep"; got {on_end!r}')
    transition.check(unfinished)


def warn_of_refusals(hook: Hook) -> None:
    """Log a warning before training if the beta that it makes cannot be folded, as far as the model shows it now.

    Every rank must call this, as it must `fold`: weights may be sharded.
    """
    if not any(controller.moves_beta for controller in hook.controllers):
        return
    found = foresee(hook, from_weights=True)
    if not found:
        return
    layer, reason = next(iter(found.items()))
    logger.warning(
        "beta of %d of %d layers cannot be folded at the end of training (%s: %s), and a model that is saved then "
        'needs betahook. To watch only, use controller="monitor"',
        len(found),
        len(hook.layers),
        shown_name(layer.name),
        reason,
    )


def fold_or_warn(hook: Hook, unfinished: Unfinished, *, is_best: bool = False) -> None:
    """Fold at the end of training; where a layer has no exact fold, the hook stays and a warning says why.

    Every rank must call, and all fold or none: the last forward of one may not use a layer. Where an evaluation has
    chosen the model, `is_best`, the beta in force is the better one: one batch is no reason to take another.
    """
    try:
        _fold(hook, hook.model, unfinished, is_best=is_best, together=True)
    except FoldError as error:
        logger.warning("%s. A model that is saved now needs betahook to act as it was trained.", error)


def _leave_note(hook: Hook, gains: Tensor) -> None:
    """Note in the config of a model what was folded, and tag the model card that the Hub gets; nothing reads either."""
    model: Any = hook.model
    if checkpoint.takes_notes(model):
        note = {
            "version": __version__,
            "controllers": hook.trained_by or [repr(controller) for controller in hook.controllers],
            "steps": hook.steps,
            "beta_over_own": [float(f"{float(limit):.6g}") for limit in gains.aminmax()],
        }
        setattr(model.config, NOTE, note)
    if hasattr(model, "add_model_tags"):
        model.add_model_tags([TAG])


def _only_hook(model: nn.Module) -> Hook:
    if not isinstance(model, nn.Module):
        raise TypeError(f"fold() takes a hooked model or its hook; got {type(model).__name__}")
    hooks = hooks_of(model)
    if not hooks:
        raise ValueError(f"{type(model).__name__} is not hooked: call betahook.attach(model) first")
    if len(hooks) > 1:
        raise ValueError(
            f"{type(model).__name__} has {len(hooks)} hooks, of parts of it: fold each, betahook.fold(hook)"
        )
    return hooks.pop()
