"""The state of a hook: saved in the middle of a run, it goes on with the same bits."""

import copy

import pytest
import torch

import betahook
from support.attention import LengthDependent, make
from support.models import build, inputs
from support.training import LAYER, train


def test_state_dict_goes_on_bit_identically():
    model = build("llama")
    hook = betahook.attach(
        model, controller=[betahook.Search(window=2, warmup=0, rise=False), betahook.Cap(2.0)], interval=2
    )
    train(model, hook, 3)
    model(**inputs("llama"))  # in the middle of a step
    weights, state = copy.deepcopy(model.state_dict()), copy.deepcopy(hook.state_dict())
    expected = train(model, hook, 5)
    hook.detach()

    model.load_state_dict(weights)
    again = betahook.attach(
        model, controller=[betahook.Search(window=2, warmup=0, rise=False), betahook.Cap(2.0)], interval=2
    )
    again.load_state_dict(state)
    assert train(model, again, 5) == expected
    again.detach()


def test_foreign_states_are_refused_and_change_nothing():
    with betahook.attach(build("llama")) as hook, betahook.attach(build("gpt2")) as other:
        state = hook.state_dict()
        for foreign, message in (
            ({**state, "version": 1}, "expected a betahook state of version 3, got 1"),
            ({**state, "version": 99}, "of version 99, and this betahook reads versions up to 3: update it"),
            (
                {**state, "gamma": 1},
                "or of a newer betahook than this: it has entries that are unknown, gamma",
            ),
            ({**state, "options": {}}, r"options should hold per_head, True or False, got \{\}"),
            ({**state, "beta": state["beta"].to("meta")}, "beta is on the meta device, which holds no numbers"),
            ([], "expected a betahook state of version 3, got 'list'"),
            (
                hook.model.state_dict(),
                r"a dictionary without a version: give what hook.state_dict\(\) returned",
            ),
            (other.state_dict(), f"other layers; these differ: {LAYER}.*transformer.h.0.attn"),
            ({**state, "controllers": []}, "belongs to other controllers: expected .*Search"),
        ):
            with pytest.raises(ValueError, match=message):
                hook.load_state_dict(foreign)
        assert repr(hook.state_dict()) == repr(state)


def test_a_state_in_the_middle_of_a_step_has_its_sensitivity():
    model = build("llama")
    hook = betahook.attach(model, controller=betahook.Gradient())
    train(model, hook, 3)
    model(**inputs("llama")).loss.backward()
    model.zero_grad()
    weights, state = copy.deepcopy(model.state_dict()), copy.deepcopy(hook.state_dict())
    expected = train(model, hook, 5)
    hook.detach()
    model.load_state_dict(weights)
    with betahook.attach(model, controller=betahook.Gradient()) as again:
        again.load_state_dict(state)
        assert train(model, again, 5) == expected


def test_a_layer_that_is_left_alone_takes_no_beta_from_a_state():
    model, short, long = make(LengthDependent), torch.randn(2, 4, 32), torch.randn(2, 8, 32)
    expected = model(short)
    with betahook.attach(model, "monitor") as hook:
        model(short).sum().backward()
        hook.step()
        hook.layers["1"].beta = 2.0
        state = hook.state_dict()
    with betahook.attach(model, "monitor") as hook:
        model(long).sum().backward()
        hook.step()
        layer = hook.layers["1"]
        assert "sort" in layer.refusal
        hook.load_state_dict(state)
        assert layer.beta == layer.beta_default
        assert layer.statistics.count == 0
        assert torch.equal(model(short), expected)
