"""The Trainer callback: one line for the user, values beside the loss."""

import json
import shutil
from unittest import mock

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

import betahook
from betahook import checkpoint
from betahook.integrations.trainer import BetaHookCallback
from support.models import build, inputs
from support.trainer import Tokens, make_trainer
from support.training import LAYER


def events(folder):
    """Every scalar tag of the one TensorBoard run below a folder."""
    runs = {path.parent for path in folder.rglob("events.out.tfevents.*")}
    assert len(runs) == 1
    accumulator = EventAccumulator(str(runs.pop()), size_guidance={"scalars": 0})
    return accumulator.Reload()


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


BRIEF = betahook.Search(warmup=1, rise_batches=1, plateau_batches=0)


@pytest.mark.parametrize(
    ("controller", "warned"),
    [(betahook.Search(), True), (BRIEF, False), (betahook.Search(rise=False), False), ("monitor", False)],
)
def test_a_training_too_short_for_the_opening_is_named_in_its_first_step(tmp_path, caplog, controller, warned):
    trainer = make_trainer(tmp_path, BetaHookCallback(controller), max_steps=3)
    begun = []

    class Begin(TrainerCallback):
        def on_step_end(self, *args, **kwargs):
            begun.append("training ends after 3 steps, and [Search(" in caplog.text)

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
    assert "on the input of the model's last forward, and there was none" in caplog.text
    callback.hook.detach()


@pytest.mark.parametrize("unfinished", ["better", "own"])
def test_the_best_model_of_a_short_run_is_the_one_that_was_evaluated(tmp_path, monkeypatch, unfinished):
    """Its beta is still on its way; the evaluation outweighs one batch on which the model's own beta does better."""
    monkeypatch.setattr("betahook.keep.transition._losses", lambda hook: (2.0, 1.0))
    callback = BetaHookCallback(unfinished=unfinished)
    steps = dict(eval_strategy="steps", eval_steps=2, save_strategy="steps", save_steps=2, learning_rate=1e-2)
    trainer = make_trainer(tmp_path, callback, load_best_model_at_end=True, **steps)
    trainer.train()
    is_best = trainer.evaluate()["eval_loss"] == pytest.approx(trainer.state.best_metric, rel=1e-6)
    assert is_best is (unfinished == "better")  # "own" is what was asked for
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


def test_alerts_come_with_the_log(tmp_path):
    heard = []
    callback = BetaHookCallback(alerts=betahook.Alerts(heard.append, entropy=100.0))
    make_trainer(tmp_path, callback).train()
    assert [alert.step for alert in heard if alert.layer == LAYER] == [2, 4, 6]


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
    def fail(hook, unfinished):
        raise MemoryError("while it folds")

    callback = BetaHookCallback("monitor")
    monkeypatch.setattr("betahook.integrations.trainer.fold_or_warn", fail)
    trainer = make_trainer(tmp_path, callback, report_to="tensorboard")
    with pytest.raises(MemoryError, match="while it folds"):
        trainer.train()
    assert callback._reports is None
    callback.hook.detach()


def test_other_ranks_log_nothing(tmp_path):
    callback = BetaHookCallback()
    model = build("llama", "sdpa")
    state, control = TrainerState(is_world_process_zero=False, log_history=[{"loss": 1.0}]), TrainerControl()
    arguments = TrainingArguments(output_dir=str(tmp_path), report_to=[], use_cpu=True)
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


def test_after_the_fold_of_the_hook_that_it_was_given_a_callback_makes_no_other(tmp_path):
    """It knows nothing of the options that the hook was attached with."""
    trainer = make_trainer(tmp_path, Interrupt())
    trainer.pop_callback(Interrupt)
    trainer.add_callback(BetaHookCallback(hook=betahook.attach(trainer.model, controller="monitor", interval=5)))
    trainer.train()
    with pytest.raises(ValueError, match=r"BetaHookCallback\(hook=...\) is detached, by a fold perhaps: attach"):
        trainer.train()


class ScheduleFree(torch.optim.SGD):
    """Has two modes, as those of schedulefree, which put other weights into the model in each."""

    training = False

    def train(self):
        self.training = True

    def eval(self):
        self.training = False


def test_the_weights_that_a_schedule_free_optimizer_ends_with_are_folded(tmp_path):
    trainer = make_trainer(tmp_path, BetaHookCallback())
    optimizer = trainer.optimizer = ScheduleFree(trainer.model.parameters(), lr=0.1)
    modes = []
    with mock.patch(
        "betahook.integrations.trainer.fold_or_warn", side_effect=lambda *_, **__: modes.append(optimizer.training)
    ):
        trainer.train()
    assert modes == [False]


def test_the_hook_of_another_model_is_refused(tmp_path):
    with betahook.attach(build("llama")) as hook:
        trainer = make_trainer(tmp_path, BetaHookCallback(hook=hook))
        with pytest.raises(ValueError, match="got a hook of another model than that of the Trainer"):
            trainer.train()


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
