"""Limits on the metrics, and a function that `Hook.metrics` calls when one is crossed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from betahook.control import base
from betahook.control.base import is_positive, require
from betahook.layer import AttentionLayer, Layers
from betahook.models.discovery import shown_name
from betahook.report.findings import NAMED
from betahook.report.names import ranges

LIMITS = ("max_logit", "logit_std", "entropy")
"""Quantities that can have a limit: a lower one for the entropy, an upper one for the others."""


@dataclass(frozen=True)
class Alert:
    """A metric of one layer that was beyond its limit in the step that `Hook.metrics` reported.

    Attributes:
        step: number of steps of the hook so far.
        quantity: name of the metric: "max_logit", "logit_std", "entropy" or "at_bound".
        layer: name of the layer.
        value: the metric; for "at_bound", beta, or that of the first head in `heads`.
        limit: the limit; None for "at_bound", whose bounds are those of the controllers.
        heads: the heads at their bound, counted from 0, if others are not; else empty.
    """

    step: int
    quantity: str
    layer: str
    value: float
    limit: float | None
    heads: tuple[int, ...] = ()

    def __str__(self) -> str:
        if self.heads:
            heads = f"head{'s' * (len(self.heads) > 1)} {ranges(self.heads, NAMED)}"
            first = f" in head {self.heads[0]}" * (len(self.heads) > 1)
            where = f"at its bound in {heads}, {self.value:g}{first}"
            return f"step {self.step}: beta of {shown_name(self.layer)} is {where}"
        if self.limit is None:
            return f"step {self.step}: beta of {shown_name(self.layer)} is {self.value:g}, which is at its bound"
        beyond = f"beyond its limit of {self.limit:g}"
        return f"step {self.step}: {self.quantity} of {shown_name(self.layer)} is {self.value:g}, {beyond}"


@dataclass(frozen=True)
class Alerts:
    """Limits on the metrics of a hook, `attach(model, alerts=Alerts(print, max_logit=50))`.

    They are checked when `Hook.metrics` is called, once per step: every logged step beyond a limit triggers an alert, a
    step that is not logged triggers none.

    Args:
        on_alert: called with each `Alert`; an exception from it ends the training.
        max_logit: alert above this largest absolute logit; None for no alert.
        entropy: alert below this mean entropy of the attention rows, in nats; None for no alert.
        at_bound: True to alert when beta is 1,000 times the model's own, or a thousandth of it.
        logit_std: alert above this std of the logits within rows; None for no alert.

    Raises:
        ValueError: an option has an invalid value, or there is no limit.
        TypeError: `on_alert` is not callable.
    """

    on_alert: Callable[[Alert], object]
    max_logit: float | None = None
    entropy: float | None = None
    at_bound: bool = False
    logit_std: float | None = None

    def __post_init__(self) -> None:
        if not callable(self.on_alert):
            raise TypeError(f"Alerts(on_alert) must be a function of an Alert; got {self.on_alert!r}")
        for name in LIMITS:
            require(self, name, lambda limit: limit is None or is_positive(limit), "a positive number or None")
        require(self, "at_bound", lambda value: isinstance(value, bool), "True or False")
        if not self.at_bound and all(getattr(self, name) is None for name in LIMITS):
            raise ValueError("Alerts without a limit never alert; give one, as in Alerts(print, max_logit=50)")

    def check(self, metrics: Mapping[str, float], step: int, layers: Layers) -> None:
        """Call `on_alert` for every limit that `metrics`, as from `Hook.metrics`, cross; `layers` name their heads."""
        for key, value in metrics.items():
            quantity, layer = key.split("/", 1)
            limit = getattr(self, quantity) if quantity in LIMITS else None
            if limit is not None and (value < limit if quantity == "entropy" else value > limit):
                self.on_alert(Alert(step, quantity, layer, value, limit))
            elif quantity == "at_bound" and self.at_bound and value:
                alert = Alert(step, quantity, layer, metrics[f"beta/{layer}"], None)
                self.on_alert(_with_heads(alert, layers[layer]))


def _with_heads(alert: Alert, layer: AttentionLayer) -> Alert:
    """Name the heads of a layer that are at their bound, which the layer's mean beta does not show."""
    beta = layer.head_beta
    heads = base.is_at_bound(beta, layer.head_beta_default).nonzero().flatten().tolist()
    if len(heads) in (0, layer.heads):  # 0 if the device rounds differently
        return alert
    return replace(alert, value=float(beta[heads[0]]), heads=tuple(heads))
