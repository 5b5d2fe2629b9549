"""Layers that are left alone, here or on any rank: they keep the model's own beta, and are not measured.

This may happen late, when beta has already moved. The beta that a layer loses is remembered as long as its weights are
those that were trained with it: checkpoints contain it, `fold` refuses, and it acts again if the layer is followed
again.
"""

from __future__ import annotations

import torch

from betahook.state.gains import gain_of
from betahook.state.ranges import HeadRange
from betahook.state.state import State

LEFT_ALONE_ELSEWHERE = "as another rank does, whose log says why"
"""The reason given for a layer that this rank could follow, but another cannot."""


@torch.no_grad()
def refuse(state: State, head_range: HeadRange, reason: str) -> None:
    """Leave a layer alone from now on, and discard what was measured of it."""
    state.refused[head_range.layer], state.seen = reason, True
    state.left_alone[head_range.heads] = True
    state.settle()
    forget_refused(state)


def refusal_anywhere(state: State, head_range: HeadRange) -> str | None:
    """Return the reason why a layer is left alone here or, as of the last pooling, on any rank; None if it is not.

    A layer that another rank leaves alone is then left alone here too. With several ranks, the first call after a
    pooling reads the device back.
    """
    if not state.refusals_are_known:
        left_alone = state.left_alone.tolist()
        for each in state.ranges:
            if left_alone[each.heads.start] and each.layer not in state.refused:
                refuse(state, each, LEFT_ALONE_ELSEWHERE)
        state.refusals_are_known = True
    return state.refused.get(head_range.layer)


@torch.no_grad()
def take_up(state: State, head_range: HeadRange) -> None:
    """Follow a layer again if it was left alone, with the beta that it lost then."""
    heads = head_range.heads
    state.beta[heads] = torch.where(state.left_alone[heads], state.lost_beta[heads], state.beta[heads])
    state.left_alone[heads], state.lost_beta[heads] = False, torch.nan
    state.refused.pop(head_range.layer, None)


def lost_gain(state: State, head_range: HeadRange) -> float:
    """Return the beta that a layer lost when it was left alone, divided by the model's own; 1 if it lost none.

    NaN if the model's own is not known. Reads the device back.
    """
    return float(state.layers.geometric_mean(gain_of(state.lost_beta, state.beta_default))[head_range.layer])


def has_refused(state: State) -> bool:
    """Return True if any layer may be left alone."""
    return bool(state.refused) or not state.refusals_are_known


def release_refused(state: State) -> None:
    """Reset layers that are left alone to the model's own beta, and remember the one that acted until now."""
    if has_refused(state):
        acted = state.left_alone & ~state.beta.isnan()
        state.lost_beta.copy_(torch.where(acted, state.beta, state.lost_beta))
        state.beta.masked_fill_(state.left_alone, torch.nan)


def forget_refused(state: State) -> None:
    """Discard what was measured of the layers that are left alone, and reset them to the model's own beta."""
    for sums in (state.table, state.recent, state.window):
        sums.masked_fill_(state.left_alone, 0)
    for sums in (state.moments, state.recent_moments):
        sums.masked_fill_(state.by_component(state.left_alone), 0)
    for layer in state.refused:
        state.gains.drop(layer)
    release_refused(state)
