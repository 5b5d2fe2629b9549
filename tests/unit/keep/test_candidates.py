"""Where the query may take a factor: the rows of q, wherever they lie in the weights."""

import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import nn

import betahook
from betahook.keep.candidates import overlap
from support.models import build, inputs
from support.training import move

SIZES = {"num_attention_heads": 8, "num_hidden_layers": 1, "hidden_size": 64, "vocab_size": 64}


APART = {
    "codegen": (transformers.CodeGenForCausalLM, transformers.CodeGenConfig(**SIZES, rotary_dim=4, n_positions=64)),
    "falcon": (
        transformers.FalconForCausalLM,
        transformers.FalconConfig(**SIZES, new_decoder_architecture=True, num_kv_heads=2),
    ),
}
"""Fused projections in which the rows of q lie in several runs, each of several heads."""


@pytest.mark.parametrize("per_head", [False, True])
@pytest.mark.parametrize("family", APART)
def test_the_rows_of_q_may_lie_apart(family, per_head):
    torch.manual_seed(0)
    kind, config = APART[family]
    model, ids = kind(config).eval(), torch.arange(3, 15)[None]
    for parameter in model.parameters():
        parameter.data *= 3
    with betahook.attach(model, controller="monitor") as hook:
        before = model(ids).logits
        move(hook, per_head)
        adapted = model(ids).logits
        assert (adapted - before).abs().max() > 1e-3
        betahook.fold(model)
    torch.testing.assert_close(model(ids).logits, adapted, rtol=1e-5, atol=1e-5)


class BiasApart(nn.Module):
    """As in BEiT."""

    def __init__(self, shape, use=1.0):
        super().__init__()
        self.num_heads, self.use = 4, use
        self.qkv, self.proj = nn.Linear(32, 96, bias=False), nn.Linear(32, 32)
        self.q_bias, self.v_bias = nn.Parameter(torch.randn(shape)), nn.Parameter(torch.randn(32))

    def forward(self, x):
        bias = torch.cat([self.use * self.q_bias.flatten(), torch.zeros_like(self.v_bias), self.v_bias])
        q, k, v = F.linear(x, self.qkv.weight, bias).unflatten(-1, (3, 4, 8)).permute(2, 0, 3, 1, 4)
        return self.proj(
            F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2) + (1 - self.use) * self.q_bias
        )


@pytest.mark.parametrize(("shape", "use"), [((32,), 1.0), ((1, 1, 32), 1.0), ((32,), 0.0)])
@pytest.mark.parametrize("per_head", [False, True])
@torch.no_grad()
def test_a_bias_of_the_query_may_be_a_parameter_of_its_own(shape, use, per_head):
    """And may have the name without being one."""
    torch.manual_seed(0)
    model, x = nn.Sequential(BiasApart(shape, use)), torch.randn(2, 9, 32)
    with betahook.attach(model, controller="monitor", when="always") as hook:
        before = model(x)
        move(hook, per_head)
        adapted = model(x)
        bias = model[0].q_bias.clone()
        betahook.fold(model)
    assert (adapted - before).abs().max() > 1e-3
    torch.testing.assert_close(model(x), adapted, rtol=1e-5, atol=1e-5)
    assert torch.equal(model[0].q_bias, bias) == (use == 0)


class AddsOne(nn.LayerNorm):
    """Learns what its factor differs by from 1; its bias is added as it is."""

    def forward(self, x):
        return nn.functional.layer_norm(x, self.normalized_shape, 1 + self.weight, self.bias, self.eps)


def test_the_bias_of_a_norm_that_adds_1_takes_the_factor_as_it_is():
    model, batch = build("persimmon"), inputs("persimmon")
    for layer in model.model.layers:
        layer.self_attn.q_layernorm = norm = AddsOne(layer.self_attn.q_layernorm.normalized_shape)
        nn.init.uniform_(norm.weight, -0.5, 0.5)
        nn.init.uniform_(norm.bias, -0.5, 0.5)
    model.eval()
    with betahook.attach(model, controller="monitor") as hook:
        before = model(**batch).logits
        move(hook, per_head=False)
        adapted = model(**batch).logits
        assert (adapted - before).abs().max() > 1e-3
        betahook.fold(model)
    torch.testing.assert_close(model(**batch).logits, adapted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("other", "expected"),
    [
        (lambda flat: flat[8:], False),
        (lambda flat: flat[7:], True),
        (lambda flat: flat.view(4, 4).mT[:, 3], False),
        (lambda flat: flat.view(4, 4)[:, 3], True),
        (lambda flat: flat.view(torch.uint8)[32:], False),
        (lambda flat: flat.view(torch.uint8)[31:], True),
        (lambda flat: flat[8:8], False),
    ],
)
def test_memory_overlaps_or_only_lies_near(other, expected):
    flat = torch.arange(16.0)
    query = flat[:8].view(2, 4)
    assert overlap(query, other(flat)) is overlap(other(flat), query) is expected
