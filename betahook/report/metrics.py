"""Metrics of the last step, numbers for a logger: by layer, or by head."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from betahook import theory
from betahook.control.base import at_bound
from betahook.layer import Layers
from betahook.measure.groups import HeadGroups
from betahook.state import State

MetricName = Literal[
    "beta",
    "score_mean",
    "score_std",
    "logit_std",
    "predicted_std",
    "independent_std",
    "classic_std",
    "weight_std_q",
    "weight_std_k",
    "max_logit",
    "entropy",
    "sensitivity",
    "nonfinite",
    "at_bound",
    "exact",
]
"""Names of the metrics; `Hook.metrics` says what each is."""


def by_layer(state: State, layers: Layers) -> dict[str, float]:
    """Return `quantity/layer` to a number, without what was not measured. Reads the device back."""
    quantities = _quantities(state, state.layers)
    table = torch.stack([column.double() for column in quantities.values()]).tolist()
    return {
        f"{quantity}/{layer}": number
        for quantity, row in zip(quantities, table, strict=True)
        for layer, number in zip(layers, row, strict=True)
        if number == number
    }


def by_head(state: State, layers: Layers) -> dict[str, Tensor]:
    """Return `quantity/layer` to a tensor `[heads]` on the CPU; NaN for what was not measured."""
    quantities = _quantities(state, state.layers.by_head())
    table = torch.stack([column.double() for column in quantities.values()]).cpu()
    lengths = [layer.heads for layer in layers.values()]
    return {
        f"{quantity}/{name}": part
        for quantity, row in zip(quantities, table, strict=True)
        for name, part in zip(layers, row.split(lengths), strict=True)
    }


def _quantities(state: State, groups: HeadGroups) -> dict[MetricName, Tensor]:
    """Every metric, `[groups]` each; NaN where it was not measured."""
    observed = groups.observe(state.recent)
    weight_std = state.weight_std(groups)
    beta = state.current_beta

    def measured(values: Tensor) -> Tensor:
        return values.to(observed.std).masked_fill(observed.count == 0, torch.nan)

    return {
        "beta": groups.geometric_mean(beta),
        "score_mean": observed.mean,
        "score_std": observed.std,
        # Zero stands for not measured: states of version 2 have no sums within rows.
        "logit_std": groups.geometric_mean(beta) * observed.row_std.masked_fill(observed.row_std == 0, torch.nan),
        "predicted_std": groups.predicted_std(observed, weight_std),
        "independent_std": observed.independent_std,
        "classic_std": theory.classic_std(groups.head_dim),
        "weight_std_q": weight_std.query,
        "weight_std_k": weight_std.key,
        "max_logit": observed.max_logit,
        "entropy": observed.entropy,
        "sensitivity": measured(observed.sensitivity),
        "nonfinite": measured(~observed.finite),
        "at_bound": groups.largest(at_bound(beta, state.beta_default).to(state.recent)),
        "exact": measured(observed.exact),
    }
