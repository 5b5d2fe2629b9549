"""Gradient checkpointing around attention by hand: each run of a forward keeps as much for the backward as the first.

Non-reentrant checkpointing raises an error where the recomputation saves more or fewer tensors.
"""

import math

import pytest
import torch
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

import betahook
from support.mixing import ROOT, make


def gradients(model, x, hook=None):
    """Gradients of four steps in a row, with sequences of two lengths: `(step, name)` to a tensor."""
    found = {}
    for step, length in enumerate((9, 9, 7, 9)):
        model.zero_grad()
        checkpoint(model, (x[:, :length] + step).requires_grad_(), use_reentrant=False).sin().sum().backward()
        found |= {(step, name): p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
        if hook is not None:
            hook.step()
    return found


MIXES = {
    "a learned scale": lambda module, q, k, v: (q @ k.mT * module.temperature).softmax(-1) @ v,
    "a learned scale of each head": lambda module, q, k, v: (q @ k.mT * module.temperatures.exp()).softmax(-1) @ v,
    "a scale of the length": lambda module, q, k, v: (q @ k.mT * (ROOT * math.log(q.shape[-2]))).softmax(-1) @ v,
    "left alone": lambda module, q, k, v: v @ (q.mT @ k * ROOT).softmax(-1).mT,  # of channels, not of tokens
    "left alone behind the product": lambda module, q, k, v: module.mixer((q @ k.mT).movedim(1, -1)).movedim(-1, 1) @ v,
}


@pytest.mark.parametrize("way", MIXES)
def test_a_recomputation_runs_the_same_operations(x, way):
    model = make(MIXES[way])
    with betahook.attach(model, controller="monitor", interval=1) as hook:
        found = gradients(model, x, hook)
        assert (hook.layers["1"].refusal is None) == (not way.startswith("left alone"))
    expected = gradients(model, x)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[key], expected[key]) for key in expected)


@pytest.mark.parametrize("way", ["a learned scale", "a learned scale of each head"])
def test_a_recomputation_has_the_same_beta(x, way):
    model, x = make(MIXES[way]).double(), x.double()
    with betahook.attach(model, controller="monitor") as hook:
        model(x)
        hook.layers["1"].head_beta = 2 * hook.layers["1"].head_beta_default
        found = gradients(model, x, hook)
    for parameter in model[1].q_proj.parameters():
        parameter.data *= 2
    for (step, name), gradient in gradients(model, x).items():
        by = 2 if name.startswith("1.q_proj") else 1
        torch.testing.assert_close(found[step, name], by * gradient, rtol=1e-5, atol=1e-8, msg=name)


@pytest.mark.parametrize("way", [parametrizations.weight_norm, parametrizations.spectral_norm])
def test_weights_that_are_made_of_others(x, way):
    model = make(MIXES["a learned scale"])
    way(model[1].q_proj)
    with betahook.attach(model, controller="monitor") as hook:
        gradients(model, x, hook)
        assert hook.steps == 4
