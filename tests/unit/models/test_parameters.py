"""W_q and W_k that are parameters of an attention itself, or of a linear module that a user wrote."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import betahook
from support.parameters import (
    HEADS,
    WIDTH,
    BiasApart,
    Calling,
    D,
    Flat,
    Fused,
    HeadsInTheMiddle,
    HeadsLast,
    InByOut,
    InParts,
    MatrixPerHead,
    MatrixPerHeadTimes,
    Model,
    Multiply,
    OneBias,
    OtherOrder,
    OwnLinear,
    Stacked,
    Stating,
    Turned,
    TurnedInMemory,
    WithBiases,
    parameter,
)

BY_HEAD = [MatrixPerHead, HeadsInTheMiddle, HeadsLast, MatrixPerHeadTimes, Stacked, Flat]
WITH_BIASES = [WithBiases, OneBias, OtherOrder, BiasApart]
KINDS = [Fused, Stating, InParts, InByOut, Turned, TurnedInMemory, OwnLinear, Calling, *WITH_BIASES, *BY_HEAD]


@pytest.fixture
def x():
    torch.manual_seed(1)
    return 3 * torch.randn(2, 9, WIDTH)


@pytest.mark.parametrize("kind", KINDS)
def test_the_weights_are_found(kind, x):
    torch.manual_seed(0)
    model = Model(kind)
    plain = model(x)
    with betahook.attach(model, controller="monitor", when="always") as hook:
        assert torch.equal(model(x), plain)
        (layer,) = hook.layers.values()
        for projection, weight in zip(layer.projections, model.layer.weights(), strict=True):
            assert torch.equal(projection.entries, weight.detach().unflatten(0, (HEADS, D)))
            assert projection.width == WIDTH
        expected = [weight.std(correction=0).item() for weight in model.layer.weights()]
        assert [layer.weight_std_q, layer.weight_std_k] == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_beta_folds_into_them(kind, x):
    torch.manual_seed(0)
    model, x = Model(kind).double(), x.double()
    with betahook.attach(model, controller="monitor", per_head=True, when="always") as hook:
        model(x)
        (layer,) = hook.layers.values()
        layer.head_beta = layer.head_beta * torch.tensor([0.5, 1.3, 2, 3])
        expected = model(x)
        betahook.fold(model)
    torch.testing.assert_close(model(x), expected, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind is not BiasApart])  # which `fold` alone scales
def test_clip_scales_them(kind, x):
    torch.manual_seed(0)
    model = Model(kind)
    with betahook.attach(model, betahook.Clip(1.0), when="always", exact_max_logit=True) as hook:
        (layer,) = hook.layers.values()
        for _ in range(2):
            model(x)
            largest = (layer.head_statistics.max_score * layer.head_beta).amax().item()
            hook.step()
    assert largest == pytest.approx(1, rel=1e-4)


class Inherited(nn.MultiheadAttention):
    """A class made of torch's."""

    def __init__(self):
        super().__init__(WIDTH, HEADS, batch_first=True)

    def forward(self, query, key, value):
        return super().forward(query, key, value, need_weights=False)[0]


class InAnotherOrder(InParts):
    """Arguments that are called otherwise."""

    def forward(self, values, keys, queries):
        return super().forward(queries, keys, values)


INPUTS = {
    Fused: lambda x: (x, x),
    InParts: lambda x: (x, x.cos()),
    Inherited: lambda x: (x, x.cos()),
    InByOut: lambda x: (x, x),
    WithBiases: lambda x: (x, x),
    **dict.fromkeys(BY_HEAD, lambda x: (x, x)),
    Turned: lambda x: (x, x),
    BiasApart: lambda x: (x, x),
    OwnLinear: lambda x: (F.layer_norm(x, (WIDTH,)), 2 * F.layer_norm(x, (WIDTH,))),
}


@pytest.mark.parametrize("kind", INPUTS)
def test_their_inputs_are_measured_where_they_are_arguments(kind, x):
    torch.manual_seed(0)
    model = Model(kind)
    with betahook.attach(model, controller="monitor", when="always") as hook:
        model(x)
        (layer,) = hook.layers.values()
        assert layer.remarks == []
        measured = layer.statistics.input_std_q.item(), layer.statistics.input_std_k.item()
    expected = [each.std(correction=0).item() for each in INPUTS[kind](model.norm(x))]
    assert measured == pytest.approx(expected, rel=1e-5)


class Normed(InByOut):
    """Projections of what is no argument."""

    def project(self, x):
        return super().project(F.layer_norm(x, (WIDTH,)))


class OfAHalf(InByOut):
    """Projections of a part of the argument."""

    def __init__(self):
        super().__init__()
        self.W_query, self.W_key = (parameter(WIDTH // 2, WIDTH) for _ in range(2))

    def project(self, x):
        half = x[..., : WIDTH // 2]
        return half @ self.W_query, half @ self.W_key, x @ self.W_value


@pytest.mark.parametrize("kind", [Normed, OfAHalf, InAnotherOrder, Calling])
def test_inputs_that_are_not_one_argument_alone_are_not_measured(kind, x):
    torch.manual_seed(0)
    model = Model(kind)
    with betahook.attach(model, controller="monitor", when="always") as hook:
        model(x)
        (layer,) = hook.layers.values()
        assert layer.weight_std_q == pytest.approx(model.layer.weights()[0].std(correction=0).item(), rel=1e-5)
        assert layer.statistics.input_std_q.isnan()
        assert layer.remarks[0].startswith("the input of W_q and W_k is not measured")


class Computed(InByOut):
    """A weight that is made of a parameter in each forward."""

    def project(self, x):
        return x @ (2 * self.W_query), *super().project(x)[1:]


class Columns(InByOut):
    """A weight that is a part of each row of a parameter."""

    def project(self, x):
        return x[..., : WIDTH // 2] @ self.W_query[: WIDTH // 2], *super().project(x)[1:]


class Shifted(InByOut):
    """A weight whose rows lie across those of a parameter."""

    def __init__(self):
        super().__init__()
        self.W_query = parameter(WIDTH + 1, WIDTH)

    def project(self, x):
        weight = self.W_query.flatten()[WIDTH // 2 : -WIDTH // 2].view(WIDTH, WIDTH)
        return F.linear(x, weight), x @ self.W_key, x @ self.W_value


class Doubled(Multiply):
    """A linear module that does more than to multiply."""

    def forward(self, x):
        return 2 * super().forward(x)


class OfDoubled(OwnLinear):
    def __init__(self):
        super().__init__()
        self.ask = Doubled()


class SummedAlone(InByOut):
    """A weight with an axis that no input has."""

    def __init__(self):
        super().__init__()
        self.W_query = parameter(WIDTH, WIDTH, 2)

    def project(self, x):
        return torch.einsum("bsd,dhi->bsh", x, self.W_query), x @ self.W_key, x @ self.W_value


@pytest.mark.parametrize("kind", [Computed, Columns, Shifted, OfDoubled, SummedAlone])
def test_what_no_parameter_alone_makes_is_not_taken_for_one(kind):
    torch.manual_seed(0)
    with betahook.attach(Model(kind), controller="monitor") as hook:
        (layer,) = hook.layers.values()
        assert layer.projections is None
        assert "W_q and W_k have no known form" in layer.remarks[0]


class ComponentsFirst(MatrixPerHead):
    """A bias `[d_k, heads]` beside weights `[heads, d_x, d_k]`."""

    def __init__(self):
        super().__init__()
        self.b_Q, self.b_K = parameter(D, HEADS), parameter(D, HEADS)

    def forward(self, x):
        q, k, v = (torch.einsum("bsd,ndh->bnsh", x, weight) for weight in (self.W_Q, self.W_K, self.W_V))
        q, k = q + self.b_Q.mT[:, None], k + self.b_K.mT[:, None]
        return ((q @ k.mT * D**-0.5).softmax(-1) @ v).transpose(1, 2).flatten(2)


class HeadsFirst(HeadsLast):
    """A bias `[heads, d_k]` beside weights `[d_x, d_k, heads]`."""

    def project(self, x):
        q, k, v = super().project(x)
        return q + self.b_Q.flatten(), k + self.b_K.flatten(), v


@pytest.mark.parametrize("kind", [ComponentsFirst, HeadsFirst])
def test_a_bias_laid_out_otherwise_does_not_fold(kind, x):
    torch.manual_seed(0)
    model = Model(kind)
    with betahook.attach(model, controller="monitor", when="always") as hook:
        model(x)
        (layer,) = hook.layers.values()
        layer.beta = 0.7
        expected = model(x)
        with pytest.raises(betahook.FoldError, match="the query has a bias apart from its projection"):
            betahook.fold(model)
        assert torch.equal(model(x), expected)


class Spectral(Calling):
    """Weights that a hook of torch makes of parameters before each call."""

    def __init__(self):
        super().__init__()
        self.maps = nn.ModuleList(map(nn.utils.spectral_norm, self.maps))

    def project(self, x):
        return [linear(x) for linear in self.maps]


def test_weights_that_a_hook_makes_of_parameters_are_read_as_they_act(x):
    torch.manual_seed(0)
    model = Model(Spectral).eval()
    with betahook.attach(model, controller="monitor", when="always") as hook:
        model(x)
        (layer,) = hook.layers.values()
        assert layer.weight_std_q == pytest.approx(model.layer.maps[0].weight.std(correction=0).item(), rel=1e-5)


def test_attention_with_a_parametrised_weight_is_found(x):
    """Its class is one of torch's then, and its W_q is made of others."""
    torch.manual_seed(0)
    model = Model(InByOut)
    nn.utils.parametrize.register_parametrization(model.layer, "W_query", nn.Tanh())
    plain = model(x)
    with betahook.attach(model, controller="monitor", when="always") as hook:
        assert torch.equal(model(x), plain)
        (layer,) = hook.layers.values()
        assert layer.heads == HEADS
        assert layer.projections is None


class OtherRows(Fused):
    """Other rows of the weight where queries and keys are other tokens, as in speechbrain."""

    def forward(self, query, key):
        if query is key:
            q, k, v = F.linear(query, self.in_proj_weight).unflatten(-1, (HEADS, 3 * D)).chunk(3, -1)
            return self.attend(q.flatten(2), k.flatten(2), v.flatten(2))
        return self.attend(*map(F.linear, (query, key, key), self.in_proj_weight.chunk(3)))


def test_the_first_forward_shows_the_rows_where_it_goes_another_way_than_the_trial(x):
    torch.manual_seed(0)
    module, y = OtherRows().double(), x.double()
    with torch.no_grad():
        module.in_proj_weight[:WIDTH] *= 3
    with betahook.attach(module, controller="monitor", per_head=True, when="always") as hook:
        module(y, y.cos())
        (layer,) = hook.layers.values()
        assert layer.weight_std_q == pytest.approx(module.in_proj_weight[:WIDTH].std(correction=0).item(), rel=1e-5)
        layer.head_beta = layer.head_beta * torch.tensor([0.5, 1.3, 2, 3])
        expected = module(y, y.cos())
        betahook.fold(module)
    torch.testing.assert_close(module(y, y.cos()), expected, rtol=1e-10, atol=1e-12)


def test_a_parameter_that_is_sharded_outside_the_forward_is_not_read(x):
    torch.manual_seed(0)
    model = Model(Fused)
    with betahook.attach(model, controller="monitor", when="always") as hook:
        model(x)
        (layer,) = hook.layers.values()
        model.layer.in_proj_weight.data = torch.zeros(0)  # as ZeRO-3 leaves it
        assert torch.tensor(layer.weight_std_q).isnan()
        assert layer.obstacles == ["the std of W_q and W_k is not measured, they are sharded outside the forward"]
