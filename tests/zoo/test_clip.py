"""Clipping, over the zoo: what can be folded can be clipped, and the rest is refused. `zoo.verify` tries all types."""

import pytest
import torch

import betahook
from zoo.build import build, inputs
from zoo.foldable import FOLDABLE, REFUSED, run

pytestmark = pytest.mark.oldest_skips("the zoo reads configs that are dataclasses")

RUNS_OFTEN = 3
"""A layer changes the logits of the next ones: all have come to rest once this many more steps than layers are done."""


def largest(hook):
    """The largest logit of each head, `[heads]` by layer, of layers that ran."""
    return {
        name: layer.head_statistics.max_score * layer.head_beta
        for name, layer in hook.layers.items()
        if bool((layer.head_statistics.count > 0).all()) and layer.refusal is None
    }


def clip(model, batch):
    """Clip at half of the largest logit until nothing moves; returns the threshold and the largest logits then."""
    with betahook.attach(model, controller="monitor", when="always") as hook:
        run(model, batch)
        threshold = float(torch.cat([*largest(hook).values()]).max()) / 2
    with betahook.attach(model, controller=betahook.Clip(threshold), when="always") as hook:
        for _ in range(len(hook.layers) + RUNS_OFTEN):
            run(model, batch)
            hook.step()
        run(model, batch)
        return threshold, largest(hook)


@pytest.mark.parametrize("model_type", FOLDABLE.split())
def test_no_logit_exceeds_the_threshold(model_type):
    model = build(model_type)
    threshold, after = clip(model, inputs(model_type, model))
    assert after
    assert all(float(logits.max()) <= threshold for logits in after.values())


@pytest.mark.parametrize("model_type", REFUSED)
def test_what_cannot_be_clipped_is_refused_and_unchanged(model_type):
    model = build(model_type)
    batch = inputs(model_type, model)
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(betahook.UnsupportedModelError, match="cannot clip"):
        clip(model, batch)
    assert all(torch.equal(value, weights[name]) for name, value in model.state_dict().items())
    betahook.detach(model)
