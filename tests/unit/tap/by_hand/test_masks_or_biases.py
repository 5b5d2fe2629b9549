"""What a module adds to its scores: a mask, whose pairs do not count, or a part of the scores."""

import math

import pytest
import torch
import torch.nn.functional as F
import torch.utils.checkpoint

import betahook
from support.attention import LENGTH
from support.mixing import ROOT, make, raw_scores

MASKED = torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1)


FAR = {
    "largest subtracted": lambda s: s - s.max(-1, keepdim=True).values,
    "largest subtracted, detached": lambda s: s - s.amax(dim=-1, keepdim=True).detach(),
    "mean subtracted": lambda s: s - s.mean(-1, keepdim=True),
    "soft cap": lambda s: 5 * torch.tanh(s / 5),
    "clamped": lambda s: s.clamp(-5, 5),
    "clamped from below": lambda s: s.clamp(min=-50),
    "far bias": lambda s: s - 40.0 * (torch.arange(LENGTH)[:, None] - torch.arange(LENGTH)).abs(),
    "bias subtracted": lambda s: s - torch.arange(LENGTH) * 20.0,
    "a bound subtracted": lambda s: s - torch.tensor(500.0),
    "a bound of each row subtracted": lambda s: s - torch.linspace(40, 400, LENGTH)[:, None].round(decimals=-2),
    "bias in front of far keys": lambda s: s - torch.arange(LENGTH) * 20.0 - 100.0,
}


@pytest.fixture(params=["of the user", "of transformers"])
def by_whom(request):
    """Tell who wrote the class, since classes of transformers are followed with less suspicion."""

    def write(model):
        if request.param == "of transformers":
            type(model[1]).__module__ = "transformers.models.made_up"
        return model

    return write


@pytest.mark.parametrize("way", FAR)
def test_what_is_no_mask_is_counted(x, way, by_whom):
    model = by_whom(make(lambda module, q, k, v: FAR[way](q @ k.mT * ROOT).softmax(-1) @ v))
    x = 20 * x
    with betahook.attach(model, controller="monitor") as hook:
        model(x)
        measured = hook.layers["1"].statistics
    scores = raw_scores(model, x)
    assert measured.count == scores.numel()
    torch.testing.assert_close(measured.max_score.double(), scores.abs().max(), rtol=1e-4, atol=0)


LOWEST = torch.finfo(torch.float32).min
MASKS = {
    "filled": lambda s: s.masked_fill(MASKED, -100.0),
    "filled in place": lambda s: s.masked_fill_(MASKED, -1e9),
    "chosen": lambda s: torch.where(MASKED, -1e9, s),
    "chosen from": lambda s: s.where(~MASKED, torch.tensor(-1e9)),
    "assigned": lambda s: assigned(s),
    "added to a part": lambda s: added_to_a_part(s),
    "added": lambda s: s + torch.zeros(LENGTH, LENGTH).masked_fill(MASKED, -1e4),
    "added infinity": lambda s: s + torch.full((LENGTH, LENGTH), -math.inf).triu(1),
    "added lowest": lambda s: s + torch.full((LENGTH, LENGTH), LOWEST).triu(1),
    "added and moved": lambda s: (
        (s + torch.zeros(3, 1, LENGTH, LENGTH).masked_fill(MASKED, -1e4)).view(-1, LENGTH, LENGTH).view_as(s)
    ),
    "added with a far bias": lambda s: (
        s - 30.0 * torch.arange(LENGTH).flip(0) + torch.zeros(LENGTH, LENGTH).masked_fill(MASKED, -1e4)
    ),
    "added in one with a far bias": lambda s: (
        s + (torch.zeros(LENGTH, LENGTH).masked_fill(MASKED, -1e4) - 30.0 * torch.arange(LENGTH).flip(0))
    ),
    "added hundred": lambda s: s + torch.full((LENGTH, LENGTH), -100.0).triu(1),
    "subtracted": lambda s: s - MASKED * 1e9,
    "multiplied and subtracted": lambda s: s * ~MASKED - 1e9 * MASKED.float(),
    "added below a bias": lambda s: s + torch.linspace(0, -300, LENGTH) + torch.full((LENGTH, LENGTH), -1e9).triu(1),
}


def assigned(scores):
    scores[:, :, MASKED] = -math.inf
    return scores


def added_to_a_part(scores):
    """As in minimind."""
    scores[:, :, :, -LENGTH:] += torch.full((LENGTH, LENGTH), -math.inf).triu(1)
    return scores


@pytest.mark.parametrize("way", MASKS)
def test_what_the_code_masks_is_not_counted(x, way, by_whom):
    model = by_whom(make(lambda module, q, k, v: MASKS[way](q @ k.mT * ROOT).softmax(-1) @ v))
    with betahook.attach(model, controller="monitor") as hook:
        model(x)
        measured = hook.layers["1"].statistics
    scores = raw_scores(model, x)[:, :, ~MASKED]
    assert measured.count == scores.numel()
    torch.testing.assert_close(measured.max_score.double(), scores.abs().max(), rtol=1e-4, atol=0)


def test_a_far_bias_of_the_fused_attention_masks_nothing(x):
    bias = -40.0 * (torch.arange(LENGTH)[:, None] - torch.arange(LENGTH)).abs()
    model = make(lambda module, q, k, v: F.scaled_dot_product_attention(q, k, v, bias))
    with betahook.attach(model, controller="monitor") as hook:
        model(x)
        assert hook.layers["1"].statistics.count == raw_scores(model, x).numel()


def test_a_bias_without_data(x):
    """A look at shapes alone: a forward on the meta device, in a pause."""
    bias = torch.zeros(LENGTH, LENGTH, device="meta")
    model = make(lambda module, q, k, v: (q @ k.mT * ROOT + bias).softmax(-1) @ v).to("meta")
    with betahook.attach(model, controller="monitor") as hook:
        with hook.pause():
            model(x.to("meta"))
        assert hook.layers["1"].beta == pytest.approx(ROOT)


def test_an_exploded_logit_behind_a_shift_is_capped(x, by_whom):
    model = make(lambda module, q, k, v: (s := q @ k.mT * ROOT).sub(s.amax(-1, keepdim=True)).softmax(-1) @ v)
    by_whom(model)
    with betahook.attach(model, controller=betahook.Cap(100.0)) as hook:
        for _ in range(3):
            model(100 * x).sum().backward()
            hook.step()
        assert hook.layers["1"].beta * float(raw_scores(model, 100 * x).abs().max()) == pytest.approx(100, rel=1e-3)


@pytest.mark.parametrize(
    ("way", "keys"),
    [
        (lambda s: torch.cat([s, torch.linspace(-1, 1, LENGTH)[:, None].expand(*s.shape[:2], -1, 1)], -1), LENGTH),
        (lambda s: s.masked_fill(MASKED, 1e-9), None),  # for -1e9, and so no mask at all
    ],
    ids=["a sink", "filled with nothing"],
)
def test_the_entropy_is_that_of_the_whole_softmax(x, way, keys):
    model = make(lambda module, q, k, v: way(q @ k.mT * ROOT).softmax(-1)[..., :keys] @ v)
    with betahook.attach(model, controller="monitor") as hook:
        model(x)
        entropy = hook.layers["1"].statistics.entropy
    expected = torch.special.entr(way(raw_scores(model, x) * ROOT).softmax(-1)).sum(-1).mean()
    torch.testing.assert_close(entropy.double(), expected, rtol=1e-5, atol=0)
