"""Checkpoints and a run for the commands to read."""

import pytest

import betahook
from betahook.integrations.trainer import BetaHookCallback
from support.models import build, inputs
from support.tokens import TEXT, tokenizer
from support.trainer import make_trainer
from support.training import LAYER


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A model with a tokenizer, its text, and a checkpoint of it with betas of its own."""
    folder = tmp_path_factory.mktemp("models")
    model = build("llama", "sdpa", vocab_size=300)
    (folder / "text.txt").write_text(TEXT)
    for name in ("plain", "hooked"):
        tokenizer().save_pretrained(folder / name)
    model.save_pretrained(folder / "plain")
    (folder / "hooked" / "optimizer.pt").write_text("large")
    with betahook.attach(model, controller=betahook.Search(window=3, rise=False)) as hook:
        model(**inputs("llama"))
        hook.step()
        hook.layers[LAYER].beta = 0.5
        model.save_pretrained(folder / "hooked")
    return folder


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    trainer = make_trainer(folder, BetaHookCallback(), save_strategy="steps", save_steps=3, report_to="tensorboard")
    trainer.train()
    return folder
