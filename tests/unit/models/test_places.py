"""W_q and W_k of attention whose projections have names and layouts of their own, found by a trial of the forward."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import betahook
from betahook.models import heads

HEADS, D, WIDTH = 4, 6, 24


def by_head(x, heads=HEADS):
    return x.unflatten(-1, (heads, -1)).transpose(1, 2)


class OwnAttention(nn.Module):
    """The output of attention over what `project` makes of the input."""

    def forward(self, x):
        q, k, v = self.project(x)
        weights = (q @ k.mT * D**-0.5).softmax(-1)
        return (weights @ v).transpose(1, 2).flatten(2)


class Stacked(OwnAttention):
    def __init__(self):
        super().__init__()
        self.mixed = nn.Linear(WIDTH, 3 * WIDTH)

    def project(self, x):
        return [by_head(part) for part in self.mixed(x).chunk(3, -1)]

    def rows(self):
        every = torch.arange(3 * WIDTH).view(3, HEADS, D)
        return (self.mixed, every[0]), (self.mixed, every[1])


class InPairs(Stacked):
    """Twice as many heads as it states, as differential attention, which counts pairs of them."""

    num_heads, head_dim = HEADS // 2, D


class HeadByHead(Stacked):
    """All of one head, then all of the next, under a name that stands for another layout."""

    def __init__(self):
        super().__init__()
        self.qkv = self.mixed
        del self.mixed

    def project(self, x):
        return self.qkv(x).unflatten(-1, (HEADS, 3, D)).permute(3, 0, 2, 1, 4)

    def rows(self):
        every = torch.arange(3 * WIDTH).view(HEADS, 3, D)
        return (self.qkv, every[:, 0]), (self.qkv, every[:, 1])


class ByComponent(Stacked):
    """q, k and v of one component, then those of the next."""

    def project(self, x):
        return self.mixed(x).unflatten(-1, (HEADS, D, 3)).permute(4, 0, 2, 1, 3)

    def rows(self):
        every = torch.arange(3 * WIDTH).view(HEADS, D, 3)
        return (self.mixed, every[..., 0]), (self.mixed, every[..., 1])


class KeysFirst(Stacked):
    def project(self, x):
        k, q, v = super().project(x)
        return q, k, v

    def rows(self):
        key, query = super().rows()
        return query, key


class InAList(OwnAttention):
    """Three projections without names."""

    def __init__(self):
        super().__init__()
        self.linears = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def project(self, x):
        return [by_head(linear(x)) for linear in self.linears]

    def rows(self):
        every = torch.arange(WIDTH).view(HEADS, D)
        return (self.linears[0], every), (self.linears[1], every)


class SharedKeys(OwnAttention):
    """Two query heads for each key, k and v fused, rotated halves."""

    def __init__(self):
        super().__init__()
        self.ask, self.answer = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def project(self, x):
        q, (k, v) = by_head(self.ask(x)), (by_head(part, HEADS // 2) for part in self.answer(x).chunk(2, -1))
        k, v = (part.repeat_interleave(2, dim=1) for part in (k, v))
        angle = torch.arange(x.shape[1], dtype=x.dtype)[:, None]
        turned = [part * angle.cos() + torch.cat([-part[..., 3:], part[..., :3]], -1) * angle.sin() for part in (q, k)]
        return *turned, v

    def rows(self):
        every = torch.arange(WIDTH).view(HEADS, D)
        return (self.ask, every), (self.answer, every[:2])


class OneKey(SharedKeys):
    """One key for all heads."""

    def __init__(self):
        super().__init__()
        self.answer = nn.Linear(WIDTH, 2 * D)

    def project(self, x):
        return by_head(self.ask(x)), *(part[:, None] for part in self.answer(x).chunk(2, -1))

    def rows(self):
        return super().rows()[0], (self.answer, torch.arange(D)[None])


class MoreKeys(InAList):
    """Latents as queries, which look at tokens and at themselves, as in the resampler of Flamingo."""

    def project(self, x):
        tokens = torch.cat([x, x], dim=1)
        return [by_head(linear(part)) for linear, part in zip(self.linears, (x, tokens, tokens), strict=True)]


class Latents(InAList):
    """Learned queries, which are no input, as in attention pooling."""

    def __init__(self):
        super().__init__()
        self.num_heads, self.head_dim = HEADS, D
        self.latents = nn.Parameter(torch.randn(5, WIDTH))

    def project(self, x):
        latents = self.latents.expand(len(x), -1, -1)
        return [by_head(linear(part)) for linear, part in zip(self.linears, (latents, x, x), strict=True)]


class PositionsFirst(InAList):
    """Scores of learned positions, which no projection of the input made, before those of the keys."""

    def __init__(self):
        super().__init__()
        self.positions, self.relate = nn.Parameter(torch.randn(12, WIDTH)), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        q, k, v = self.project(x)
        r = by_head(self.relate(self.positions[: x.shape[1]].expand(len(x), -1, -1)))
        weights = ((q @ r.mT + q @ k.mT) * D**-0.5).softmax(-1)
        return (weights @ v).transpose(1, 2).flatten(2)


class Folded(InAList):
    """Batch and heads in one axis."""

    def forward(self, x):
        q, k, v = (self.fold(by_head(linear(x))) for linear in self.linears)
        mixed = torch.bmm(torch.bmm(q, k.mT).mul(D**-0.5).softmax(-1), v)
        return self.unfold(mixed, len(x)).transpose(1, 2).flatten(2)

    def fold(self, x):
        return x.flatten(0, 1)

    def unfold(self, x, batch):
        return x.unflatten(0, (batch, HEADS))


class FoldedByHead(Folded):
    """The same, all sequences of one head and then those of the next."""

    def fold(self, x):
        return x.transpose(0, 1).flatten(0, 1)

    def unfold(self, x, batch):
        return x.unflatten(0, (HEADS, batch)).transpose(0, 1)


class AsManyHeadsAsComponents(Folded):
    """Four heads of four, whose axis of components is as long as that of the heads would be."""

    def __init__(self):
        super().__init__()
        self.linears[0], self.linears[1] = (nn.Linear(WIDTH, HEADS**2) for _ in range(2))

    def rows(self):
        every = torch.arange(HEADS**2).view(HEADS, HEADS)
        return (self.linears[0], every), (self.linears[1], every)


class AsManyHeadsAsTokens(OwnAttention):
    """Twelve heads of two behind the tokens, which are as many in the trial."""

    def __init__(self):
        super().__init__()
        self.length = 12
        self.query, self.key, self.value = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.positions = nn.Parameter(torch.zeros(self.length, WIDTH))

    def forward(self, x):
        x = x + self.positions
        q, k, v = (part(x).unflatten(-1, (12, 2)) for part in (self.query, self.key, self.value))
        weights = (torch.einsum("bnhd,bmhd->bhnm", q, k) * 2**-0.5).softmax(-1)
        return torch.einsum("bhnm,bmhd->bnhd", weights, v).flatten(2)

    def rows(self):
        every = torch.arange(WIDTH).view(12, 2)
        return (self.query, every), (self.key, every)


class Picture(OwnAttention):
    """Convolutions of 1 x 1 on pictures."""

    def __init__(self):
        super().__init__()
        self.make = nn.Conv2d(WIDTH, 3 * WIDTH, 1)

    def project(self, x):
        return [by_head(part.flatten(2).mT) for part in self.make(x).chunk(3, 1)]

    def rows(self):
        every = torch.arange(3 * WIDTH).view(3, HEADS, D)
        return (self.make, every[0]), (self.make, every[1])


LOCATED = [Stacked, HeadByHead, ByComponent, KeysFirst, InAList, SharedKeys, OneKey, MoreKeys, Folded, FoldedByHead]
LOCATED += [InPairs, Latents, PositionsFirst, AsManyHeadsAsComponents, Picture]


class Model(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.layer = kind()
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, x):
        x = x.mT.unflatten(-1, (3, 3)) if isinstance(self.layer, Picture) else x
        return self.head(self.layer(x))


@pytest.mark.parametrize("kind", [*LOCATED, AsManyHeadsAsTokens])
def test_the_rows_of_q_and_k_are_found_by_what_the_forward_does_with_them(kind):
    torch.manual_seed(0)
    model = Model(kind)
    with betahook.attach(model, controller="monitor") as hook:
        (layer,) = hook.layers.values()
        for projection, (module, rows) in zip(layer.projections, model.layer.rows(), strict=True):
            assert projection.module is module
            expected = module.weight.detach().flatten(1)[rows]
            # The order within a head means nothing.
            assert torch.equal(projection.entries.sort(1).values, expected.sort(1).values)
        expected = [module.weight[rows].std(correction=0).item() for module, rows in model.layer.rows()]
        assert [layer.weight_std_q, layer.weight_std_k] == pytest.approx(expected, rel=1e-5)
        assert layer.remarks == []


@pytest.mark.parametrize("kind", LOCATED)
def test_beta_folds_into_the_rows_that_were_found(kind):
    torch.manual_seed(0)
    model, x = Model(kind).double(), torch.randn(2, 9, WIDTH, dtype=torch.float64)
    with betahook.attach(model, controller="monitor", per_head=True, when="always") as hook:
        model(x)
        (layer,) = hook.layers.values()
        layer.head_beta = layer.head_beta * torch.tensor([0.5, 1.3, 2, 3])
        expected = model(x)
        betahook.fold(model)
    torch.testing.assert_close(model(x), expected, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("kind", LOCATED)
def test_clip_scales_the_rows_that_were_found(kind):
    torch.manual_seed(0)
    model, x = Model(kind), torch.randn(2, 9, WIDTH)
    with betahook.attach(model, controller="monitor", when="always", exact_max_logit=True) as hook:
        model(x)
        (layer,) = hook.layers.values()
        threshold = float((layer.head_statistics.max_score * layer.head_beta).amax()) / 2
    with betahook.attach(model, betahook.Clip(threshold), when="always") as hook:
        (layer,) = hook.layers.values()
        model(x)
        hook.step()
        model(x)
        assert (layer.head_statistics.max_score * layer.head_beta).amax().item() == pytest.approx(threshold, rel=1e-4)


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


class LowRank(Stacked):
    """A projection that another one adds to, which also makes q and k."""

    def __init__(self):
        super().__init__()
        self.down, self.up = nn.Linear(WIDTH, 2), nn.Linear(2, 3 * WIDTH)

    def project(self, x):
        return [by_head(part) for part in (self.mixed(x) + self.up(self.down(x))).chunk(3, -1)]


class Gated(InAList):
    def project(self, x):
        q, k, v = super().project(x)
        return q * by_head(self.linears[2](x)).sigmoid(), k, v


class BatchNormed(InAList):
    """A norm of statistics of its own behind each projection."""

    def __init__(self):
        super().__init__()
        self.linears = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), Transposed(WIDTH)) for _ in range(3))


class Transposed(nn.BatchNorm1d):
    def forward(self, x):
        return super().forward(x.mT).mT


class Tiled(SharedKeys):
    """Keys shared by heads that are not neighbours."""

    def project(self, x):
        q, (k, v) = by_head(self.ask(x)), (by_head(part, HEADS // 2) for part in self.answer(x).chunk(2, -1))
        return q, k.repeat(1, 2, 1, 1), v.repeat(1, 2, 1, 1)


class Scaled(nn.Linear):
    """A linear map that does more than to multiply by its weight."""

    def forward(self, x):
        return 2 * super().forward(x)


class OfASubclass(InAList):
    def __init__(self):
        super().__init__()
        self.linears = nn.ModuleList(Scaled(WIDTH, WIDTH) for _ in range(3))


class Halved(InAList):
    """Half of the heads from one projection, half from another."""

    def project(self, x):
        q, k, v = super().project(x)
        return torch.cat([q[:, :2], v[:, 2:]], 1), k, v


class OfGroups(Picture):
    """Convolutions that see a part of their input each."""

    def __init__(self):
        super().__init__()
        self.make = nn.Conv2d(WIDTH, 3 * WIDTH, 1, groups=2)


@pytest.mark.parametrize("kind", [LowRank, Gated, BatchNormed, Tiled, OfASubclass, Halved, OfGroups])
def test_what_no_weight_alone_makes_is_not_taken_for_its_rows(kind):
    torch.manual_seed(0)
    with betahook.attach(Model(kind), controller="monitor") as hook:
        (layer,) = hook.layers.values()
        assert (layer.heads, layer.head_dim) == (HEADS, D)
        assert layer.projections is None
        assert "W_q and W_k have no known form" in layer.remarks[0]


def test_adapters_that_are_there_already_are_part_of_the_weight():
    peft = pytest.importorskip("peft")
    torch.manual_seed(0)
    model, targets = Model(InAList), ["layer.linears.0", "layer.linears.1"]
    peft.inject_adapter_in_model(peft.LoraConfig(r=2, target_modules=targets, init_lora_weights=False), model)
    with betahook.attach(model, controller="monitor") as hook:
        (layer,) = hook.layers.values()
        for projection, linear in zip(layer.projections, model.layer.linears, strict=False):
            acting = linear.base_layer.weight + linear.get_delta_weight("default")
            torch.testing.assert_close(projection.entries.flatten(0, 1), acting.detach())


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


def test_the_default_controller_sees_that_a_model_with_names_of_its_own_is_fresh():
    torch.manual_seed(0)
    model, x = Model(InAList), torch.randn(2, 9, WIDTH)
    with betahook.attach(model) as hook:
        model(x).sum().backward()
        hook.step()
        (layer,) = hook.layers.values()
        assert layer.beta == pytest.approx(D**-0.5 * 10**-0.5, rel=0.1)  # held low in the warm-up
