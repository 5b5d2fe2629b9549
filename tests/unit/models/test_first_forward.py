"""W_q, W_k and the heads of attention in which no trial runs, as its first forward or its attributes show them."""

import math
from unittest import mock

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import betahook
from betahook.models import heads
from betahook.tap.recorder import Recorder
from support.projections import (
    HEADS,
    WIDTH,
    D,
    InAList,
)


class AskingForOptions(nn.Module):
    """A forward that a made-up input does not get through, over a projection whose name stands for another layout."""

    num_attention_heads, head_dim = HEADS, D

    def __init__(self, fused):
        super().__init__()
        self.query_key_value, self.fused = nn.Linear(WIDTH, 3 * WIDTH), fused

    def forward(self, x, options):
        x = x * options["scale"]
        q, k, v = self.query_key_value(x).unflatten(-1, (HEADS, 3, D)).permute(3, 0, 2, 1, 4)
        out = F.scaled_dot_product_attention(q, k, v) if self.fused else (q @ k.mT * D**-0.5).softmax(-1) @ v
        return out.transpose(1, 2).flatten(2)

    def rows(self):
        every = torch.arange(3 * WIDTH).view(HEADS, 3, D)
        return every[:, 0], every[:, 1]


@pytest.mark.parametrize("fused", [False, True])
def test_the_first_forward_shows_the_rows_where_a_trial_does_not_run(fused):
    torch.manual_seed(0)
    module, x = AskingForOptions(fused).double(), torch.randn(2, 9, WIDTH, dtype=torch.float64)
    with torch.no_grad():
        module.query_key_value.weight[module.rows()[0].flatten()] *= 3  # else all rows are alike
    with betahook.attach(module, controller="monitor", per_head=True, when="always") as hook:
        module(x, {"scale": 1})
        (layer,) = hook.layers.values()
        expected = [module.query_key_value.weight[rows].std(correction=0).item() for rows in module.rows()]
        assert [layer.weight_std_q, layer.weight_std_k] == pytest.approx(expected, rel=1e-5)
        assert layer.remarks == []
        layer.head_beta = layer.head_beta * torch.tensor([0.5, 1.3, 2, 3])
        output = module(x, {"scale": 1})
        betahook.fold(module)
    torch.testing.assert_close(module(x, {"scale": 1}), output, rtol=1e-10, atol=1e-12)


def test_an_adapter_that_is_off_in_the_first_forward_stays_a_part_of_the_weight():
    peft = pytest.importorskip("peft")
    torch.manual_seed(0)
    module, x = AskingForOptions(False), torch.randn(2, 9, WIDTH)
    config = peft.LoraConfig(r=2, target_modules=["query_key_value"], init_lora_weights=False)
    peft.inject_adapter_in_model(config, module)
    linear = module.query_key_value
    with betahook.attach(module, controller="monitor", when="always") as hook:
        (layer,) = hook.layers.values()
        linear.enable_adapters(False)
        module(x, {"scale": 1})
        linear.enable_adapters(True)
        acting = linear.base_layer.weight + linear.get_delta_weight("default")
        expected = layer.projections[0].select(acting).std(correction=0).item()
        assert layer.weight_std_q == pytest.approx(expected, rel=1e-5)


def test_clip_scales_the_rows_that_the_first_forward_showed():
    torch.manual_seed(0)
    module, x = AskingForOptions(False), torch.randn(2, 9, WIDTH)
    with betahook.attach(module, betahook.Clip(0.5), when="always") as hook:
        (layer,) = hook.layers.values()
        module(x, {"scale": 1})
        hook.step()
        module(x, {"scale": 1})
        assert (layer.head_statistics.max_score * layer.head_beta).amax().item() == pytest.approx(0.5, rel=1e-4)


def test_a_first_forward_that_shows_another_weight_changes_nothing():
    class Renamed(AskingForOptions):
        def __init__(self):
            super().__init__(False)
            self.query_key_value, self.mixed = nn.Linear(WIDTH, 3 * WIDTH), self.query_key_value

        def forward(self, x, options):
            kept = self._modules["query_key_value"]
            self._modules["query_key_value"] = self.mixed
            try:
                return super().forward(x, options)
            finally:
                self._modules["query_key_value"] = kept

    module = Renamed()
    with betahook.attach(module, controller="monitor", when="always") as hook:
        (layer,) = hook.layers.values()
        before = layer.weight_std_q
        module(torch.randn(2, 9, WIDTH), {"scale": 1})
        assert layer.weight_std_q == before


class Unnamed(AskingForOptions):
    """Under a name that tells nothing."""

    def __init__(self, fused):
        super().__init__(fused)
        self.mixed = self.query_key_value
        del self.query_key_value

    def make(self, x):
        return self.mixed(x).unflatten(-1, (HEADS, 3, D)).permute(3, 0, 2, 1, 4)

    def attend(self, q, k, v):
        out = F.scaled_dot_product_attention(q, k, v) if self.fused else (q @ k.mT * D**-0.5).softmax(-1) @ v
        return out.transpose(1, 2).flatten(2)

    def forward(self, x, options):
        return self.attend(*self.make(x * options["scale"]))


@pytest.mark.parametrize("fused", [False, True])
def test_the_first_forward_shows_w_q_and_w_k_that_no_name_and_no_trial_showed(fused):
    torch.manual_seed(0)
    module, x = Unnamed(fused).double(), torch.randn(2, 9, WIDTH, dtype=torch.float64)
    with betahook.attach(module, controller="monitor", when="always") as hook:
        (layer,) = hook.layers.values()
        assert layer.projections is None
        module(x, {"scale": 1})
        expected = [module.mixed.weight[rows].std(correction=0).item() for rows in module.rows()]
        assert [layer.weight_std_q, layer.weight_std_k] == pytest.approx(expected, rel=1e-5)
        assert layer.remarks == [
            "the input of W_q and W_k is not measured, since no module receives it as an argument, or only the first "
            "forward showed W_q and W_k, and the score std that it predicts is not known"
        ]
        layer.beta = 2 * layer.beta_default
        output = module(x, {"scale": 1})
        betahook.fold(module)
    torch.testing.assert_close(module(x, {"scale": 1}), output, rtol=1e-10, atol=1e-12)


class Twice(Unnamed):
    """One attention after another, of queries of their own."""

    def __init__(self, fused):
        super().__init__(fused)
        self.further = nn.Linear(WIDTH, WIDTH)

    def forward(self, x, options):
        q, k, v = self.make(x * options["scale"])
        return self.attend(q, k, v) + self.attend(self.further(x).unflatten(-1, (HEADS, D)).transpose(1, 2), k, v)


class Added(Twice):
    """Scores that are the sum of two products."""

    def forward(self, x, options):
        q, k, v = self.make(x * options["scale"])
        further = self.further(x).unflatten(-1, (HEADS, D)).transpose(1, 2)
        weights = ((further @ k.mT + q @ k.mT) * D**-0.5).softmax(-1)
        return (weights @ v).transpose(1, 2).flatten(2)


class OfOwnLinears(Unnamed):
    def __init__(self, fused):
        super().__init__(fused)
        self.mixed = OwnLinear(WIDTH, 3 * WIDTH)


class OwnLinear(nn.Linear):
    def forward(self, x):
        return super().forward(x) * self.weight.abs().max()


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("kind", [Twice, Added, OfOwnLinears])
def test_what_the_first_forward_leaves_open_stays_unknown(kind, fused):
    module = kind(fused)
    with betahook.attach(module, controller="monitor", when="always") as hook:
        module(torch.randn(2, 9, WIDTH), {"scale": 1})
        (layer,) = hook.layers.values()
        assert layer.refusal is None
        assert int(layer.statistics.count) > 0
        assert layer.projections is None


class Compressed(Twice):
    """Keys of fewer tokens, as in Linformer."""

    def __init__(self, fused):
        super().__init__(fused)
        self.fewer = nn.Linear(9, 4)

    def forward(self, x, options):
        q, k, v = self.make(x * options["scale"])
        return self.attend(q, *(self.fewer(t.mT).mT for t in (k, v)))


class TwoKeys(Twice):
    """Scores over keys from two projections."""

    def forward(self, x, options):
        q, k, v = self.make(x * options["scale"])
        further = self.further(x).unflatten(-1, (HEADS, D)).transpose(1, 2)
        return self.attend(q, k, v) + self.attend(q, further, v)


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("kind", [Compressed, TwoKeys])
def test_beta_folds_into_w_q_where_w_k_is_not_known(kind, fused):
    torch.manual_seed(0)
    module, x = kind(fused).double(), torch.randn(2, 9, WIDTH, dtype=torch.float64)
    key = module.mixed.weight[module.rows()[1].flatten()].clone()
    with betahook.attach(module, controller="monitor", when="always", per_head=True) as hook:
        module(x, {"scale": 1})
        (layer,) = hook.layers.values()
        assert layer.projections is None
        layer.head_beta = layer.head_beta * torch.tensor([0.5, 1.3, 2, 3])
        output = module(x, {"scale": 1})
        betahook.fold(module)
    torch.testing.assert_close(module(x, {"scale": 1}), output, rtol=1e-10, atol=1e-12)
    assert torch.equal(module.mixed.weight[module.rows()[1].flatten()], key)


class SharedKeysFirst(Twice):
    """Keys that two heads share come first, then queries that are no projection."""

    def forward(self, x, options):
        *_, v = self.make(x * options["scale"])
        k = self.further(x)[..., : 2 * D].unflatten(-1, (2, D)).transpose(1, 2).repeat_interleave(HEADS // 2, 1)
        q = torch.stack([x[..., :D] * (1 + head) for head in range(HEADS)], 1)
        return self.attend(k, q, v)


@pytest.mark.parametrize("kind", [Twice, Added, OfOwnLinears, SharedKeysFirst])
def test_nor_does_beta_fold_into_a_w_q_that_is_not_known(kind):
    torch.manual_seed(0)
    module = kind(False)
    with betahook.attach(module, controller="monitor", when="always") as hook:
        module(torch.randn(2, 9, WIDTH), {"scale": 1})
        (layer,) = hook.layers.values()
        layer.beta = 2 * layer.beta
        with pytest.raises(betahook.FoldError, match="its query projection has no known form"):
            betahook.fold(module)


class TwoInputs(InAList):
    """A forward that no made-up input suits, with heads and a scale."""

    def __init__(self, scale):
        super().__init__()
        self.heads, self.scale = HEADS, scale

    def forward(self, pair):
        x, factor = pair
        return super().forward(factor * x)


@pytest.mark.parametrize("scale", [D**-0.5, 0.3, -1.0, 1.0])
def test_heads_and_a_scale_tell_the_width_of_a_head(scale):
    module = TwoInputs(scale)
    attention = type("OwnAttention", (TwoInputs,), {})(scale)
    assert heads.from_scale(module) == ((HEADS, D) if scale == D**-0.5 else None)
    if scale == D**-0.5:
        with betahook.attach(attention, controller="monitor", when="always") as hook:
            attention((torch.randn(2, 9, WIDTH), 2.0))
            (layer,) = hook.layers.values()
            assert (layer.heads, layer.head_dim, int(layer.statistics.count)) == (HEADS, D, 2 * HEADS * 81)
    else:
        with pytest.raises(
            betahook.UnsupportedModelError, match="does not say how wide its 4 heads are: set its attribute head_dim"
        ):
            betahook.attach(attention)


class OfWholeWidth(nn.Module):
    """As in MixFormer, whose scale is that of one head as wide as all."""

    def __init__(self, fused):
        super().__init__()
        self.heads, self.scale, self.fused = HEADS, WIDTH**-0.5, fused
        self.layer = nn.Linear(WIDTH, 3 * WIDTH)

    def forward(self, pair):
        q, k, v = self.layer(pair[0]).unflatten(-1, (3, HEADS, D)).permute(2, 0, 3, 1, 4)
        if self.fused:
            return F.scaled_dot_product_attention(q, k, v, scale=self.scale)
        return (q @ k.mT * self.scale).softmax(-1) @ v


@pytest.mark.parametrize("fused", [False, True])
def test_the_first_forward_contradicts_a_scale_that_is_not_of_one_head(fused):
    attention = type("OwnAttention", (OfWholeWidth,), {})(fused)
    with betahook.attach(attention, controller="monitor", when="always") as hook:
        attention((torch.randn(2, 9, WIDTH), None))
        (layer,) = hook.layers.values()
        assert layer.head_dim == WIDTH
        assert f"{D} components, where its scale says {WIDTH} (set its attribute head_dim" in layer.refusal
    attention.head_dim = D
    with betahook.attach(attention, controller="monitor", when="always") as hook:
        attention((torch.randn(2, 9, WIDTH), None))
        (layer,) = hook.layers.values()
        assert (layer.head_dim, layer.refusal) == (D, None)


class Plain(nn.Module):
    """An attention whose name does not say so."""

    def __init__(self):
        super().__init__()
        self.num_heads, self.head_dim = HEADS, D
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x):
        return self.attend(self.q_proj(x), self.k_proj(x), self.v_proj(x))

    def attend(self, *qkv):
        q, k, v = (part.unflatten(-1, (-1, D)).transpose(1, 2) for part in qkv)
        return ((q @ k.mT * D**-0.5).softmax(-1) @ v).transpose(1, 2).flatten(2)


class FusedLater(Plain):
    def forward(self, x):
        return self.attend(*self.all_three(x).chunk(3, -1))


def fuse(module):
    module.all_three, module.__class__ = nn.Linear(WIDTH, 3 * WIDTH), FusedLater
    del module.q_proj, module.k_proj, module.v_proj


def prune(module):
    module.q_proj, module.k_proj, module.v_proj = (nn.Linear(WIDTH, D) for _ in range(3))


def test_projections_that_were_taken_out_or_pruned_are_not_measured_any_more():
    """Fused ones are found again in a forward; a head less is left alone."""
    x = torch.randn(2, 9, WIDTH)
    for change in (fuse, prune):
        model = Plain()
        with betahook.attach(model, controller="monitor", interval=1) as hook:
            (layer,) = hook.layers.values()
            model(x).sum().backward()
            hook.step()
            assert layer.weight_std_q > 0
            change(model)
            assert math.isnan(layer.weight_std_q)
            model(x).sum().backward()
            hook.step()
            assert math.isnan(layer.weight_std_q) is (change is prune)
            assert (layer.refusal is None) is (change is fuse)


def test_a_projection_that_lost_a_single_row_is_not_measured():
    model = Plain()
    with betahook.attach(model, controller="monitor", interval=1) as hook:
        (layer,) = hook.layers.values()
        model(torch.randn(2, 9, WIDTH))
        assert layer.weight_std_q > 0
        model.q_proj = nn.Linear(WIDTH, WIDTH - 1)
        assert math.isnan(layer.weight_std_q)


class Quantised(nn.Module):
    """A linear map that holds no parameter, as those of torch.ao."""

    def __init__(self, linear):
        super().__init__()
        self.in_features, self.out_features, self._packed = linear.in_features, linear.out_features, [linear]
        for each in linear._forward_pre_hooks.values():  # as torch.ao does, whoever they belong to
            self.register_forward_pre_hook(each)

    def weight(self):
        return self._packed[0].weight

    def forward(self, x):
        return nn.functional.linear(x, self.weight(), self._packed[0].bias)


@pytest.mark.parametrize("is_hooked", [False, True])
def test_attention_over_quantised_projections_is_measured(is_hooked):
    model, x = nn.Sequential(Plain()), torch.randn(2, 9, WIDTH)

    def quantise():
        for name, linear in list(model[0].named_children()):
            setattr(model[0], name, Quantised(linear))

    if not is_hooked:
        quantise()
    with betahook.attach(model, controller="monitor", when="always", interval=1) as hook:
        if is_hooked:
            model(x)
            hook.step()
            quantise()
        model(x)
        hook.step()
        metrics = hook.metrics()
        q, k = (part(x).unflatten(-1, (-1, D)).transpose(1, 2).double() for part in (model[0].q_proj, model[0].k_proj))
        expected = (q @ k.mT).transpose(0, 1).flatten(1).var(1, correction=0).mean().sqrt().item()
        assert metrics["score_std/0"] == pytest.approx(expected, rel=1e-5)
        assert "weight_std_q/0" not in metrics
    with mock.patch.object(Recorder, "record_input") as record:
        model(x)
    record.assert_not_called()
