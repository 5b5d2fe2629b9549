"""`BetaHook` in Lightning: docs/STACKS.md, section Lightning."""

import csv
from pathlib import Path

import lightning
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger, Logger, TensorBoardLogger
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch.utils._pytree import tree_leaves

import betahook
from betahook.control.opening import Phase
from betahook.integrations.lightning import BetaHook
from betahook.report.pictures import PIXELS
from betahook.step import training_loss
from support.models import build
from support.pages import blocks, run
from support.trainer import Tokens

LAYER = "model.layers.0.self_attn"


class Module(lightning.LightningModule):
    def __init__(self, automatic=True):
        super().__init__()
        self.model = build("llama", "sdpa")
        self.automatic_optimization = automatic

    def training_step(self, batch, index):
        loss = self.model(**batch).loss
        if not self.automatic_optimization:
            self.manual_backward(loss)
            if index % 2:
                self.optimizers().step()
                self.optimizers().zero_grad()
        return loss

    def validation_step(self, batch, index):
        self.log("loss", self.model(**batch).loss)

    test_step = validation_step

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=1.0)


def search():
    return betahook.Search(window=1, warmup=0, rise=False, opening=1.0, largest=1.0)


def batches():
    return torch.utils.data.DataLoader(Tokens(), batch_size=8)  # eight of them


def make_trainer(folder, callback, epochs=2, *others, **options):
    options = dict(accelerator="cpu", enable_progress_bar=False, enable_model_summary=False) | options
    return lightning.Trainer(default_root_dir=folder, max_epochs=epochs, callbacks=[callback, *others], **options)


def test_the_block_of_the_page():
    names = run(*blocks("docs/STACKS.md", "Lightning"), module=Module(), batches=batches())
    assert names["callback"].hook.steps == names["trainer"].global_step == 8
    assert not names["callback"].hook.attached


@pytest.mark.parametrize(("accumulated", "optimizers"), [(1, 1), (2, 1), (1, 2)])
def test_the_numbers_stand_beside_the_loss(tmp_path, accumulated, optimizers):
    class Logging(Module):
        def training_step(self, batch, index):
            loss = super().training_step(batch, index)
            self.log("training_loss", loss)
            return loss

    class TwoOptimizers(Module):
        """As in a GAN whose discriminator sits out the first batch."""

        def __init__(self):
            super().__init__(automatic=False)

        def training_step(self, batch, index):
            loss = self.model(**batch).loss
            self.manual_backward(loss)
            for optimizer in self.optimizers()[: 2 if index else 1]:
                optimizer.step()
                optimizer.zero_grad()
            self.log("training_loss", loss)

        def configure_optimizers(self):
            return [torch.optim.SGD(part.parameters(), lr=0.1) for part in (self.model.model, self.model.lm_head)]

    options = {"logger": CSVLogger(tmp_path), "log_every_n_steps": 2, "accumulate_grad_batches": accumulated}
    module = Logging() if optimizers == 1 else TwoOptimizers()
    make_trainer(tmp_path, BetaHook(controller="monitor"), 1, **options).fit(module, batches())
    (file,) = Path(tmp_path).glob("**/metrics.csv")
    rows = list(csv.DictReader(file.read_text().splitlines()))
    for name in ("training_loss", "attention/max_logit"):
        assert [row["step"] for row in rows if row[name]] == [str(step) for step in range(1, 8 // accumulated, 2)]


def test_a_fresh_model_is_fresh_at_a_high_learning_rate(tmp_path):
    """Lightning runs the first forward inside the optimizer's step, as its closure."""

    class Fresh(Module):
        def __init__(self):
            super().__init__()
            for name, parameter in self.model.named_parameters():
                if "q_proj" in name or "k_proj" in name:
                    torch.nn.init.normal_(parameter, std=0.02)

        def configure_optimizers(self):
            return torch.optim.Adam(self.parameters(), lr=0.1)

    callback = BetaHook(on_end="keep")
    make_trainer(tmp_path, callback, max_steps=1, logger=False).fit(Fresh(), batches())
    assert Phase.WAIT not in callback.hook._state.memories[0]["phase"].tolist()
    callback.hook.detach()


def test_the_picture_goes_to_the_loggers_that_show_images(tmp_path):
    shown = []

    class Showing(CSVLogger):
        def log_image(self, key, images, step):
            shown.append((key, images[0].size, step))

    board = TensorBoardLogger(tmp_path)
    options = {"logger": [Showing(tmp_path), board, CSVLogger(tmp_path)], "log_every_n_steps": 2}
    make_trainer(tmp_path, BetaHook(controller="monitor"), 1, **options).fit(Module(), batches())
    assert shown == [("attention/at a glance", PIXELS, step) for step in (1, 3, 5)]
    events = EventAccumulator(board.log_dir).Reload()
    assert [event.step for event in events.Images("attention/at a glance")] == [1, 3, 5]


@pytest.mark.parametrize(("automatic", "size"), [(True, 3), (False, 2)])
def test_the_loss_is_the_mean_of_what_the_training_steps_return(tmp_path, automatic, size):
    """Also where the model itself returns none, and in the last step of an epoch, which has fewer batches."""
    returned, seen = [], []

    class Bare(Module):
        def training_step(self, batch, index):
            labels = batch.pop("labels")
            scores = self.model(**batch).logits[:, :-1].flatten(0, 1)
            loss = torch.nn.functional.cross_entropy(scores, labels[:, 1:].flatten())
            returned.append(loss.item())
            if not self.automatic_optimization:
                self.manual_backward(loss)
                if index % 2:
                    self.optimizers().step()
                    self.optimizers().zero_grad()
            return {"loss": loss}

    class Spy(lightning.Callback):
        def on_train_batch_end(self, *args):
            if callback.hook.steps > len(seen):
                seen.append(training_loss.pooled(callback.hook._state).item())

    callback = BetaHook(controller=betahook.Decades(window=1), on_end="keep")
    trainer = make_trainer(tmp_path, callback, 1, Spy(), accumulate_grad_batches=3 if automatic else 1, logger=False)
    trainer.fit(Bare(automatic), batches())
    steps = [returned[start : start + size] for start in range(0, len(returned), size)]
    assert seen == pytest.approx([sum(losses) / len(losses) for losses in steps])
    callback.hook.detach()


@pytest.mark.parametrize(("automatic", "steps"), [(True, 6), (False, 8)])
def test_beta_is_that_of_a_plain_loop(tmp_path, automatic, steps):
    """One step for each of the optimizer: three batches each by accumulation, whose rest steps too, or two by hand."""
    callback, module = BetaHook(controller=search(), on_end="keep"), Module(automatic)
    trainer = make_trainer(tmp_path, callback, accumulate_grad_batches=3 if automatic else 1, logger=False)
    trainer.fit(module, batches())
    assert callback.hook.model is module.model
    assert callback.hook.steps == trainer.global_step == steps

    model = build("llama", "sdpa").train()
    hook = betahook.attach(model, controller=search())
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    for _ in range(2):
        for index, batch in enumerate(batches()):
            (model(**batch).loss / (3 if automatic else 1)).backward()
            if (index % 3 == 2 or index == 7) if automatic else index % 2:
                optimizer.step()
                optimizer.zero_grad()
                hook.step()
    assert torch.equal(callback.hook.state_dict()["beta"], hook.state_dict()["beta"])
    hook.detach()


def test_a_resumed_run_ends_with_the_same_bits(tmp_path):
    def fit(folder, epochs, **resumed):
        callback, module = BetaHook(controller=search(), on_end="keep"), Module()
        make_trainer(folder, callback, epochs, logger=False).fit(module, batches(), **resumed)
        callback.hook.detach()
        return callback.hook.state_dict(), module.model.state_dict()

    whole = fit(tmp_path / "whole", 2)
    fit(tmp_path / "half", 1)
    (checkpoint,) = (tmp_path / "half").rglob("*.ckpt")
    resumed = fit(tmp_path / "rest", 2, ckpt_path=checkpoint, weights_only=True)
    tensors = ([each for each in tree_leaves(run) if isinstance(each, torch.Tensor)] for run in (whole, resumed))
    for one, other in zip(*tensors, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True)


def test_the_best_checkpoint_is_tested_with_its_own_beta(tmp_path):
    callback, module = BetaHook(controller=search()), Module()
    best = ModelCheckpoint(tmp_path, monitor="loss", mode="max", save_top_k=1)  # so that the last is not the best
    trainer = make_trainer(tmp_path, callback, 3, best, logger=False)
    trainer.fit(module, batches(), batches())
    last = trainer.callback_metrics["loss"]
    assert not callback.hook.attached
    torch.testing.assert_close(trainer.validate(module, batches(), verbose=False)[0]["loss"], float(last))
    tested = trainer.test(module, batches(), ckpt_path="best", verbose=False)[0]["loss"]
    assert tested == pytest.approx(float(best.best_model_score), rel=1e-5)
    assert tested > float(last) + 1e-3
    betahook.fold(module.model)
    torch.testing.assert_close(trainer.test(module, batches(), verbose=False)[0]["loss"], tested)

    fresh = Module()
    trainer = make_trainer(tmp_path, BetaHook(controller=search()), logger=False)
    assert trainer.test(fresh, batches(), ckpt_path=best.best_model_path, verbose=False)[0]["loss"] == tested


def test_a_checkpoint_of_a_folded_or_a_plain_model_is_tested_with_its_own_beta(tmp_path):
    """After one of a hooked model, which leaves the module hooked."""
    plain, kept = Module(), ModelCheckpoint(tmp_path / "kept", save_top_k=-1)
    trainer = make_trainer(tmp_path, ModelCheckpoint(tmp_path / "plain"), 1, logger=False)
    trainer.fit(plain, batches())
    callback, module = BetaHook(controller=search()), Module()
    paths = {"plain": trainer.checkpoint_callback.best_model_path, "folded": tmp_path / "folded.ckpt"}
    losses = {"plain": trainer.test(plain, batches(), verbose=False)[0]["loss"]}
    trainer = make_trainer(tmp_path, callback, 1, kept, logger=False)
    trainer.fit(module, batches())
    trainer.save_checkpoint(paths["folded"])
    losses["folded"] = trainer.test(module, batches(), verbose=False)[0]["loss"]
    hooked = kept.best_model_path  # which the checkpoints replace
    for name, path in paths.items():
        trainer.test(module, batches(), ckpt_path=hooked, verbose=False)
        assert callback.hook.attached
        assert trainer.test(module, batches(), ckpt_path=path, verbose=False)[0]["loss"] == losses[name]
        assert not callback.hook.attached


def test_a_summary_and_what_is_asked_for_go_to_the_loggers(tmp_path):
    callback, logger = BetaHook(controller="monitor", quantities=["score_std"]), CSVLogger(tmp_path)
    make_trainer(tmp_path, callback, 1, logger=logger, log_every_n_steps=4).fit(Module(), batches())
    rows = list(csv.DictReader(Path(logger.log_dir, "metrics.csv").read_text().splitlines()))
    for name in (f"score_std/{LAYER}", "attention/max_logit"):
        assert [row["step"] for row in rows if row[name]] == ["3", "7"]
    assert f"max_logit/{LAYER}" not in rows[0]


def test_a_logger_of_ones_own_gets_the_numbers(tmp_path):
    logged = []

    class Own(Logger):
        name, version = "own", 0

        def log_hyperparams(self, *args, **kwargs):
            pass

        def log_metrics(self, metrics, step=None):
            logged.extend(metrics)

    options = {"logger": Own(), "log_every_n_steps": 4}
    make_trainer(tmp_path, BetaHook(controller="monitor"), 1, **options).fit(Module(), batches())
    assert "attention/max_logit" in logged


def test_a_trainer_that_never_logs(tmp_path):
    callback, logger = BetaHook(controller="monitor"), CSVLogger(tmp_path)
    make_trainer(tmp_path, callback, 1, logger=logger, log_every_n_steps=0).fit(Module(), batches())
    assert callback.hook.steps == 8
    assert "attention/" not in "".join(path.read_text() for path in tmp_path.glob("**/metrics.csv"))


def test_a_model_without_exact_fold_stays_hooked_and_says_so(tmp_path, caplog):
    callback, module = BetaHook(controller=search()), Module()
    module.model.get_submodule(LAYER).clip_qkv = 8.0
    make_trainer(tmp_path, callback, 1, logger=False).fit(module, batches())
    assert callback.hook.attached
    assert "A model that is saved now needs betahook to act as it was trained" in caplog.text
    callback.hook.detach()


@pytest.mark.parametrize("whole", [True, False])
def test_a_module_whose_parts_are_called_folds_if_its_forward_calls_them(tmp_path, caplog, whole):
    """Of two parts with attention, all of the module is hooked."""

    class Pair(Module):
        def __init__(self):
            super().__init__()
            self.other = build("llama", "sdpa")

        def forward(self, batch):
            return self.model(**batch).loss + self.other(**batch).loss

        def training_step(self, batch, index):
            return self(batch) if whole else self.forward(batch)

    callback, module = BetaHook(controller=betahook.Variance(2.0)), Pair()
    make_trainer(tmp_path, callback, 1, logger=False).fit(module, batches())
    assert callback.hook.attached is not whole
    assert ("training_step did not call Pair as a whole" in caplog.text) is not whole
    if not whole:
        with torch.no_grad():
            module(next(iter(batches())))
        betahook.fold(module)


def test_checkpoints_of_the_weights_alone_are_named_when_training_begins(tmp_path, caplog):
    saving = ModelCheckpoint(tmp_path, save_weights_only=True)
    make_trainer(tmp_path, BetaHook(), 1, saving, logger=False).fit(Module(), batches())
    assert "ModelCheckpoint(save_weights_only=True) saves weights without the beta" in caplog.text


def test_a_second_fit_goes_on_with_a_hook_that_was_kept(tmp_path):
    callback, module = BetaHook(controller=search(), on_end="keep"), Module()
    make_trainer(tmp_path, callback, 1, logger=False).fit(module, batches())
    make_trainer(tmp_path, callback, 1, logger=False).fit(module, batches())
    assert callback.hook.steps == 16
    other = Module()
    make_trainer(tmp_path, callback, 1, logger=False).fit(other, batches())
    assert callback.hook.model is other.model
    betahook.fold(module.model)  # which kept its hook, and its beta
    callback.hook.detach()


@pytest.mark.parametrize(
    ("options", "error"),
    [
        (dict(contoller="monitor"), (TypeError, "unexpected keyword argument 'contoller'")),
        (dict(interval=0), (ValueError, "interval must be a whole number of steps, 1 or more; got 0")),
        (dict(on_end="drop"), (ValueError, "on_end must be .fold. or .keep.; got 'drop'")),
        (dict(unfinished="drop"), (ValueError, "unfinished must be")),
    ],
)
def test_options_are_checked(options, error):
    with pytest.raises(error[0], match=error[1]):
        BetaHook(**options)
