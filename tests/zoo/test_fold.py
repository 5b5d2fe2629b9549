"""Folding, over the zoo: the plain model gives the outputs of the hooked one, or nothing was changed."""

import copy
import math

import pytest
import torch

import betahook
from support.training import move
from zoo.build import MODEL_TYPES, build, inputs
from zoo.foldable import FOLDABLE, ONE_NORM_FOR_ALL_HEADS, REFUSED, run

pytestmark = pytest.mark.oldest_skips("the zoo reads configs that are dataclasses")


def difference(one, other):
    """The largest one, relative to the largest output where that is above 1."""
    worst = (float((a.double() - b.double()).nan_to_num().abs().max()) for a, b in zip(one, other, strict=True))
    return max(worst) / max(1.0, *(float(a.nan_to_num().abs().max()) for a in one))


@pytest.mark.parametrize("per_head", [False, True])
@pytest.mark.parametrize("model_type", FOLDABLE.split())
def test_the_plain_model_keeps_the_outputs(model_type, per_head):
    model = build(model_type)
    batch = inputs(model_type, model)
    with betahook.attach(model, controller="monitor") as hook:
        before = run(model, batch)
        move(hook, per_head)
        adapted = run(model, batch)
        assert difference(adapted, before) > 1e-3
        if per_head and model_type in ONE_NORM_FOR_ALL_HEADS.split():
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


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_no_type_is_folded_wrongly(model_type):
    try:
        model = build(model_type)
        batch = inputs(model_type, model)
        run(model, batch)
        hook = betahook.attach(model, controller="monitor")
    except Exception as error:  # whatever keeps the type from being built, run or hooked
        pytest.skip(f"{type(error).__name__}: {error}")
    with hook:
        run(model, batch)
        used = [layer for layer in hook.layers.values() if not math.isnan(layer.beta_default)]
        for index, layer in enumerate(used):
            layer.head_beta = (1.3 + 0.1 * (index % 5)) * layer.head_beta
        adapted = run(model, batch)
        try:
            betahook.fold(model)
        except betahook.FoldError:
            assert hook.attached
        assert difference(adapted, run(model, batch)) < 1e-5
