"""A softmax that is written out is one; what else is made of exponentials leaves the module alone."""

import gc
import weakref

import pytest
import torch
from torch import nn

import betahook
from support.attention import HEADS, LENGTH, WIDTH
from support.mixing import ROOT, check_doubled, check_measured, make

MASKED = torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1)
X = torch.randn(2, LENGTH, WIDTH, generator=torch.Generator().manual_seed(0))


def scores_of(q, k):
    return q @ k.mT * ROOT


def written_out(scores):
    exponentials = torch.exp(scores - scores.amax(-1, keepdim=True))
    return exponentials / exponentials.sum(dim=-1, keepdim=True)


def without_maximum(scores):
    exponentials = scores.exp()
    return torch.div(exponentials, torch.sum(exponentials, 3, keepdim=True))


def in_names_of_numpy(scores):
    exponentials = torch.exp(scores)
    return torch.true_divide(exponentials, exponentials.sum(axis=(-1,), keepdims=True))


@pytest.mark.parametrize("softmax", [written_out, without_maximum, in_names_of_numpy])
def test_a_softmax_that_is_written_out(softmax):
    model = make(lambda module, q, k, v: softmax(scores_of(q, k)) @ v)
    check_measured(model, X)
    check_doubled(model, X)


def test_it_says_what_a_softmax_of_torch_says():
    said = []
    for softmax in (written_out, lambda scores: scores.softmax(-1)):
        model = make(lambda module, q, k, v, softmax=softmax: softmax(scores_of(q, k).masked_fill(MASKED, -1e9)) @ v)
        with betahook.attach(model, controller="monitor") as hook:
            model(X).square().mean().backward()
            hook.step()
            said.append(hook.metrics())
    assert said[0].keys() == said[1].keys() > {"entropy/1", "sink/1", "sensitivity/1"}
    for name, value in said[0].items():
        assert value == pytest.approx(said[1][name], rel=1e-4), name


class Written(nn.Module):
    """Its code has no softmax by name."""

    def __init__(self):
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x):
        q, k, v = (p(x).unflatten(-1, (HEADS, -1)).transpose(1, 2) for p in (self.q, self.k, self.v))
        return (written_out(scores_of(q, k)) @ v).transpose(1, 2).flatten(2)


class WrittenAttention(Written):
    pass


def test_a_module_is_found_by_its_name_and_a_trial():
    with betahook.attach(nn.Sequential(WrittenAttention()), controller="monitor") as hook:
        assert (hook.layers["0"].heads, hook.layers["0"].head_dim) == (HEADS, WIDTH // HEADS)
        assert hook.layers["0"].weight_std_q > 0
    with pytest.raises(betahook.UnsupportedModelError):
        betahook.attach(nn.Sequential(Written()))


def masked_afterwards(scores):
    exponentials = scores.exp() * ~MASKED
    return exponentials / exponentials.sum(-1, keepdim=True)


def changed(change):
    def weigh(scores):
        exponentials = scores.exp()
        with torch.no_grad():
            change(exponentials)
        return exponentials / exponentials.sum(-1, keepdim=True)

    return weigh


def with_one_key_more(scores):
    exponentials = scores.exp()
    return exponentials / (1 + exponentials.sum(-1, keepdim=True))


def with_changed_sums(change):
    def weigh(scores):
        exponentials = scores.exp()
        sums = exponentials.sum(-1, keepdim=True)
        with torch.no_grad():
            change(sums)
        return exponentials / sums

    return weigh


def over_another_axis(scores):
    exponentials = scores.exp()
    return exponentials / exponentials.sum(-2, keepdim=True)


def over_all(scores):
    exponentials = scores.exp()
    return exponentials / exponentials.sum()


def by_the_sums_of_others(scores):
    return scores.exp() / (2 * scores).exp().sum(-1, keepdim=True)


def rounded(scores):
    exponentials = scores.exp()
    return torch.div(exponentials, exponentials.sum(-1, keepdim=True), rounding_mode="floor")


@pytest.mark.parametrize(
    "weigh",
    [
        *(masked_afterwards, with_one_key_more, over_another_axis, over_all, by_the_sums_of_others, rounded),
        with_changed_sums(lambda sums: sums.add_(1)),
        with_changed_sums(lambda sums: sums[:, 0].add_(1)),
        with_changed_sums(lambda sums: sums.__setitem__(0, 1)),
        changed(lambda exponentials: exponentials.masked_fill_(MASKED, 0)),
        changed(lambda exponentials: torch.mul(exponentials, ~MASKED, out=exponentials)),
        changed(lambda exponentials: exponentials.__setitem__((..., MASKED), 0)),
        changed(lambda exponentials: exponentials[:, :, 0].mul_(0.5)),
    ],
)
def test_what_is_no_softmax_is_left_alone(weigh):
    model = make(lambda module, q, k, v: weigh(scores_of(q, k)) @ v)
    expected = model(X)
    with betahook.attach(model, controller="monitor") as hook:
        model(X)
        assert "exp at test_exponentials.py:" in hook.layers["1"].refusal
        assert torch.equal(model(X), expected)


def test_no_logits_are_kept_for_the_backward():
    kept = []

    def weigh(module, q, k, v):
        logits = scores_of(q, k)
        kept.append(weakref.ref(logits))
        return without_maximum(logits) @ v

    model = make(weigh)
    gc.disable()
    try:
        with betahook.attach(model, controller="monitor"):
            output = model(X)
            assert kept[-1]() is None
            output.sum().backward()
    finally:
        gc.enable()


def test_logits_that_change_afterwards_are_not_recorded():
    def weigh(module, q, k, v):
        logits = scores_of(q, k)
        exponentials = logits.exp()
        with torch.no_grad():
            logits.mul_(2)
        return exponentials / exponentials.sum(-1, keepdim=True) @ v

    model = make(weigh)
    with betahook.attach(model, controller="monitor") as hook:
        model(X)
        assert hook.layers["1"].refusal is not None
