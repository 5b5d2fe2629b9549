"""The note of a fold: in the config that is saved, read by nobody, and easily removed."""

import json

import torch
from torch import nn

import betahook
from support.attention import WIDTH, ByHandAttention
from support.models import build, inputs


def folded(factor):
    model = build("llama")
    with betahook.attach(model, controller=betahook.Cap(1e3)) as hook:
        model(**inputs("llama")).loss.backward()
        hook.step()
        for index, layer in enumerate(hook.layers.values()):
            layer.beta = factor ** (index + 1) * layer.beta_default
        betahook.fold(hook)
    return model


def test_the_config_and_the_card_say_what_was_folded(tmp_path):
    model = folded(2.0)
    model.save_pretrained(tmp_path)
    note = json.loads((tmp_path / "config.json").read_text())["betahook_folded"]
    assert note == {
        "version": betahook.__version__,
        "controllers": ["Cap(threshold=1000.0)"],
        "steps": 1,
        "beta_over_own": [2.0, 4.0],
    }
    assert model.model_tags == ["betahook"]
    again = type(model).from_pretrained(tmp_path)
    assert again.config.betahook_folded == note
    betahook.attach(again).detach()  # it is a model like any other
    del again.config.betahook_folded
    again.save_pretrained(tmp_path / "removed")
    assert "betahook" not in (tmp_path / "removed/config.json").read_text()


def test_nothing_is_noted_where_nothing_was_folded(tmp_path):
    model = folded(1.0)
    model.save_pretrained(tmp_path)
    assert "betahook" not in (tmp_path / "config.json").read_text()
    assert not model.model_tags


def test_a_plain_module_takes_no_note():
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), ByHandAttention())
    with betahook.attach(model, controller="monitor") as hook:
        model(torch.randn(3, 12, WIDTH))
        for layer in hook.layers.values():
            layer.beta = 2 * layer.beta_default
        betahook.fold(hook)
    assert not hasattr(model, "config")
