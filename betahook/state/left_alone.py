"""Layers that are left alone, here or on any rank: they keep the model's own beta, and nothing of them is measured.

Such a layer may come late, when beta has moved. The beta that it loses is kept as long as the weights are those that
were trained with it: checkpoints have it, `fold` refuses, and it acts again if the layer can be followed again.
"""

from __future__ import annotations

import torch

from betahook.state.gains import gain_of
from betahook.state.ranges import HeadRange
from betahook.state.state import State

LEFT_ALONE_ELSEWHERE = "as another rank does, whose log says why"
"""Reason to leave a layer alone that this rank could follow."""


@torch.no_grad()
def refuse(state: State, head_range: HeadRange, reason: str) -> None:
    """Leave a layer alone from now on, and forget what was measured of it."""
    state.refused[head_range.layer], state.seen = reason, True
    state.left_alone[head_range.heads] = True
    state.settle()
    forget_refused(state)


def refusal_anywhere(state: State, head_range: HeadRange) -> str | None:
    """Return the reason why a layer is left alone here or, as of the last pooling, on any rank; None if it is not.

    From then on it is left alone here too. The first call after a pooling of several ranks reads the device back.
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
    """Follow a layer again if it was left alone, and let the beta act that it lost then."""
    heads = head_range.heads
    state.beta[heads] = torch.where(state.left_alone[heads], state.lost[heads], state.beta[heads])
    state.left_alone[heads], state.lost[heads] = False, torch.nan
    state.refused.pop(head_range.layer, None)


def lost_gain(state: State, head_range: HeadRange) -> float:
    """Return the beta that a layer lost when it was left alone, over the model's own; 1 for none.

    NaN where the model's own is not known. Reads the device back.
    """
    return float(state.layers.geometric_mean(gain_of(state.lost, state.beta_default))[head_range.layer])


def has_refused(state: State) -> bool:
    """Tell if any layer may be left alone."""
    return bool(state.refused) or not state.refusals_are_known


def release_refused(state: State) -> None:
    """Give the layers that are left alone the model's own beta, and remember the one that acted until now."""
    if has_refused(state):
        acted = state.left_alone & ~state.beta.isnan()
        state.lost.copy_(torch.where(acted, state.beta, state.lost))
        state.beta.masked_fill_(state.left_alone, torch.nan)


def forget_refused(state: State) -> None:
    """Forget what was measured of the layers that are left alone, and give them the model's own beta."""
    for sums in (state.table, state.recent, state.window):
        sums.masked_fill_(state.left_alone, 0)
    for sums in (state.moments, state.recent_moments):
        sums.masked_fill_(state.by_component(state.left_alone), 0)
    for layer in state.refused:
        state.gains.drop(layer)
    release_refused(state)
