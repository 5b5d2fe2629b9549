"""Trainings of a callback or a model after the first, and after one that was broken off."""

from dataclasses import dataclass

import pytest
import torch
from torch.utils.data import Subset
from transformers import TrainerCallback

import betahook
from betahook.integrations.trainer import BetaHookCallback
from betahook.measure import statistics
from support.trainer import make_trainer


def test_every_training_starts_its_controllers_anew(tmp_path):
    callback = BetaHookCallback(betahook.Search(window=1, warmup=0, rise=False))
    for _ in range(2):
        trainer = make_trainer(tmp_path, callback)
        trainer.train()
        (entry,) = callback.hook.state_dict()["controllers"]
        assert entry["state"]
        assert callback.hook.steps == 6


class Interrupt(TrainerCallback):
    def on_step_end(self, args, state, control, **kwargs):
        raise KeyboardInterrupt


def break_off(folder, callback):
    """A Trainer that was interrupted after its first step."""
    trainer = make_trainer(folder, callback)
    trainer.add_callback(Interrupt())
    with pytest.raises(KeyboardInterrupt):
        trainer.train()
    return trainer


def test_a_training_that_was_broken_off_leaves_nothing_to_the_next(tmp_path):
    callback = BetaHookCallback(on_end="keep")
    first = break_off(tmp_path, callback)
    second = make_trainer(tmp_path, callback)
    second.train()
    assert callback.hook.model is second.model
    assert callback.hook.steps == 6
    with pytest.raises(ValueError, match="LlamaForCausalLM is not hooked"):
        betahook.fold(first.model)


@dataclass(frozen=True)
class Judge(betahook.Monitor):
    uses_loss = True


def test_a_step_that_was_broken_off_does_not_count_in_the_next(tmp_path):
    """Between batches whose gradients are accumulated; `auto_find_batch_size` too goes on with the same hook then."""
    seen = []

    class Watch(TrainerCallback):
        def on_substep_end(self, args, state, control, **kwargs):
            if len(seen) == 1:
                raise KeyboardInterrupt

        def on_pre_optimizer_step(self, args, state, control, **kwargs):
            table = callback.hook.state_dict()["table"]
            seen.append({name: table[statistics.ROW[name]] for name in ("losses", "loss", "sensitivity")})

    callback = BetaHookCallback(Judge(), interval=1, on_end="keep")
    trainer = make_trainer(tmp_path, callback, gradient_accumulation_steps=2, learning_rate=0.0)
    trainer.train_dataset = Subset(trainer.train_dataset, [0] * 64)
    trainer.add_callback(Watch())
    with pytest.raises(KeyboardInterrupt):
        trainer.train()
    seen.append({})
    trainer.train()
    for name, value in seen[0].items():
        assert value.any()
        assert torch.equal(seen[2][name], value), name


@pytest.mark.parametrize("resumed", [False, True])
def test_the_hook_of_a_training_that_was_broken_off_is_replaced(tmp_path, caplog, resumed):
    """As a notebook runs a cell again, which makes a new Trainer and a new callback for the same model."""
    if resumed:
        make_trainer(tmp_path, BetaHookCallback(), save_strategy="steps", save_steps=4).train()
    first = break_off(tmp_path, BetaHookCallback(on_end="keep"))
    callback = BetaHookCallback(on_end="keep")
    second = make_trainer(tmp_path, callback)
    second.model = second.model_wrapped = first.model
    second.train(resume_from_checkpoint=str(tmp_path / "checkpoint-4") if resumed else None)
    assert callback.hook.model is first.model
    assert "the last training of this model was interrupted: its hook is " in caplog.text
    assert ("beta begins as the model's own again" in caplog.text) is not resumed
    third = make_trainer(tmp_path, BetaHookCallback())
    third.model = third.model_wrapped = first.model
    with pytest.raises(RuntimeError, match="is hooked already"):  # a hook that was kept on purpose
        third.train()
    betahook.detach(first.model)
    third.train()


@pytest.mark.oldest_skips("Accelerate halves a batch that does not fit")
def test_a_first_batch_that_did_not_fit_leaves_nothing(tmp_path):
    """`auto_find_batch_size` then trains the same model anew, with the smaller batches of a run without it."""
    hooks = []
    for size in (8, 7):
        callback = BetaHookCallback(betahook.Search(window=1, warmup=0, rise=False), on_end="keep")
        options = dict(auto_find_batch_size=True, per_device_train_batch_size=size, seed=3)
        trainer = make_trainer(tmp_path, callback, **options)
        fit = trainer.training_step

        def training_step(model, batch, *args, fit=fit):
            if len(batch["input_ids"]) == 8:
                model(**batch)
                raise RuntimeError("CUDA out of memory.")
            return fit(model, batch, *args)

        trainer.training_step = training_step
        trainer.train()
        hooks.append(callback.hook)
        callback.hook.detach()
    states = [hook.state_dict() for hook in hooks]
    for name in ("beta", "recent", "table"):
        assert torch.equal(*(state[name] for state in states)), name


def test_a_hook_that_was_kept_stays_when_its_callback_goes_on(tmp_path):
    callback = BetaHookCallback(betahook.Gradient(), on_end="keep")
    first, second = (make_trainer(tmp_path, callback) for _ in range(2))
    first.train()
    kept = callback.hook
    second.train()
    assert kept.attached
    assert kept.model is first.model
    assert callback.hook.model is second.model


@pytest.mark.parametrize("detached", [False, True])
def test_models_that_take_turns_go_on_with_the_hooks_that_they_kept(tmp_path, detached):
    callback, hooks = BetaHookCallback(betahook.Gradient(), on_end="keep"), []
    first, second = (make_trainer(tmp_path, callback) for _ in range(2))
    for trainer in (first, second):
        trainer.train()
        hooks.append(callback.hook)
    if detached:
        hooks[1].detach()
    first.train()
    assert callback.hook is hooks[0]
    assert callback.hook.steps == 12
    second.train()
    assert (callback.hook is hooks[1]) is not detached


def test_a_model_that_kept_a_hook_resumes_after_another_with_that_of_the_checkpoint(tmp_path):
    callback = BetaHookCallback(betahook.Gradient(), on_end="keep")
    first = make_trainer(tmp_path / "first", callback, save_strategy="steps", save_steps=4)
    first.train()
    kept = callback.hook
    make_trainer(tmp_path / "second", callback).train()
    first.train(resume_from_checkpoint=str(tmp_path / "first" / "checkpoint-4"))
    assert not kept.attached
    assert callback.hook.model is first.model
    assert callback.hook.steps == 6


def test_after_the_fold_of_the_hook_that_it_was_given_a_callback_makes_no_other(tmp_path):
    """It knows nothing of the options that the hook was attached with."""
    trainer = make_trainer(tmp_path, Interrupt())
    trainer.pop_callback(Interrupt)
    trainer.add_callback(BetaHookCallback(hook=betahook.attach(trainer.model, controller="monitor", interval=5)))
    trainer.train()
    with pytest.raises(ValueError, match=r"BetaHookCallback\(hook=...\) is detached, by a fold perhaps: attach"):
        trainer.train()
