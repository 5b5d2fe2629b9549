"""What is said of NaN and of limits, where the metrics are read and not before."""

from dataclasses import dataclass

import pytest
import torch

import betahook
from betahook.report import warnings
from support.attention import LENGTH, WIDTH, FusedAttention
from support.models import build, inputs
from support.training import LAYER, train

SECOND = "model.layers.1.self_attn"


@pytest.mark.parametrize("where", ["scores", "gradients"])
def test_one_warning_names_layer_and_step(where, caplog):
    model = build("llama")
    with betahook.attach(model, controller=betahook.Search(window=1, warmup=0, rise=False), interval=1) as hook:
        train(model, hook, 2)
        hook.metrics()
        assert not caplog.records
        weight = model.get_submodule(SECOND).q_proj.weight
        kept = weight.detach().clone()
        if where == "scores":
            with torch.no_grad():
                weight[0, 0] = torch.nan
            model(**inputs("llama"))
        else:
            model(**inputs("llama")).logits[0, 0, 0].mul(torch.inf).backward()
        hook.step()
        with torch.no_grad():
            weight.copy_(kept)
        model.zero_grad()
        train(model, hook, 1)  # nobody looked in between, and it is over
        for _ in range(2):
            assert hook.metrics()[f"nonfinite/{SECOND}"] == 0
        (record,) = caplog.records
        assert f"{SECOND} in step 3" in record.message
        assert (f"{LAYER} in step 3" in record.message) is (where == "gradients")
        assert "beta stays where it was" in record.message


@pytest.mark.parametrize(("layers", "others"), [(6, "3 others"), (4, "1 other")])
def test_many_layers_are_not_all_named(caplog, layers, others):
    model = build("llama", num_hidden_layers=layers)
    with betahook.attach(model) as hook:
        (model(**inputs("llama")).loss * torch.nan).backward()
        hook.step()
        hook.metrics()
    assert f"model.layers.2.self_attn in step 1 and {others}: beta stays" in caplog.text


def test_alerts_come_once_a_step_with_the_metrics():
    model, heard = build("llama"), []
    alerts = betahook.Alerts(heard.append, max_logit=1e-3, entropy=100.0, logit_std=1e-4, at_bound=True)
    with betahook.attach(model, controller="monitor", alerts=alerts) as hook:
        train(model, hook, 2)
        assert heard == []
        metrics = hook.metrics()
        hook.metrics()
        assert heard == [
            betahook.Alert(2, quantity, name, metrics[f"{quantity}/{name}"], limit)
            for quantity, limit in (("logit_std", 1e-4), ("max_logit", 1e-3), ("entropy", 100.0))
            for name in (LAYER, SECOND)
        ]
        heard.clear()
        hook.layers[SECOND].beta = hook.layers[SECOND].beta_default * 1000
        train(model, hook, 1)
        hook.metrics()
        (bound,) = (alert for alert in heard if alert.quantity == "at_bound")
        assert (bound.layer, bound.step, bound.limit) == (SECOND, 3, None)
        assert str(bound) == f"step 3: beta of {SECOND} is {bound.value:g}, which is at its bound"
        assert str(heard[0]).endswith("beyond its limit of 0.0001")


@pytest.mark.parametrize(
    ("gains", "heads", "said"),
    [
        ((0.1, 0.5, 1000.0, 0.5), (2,), "is at its bound in head 2, 353.553"),
        ((1000.0, 0.5, 1e-3, 1e-3), (0, 2, 3), "is at its bound in heads 0, 2-3, 353.553 in head 0"),
        ((1000.0,) * 4, (), "is 353.553, which is at its bound"),
    ],
)
def test_an_alert_names_the_heads_at_their_bound(gains, heads, said):
    """Not the mean beta of the layer, which may be far from it."""
    model, heard = build("llama"), []
    with betahook.attach(
        model, "monitor", per_head=True, interval=1, alerts=betahook.Alerts(heard.append, at_bound=True)
    ) as hook:
        train(model, hook, 1)
        layer = hook.layers[LAYER]
        layer.head_beta = layer.head_beta_default * torch.tensor(gains)
        train(model, hook, 1)
        hook.metrics()
    (alert,) = heard
    assert (alert.heads, alert.value) == (heads, pytest.approx(353.5534, rel=1e-5))
    assert str(alert) == f"step 2: beta of {LAYER} {said}"


def test_within_the_limits_there_is_silence():
    model, heard = build("llama"), []
    alerts = betahook.Alerts(heard.append, max_logit=1e3, entropy=1e-3, logit_std=1e3, at_bound=True)
    for options in ({}, {"alerts": alerts}):
        with betahook.attach(model, controller="monitor", **options) as hook:
            train(model, hook, 1)
            hook.metrics()
    assert heard == []


def test_at_its_limit_a_quantity_is_within_it():
    heard = []
    betahook.Alerts(heard.append, max_logit=5.0, entropy=1.0).check({"max_logit/a": 5.0, "entropy/a": 1.0}, 1, {})
    assert heard == []


def test_a_controller_that_runs_away_ends_at_the_bound():
    @dataclass(frozen=True)
    class Runaway(betahook.Controller):
        def update(self, beta, observation, state):
            return beta * 1e6, state

    model, heard = build("llama"), []
    with betahook.attach(model, controller=Runaway(), alerts=betahook.Alerts(heard.append, at_bound=True)) as hook:
        train(model, hook, 1)
        hook.metrics()
    assert [alert.quantity for alert in heard] == ["at_bound", "at_bound"]


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (
            {"on_alert": print},
            ValueError,
            r"without a limit never alert; give one, as in Alerts\(print, max_logit=50\)",
        ),
        ({"on_alert": 3}, TypeError, r"must be a function of an Alert; got 3"),
        (
            {"on_alert": print, "max_logit": -1},
            ValueError,
            r"Alerts\(max_logit=...\) must be a positive number or None",
        ),
        ({"on_alert": print, "max_logit": "50"}, ValueError, r"must be a positive number or None; got '50'"),
        ({"on_alert": print, "max_logit": True}, ValueError, r"must be a positive number or None; got True"),
        ({"on_alert": print, "at_bound": 0.3}, ValueError, r"Alerts\(at_bound=...\) must be True or False; got 0.3"),
        (
            {"on_alert": print, "entropy": float("nan")},
            ValueError,
            r"Alerts\(entropy=...\) must be a positive .* got nan",
        ),
    ],
)
def test_limits_that_make_no_sense(arguments, error, message):
    with pytest.raises(error, match=message):
        betahook.Alerts(**arguments)


def test_alerts_of_another_kind():
    with pytest.raises(TypeError, match=r"alerts must be betahook.Alerts or None; got <built-in function print>"):
        betahook.attach(build("llama"), alerts=print)


def test_a_model_that_is_itself_the_attention_is_called_the_model(caplog):
    """Its name is empty."""
    alerts, model = [], FusedAttention()
    limits = betahook.Alerts(alerts.append, max_logit=1e-9)
    with betahook.attach(model, "monitor", alerts=limits) as hook:
        model(torch.randn(2, LENGTH, WIDTH)).sum().backward()
        hook.step()
        hook.metrics()
        warnings.warn_of_unreached(hook._state, {"": "it was replaced"})
        model(torch.full((2, LENGTH, WIDTH), torch.nan)).sum().backward()
        hook.step()
        hook.metrics()
        with pytest.raises(KeyError, match=r"no hooked layer is called 'x'; there are '' \(the model\)\""):
            hook.layers["x"]
    assert str(alerts[0]).startswith("step 1: max_logit of the model is ")
    assert str(betahook.Alert(1, "at_bound", "", 2.0, None)) == "step 1: beta of the model is 2, which is at its bound"
    assert "not measured, hence not in the metrics: the model (it was replaced)" in caplog.text
    assert "gradients of the model in step 2: beta stays" in caplog.text
