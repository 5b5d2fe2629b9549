"""Forwards in `torch.func`, `torch.export`, `torch.jit.trace` and `torch.fx`: beta acts, and nothing is measured."""

import math

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad
from torch.func import functional_call, grad, jvp, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel

import betahook
from support.attention import HEADS, LENGTH, WIDTH, ByHandAttention, FusedAttention, make
from support.models import build


class LearnedScale(ByHandAttention):
    """Its own beta is a parameter, one for each head."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.rand(HEADS, 1, 1) + 0.5)

    def mix(self, q, k, v):
        return self.values(self.scale * (q @ k.mT), v)


class InPlace(ByHandAttention):
    """Its scores are changed in place, and a part of them."""

    def mix(self, q, k, v):
        scores = q @ k.mT / math.sqrt(self.head_dim)
        scores[..., 1:] += torch.linspace(-1, 1, LENGTH - 1)
        scores *= 0.5
        return self.values(scores, v)


class Llama(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = build("llama", "eager")

    def forward(self, x):
        return self.layers(inputs_embeds=x).logits


class Encoder(nn.TransformerEncoderLayer):
    def __init__(self):
        super().__init__(WIDTH, HEADS, 2 * WIDTH, dropout=0.0, batch_first=True)


pytestmark = pytest.mark.filterwarnings("ignore")  # torch's own

BY_HAND = [FusedAttention, ByHandAttention, LearnedScale, InPlace]
REFUSED = "^1.*: no forward has shown yet how this attention computes its scores. Run a forward of the model outside of"
KINDS = [Llama, Encoder, *BY_HAND]


def batch(samples=3):
    return torch.randn(samples, LENGTH, WIDTH, generator=torch.Generator().manual_seed(3))


def parameters_of(model):
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def loss(model, parameters, sample):
    return functional_call(model, parameters, (sample[None],)).square().mean()


def hooked(kind, *, seen=True):
    """A hooked model whose beta is not its own."""
    model = make(kind)
    hook = betahook.attach(model, controller="monitor", interval=1)
    if seen:
        model(batch(2))
    for layer in hook.layers.values():
        layer.beta = torch.full((), 0.7)
    return model, hook


def gradients(model, sample):
    model.zero_grad(set_to_none=True)
    loss(model, {}, sample).backward()
    return {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_of_each_sample(kind):
    model, _ = hooked(kind)
    found = vmap(grad(lambda p, sample: loss(model, p, sample)), (None, 0))(parameters_of(model), batch())
    for index, sample in enumerate(batch()):
        for name, expected in gradients(model, sample).items():
            torch.testing.assert_close(found[name][index], expected)


@pytest.mark.parametrize("kind", [Llama, ByHandAttention, LearnedScale])  # fused kernels have none
def test_a_directional_derivative(kind):
    model, _ = hooked(kind)
    weights = parameters_of(model)
    ones = {name: torch.ones_like(weight) for name, weight in weights.items()}
    _, found = jvp(lambda p: loss(model, p, batch()[0]), (weights,), (ones,))
    torch.testing.assert_close(
        found, sum(each.sum() for each in gradients(model, batch()[0]).values()), rtol=1e-4, atol=1e-5
    )


@pytest.mark.parametrize("seen", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_a_forward_without_data_leaves_nothing_behind(kind, seen):
    """As of a tool that counts operations or memory, before a real forward or after."""
    model, expected = make(kind), make(kind)(batch(2))
    with betahook.attach(model, controller="monitor", interval=1) as hook:
        if seen:
            model(batch(2))
        before = {name: float(layer.statistics.count) for name, layer in hook.layers.items()}
        with FakeTensorMode(allow_non_fake_inputs=True):
            model(batch(2)).square().mean()
        assert {name: float(layer.statistics.count) for name, layer in hook.layers.items()} == before
        output = model(batch(2))
        assert type(output) is torch.Tensor
        assert torch.equal(output, expected)
        for layer in hook.layers.values():
            assert layer.beta == layer.beta_default
            layer.beta = 2 * layer.beta_default
        assert torch.isfinite(model(batch(2))).all()


def exported(model, x):
    torch.export.export(model, (x,), strict=False).module()(x)


def of_each_sample(model, x):
    vmap(grad(lambda p, sample: loss(model, p, sample)), (None, 0))(parameters_of(model), x)


def without_data(model, x):
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        model(mode.from_tensor(x))


def with_tangents(model, x):
    with forward_ad.dual_level(), sdpa_kernel(SDPBackend.MATH):
        model(forward_ad.make_dual(x, x))


@pytest.mark.parametrize(
    "run",
    [
        pytest.param(exported, marks=pytest.mark.oldest_skips("torch does not tell that it exports")),
        of_each_sample,
        without_data,
        with_tangents,
    ],
)
def test_the_last_call_is_one_that_can_run_again(run):
    model, hook = hooked(ByHandAttention)
    expected = model(batch(2))
    run(model, batch())
    hook.audit()
    betahook.fold(model)
    torch.testing.assert_close(model(batch(2)), expected)


def test_without_a_call_that_can_run_again_the_fold_asks_for_one():
    model = make(Llama)
    hook = betahook.attach(model, controller="monitor", interval=1)
    of_each_sample(model, batch())
    for layer in hook.layers.values():
        layer.beta = 0.7
    with pytest.raises(betahook.FoldError, match="there was none, or it used a cache"):
        betahook.fold(model)


@pytest.mark.parametrize("kind", KINDS)
def test_a_beta_that_was_loaded_acts_in_the_first_forward_or_nothing_runs(kind):
    states = hooked(kind)[1].state_dict()
    model = make(kind)
    hook = betahook.attach(model, controller="monitor", interval=1)
    hook.load_state_dict(states)
    function = grad(lambda p: loss(model, p, batch()[0]))
    if kind is Llama:
        found = function(parameters_of(model))
        for name, expected in gradients(model, batch()[0]).items():
            torch.testing.assert_close(found[name], expected)
    else:
        with pytest.raises(RuntimeError, match=REFUSED):
            function(parameters_of(model))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("first", [True, False], ids=["from the first forward", "later"])
def test_what_surrounds_a_transform_is_measured_as_without_it(kind, first):
    measured = []
    for transformed in (False, True):
        model = make(kind)
        with betahook.attach(model, controller="monitor", interval=1) as hook:
            for step in range(3):
                if transformed and (first or step > 0):
                    vmap(grad(lambda p, x, model=model: loss(model, p, x)), (None, 0))(parameters_of(model), batch())
                model(batch()).square().mean().backward()
                hook.step()
                measured.append(hook.metrics())
    for plain, surrounded in zip(measured[:3], measured[3:], strict=True):
        assert surrounded == pytest.approx(plain, nan_ok=True)
        assert all(math.isfinite(value) for name, value in plain.items() if name.startswith("score_std"))


def test_a_step_that_saw_transforms_only_says_so(caplog):
    model = make(Llama)
    with betahook.attach(model, controller="monitor") as hook:
        grad(lambda p: loss(model, p, batch()[0]))(parameters_of(model))
        hook.step()
    assert "in evaluation mode, under torch.no_grad or in torch.func only" in caplog.text


@pytest.mark.parametrize("kind", BY_HAND)
def test_a_trace_keeps_beta(kind):
    model, _ = hooked(kind)
    traced = torch.jit.trace(model, batch(2))  # which checks that a second trace is the same
    torch.testing.assert_close(traced(batch(2).flip(0)), model(batch(2).flip(0)), rtol=0, atol=0)


@pytest.mark.oldest_skips("torch does not tell that it exports")
@pytest.mark.parametrize("kind", BY_HAND)
def test_an_export_keeps_beta(kind):
    model, _ = hooked(kind)
    program = torch.export.export(model, (batch(2),), strict=False).module()
    torch.testing.assert_close(program(batch(2).flip(0)), model(batch(2).flip(0)), rtol=0, atol=0)


@pytest.mark.oldest_skips("torch does not tell that it exports")
@pytest.mark.parametrize(("kind", "strict"), [*((kind, False) for kind in KINDS), (Llama, True)])
def test_an_export_keeps_the_beta_of_its_moment(kind, strict):
    model, hook = hooked(kind)
    expected = model(batch(2))
    program = torch.export.export(model, (batch(2),), strict=strict).module()
    for layer in hook.layers.values():
        layer.beta = 0.1
    torch.testing.assert_close(program(batch(2)), expected)
    hook.detach()
    torch.testing.assert_close(program(batch(2)), expected)


@pytest.mark.oldest_skips("torch does not tell that it exports")
@pytest.mark.parametrize("kind", [Llama, ByHandAttention])
def test_an_export_holds_beta_and_nothing_else_of_the_hook(kind):
    model, hook = hooked(kind)
    program = torch.export.export(model, (batch(2),), strict=False)
    layers = len(hook.layers)
    hook.detach()
    plain = torch.export.export(model, (batch(2),), strict=False)
    assert len(program.constants) == len(plain.constants) + layers


@pytest.mark.oldest_skips("torch does not tell that it exports")
def test_an_export_before_the_first_forward_is_refused():
    model = make(ByHandAttention)
    with betahook.attach(model, controller="monitor"):
        with pytest.raises(RuntimeError, match=REFUSED):
            torch.export.export(model, (batch(2),), strict=False)
        model(batch(2))
        torch.export.export(model, (batch(2),), strict=False)


class WithLoss(Llama):
    def forward(self, x):
        scores = super().forward(x)
        return scores, scores.square().mean()


def transformed(model, x):
    grad(lambda weights: functional_call(model, weights, (x,))[1])(dict(model.named_parameters()))


@pytest.mark.oldest_skips("torch cannot trace the models at all")
@pytest.mark.parametrize("run", [exported, transformed])
def test_the_training_loss_is_not_recorded_either(run):
    model = WithLoss().train()
    with betahook.attach(model) as hook:
        model(batch())
        hook.step()
        before = hook._state.table.clone()
        run(model, batch())
        assert torch.equal(hook._state.table, before)
        model(batch())
        assert not torch.equal(hook._state.table, before)


@pytest.mark.parametrize("kind", [FusedAttention, ByHandAttention])
def test_a_symbolic_trace_is_that_of_the_model_alone_or_refused(kind):
    model, x = make(kind), batch()
    with betahook.attach(model, controller="monitor") as hook:
        traced = torch.fx.symbolic_trace(model)
        model(x)
        assert torch.equal(torch.fx.symbolic_trace(model)(x), traced(x))
        hook.layers["1"].beta = 0.7
        with pytest.raises(
            RuntimeError, match=r"^1: the result of torch.fx.symbolic_trace would lack its beta.* fold\(\)"
        ):
            torch.fx.symbolic_trace(model)
        assert hook.layers["1"].refusal is None
    assert torch.equal(traced(x), model(x))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("beta", [None, 0.7])
def test_forward_mode_of_large_queries(kind, beta, monkeypatch):
    """With parameters that ask for a gradient too, as in Hessian-vector products."""
    monkeypatch.setattr("betahook.tap.gain.SMALL", 0)

    def tangent(model):
        with sdpa_kernel(SDPBackend.MATH), forward_ad.dual_level():
            dual = {
                name: forward_ad.make_dual(parameter, torch.ones_like(parameter))
                for name, parameter in model.named_parameters()
            }
            return forward_ad.unpack_dual(functional_call(model, dual, (batch(),)).square().mean()).tangent

    model = make(kind)
    with betahook.attach(model, controller="monitor", interval=1) as hook:
        model(batch()).sum().backward()
        hook.step()
        if beta is not None:
            for layer in hook.layers.values():
                layer.beta = beta
            parameters = parameters_of(model)
            ones = {name: torch.ones_like(parameter) for name, parameter in parameters.items()}
            with sdpa_kernel(SDPBackend.MATH):
                _, expected = jvp(
                    lambda of: functional_call(model, of, (batch(),)).square().mean(), (parameters,), (ones,)
                )
        measured = {name: layer.statistics.count.item() for name, layer in hook.layers.items()}
        found = tangent(model)
        assert {name: layer.statistics.count.item() for name, layer in hook.layers.items()} == measured
    torch.testing.assert_close(found, tangent(model) if beta is None else expected, rtol=1e-5, atol=1e-5)
