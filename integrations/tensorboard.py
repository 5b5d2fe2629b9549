"""TensorBoard pages of a hook: the picture at a glance, findings in words, a few scalars, and a layout of charts.

`TensorBoardWriter` serves hand-written training loops; `betahook.integrations.reports` uses it for the Trainer.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Iterable, Mapping
from typing import Any, Literal

from betahook.hook import Hook
from betahook.report import pictures
from betahook.report.findings import Findings
from betahook.report.glance import TAG, TrackedPicture, whole_number
from betahook.report.metrics import MetricName, check_names
from betahook.report.names import short_names, zero_padded
from betahook.report.summary import GROUP, Summary

BINS = 30
"""Number of bins of a histogram, from its smallest to its largest value."""

CALM: dict[str, float] = {"nonfinite": 0.0, "at_bound": 0.0, "exact": 1.0}
"""Flags with their usual values: a flag is written when it has another value, and once when that ends."""


PLACES = (f"{GROUP}/max_logit_layer", f"{GROUP}/max_logit_head")
"""Indices of a layer and a head, which make no useful curves: the findings and the picture name them."""


class TensorBoardWriter:
    """Writer of a hook's measurements to a TensorBoard run; as a context manager it closes at the end.

    *Time Series* begins with the group `attention`: a picture of all layers and heads over time, and the numbers of
    `betahook.report.summary`. *Text* has the findings in words, *Custom Scalars* one chart for each quantity. Pictures
    need matplotlib; if it is missing, one warning says so. They show what this writer has logged, so that a resumed run
    starts a new picture.

    Args:
        logdir: folder of the run. Another writer may use it too: TensorBoard merges the files in a folder.
        quantities: metrics to write for each layer too, as `quantity/layer`, or "all"; "beta" is written as the decimal
            logarithm of beta over the model's own. Flags are written when they fire.

    Raises:
        ImportError: tensorboard is not installed.
        ValueError: there is no such quantity.
    """

    def __init__(self, logdir: str, *, quantities: Iterable[MetricName] | Literal["all"] = ()) -> None:
        self.quantities = check_names(quantities)
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise ImportError("TensorBoard is not installed: pip install tensorboard") from error
        self.writer: Any = SummaryWriter(logdir, filename_suffix=".betahook")
        self._picture = TrackedPicture()
        self._charted: set[str] = set()
        self._findings: Findings | None = None
        self._drawn: int | None = None
        self._step = 0
        self._written: dict[str, float] = {}
        self._summary = Summary()
        self._hook: weakref.ref[Hook] | None = None

    def write(
        self,
        hook: Hook,
        step: int,
        metrics: Mapping[str, float] | None = None,
        *,
        findings: Findings | None = None,
        loss: float | None = None,
    ) -> None:
        """Write the measurements of the hook's last step, as those of `step`.

        Args:
            hook: the hook.
            step: the step of the run, a whole number.
            metrics: the metrics of the hook, if they were read already.
            findings: the findings of the hook, if they were read already.
            loss: the training loss, to be shown beside the rest.

        Raises:
            TypeError: `hook` is not a hook, `step` not a whole number, or `loss` not a single number; nothing is
                written then.
            ValueError: `hook` is not the one of the last call, and that one is still attached; nothing is written then.
        """
        self._check(hook)
        step = whole_number(step, "write(hook, step) takes a whole number as its step, such as hook.steps")
        losses = {} if loss is None else {f"{GROUP}/loss": _number(loss)}
        if metrics is None or findings is None:
            with hook.layers.reading_once():
                metrics = hook.metrics() if metrics is None else metrics
                findings = hook.findings() if findings is None else findings
        self._lay_out({key.partition("/")[0] for key in metrics}, with_loss=bool(losses))
        self._picture.add(findings, step)
        self._findings, self._step, self._hook = findings, step, weakref.ref(hook)
        for tag, value in {**self._summary(findings), **losses}.items():
            if tag not in PLACES:
                self.writer.add_scalar(tag, value, step)
        self._write_details(hook, metrics, step)
        self._write_histograms(findings, step)
        if self._picture.is_due:
            self._draw(findings)
        elif findings.news:
            self.writer.add_text(f"{GROUP}/findings", findings.markdown(), step)
        self.writer.flush()

    def close(self) -> None:
        """Draw the last picture and close the file."""
        if self._findings is not None and self._drawn != self._step:
            self._draw(self._findings)
        self.writer.close()

    def __enter__(self) -> TensorBoardWriter:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _check(self, hook: Any) -> None:
        """Refuse anything that is not a hook, and a second hook beside the first."""
        if not isinstance(hook, Hook):
            raise TypeError(f"write(hook, step) takes what betahook.attach returned; got {type(hook).__name__}")
        last = None if self._hook is None else self._hook()
        if last is not None and last is not hook and last.attached:
            raise ValueError(
                "write(hook, step) got another hook than before, whose numbers would be mixed with those of the first: "
                "make a TensorBoardWriter for each, in a folder of its own"
            )

    def _lay_out(self, measured: set[str], *, with_loss: bool) -> None:
        """Write the layout of charts, again for each new quantity or the first loss: TensorBoard shows the last one."""
        if new := {*measured, *(["loss"] if with_loss else [])} - self._charted:
            self._charted |= new
            shown = filter(self._charted.__contains__, self.quantities)
            self.writer.add_custom_scalars(layout(shown, with_loss="loss" in self._charted))

    def _write_details(self, hook: Hook, metrics: Mapping[str, float], step: int) -> None:
        """Write the requested quantities for each layer."""
        if not self.quantities:
            return
        labels = dict(zip(hook.layers, zero_padded(short_names(hook.layers)), strict=True))
        for key, value in metrics.items():
            quantity, layer = key.split("/", 1)
            if quantity not in self.quantities:
                continue
            if quantity == "beta":
                value = math.log10(value / hook.layers[layer].beta_default)
            before = self._written.get(key)
            constant = quantity == "classic_std" and before is not None
            calm = value == CALM.get(quantity) and before in (None, value)
            if not (constant or calm):
                self.writer.add_scalar(f"{_tag(quantity)}/{labels[layer]}", value, step)
                self._written[key] = value

    def _write_histograms(self, findings: Findings, step: int) -> None:
        """Write the distributions over all heads of all layers."""
        import numpy

        heads = [numbers for finding in findings for numbers in finding.head_numbers]
        for name in ("logit_std", "keys_share", "max_logit"):
            values = numpy.array([getattr(numbers, name) for numbers in heads])
            values = values[numpy.isfinite(values)]
            if len(values) > 1 and values.min() < values.max():
                self.writer.add_histogram(f"{GROUP}_heads/{name}", values, step, bins=BINS)

    def _draw(self, latest: Findings) -> None:
        """Write the latest findings in words, and the picture of all findings so far."""
        from tensorboard.compat.proto.summary_pb2 import Summary  # type: ignore[attr-defined]

        self.writer.add_text(f"{GROUP}/findings", latest.markdown(), self._step)
        if png := self._picture.png_or_warn("TensorBoard"):
            width, height = pictures.PIXELS
            image = Summary.Image(encoded_image_string=png, width=width, height=height, colorspace=3)
            value = Summary.Value(tag=TAG, image=image)
            self.writer.file_writer.add_summary(Summary(value=[value]), self._step)
        self._drawn = self._step


def _number(loss: Any) -> float:
    try:
        return float(loss)
    except (TypeError, ValueError, RuntimeError) as error:  # a tensor of several numbers raises this or that
        raise TypeError(f"write(hook, step, loss=...) takes one number, as loss.item(); got {loss!r}") from error


def layout(quantities: Iterable[str], *, with_loss: bool) -> dict[str, dict[str, list[Any]]]:
    """Return the custom-scalars layout: category to chart to `["Multiline", [tag pattern, ...]]`, a chart per quantity.

    TensorBoard matches the patterns as regular expressions, from the start of a tag.
    """

    def chart(pattern: str) -> list[Any]:
        return ["Multiline", [f"{pattern}$"]]

    glance = {
        "largest logit": chart(f"{GROUP}/max_logit"),
        "lowest entropy of a layer (nats)": chart(f"{GROUP}/lowest_entropy"),
        "highest std of a layer: logits": chart(f"{GROUP}/highest_logit_std"),
        "highest std of a layer: W_q and W_k": chart(f"{GROUP}/highest_weight_std_."),
        "share of the layers in each condition": chart(f"{GROUP}/layers_.*"),
        "log10 of beta over the model's own: lowest and highest": chart(f"{GROUP}/log10_beta_over_own_.*"),
    }
    loss = {"loss": chart(f"{GROUP}/loss")} if with_loss else {}
    details = {f"{_tag(each)} by layer": chart(f"{_tag(each)}/.*") for each in quantities if each not in CALM}
    return {"at a glance": {**loss, **glance}, **({"by layer": details} if details else {})}


def _tag(quantity: str) -> str:
    return "log10_beta_over_own" if quantity == "beta" else quantity
