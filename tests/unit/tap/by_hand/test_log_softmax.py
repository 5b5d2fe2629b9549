"""Scores that pass a log_softmax are those of the softmax behind it, if there is one."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import betahook
from support.attention import HEADS, LENGTH, WIDTH
from support.mixing import ROOT, check_doubled, check_measured, make

PRIOR = torch.randn(2, 1, LENGTH, LENGTH, generator=torch.Generator().manual_seed(1)).softmax(-1)
X = torch.randn(2, LENGTH, WIDTH, generator=torch.Generator().manual_seed(0))


def logs_of(q, k):
    return F.log_softmax(q @ k.mT * ROOT, dim=-1)


def masked(logs):
    return logs.masked_fill(torch.ones(logs.shape[-2:], dtype=torch.bool).triu(1), -torch.inf)


def written_out(logs):
    exponentials = logs.exp()
    return exponentials / exponentials.sum(-1, keepdim=True)


SOFTMAXES = {
    "masked": lambda logs: masked(logs).softmax(-1),
    "with a prior, as in NeMo": lambda logs: F.softmax(logs + PRIOR.log(), dim=-1),
    "written out": lambda logs: written_out(masked(logs)),
    "after another log_softmax": lambda logs: F.log_softmax(masked(logs), dim=-1).exp(),
}
"""Softmaxes behind a log_softmax."""

ENDS = {
    "exponentials": torch.exp,
    "exponentials in place": lambda logs: logs.clone().exp_(),
    "for each sample": lambda logs: torch.stack([each.exp() for each in logs]),
    "logs alone": lambda logs: logs,
    "sharpened": lambda logs: (5 * logs.exp()).softmax(-1),
    "turned": lambda logs: logs.mT.exp().mT,
}
"""Ways to attend without a further softmax."""


@pytest.mark.parametrize("name", [*SOFTMAXES, *ENDS])
def test_beta_acts_on_scores_that_pass_a_log_softmax(name):
    weigh = {**SOFTMAXES, **ENDS}[name]
    check_doubled(make(lambda module, q, k, v: weigh(logs_of(q, k)) @ v), X)


@pytest.mark.parametrize("name", SOFTMAXES)
def test_scores_are_measured_at_the_softmax_behind_a_log_softmax(name):
    seen = []

    def mix(module, q, k, v):
        seen.append(SOFTMAXES[name](logs_of(q, k)))
        return seen[-1] @ v

    model = make(mix)
    with betahook.attach(model, controller="monitor", interval=1) as hook:
        model(X).sum().backward()
        found, weights = hook.layers["1"].statistics, seen[-1].detach()
    assert found.count == (weights > 0).sum()
    assert found.entropy == pytest.approx(-torch.xlogy(weights, weights).sum(-1).mean().item(), rel=1e-5)


@pytest.mark.parametrize("name", ENDS)
def test_a_log_softmax_may_be_the_last_one(name):
    check_measured(make(lambda module, q, k, v: ENDS[name](logs_of(q, k)) @ v), X)


def test_it_may_be_beside_a_softmax():
    kept = []

    def mix(module, q, k, v):
        scores = q @ k.mT * ROOT
        kept.append((F.log_softmax(scores, -1) * 0.1).sum())
        return scores.softmax(-1) @ v

    check_measured(make(mix), X, times=2)
    check_doubled(make(mix), X)


def test_scores_may_change_in_place_behind_it():
    """Autograd keeps the output of a log_softmax, not its input."""

    def mix(module, q, k, v):
        scores = (q * ROOT) @ k.mT
        weights = F.log_softmax(scores, -1).exp()
        scores.zero_()
        return weights @ v

    check_measured(make(mix), X)


def test_it_may_replace_its_scores():
    def mix(module, q, k, v):
        scores = q @ k.mT * ROOT
        for sample in range(len(scores)):
            scores[sample] = scores[sample].log_softmax(-1)
        return scores.exp() @ v

    check_measured(make(mix), X)
    check_doubled(make(mix), X)


def test_scores_of_another_product_may_be_added_behind_it():
    model = make(lambda module, q, k, v: (logs_of(q, k) + q @ k.flip(-1).mT * ROOT).softmax(-1) @ v)
    check_doubled(model, X)
    with betahook.attach(model, controller="monitor", interval=1) as hook:
        model(X).sum().backward()
        assert hook.layers["1"].statistics.count == len(X) * HEADS * LENGTH**2


def test_what_it_makes_of_values_is_no_scores():
    model = make(lambda module, q, k, v: (logs_of(q, k) @ v).softmax(-1))
    with betahook.attach(model, controller="monitor") as hook:
        model(X)
        assert "takes a tensor computed from attention weights" in hook.layers["1"].refusal


class Aligner(nn.Module):
    """Neither its name nor its attributes say what it computes."""

    def __init__(self):
        super().__init__()
        self.q, self.k = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        q, k = (layer(x).unflatten(-1, (HEADS, -1)).transpose(1, 2) for layer in (self.q, self.k))
        return masked(logs_of(q, k)).softmax(-1) @ x[:, None]


def test_a_trial_finds_it():
    with betahook.attach(nn.Sequential(Aligner()), controller="monitor") as hook:
        assert (hook.layers["0"].heads, hook.layers["0"].head_dim) == (HEADS, WIDTH // HEADS)


def test_a_scale_between_both_leaves_the_module_alone():
    model = make(lambda module, q, k, v: (2 * logs_of(q, k)).softmax(-1) @ v)
    with betahook.attach(model, controller="monitor") as hook:
        model(X)
        assert hook.layers["1"].refusal.endswith("and an earlier one receive scores that are scaled differently")
