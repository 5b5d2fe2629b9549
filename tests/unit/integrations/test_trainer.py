"""The Trainer callback: one line for the user, values beside the loss."""

import gc
import json
import os
import pickle
from types import SimpleNamespace

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch.utils.tensorboard import SummaryWriter
from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState
from transformers.integrations import TensorBoardCallback

import betahook
from betahook.integrations import training
from betahook.integrations.trainer import BetaHookCallback, watch
from support.models import build, inputs
from support.trainer import arguments_of_rank_one, make_trainer
from support.training import LAYER


def events(folder):
    """Every scalar tag of the one TensorBoard run below a folder."""
    runs = {path.parent for path in folder.rglob("events.out.tfevents.*")}
    assert len(runs) == 1
    accumulator = EventAccumulator(str(runs.pop()), size_guidance={"scalars": 0})
    return accumulator.Reload()


@pytest.mark.parametrize(
    ("controller", "warned"),
    [
        (betahook.Search(), True),
        (betahook.Search.brief(), True),
        (betahook.Search(warmup=1, rise_batches=1, plateau_batches=0), False),
        (betahook.Search(rise=False), False),
        ("monitor", False),
    ],
)
def test_a_training_too_short_for_the_opening_is_named_in_its_first_step(tmp_path, caplog, controller, warned):
    trainer = make_trainer(tmp_path, BetaHookCallback(controller), max_steps=3)
    begun = []

    class Begin(TrainerCallback):
        def on_step_end(self, *args, **kwargs):
            begun.append("training ends after 3 steps, but Search(" in caplog.text)

    trainer.add_callback(Begin())
    trainer.train()
    assert begun == [warned] * 3


def test_a_training_of_known_weights_has_no_opening_to_be_too_short_for(tmp_path, caplog):
    """As in fine-tuning: W_q and W_k are far from fresh."""
    trainer = make_trainer(tmp_path, BetaHookCallback(), max_steps=3)
    with torch.no_grad():
        for name, parameter in trainer.model.named_parameters():
            if "q_proj" in name or "k_proj" in name:
                parameter.copy_(torch.outer(parameter[:, 0], parameter[0]))
    trainer.train()
    assert "training ends after" not in caplog.text


@pytest.mark.parametrize(("average", "parts", "ranks"), [(True, None, 8), (True, 2, 4), (False, None, 1)])
def test_over_how_many_ranks_the_items_of_a_batch_are_counted(average, parts, ranks):
    args = SimpleNamespace(average_tokens_across_devices=average, world_size=8)
    assert training.ranks_of_a_loss(args, SimpleNamespace(tp_size=parts)) == ranks


def test_metrics_join_the_loss_in_tensorboard(tmp_path):
    said = []

    class Listen(TrainerCallback):
        def on_log(self, args, state, control, logs=None, **kwargs):
            if "loss" in logs:
                metrics = callback.hook.metrics()
                largest = max(value for key, value in metrics.items() if key.startswith("max_logit/"))
                said.append((state.global_step, largest))

    callback = BetaHookCallback()
    trainer = make_trainer(tmp_path, callback, report_to="tensorboard", eval_strategy="steps", eval_steps=3)
    trainer.add_callback(Listen())
    trainer.train()
    run = events(tmp_path)
    for tag in ("train/loss", "eval/loss", "attention/max_logit"):
        assert tag in run.Tags()["scalars"]
    logged = [(event.step, event.value) for event in run.Scalars("attention/max_logit")]
    assert [step for step, _ in said] == [2, 4, 6]
    assert logged == [(step, pytest.approx(value)) for step, value in said]


@pytest.mark.parametrize("watched", [False, True])
@pytest.mark.parametrize("place", ["default", "named", "trial"])
def test_the_pages_lie_in_the_run_of_the_loss(tmp_path, monkeypatch, place, watched):
    """Also while another process writes to a newer one, and in a trial, whose folder goes before the one named."""
    if place != "default":
        monkeypatch.setenv("TENSORBOARD_LOGGING_DIR", str(tmp_path / "named"))
    other = tmp_path / "runs" / "other" / "events.out.tfevents.1700000000.elsewhere.1.0"
    other.parent.mkdir(parents=True)
    other.touch()
    os.utime(other, (2e9, 2e9))

    class Trial(TrainerCallback):
        def on_train_begin(self, args, state, control, **kwargs):
            state.is_hyper_param_search, state.trial_name = True, "trial"

    trainer = make_trainer(tmp_path, BetaHookCallback("monitor"), report_to="tensorboard")
    if place == "trial":
        trainer.callback_handler.callbacks.insert(0, Trial())
    if watched:
        watch(trainer)
    trainer.train()
    (pages,) = tmp_path.rglob("*.betahook")
    assert len(list(pages.parent.iterdir())) == 2
    assert place == "default" or pages.parent.name == place


def test_with_watch_the_pages_lie_in_the_run_of_a_writer_of_ones_own(tmp_path):
    trainer = make_trainer(tmp_path, BetaHookCallback("monitor"), report_to="tensorboard")
    (reporter,) = (each for each in trainer.callback_handler.callbacks if isinstance(each, TensorBoardCallback))
    reporter.tb_writer = SummaryWriter(str(tmp_path / "own"))
    watch(trainer)
    trainer.train()
    (pages,) = tmp_path.rglob("*.betahook")
    assert pages.parent == tmp_path / "own"


def test_the_history_holds_a_summary_beside_the_loss(tmp_path):
    trainer = make_trainer(tmp_path, BetaHookCallback("monitor"), eval_strategy="steps", eval_steps=3)
    trainer.train()
    entries = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert [entry["step"] for entry in entries] == [2, 4, 6]
    for entry in entries:
        assert entry["attention/log10_beta_over_own_lowest"] == entry["attention/log10_beta_over_own_highest"] == 0
        assert entry["attention/max_logit"] > 0
        assert len(json.dumps(entry, indent=2)) < 2_000
    assert not any("attention/max_logit" in entry for entry in trainer.state.log_history if "loss" not in entry)


@pytest.mark.parametrize("report_to", ["none", []])
def test_who_reports_to_nothing_gets_no_files(tmp_path, monkeypatch, report_to):
    monkeypatch.chdir(tmp_path)
    make_trainer(tmp_path / "out", BetaHookCallback(), report_to=report_to).train()
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


def test_training_is_that_of_a_plain_loop(tmp_path):
    """The callback steps once per optimizer step: beta is that of attach() and hook.step() by hand."""
    search = dict(window=2, warmup=0, rise=False, opening=0.3, largest=1.0)
    callback = BetaHookCallback(controller=betahook.Search(**search), on_end="keep")
    make_trainer(tmp_path, callback, gradient_accumulation_steps=2, max_grad_norm=0, optim="sgd", seed=5).train()

    model = build("llama", "sdpa")
    hook = betahook.attach(model, controller=betahook.Search(**search))
    reference = make_trainer(tmp_path / "reference", BetaHookCallback(hook=hook), seed=5, gradient_accumulation_steps=2)
    batches = iter(reference.get_train_dataloader())
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    torch.manual_seed(5)
    for step in range(6):
        for group in optimizer.param_groups:
            group["lr"] = 1e-3 * (1 - step / 6)
        for _ in range(2):
            (model(**next(batches)).loss / 2).backward()
        optimizer.step()
        optimizer.zero_grad()
        hook.step()
    trained = {name: layer.beta for name, layer in callback.hook.layers.items()}
    assert trained == pytest.approx({name: layer.beta for name, layer in hook.layers.items()}, rel=1e-6)
    assert any(layer.beta != pytest.approx(layer.beta_default) for layer in hook.layers.values())


def test_alerts_come_with_the_log(tmp_path):
    heard = []
    callback = BetaHookCallback(alerts=betahook.Alerts(heard.append, entropy=100.0))
    make_trainer(tmp_path, callback).train()
    assert [alert.step for alert in heard if alert.layer == LAYER] == [2, 4, 6]


def test_other_ranks_log_nothing(tmp_path):
    callback = BetaHookCallback()
    model = build("llama", "sdpa")
    state, control = TrainerState(is_world_process_zero=False, log_history=[{"loss": 1.0}]), TrainerControl()
    arguments = arguments_of_rank_one(output_dir=str(tmp_path))
    callback.on_train_begin(arguments, state, control, model=model)
    model(**inputs("llama"))
    callback.on_step_end(arguments, state, control)
    callback.on_log(arguments, state, control, logs={"loss": 1.0})
    (tmp_path / "checkpoint-0").mkdir()
    callback.on_save(arguments, state, control)
    callback.on_train_end(arguments, state, control)
    assert state.log_history == [{"loss": 1.0}]
    assert [path.name for path in tmp_path.rglob("*")] == ["checkpoint-0"]


@pytest.mark.parametrize(
    ("options", "error"),
    [({"controller": "serach"}, ValueError), ({"interval": 0}, ValueError), ({"on_end": "melt"}, ValueError)],
)
def test_options_are_checked_when_the_callback_is_made(options, error):
    with pytest.raises(error, match=f"{next(iter(options))} must be"):
        BetaHookCallback(**options)


def test_a_callback_can_be_sent_to_another_process():
    """As `notebook_launcher` and spawned ranks get it."""
    assert pickle.loads(pickle.dumps(BetaHookCallback(interval=2)))._options["interval"] == 2


def test_the_hook_of_another_model_is_refused(tmp_path):
    with betahook.attach(build("llama")) as hook:
        trainer = make_trainer(tmp_path, BetaHookCallback(hook=hook))
        with pytest.raises(ValueError, match="got a hook of another model than that of the Trainer"):
            trainer.train()


def test_the_hook_of_a_part_of_the_model_is_refused(tmp_path):
    """Its checkpoints would pass for plain ones."""
    model = build("llama")
    with betahook.attach(model.model) as hook:
        trainer = make_trainer(tmp_path, BetaHookCallback(hook=hook))
        trainer.model = model
        with pytest.raises(ValueError, match="got a hook of a LlamaModel, a part of the LlamaForCausalLM that the"):
            trainer.train()


class Forgetful(TrainerCallback):
    def on_log(self, args, state, control, **kwargs):
        state.log_history.clear()


def test_a_callback_that_empties_the_history_does_no_harm(tmp_path):
    trainer = make_trainer(tmp_path, Forgetful(), report_to="tensorboard", logging_steps=1)
    trainer.add_callback(BetaHookCallback("monitor"))
    trainer.train()
    assert trainer.state.global_step > 1


def test_two_callbacks_are_refused_by_name_and_leave_nothing(tmp_path):
    trainer = make_trainer(tmp_path, BetaHookCallback("monitor"), report_to="tensorboard")
    trainer.add_callback(BetaHookCallback(betahook.Search(rise=False)))
    with pytest.raises(ValueError, match=r"two BetaHookCallbacks, one with the controller 'monitor' and one with"):
        trainer.train()
    assert betahook.hook.hooks_of(trainer.model) == set()
    trainer.remove_callback(BetaHookCallback)
    trainer.train()
    with betahook.attach(trainer.model, "monitor") as hook:  # would be stepped twice in a step
        trainer = make_trainer(tmp_path, BetaHookCallback(hook=hook))
        trainer.model = trainer.model_wrapped = hook.model
        trainer.add_callback(BetaHookCallback(hook=hook))
        with pytest.raises(
            ValueError, match=r"and one with a hook with \[Monitor\(\)\]: keep one. trainer.remove_call"
        ):
            trainer.train()
        assert hook.attached


def test_a_callback_that_is_added_in_training_is_refused(tmp_path):
    class Late(TrainerCallback):
        def on_step_end(self, *args, **kwargs):
            trainer.add_callback(BetaHookCallback())

    trainer = make_trainer(tmp_path, Late(), max_steps=2)
    with pytest.raises(RuntimeError, match=r"was added to a Trainer in training: add it before trainer.train\(\)"):
        trainer.train()


@pytest.mark.parametrize("again", [False, True], ids=["once", "in two Trainers"])
def test_a_trainer_that_never_trains_leaves_nothing_on_its_model(tmp_path, again):
    callback = BetaHookCallback()
    trainers = [make_trainer(tmp_path, callback)]
    model = trainers[0].model
    if again:
        trainers.append(Trainer(model, trainers[0].args, callbacks=[callback]))
    assert model._load_state_dict_pre_hooks
    trainers.clear()
    del callback
    gc.collect()
    assert not model._load_state_dict_pre_hooks


def test_a_model_in_place_of_its_hook_is_refused_at_once():
    with pytest.raises(TypeError, match=r"takes what betahook.attach\(model\) returned, or nothing; got LlamaForC"):
        BetaHookCallback(hook=build("llama"))


def test_a_hook_takes_no_further_options():
    with betahook.attach(build("llama")) as hook, pytest.raises(ValueError, match="belong to attach"):
        BetaHookCallback(hook=hook, interval=2)


def test_without_tensorboard_training_goes_on(tmp_path, monkeypatch, caplog):
    """The reporter also writes with tensorboardX."""
    trainer = make_trainer(tmp_path, BetaHookCallback(), report_to="tensorboard")
    monkeypatch.setitem(__import__("sys").modules, "torch.utils.tensorboard", None)
    trainer.train()
    assert "pip install tensorboard; until then TensorBoard has no page of betahook" in caplog.text
