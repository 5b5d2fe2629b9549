"""The paper's assumptions behind `beta = 1/sqrt(d_k)`, layer by layer: what was measured against what was predicted.

`Hook.audit` calls it. To measure correlations, the model runs once more, so ordinary steps pay nothing for them. The
model, its hook and the random state are left as they were.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from betahook import rerun, theory
from betahook.layer import Layers
from betahook.measure.correlations import Correlations
from betahook.measure.ranks import is_distributed
from betahook.measure.statistics import ROW
from betahook.report.document import Table
from betahook.report.names import short_names
from betahook.state.state import State
from betahook.tap.listening import listening
from betahook.tap.recorder import ATTRIBUTE


@dataclass(frozen=True)
class LayerAudit:
    """Audit of one layer. Each field names the assumption that it tests; NaN if W_q and W_k were not found.

    Attributes:
        name: module name.
        head_dim: (i) d_k.
        query_width: (i) d_x, the number of features that enter the query projection.
        projected_variance_q, projected_variance_k: (ii) `d_x sigma_X^2 sigma_W^2`, assumed to be 1.
        component_mean_q, component_mean_k: (iii) root mean square of the means of the components, assumed to be 0.
        component_variance_q, component_variance_k: (iii) mean variance of the components, assumed to be 1.
        covariance: (iv) measured variance of the scores over that of independent components; 1 without covariance. A
            covariance within q alone, or within k alone, does not change the variance of the scores and does not show.
        correlations: (iii) and (iv) component by component, and between tokens, in the model's last forward pass; None
            if that cannot be run again, see `Hook.audit`.
        score_std: measured standard deviation of the scores within heads, a population std.
        predicted: its predictions by the formulas of `betahook.theory`: "classic", "weights" and "independent".
        follows: name of the prediction whose ratio to `score_std` is closest to 1; "none" if there is none.
    """

    name: str
    head_dim: int
    query_width: int | None
    projected_variance_q: float
    projected_variance_k: float
    component_mean_q: float
    component_mean_k: float
    component_variance_q: float
    component_variance_k: float
    covariance: float
    correlations: Correlations | None
    score_std: float
    predicted: dict[str, float]
    follows: str


def _correlated(*names: str) -> Callable[[LayerAudit], Sequence[float]]:
    """Return a function that reads these correlations of a layer; NaN if the model could not be run again."""

    def read(layer: LayerAudit) -> Sequence[float]:
        found = layer.correlations
        return [math.nan if found is None else getattr(found, name) for name in names]

    return read


ASSUMPTIONS: Mapping[str, tuple[str, Callable[[LayerAudit], Sequence[float]]]] = {
    "(ii) var W_q x, W_k x": ("1, 1", lambda layer: [layer.projected_variance_q, layer.projected_variance_k]),
    "(iii) mean q, k": ("0, 0", lambda layer: [layer.component_mean_q, layer.component_mean_k]),
    "(iii) var q, k": ("1, 1", lambda layer: [layer.component_variance_q, layer.component_variance_k]),
    "(iv) cov": ("1", lambda layer: [layer.covariance]),
    "(iv) corr q, k, q-k": ("0, 0, 0", _correlated("within_q", "within_k", "between")),
    "(iv) corr tokens": ("0, 0", _correlated("tokens_q", "tokens_k")),
}
"""Column headings to the assumed values, and to a function that returns the values of a layer."""

HELP = "Columns and assumptions: help(betahook.LayerAudit)"

PREDICTIONS = {"classic": "sqrt(d_k)", "weights": "from W_q and W_k", "independent": "from q and k"}
"""Formulas of `betahook.theory` to their column headings."""

PREDICTIONS_NOTE = (
    "Before beta. sqrt(d_k) is the std for which 1/sqrt(d_k) is right; the next follows from the std of W_q and W_k, "
    "the third from the means and variances of q and k, if their components are independent."
)
ASSUMPTIONS_NOTE = (
    "The first row is what the paper assumes; x is the input of W_q and W_k. var: variance. cov: the measured variance "
    "of the scores over that of independent components. corr: correlation of two components of q, of k, of one of q "
    "and one of k, and of a component of q, or of k, at two tokens."
)
"""Note below the table of assumptions, as `PREDICTIONS_NOTE` is below that of predictions."""


class Audit(tuple[LayerAudit, ...]):
    """One `LayerAudit` per layer; prints as two tables."""

    @classmethod
    def of(cls, hook: rerun.Hooked, layers: Layers, state: State) -> Audit:
        """Audit the measurements of the step so far, or else of the last measured one, and the current weights.

        Raises:
            RuntimeError: nothing was measured yet, or every layer is left alone.
        """
        groups, (table, moments) = state.layers, _measured(layers, state)
        layers.read_weights()
        observed, weight_std = groups.observe(table, moments), groups.weight_std(state.weights)
        correlations = _correlations(hook, layers, state)
        query, key = groups.projected_variances(observed, weight_std)
        predictions = {
            "classic": theory.classic_std(groups.head_dim),
            "weights": groups.predicted_std(observed, weight_std),
            "independent": observed.independent_std,
        }

        def row(index: int, name: str) -> LayerAudit:
            std = observed.std[index].item()
            predicted = {formula: values[index].item() for formula, values in predictions.items()}
            width = groups.query_width[index].item()
            return LayerAudit(
                name=name,
                head_dim=layers[name].head_dim,
                query_width=None if math.isnan(width) else int(width),
                projected_variance_q=query[index].item(),
                projected_variance_k=key[index].item(),
                component_mean_q=observed.component_mean_square_q[index].sqrt().item(),
                component_mean_k=observed.component_mean_square_k[index].sqrt().item(),
                component_variance_q=observed.component_variance_q[index].item(),
                component_variance_k=observed.component_variance_k[index].item(),
                covariance=(observed.std[index] / observed.independent_std[index]).square().item(),
                correlations=correlations.get(name),
                score_std=std,
                predicted=predicted,
                follows=_closest(std, predicted),
            )

        return cls(row(index, name) for index, name in enumerate(layers))

    def tables(self, *, short: bool = False) -> tuple[Table, Table]:
        """Return two tables with a row per layer: the std of the scores with its predictions, and the assumptions.

        Args:
            short: leave out the parts that the names of all layers share.
        """
        names = [layer.name or "model" for layer in self]
        names = short_names(names) if short else names
        return self._predictions(names), self._assumptions(names)

    def _predictions(self, names: Sequence[str]) -> Table:
        rows = []
        for name, layer in zip(names, self, strict=True):
            stds = [layer.score_std, *(layer.predicted[formula] for formula in PREDICTIONS)]
            rows.append([name, *(_written([std]) for std in stds), PREDICTIONS.get(layer.follows, layer.follows)])
        header = ["layer", "measured", *PREDICTIONS.values(), "closest"]
        return Table(header, rows, "Std of the scores: measured and predicted", PREDICTIONS_NOTE)

    def _assumptions(self, names: Sequence[str]) -> Table:
        """Return the table whose first row holds the assumed numbers, without columns that have no number."""
        numbers = {name: [of(layer) for layer in self] for name, (_, of) in ASSUMPTIONS.items()}
        known = [name for name, rows in numbers.items() if not all(math.isnan(value) for row in rows for value in row)]
        rows = [["assumed", "", *(ASSUMPTIONS[name][0] for name in known)]]
        for index, (name, layer) in enumerate(zip(names, self, strict=True)):
            widths = f"{layer.query_width or '?'}, {layer.head_dim}"
            rows.append([name, widths, *(_written(numbers[column][index]) for column in known)])
        header = ["layer", "d_x, d_k", *known]
        return Table(header, rows, "Assumptions behind 1/sqrt(d_k)", ASSUMPTIONS_NOTE, is_wide=True)

    def __str__(self) -> str:
        return "\n\n".join([*map(str, self.tables()), HELP])

    __repr__ = __str__


@torch.no_grad()
def _correlations(hook: rerun.Hooked, layers: Layers, state: State) -> dict[str, Correlations]:
    """Measure the correlations in each layer that the last input reaches, in the layer's first call.

    Nothing is measured without a last input, or in a multi-process run: all processes would have to run the model
    together, but an audit may be requested on one alone.
    """
    found: dict[str, Correlations] = {}

    def listen(name: str, query: Tensor, key: Tensor, valid: tuple[Tensor | None, Tensor | None]) -> None:
        if name not in found:
            found[name] = Correlations.of(query, key, valid)

    if hook.last_call.input is None or is_distributed():
        return found
    with ExitStack() as stack:
        stack.enter_context(rerun.without_side_effects(hook))
        stack.callback(vars(state).update, layers_due=state.layers_due, paused=state.paused)
        state.layers_due, state.paused = range(len(state.ranges)), 0
        for name, layer in layers.items():
            stack.enter_context(listening(getattr(layer.module, ATTRIBUTE), partial(listen, name)))
        rerun.run_model(hook)
    return found


def _measured(layers: Layers, state: State) -> tuple[Tensor, Tensor]:
    """Return table and moments of the step so far, or else of the last measured one."""
    table, moments, _ = state.latest(state.collect(), state.moments)
    if not bool((table[ROW["pairs"]] > 0).any()):
        if all(layer.refusal for layer in layers.values()):
            raise RuntimeError("audit() of layers that are all left alone, and not measured: print(hook) says why")
        raise RuntimeError(
            "audit() before any measurement: run a forward first (in training mode and with gradients, or attach "
            'with when="always")'
        )
    return table, moments


def _written(values: Sequence[float]) -> str:
    """Format numbers; a question mark stands for one that was not measured."""
    return ", ".join("?" if math.isnan(value) else f"{value:.3g}" for value in values)


def _closest(measured: float, predicted: dict[str, float]) -> str:
    """Return the name of the prediction whose ratio to the measured value is nearest to 1."""
    usable = {name: value for name, value in predicted.items() if value > 0 and measured > 0}
    if not usable:
        return "none"
    return min(usable, key=lambda name: abs(math.log(usable[name] / measured)))
