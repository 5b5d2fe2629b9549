"""betahook in the Hugging Face Trainer: a callback, and `watch`, which also sends metrics to all of its reporters."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Iterable
from contextlib import ExitStack, nullcontext
from pathlib import Path
from typing import Any, Literal

from torch import nn
from transformers import PreTrainedModel, Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_callback import CallbackHandler

from betahook import checkpoint
from betahook.hook import Hook, attach, check_options, hooks_of
from betahook.keep.folding import check_end, fold_or_warn, warn_of_refusals
from betahook.keep.transition import Unfinished, warn_of_short_training
from betahook.options import ControllerChoice, LayerChoice
from betahook.report import metrics
from betahook.report.alerts import Alerts
from betahook.report.metrics import MetricName
from betahook.step import training_loss

from . import checkpoints, makers, training
from .checkpoints import last_checkpoint
from .reports import Reports, is_training, with_trackers

__all__ = ["BetaHookCallback", "last_checkpoint", "watch"]

logger = logging.getLogger(__name__)

_training: weakref.WeakSet[Hook] = weakref.WeakSet()
"""Hooks made by callbacks whose training has not ended: the next training may replace one that Ctrl-C left."""


class BetaHookCallback(TrainerCallback):
    """Trainer callback that hooks the model, runs the controller after every optimizer step and logs with the loss.

        trainer = Trainer(model=model, ..., callbacks=[BetaHookCallback()])

    It attaches when training begins. Each log of the training loss also has a summary of all layers, a dozen numbers
    whose names begin with `attention/`: in `trainer.state.log_history` and, with `report_to="tensorboard"`, in the run
    of the loss, beside a picture and findings in words. Other trackers get the summary only through `watch(trainer)`,
    since a callback runs after the Trainer's reporters. Only the main process logs.

    Every checkpoint holds the state of the hook, and `trainer.train(resume_from_checkpoint=...)` continues from it,
    wherever the folder is. A checkpoint that was saved without betahook continues with the model's own beta and a
    warning; if it is not in `output_dir`, name it in `TrainingArguments(resume_from_checkpoint=...)` too. Controllers
    other than the saved ones take over, with a warning, if beta is still the model's own. A checkpoint in the middle of
    a run holds the weights without beta: use it with this callback, or with `betahook.restore`, not alone.

    An interrupted training leaves its hook on the model: the same callback continues with it, another one removes it
    with a warning and begins with the model's own beta. A process that is killed while it saves leaves an unfinished
    checkpoint in `output_dir`, which `resume_from_checkpoint=True` would take for the newest one; when the next Trainer
    is made, it is renamed to `unfinished-checkpoint-N.1` with a warning.

    At the end of training, beta is folded into the weights: the model is plain again, and `trainer.save_model()` cannot
    lose it. With `load_best_model_at_end`, it is the beta that was in force when the best checkpoint was saved.

    Args:
        controller, layers, per_head, interval, when, exact_max_logit, alerts: as for `betahook.attach`. Alerts also go
            to W&B and Trackio, if `report_to` names them.
        quantities: metrics to report for each layer too, as `quantity/layer`, or "all".
        hook: a hook that is attached to the model already, instead of these options.
        on_end: "fold", as above; if a layer has no exact fold, the hook stays and a warning says why. "keep" leaves the
            model hooked, with its beta, for you to `fold` or `detach`; further training of it with this callback
            continues with that hook.
        unfinished: the beta to fold if training ends while a controller is still moving beta to its target, see
            `betahook.fold`; a warning says which one was folded. After loading the best model, "better" folds the beta
            that was evaluated with it.

    Attributes:
        hook: the hook, set when training begins; None before that, unless it was given.

    Raises:
        ValueError: both a hook and options for a new one are given, or an option has a value that makes no sense.
        TypeError: an option has the wrong type, or `hook` is not a hook.
    """

    def __init__(
        self,
        controller: ControllerChoice = "default",
        *,
        layers: LayerChoice | None = None,
        per_head: bool = False,
        interval: int | None = None,
        when: Literal["training", "always"] = "training",
        exact_max_logit: bool = False,
        alerts: Alerts | None = None,
        quantities: Iterable[MetricName] | Literal["all"] = (),
        hook: Hook | None = None,
        on_end: Literal["fold", "keep"] = "fold",
        unfinished: Unfinished = "better",
    ) -> None:
        self._options = check_options(
            controller=controller,
            layers=layers,
            per_head=per_head,
            interval=interval,
            when=when,
            exact_max_logit=exact_max_logit,
            alerts=alerts,
        )
        if not (hook is None or isinstance(hook, Hook)):
            raise TypeError(
                "BetaHookCallback(hook=...) takes what betahook.attach(model) returned, or nothing; got "
                f"{type(hook).__name__}"
            )
        if hook is not None and self._options != check_options():
            raise ValueError("BetaHookCallback(hook=...) takes no other option: options belong to attach()")
        check_end(on_end, unfinished)
        self.hook = hook
        self._given = hook
        self._quantities = metrics.check_names(quantities)
        self._on_end = on_end
        self._unfinished = unfinished
        self._reports: Reports | None = None
        self._handler: CallbackHandler | None = None  # set by `watch`
        self._end_accepting: list[weakref.finalize[Any, BetaHookCallback]] = []

    def on_init_end(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        model: nn.Module | None = None,
        **kwargs: Any,
    ) -> None:
        if model is not None:  # it may load a marked checkpoint before, or without, any training
            self._end_accepting.append(weakref.finalize(self, checkpoint.accept_marked_weights(model).remove))
        with args.main_process_first(local=args.save_on_each_node, desc="looking for unfinished checkpoints"):
            if args.should_save:
                checkpoints.set_unfinished_aside(Path(args.output_dir or "."))

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        resumed, model = state.global_step > 0, kwargs["model"]
        while self._end_accepting:
            self._end_accepting.pop()()
        _refuse_second(self, checkpoints.owner_in(state))
        if self._given is None:
            self._leave_last(model, resumed)
        else:
            _check_given(self._given, model)
        with ExitStack() as on_error:
            if self.hook is None or not self.hook.attached:
                _remove_interrupted(model, resumed)
                options = {**self._options, "alerts": with_trackers(self._options["alerts"], args)}
                with checkpoint.unmarked(model) if resumed else nullcontext():
                    self.hook = attach(model, **options)
                on_error.callback(self.hook.detach)
            training_loss.forget_unfinished(self.hook._state)
            if resumed:
                checkpoints.resume(self.hook, args, state)
            on_error.pop_all()
        self.hook._state.loss_ranks = training.ranks_of_a_loss(args, model)
        if self.hook is not self._given:
            _training.add(self.hook)
            makers.note(self.hook, self)
        checkpoints.add_to_state(self.hook, state, self)
        if self._on_end == "fold":
            warn_of_refusals(self.hook)
        if self._reports is not None:  # of an interrupted training
            self._reports.close()
        self._reports = (
            Reports(self.hook, args, self._handler, self._quantities) if state.is_world_process_zero else None
        )

    def _leave_last(self, model: nn.Module, resumed: bool) -> None:
        """Drop the last hook, and continue with this callback's hook of the model, if training can go on with it."""
        last = self.hook
        self.hook = next((hook for hook in makers.made_by(self, model) if _is_on(hook, model)), None)
        if last is not None and last is not self.hook and last in _training:  # a trained model keeps its hook
            last.detach()
        if self.hook is not None and (resumed or (self.hook in _training and self.hook.steps == 0)):
            self.hook.detach()  # the weights are others now, or its first step failed

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        hook = _begun(self.hook)
        # Accelerate's optimizer holds the loss scaler, which is None except in float16 training.
        hook.step(getattr(kwargs.get("optimizer"), "scaler", None))
        if hook.steps == 1 and state.is_world_process_zero:  # the first step shows if W_q and W_k are fresh
            warn_of_short_training(hook, state.max_steps)

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        if self._reports is not None and is_training(logs):
            self._reports.log(state)

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        if self.hook is None or not args.should_save:  # of each node, with `save_on_each_node`
            return
        folder = checkpoints.folder_of_step(args, state)
        if folder.is_dir():
            checkpoints.save(self.hook, folder)
        else:
            logger.warning("beta of step %d was not saved: there is no %s", state.global_step, folder)

    def on_push_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if self.hook is None or not state.is_world_process_zero:
            return
        # The Trainer copies the files that it knows from the checkpoint to this folder, and pushes the folder.
        folder = Path(args.output_dir or ".")
        if self.hook.attached:
            checkpoint.save(self.hook, folder)
        else:
            (folder / checkpoint.FILE).unlink(missing_ok=True)

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        hook = _begun(self.hook)
        _training.discard(hook)
        try:
            is_best = args.load_best_model_at_end and checkpoints.load_best(hook, state.best_model_checkpoint)
            if not is_best and hasattr(kwargs.get("optimizer"), "eval"):
                kwargs["optimizer"].eval()  # switches a schedule-free optimizer to its final weights
            if self._on_end == "fold" and hook.attached:
                training.provide_input(hook, kwargs.get("train_dataloader"))
                fold_or_warn(hook, self._unfinished, is_best=is_best)
            if not hook.attached:
                checkpoints.remove_from_state(state)
        finally:
            if self._reports is not None:
                self._reports.close()
                self._reports = None


def _remove_interrupted(model: nn.Module, resumed: bool) -> None:
    """Remove a hook that another callback has left on this model, since its training was interrupted."""
    for left in hooks_of(model) & set(_training):
        left.detach()
        begins = "is replaced" if resumed else "is removed, and beta begins as the model's own again"
        logger.warning("the last training of this model was interrupted: its hook %s", begins)


def _begun(hook: Hook | None) -> Hook:
    """Return the hook of a callback whose training has begun."""
    if hook is None:
        raise RuntimeError("BetaHookCallback was added to a Trainer in training: add it before trainer.train()")
    return hook


def watch(trainer: Trainer, callback: BetaHookCallback | None = None) -> BetaHookCallback:
    """Add betahook to a Trainer, and its metrics to the logs of every tracker that the Trainer reports to.

        watch(trainer)  # or watch(trainer, BetaHookCallback()), to adapt beta
        trainer.train()

    The reporters of `report_to`, and those added as callbacks, log the metrics together with the training loss, from
    the main process. Console and progress bar stay as they were.

    Args:
        trainer: the Trainer, before its training begins.
        callback: betahook's options; None for the callback that the Trainer has already, or one that only measures.

    Returns:
        The callback, whose `hook` is set when training begins.

    Raises:
        ValueError: the Trainer has another `BetaHookCallback` already.
        TypeError: `trainer` is not a Trainer, or `callback` is not a `BetaHookCallback`.
    """
    if not isinstance(trainer, Trainer):
        raise TypeError(f"watch() takes a transformers.Trainer; got {type(trainer).__name__}")
    if not (callback is None or isinstance(callback, BetaHookCallback)):
        raise TypeError(
            f"watch(trainer, callback) takes a BetaHookCallback second; got {callback!r}. Options go into it: "
            'watch(trainer, BetaHookCallback("monitor"))'
        )
    handler = trainer.callback_handler
    own = next((added for added in handler.callbacks if isinstance(added, BetaHookCallback)), None)
    if own is not None and callback not in (None, own):
        raise ValueError(
            "watch(trainer, callback) got a second BetaHookCallback: leave it out, or call "
            "trainer.remove_callback(BetaHookCallback) first"
        )
    chosen = own or callback or BetaHookCallback("monitor")
    if own is None:
        trainer.add_callback(chosen)
        chosen.on_init_end(trainer.args, trainer.state, trainer.control, trainer.model)
    chosen._handler = handler
    return chosen


def _refuse_second(callback: BetaHookCallback, other: TrainerCallback | None) -> None:
    """Refuse a second callback in the same training, and detach the hook of the other one if that made it."""
    if other is callback or not isinstance(other, BetaHookCallback):
        return
    if other.hook is not None and other.hook is not other._given:
        other.hook.detach()
    if other._reports is not None:
        other._reports.close()
    raise ValueError(
        f"the Trainer has two BetaHookCallbacks, {_described(other)} and {_described(callback)}: keep one. "
        "trainer.remove_callback(BetaHookCallback) removes the first"
    )


def _described(callback: BetaHookCallback) -> str:
    if callback._given is not None:
        return f"one with a hook with {callback._given.controllers}"
    return f"one with the controller {callback._options['controller']!r}"


def _check_given(hook: Hook, model: nn.Module) -> None:
    """Refuse a hook that does not act on the model in training, or whose beta its checkpoints would not mention."""
    if not hook.attached:
        raise ValueError(
            "the hook of BetaHookCallback(hook=...) is detached, by a fold perhaps: attach to the model again and "
            "give that hook to a new callback"
        )
    if not _is_on(hook, model):
        raise ValueError("BetaHookCallback(hook=...) got a hook of another model than that of the Trainer")
    if isinstance(model, PreTrainedModel) and hook.model is not model and hook.model in set(model.modules()):
        raise ValueError(
            f"BetaHookCallback(hook=...) got a hook of a {type(hook.model).__name__}, a part of the "
            f"{type(model).__name__} that the Trainer saves: its checkpoints would not say that they need beta. Attach "
            "to the whole model, and choose its layers with layers=..."
        )


def _is_on(hook: Hook, model: nn.Module) -> bool:
    modules = set(model.modules())
    return all(layer.module in modules for layer in hook.layers.values())
