"""Reports of a training in the Trainer: TensorBoard, the trackers that it reports to, its history, and alerts.

`betahook.integrations.trainer` calls this, in the process that logs; nothing here measures. A reporter is a callback of
transformers that sends the logs of the Trainer to a tracker.
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
from betahook.report.metrics import MetricName, chosen
from betahook.report.summary import Summary
from betahook.tap.override import Override

from .tensorboard import TensorBoardWriter

logger = logging.getLogger(__name__)

REPORTERS: dict[str, type[TrainerCallback]] = {
    name: reporter
    for name, reporter in INTEGRATION_TO_CALLBACK.items()
    if name != "tensorboard" and getattr(reporter, "on_log", None) is not TrainerCallback.on_log
}
"""Classes of reporters that take logs, by their names in `report_to`, but TensorBoard's: its pages are our own."""
EVENTS = "events.out.tfevents.*"
SHOWING = ("wandb", "trackio")
"""Names in `report_to` of the trackers that show alerts and pictures, which are also those of their packages."""


class Reports:
    """Everything that one training reports to.

    Args:
        hook: of the model in training.
        args: of the Trainer.
        handler: with the callbacks of the Trainer, its reporters among them; None where they are out of reach.
        quantities: names of metrics to report layer by layer too.
    """

    def __init__(
        self, hook: Hook, args: TrainingArguments, handler: CallbackHandler | None, quantities: Sequence[MetricName]
    ) -> None:
        self._hook = hook
        self._quantities = quantities
        self._summarise = Summary()
        self._step = -1  # that of the hook at which the next three were read
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
        """Report the last step, whose entry of the history is the latest."""
        self._read()
        entry = state.log_history[-1] if state.log_history else {}  # another callback may have emptied it
        entry.update(self._summary)
        if self._writer is not None:
            loss = entry.get("loss")
            self._writer.write(self._hook, state.global_step, self._metrics, findings=self._findings, loss=loss)

    def close(self) -> None:
        """Finish the files, and leave the reporters as they were."""
        self._undo.close()
        if self._writer is not None:
            self._writer.close()

    def _connect(self, handler: CallbackHandler) -> None:
        """Let reporters log the metrics in the row of the training loss."""
        callbacks: list[TrainerCallback] = handler.callbacks
        for callback in callbacks:
            names = [name for name, kind in REPORTERS.items() if isinstance(callback, kind)]
            if names:
                Override(callback, "on_log", self._with_metrics(names[0], callback.on_log), self._undo)

    def _with_metrics(self, name: str, on_log: Callable[..., Any]) -> Callable[..., Any]:
        """Return the `on_log` of a reporter, which gets the metrics too in a dictionary of its own."""

        def joined(
            args: TrainingArguments,
            state: TrainerState,
            control: TrainerControl,
            logs: dict[str, Any] | None = None,
            **kwargs: Any,
        ) -> Any:
            if logs is not None and is_training(logs):
                self._read()
                logs = {**logs, **self._summary, **chosen(self._metrics, self._quantities), **self._shown(name)}
            return on_log(args, state, control, logs=logs, **kwargs)

        return joined

    def _read(self) -> None:
        """Read the last step, once for all that log it."""
        if self._step != self._hook.steps:
            with self._hook.layers.reading_once():
                self._step, self._metrics = self._hook.steps, self._hook.metrics()
                self._findings = self._hook.findings()
            self._summary, self._image = self._summarise(self._findings), None
            self._picture.add(self._findings)

    def _shown(self, name: str) -> dict[str, Any]:
        """The picture at a glance, for a tracker that shows pictures, where it is due."""
        if name not in SHOWING:
            return {}
        self._image = self._picture.image_if_due(name) or self._image
        return {} if self._image is None else {TAG: sys.modules[name].Image(self._image)}


def is_training(logs: Mapping[str, Any] | None) -> bool:
    """Tell if logs are of training steps; an evaluation or the final summary has nothing new of betahook."""
    return logs is not None and "loss" in logs


def with_trackers(alerts: Alerts | None, args: TrainingArguments) -> Alerts | None:
    """Return alerts that are also shown by the trackers that the Trainer reports to, where these can."""
    if alerts is None or not {*SHOWING} & set(args.report_to or ()):
        return alerts
    on_alert = alerts.on_alert

    def both(alert: Alert) -> None:
        send_alert(alert)
        on_alert(alert)

    return replace(alerts, on_alert=both)


def send_alert(alert: Alert) -> None:
    """Show an alert in the runs of W&B and Trackio that are open in this process: `Alerts(send_alert, max_logit=50)`.

    W&B shows alerts of one title at most once a minute, so each quantity of a layer has its own.
    """
    title = f"{alert.quantity} of {shown_name(alert.layer)}"
    # Who reports to them has imported them.
    wandb, trackio = sys.modules.get("wandb"), sys.modules.get("trackio")
    if wandb is not None and wandb.run is not None:
        wandb.run.alert(title, str(alert), level="WARN")
    if trackio is not None and trackio.context_vars.current_run.get() is not None:
        trackio.alert(title, str(alert))


def _open_writer(run: str, quantities: Sequence[MetricName]) -> TensorBoardWriter | None:
    """Open a writer on a TensorBoard run; None, with a warning, without TensorBoard."""
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
    # A trial of a search has a folder of its own whatever is named, and another process may write to the newest.
    here = f".{socket.gethostname()}.{os.getpid()}."
    if own := [file for file in files if here in file.name]:
        return str(own[-1].parent)
    return named or str(files[-1].parent if files else default)
