"""betahook in the Hugging Face Trainer: one callback."""

from __future__ import annotations

import inspect
import itertools
import json
import logging
import os
import weakref
from contextlib import nullcontext
from pathlib import Path
from typing import Any, Literal

from torch import nn
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.integrations.integration_utils import TensorBoardCallback, default_logdir
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR
from transformers.utils import CONFIG_NAME

from betahook import checkpoint, compat, options
from betahook.hook import Hook, attach, hooks_of
from betahook.keep.folding import FoldError, fold
from betahook.options import ControllerChoice, LayerChoice
from betahook.report.alerts import Alerts

from .tensorboard import TensorBoardWriter

logger = logging.getLogger(__name__)

_DEFAULTS = {
    name: parameter.default
    for name, parameter in inspect.signature(attach).parameters.items()
    if parameter.kind is parameter.KEYWORD_ONLY
}

_EXPORT = "betahook"
"""Key of the hook's state among those of the callbacks in the state of the Trainer. No class has this name: where one
has, `restore_callback_states_from_checkpoint` replaces the user's callback by one without its options."""

_training: weakref.WeakSet[Hook] = weakref.WeakSet()
"""Hooks made by callbacks whose training has not ended, so that the next one may replace what Ctrl-C left."""


class BetaHookCallback(TrainerCallback):
    """Attaches to the model when training begins, adapts beta after every optimizer step and logs with the loss.

        trainer = Trainer(model=model, ..., callbacks=[BetaHookCallback()])

    The metrics of `Hook.metrics` join the entries of `trainer.state.log_history` that hold the training loss, and go
    to the TensorBoard run of the loss, which is made if the Trainer does not report to TensorBoard itself. Only the
    main process logs.

    Every checkpoint gets the state of the hook, and `trainer.train(resume_from_checkpoint=...)` continues from it,
    wherever the folder is. The hook of a training that was broken off is replaced by that of the next one. When the
    Trainer is made, a checkpoint in its `output_dir` that was never finished, since its process was killed while it
    saved, is renamed to `unfinished-checkpoint-N.1` with a warning: `resume_from_checkpoint=True` takes the newest one
    by its name. A checkpoint in the middle of a run holds the weights without beta: use it with this callback, or with
    `betahook.restore`, not alone.

    At the end of training beta is folded into the weights: the model is plain again and `trainer.save_model()` cannot
    lose it. With `load_best_model_at_end`, it is the beta that stood when the best checkpoint was saved.

    Args:
        controller, layers, per_head, interval, when, alerts: as for `betahook.attach`.
        hook: a hook that is attached to the model already, instead of these options.
        on_end: "fold", as above; where a layer has no exact fold, the hook stays and a warning says why. "keep" leaves
            the model hooked, with its beta, for you to `fold` or `detach`.

    Attributes:
        hook: the hook, set when training begins; None before, unless it was given.

    Raises:
        ValueError: both a hook and options for a new one are given, or an option has a value that makes no sense.
        TypeError: an option has the wrong type.
    """

    def __init__(
        self,
        controller: ControllerChoice = "default",
        *,
        layers: LayerChoice | None = None,
        per_head: bool = False,
        interval: int = 1,
        when: Literal["training", "always"] = "training",
        alerts: Alerts | None = None,
        hook: Hook | None = None,
        on_end: Literal["fold", "keep"] = "fold",
    ) -> None:
        self._options: dict[str, Any] = {
            "controller": controller,
            "layers": layers,
            "per_head": per_head,
            "interval": interval,
            "when": when,
            "alerts": alerts,
        }
        if hook is not None and self._options != _DEFAULTS:
            raise ValueError("BetaHookCallback(hook=...) takes no other option: they belong to attach(), which made it")
        options.controllers(controller)
        options.Settings(per_head, interval, when)
        options.check_alerts(alerts)
        if on_end not in ("fold", "keep"):
            raise ValueError(f'on_end must be "fold" or "keep"; got {on_end!r}')
        self.hook = hook
        self._given = hook
        self._is_training = False
        self._on_end = on_end
        self._writer: TensorBoardWriter | None = None
        self._loss_writer: TensorBoardCallback | None = None

    def on_init_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        with args.main_process_first(local=args.save_on_each_node, desc="looking for unfinished checkpoints"):
            if args.should_save:
                _set_unfinished_aside(Path(args.output_dir or "."))

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        resumed, model = state.global_step > 0, kwargs["model"]
        if self._given is not None and not self._given.attached:
            raise ValueError(
                "the hook of BetaHookCallback(hook=...) is detached, by a fold perhaps: attach to the model again and "
                "give that hook to a new callback"
            )
        if self.hook is not None and self.hook.attached and not _is_on(self.hook, model):
            if self.hook is self._given:
                raise ValueError(
                    "BetaHookCallback(hook=...) got the hook of another model than the one that the Trainer trains"
                )
            if self._is_training:  # it was broken off
                self.hook.detach()
            self.hook = None
        self._is_training = True
        if self.hook is None or not self.hook.attached:
            for left in hooks_of(model) & set(_training):
                left.detach()
                logger.warning("the last training of this model was broken off: it begins with its own beta again")
            with checkpoint.unmarked(model) if resumed else nullcontext():
                self.hook = attach(model, **self._options)
        if self.hook is not self._given:
            _training.add(self.hook)
        if resumed:
            _resume(self.hook, args, state)
        _exports(state)[_EXPORT] = _Export(self.hook)
        if state.is_world_process_zero:
            self._open(args, state, control, **kwargs)

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        assert self.hook is not None
        # Accelerate's optimizer knows the scaler of the loss, None but in float16 training.
        self.hook.step(getattr(kwargs.get("optimizer"), "scaler", None))

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        if not state.is_world_process_zero or self.hook is None:
            return
        if self._loss_writer is not None:
            self._loss_writer.on_log(args, state, control, logs=logs, **kwargs)
        if logs is None or "loss" not in logs:
            return  # an evaluation or the final summary: betahook has nothing new to say
        # The reporters ran before this callback; the history is what can still be joined.
        metrics = self.hook.metrics()
        state.log_history[-1].update(metrics)
        if self._writer is not None:
            self._writer.write(self.hook, state.global_step, metrics)

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        if self.hook is None or not state.is_world_process_zero:
            return
        folder = _checkpoint(args, state)
        if folder.is_dir():
            checkpoint.save(self.hook, folder)
        else:
            logger.warning("beta of step %d was not saved: there is no %s", state.global_step, folder)

    def on_push_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if self.hook is None or not state.is_world_process_zero:
            return
        # The Trainer copies the files that it knows from the checkpoint to here, and pushes what is here.
        folder = Path(args.output_dir or ".")
        if self.hook.attached:
            checkpoint.save(self.hook, folder)
        else:
            (folder / checkpoint.FILE).unlink(missing_ok=True)

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        assert self.hook is not None
        self._is_training = False
        _training.discard(self.hook)
        if args.load_best_model_at_end and state.best_model_checkpoint is not None:
            checkpoint.load(self.hook, state.best_model_checkpoint)
        elif hasattr(kwargs.get("optimizer"), "eval"):
            kwargs["optimizer"].eval()  # a schedule-free one trains other weights than those that it ends with
        if self._on_end == "fold" and self.hook.attached:
            try:
                fold(self.hook)
            except FoldError as error:
                logger.warning("%s. A model that is saved now needs betahook to act as it was trained.", error)
        if not self.hook.attached:
            _exports(state).pop(_EXPORT, None)
        if self._loss_writer is not None:
            self._loss_writer.on_train_end(args, state, control, **kwargs)
            self._loss_writer = None
        if self._writer is not None:
            self._writer.close()
            self._writer = None

    def _open(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Open a writer on the run of the loss; make that run if the Trainer does not."""
        reported = "tensorboard" in (args.report_to or [])
        default = Path(args.output_dir or ".", default_logdir())
        run = os.environ.get("TENSORBOARD_LOGGING_DIR")
        if run is None and reported:
            run = _newest_run(default.parent)
        try:
            self._writer = TensorBoardWriter(run or str(default))
        except ImportError as error:
            logger.warning("%s; until then the metrics are in trainer.state.log_history only", error)
            return
        if not reported:
            self._loss_writer = TensorBoardCallback(self._writer.writer)
            self._loss_writer.on_train_begin(args, state, control, **kwargs)


def _exports(state: TrainerState) -> dict[str, Any]:
    """The states of callbacks by name in that of the Trainer, which takes a list of callbacks and makes this of it."""
    exports: Any = state.stateful_callbacks
    assert isinstance(exports, dict)
    return exports


class _Export:
    """Stands among the states of callbacks for that of a hook, as it is when the Trainer writes them."""

    def __init__(self, hook: Hook) -> None:
        self._hook = hook

    def __deepcopy__(self, memo: dict[int, Any]) -> dict[str, str]:
        """Return the state, for `dataclasses.asdict`, by which the Trainer writes its own, copies what it holds."""
        return checkpoint.export(self._hook)


def last_checkpoint(output_dir: str | os.PathLike[str]) -> str | None:
    """The newest whole checkpoint of a run with `BetaHookCallback`, for `resume_from_checkpoint`; None without any."""
    folders = _checkpoints(Path(output_dir))
    return next((str(folder) for folder in folders if checkpoint.is_begun(folder) and _is_whole(folder)), None)


def _checkpoints(run: Path) -> list[Path]:
    """The checkpoint folders of a run, the newest first."""
    prefix = f"{PREFIX_CHECKPOINT_DIR}-"
    folders = [folder for folder in run.glob(f"{prefix}*/") if folder.name.removeprefix(prefix).isdecimal()]
    return sorted(folders, key=lambda folder: int(folder.name.removeprefix(prefix)), reverse=True)


def _set_unfinished_aside(run: Path) -> None:
    """Rename the checkpoints that are newer than the newest whole one, in a run with betahook."""
    folders = _checkpoints(run)
    if not any(checkpoint.is_begun(folder) or not any(folder.iterdir()) for folder in folders):
        return  # of a run without betahook nothing is known
    for folder in itertools.takewhile(lambda folder: not _is_whole(folder), folders):
        names = (f"unfinished-{folder.name}.{number}" for number in itertools.count(1))
        aside = next(run / name for name in names if not (run / name).exists())
        folder.rename(aside)
        logger.warning(
            "%s was not finished, its process ended while it saved. It is called %s now; the newest whole one is %s",
            folder,
            aside.name,
            last_checkpoint(run) or "none",
        )


def _is_whole(folder: Path) -> bool:
    """Tell if the state of the Trainer, which it writes last, and that of the hook, if there was one, can be read."""
    try:
        TrainerState.load_from_json(str(folder / compat.trainer_state_name()))
        config = json.loads((folder / CONFIG_NAME).read_text()) if (folder / CONFIG_NAME).exists() else None
        # A model of transformers that is hooked writes the state of its hook before its config.
        if config is None or checkpoint.MARK in config or checkpoint.is_begun(folder):
            checkpoint.check(folder)
    except (OSError, ValueError):
        return False
    return True


def _checkpoint(args: TrainingArguments, state: TrainerState) -> Path:
    """The folder that the Trainer gives to the checkpoint of this step."""
    run, name = Path(args.output_dir or "."), f"{PREFIX_CHECKPOINT_DIR}-{state.global_step}"
    if state.is_hyper_param_search:  # each trial has a folder, whose name callbacks are not told
        return max(run.glob(f"*/{name}"), key=lambda folder: folder.stat().st_mtime_ns, default=run / name)
    return run / name


def _is_on(hook: Hook, model: nn.Module) -> bool:
    modules = set(model.modules())
    return all(layer.module in modules for layer in hook.layers.values())


def _resume(hook: Hook, args: TrainingArguments, state: TrainerState) -> None:
    """Continue from the checkpoint that the Trainer has resumed from: its file, or else what its state says.

    Raises:
        ValueError: the checkpoint is elsewhere, and an older version of betahook, or none, wrote it.
    """
    # The Trainer does not tell callbacks where it is: the arguments may, or it is that of this step in `output_dir`.
    named, last = args.resume_from_checkpoint, _checkpoint(args, state)
    folders = [Path(named), last] if isinstance(named, str) else [last]
    exported = _exports(state).get(_EXPORT)
    if (folder := next((folder for folder in folders if _has(folder, state)), None)) is not None:
        checkpoint.load(hook, folder)
    elif exported is not None:
        checkpoint.load_exported(hook, exported, f"{compat.trainer_state_name()} of the checkpoint to resume from")
    else:
        raise ValueError(
            f"the checkpoint to resume from is not {' or '.join(map(str, folders))}, and its "
            f"{compat.trainer_state_name()} says nothing of betahook. Name it in the arguments too, "
            "TrainingArguments(resume_from_checkpoint=folder), for betahook to find its beta"
        )


def _has(folder: Path, state: TrainerState) -> bool:
    """Tell if a folder has the checkpoint of this state."""
    try:
        there = TrainerState.load_from_json(str(folder / compat.trainer_state_name()))
    except FileNotFoundError:
        return False
    # By text: a NaN is no other NaN's equal.
    return there.global_step == state.global_step and json.dumps(there.log_history) == json.dumps(state.log_history)


def _newest_run(runs: Path) -> str | None:
    """The folder of the newest event file below `runs`: the one that the Trainer has just opened."""
    files = sorted(runs.rglob("events.out.tfevents.*"), key=lambda file: file.stat().st_mtime_ns)
    return str(files[-1].parent) if files else None
