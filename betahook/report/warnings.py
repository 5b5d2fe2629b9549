"""Warnings that `Hook` logs once: of a NaN or an infinity, of layers that no forward pass reaches, of old numbers."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping

from torch import nn

from betahook.layer import Layers
from betahook.models.discovery import shown_name
from betahook.report.names import listed
from betahook.state.state import State
from betahook.tap.recorder import ATTRIBUTE, NO_ATTENTION

logger = logging.getLogger("betahook")

NAMED = 3
"""Number of layers that a warning names at most; it counts the others."""
IDLE = 20
"""Smallest number of steps without a measurement that is worth a warning."""
REPLACED = (
    "the forward of its class was replaced by one that does not ask transformers for its attention, in which beta does "
    "not act: detach, and attach again"
)


def find_unreached(state: State, layers: Layers, model: nn.Module) -> dict[str, str]:
    """Return the layers that no forward pass of the model reaches, with the reason; none before any forward pass.

    If no beta acts, layers are measured in turn: one skipped in the first step, e.g. by LayerDrop, counts as unreached
    until its turn.
    """
    if not state.seen:
        return {}
    modules, unreached, replaced = set(model.modules()), {}, layers.replaced
    unused = state.layers.geometric_mean(state.beta_default).isnan().tolist()
    for (name, layer), is_unused in zip(layers.items(), unused, strict=True):
        if layer.module not in modules:
            unreached[name] = "it is no longer part of the model: detach, and attach again"
        elif name in replaced:
            unreached[name] = REPLACED
        elif is_unused and layer.refusal is None:
            has_run = getattr(getattr(layer.module, ATTRIBUTE, None), "showed_no_attention", False)
            unreached[name] = NO_ATTENTION if has_run else "no forward that is measured has reached it yet"
    return unreached


def warn_of_steps(state: State, asked: str, unreached: Mapping[str, str], interval: int) -> None:
    """Warn of steps that are missing or measured nothing, so that the report `asked` shows no or only old numbers."""
    _warn_of_missing_steps(state, asked)
    _warn_of_idle_steps(state, asked, unreached, interval)


def _warn_of_missing_steps(state: State, asked: str) -> None:
    """Warn once if the report `asked` is called a second time although `step` was never called."""
    if state.steps > 0 or not state.recorded or state.reported.warned_of_missing_steps:
        return
    if asked in state.reported.asked:
        state.reported.warned_of_missing_steps = True
        logger.warning(
            "%s shows no scores: forwards were measured, but hook.step() has not been called yet. Call it once per "
            "optimizer step, after it, and %s afterwards",
            asked,
            asked,
        )
    state.reported.asked.add(asked)


def _warn_of_idle_steps(state: State, asked: str, unreached: Mapping[str, str], interval: int) -> None:
    """Warn once if the report `asked` shows numbers of long ago, as when nobody called `model.train()` again."""
    idle = state.reported.idle_steps - 1  # the step that measured last counts
    was_measured = state.recorded or state.steps > state.reported.idle_steps  # if not, the first step has warned
    left_alone = unreached or len(state.refused) == len(state.ranges)
    if idle < max(IDLE, 2 * interval) or left_alone or not was_measured:
        return
    state.reported.idle_steps = -math.inf
    logger.warning(
        "no attention was measured in the last %d steps, and %s shows earlier numbers: the hooked layers ran in "
        "evaluation mode, under torch.no_grad or not at all. Call model.train() after an evaluation, or "
        'attach(..., when="always")',
        idle,
        asked,
    )


def warn_of_unreached(state: State, unreached: Mapping[str, str]) -> None:
    """Log a warning of layers that no forward pass reaches (name to reason), unless one was logged before."""
    if state.reported.warned_of_unreached or state.steps == 0 or not unreached:
        return
    state.reported.warned_of_unreached = True
    places = [f"{shown_name(name)} ({reason})" for name, reason in unreached.items()]
    logger.warning("not measured, hence not in the metrics: %s", listed(places, NAMED))


def warn_of_nonfinite(state: State, layers: Layers, interval: int) -> None:
    """Log a warning if scores, gradients or a loss were not finite in any step, unless one was logged before.

    If no beta acts, a layer is measured only once in `interval` steps, so the warning says how late it may be.
    """
    if state.reported.warned_of_nonfinite:
        return
    heads = state.nonfinite_since.cpu().split([layer.heads for layer in layers.values()])
    first = {name: int(since[since > 0].min()) for name, since in zip(layers, heads, strict=True) if since.any()}
    if not first:
        return
    state.reported.warned_of_nonfinite = True
    places = [f"{shown_name(name)} in step {first[name]}" for name in sorted(first, key=first.__getitem__)]
    if state.has_loss:  # a controller judges by it: such a step is a bad trial
        logger.warning("NaN or infinity in the loss, or in the scores or gradients of %s", listed(places, NAMED))
        return
    late = ""
    if interval > 1 and not state.beta_acts and min(first.values()) > 1:  # all layers are measured in the first step
        late = f". A layer is measured once in {interval} steps: the first may be up to {interval - 1} steps older"
    logger.warning(
        "NaN or infinity in the scores or gradients of %s: beta stays where it was%s", listed(places, NAMED), late
    )
