"""A state that goes on with other controllers than it was saved with."""

import copy
from dataclasses import dataclass

import pytest
import torch

import betahook
from support.models import build, inputs
from support.training import bits, train


def saved_after(controller, steps, **options):
    """The weights of a model after some steps, and the state of its hook."""
    model = build("llama")
    with betahook.attach(model, controller, **options) as hook:
        train(model, hook, steps)
        return copy.deepcopy(model.state_dict()), hook.state_dict()


def with_weights(weights):
    model = build("llama")
    model.load_state_dict(weights)
    return model


@pytest.mark.parametrize("saved", ["monitor", betahook.Clip(), betahook.Search(warmup=90, rise=False)], ids=repr)
@pytest.mark.parametrize("new", [betahook.Clip(0.5), betahook.Cap(0.5), betahook.Gradient(0.1)], ids=repr)
def test_other_controllers_do_what_they_would_on_a_model_that_was_not_hooked(saved, new, caplog):
    weights, state = saved_after(saved, 3, interval=2)  # in the middle between two poolings
    expected_model, model = with_weights(weights), with_weights(weights)
    with betahook.attach(expected_model, new, interval=1) as hook:
        expected = train(expected_model, hook, 3)
    with betahook.attach(model, new, interval=1) as hook:
        hook.load_state_dict(state)
        assert hook.steps == 3
        assert train(model, hook, 3) == expected
        assert hook.steps == 6
        changed = hook.layers.are_adapted or bool(hook.head_metrics()["clips/model.layers.0.self_attn"].any())
    assert changed
    assert bits(dict(model.state_dict())) == bits(dict(expected_model.state_dict()))
    was = repr(betahook.Monitor()) if saved == "monitor" else repr(saved)
    said = f"the state was saved with [{was}], which left beta the model's own: [{new}] takes over at step 3"
    assert [record.getMessage() for record in caplog.records] == [said]


def test_what_was_found_so_far_stays():
    _, state = saved_after(betahook.Clip(0.01, log_only=True), 3)
    state["condition_since"][:] = 2
    with betahook.attach(build("llama"), "default") as hook:
        hook.load_state_dict(state)
        after = hook.state_dict()
    assert state["clips"].any()
    for name in ("clips", "condition", "condition_since", "nonfinite_since", "recent", "steps"):
        assert bits(after[name]) == bits(state[name])


@dataclass(frozen=True)
class Counting(betahook.Controller):
    """Adds up the batches of its observations."""

    def start(self, beta):
        return {"batches": torch.zeros_like(beta)}

    def update(self, beta, observation, state):
        return beta, {"batches": state["batches"] + observation.batches}


def test_batches_before_it_took_over_are_none_of_a_controller():
    weights, state = saved_after("monitor", 3, interval=2)  # in the middle between two poolings
    assert state["batches"] > 0
    model = with_weights(weights)
    with betahook.attach(model, Counting()) as hook:
        hook.load_state_dict(state)
        train(model, hook, 2)
        (entry,) = hook.state_dict()["controllers"]
    assert entry["state"]["batches"].tolist() == [2, 2]


def test_a_limit_takes_no_maximum_of_a_few_rows_for_that_of_all():
    _, state = saved_after("monitor", 3)
    assert state["recent"].any()
    with betahook.attach(build("llama"), betahook.Cap(), interval=10) as hook:
        hook.load_state_dict(state)
        assert not hook.state_dict()["recent"].any()


def test_a_rule_that_is_judged_by_the_loss_asks_for_one_when_it_takes_over():
    weights, state = saved_after("monitor", 3)
    model = with_weights(weights)
    batch = {name: value for name, value in inputs("llama").items() if name != "labels"}
    with betahook.attach(model, betahook.Decades()) as hook:
        hook.load_state_dict(state)
        model(**batch).logits.sum().backward()
        with pytest.raises(RuntimeError, match="is judged by the training loss, and the model returned none"):
            hook.step()


@pytest.mark.parametrize("new", ["monitor", betahook.Gradient(0.2)], ids=repr)
def test_where_beta_has_moved_others_are_refused_and_the_message_leads_on(new):
    weights, state = saved_after(betahook.Gradient(0.1), 3)
    model = with_weights(weights)
    message = (
        r"other controllers, and beta is not the model's own any more: expected \[.*\], got \[Gradient\(learning_rate="
        r"0.1\)\]\. Use the saved ones\. Or fold first, .* attach with the saved ones and load the state, instead of"
    )
    with betahook.attach(model, new) as hook:
        before = bits(hook.state_dict())
        with pytest.raises(ValueError, match=message):
            hook.load_state_dict(state)
        assert bits(hook.state_dict()) == before
    hook = betahook.attach(model, betahook.Gradient(0.1))
    hook.load_state_dict(state)
    output = model(**inputs("llama")).logits
    betahook.fold(model)
    torch.testing.assert_close(model(**inputs("llama")).logits, output, rtol=1e-4, atol=1e-5)
    with betahook.attach(model, new) as hook:
        train(model, hook, 1)


def test_a_beta_that_was_set_by_hand_is_not_the_model_s_own():
    model = build("llama")
    with betahook.attach(model, "monitor") as hook:
        train(model, hook, 1)
        hook.layers["model.layers.1.self_attn"].beta *= 2
        state = hook.state_dict()
    with betahook.attach(model) as hook, pytest.raises(ValueError, match="beta is not the model's own any more"):
        hook.load_state_dict(state)
