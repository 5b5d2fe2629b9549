"""A model that comes back from a folder, beta where it was; with what else: tests/unit/checkpoint."""

import pytest

import betahook
from support.models import build, inputs
from support.training import train


@pytest.fixture
def folder(tmp_path):
    model = build("llama")
    with betahook.attach(model, controller=betahook.Gradient(0.1)) as hook:
        train(model, hook, 2)
        hook.model.save_pretrained(tmp_path)
    return tmp_path


def load(folder):
    return type(build("llama")).from_pretrained(folder, attn_implementation="eager").train()


def betas(hook):
    return [layer.beta for layer in hook.layers.values()]


def test_without_controllers_beta_stays_where_it_is(folder):
    model = load(folder)
    with betahook.restore(model, folder) as hook:
        assert hook.controllers == [betahook.Monitor()]
        before = betas(hook)
        assert all(layer.beta != layer.beta_default for layer in hook.layers.values())
        assert train(model, hook, 2) == [before, before]


def test_with_controllers_beta_goes_on(folder):
    model = load(folder)
    with betahook.restore(model, folder, controller=betahook.Gradient(0.1)) as hook:
        before = betas(hook)
        assert train(model, hook, 1) != [before]


def test_a_folder_whose_beta_was_left_behind(folder, tmp_path):
    with pytest.raises(FileNotFoundError, match="the folder is a copy that left it behind"):
        betahook.restore(load(folder), tmp_path / "elsewhere")


def test_a_model_that_needs_no_betahook(folder):
    with pytest.raises(ValueError, match="does not say that it needs betahook: its beta is in the weights already"):
        betahook.restore(build("llama"), folder)


def test_other_controllers_leave_the_model_as_it_was(folder):
    model = load(folder)
    with pytest.raises(ValueError, match="other controllers"):
        betahook.restore(model, folder, controller=betahook.Cap())
    betahook.restore(model, folder).detach()


def test_the_model_alone_is_another_one(folder):
    model, batch = load(folder), inputs("llama")
    plain = model(**batch).logits
    with betahook.restore(model, folder):
        assert (model(**batch).logits - plain).abs().max() > 1e-3
