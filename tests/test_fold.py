"""Folding: the plain model afterwards gives the outputs of the hooked one before."""

import copy

import pytest
import torch
from torch import nn

import betahook
from models import CONFIGS, NORMED, build, inputs


def move(hook, per_head):
    """Give every layer, or every head, a beta of its own."""
    for index, layer in enumerate(hook.layers.values()):
        factor = torch.linspace(0.5, 1.5, layer.heads) if per_head else 1.3 + 0.1 * index
        layer.beta = factor * layer.beta_default


FOLDABLE = [family for family in (*CONFIGS, *NORMED) if family != "stablelm"]
ONE_NORM_FOR_ALL_HEADS = {"qwen3", "gemma3", "persimmon"}


@pytest.mark.parametrize(
    ("family", "per_head"),
    [(f, False) for f in FOLDABLE] + [(f, True) for f in FOLDABLE if f not in ONE_NORM_FOR_ALL_HEADS],
)
def test_the_plain_model_keeps_the_outputs(family, per_head):
    model, batch = build(family).eval(), inputs(family)
    hook = betahook.attach(model, controller="monitor")
    before = model(**batch).logits
    move(hook, per_head)
    adapted = model(**batch).logits
    assert (adapted - before).abs().max() > 1e-3
    betahook.fold(model)
    assert not hook.attached
    torch.testing.assert_close(model(**batch).logits, adapted, rtol=1e-5, atol=1e-5)


def test_the_folded_model_saves_and_loads_like_any_other(tmp_path):
    model, batch = build("gpt2").eval(), inputs("gpt2")
    with betahook.attach(model, controller="monitor") as hook:
        model(**batch)
        move(hook, per_head=True)
        adapted = model(**batch).logits
        betahook.fold(hook)
    model.save_pretrained(tmp_path)
    plain = type(model).from_pretrained(tmp_path, attn_implementation="eager").eval()
    torch.testing.assert_close(plain(**batch).logits, adapted, rtol=1e-5, atol=1e-5)


def adapter(model):
    class Adapter(nn.Module):
        def __init__(self, base_layer):
            super().__init__()
            self.base_layer = base_layer

        def forward(self, x):
            return self.base_layer(x) + 1

    attention = model.model.layers[0].self_attn
    attention.q_proj = Adapter(attention.q_proj)


def share(model):
    first, second = (layer.self_attn for layer in model.model.layers)
    second.q_proj.weight = first.q_proj.weight


def poison(model):
    with torch.no_grad():
        model.model.layers[1].self_attn.q_proj.weight[0, 0] = torch.inf


@pytest.mark.parametrize(
    ("family", "change", "per_head", "message"),
    [
        ("qwen3", None, True, r"model.layers.0.self_attn \(Qwen3Attention\): its query norm is shared by all heads"),
        ("stablelm", None, False, "its query norm has no weight"),
        ("llama", adapter, False, "wrapped by an adapter; merge that first.*keep the hook attached"),
        ("llama", share, False, "share a query weight"),
        ("llama", poison, False, "would be NaN or infinite"),
        (
            "llama",
            lambda model: setattr(model.model.layers[0].self_attn, "clip_qkv", 8.0),
            False,
            "it clips q, k and v",
        ),
    ],
)
def test_refusals_change_nothing(family, change, per_head, message):
    model, batch = build(family).eval(), inputs(family)
    if change is not None:
        change(model)
    with betahook.attach(model, controller="monitor") as hook:
        model(**batch)
        move(hook, per_head)
        weights = copy.deepcopy(model.state_dict())
        with pytest.raises(betahook.FoldError, match=message):
            betahook.fold(model)
        assert hook.attached
        assert all(torch.equal(value, weights[name]) for name, value in model.state_dict().items())


def test_without_a_hook_there_is_nothing_to_fold():
    model = build("llama")
    with pytest.raises(ValueError, match=r"LlamaForCausalLM is not hooked: call betahook.attach\(model\) first"):
        betahook.fold(model)
    hook = betahook.attach(model)
    hook.detach()
    with pytest.raises(ValueError, match="detached hook"):
        betahook.fold(hook)


def test_beta_set_before_any_forward_cannot_be_folded_yet():
    with betahook.attach(build("llama")) as hook:
        hook.layers["model.layers.0.self_attn"].beta = 0.5
        with pytest.raises(betahook.FoldError, match="unknown before the first forward; run one"):
            betahook.fold(hook)
