"""What a hook reports: metrics, warnings and the audit."""

import copy
import math

import pytest
import torch
from torch import nn

import betahook
from betahook.report.audit import _closest
from support.attention import WIDTH, LengthDependent, make
from support.models import build, inputs
from support.training import LAYER, train


def test_metrics_are_flat_numbers_per_layer():
    model = build("llama")
    with betahook.attach(model) as hook:
        train(model, hook, 1)
        metrics = hook.metrics()
        heads = hook.head_metrics()
    assert all(type(value) is float for value in metrics.values())
    quantities = {key.split("/")[0] for key in metrics}
    assert {"beta", "score_std", "predicted_std", "max_logit", "entropy", "sensitivity", "weight_std_q"} <= quantities
    assert {key for key in metrics if not key.startswith(("phase/", "last_move/"))} == {
        key
        for key in heads
        if not key.startswith("clips/")  # nothing was clipped
    }
    assert all(value.shape == (4,) for value in heads.values())
    assert metrics[f"sensitivity/{LAYER}"] == pytest.approx(float(heads[f"sensitivity/{LAYER}"].sum()))


def test_w_q_and_w_k_are_always_current():
    model = build("llama")
    with betahook.attach(model, controller="monitor") as hook:
        train(model, hook, 1)
        before = hook.findings()[0].numbers.weight_std_q
        assert before == pytest.approx(hook.layers[LAYER].weight_std_q)
        with torch.no_grad():
            model.model.layers[0].self_attn.q_proj.weight.mul_(10)
        assert hook.findings()[0].numbers.weight_std_q == pytest.approx(10 * before)


def test_what_was_not_measured_is_no_metric():
    model = build("llama")
    with betahook.attach(model) as hook:
        model(**inputs("llama")).loss.backward()
        quantities = {key.split("/")[0] for key in hook.metrics()}  # step() was forgotten
    assert quantities == {"beta", "classic_std", "at_bound", "weight_std_q", "weight_std_k"}


def test_with_a_beta_a_head_metrics_are_of_the_head_where_it_matters():
    """The largest logit is of the head with the largest beta, whose scores need not be the largest."""
    model, heard = build("llama"), []
    alerts = betahook.Alerts(heard.append, max_logit=1.0, at_bound=True)
    with betahook.attach(model, controller="monitor", per_head=True, alerts=alerts) as hook:
        train(model, hook, 1)
        layer = hook.layers[LAYER]
        layer.head_beta = torch.tensor([1.0, 1.0, 1.0, 1000.0]) * layer.beta_default
        train(model, hook, 1)
        metrics, heads = hook.metrics(), hook.head_metrics()
        assert metrics[f"max_logit/{LAYER}"] == float(heads[f"max_logit/{LAYER}"].max())
        assert int(heads[f"max_logit/{LAYER}"].argmax()) == 3
        assert metrics[f"at_bound/{LAYER}"] == 1
        assert metrics[f"beta/{LAYER}"] == pytest.approx(1000**0.25 * layer.beta_default)  # the geometric mean
        assert {(alert.quantity, alert.layer) for alert in heard} >= {("max_logit", LAYER), ("at_bound", LAYER)}


def test_the_spread_of_the_logits_of_a_layer_is_that_of_its_heads_each_with_its_beta():
    model, batch = build("llama"), inputs("llama")
    with torch.no_grad():
        factors = torch.tensor([0.1, 1.0, 30.0, 300.0]).repeat_interleave(8)
        model.get_submodule(LAYER).q_proj.weight.mul_(factors[:, None])
    with betahook.attach(model, controller=betahook.Variance(smoothing=0.0), per_head=True, interval=1) as hook:
        for _ in range(2):
            model(**batch).loss.backward()
            hook.step()
        of_heads = hook.head_metrics()[f"logit_std/{LAYER}"]
        assert hook.metrics()[f"logit_std/{LAYER}"] == pytest.approx(float(of_heads.square().mean().sqrt()))
        assert "sharp" not in str(hook.findings())


def test_the_largest_logit_is_one_that_a_forward_had():
    """In steps that are not measured beta moves on, and with it what the largest score would give now."""
    model = build("llama")
    with betahook.attach(model, controller=betahook.Search(window=1, warmup=0, rise=False), interval=3) as hook:
        model(**inputs("llama")).loss.backward()
        layer = hook.layers[LAYER]
        expected = layer.beta_default * float(layer.statistics.max_score)
        hook.step()
        assert layer.beta != layer.beta_default
        measured = hook.metrics()[f"max_logit/{LAYER}"]
        assert measured == pytest.approx(expected, rel=1e-5)
        train(model, hook, 1)
        assert hook.metrics()[f"max_logit/{LAYER}"] == measured
        hook.load_state_dict(hook.state_dict())
        assert hook.metrics()[f"max_logit/{LAYER}"] == measured


def test_audit_of_a_fresh_model_follows_the_weights():
    """Fresh layer-normed inputs and random weights: the formula from W_q and W_k is within a few per cent."""
    torch.manual_seed(0)
    model = build("llama", hidden_size=128)
    with betahook.attach(model, controller="monitor") as hook:
        model(**inputs("llama", 128))
        audit = hook.audit()
    first = audit[0]
    assert first.name == LAYER
    assert first.head_dim == 32
    assert first.query_width == 128
    assert first.predicted["classic"] == pytest.approx(32**0.5)
    assert first.predicted["weights"] == pytest.approx(first.score_std, rel=0.15)
    assert first.projected_variance_q == pytest.approx(1.0, rel=0.1)  # weights of variance 1 / d_x
    assert LAYER in str(audit)
    assert str(audit).count("\n") == 2 * len(audit) + 7  # two tables, one with the numbers assumed, and a line


def test_the_first_of_several_bad_steps_is_named(caplog):
    model = build("llama")
    with betahook.attach(model, controller="monitor", interval=1) as hook:
        train(model, hook, 1)
        for _ in range(2):
            (model(**inputs("llama")).loss * torch.nan).backward()
            hook.step()
        hook.metrics()
    assert f"{LAYER} in step 2" in caplog.text


def test_the_layers_of_a_nan_are_named_in_the_order_of_their_steps(caplog):
    model = build("llama")
    with betahook.attach(model, controller="monitor") as hook:
        train(model, hook, 2)
        for each, step in zip(hook._state.ranges, (2, 1), strict=True):
            hook._state.nonfinite_since[each.heads] = step
        hook.metrics()
        first, second = hook.layers
    assert f"{second} in step 1 and {first} in step 2" in caplog.text


@pytest.mark.parametrize(
    ("predicted", "name"),
    [({"a": 0.5, "b": 3.0}, "a"), ({"a": 0.1, "b": 3.0}, "b"), ({"a": 0.0, "b": math.nan}, "none")],
)
def test_the_closest_formula_is_so_as_a_ratio(predicted, name):
    assert _closest(1.0, predicted) == name


def test_going_back_forgets_what_was_said_of_later_steps(caplog):
    model, batch, crossed = build("llama"), inputs("llama"), []
    alerts = betahook.Alerts(lambda alert: crossed.append(alert.step), max_logit=1e-9)
    with betahook.attach(model, controller="monitor", alerts=alerts) as hook:
        for step in range(3):
            if step == 1:
                state = hook.state_dict()
            model(**batch).loss.backward()
            if step == 2:
                hook._state.gains.set_sensitivity(torch.full_like(hook._state.beta, torch.nan))
            hook.step()
            hook.metrics()
        assert "in step 3" in caplog.text
        hook.load_state_dict(state)
        caplog.clear()
        model(**batch).loss.backward()
        hook.step()
        hook.metrics()
        assert crossed[-1] == 2
        assert not caplog.text
        crossed.clear()
        hook.load_state_dict(hook.state_dict())
        hook.metrics()
        assert not crossed


@pytest.mark.parametrize("ask", ["metrics", "findings"])
def test_one_warning_says_that_nobody_calls_step(ask, caplog):
    model, batch = build("llama"), inputs("llama")
    with betahook.attach(model, controller="monitor") as hook:
        hook.metrics(), hook.findings()  # before any forward
        for _ in range(3):
            model(**batch).loss.backward()
            getattr(hook, ask)()
        (record,) = caplog.records
        assert record.message == (  # also true within the first step, while gradients are accumulated
            f"{ask}() shows no scores: forwards were measured, but hook.step() has not been called yet. Call it once "
            f"per optimizer step, after it, and {ask}() afterwards"
        )
    caplog.clear()
    with betahook.attach(model, controller="monitor") as hook:
        model(**batch).loss.backward()
        hook.metrics(), hook.findings()  # once each is a look before the first step
        hook.step()
        getattr(hook, ask)()
        getattr(hook, ask)()
    assert not caplog.records


@pytest.mark.parametrize("ask", ["metrics", "findings"])
def test_one_warning_says_that_the_numbers_are_old(ask, caplog):
    """As after an evaluation, when nobody calls `model.train()`."""
    model = build("llama")
    with betahook.attach(model, controller="monitor") as hook:
        for _ in range(3):  # the layers are measured in the first step of ten
            train(model, hook, 15)
            getattr(hook, ask)()
        model.eval()
        train(model, hook, 14)
        getattr(hook, ask)()
        assert not caplog.records
        for _ in range(2):
            train(model, hook, 10)
            getattr(hook, ask)()
        (record,) = caplog.records
        assert record.message.startswith(
            f"no attention was measured in the last 28 steps, and {ask}() shows earlier numbers: "
        )
        assert record.message.endswith('Call model.train() after an evaluation, or attach(..., when="always")')


def test_numbers_of_a_long_interval_are_old_after_two_of_it(caplog):
    model = build("llama")
    with betahook.attach(model, controller="monitor", interval=30) as hook:
        train(model, hook, 1)
        model.eval()
        train(model, hook, 59)
        hook.metrics()
        assert not caplog.records
        train(model, hook, 1)
        hook.metrics()
        assert "no attention was measured in the last 60 steps" in caplog.text


def test_where_all_layers_are_left_alone_no_numbers_are_old(caplog):
    model = make(LengthDependent)
    with betahook.attach(model, controller="monitor") as hook:
        for length in [4] + 30 * [8]:
            model(torch.randn(2, length, WIDTH)).sum().backward()
            hook.step()
        hook.metrics()
    assert "left alone" in caplog.text
    assert "no attention was measured" not in caplog.text


def test_numbers_are_not_old_after_a_resume_or_in_a_graph_that_was_captured(caplog, monkeypatch):
    model = build("llama")
    with betahook.attach(model, controller="monitor") as hook:
        train(model, hook, 1)
        state = hook.state_dict()
    with betahook.attach(model, controller="monitor") as hook:
        hook.load_state_dict({**state, "steps": 1000})
        train(model, hook, 1)
        hook.metrics()
        monkeypatch.setattr("betahook.compat.is_captured", lambda device: True)
        train(model, hook, 1)
        monkeypatch.undo()
        model.eval()
        train(model, hook, 30)
        hook.metrics()
    assert not caplog.records


def test_layers_that_no_forward_reaches_say_so(caplog):
    """One that was replaced after attach, and one that the model has and does not use."""
    model = build("llama")
    with betahook.attach(model, controller="monitor") as hook:
        assert "not reached" not in repr(hook)
        train(model, hook, 1)
        assert f"score_std/{LAYER}" in hook.metrics()
        model.model.layers[0].self_attn = copy.deepcopy(build("llama").model.layers[0].self_attn)
        train(model, hook, 1)
        for _ in range(2):
            assert not [key for key in hook.metrics() if key.endswith(LAYER)]
        (record,) = caplog.records
        assert f"{LAYER} (it is no longer part of the model: detach, and attach again)" in record.message
        assert hook.head_metrics()[f"max_logit/{LAYER}"].isnan().all()
        assert f"  not reached: {LAYER}, it is no longer part" in repr(hook)

    model = nn.ModuleList([build("llama"), build("llama")])
    hook = betahook.attach(model, controller="monitor")
    model[1](**inputs("llama")).loss.backward()
    hook.step()
    hook.metrics()
    assert f"0.{LAYER} (no forward that is measured has reached it yet)" in caplog.records[-1].message
    assert "  not reached: 0.model.layers.0-1.self_attn, no forward" in repr(hook)
    hook.detach()


def test_a_layer_that_was_dropped_in_the_first_step_is_measured_in_its_turn(caplog):
    model = build("llama", num_hidden_layers=4)
    with betahook.attach(model, controller="monitor", interval=4) as hook:
        model.model.layers[0].forward = lambda hidden_states, *args, **kwargs: hidden_states
        train(model, hook, 1)
        del model.model.layers[0].forward
        train(model, hook, 1)  # the turn of others
        assert f"score_std/{LAYER}" not in hook.metrics()
        assert f"{LAYER} (no forward that is measured has reached it yet)" in caplog.records[-1].message
        train(model, hook, 3)
        assert f"score_std/{LAYER}" in hook.metrics()
        assert "not reached" not in repr(hook)


def test_a_class_of_transformers_that_no_longer_asks_for_its_attention_is_named(caplog, monkeypatch):
    model = build("llama")
    kind = type(model.model.layers[0].self_attn)
    with betahook.attach(model, controller="monitor", interval=1) as hook:
        train(model, hook, 1)
        monkeypatch.setattr(kind, "forward", lambda self, hidden_states, **_: (self.o_proj(hidden_states), None))
        train(model, hook, 1)
        assert not [key for key in hook.metrics() if key.endswith(LAYER)]
        (record,) = caplog.records
        assert (
            f"{LAYER} (the forward of its class was replaced by one that does not ask transformers for its attention, "
            "in which beta does not act: detach, and attach again" in record.message
        )
