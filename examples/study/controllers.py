"""The treatments that the study compares, by name. To add a candidate for the default, add a line."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn

import betahook
from betahook import Cap, Controller, Decades, Gradient, Hook, Monitor, Search, Variance
from betahook.models.scaling import find_scalings


def monitor() -> list[Controller]:
    return [Monitor()]


@dataclass(frozen=True)
class Treatment:
    """A change to the attention of a model, relative to `1/sqrt(d_k)`.

    Attributes:
        rule: makes the controllers that adapt beta.
        beta: factor on beta, from the first step on.
        init: factor on the scores at initialisation; W_q and W_k are multiplied by its root.
        per_head: one beta for each head instead of one for each layer.
        qk_norm: take the model that normalises q and k; only tasks that have one offer it.
    """

    rule: Callable[[], Sequence[Controller]] = monitor
    beta: float = 1.0
    init: float = 1.0
    per_head: bool = False
    qk_norm: bool = False

    def __str__(self) -> str:
        """Everything that identifies it, the options of the controllers included."""
        flags = ", per head" * self.per_head + ", QK-norm" * self.qk_norm
        return f"{self.rule()}, beta x {self.beta:g}, initial scores x {self.init:g}{flags}"

    def attach(self, model: nn.Module) -> Hook:
        """Hook a model whose own beta is `1/sqrt(d_k)` and that has just been initialised."""
        hook = betahook.attach(model, controller=self.rule(), per_head=self.per_head)
        for layer in hook.layers.values():
            if self.beta != 1:
                layer.beta = self.beta * layer.head_dim**-0.5
            if self.init != 1:
                scaling = next(find_scalings(layer.module, layer.projections, layer.heads, layer.head_dim))
                scaling.scale(torch.full([layer.heads], self.init))
        return hook


CONTROLLERS = {
    "plain": Treatment(),
    "betahook": Treatment(lambda: [Search()]),
    "per-head": Treatment(lambda: [Search()], per_head=True),
    "no-rise": Treatment(lambda: [Search(rise=False)]),
    "gradient": Treatment(lambda: [Gradient(), Cap(30.0)]),
    "variance": Treatment(lambda: [Variance()]),
    "variance-weights": Treatment(lambda: [Variance(source="weights", smoothing=0)]),  # the paper's first algorithm
    "decades": Treatment(lambda: [Decades()]),  # its second one, inside one run
    "cap": Treatment(lambda: [Cap(30.0)]),
    "scaled-init": Treatment(init=3.0),
    "uniform": Treatment(beta=1e-6),  # shows what attention is worth
    "x0.3": Treatment(beta=0.3),  # constants, which show what any other beta could gain
    "x0.7": Treatment(beta=0.7),
    "x1.4": Treatment(beta=1.4),
    "x3": Treatment(beta=3.0),
    "x10": Treatment(beta=10.0),
}
"""Treatments that every task offers, besides `BEST_FIXED`."""


def written(text: str) -> list[Controller]:
    """Make the controllers of a text such as "Search(rise_decades=0.5), Cap(30)".

    Raises:
        ValueError: the text is no such list.
    """
    names = {kind.__name__: kind for kind in (Cap, Decades, Gradient, Monitor, Search, Variance)}
    try:
        made = eval(f"[{text}]", {"__builtins__": {}}, names)
    except (SyntaxError, NameError, TypeError) as error:
        raise ValueError(f"expected controllers such as Search(window=5), Cap(30); got {text} ({error})") from error
    if not made or not all(isinstance(rule, Controller) for rule in made):
        raise ValueError(f"expected controllers such as Search(window=5), Cap(30); got {text}")
    return list(made)


def treatment(name: str, offered: Mapping[str, Treatment]) -> Treatment:
    """Return a treatment by its name, or that of controllers as they are written."""
    return offered[name] if name in offered else Treatment(lambda: written(name))


BEST_FIXED = "best-fixed"
"""The best constant beta of a search over whole runs, at the cost of all of them."""
