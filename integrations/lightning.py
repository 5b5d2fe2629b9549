"""betahook in Lightning: a callback that attaches when fitting begins and steps after every optimizer step.

Needs the package `lightning`; nothing else in betahook imports this file.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from typing import Any, Literal

import numpy
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn

from betahook.hook import Hook, attach, check_options, hooks_of
from betahook.keep.folding import check_end, fold_or_warn, warn_of_refusals
from betahook.keep.transition import Unfinished
from betahook.models.discovery import survey
from betahook.options import ControllerChoice
from betahook.report.findings import Findings
from betahook.report.glance import TAG, TrackedPicture
from betahook.report.metrics import MetricName, check_names, select
from betahook.report.summary import Summary
from betahook.step import training_loss

from . import makers

__all__ = ["BetaHook"]

logger = logging.getLogger(__name__)


class BetaHook(Callback):  # type: ignore[misc]  # where Lightning is not installed
    """Lightning callback that hooks a model, runs the controller after every optimizer step and logs a summary.

        trainer = lightning.Trainer(max_epochs=3, callbacks=[BetaHook()])

    It hooks the only child of the `LightningModule` that has attention, or the whole module if several have. Every
    `log_every_n_steps` steps, all loggers receive a summary of all layers, a dozen numbers whose names begin with
    `attention/`; those of TensorBoard and W&B also receive the picture at a glance now and then. When the condition of
    a layer changes, a line is logged.

    A checkpoint holds the weights without beta, and the state of the hook beside them. Any `Trainer` with this callback
    that loads it, to fit or to test, uses the beta that belongs to the weights, or the model's own if the checkpoint
    has no such state. At the end of fitting, beta is folded into the weights. For this, `training_step` must call the
    hooked model as a whole, as by `self(batch)`; if it only calls parts of the model, a warning says so after the first
    step, or under DDP at the end.

    Args:
        controller, options: as for `betahook.attach`.
        quantities: metrics to log for each layer too, as `quantity/layer`, or "all".
        on_end: "fold", as above; if a layer has no exact fold, the hook stays and a warning says why. "keep" leaves the
            model hooked, with its beta, for you to `fold` or `detach`, even if the callback is then used for another
            model.
        unfinished: the beta to fold if training ends early, see `betahook.fold`.

    Attributes:
        hook: the hook, set when a stage of the Trainer begins; None before that.

    Raises:
        ValueError: an option has a value that makes no sense.
        TypeError: there is no such option, or it has the wrong type.
    """

    def __init__(
        self,
        controller: ControllerChoice = "default",
        *,
        quantities: Iterable[MetricName] | Literal["all"] = (),
        on_end: Literal["fold", "keep"] = "fold",
        unfinished: Unfinished = "better",
        **options: Any,
    ) -> None:
        check_end(on_end, unfinished)
        self.hook: Hook | None = None
        self._options = check_options(controller=controller, **options)
        self._quantities = check_names(quantities)
        self._summarise = Summary()
        self._picture = TrackedPicture()
        self._on_end = on_end
        self._unfinished = unfinished
        self._loaded: dict[str, Any] | None = None
        self._starting: str | None = None  # the stage whose checkpoint, if any, is yet to be loaded
        self._stepped, self._counted, self._is_fitting = 0, 0, False
        self._losses: list[Tensor] = []

    def state_dict(self) -> dict[str, Any]:
        return {} if self.hook is None or not self.hook.attached else self.hook.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._loaded = state_dict  # not applied yet: the model may still be moved or sharded

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._loaded, self._starting = None, stage  # Lightning loads a checkpoint after this

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._attach(pl_module)
        self._is_fitting = True

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self.hook is not None:  # its fit may have been interrupted while accumulating gradients
            training_loss.forget_unfinished(self.hook._state)
        self._losses.clear()
        self._load(trainer, pl_module)
        self._stepped, self._counted = trainer.global_step, _counted_by_loggers(trainer)
        if self._on_end == "fold" and self.hook is not None:
            warn_of_refusals(self.hook)
        _warn_of_weights_only(self.hook, trainer)

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._load(trainer, pl_module)

    on_test_start = on_predict_start = on_validation_start

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        assert self.hook is not None
        returned = outputs.get("loss") if isinstance(outputs, Mapping) else outputs
        if isinstance(returned, Tensor):
            self._losses.append(returned.detach())
        if trainer.global_step == self._stepped:
            return  # gradients are still being accumulated
        self._stepped = trainer.global_step
        loss = self._loss_of_step(self.hook, trainer)
        self.hook.step(getattr(trainer.precision_plugin, "scaler", None), loss=loss)
        if self.hook.steps == 1 and self._on_end == "fold":
            _warn_of_parts(self.hook)
        # Lightning counts this batch after this call, and logs the loss of the first step as that of step 0.
        step, every = _counted_by_loggers(trainer), trainer.log_every_n_steps  # 0 for never
        before, self._counted = self._counted, step + 1
        # In manual optimization, the batch at which Lightning logs may be one without a step.
        if trainer.is_global_zero and every and self._counted // every > before // every:
            with self.hook.layers.reading_once():
                details, findings = select(self.hook.metrics(), self._quantities), self.hook.findings()
            logs = {**self._summarise(findings), **details}
            for each in trainer.loggers:
                each.log_metrics(dict(logs), step=step)
            self._show(findings, trainer.loggers, step)

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._is_fitting = False
        if self._on_end == "fold" and self.hook is not None and self.hook.attached:
            fold_or_warn(self.hook, self._unfinished)

    def _show(self, findings: Findings, loggers: Iterable[Any], step: int) -> None:
        """Send the picture at a glance, if it is due, to the loggers that take images: those of TensorBoard and W&B."""
        showing = [
            each
            for each in loggers
            if hasattr(each, "log_image") or hasattr(getattr(each, "experiment", None), "add_image")
        ]
        self._picture.add(findings)
        image = self._picture.image_if_due("the loggers") if showing else None
        for each in showing if image is not None else ():
            if hasattr(each, "log_image"):
                each.log_image(TAG, [image], step=step)
            else:
                each.experiment.add_image(TAG, numpy.array(image), step, dataformats="HWC")

    def _loss_of_step(self, hook: Hook, trainer: Trainer) -> Tensor | None:
        """Return the mean loss of `training_step` since the last step, and start afresh; None if nothing needs it.

        Lightning divides each loss by `accumulate_grad_batches`, even in a step with fewer batches; this is undone
        here.
        """
        losses, self._losses = self._losses, []
        if not losses or not any(training_loss.demand(hook.controllers)):
            return None
        batches: int = trainer.accumulate_grad_batches
        return torch.stack(losses).mean() * batches

    def _attach(self, module: nn.Module) -> Hook:
        """Hook the model in a module, unless this callback has hooked it already; return the hook."""
        model = _model_in(module)
        if self.hook is None or not self.hook.attached or self.hook.model is not model:
            self._leave_last(module)
            earlier = (hook for hook in makers.made_by(self, model) if hook.model is model)
            self.hook = next(earlier, None) or attach(model, **self._options)
            makers.note(self.hook, self)
        return self.hook

    def _leave_last(self, module: nn.Module) -> None:
        """Drop the last hook; detach it if it is on layers of this module, or if its fit was interrupted."""
        hook, self.hook = self.hook, None
        was_fitting, self._is_fitting = self._is_fitting, False
        if hook is not None and (was_fitting or hook in hooks_of(module)):
            hook.detach()

    def _load(self, trainer: Trainer, module: nn.Module) -> None:
        """Load the beta of the checkpoint that the weights came from, or return to the model's own if it has none.

        This is done when a stage begins; an evaluation during a fit does not begin one.
        """
        stage, self._starting = self._starting, None
        state, self._loaded = self._loaded, None
        if stage is None:
            return
        if state is not None:
            self._attach(module).load_state_dict(state)
        elif trainer.ckpt_path and self.hook is not None and self.hook.model in module.modules():
            self.hook.detach()
            if stage == "fit":
                self._attach(module)


# https://github.com/Lightning-AI/pytorch-lightning/blob/2.6.6/src/lightning/pytorch/loops/training_epoch_loop.py
def _counted_by_loggers(trainer: Trainer) -> int:
    """Return the number that Lightning logs the loss by: batches so far, without those that only accumulate gradients.

    `trainer.global_step` adds up the steps of all optimizers, and no public attribute holds this number.
    """
    count: int = trainer.fit_loop.epoch_loop._batches_that_stepped
    return count


def _warn_of_weights_only(hook: Hook | None, trainer: Trainer) -> None:
    """Warn if checkpoints will lose beta, since they save weights without the states of callbacks."""
    if hook is None or not any(controller.moves_beta for controller in hook.controllers):
        return
    if any(getattr(each, "save_weights_only", False) for each in trainer.checkpoint_callbacks):
        logger.warning(
            "ModelCheckpoint(save_weights_only=True) saves weights without the beta that they are trained with, and "
            "nothing brings it back: leave save_weights_only out"
        )


def _warn_of_parts(hook: Hook) -> None:
    """Warn if `training_step` only calls parts of the model, so that `fold` has no call to run again."""
    if hook.last_call.input is None and any(controller.moves_beta for controller in hook.controllers):
        name = type(hook.model).__name__
        logger.warning(
            "training_step did not call %s as a whole, without a cache, and fold() checks itself on such a call: beta "
            "will not be folded when fitting ends. Give %s a forward that runs its parts, and call that in "
            "training_step, self(batch), or once after the fit, before betahook.fold(module)",
            name,
            name,
        )


def _model_in(module: nn.Module) -> nn.Module:
    """Return the only child that has attention, which may save itself with its beta; else the whole module."""
    children = [child for child in module.children() if survey(child).found]
    return children[0] if len(children) == 1 else module
