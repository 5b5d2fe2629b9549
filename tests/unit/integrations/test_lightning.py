"""`BetaHook` where Lightning need not be installed: a stand-in calls it. `tests/stacks` has the real Trainer."""

import importlib
import math
import sys
from dataclasses import dataclass
from types import ModuleType, SimpleNamespace

import pytest
import torch

import betahook
from betahook.step import training_loss
from support.models import build, inputs


@pytest.fixture(scope="module")
def lightning():
    """The module of the callback, imported with a stand-in for Lightning, and forgotten afterwards."""
    name, stand_in = "betahook.integrations.lightning", ModuleType("lightning.pytorch")
    for base in ("Callback", "LightningModule", "Trainer"):
        setattr(stand_in, base, type(base, (), {}))
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "lightning", ModuleType("lightning"))
        patch.setitem(sys.modules, "lightning.pytorch", stand_in)
        patch.setitem(sys.modules, name, None)
        del sys.modules[name]
        yield importlib.import_module(name)


class Logger:
    """What Lightning's base class of loggers has: a user's own need not have an `experiment`."""

    def __init__(self):
        self.steps = []

    def log_metrics(self, metrics, step):
        self.steps.append(step)


@dataclass(frozen=True)
class Judge(betahook.Monitor):
    uses_loss = True


@pytest.fixture
def fitting(lightning):
    """A callback on a tiny model, of a Trainer that accumulates two batches, and a function that trains on one."""
    module = torch.nn.Module()
    module.model = build("llama", "sdpa")
    callback = lightning.BetaHook(Judge(), interval=1, on_end="keep")
    trainer = SimpleNamespace(global_step=0, log_every_n_steps=1, is_global_zero=True, loggers=[Logger()])
    trainer.precision_plugin, trainer.accumulate_grad_batches, trainer.ckpt_path = None, 2, None
    trainer.checkpoint_callbacks = []
    trainer.fit_loop = SimpleNamespace(epoch_loop=SimpleNamespace(_batches_that_stepped=0))

    def train_on_batch(*, steps, weight=1.0, counts=True):
        loss = module.model(**inputs("llama")).loss
        loss = loss * weight / trainer.accumulate_grad_batches
        loss.backward()
        trainer.global_step += steps
        callback.on_train_batch_end(trainer, module, loss, None, 0)
        trainer.fit_loop.epoch_loop._batches_that_stepped += counts

    def begin_fit(loaded=None):
        callback.setup(trainer, module, "fit")
        if loaded is not None:
            callback.load_state_dict(loaded)
        callback.on_fit_start(trainer, module)
        callback.on_train_start(trainer, module)

    begin_fit()
    functions = dict(train_on_batch=train_on_batch, begin_fit=begin_fit)
    yield SimpleNamespace(callback=callback, trainer=trainer, module=module, **functions)
    callback.hook.detach()


@pytest.mark.parametrize(("every", "logged"), [(0, []), (1, [0, 1, 2]), (2, [1])])
def test_a_summary_is_logged_as_often_as_lightning_logs(fitting, every, logged):
    """Never with 0."""
    fitting.trainer.log_every_n_steps = every
    for _ in range(3):
        fitting.train_on_batch(steps=1)
    assert fitting.trainer.loggers[0].steps == logged
    assert fitting.callback.hook.steps == 3


@pytest.mark.parametrize(
    ("steps", "logged"),
    [([2, 2, 2, 2], [1, 3]), ([1, 2, 2, 2], [1, 3]), ([1, 0, 1, 0, 1, 0], [2, 4]), ([0, 1, 0, 1], [1, 3])],
)
def test_a_summary_is_logged_by_batch_where_optimizers_step_by_hand(fitting, steps, logged):
    """Lightning counts each batch then, with as many steps as it has; without one, the next with a step is logged."""
    fitting.trainer.log_every_n_steps = 2
    for each in steps:
        fitting.train_on_batch(steps=each)
    assert fitting.trainer.loggers[0].steps == logged


def test_a_fit_that_is_resumed_goes_on_counting_where_it_was(fitting):
    fitting.trainer.log_every_n_steps = 10
    fitting.trainer.fit_loop.epoch_loop._batches_that_stepped = 18
    fitting.begin_fit()
    for _ in range(3):
        fitting.train_on_batch(steps=1)
    assert fitting.trainer.loggers[0].steps == [19]


def test_a_step_of_a_fit_that_was_broken_off_does_not_count_in_the_next(fitting):
    def seen():
        fitting.train_on_batch(steps=1)
        sensitivity = next(iter(fitting.callback.hook.layers.values())).statistics.sensitivity
        return training_loss.pooled(fitting.callback.hook._state).item(), sensitivity.item()

    alone = seen()
    fitting.train_on_batch(steps=0, weight=1e3, counts=False)  # the first of the two batches of a step
    fitting.begin_fit()
    assert seen() == pytest.approx(alone)


def betas(hook):
    return [layer.beta for layer in hook.layers.values()]


def set_beta(hook, beta):
    for layer in hook.layers.values():
        layer.beta = beta


@pytest.mark.parametrize("stage", ["test", "validation", "predict"])
def test_a_checkpoint_without_beta_is_evaluated_with_the_models_own(fitting, stage):
    """That of a folded or a plain model, after one that left the module hooked."""
    callback, arguments = fitting.callback, (fitting.trainer, fitting.module)
    set_beta(callback.hook, 2.0)
    callback.setup(*arguments, stage)
    getattr(callback, f"on_{stage}_start")(*arguments)
    assert betas(callback.hook) == pytest.approx([2.0, 2.0])  # no checkpoint: the model as it is
    fitting.trainer.ckpt_path = "plain.ckpt"
    other = torch.nn.Module()
    callback.setup(fitting.trainer, other, stage)
    getattr(callback, f"on_{stage}_start")(fitting.trainer, other)
    assert callback.hook.attached
    callback.setup(*arguments, stage)
    getattr(callback, f"on_{stage}_start")(*arguments)
    assert not callback.hook.attached


def test_a_fit_from_a_checkpoint_without_beta_begins_anew(fitting):
    fitting.train_on_batch(steps=1)
    set_beta(fitting.callback.hook, 2.0)
    state = fitting.callback.state_dict()
    fitting.trainer.ckpt_path = "some.ckpt"
    fitting.begin_fit(loaded=state)
    assert betas(fitting.callback.hook) == pytest.approx([2.0, 2.0])
    fitting.begin_fit()
    assert betas(fitting.callback.hook) == pytest.approx([math.nan] * 2, nan_ok=True)  # the model's own
    assert fitting.callback.hook.steps == 0
    set_beta(fitting.callback.hook, 3.0)
    fitting.callback.on_validation_start(fitting.trainer, fitting.module)  # within the fit
    assert betas(fitting.callback.hook) == pytest.approx([3.0, 3.0])


def other_module():
    module = torch.nn.Module()
    module.model = build("llama", "sdpa")
    return module


@pytest.mark.parametrize("stage", ["fit", "test"])
def test_a_model_that_was_fitted_keeps_its_beta_when_the_callback_meets_another(fitting, stage):
    """As in a cross validation; when it meets the first again, it goes on with the hook of that one."""
    callback, trainer, first = fitting.callback, fitting.trainer, fitting.callback.hook
    set_beta(first, 2.0)
    state = callback.state_dict()
    callback.on_fit_end(trainer, fitting.module)
    other = other_module()
    callback.setup(trainer, other, stage)
    if stage == "fit":
        callback.on_fit_start(trainer, other)
        callback.on_fit_end(trainer, other)
    else:
        callback.load_state_dict(state)
        callback.on_test_start(trainer, other)
    second = callback.hook
    assert second.model is other.model
    assert betas(first) == pytest.approx([2.0, 2.0])
    assert first.attached
    fitting.begin_fit()
    assert callback.hook is first
    assert second.attached
    second.detach()


def test_a_model_whose_fit_was_broken_off_is_given_back_when_the_callback_meets_another(fitting):
    first, other = fitting.callback.hook, other_module()
    fitting.callback.setup(fitting.trainer, other, "fit")
    fitting.callback.on_fit_start(fitting.trainer, other)
    assert not first.attached
    assert fitting.callback.hook.model is other.model


def test_layers_that_come_back_in_another_model_get_a_new_hook(fitting):
    first, whole = fitting.callback.hook, torch.nn.Module()
    fitting.callback.on_fit_end(fitting.trainer, fitting.module)
    whole.one, whole.other = fitting.module.model, build("llama", "sdpa")
    fitting.callback.setup(fitting.trainer, whole, "fit")
    fitting.callback.on_fit_start(fitting.trainer, whole)
    assert not first.attached
    assert fitting.callback.hook.model is whole


def test_another_callback_does_not_take_over_a_hook(lightning, fitting):
    fitting.callback.on_fit_end(fitting.trainer, fitting.module)
    other = lightning.BetaHook("monitor")
    with pytest.raises(RuntimeError, match="hooked already"):
        other.on_fit_start(fitting.trainer, fitting.module)


@pytest.mark.parametrize(
    ("controller", "weights_only", "warned"),
    [("default", True, True), ("monitor", True, False), ("default", False, False)],
)
def test_checkpoints_that_lose_beta_are_named_when_training_begins(
    lightning, fitting, caplog, controller, weights_only, warned
):
    fitting.callback.hook.detach()
    callback = lightning.BetaHook(controller)
    fitting.trainer.checkpoint_callbacks = [SimpleNamespace(save_weights_only=weights_only)]
    callback.setup(fitting.trainer, fitting.module, "fit")
    callback.on_fit_start(fitting.trainer, fitting.module)
    callback.on_train_start(fitting.trainer, fitting.module)
    callback.hook.detach()
    assert ("leave save_weights_only out" in caplog.text) is warned


class Pair(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.other = build("llama", "sdpa"), build("llama", "sdpa")

    def forward(self, batch):
        return self.one(**batch).loss + self.other(**batch).loss


@pytest.mark.parametrize(
    ("controller", "on_end", "whole", "warned"),
    [
        ("default", "fold", False, True),
        ("default", "fold", True, False),
        ("default", "keep", False, False),
        ("monitor", "fold", False, False),
    ],
)
def test_a_training_step_that_leaves_fold_nothing_to_run_is_named_at_once(
    lightning, fitting, caplog, controller, on_end, whole, warned
):
    callback, module, trainer = lightning.BetaHook(controller, on_end=on_end), Pair(), fitting.trainer
    trainer.accumulate_grad_batches, trainer.loggers = 1, []
    callback.setup(trainer, module, "fit")
    callback.on_fit_start(trainer, module)
    callback.on_train_start(trainer, module)
    for _ in range(2):
        batch = inputs("llama")
        loss = module(batch) if whole else module.one(**batch).loss + module.other(**batch).loss
        loss.backward()
        trainer.global_step += 1
        callback.on_train_batch_end(trainer, module, loss, batch, 0)
    callback.hook.detach()
    assert caplog.text.count("did not call Pair as a whole") == warned
