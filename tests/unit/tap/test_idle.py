"""Steps in which a layer is neither measured nor scaled: it runs as if there were no hook."""

import copy

import pytest
import torch
from torch import nn

import betahook
from support.attention import LENGTH, WIDTH, ByHandAttention, FusedAttention, make
from support.models import build, inputs
from support.operations import Operations
from support.training import LAYER, enable_checkpointing, train

FAMILIES = ["llama", pytest.param("t5", marks=pytest.mark.oldest_skips("its attention is written by hand"))]


def operations(step):
    """All that a forward and its backward launch, by name, from the second one on: gradients are then added to."""
    step()
    with Operations() as counted:
        step()
    return counted.calls


def operations_of_idle(model, step):
    """The same, hooked; the layers have their turn in the first step, and much later."""
    with betahook.attach(model, controller="monitor", interval=100) as hook:
        with Operations() as first:
            step()
        hook.step()
        with Operations() as second:
            step()
    assert first.calls.total() > second.calls.total()
    return second.calls


@pytest.mark.parametrize("family", FAMILIES)
def test_nothing_is_launched_for_a_layer_out_of_its_turn(family):
    model, batch = build(family), inputs(family)

    def step():
        model(**batch).loss.backward()

    assert operations(step) == operations_of_idle(model, step)


@pytest.mark.parametrize("kind", [FusedAttention, ByHandAttention])
def test_nor_for_attention_of_users(kind):
    model, x = make(kind), torch.randn(2, LENGTH, WIDTH)

    def step():
        model(x).sum().backward()

    assert operations(step) == operations_of_idle(model, step)


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_checkpointed_layer_is_idle_in_both_of_its_forwards(family, reentrant):
    gradients = []
    for hooked in (False, True):
        model, batch = build(family), inputs(family)
        enable_checkpointing(model, reentrant)
        hook = betahook.attach(model, controller="monitor", interval=3) if hooked else None
        for _ in range(4):
            model(**batch).loss.backward()
            if hook is not None:
                hook.step()
        gradients.append([parameter.grad for parameter in model.parameters()])
    for one, other in zip(*gradients, strict=True):
        assert torch.equal(one, other)


def by_hand(hook, state):
    hook.layers[LAYER].beta = 2.0


def loaded(hook, state):
    hook.load_state_dict(state)


@pytest.mark.parametrize("setting", [by_hand, loaded])
def test_a_beta_acts_at_once(setting):
    model, batch = build("llama"), inputs("llama")
    weights = copy.deepcopy(model.state_dict())
    with betahook.attach(model, controller="monitor") as hook:
        hook.layers[LAYER].beta = 2.0
        expected = model(**batch).logits
        train(model, hook, 2)
        state = hook.state_dict()
    model.load_state_dict(weights)
    with betahook.attach(model, controller="monitor") as hook:
        plain = model(**batch).logits
        model(**batch).loss.backward()
        hook.step()
        setting(hook, state)
        scaled = model(**batch).logits
    assert torch.equal(scaled, expected)
    assert not torch.equal(scaled, plain)


def test_a_gain_acts_for_a_while():
    model, batch = build("llama"), inputs("llama")
    with betahook.attach(model, controller="monitor") as hook:
        train(model, hook, 2)
        plain = model(**batch).logits
        layer = hook.layers[LAYER]
        with layer.acting(torch.full((layer.heads,), 2.0)):
            assert not torch.equal(model(**batch).logits, plain)
        assert torch.equal(model(**batch).logits, plain)


def test_evaluation_goes_on_as_before_the_first_step():
    """Torch's fast path makes a row without any key NaN, which is 0 with gradients."""
    attention = nn.MultiheadAttention(WIDTH, 4, batch_first=True)
    x, padding = torch.randn(2, LENGTH, WIDTH), torch.tensor([[False], [True]]).expand(2, LENGTH)

    @torch.no_grad()
    def evaluated():
        attention.eval()
        output = attention(x, x, x, key_padding_mask=padding, need_weights=False)[0]
        attention.train()
        return output

    with betahook.attach(attention, controller="monitor") as hook:
        before = evaluated()
        for _ in range(2):
            attention(x, x, x)[0].sum().backward()
            hook.step()
        assert torch.equal(evaluated(), before)
    assert evaluated().isnan().any()


def test_a_layer_is_seen_again_in_its_turn():
    """Its scores, and what its model's own beta is by then."""
    model, batch = build("llama"), inputs("llama")
    with betahook.attach(model, controller="monitor", interval=3) as hook:
        layer = hook.layers[LAYER]
        seen = []
        for step in range(4):
            if step == 1:
                layer.module.scaling *= 2
            model(**batch).loss.backward()
            hook.step()
            seen.append((int(layer.statistics.count), layer.beta / 8**-0.5))
    assert [round(beta, 4) for _, beta in seen] == [1, 1, 1, 2]
    assert seen[0] == seen[1] == seen[2]
