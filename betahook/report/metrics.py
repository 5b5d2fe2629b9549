"""Metrics of the last step as numbers for a logger, by layer or by head; `Hook` and `report.findings` call these."""

from __future__ import annotations

import math
from collections.abc import Container, Iterable, Mapping, Sequence
from typing import Literal, get_args

import torch
from torch import Tensor

from betahook import theory
from betahook.control.base import is_at_bound
from betahook.control.notes import Note
from betahook.layer import Layers
from betahook.measure.dtypes import to_sum_dtype
from betahook.measure.groups import HeadGroups
from betahook.state.state import State

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
    "max_logit_bound",
    "max_positive_logit",
    "entropy",
    "flat_entropy",
    "sink",
    "sensitivity",
    "nonfinite",
    "at_bound",
    "exact",
    "phase",
    "last_move",
    "clips",
]
"""Names of the metrics.

`beta` is the geometric mean if heads differ; `logit_std`, the std within rows of the logits (scores times the beta of
their head), shows how flat or sharp attention is; `predicted_std` follows from W_q and W_k, `independent_std` from the
moments of q and k, `classic_std` is `sqrt(d_k)`; `entropy` and `flat_entropy`, that of flat attention, are in nats;
`nonfinite` is 1 if a NaN, an infinity or a skipped optimizer step kept the controllers from acting, `at_bound` if a
beta is as far from the model's own as controllers may take it; `exact` is 0 if mean and std come from sampled rows;
`phase` is the phase of the controller, the number of a `control.opening.Phase` for `Search` and of a
`control.decades.Phase` for `Decades`, and `last_move` the last move of beta by `Search`, in decades.
"""


def check_names(quantities: Iterable[MetricName] | Literal["all"]) -> tuple[MetricName, ...]:
    """Return the given names of metrics, or every name for "all".

    Raises:
        ValueError: there is no metric of a given name.
    """
    names: tuple[MetricName, ...] = get_args(MetricName)
    if isinstance(quantities, str) and quantities != "all":
        raise ValueError(f'quantities must be "all" or a list of names of metrics; got {quantities!r}')
    asked = names if quantities == "all" else tuple(quantities)
    if unknown := [name for name in asked if name not in names]:
        raise ValueError(f'quantities must be "all" or names of metrics, of {", ".join(names)}; got {unknown}')
    return asked


def select(metrics: Mapping[str, float], quantities: Sequence[MetricName]) -> dict[str, float]:
    """Return the metrics (`quantity/layer` to a number) of the given quantities."""
    return {key: value for key, value in metrics.items() if key.split("/")[0] in quantities}


def by_layer(state: State, layers: Layers, notes: Sequence[Note]) -> dict[str, float]:
    """Return `quantity/layer` to a number, without what was not measured. Synchronises with the device."""
    values = {
        f"{quantity}/{layer}": number
        for quantity, row in numbers(state, state.layers).items()
        for layer, number in zip(layers, row, strict=True)
        if not math.isnan(number)
    }
    noted = list(zip(layers, notes, strict=True))
    phases = {f"phase/{layer}": float(note.phase) for layer, note in noted if note.phase is not None}
    moves = {f"last_move/{layer}": note.move for layer, note in noted if note.phase is not None and note.move}
    return values | phases | moves


def by_head(state: State, layers: Layers, unreached: Container[str]) -> dict[str, Tensor]:
    """Return `quantity/layer` to a tensor `[heads]` on the CPU; NaN for layers in `unreached` or not measured."""
    quantities = columns(state, state.layers.by_head())
    table = torch.stack([to_sum_dtype(column) for column in quantities.values()]).cpu().double()
    lengths = [layer.heads for layer in layers.values()]
    return {
        f"{quantity}/{name}": torch.full_like(part, torch.nan) if name in unreached else part
        for quantity, row in zip(quantities, table, strict=True)
        for name, part in zip(layers, row.split(lengths), strict=True)
    }


def numbers(state: State, groups: HeadGroups) -> dict[str, list[float]]:
    """Return every metric as numbers, one per group. Synchronises with the device, once."""
    quantities = columns(state, groups)
    table = torch.stack([to_sum_dtype(column) for column in quantities.values()]).tolist()
    return dict(zip(quantities, table, strict=True))


def columns(state: State, groups: HeadGroups) -> dict[MetricName, Tensor]:
    """Return every metric, `[groups]` each; NaN where it was not measured."""
    observed = groups.observe(state.recent, state.recent_moments)
    weight_std = groups.weight_std(state.weights)
    acting = state.current_beta
    beta = groups.compare(groups.geometric_mean(acting), acting)
    row_std = groups.observe(state.recent, state.recent_moments, beta.ratios).row_std

    def measured(values: Tensor) -> Tensor:
        return values.to(observed.std).masked_fill(observed.count == 0, torch.nan)

    return {
        "beta": beta.of_group,
        "score_mean": observed.mean,
        "score_std": observed.std,
        # Zero with a sink of zero: a state saved before either was measured.
        "logit_std": beta.of_group * row_std.masked_fill((row_std == 0) & (observed.sink == 0), torch.nan),
        "predicted_std": groups.predicted_std(observed, weight_std),
        "independent_std": observed.independent_std,
        "classic_std": theory.classic_std(groups.head_dim),
        "weight_std_q": weight_std.query,
        "weight_std_k": weight_std.key,
        "max_logit": observed.max_logit,
        "max_logit_bound": observed.max_logit_bound,
        "max_positive_logit": observed.max_positive_logit,
        "entropy": observed.entropy,
        # Zero: one key per row, or a state saved before it was measured. Either way there is nothing to compare with.
        "flat_entropy": observed.flat_entropy.masked_fill(observed.flat_entropy == 0, torch.nan),
        # Zero: a state saved before it was measured.
        "sink": observed.sink.masked_fill(observed.sink == 0, torch.nan),
        "sensitivity": measured(observed.sensitivity),
        "nonfinite": measured(~observed.finite),
        "at_bound": groups.reduce(is_at_bound(acting, state.beta_default).to(state.recent), "max"),
        "exact": measured(observed.exact),
        # Left out until there are any, for runs that clip nothing.
        "clips": (clips := groups.reduce(state.clips.to(state.recent), "sum")).masked_fill(clips == 0, torch.nan),
    }
