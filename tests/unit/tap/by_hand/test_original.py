"""Modules whose class, or whose class's forward, is another one while they are hooked; and modules that are let go."""

import gc
import weakref

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import betahook
from betahook.tap.by_hand.original import Original
from support.attention import HEADS, LENGTH, WIDTH, Block, ByHandAttention, FusedAttention, components, make

BATCH = torch.randn(HEADS, LENGTH, WIDTH, generator=torch.Generator().manual_seed(0))
"""As many sequences as heads: which axis is that of the heads shows in a first forward only."""


def by_hand(self, x):
    """Another attention, on a scale of 0.1."""
    q, k, v = (self.split(projection(x)) for projection in (self.q_proj, self.k_proj, self.v_proj))
    return 2 * (torch.einsum("bhid,bhjd->bhij", q * 0.1, k).softmax(-1) @ v).transpose(1, 2).flatten(2)


def fused(self, x):
    """The same by torch's function."""
    q, k, v = (self.split(projection(x)) for projection in (self.q_proj, self.k_proj, self.v_proj))
    return 2 * F.scaled_dot_product_attention(q, k, v, scale=0.1).transpose(1, 2).flatten(2)


def change_class(module, forward):
    module.__class__ = type("Changed", (Block,), {"forward": forward})


def change_method(module, forward):
    type(module).forward = forward


def change_code(module, forward):
    """As the autoreload of IPython does."""
    type(module).forward.__code__ = forward.__code__


def fresh(kind):
    """A model with an attention of a class of its own."""

    class Attention(kind):
        def forward(self, x):
            q, k, v = (self.split(each(x)) for each in (self.q_proj, self.k_proj, self.v_proj))
            return self.mix(q, k, v).transpose(1, 2).flatten(2)

    return make(Attention)


@pytest.mark.parametrize("change", [change_class, change_method, change_code])
@pytest.mark.parametrize(("kind", "forward"), [(ByHandAttention, by_hand), (FusedAttention, fused)])
@pytest.mark.parametrize("beta", [None, 0.7])
def test_the_forward_of_another_class_runs_with_beta(kind, forward, change, beta):
    model = fresh(kind)
    with betahook.attach(model, controller="monitor", interval=1) as hook:
        layer = hook.layers["1"]
        model(BATCH).sum().backward()
        hook.step()
        if beta is not None:
            layer.beta = beta
        change(model[1], forward)
        output = model(BATCH)
        assert layer.beta == pytest.approx(beta or 0.1)
        assert layer.beta_default == pytest.approx(0.1)
        scores = layer.statistics.std.item()
    if beta is None:
        assert torch.equal(output, model(BATCH))
    q, k = components(model, BATCH)
    assert scores == pytest.approx((q @ k.mT).transpose(0, 1).flatten(1).std(1).square().mean().sqrt().item(), rel=1e-3)
    with torch.no_grad():
        hidden = model.double()[0](BATCH.double())
        expected = 2 * ((beta or 0.1) * (q @ k.mT)).softmax(-1) @ model[1].split(model[1].v_proj(hidden))
    torch.testing.assert_close(output.double(), expected.transpose(1, 2).flatten(2), rtol=1e-4, atol=1e-4)


def test_a_forward_is_another_one_once():
    module = ByHandAttention()
    original = Original(module)
    assert original.current() == (module.forward, False)
    module.__class__ = type("Other", (ByHandAttention,), {"forward": lambda self, x: x})
    assert [original.current() for _ in range(2)] == [(module.forward, True), (module.forward, False)]


def test_a_forward_of_the_module_itself_hides_that_of_its_class():
    model = fresh(ByHandAttention)
    model[1].forward = model[1].forward
    with betahook.attach(model, controller="monitor"):
        expected = model(BATCH)
        change_method(model[1], by_hand)
        assert torch.equal(model(BATCH), expected)


@pytest.mark.parametrize("kind", [ByHandAttention, FusedAttention, nn.MultiheadAttention])
def test_what_was_detached_is_freed_at_once(kind):
    model = nn.TransformerEncoderLayer(WIDTH, HEADS) if kind is nn.MultiheadAttention else make(kind)
    gc.disable()
    try:
        hook = betahook.attach(model, controller="monitor")
        model(BATCH).sum().backward()
        hook.step()
        hook.detach()
        known = weakref.ref(hook), weakref.ref(model)
        del model, hook
        assert [each() for each in known] == [None, None]
    finally:
        gc.enable()


class Apart(nn.Module):
    """An attention that its processor computes, as in diffusers."""

    def __init__(self):
        super().__init__()
        self.num_heads, self.head_dim, self.processor = HEADS, WIDTH // HEADS, ByProducts()
        self.to_q, self.to_k, self.to_v = (nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x):
        return self.processor(self, x)

    def fuse(self):
        """Leave the parts where they are, as diffusers does."""
        self.to_qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.to_qkv.weight.data[: 2 * WIDTH] *= 4
        self.processor = Fused()


class ByProducts:
    def __call__(self, attention, x):
        q, k, v = self.project(attention, x)
        q, k, v = (part.unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in (q, k, v))
        return ((q @ k.mT / 3).softmax(-1) @ v).transpose(1, 2).flatten(2)

    def project(self, attention, x):
        return attention.to_q(x), attention.to_k(x), attention.to_v(x)


class ByEinsum(ByProducts):
    def __call__(self, attention, x):
        q, k, v = (part.unflatten(-1, (HEADS, -1)) for part in self.project(attention, x))
        weights = (torch.einsum("bihd,bjhd->bhij", q, k) / 3).softmax(-1)
        return torch.einsum("bhij,bjhd->bihd", weights, v).flatten(2)


class Fused(ByProducts):
    def project(self, attention, x):
        return attention.to_qkv(x).chunk(3, -1)


def test_beta_acts_where_another_processor_computes():
    model = make(Apart)
    with betahook.attach(model, controller="monitor") as hook:
        layer = hook.layers["1"]
        model(BATCH)
        layer.beta = 0.7
        expected = model(BATCH)
        model[1].processor = ByEinsum()
        torch.testing.assert_close(model(BATCH), expected, rtol=1e-5, atol=1e-5)
        assert layer.refusal is None


class InSlices(ByProducts):
    """One head after the other, which is not followed."""

    def __call__(self, attention, x):
        q, k, v = (part.chunk(HEADS, -1) for part in self.project(attention, x))
        heads = [(each @ k[head].mT / 3).softmax(-1) @ v[head] for head, each in enumerate(q)]
        return torch.cat(heads, -1)


def test_beta_acts_again_after_a_processor_that_is_not_followed(caplog):
    model = make(Apart)
    plain = model(BATCH)
    with betahook.attach(model, controller="monitor") as hook:
        layer = hook.layers["1"]
        model(BATCH)
        layer.beta = 1.0
        expected, state = model(BATCH), hook.state_dict()
        model[1].processor = InSlices()
        torch.testing.assert_close(model.eval()(BATCH), plain)
        assert "Its beta, 3 times the model's own, no longer acts" in caplog.text
        assert torch.equal(hook.state_dict()["beta"], state["beta"])
        assert hook.layers.are_adapted
        with pytest.raises(betahook.FoldError, match=r"its beta, 3 times the model's own, no longer acts\. Give"):
            betahook.fold(model)
        model[1].processor = ByProducts()
        assert torch.equal(model.train()(BATCH), expected)
        assert layer.refusal is None
        assert layer.statistics.count > 0
        betahook.fold(model)
    torch.testing.assert_close(model(BATCH), expected, rtol=1e-4, atol=1e-4)


def test_a_layer_that_was_never_followed_is_followed_with_another_processor():
    model = make(Apart)
    model[1].processor = InSlices()
    with betahook.attach(model, controller="monitor") as hook:
        layer = hook.layers["1"]
        model(BATCH)
        assert layer.refusal is not None
        model[1].processor = ByProducts()
        model(BATCH)
        assert layer.refusal is None
        assert layer.beta == layer.beta_default == pytest.approx(1 / 3)
        betahook.fold(model)


def test_projections_that_take_the_place_of_others_are_found():
    model = make(Apart)
    with betahook.attach(model, controller="monitor", interval=1) as hook:
        layer = hook.layers["1"]
        model(BATCH).sum().backward()
        hook.step()
        model[1].fuse()
        model(BATCH).sum().backward()
        hook.step()
        rows = model[1].to_qkv.weight[:WIDTH]
        assert layer.weight_std_q == pytest.approx(rows.std(correction=0).item(), rel=1e-5)
        layer.beta = 0.7
        expected = model(BATCH)
        betahook.fold(model)
    torch.testing.assert_close(model(BATCH), expected, rtol=1e-4, atol=1e-4)
