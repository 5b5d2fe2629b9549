"""Options of the Trainer that run its loop again, or its model in another way: docs/STACKS.md, section Trainer."""

import pytest
import torch

import betahook
from betahook.integrations.trainer import BetaHookCallback
from support.models import build
from support.pages import blocks, run
from support.trainer import Tokens, make_trainer


def search():
    return betahook.Search(window=1, warmup=0, rise=False)


def test_the_block_of_the_page():
    made = []

    def make_model():
        made.append(build("llama", "sdpa"))
        return made[-1]

    (code,) = blocks("docs/STACKS.md", "Trainer")
    names = run(code, make_model=make_model, dataset=Tokens())
    assert names["best"].hyperparameters.keys() == {"learning_rate"}
    assert len(made) == 4  # the Trainer makes one to look at, before the first training
    for model in made:
        with pytest.raises(ValueError, match="not hooked"):
            betahook.fold(model)


def test_every_trial_begins_with_the_own_beta_of_its_model(tmp_path):
    begun = []

    class Noting(BetaHookCallback):
        def on_train_begin(self, args, state, control, **kwargs):
            super().on_train_begin(args, state, control, **kwargs)
            begun.append((id(self.hook.model), self.hook.steps, bool(self.hook._state.beta.isnan().all())))

    trainer = make_trainer(tmp_path, Noting(search()), max_steps=3, eval_strategy="steps", eval_steps=3)
    trainer.model_init = lambda: build("llama", "sdpa")
    kept = [trainer.model]
    trainer.hyperparameter_search(lambda trial: kept.append(trainer.model) or {}, n_trials=2, backend="optuna")
    assert [entry[1:] for entry in begun] == [(0, True), (0, True)]
    assert len({entry[0] for entry in begun}) == 2


def test_a_compiled_training_has_the_same_beta(tmp_path):
    betas = []
    for compiled in (True, False):
        callback = BetaHookCallback(search(), on_end="keep")
        options = dict(torch_compile=True, torch_compile_backend="aot_eager") if compiled else {}
        trainer = make_trainer(tmp_path, callback, seed=3, max_grad_norm=0, optim="sgd", **options)
        trainer.train()
        betas.append(callback.hook.state_dict()["beta"])
        callback.hook.detach()
    torch.testing.assert_close(*betas)
