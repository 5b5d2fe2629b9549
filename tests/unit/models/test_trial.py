"""Ten attentions that do not say how many heads they have; attach finds out, and what is measured is right."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

import betahook
from support.training import fingerprint

HEADS, HEAD_DIM, WIDTH, BATCH, LENGTH = 4, 6, 24, 2, 9
CAUSAL = torch.ones(LENGTH, LENGTH).triu(1).bool()


def attend(q, k, v):
    return (q @ k.mT / math.sqrt(q.shape[-1])).softmax(-1) @ v


def eager(module, query, key, value, mask, scaling, **kwargs):
    return attend(query, key, value).transpose(1, 2), None


def split(x, heads=HEADS):
    return x.unflatten(-1, (heads, -1)).transpose(1, 2)


class Fused(nn.Module):
    """One projection of q, k and v under a name that says nothing, and the number of heads in the code alone."""

    def __init__(self):
        super().__init__()
        self.projection = nn.Linear(WIDTH, 3 * WIDTH)

    def forward(self, x):
        q, k, v = (split(part) for part in self.projection(x).chunk(3, -1))
        return self.mix(q, k, v).transpose(1, 2).flatten(2)


class InterfaceAttention(Fused):
    def __init__(self):
        super().__init__()
        self.config = PretrainedConfig(attn_implementation="sdpa")

    def mix(self, q, k, v):
        function = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, eager)
        return function(self, q, k, v, None, scaling=HEAD_DIM**-0.5, is_causal=False)[0].transpose(1, 2)


class SdpaAttention(Fused):
    def mix(self, q, k, v):
        return F.scaled_dot_product_attention(q, k, v)


class CausalByHandAttention(Fused):
    def mix(self, q, k, v):
        scores = (q @ k.mT / math.sqrt(HEAD_DIM)).masked_fill(CAUSAL[: q.shape[-2], : q.shape[-2]], -math.inf)
        return scores.softmax(-1) @ v


class Einsum(Fused):
    def mix(self, q, k, v):
        scores = torch.einsum("bhqd,bhkd->bhqk", q, k) / math.sqrt(HEAD_DIM)
        return torch.einsum("bhqk,bhkd->bhqd", scores.softmax(-1), v)


class Mixer(Fused):
    def mix(self, q, k, v):
        return (q @ k.mT / math.sqrt(HEAD_DIM)).softmax(-1) @ v


class CallsAFunction(Fused):
    def mix(self, q, k, v):
        return attend(q, k, v)


class Attend(nn.Module):
    """As in x-transformers: the softmax in a part without parameters."""

    def forward(self, q, k, v):
        return (q @ k.mT / math.sqrt(HEAD_DIM)).softmax(-1) @ v


class OwnsAttend(Fused):
    def __init__(self):
        super().__init__()
        self.mix = Attend()


class OneHead(Fused):
    def forward(self, x):
        q, k, v = self.projection(x).chunk(3, -1)
        return attend(q, k, v)


class MultiQuery(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, HEAD_DIM), nn.Linear(WIDTH, HEAD_DIM)

    def forward(self, x):
        return attend(split(self.a(x)), split(self.b(x), 1), split(self.c(x), 1)).transpose(1, 2).flatten(2)


class Block(nn.Module):
    """A block that holds no attention module: norms, attention and feed-forward in one forward."""

    def __init__(self):
        super().__init__()
        self.norm, self.projection = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH)
        self.feed_forward = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.Dropout(0.5))

    def forward(self, x, attention_mask):
        q, k, v = (split(part) for part in self.projection(self.norm(x)).chunk(3, -1))
        x = x + F.scaled_dot_product_attention(q, k, v, attention_mask).transpose(1, 2).flatten(2)
        return x + self.feed_forward(x)


CLASSES = [
    InterfaceAttention,
    SdpaAttention,
    CausalByHandAttention,
    Einsum,
    Mixer,
    CallsAFunction,
    OwnsAttend,
    OneHead,
    MultiQuery,
    Block,
]


class Model(PreTrainedModel):
    config_class = PretrainedConfig
    _supports_sdpa = True

    def __init__(self, kind):
        super().__init__(PretrainedConfig(hidden_size=WIDTH))
        self.layer, self.readout = kind(), nn.Linear(WIDTH, 1)

    def forward(self, x):
        extra = [None] if isinstance(self.layer, Block) else []
        return self.readout(self.layer(x, *extra))


@torch.no_grad()
def scores_of(layer, x):
    """q k^T of every pair, `[batch, heads, queries, keys]`."""
    x = layer.norm(x) if isinstance(layer, Block) else x
    if isinstance(layer, MultiQuery):
        q, k = (F.linear(x, part.weight, part.bias) for part in (layer.a, layer.b))
        return split(q) @ split(k, 1).mT
    q, k, _ = F.linear(x, layer.projection.weight, layer.projection.bias).chunk(3, -1)
    heads = 1 if isinstance(layer, OneHead) else HEADS
    return split(q, heads) @ split(k, heads).mT


@pytest.mark.parametrize("kind", CLASSES)
def test_attention_that_does_not_state_its_heads_is_attached_and_right(kind):
    torch.manual_seed(0)
    model, x = Model(kind).double(), torch.randn(BATCH, LENGTH, WIDTH, dtype=torch.float64)
    layer = model.layer
    before, random, plain = fingerprint(model), torch.get_rng_state(), model.eval()(x)
    heads = 1 if kind is OneHead else HEADS
    with betahook.attach(model, controller="monitor", when="always") as hook:
        assert torch.equal(torch.get_rng_state(), random)
        (found,) = hook.layers.values()
        assert (found.heads, found.head_dim) == (heads, WIDTH // heads)
        assert torch.equal(model(x), plain)
        scores = scores_of(layer, x)
        if kind is CausalByHandAttention:
            scores = scores[..., ~CAUSAL]
        expected = scores.movedim(1, 0).flatten(1)
        assert found.head_statistics.std == pytest.approx(expected.std(-1, correction=0).tolist(), rel=1e-4)
        assert found.head_statistics.mean == pytest.approx(expected.mean(-1).tolist(), rel=1e-4, abs=1e-4)
        hook.step()

        def loss():
            return model(x).square().mean()

        loss().backward()
        sensitivity, step, own = found.statistics.sensitivity, 1e-3, found.beta_default

        def loss_at(factor):
            found.beta = factor * own
            return loss().item()

        with torch.no_grad():
            difference = (loss_at(math.exp(step)) - loss_at(math.exp(-step))) / (2 * step)
        assert sensitivity == pytest.approx(difference, rel=1e-4)
    model.zero_grad()
    assert fingerprint(model) == before


class Router(nn.Module):
    """A softmax and two products, but no attention."""

    def __init__(self):
        super().__init__()
        self.gate, self.experts = nn.Parameter(torch.randn(WIDTH, 3)), nn.Parameter(torch.randn(3, WIDTH))

    def forward(self, x):
        return (x @ self.gate).softmax(-1) @ self.experts


class Window(Mixer):
    """A forward whose arguments no trial can guess."""

    def forward(self, x, grid):
        return super().forward(x * grid.width)


class NeedsAttention(Window):
    """The same, by its name an attention."""


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (Router, "it has no module that computes softmax attention"),
        (
            Window,
            "layer, Window: it takes a softmax and multiplies; if that is an attention, set its attributes num",
        ),
        (NeedsAttention, "says neither how many heads it has nor how wide they are: set its attributes num_heads and"),
    ],
)
def test_what_is_no_attention_or_cannot_be_tried_is_refused_with_the_attributes_that_help(kind, message):
    model = Model(kind)
    with pytest.raises(betahook.UnsupportedModelError, match=message):
        betahook.attach(model)
    if kind is not Router:
        model.layer.num_heads, model.layer.head_dim = HEADS, HEAD_DIM
        with betahook.attach(model) as hook:
            assert hook.layers["layer"].heads == HEADS


def test_a_trial_leaves_nothing_behind():
    class Keeps(Mixer):
        def __init__(self):
            super().__init__()
            self.seen = []
            self.register_buffer("calls", torch.zeros(()))

        def forward(self, x):
            self.seen.append(x)
            self.calls += 1
            return super().forward(x)

    model, called = Model(Keeps), []
    model.layer.projection.register_forward_hook(lambda *args: called.append(args))
    betahook.attach(model).detach()
    assert not model.layer.seen
    assert not called
    assert model.layer.calls == 0
