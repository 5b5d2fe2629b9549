"""Several `Clip`s at once: the lowest threshold holds, each head counts once a step, and `log_only` scales nothing."""

import pytest

import betahook
from support.models import build, inputs
from support.training import LAYER


def clipped(*rules):
    """The largest logits of the heads before a step with these rules and after it, and how many heads it counted."""
    model, batch = build("llama").eval(), inputs("llama")
    with betahook.attach(model, controller=rules, when="always", layers=LAYER) as hook:
        (layer,) = hook.layers.values()
        logits = []
        for _ in range(2):
            model(**batch)
            logits.append((layer.head_statistics.max_score * layer.head_beta).tolist())
            clips = hook.metrics().get(f"clips/{LAYER}", 0)
            hook.step()
    return *logits, clips


@pytest.mark.parametrize("thresholds", [(1e-2, 1e6), (1e6, 1e-2)])
def test_the_lowest_threshold_holds(thresholds):
    before, after, clips = clipped(*map(betahook.Clip, thresholds))
    assert after == pytest.approx([1e-2] * len(before), rel=1e-3)
    assert clips == len(before)


@pytest.mark.parametrize("order", [1, -1])
def test_one_that_only_logs_counts_beside_one_that_scales(order):
    before, after, clips = clipped(*[betahook.Clip(1e-2, log_only=True), betahook.Clip(1e6)][::order])
    assert after == before
    assert clips == len(before)


def test_a_step_in_which_several_find_a_head_too_large_counts_once():
    before, _, clips = clipped(*(betahook.Clip(threshold, log_only=True) for threshold in (1e-3, 1e-2)))
    assert clips == len(before)
