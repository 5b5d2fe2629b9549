"""The end of a training with the Trainer: which beta is folded, and what stays hooked."""

import shutil
from unittest import mock

import pytest
import torch
from transformers import TrainerCallback

import betahook
from betahook import checkpoint
from betahook.integrations.trainer import BetaHookCallback
from betahook.integrations.training import provide_input
from support.models import build
from support.trainer import Tokens, make_trainer
from support.training import train


def test_a_run_in_bfloat16_ends_plain(tmp_path):
    """Accelerate wraps the model's forward in autocast, which keeps copies of the weights."""
    callback = BetaHookCallback([betahook.Search(window=1, warmup=0, rise=False)])
    trainer = make_trainer(tmp_path, callback, bf16=True)
    trainer.train()
    assert not callback.hook.attached


@pytest.mark.parametrize("on_end", ["fold", "keep"])
def test_a_beta_that_will_not_fold_is_named_before_the_first_step(tmp_path, caplog, on_end):
    peft = pytest.importorskip("peft")
    trainer = make_trainer(tmp_path, BetaHookCallback(on_end=on_end), max_steps=1)
    peft.inject_adapter_in_model(peft.LoraConfig(target_modules=["q_proj"]), trainer.model)
    before = []

    class Begin(TrainerCallback):
        def on_step_begin(self, *args, **kwargs):
            before.append("cannot be folded at the end of training" in caplog.text)

    trainer.add_callback(Begin())
    trainer.train()
    assert before == [on_end == "fold"]


@pytest.mark.parametrize("best", [False, True])
def test_the_model_is_plain_after_training_and_keeps_its_beta(tmp_path, best):
    """Folded, with the beta of the last step, or of the best checkpoint where the Trainer goes back to that."""
    keep = dict(load_best_model_at_end=True, save_strategy="steps", save_steps=1) if best else {}
    keep |= dict(metric_for_best_model="eval_loss", greater_is_better=True)  # so that the last step is not the best
    callback = BetaHookCallback(controller=betahook.Search(window=1, warmup=0, rise=False, opening=1.0, largest=1.0))
    trainer = make_trainer(tmp_path, callback, eval_strategy="steps", eval_steps=1, learning_rate=1.0, **keep)
    trainer.train()
    assert not callback.hook.attached
    losses = [entry["eval_loss"] for entry in trainer.state.log_history if "eval_loss" in entry]
    assert losses[-1] < max(losses) - 1e-3
    assert trainer.evaluate()["eval_loss"] == pytest.approx(max(losses) if best else losses[-1], rel=1e-5)


@pytest.mark.parametrize("controller", [betahook.Search(window=1, warmup=0, rise=False), "monitor"])
def test_weights_of_the_best_checkpoint_that_were_not_loaded_leave_the_beta_of_the_last_step(
    tmp_path, caplog, controller
):
    """As in a trial that a search prunes; or of ViT, which transformers saves under names that it does not load."""
    callback = BetaHookCallback(controller, on_end="keep")
    best = dict(load_best_model_at_end=True, metric_for_best_model="eval_loss", greater_is_better=True)
    steps = dict(eval_strategy="steps", eval_steps=2, save_strategy="steps", save_steps=2)
    trainer = make_trainer(tmp_path, callback, **steps, **best)
    last = []

    def leave():
        last.extend(callback.hook.state_dict()["beta"].tolist())

    trainer._load_best_model = leave
    trainer.train()
    assert callback.hook.state_dict()["beta"].tolist() == pytest.approx(last, nan_ok=True)
    assert ("were not loaded: beta stays that of the last step" in caplog.text) is (controller != "monitor")


def test_a_best_checkpoint_that_was_deleted_leaves_the_beta_of_the_last_step(tmp_path, caplog):
    class Deleting(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            if state.global_step == 6:
                shutil.rmtree(state.best_model_checkpoint)

    callback = BetaHookCallback(betahook.Search(window=1, warmup=0, rise=False, opening=1.0, largest=1.0))
    steps = dict(eval_strategy="steps", eval_steps=2, save_strategy="steps", save_steps=2, learning_rate=1.0)
    best = dict(load_best_model_at_end=True, metric_for_best_model="eval_loss", greater_is_better=True)
    trainer = make_trainer(tmp_path, callback, **steps, **best)
    trainer.add_callback(Deleting())
    trainer.train()
    assert f"the best checkpoint {trainer.state.best_model_checkpoint} was deleted: beta stays" in caplog.text
    assert not callback.hook.attached
    last = [entry["eval_loss"] for entry in trainer.state.log_history if "eval_loss" in entry][-1]
    assert last < trainer.state.best_metric - 1e-3
    assert trainer.evaluate()["eval_loss"] == pytest.approx(last, rel=1e-5)


def test_a_finished_run_that_is_resumed_ends_with_the_same_plain_model(tmp_path, caplog):
    """No step is left, so that the model has no forward on which a fold could check itself."""
    weights = []
    for resumed in (False, True):
        callback = BetaHookCallback(betahook.Search(window=1, warmup=0, rise=False, opening=1.0, largest=1.0))
        trainer = make_trainer(tmp_path, callback, max_steps=-1, num_train_epochs=1, save_strategy="epoch")
        trainer.train(resume_from_checkpoint=resumed)
        assert trainer.state.global_step == callback.hook.steps == 16
        assert not callback.hook.attached
        weights.append(trainer.model.state_dict())
    assert all(torch.equal(value, weights[1][name]) for name, value in weights[0].items())
    assert "cannot fold" not in caplog.text


def test_a_finished_run_whose_data_cannot_be_read_again_stays_hooked(tmp_path, caplog):
    class Lost(Tokens):
        def __getitem__(self, index):
            raise OSError("the data are gone")

    rule = betahook.Search(window=1, warmup=0, rise=False, opening=1.0, largest=1.0)
    options = dict(max_steps=-1, num_train_epochs=1, save_strategy="epoch")
    make_trainer(tmp_path, BetaHookCallback(rule), **options).train()
    callback = BetaHookCallback(rule)
    trainer = make_trainer(tmp_path, callback, **options)
    trainer.train_dataset = Lost()
    trainer.train(resume_from_checkpoint=True)
    assert "on the input of the model's last forward, but there was none, or it used a cache" in caplog.text
    callback.hook.detach()


def test_the_batch_of_the_last_step_is_not_replaced():
    model = build("llama")
    with betahook.attach(model) as hook:
        train(model, hook, 1)
        last = hook.last_call.input
        provide_input(hook, [{"input_ids": torch.zeros(1, 1)}])
        assert hook.last_call.input is last


@pytest.mark.parametrize("unfinished", ["better", "own"])
def test_the_best_model_of_a_short_run_is_the_one_that_was_evaluated(tmp_path, monkeypatch, caplog, unfinished):
    """Its beta is still on its way; the evaluation outweighs one batch on which the model's own beta does better."""
    monkeypatch.setattr("betahook.keep.transition._losses", lambda hook: (2.0, 1.0))
    callback = BetaHookCallback(unfinished=unfinished)
    steps = dict(eval_strategy="steps", eval_steps=2, save_strategy="steps", save_steps=2, learning_rate=1e-2)
    trainer = make_trainer(tmp_path, callback, load_best_model_at_end=True, **steps)
    trainer.train()
    is_best = trainer.evaluate()["eval_loss"] == pytest.approx(trainer.state.best_metric, rel=1e-6)
    assert is_best is (unfinished == "better")  # "own" is what was asked for
    others = '"own"' if unfinished == "better" else '"keep" or "better"'
    assert f"choose another beta with unfinished={others}\n" in caplog.text
    assert not callback.hook.attached


@pytest.mark.parametrize("greater_is_better", [True, False])
def test_the_best_beta_is_that_of_a_named_metric_in_a_named_direction(tmp_path, greater_is_better):
    callback = BetaHookCallback(
        controller=betahook.Search(window=1, warmup=0, rise=False, opening=1.0, largest=1.0), on_end="keep"
    )
    steps = dict(eval_strategy="steps", eval_steps=1, save_strategy="steps", save_steps=1, learning_rate=1.0)
    best = dict(load_best_model_at_end=True, metric_for_best_model="spread", greater_is_better=greater_is_better)
    trainer = make_trainer(tmp_path, callback, **steps, **best)
    trainer.compute_metrics = lambda prediction: {"spread": float(prediction.predictions.std())}
    trainer.train()
    seen = [entry["eval_spread"] for entry in trainer.state.log_history if "eval_spread" in entry]
    expected = max(seen) if greater_is_better else min(seen)
    assert max(seen) - min(seen) > 1e-3
    assert trainer.evaluate()["eval_spread"] == pytest.approx(expected, rel=1e-5)
    state = checkpoint.read(tmp_path / f"checkpoint-{seen.index(expected) + 1}").state
    assert torch.equal(callback.hook.state_dict()["beta"], state["beta"])
    callback.hook.detach()


def test_keep_leaves_the_hook(tmp_path):
    callback = BetaHookCallback(on_end="keep")
    make_trainer(tmp_path, callback).train()
    assert callback.hook.attached
    callback.hook.detach()
    with pytest.raises(ValueError, match=r'on_end must be "fold" or "keep"; got .drop.'):
        BetaHookCallback(on_end="drop")


def test_what_cannot_be_folded_stays_hooked_and_says_so(tmp_path, caplog):
    callback = BetaHookCallback(controller=betahook.Search(window=1, warmup=0, rise=False))
    trainer = make_trainer(tmp_path, callback)
    trainer.model.model.layers[0].self_attn.clip_qkv = 8.0
    trainer.train()
    assert callback.hook.attached
    assert "cannot fold beta into model.layers.0.self_attn" in caplog.text
    callback.hook.detach()


def test_an_error_while_beta_is_folded_leaves_the_trackers_as_they_were(tmp_path, monkeypatch):
    def fail(hook, unfinished, is_best):
        raise MemoryError("while it folds")

    callback = BetaHookCallback("monitor")
    monkeypatch.setattr("betahook.integrations.trainer.fold_or_warn", fail)
    trainer = make_trainer(tmp_path, callback, report_to="tensorboard")
    with pytest.raises(MemoryError, match="while it folds"):
        trainer.train()
    assert callback._reports is None
    callback.hook.detach()


class ScheduleFree(torch.optim.SGD):
    """Has two modes, as those of schedulefree, which put other weights into the model in each."""

    training = False

    def train(self):
        self.training = True

    def eval(self):
        self.training = False


@pytest.mark.parametrize("best", [False, True])
def test_the_weights_that_a_schedule_free_optimizer_ends_with_are_folded(tmp_path, best):
    """Or those of the best checkpoint, on which such an optimizer would put its own."""

    class Stop(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            control.should_training_stop = state.global_step == 3  # an evaluation would leave the optimizer in its mode

    steps = dict(eval_strategy="steps", eval_steps=2, save_strategy="steps", save_steps=2)
    trainer = make_trainer(tmp_path, BetaHookCallback(), load_best_model_at_end=best, **steps)
    trainer.add_callback(Stop())
    optimizer = trainer.optimizer = ScheduleFree(trainer.model.parameters(), lr=0.1)
    modes = []
    with mock.patch(
        "betahook.integrations.trainer.fold_or_warn", side_effect=lambda *_, **__: modes.append(optimizer.training)
    ):
        trainer.train()
    assert modes == [best]
