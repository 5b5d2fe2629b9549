"""The state of a hook: saved in the middle of a run, it goes on with the same bits."""

import copy
from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch
import torch.distributed.checkpoint as dcp

import betahook
from support.attention import LengthDependent, make
from support.models import build, inputs
from support.training import LAYER, bits, train


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


@pytest.mark.filterwarnings("ignore:torch.distributed is:UserWarning")  # in a single process it says so
@pytest.mark.filterwarnings("ignore:TypedStorage is deprecated:UserWarning")  # which torch 2.6 itself uses
def test_torch_distributed_checkpoint_brings_everything_back(tmp_path):
    """It loads what the state of the fresh hook has, and leaves out the rest of what was saved."""
    rules = [betahook.Search(window=2, warmup=0, rise=False), betahook.Gradient()]
    model = build("llama")
    with betahook.attach(model, controller=rules) as hook:
        train(model, hook, 3)
        dcp.save({"model": model, "betahook": hook}, checkpoint_id=tmp_path)
        saved, expected = bits(hook.state_dict()), train(model, hook, 3)
    with betahook.attach(model, controller=rules) as again:
        dcp.load({"model": model, "betahook": again}, checkpoint_id=tmp_path)
        assert bits(again.state_dict()) == saved
        assert train(model, again, 3) == expected


def test_a_controller_begins_in_the_first_step_wherever_its_state_was_saved():
    @dataclass(frozen=True)
    class Anchored(betahook.Controller):
        """Goes by the beta that it begins with, which is not known before the first forward."""

        def start(self, beta):
            return {"anchor": beta}

        def update(self, beta, observation, state):
            return state["anchor"] * 2, state

    with betahook.attach(build("llama"), controller=Anchored()) as hook:
        state = hook.state_dict()
    with betahook.attach(build("llama"), controller=Anchored()) as hook:
        hook.load_state_dict(state)
        hook.model(**inputs("llama")).loss.backward()
        hook.step()
        assert all(layer.beta == pytest.approx(2 * layer.beta_default) for layer in hook.layers.values())


def test_foreign_states_are_refused_and_change_nothing():
    with betahook.attach(build("llama")) as hook, betahook.attach(build("gpt2")) as other:
        state = hook.state_dict()
        moved = {**state, "controllers": [], "beta": torch.ones_like(state["beta"])}
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
            (
                other.state_dict(),
                f"other layers: only the state has transformer.h.0.attn.*; only this hook has {LAYER}.*same layers=",
            ),
            (moved, "belongs to other controllers, and beta is not the model's own any more: expected .*Search"),
        ):
            with pytest.raises(ValueError, match=message):
                hook.load_state_dict(foreign)
        assert bits(hook.state_dict()) == bits(state)


def test_a_state_of_fewer_layers_says_which_the_hook_has_besides():
    model = build("llama")
    with betahook.attach(model, layers=LAYER) as hook:
        state = hook.state_dict()
    message = r"other layers: only this hook has model\.layers\.1\.self_attn\. Attach to the model"
    with betahook.attach(model) as hook, pytest.raises(ValueError, match=message):
        hook.load_state_dict(state)


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


@pytest.mark.parametrize("steps", [0, 1])
@pytest.mark.parametrize("rule", [betahook.Gradient(), betahook.Decades(window=1)])
def test_a_state_between_a_forward_and_its_step_needs_no_further_forward(rule, steps, caplog):
    model = build("llama")
    with betahook.attach(model, controller=rule) as hook:
        train(model, hook, steps)
        model(**inputs("llama")).loss.backward()
        state = copy.deepcopy(hook.state_dict())
        hook.step()
        expected = [(layer.beta, layer.statistics.std.item()) for layer in hook.layers.values()]
    with betahook.attach(model, controller=rule) as again:
        again.load_state_dict(state)
        again.step()
        assert [(layer.beta, layer.statistics.std.item()) for layer in again.layers.values()] == expected
    assert "no attention was measured" not in caplog.text


def test_a_state_before_the_first_forward_shows_none():
    model = build("llama")
    with betahook.attach(model, controller=betahook.Decades()) as hook:
        state = hook.state_dict()
    with betahook.attach(model, controller=betahook.Decades()) as hook:
        hook.load_state_dict(state)
        with pytest.raises(RuntimeError, match="no forward has reached a hooked layer"):
            hook.step()
        model(input_ids=inputs("llama")["input_ids"]).logits.sum().backward()
        with pytest.raises(RuntimeError, match="the model returned none"):
            hook.step()


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
        assert torch.equal(hook.state_dict()["beta"], state["beta"])


def left_alone_late():
    """A model, a batch that its layer can be followed on, and a hook whose beta of it was lost on another batch."""
    model, short, long = make(LengthDependent), torch.randn(2, 4, 32), torch.randn(2, 8, 32)
    hook = betahook.attach(model, "monitor")
    model(short).sum().backward()
    hook.step()
    hook.layers["1"].beta = 2 * hook.layers["1"].beta_default
    model(long)
    return model, short, hook


def test_a_beta_that_was_lost_is_not_folded_and_acts_in_a_new_hook():
    model, short, hook = left_alone_late()
    with pytest.raises(betahook.FoldError, match="2 times the model's own, no longer acts"):
        betahook.fold(model)
    state = hook.state_dict()
    hook.detach()
    with betahook.attach(model, "monitor") as hook:
        hook.load_state_dict(state)
        expected = model(short)
        assert hook.layers["1"].beta == pytest.approx(2 * hook.layers["1"].beta_default)
        betahook.fold(model)
    torch.testing.assert_close(model(short), expected, rtol=1e-4, atol=1e-4)


def test_a_beta_that_was_lost_can_be_given_up():
    model, short, hook = left_alone_late()
    expected, layer = model(short), hook.layers["1"]
    with pytest.raises(RuntimeError, match="left alone"):
        layer.beta = 2 * layer.beta_default
    layer.head_beta = layer.head_beta_default
    betahook.fold(model)
    assert torch.equal(model(short), expected)


@pytest.mark.parametrize("factor", [1.5, torch.nan])
def test_a_state_that_is_loaded_says_which_beta_the_weights_were_trained_with(factor):
    """In place of the one that was lost; NaN stands for the model's own."""
    _, _, hook = left_alone_late()
    state = hook.state_dict()
    state["beta"] *= factor
    hook.load_state_dict(state)
    torch.testing.assert_close(hook.state_dict()["beta"], state["beta"], rtol=0, atol=0, equal_nan=True)


def test_a_beta_that_was_lost_is_forgotten_once_training_has_gone_on_without_it():
    model, short, hook = left_alone_late()
    model(short).sum().backward()
    for _ in range(hook.settings.interval):
        hook.step()
    assert hook.state_dict()["beta"].isnan().all()
    betahook.fold(model)


@dataclass(frozen=True)
class Doubling(betahook.Controller):
    """Doubles beta whatever it observes, as only a controller may that is judged by the loss."""

    uses_loss: ClassVar[bool] = True

    def update(self, beta, observation, state):
        return 2 * beta, state


def test_a_controller_moves_no_layer_that_is_left_alone():
    model = make(LengthDependent)
    with betahook.attach(model, Doubling()) as hook:
        for length in (4, 8):
            loss = model(torch.randn(2, length, 32)).sum()
            loss.backward()
        assert hook.layers["1"].refusal is not None
        hook.step(loss=loss)
        assert hook.state_dict()["beta"].isnan().all()
        betahook.fold(model)
