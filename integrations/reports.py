"""Reports of a training in the Trainer: to TensorBoard, to its other trackers and its history, and as alerts.

`betahook.integrations.trainer` calls this in the process that logs; nothing here measures. A reporter is a callback of
transformers that sends the Trainer's logs to a tracker.
"""

from __future__ import annotations

import logging
import os
import socket
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.integrations.integration_utils import INTEGRATION_TO_CALLBACK, TensorBoardCallback, default_logdir
from transformers.trainer_callback import CallbackHandler

from betahook.hook import Hook
from betahook.models.discovery import shown_name
from betahook.report.alerts import Alert, Alerts
from betahook.report.findings import Findings
from betahook.report.glance import TAG, TrackedPicture
from betahook.report.metrics import MetricName, select
from betahook.report.summary import Summary
from betahook.tap.override import Override

from .tensorboard import TensorBoardWriter

logger = logging.getLogger(__name__)

REPORTERS: dict[str, type[TrainerCallback]] = {
    name: reporter
    for name, reporter in INTEGRATION_TO_CALLBACK.items()
    if name != "tensorboard" and getattr(reporter, "on_log", None) is not TrainerCallback.on_log
}
"""Classes of reporters that take logs, by their names in `report_to`; without TensorBoard's, as we write its pages."""
EVENTS = "events.out.tfevents.*"
SHOWING = ("wandb", "trackio")
"""Trackers that show alerts and pictures, by their names in `report_to`, which are also those of their packages."""


class Reports:
    """All reports of one training.

    Args:
        hook: the hook of the model in training.
        args: the arguments of the Trainer.
        handler: holds the callbacks of the Trainer, including its reporters; None if they are out of reach.
        quantities: names of metrics to report for each layer too.
    """

    def __init__(
        self, hook: Hook, args: TrainingArguments, handler: CallbackHandler | None, quantities: Sequence[MetricName]
    ) -> None:
        self._hook = hook
        self._quantities = quantities
        self._summarise = Summary()
        self._step = -1  # the hook's step at which the next three were read
        self._metrics: Mapping[str, float] = {}
        self._findings: Findings | None = None
        self._summary: Mapping[str, float] = {}
        self._picture = TrackedPicture()
        self._image: Any = None  # of the last step, if it was due
        self._undo = ExitStack()
        reported = args.report_to or ()
        missing = [name for name in reported if name in REPORTERS]
        if handler is not None:
            self._connect(handler)
        elif missing:
            logger.warning(
                "the metrics of betahook do not reach %s, whose callbacks run before this one: call "
                "betahook.integrations.trainer.watch(trainer) before trainer.train()",
                " and ".join(missing),
            )
        self._writer = _open_writer(_run_of_loss(args, handler), quantities) if "tensorboard" in reported else None

    def log(self, state: TrainerState) -> None:
        """Report the last step, also in the newest entry of the Trainer's history."""
        self._read()
        entry = state.log_history[-1] if state.log_history else {}  # another callback may have emptied it
        entry.update(self._summary)
        if self._writer is not None:
            loss = entry.get("loss")
            self._writer.write(self._hook, state.global_step, self._metrics, findings=self._findings, loss=loss)

    def close(self) -> None:
        """Close the files, and leave the reporters as they were."""
        self._undo.close()
        if self._writer is not None:
            self._writer.close()

    def _connect(self, handler: CallbackHandler) -> None:
        """Let reporters log the metrics together with the training loss."""
        callbacks: list[TrainerCallback] = handler.callbacks
        for callback in callbacks:
            names = [name for name, kind in REPORTERS.items() if isinstance(callback, kind)]
            if names:
                Override(callback, "on_log", self._with_metrics(names[0], callback.on_log), self._undo)

    def _with_metrics(self, name: str, on_log: Callable[..., Any]) -> Callable[..., Any]:
        """Return a reporter's `on_log` that also receives the metrics, in a dictionary of its own."""

        def joined(
            args: TrainingArguments,
            state: TrainerState,
            control: TrainerControl,
            logs: dict[str, Any] | None = None,
            **kwargs: Any,
        ) -> Any:
            if logs is not None and is_training(logs):
                self._read()
                logs = {**logs, **self._summary, **select(self._metrics, self._quantities), **self._shown(name)}
            return on_log(args, state, control, logs=logs, **kwargs)

        return joined

    def _read(self) -> None:
        """Read the metrics of the last step, once for everything that logs them."""
        if self._step != self._hook.steps:
            with self._hook.layers.reading_once():
                self._step, self._metrics = self._hook.steps, self._hook.metrics()
                self._findings = self._hook.findings()
            self._summary, self._image = self._summarise(self._findings), None
            self._picture.add(self._findings)

    def _shown(self, name: str) -> dict[str, Any]:
        """Return the picture at a glance for a tracker, if the tracker shows pictures and one is due."""
        if name not in SHOWING:
            return {}
        self._image = self._picture.image_if_due(name) or self._image
        return {} if self._image is None else {TAG: sys.modules[name].Image(self._image)}


def is_training(logs: Mapping[str, Any] | None) -> bool:
    """Return True for logs of training steps; an evaluation or the final summary has no news from betahook."""
    return logs is not None and "loss" in logs


def with_trackers(alerts: Alerts | None, args: TrainingArguments) -> Alerts | None:
    """Return alerts that W&B and Trackio show too, if the Trainer reports to them."""
    if alerts is None or not {*SHOWING} & set(args.report_to or ()):
        return alerts
    on_alert = alerts.on_alert

    def both(alert: Alert) -> None:
        send_alert(alert)
        on_alert(alert)

    return replace(alerts, on_alert=both)


def send_alert(alert: Alert) -> None:
    """Show an alert in the W&B and Trackio runs that are open in this process: `Alerts(send_alert, max_logit=50)`.

    W&B shows alerts with the same title at most once a minute, so each quantity of a layer has its own title.
    """
    title = f"{alert.quantity} of {shown_name(alert.layer)}"
    # Whoever reports to them has imported them.
    wandb, trackio = sys.modules.get("wandb"), sys.modules.get("trackio")
    if wandb is not None and wandb.run is not None:
        wandb.run.alert(title, str(alert), level="WARN")
    if trackio is not None and trackio.context_vars.current_run.get() is not None:
        trackio.alert(title, str(alert))


def _open_writer(run: str, quantities: Sequence[MetricName]) -> TensorBoardWriter | None:
    """Open a writer of a TensorBoard run; if TensorBoard is not installed, warn and return None."""
    try:
        return TensorBoardWriter(run, quantities=quantities)
    except ImportError as error:  # the Trainer also writes with tensorboardX
        logger.warning("%s; until then TensorBoard has no page of betahook", error)
        return None


def _run_of_loss(args: TrainingArguments, handler: CallbackHandler | None) -> str:
    """Return the folder of the TensorBoard run that the Trainer has just opened."""
    for reporter in handler.callbacks if handler is not None else ():
        if isinstance(reporter, TensorBoardCallback) and hasattr(reporter.tb_writer, "log_dir"):
            return str(reporter.tb_writer.log_dir)
    named = os.path.expanduser(os.environ.get("TENSORBOARD_LOGGING_DIR", ""))
    default = Path(args.output_dir or ".", default_logdir())
    files = [*default.parent.rglob(EVENTS), *(Path(named).glob(EVENTS) if named else ())]
    files.sort(key=lambda file: file.stat().st_mtime_ns)
    # A trial of a search has its own folder whatever the variable says, and the newest file may be another process's.
    here = f".{socket.gethostname()}.{os.getpid()}."
    if own := [file for file in files if here in file.name]:
        return str(own[-1].parent)
    return named or str(files[-1].parent if files else default)
