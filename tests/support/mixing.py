"""A model with one attention, written by hand in any way, and checks of it against its scores in float64."""

import pytest
import torch
from torch import nn

import betahook
from support.attention import HEADS, WIDTH, Block

ROOT = (WIDTH // HEADS) ** -0.5


def make(mix):
    """A model with one attention, whose values are `mix(attention, q, k, v)`."""
    torch.manual_seed(1)

    class HandAttention(Block):
        def __init__(self):
            super().__init__()
            self.further_q, self.further_k = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
            self.mixer, self.conv = nn.Linear(HEADS, HEADS), nn.Conv2d(HEADS, HEADS, 1)
            self.table = nn.Parameter(torch.randn(HEADS, HEADS))
            self.temperature = nn.Parameter(torch.tensor(0.5))
            self.temperatures = nn.Parameter(torch.linspace(-1, 1, HEADS).view(-1, 1, 1))

        def mix(self, q, k, v):
            return mix(self, q, k, v)

        def by_which_it_is_known_as_attention(self, q, k, v):
            return (q @ k.mT).softmax(-1) @ v

    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), HandAttention())
    for parameter in model.parameters():
        parameter.data *= 2
    return model


def raw_scores(model, x):
    """`[batch, heads, queries, keys]`."""
    hidden, attention = model[0](x), model[1]
    q, k = (attention.split(layer(hidden)) for layer in (attention.q_proj, attention.k_proj))
    return (q.double() @ k.double().mT).detach()


def check_doubled(model, x):
    """Twice beta is twice the query."""
    expected = model(x)
    with betahook.attach(model, controller="monitor") as hook:
        assert torch.equal(model(x), expected)
        layer = hook.layers["1"]
        assert layer.refusal is None
        layer.beta = 2 * layer.beta_default
        doubled = model(x)
    for parameter in model[1].q_proj.parameters():
        parameter.data *= 2
    torch.testing.assert_close(doubled, model(x), rtol=1e-4, atol=1e-4)


def check_measured(model, x, times=1):
    """Scores of q and k, so many times."""
    with betahook.attach(model, controller="monitor", interval=1) as hook:
        model(x).sum().backward()
        found = hook.layers["1"].statistics
        scores = raw_scores(model, x)
    assert found.count == times * scores.numel()
    assert found.std == pytest.approx(scores.var((0, 2, 3), correction=0).mean().sqrt().item(), rel=1e-5)
