"""Steps that wait to be added to the window: as if each had been added at once."""

import math

import pytest
import torch

import betahook
from betahook.state import pending
from support.models import build
from support.training import LAYER, train

STEPS, HEADS = 12, 40


def drawn(broken=0.1):
    """Steps of which some heads are not finite: in their sensitivity alone, or in all sums from then on.

    The gain changes after the third step, the loss scale after the fifth; in the last two, the gradient has no gain.
    """
    generator = torch.Generator().manual_seed(0)
    gradients = torch.randn(STEPS, HEADS, generator=generator)
    gains = [*torch.rand(2, HEADS, generator=generator), None]
    sums = torch.randn(STEPS, HEADS, generator=generator, dtype=torch.float64)
    spoilt = torch.rand(2, STEPS, HEADS, generator=generator) < broken / 2
    gradients = gradients.masked_fill(spoilt[0], math.inf)
    sums = sums.masked_fill(spoilt[1].cumsum(0) > 0, math.nan)
    of_layers = [step[:, None, None].split([8, 32]) for step in gradients]
    gain = [gains[(step >= 3) + (step >= STEPS - 2)] for step in range(STEPS)]
    scales = [3.0 if step < 5 else 1.0 for step in range(STEPS)]
    parts = zip(range(7, 7 + STEPS), [slice(0, HEADS)] * STEPS, of_layers, gain, scales, sums, strict=True)
    return [pending.Step(*each) for each in parts]


def added(steps, runs):
    """The window, and the first steps that were not finite, after runs of so many steps were added."""
    sums, since = torch.zeros(2, HEADS, dtype=torch.float64), torch.zeros(HEADS, dtype=torch.int64)
    since[0] = 3
    for run in runs:
        pending.add_steps(sums, since, steps[:run])
        steps = steps[run:]
    return sums, since


def test_steps_are_added_as_if_one_after_the_other():
    steps = drawn()
    sums, since = added(steps, [STEPS])
    for head in range(HEADS):
        total, number, first = 0.0, 0, 3 if head == 0 else 0
        for step in steps:
            gradient = torch.cat(step.gradients).flatten()
            value = (gradient if step.gain is None else gradient * step.gain)[head].item() / step.loss_scale
            if math.isfinite(value + step.sums[head].item()):
                total, number = total + value, number + 1
            else:
                first = first or step.number
        assert sums[:, head].tolist() == [total, number]
        assert since[head] == first
    assert 0 < (since > 0).sum() < HEADS


@pytest.mark.parametrize("runs", [[1] * STEPS, [5, 7], [1, 10, 1]])
def test_the_bits_do_not_depend_on_how_many_wait(runs):
    for one, other in zip(added(drawn(), runs), added(drawn(), [STEPS]), strict=True):
        assert torch.equal(one, other)


def test_no_more_wait_than_the_most():
    model = build("llama")
    with betahook.attach(model, controller="monitor", interval=1000) as hook:
        hook.layers[LAYER].beta = 0.5  # else a layer is watched in its turn alone
        train(model, hook, 1)
        numbers = []
        for _ in range(pending.MOST + 1):
            train(model, hook, 1)
            numbers.append(len(hook._state.pending))
    assert numbers == [*range(1, pending.MOST), 0, 1]


def test_a_loaded_state_forgets_them():
    model = build("llama")
    with betahook.attach(model, controller="monitor") as hook:
        hook.layers[LAYER].beta = 0.5
        train(model, hook, 3)
        saved = hook.state_dict()
        assert set(saved["window"][1].tolist()) == {2}  # the first one was pooled
        train(model, hook, 2)
        hook.load_state_dict(saved)
        assert torch.equal(hook.state_dict()["window"], saved["window"])
