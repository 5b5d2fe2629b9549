"""The audit of layers whose components are known."""

import pytest
import torch

import betahook
from support.attention import HEADS, WIDTH, FusedAttention


def audited(mix=None, query_bias=None, key_bias=None):
    """The audit of one layer: independent normal components, those of q mixed by `mix` in each head; and its heads."""
    model = torch.nn.Sequential(FusedAttention())
    block, eye = model[0], torch.eye(WIDTH)
    half = WIDTH // 2
    with torch.no_grad():
        query = eye if mix is None else torch.block_diag(*[mix] * HEADS)
        block.q_proj.weight.copy_(query)
        block.k_proj.weight.copy_(eye.roll(half, 0))  # other components of the token: independent of those of q
        for projection, bias in ((block.q_proj, query_bias), (block.k_proj, key_bias)):
            projection.bias.zero_() if bias is None else projection.bias.copy_(bias)
    tokens = torch.randn(8, 512, WIDTH, generator=torch.Generator().manual_seed(0))
    with betahook.attach(model, controller="monitor") as hook:
        model(tokens)
        return hook.audit()[0], hook.layers["0"].head_statistics


def test_independent_heads_with_different_means_have_no_covariance():
    bias = torch.tensor([-6.0, -1.0, 2.0, 5.0]).repeat_interleave(WIDTH // HEADS)
    layer, heads = audited(query_bias=bias, key_bias=torch.full((WIDTH,), 2.0))
    assert heads.mean.std() > 3 * heads.std.mean()  # about one mean, the layer would have ten times the variance
    assert layer.covariance == pytest.approx(1.0, abs=0.05)
    assert layer.score_std == pytest.approx(heads.std.square().mean().sqrt().item(), rel=1e-6)
    assert layer.follows == "independent"


def test_covariance_between_q_and_k_shows():
    model = torch.nn.Sequential(FusedAttention())
    with torch.no_grad():
        for projection in (model[0].q_proj, model[0].k_proj):
            # All components of a head are one and the same number, of q and of k.
            projection.weight.copy_(torch.eye(HEADS, WIDTH).repeat_interleave(WIDTH // HEADS, 0))
            projection.bias.zero_()
    with betahook.attach(model, controller="monitor") as hook:
        model(torch.randn(8, 512, WIDTH, generator=torch.Generator().manual_seed(0)))
        assert hook.audit()[0].covariance == pytest.approx(WIDTH / HEADS, rel=0.1)
