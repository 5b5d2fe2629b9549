"""Attention whose code asks for function modes, as copies of `F.multi_head_attention_forward` do."""

import gc
import weakref

import pytest
import torch
import torch.nn.functional as F
from torch import nn, overrides
from torch.overrides import TorchFunctionMode, handle_torch_function, has_torch_function

import betahook
from betahook.models import guards, trial
from support.attention import HEADS, LENGTH, WIDTH

D = WIDTH // HEADS
ORIGINAL = has_torch_function


def multi_head_attention_forward(query, weight, share=None):
    """An attention of the name of torch's, with an argument more that it does not hand over."""
    if type(weight) is not torch.Tensor and has_torch_function((query, weight)):
        return handle_torch_function(multi_head_attention_forward, (query, weight), query, weight)
    return attention(query, weight, share)


def attention(query, weight, share):
    q, k, v = F.linear(query, weight).unflatten(-1, (3, HEADS, D)).permute(2, 0, 3, 1, 4)
    return ((q @ k.mT * share * D**-0.5).softmax(-1) @ v).transpose(1, 2).flatten(2)


class Copying(nn.Module):
    num_heads, head_dim, share = HEADS, D, 0.5

    def __init__(self):
        super().__init__()
        self.in_proj_weight = nn.Parameter(torch.randn(3 * WIDTH, WIDTH) / 4)

    def forward(self, x):
        return multi_head_attention_forward(x, self.in_proj_weight, share=self.share)


class OfAMethod(Copying):
    def forward(self, x):
        return self.attend(x)

    def attend(self, x):
        if has_torch_function((x, self.in_proj_weight)):
            return handle_torch_function(attend, (x,), x)  # noqa: F821  the name of a method is none here
        return attention(x, self.in_proj_weight, self.share)


class AskingTorch(Copying):
    def forward(self, x):
        if overrides.has_torch_function((x, self.in_proj_weight)):
            return handle_torch_function(multi_head_attention_forward, (x,), x, self.in_proj_weight, share=self.share)
        return super().forward(x)


def retrieve(query, weight, share):
    """An attention of another name, as of Hopfield layers."""
    if overrides.has_torch_function((query, weight)):
        return handle_torch_function(retrieve, (query, weight), query, weight, share)
    return attention(query, weight, share)


class UnderAnotherName(Copying):
    def forward(self, x):
        return retrieve(x, self.in_proj_weight, self.share)


@pytest.fixture
def x():
    torch.manual_seed(0)
    return torch.randn(2, LENGTH, WIDTH, dtype=torch.float64)


@pytest.mark.parametrize("kind", [Copying, OfAMethod])
def test_a_copy_of_torchs_attention_runs_itself(kind, x):
    model = nn.Sequential(kind()).double()
    alone = model(x)
    with betahook.attach(model, controller="monitor", when="always") as hook:
        layer = hook.layers["0"]
        assert torch.equal(model(x), alone)
        assert layer.beta_default == pytest.approx(0.5 * D**-0.5)
        q, k, _ = F.linear(x, model[0].in_proj_weight).unflatten(-1, (3, HEADS, D)).permute(2, 0, 3, 1, 4)
        expected = (q @ k.mT).transpose(0, 1).flatten(1).std(1, correction=0)
        torch.testing.assert_close(layer.head_statistics.std.double(), expected, rtol=1e-5, atol=0)
        layer.beta = 2 * layer.beta_default
        doubled = model(x)
    model[0].share = 1.0
    torch.testing.assert_close(doubled, model(x))


def test_a_trial_shows_nothing_of_what_hands_itself_over():
    assert trial.run(UnderAnotherName()) is None


def test_a_trial_runs_it_too():
    outcome = trial.run(Copying())
    assert outcome.size == (HEADS, D)
    assert outcome.places[0].rows.flatten().tolist() == list(range(WIDTH))


@pytest.mark.parametrize("kind", [AskingTorch, UnderAnotherName])
def test_a_copy_that_hands_itself_over_is_left_alone(kind, x):
    model = nn.Sequential(kind()).double()
    alone = model(x)
    with betahook.attach(model, controller="monitor", when="always") as hook:
        assert torch.equal(model(x), alone)
        assert "hands itself over to function modes at test_guards.py" in hook.layers["0"].refusal


def test_guards_are_as_they_were_behind_the_last_hook(x):
    names = globals()
    first, second = nn.Sequential(Copying()), nn.Sequential(Copying())
    one, other = (betahook.attach(model, controller="monitor") for model in (first, second))
    one.detach()
    assert names["has_torch_function"] is not ORIGINAL
    second(x.float())
    other.detach()
    assert names["has_torch_function"] is ORIGINAL


def test_a_guard_sees_subclasses_where_no_mode_is():
    class Marked(torch.Tensor):
        pass

    with guards.blinded(Copying()):
        stand_in = globals()["has_torch_function"]
        assert stand_in is not ORIGINAL
        assert not stand_in((torch.ones(2),))
        assert stand_in((torch.ones(2).as_subclass(Marked),))
        plain = torch.ones(2)
        with TorchFunctionMode():
            assert ORIGINAL((plain,))
            assert not stand_in((plain,))


def test_guards_keep_no_module():
    model = nn.Sequential(Copying())
    gone = weakref.ref(model[0])
    betahook.attach(model, controller="monitor").detach()
    del model
    gc.collect()
    assert gone() is None
