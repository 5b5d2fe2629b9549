"""`fold`: bake beta into the weights, so that the model no longer needs betahook.

A fold raises an error where it cannot be exact (`refusals`), finds the weights to scale (`verification`), scales them
and detaches the hook. Weights that the checks change are restored; the lasting change comes after the whole model has
passed. The callbacks of trainers fold by `fold_or_warn`.
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
from betahook.measure.dtypes import to_sum_dtype
from betahook.measure.ranks import range_over_ranks
from betahook.models import materialise
from betahook.models.discovery import shown_name
from betahook.models.scaling import Scaling
from betahook.version import __version__

logger = logging.getLogger(__name__)
FOLDED_KEY = "betahook_folded"
"""Config key of the note that a fold leaves. Not `checkpoint.MARK`, which says that the weights lack beta."""
TAG = "betahook"


def fold(model: nn.Module | Hook, *, unfinished: Unfinished = "keep") -> None:
    """Bake the current beta of a hooked model into its weights and detach: a plain model with the same outputs.

    Before any change becomes permanent, the fold is checked: the model runs again, at least twice, on the input of its
    last forward, in evaluation mode. Up to rounding, each layer must return the same output with its folded weights,
    and so must the whole model, in every floating-point tensor that it returns. If only a part of the model was ever
    called, that part, `hook.last_call.module`, is compared. Uses of a query weight outside that forward, as in a loss
    of your own, go unnoticed.

    If FSDP 2 or tensor parallelism shards the model, every rank must call this.

    The config of a transformers model then records the fold under `betahook_folded`, and its card on the Hub gets the
    tag "betahook". You may delete both.

    Args:
        model: a hooked model, or its hook.
        unfinished: the beta to fold if training ended while a controller was still moving beta to its target, as in the
            first 200 batches of a fresh model under `Search`. "keep": the beta in force; "own": the model's own, which
            leaves the weights unchanged; "better": the one of the two with the lower loss on the input of the last
            forward, or the one in force if the losses are equal or the model returns none (with several ranks, all must
            call). A warning says which one was folded.

    Raises:
        FoldError: a layer has no exact fold, its weights are used elsewhere too, they would not be finite, or the model
            does not run again. Nothing is changed, and the hook stays attached.
        ValueError: the model is not hooked, or has several hooks; or `unfinished` is none of the above.
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
    """Fold as `fold` does; `fold_or_warn` sets the other options.

    Args:
        hook: the hook to fold.
        given: the model passed to `fold`, see `FoldPlan`.
        unfinished: as for `fold`.
        is_best: True if an evaluation chose the weights together with the beta in force.
        together: True if every rank calls this, so that either all of them fold or none does.
    """
    with ExitStack() as undo:
        choice = transition.choose(hook, unfinished, undo, is_best=is_best)
        gains = {layer: to_sum_dtype(layer.current_gain) for layer in hook.layers.values()}
        # An unknown gain, NaN, counts as changed: NaN != 1. `beta_is_unknown` refuses it.
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
    """Return, for each layer to fold, the weights that take its gain.

    Raises:
        FoldError: a layer has no exact fold here or, if ranks fold `together`, on another rank.
    """
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
    """Check the options of a trainer's callback that decide what happens at the end of training.

    Raises:
        ValueError: `on_end` is neither "fold" nor "keep", or `fold` does not know this `unfinished`.
    """
    if on_end not in ("fold", "keep"):
        raise ValueError(f'on_end must be "fold" or "keep"; got {on_end!r}')
    transition.check(unfinished)


def warn_of_refusals(hook: Hook) -> None:
    """Warn before training if the beta that it produces cannot be folded, as far as the model shows that now.

    Every rank must call this, as it must `fold`, since weights may be sharded.
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
    """Fold at the end of training; if a layer has no exact fold, keep the hook and log a warning that says why.

    Every rank must call this, and either all of them fold or none does: one rank may refuse alone, for example if its
    last forward did not use a layer. With `is_best`, an evaluation chose the weights together with the beta in force,
    and `unfinished="better"` folds that beta: the loss of one batch is no reason to prefer another.
    """
    try:
        _fold(hook, hook.model, unfinished, is_best=is_best, together=True)
    except FoldError as error:
        logger.warning("%s. A model that is saved now needs betahook to act as it was trained.", error)


def _leave_note(hook: Hook, gains: Tensor) -> None:
    """Record the fold in the config of a transformers model, and tag its model card for the Hub."""
    model: Any = hook.model
    if checkpoint.has_transformers_config(model):
        note = {
            "version": __version__,
            "controllers": hook.trained_by or [repr(controller) for controller in hook.controllers],
            "steps": hook.steps,
            "beta_over_own": [float(f"{float(limit):.6g}") for limit in gains.aminmax()],
        }
        setattr(model.config, FOLDED_KEY, note)
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
