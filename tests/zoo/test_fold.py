"""Folding a beta for each head, over the zoo; `zoo.verify` folds one for each layer, into all types."""

import copy

import pytest
import torch

import betahook
from support.training import move
from zoo.build import build, inputs
from zoo.catalogue import REPRESENTATIVE
from zoo.foldable import FOLDABLE, ONE_NORM_FOR_ALL_HEADS, REFUSED, run

pytestmark = pytest.mark.oldest_skips("the zoo reads configs that are dataclasses")

TYPES = [
    pytest.param(model_type, marks=() if model_type in {*REPRESENTATIVE, "qwen3"} else pytest.mark.families)
    for model_type in FOLDABLE.split()
]


def difference(one, other):
    """The largest one, relative to the largest output where that is above 1."""
    worst = (float((a.double() - b.double()).nan_to_num().abs().max()) for a, b in zip(one, other, strict=True))
    return max(worst) / max(1.0, *(float(a.nan_to_num().abs().max()) for a in one))


@pytest.mark.parametrize("model_type", TYPES)
def test_the_plain_model_keeps_the_outputs_of_a_beta_for_each_head(model_type):
    model = build(model_type)
    batch = inputs(model_type, model)
    with betahook.attach(model, controller="monitor") as hook:
        before = run(model, batch)
        move(hook, per_head=True)
        adapted = run(model, batch)
        assert difference(adapted, before) > 1e-3
        if model_type in ONE_NORM_FOR_ALL_HEADS.split():
            with pytest.raises(betahook.FoldError, match="its query norm is shared by all heads, whose betas differ"):
                betahook.fold(model)
        else:
            betahook.fold(model)
            assert not hook.attached
        assert difference(adapted, run(model, batch)) < 1e-5


@pytest.mark.parametrize("model_type", REFUSED)
def test_a_refusal_changes_nothing(model_type):
    model = build(model_type)
    batch = inputs(model_type, model)
    with betahook.attach(model, controller="monitor") as hook:
        run(model, batch)
        move(hook, per_head=False)
        weights = copy.deepcopy(model.state_dict())
        with pytest.raises(betahook.FoldError, match=REFUSED[model_type]):
            betahook.fold(model)
        assert all(torch.equal(value, weights[name]) for name, value in model.state_dict().items())
        assert hook.attached
