"""Limits on the metrics, and a function to call where one is crossed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Alert:
    """A metric of one layer that crossed its limit in the step that `Hook.metrics` reported.

    Attributes:
        step: number of steps of the hook so far.
        quantity: "max_logit", "entropy" or "beta".
        layer: name of the layer.
        value: the metric.
        limit: the limit; None for beta, whose bounds are those of the controllers.
    """

    step: int
    quantity: str
    layer: str
    value: float
    limit: float | None

    def __str__(self) -> str:
        crossed = "is at its bound" if self.limit is None else f"crossed {self.limit:g}"
        return f"step {self.step}: {self.quantity} of {self.layer} is {self.value:g}, which {crossed}"


@dataclass(frozen=True)
class Alerts:
    """What to watch in the metrics of a hook, `attach(model, alerts=Alerts(print, max_logit=50))`.

    Looked at where `Hook.metrics` is called, once a step: every logged step beyond a limit raises an alert, a step that
    is not logged raises none.

    Args:
        call: called with each `Alert`; what it raises ends the training.
        max_logit: alert above this largest absolute logit; None for no alert.
        entropy: alert below this mean entropy of the attention rows, in nats; None for no alert.
        beta: whether to alert where beta is at a bound of the controllers, see `controllers.DECADES`.
    """

    call: Callable[[Alert], object]
    max_logit: float | None = None
    entropy: float | None = None
    beta: bool = False

    def __post_init__(self) -> None:
        if not callable(self.call):
            raise TypeError(f"Alerts(call) must be a function of an Alert; got {self.call!r}")
        for name in ("max_logit", "entropy"):
            limit = getattr(self, name)
            number = isinstance(limit, int | float) and not isinstance(limit, bool)
            if limit is not None and not (number and limit > 0):
                raise ValueError(f"Alerts({name}=...) must be a positive number or None; got {limit!r}")
        if not isinstance(self.beta, bool):
            raise ValueError(f"Alerts(beta=...) must be True or False; got {self.beta!r}")

    def check(self, metrics: Mapping[str, float], step: int) -> None:
        """Call back for every limit that `metrics`, as from `Hook.metrics`, cross."""
        for key, value in metrics.items():
            quantity, layer = key.split("/", 1)
            if quantity == "max_logit" and self.max_logit is not None and value > self.max_logit:
                self.call(Alert(step, quantity, layer, value, self.max_logit))
            elif quantity == "entropy" and self.entropy is not None and value < self.entropy:
                self.call(Alert(step, quantity, layer, value, self.entropy))
            elif quantity == "at_bound" and self.beta and value:
                self.call(Alert(step, "beta", layer, metrics[f"beta/{layer}"], None))
