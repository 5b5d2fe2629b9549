"""The check by numbers: it sees a trace that is wrong, and takes no rounding for one."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import betahook
from betahook.tap.by_hand.handlers import HANDLERS
from betahook.tap.by_hand.rearranging import keep
from betahook.tap.by_hand.shadows import GAIN, Shadows
from betahook.tap.by_hand.traces import Scores
from support.attention import HEADS, WIDTH, Block

LENGTH = 256


def make(mix):
    """A model with one attention, whose values are `mix(q, k, v)`."""
    torch.manual_seed(0)

    class HandAttention(Block):
        def by_which_it_is_known_as_attention(self, q, k, v):
            return (q @ k.mT).softmax(-1) @ v

    model = nn.Sequential(HandAttention(mix))
    model[0].q_proj.weight.data *= 4
    return model


def in_float32(q, k, v):
    return (q @ k.mT * 0.3).float().softmax(-1).to(v.dtype) @ v


def scaled_in_float32(q, k, v):
    return ((q @ k.mT).float() * 0.3).softmax(-1).to(v.dtype) @ v


def in_float32_itself(q, k, v):
    return F.softmax(q @ k.mT * 0.3 + torch.zeros(LENGTH), -1, dtype=torch.float32).to(v.dtype) @ v


def beside_a_large_bias(q, k, v):
    slopes = torch.tensor([1.0, 0.5, 0.25, 0.125], dtype=q.dtype).view(HEADS, 1, 1)
    return (q @ k.mT * 0.3 + slopes * torch.arange(LENGTH)).softmax(-1) @ v


@pytest.mark.parametrize("autocast", [False, True], ids=["", "autocast"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("mix", [in_float32, scaled_in_float32, in_float32_itself, beside_a_large_bias])
def test_scores_of_half_precision_are_as_exact_as_they_can_be(mix, dtype, autocast):
    """A softmax in float32 does not undo the rounding of its scores."""
    model, x = make(mix), torch.randn(2, LENGTH, WIDTH)
    with betahook.attach(model, controller="monitor") as hook, torch.autocast("cpu", dtype, enabled=autocast):
        model(x) if autocast else model.to(dtype)(x.to(dtype))
        layer = hook.layers["0"]
        assert layer.refusal is None
    q, k = (model[0].split(p.double()(x.double())) for p in (model[0].q_proj, model[0].k_proj))
    assert float(layer.statistics.std) == pytest.approx(float((q @ k.mT).detach().std()), rel=0.02)


@pytest.mark.parametrize("wrong", [{"factor": 0.15}, {"factor": 0.302}, {"factor": -0.3}], ids=str)
def test_a_factor_that_is_not_the_true_one_is_contradicted(wrong):
    value = torch.randn(1, 2, 5, 7, generator=torch.Generator().manual_seed(7))
    logits = 0.3 * value
    logits[..., 0, :] = -1e9  # no key is left to this query
    shadows, scores = Shadows(), Scores(factor=0.3, value=value)
    shadows.put(logits, logits + (GAIN - 1) * 0.3 * value)
    assert not shadows.contradict(scores, logits, -1)
    assert shadows.contradict(scores._replace(**wrong), logits, -1)


def test_attention_that_is_followed_wrongly_is_left_alone(monkeypatch):
    monkeypatch.setitem(HANDLERS, "tanh", keep)
    model = make(lambda q, k, v: torch.tanh(q @ k.mT).softmax(-1) @ v)
    with betahook.attach(model, controller="monitor") as hook:
        model(torch.randn(2, LENGTH, WIDTH))
        assert "do not follow beta as its operations say" in hook.layers["0"].refusal


def test_rows_that_an_addend_masks_as_a_whole_contradict_nothing():
    """Of a padded query nothing is left but scores beside -1e4, and another beta changes these."""

    def mix(q, k, v):
        logits = torch.where(torch.ones(LENGTH, LENGTH).tril().bool(), q @ k.mT * 0.3, -1e4)
        return (logits - 1e4 * (torch.arange(LENGTH) < 3)).softmax(-1) @ v

    model = make(mix)
    with betahook.attach(model, controller="monitor", when="always") as hook:
        model(torch.randn(2, LENGTH, WIDTH))
        layer = hook.layers["0"]
        assert layer.refusal is None
        assert int(layer.statistics.count) == 2 * HEADS * (LENGTH - 3) * (LENGTH - 2) / 2


def with_noise(q, k, v):
    scores = q @ k.mT * 0.3
    return (scores + torch.randn_like(scores)).softmax(-1) @ v


def with_noise_in_place(q, k, v):
    scores = q @ k.mT * 0.3
    return (scores + torch.empty_like(scores).normal_()).softmax(-1) @ v


def with_pairs_left_out(q, k, v):
    scores = q @ k.mT * 0.3
    return scores.masked_fill(torch.rand_like(scores) < 0.1, -torch.inf).softmax(-1) @ v


@pytest.mark.parametrize("mix", [with_noise, with_noise_in_place, with_pairs_left_out])
def test_nothing_random_is_run_twice(mix):
    model, x = make(mix), torch.randn(2, LENGTH, WIDTH)

    def forward():
        torch.manual_seed(1)
        return model(x), torch.rand(1)

    (alone, next_alone), hook = forward(), betahook.attach(model, controller="monitor")
    hooked, next_hooked = forward()
    assert torch.equal(hooked, alone)
    assert torch.equal(next_hooked, next_alone)
    assert hook.layers["0"].refusal is None
