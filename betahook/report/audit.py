"""The paper's assumptions behind `beta = 1/sqrt(d_k)`, layer by layer: what was measured against what was predicted."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from betahook import theory
from betahook.layer import Layers
from betahook.measure.correlations import Correlations
from betahook.measure.groups import HeadGroups
from betahook.measure.statistics import Statistics
from betahook.measure.weights import WeightStd


@dataclass(frozen=True)
class LayerAudit:
    """One layer. Each field names the assumption that it tests; NaN where W_q and W_k were not found.

    Attributes:
        name: module name.
        head_dim: (i) d_k.
        query_width: (i) d_x, features that enter the query projection.
        projected_variance_q: (ii) `d_x sigma_X^2 sigma_Wq^2`, assumed to be 1.
        projected_variance_k: (ii) the same for W_k.
        component_mean_q: (iii) root mean square of the means of the components of q, assumed to be 0.
        component_mean_k: (iii) the same for k.
        component_variance_q: (iii) mean variance of the components of q, assumed to be 1.
        component_variance_k: (iii) the same for k.
        covariance: (iv) measured variance of the scores over that of independent components; 1 without covariance. A
            covariance within q alone, or within k alone, leaves the variance of the scores as it is and does not show.
        correlations: (iii) and (iv) component by component, and between tokens, in the model's last forward; None where
            that cannot run once more, see `Hook.audit`.
        score_std: measured standard deviation of the scores, over the population, within heads.
        predicted: what the three formulas of `betahook.theory` say it should be: "classic", "weights", "independent".
        follows: the formula that comes closest, as a ratio.
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


class Audit(tuple[LayerAudit, ...]):
    """One `LayerAudit` a layer; prints as a table."""

    @classmethod
    def of(
        cls,
        layers: Layers,
        groups: HeadGroups,
        observed: Statistics,
        weight_std: WeightStd,
        correlations: Mapping[str, Correlations],
    ) -> Audit:
        """Audit what was observed, one group a layer, and the correlations by layer where they were measured."""
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

    NOTE = (
        "assumed: (ii) variances 1, (iii) means 0 and variances 1, (iv) cov 1 (measured / independent variance), "
        "correlations of components and of tokens 0"
    )

    def rows(self) -> list[list[str]]:
        """Return a table for people: the first row is the header, then one row a layer."""
        header = [
            "layer",
            "(i) d_x, d_k",
            "(ii) var Wq x, Wk x",
            "(iii) mean q, k",
            "var q, k",
            "(iv) cov",
            "corr q, k, q-k",
            "of tokens",
            "std measured",
            "classic",
            "weights",
            "independent",
            "follows",
        ]
        return [header, *map(_cells, self)]

    def __str__(self) -> str:
        rows = self.rows()
        widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
        lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
        lines.insert(1, "  ".join("-" * width for width in widths))
        return "\n".join([*lines, self.NOTE])


def _cells(layer: LayerAudit) -> list[str]:
    def pair(a: float, b: float) -> str:
        return f"{a:.3g}, {b:.3g}"

    return [
        layer.name,
        f"{layer.query_width or '?'}, {layer.head_dim}",
        pair(layer.projected_variance_q, layer.projected_variance_k),
        pair(layer.component_mean_q, layer.component_mean_k),
        pair(layer.component_variance_q, layer.component_variance_k),
        f"{layer.covariance:.3g}",
        *_correlation_cells(layer.correlations),
        f"{layer.score_std:.4g}",
        *(f"{layer.predicted[formula]:.4g}" for formula in ("classic", "weights", "independent")),
        layer.follows,
    ]


def _correlation_cells(found: Correlations | None) -> list[str]:
    if found is None:
        return ["?", "?"]
    within = f"{found.within_q:.2f}, {found.within_k:.2f}, {found.between:.2f}"
    return [within, f"{found.tokens_q:.2f}, {found.tokens_k:.2f}"]


def _closest(measured: float, predicted: dict[str, float]) -> str:
    """The name of the prediction whose ratio to the measured value is nearest to 1."""
    usable = {name: value for name, value in predicted.items() if value > 0 and measured > 0}
    if not usable:
        return "none"
    return min(usable, key=lambda name: abs(math.log(usable[name] / measured)))
