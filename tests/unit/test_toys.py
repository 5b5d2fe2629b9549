"""One toy of each kind that CONTRIBUTING.md tells how to add, without a change to the package."""

import json
import math
from dataclasses import dataclass

import pytest
import torch
import transformers
from torch import nn
from transformers.masking_utils import sdpa_mask

import betahook
from betahook.models import families
from support.models import build, derivative, inputs
from support.training import LAYER, train


class ToyAttention(nn.Module):
    """Scales its query before it asks for its attention, as OPT does: betahook cannot read that off its code."""

    def __init__(self):
        super().__init__()
        self.num_heads, self.head_dim, self.is_causal = 2, 4, False
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(8, 8) for _ in range(3))

    def forward(self, x):
        query, key, value = (
            projection(x).unflatten(-1, (2, 4)).transpose(1, 2)
            for projection in (self.q_proj, self.k_proj, self.v_proj)
        )
        attend = transformers.AttentionInterface().get_interface("sdpa", None)
        return attend(self, 0.25 * query, key, value, None, scaling=1.0)[0].flatten(2)


def test_a_model_family(monkeypatch):
    monkeypatch.setitem(families.FACTS, "ToyAttention", families.Facts(prescale=lambda module: 0.25))
    torch.manual_seed(0)
    model, x = nn.Sequential(ToyAttention()), torch.randn(2, 6, 8)
    with betahook.attach(model, controller="monitor") as hook:
        model(x)
        layer = hook.layers["0"]
        assert layer.beta_default == 0.25
        query, key = (
            projection(x).unflatten(-1, (2, 4)).transpose(1, 2) for projection in (model[0].q_proj, model[0].k_proj)
        )
        scores = (query @ key.mT).double().transpose(0, 1).flatten(1)
        torch.testing.assert_close(layer.head_statistics.std, scores.std(1, correction=0), rtol=1e-5, atol=0)


@dataclass(frozen=True)
class Halve(betahook.Controller):
    """Halve beta in every `every`-th step; counts the steps in its memory."""

    every: int = 2

    def start(self, beta):
        return {"steps": torch.zeros_like(beta)}

    def update(self, beta, observation, state):
        steps = state["steps"] + 1
        return torch.where(steps % self.every == 0, beta / 2, beta), {"steps": steps}


def test_a_controller():
    own = 8**-0.5
    with betahook.attach(build("llama"), controller=Halve()) as hook:
        path = train(hook.model, hook, 3)
        saved = hook.state_dict()
    assert path == [[pytest.approx(beta)] * 2 for beta in (own, own / 2, own / 2)]
    with betahook.attach(build("llama"), controller=Halve()) as hook:
        hook.load_state_dict(saved)
        assert train(hook.model, hook, 1) == [[pytest.approx(own / 4)] * 2]
    with (
        betahook.attach(build("llama"), controller=Halve(every=3)) as hook,
        pytest.raises(ValueError, match=r"Halve(.|\n)*every"),
    ):
        hook.load_state_dict(saved)


def test_a_tracker(tmp_path):
    """A line of JSON a step: all that a tracker needs is `hook.metrics()`."""
    file = tmp_path / "metrics.jsonl"
    with betahook.attach(build("llama"), controller="monitor", interval=1) as hook, file.open("w") as stream:
        for _ in range(2):
            train(hook.model, hook, 1)
            stream.write(json.dumps({"step": hook.steps, **hook.metrics()}) + "\n")
    first, second = map(json.loads, file.read_text().splitlines())
    assert (first["step"], second["step"]) == (1, 2)
    assert first.keys() == second.keys()
    assert first[f"score_std/{LAYER}"] != second[f"score_std/{LAYER}"]


def toy_attention(module, query, key, value, mask, scaling, **options):
    """Attention in einsum; `mask` is boolean or None, as `sdpa_mask` makes it."""
    key, value = (x.repeat_interleave(query.shape[1] // x.shape[1], 1) for x in (key, value))
    logits = scaling * torch.einsum("bhqd,bhkd->bhqk", query, key)
    if mask is None:
        mask = torch.ones_like(logits, dtype=torch.bool).tril()
    weights = logits.masked_fill(~mask, -math.inf).softmax(-1)
    return torch.einsum("bhqk,bhkd->bhqd", weights, value).transpose(1, 2), weights


def test_an_attention_backend(monkeypatch):
    """One that is registered with transformers needs nothing from betahook, if its mask is registered too."""
    registries = {transformers.AttentionInterface: toy_attention, transformers.AttentionMaskInterface: sdpa_mask}
    for registry, function in registries.items():
        monkeypatch.setattr(registry, "_global_mapping", dict(registry._global_mapping))  # undone after the test
        registry.register("toy", function)
    found = []
    for backend in ("toy", "sdpa"):
        model = build("llama", backend)
        with betahook.attach(model, controller="monitor") as hook:
            loss = model(**inputs("llama")).loss
            loss.backward()
            layer = hook.layers[LAYER]
            statistics = layer.statistics
            found.append([loss, statistics.count, statistics.std, statistics.entropy, statistics.sensitivity])
            if backend == "toy":
                slope = derivative(layer, lambda model=model: model(**inputs("llama")).loss)
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-6)
    assert found[0][-1].item() == pytest.approx(slope, rel=1e-2)


def logit_std(hook):
    """Standard deviation of the logits by layer, from sums that betahook keeps already."""
    return {name: layer.beta * layer.statistics.std.item() for name, layer in hook.layers.items()}


def test_a_statistic():
    model = build("llama", "eager")
    with betahook.attach(model, controller="monitor") as hook:
        model(**inputs("llama"))
        whole = logit_std(hook)
        for layer in hook.layers.values():
            layer.beta = layer.beta / 2
        assert logit_std(hook) == {name: pytest.approx(std / 2) for name, std in whole.items()}
    assert whole.keys() == hook.layers.keys()
