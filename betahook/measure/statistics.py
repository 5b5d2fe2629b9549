"""One flat table of sums over all heads of all layers, and the statistics that follow from it.

Every quantity is kept as a sum, so that micro-batches, ranks and the heads of a layer are pooled by adding columns.
There are two exceptions: the last rows are maxima, and the spread of the scores is pooled with each head about its own
mean, since an offset between heads affects no softmax. `betahook.measure.calls` adds to the table; the hook reduces it
over ranks and pools it over groups of heads.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Literal

import torch
from torch import Tensor

from betahook.measure.dtypes import sum_dtype
from betahook.measure.pairs import COUNTS

FROM_MOMENTS = ("query_mean_square", "query_variance", "key_mean_square", "key_variance", "independent_variance")
"""Rows that `betahook.measure.components` computes from the moments on demand, since they are not sums over calls.
Weighted by numbers of tokens: averages over the components of q and k, and the variance that independence predicts."""
SUMS = (
    *COUNTS,  # of the calls
    # Three sums over pairs, `row_square` of squared deviations from the mean of the row; then two sums over rows.
    "score",
    "score_square",
    "row_square",
    "entropy",
    "sink",
    # Number, sum and sum of squares of the inputs of the two projections.
    "query_inputs",
    "query_input",
    "query_input_square",
    "key_inputs",
    "key_input",
    "key_input_square",
    *FROM_MOMENTS,
    "sensitivity",
    # Number and sum of the training losses of the step, the same for all heads, for controllers that use the loss.
    "losses",
    "loss",
)
MAXIMA = (
    # Largest absolute and largest signed score seen, and a bound on those not seen; then the same times beta.
    *("max_score", "max_positive_score", "max_score_bound"),
    *("max_logit", "max_positive_logit", "max_logit_bound"),
)
ROW = {name: index for index, name in enumerate((*SUMS, *MAXIMA))}
_SQUARES = ("score_square", "row_square", "query_mean_square", "query_variance", "independent_variance")
_SCORES = ("score", *MAXIMA[:3])
POWERS = [2 if name in _SQUARES else int(name in _SCORES) for name in ROW]
"""The power with which a factor on the query enters each row; logits have 0, since their beta is part of them."""
OF_STEP = slice(ROW["losses"], ROW["loss"] + 1)
"""Rows that cover all of the last steps, even unmeasured ones; so does the sensitivity, kept in `State.window`."""


def empty(heads: int, device: torch.device) -> Tensor:
    """A table `[quantities, heads]` of zeros, in float64 if the device has it."""
    return torch.zeros(len(ROW), heads, dtype=sum_dtype(device), device=device)


def add(table: Tensor, first: str, values: Tensor) -> None:
    """Add `values [rows, heads or 1]` to consecutive rows of `table`, from the one called `first` on, in place."""
    row = ROW[first]
    table[row : row + len(values)].add_(values.to(table.device))  # the layer may be on another device


def raise_maxima(table: Tensor, found: Tensor, scales: Tensor) -> None:
    """Raise the maxima in `table` to at least `found * scales`, in place. They begin at 0, so none is negative.

    `found [2 or 3, heads]` are maxima of scores, `scales [2, heads]` are 1 and beta.
    """
    values = (found * scales[:, None]).to(table.device)
    table[ROW["max_score"] :].unflatten(0, (2, -1))[:, : len(found)].clamp_(min=values)


def by_segment(values: Tensor, reduction: Literal["sum", "mean", "max"], lengths: Tensor) -> Tensor:
    """Reduce consecutive runs of `values [entries, ...]`, of `lengths [segments]`, to `[segments, ...]`.

    For example, the sums of `[1, 2, 3]` with the lengths `[2, 1]` are `[3, 3]`.
    """
    if values.device.type == "mps":  # which lacks the operation
        return by_segment(values.cpu(), reduction, lengths.cpu()).to(values.device)
    # unsafe=True: checking the lengths would read them back to the host.
    return torch.segment_reduce(values.contiguous(), reduction, lengths=lengths, unsafe=True)


def geometric_mean(values: Tensor, lengths: Tensor, segments: Tensor) -> Tensor:
    """Geometric mean of runs of positive values, `[entries, ...] -> [segments, ...]`; exact if they are equal.

    Args:
        values: the runs, one after another.
        lengths: lengths of the runs, `[segments]`.
        segments: index of the run of each value, int64 `[entries]`.
    """
    largest = by_segment(values, "max", lengths)
    ratios = values / largest.index_select(0, segments)
    return largest * by_segment(ratios.log(), "mean", lengths).exp()


def population_std(count: Tensor, total: Tensor, square: Tensor) -> Tensor:
    """Population std of numbers from their count, their sum and the sum of their squares."""
    return (square / count - (total / count).square()).clamp(min=0).sqrt()


def all_reduce(
    table: Tensor, window: Tensor, moments: Tensor, beta_default: Tensor, age: Tensor, left_alone: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Pool everything over several ranks in one collective, with bit-identical results on each.

    The maxima travel in one slot per rank inside the sum, which saves a second collective.

    Args:
        table: `[quantities, heads]`.
        window: sums for each head, `[rows, heads]`.
        moments: see `measure.components`.
        beta_default: `[heads]`; NaN for a layer that this rank has not used yet, whose value is taken from the others.
        age: whole numbers `[heads]`, 0 or more; the largest over all ranks is returned.
        left_alone: boolean `[heads]`; returned True where it is True on any rank.
    """
    distributed = torch.distributed
    world, rank = distributed.get_world_size(), distributed.get_rank()
    sums, own = table.split([len(SUMS), len(MAXIMA)])
    maxima = table.new_zeros(world, len(MAXIMA) + 1, table.shape[1])
    maxima[rank] = torch.cat([own, age[None].to(table)])
    known = ~beta_default.isnan()
    default = torch.stack([beta_default.nan_to_num(), known, left_alone]).to(table)
    parts = sums, window, maxima, default, moments
    packed = torch.cat([part.flatten() for part in parts])
    distributed.all_reduce(packed)
    pooled = packed.split([part.numel() for part in parts])
    sums, window, maxima, default, moments = (x.view_as(part) for x, part in zip(pooled, parts, strict=True))
    largest, (default, users, leaving) = maxima.amax(0), default
    table, age = torch.cat([sums, largest[:-1]]), largest[-1].to(age)
    return table, window, moments, (default / users).to(beta_default), age, leaving > 0


@dataclass(frozen=True)
class Statistics:
    """Statistics of groups of heads, tensors of shape `[groups]`; or of one group, scalars.

    Every std is a population std: the sum of squares is divided by their number. A quantity that was not measured is
    NaN; `count` is then 0.

    Attributes:
        count: number of query-key pairs; an estimate unless `exact`.
        mean: mean of the raw scores `q . k`.
        std: standard deviation of the raw scores, not of the logits. For several heads it is the root of the mean of
            their variances, each about the head's own mean and weighted by its number of pairs.
        row_std: standard deviation within rows, about the mean score of each query: the spread that the softmax sees.
        exact: True where mean, std and row_std cover every pair, False where they are estimated from some rows.
        max_score: largest absolute score in the sampled query rows: all rows if there are at most 32, or at most
            128 * 128 query-key pairs, else 32 of them; always all with `attach(exact_max_logit=True)`.
        max_positive_score: the same without the absolute value; 0 where no score is positive.
        max_score_bound: upper bound of all absolute scores; equal to `max_score` where that covers all rows.
        max_logit: largest absolute score times the beta of its forward pass, in the same rows.
        max_positive_logit: the same without the absolute value; 0 where no score is positive.
        max_logit_bound: upper bound of all absolute scores times beta; equal to `max_logit` where that covers all rows.
        entropy: mean entropy of the attention rows, in nats, from the same rows, weighted by how many each stands for.
        sink: mean share of the attention that a row gives to the first key that it may use, from the same rows.
        flat_entropy: the entropy that uniform attention would have in these rows: the mean logarithm of the number of
            keys that a row may use. It is 0 where each row has only one.
        component_mean_square_q, component_mean_square_k: square of the mean of a component of q, or of k, averaged over
            the components.
        component_variance_q, component_variance_k: variance of a component, averaged over the components.
        independent_std: standard deviation of the scores if the components of q and k were independent, from their
            moments over all tokens that any head of the layer uses.
        input_std_q, input_std_k: standard deviation of the inputs of the query projection, or of the key projection.
        sensitivity: derivative of the training loss with respect to log beta, averaged over the batches.
        finite: False where a measured sum is NaN or infinite.
    """

    count: Tensor
    mean: Tensor
    std: Tensor
    row_std: Tensor
    exact: Tensor
    max_score: Tensor
    max_positive_score: Tensor
    max_score_bound: Tensor
    max_logit: Tensor
    max_positive_logit: Tensor
    max_logit_bound: Tensor
    entropy: Tensor
    sink: Tensor
    flat_entropy: Tensor
    component_mean_square_q: Tensor
    component_variance_q: Tensor
    component_mean_square_k: Tensor
    component_variance_k: Tensor
    independent_std: Tensor
    input_std_q: Tensor
    input_std_k: Tensor
    sensitivity: Tensor
    finite: Tensor

    @classmethod
    def from_table(
        cls, table: Tensor, lengths: Tensor | None = None, with_averages: Callable[[], Tensor] | None = None
    ) -> Statistics:
        """Statistics of a table of sums, each computed when it is first read, since a step reads few of them.

        Args:
            table: `[quantities, heads]`, not modified from now on.
            lengths: numbers of consecutive heads to pool, `[groups]`; None for each head as its own group.
            with_averages: returns the table with the averages over components filled in, see `measure.components`;
                None if it already has them.
        """
        made = object.__new__(cls)
        vars(made)["_pooled"] = Pooled(table, lengths, with_averages)
        return made

    def __getattr__(self, name: str) -> Tensor:
        """Compute a statistic when it is first read."""
        pooled: Pooled | None = vars(self).get("_pooled")
        if pooled is None or name not in FORMULAS:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        value: Tensor = FORMULAS[name](pooled)
        vars(self)[name] = value
        return value

    def __repr__(self) -> str:
        numbers = {field.name: getattr(self, field.name).tolist() for field in fields(self)}
        lines = [f"  {name}={_rounded(value)},\n" for name, value in numbers.items()]
        return f"Statistics(\n{''.join(lines)})"

    def __getitem__(self, group: int | slice) -> Statistics:
        """Statistics of one group, or of a slice of groups."""
        return Statistics(**{field.name: getattr(self, field.name)[group] for field in fields(self)})


@dataclass(frozen=True)
class Pooled:
    """Rows of a table pooled over consecutive heads, by name, each computed when it is first read.

    Sums are added, but "score_square" without the variance between the heads' means: the variance of a group is the
    mean of its heads' variances, weighted by pairs. Segment reductions add in a fixed order, unlike scattering, so the
    results are bit-identical on all ranks. The fields are the arguments of `Statistics.from_table`.
    """

    table: Tensor
    lengths: Tensor | None
    with_averages: Callable[[], Tensor] | None = None

    def __getitem__(self, name: str) -> Tensor:
        if name in MAXIMA:
            return self._maxima[ROW[name]]
        if name in FROM_MOMENTS and self.with_averages is not None:
            return self._averages[name]
        if name == "score_square" and self.lengths is not None:
            return self._score_square
        return self._sums[ROW[name]]

    @cached_property
    def _by_head(self) -> Tensor:
        """The table transposed for `by_segment`, `[heads, quantities]`."""
        return self.table.T.contiguous()

    @cached_property
    def _sums(self) -> Tensor:
        """Sums of all rows, `[quantities, groups]`; those of maxima only serve to check that all were finite."""
        return self.table if self.lengths is None else by_segment(self._by_head, "sum", self.lengths).T

    @cached_property
    def _maxima(self) -> Tensor:
        """Maxima of all rows, `[quantities, groups]`; only those of the rows in `MAXIMA` are meaningful."""
        return self.table if self.lengths is None else by_segment(self._by_head, "max", self.lengths).T

    @cached_property
    def _averages(self) -> Pooled:
        assert self.with_averages is not None
        return Pooled(self.with_averages(), self.lengths)

    @cached_property
    def _score_square(self) -> Tensor:
        assert self.lengths is not None
        by_head = by_segment(_mean_part(self.table), "sum", self.lengths)
        return self._sums[ROW["score_square"]] - (by_head - _mean_part(self._sums))

    @cached_property
    def unmeasured(self) -> Tensor:
        """True for groups without any pair, boolean `[groups]`."""
        return self["pairs"] == 0

    def finite(self) -> Tensor:
        """True for groups in which everything is finite, boolean `[groups]`."""
        return (self._sums * 0).sum(0) == 0  # three operations; `isfinite` alone takes four

    def largest(self, *names: str) -> Tensor:
        """The largest of the named maxima, `[groups]`; NaN where nothing was measured."""
        largest = self[names[0]] if len(names) == 1 else torch.maximum(*(self[name] for name in names))
        return largest.masked_fill(self.unmeasured, torch.nan)

    def std(self, count: str, total: str) -> Tensor:
        """The `population_std` from the row `count`, the row `total`, and the row of its squares."""
        return population_std(self[count], self[total], self[f"{total}_square"])


def _rounded(value: float | list[float]) -> str:
    """Format a number, or a list of numbers, with five digits; a boolean as it is."""
    if isinstance(value, list):
        return f"[{', '.join(map(_rounded, value))}]"
    return str(value) if isinstance(value, bool) else f"{value:.5g}"


def _mean_part(table: Tensor) -> Tensor:
    """Sum of squares that each column would have if all its scores were equal to their mean."""
    return table[ROW["score"]].square() / table[ROW["pairs"]].clamp(min=1)


FORMULAS: dict[str, Callable[[Pooled], Tensor]] = {
    "count": lambda pooled: pooled["pairs"],
    "mean": lambda pooled: pooled["score"] / pooled["pairs"],
    "std": lambda pooled: pooled.std("pairs", "score"),
    "row_std": lambda pooled: (pooled["row_square"] / pooled["pairs"]).clamp(min=0).sqrt(),
    "exact": lambda pooled: pooled["exact_pairs"] == pooled["pairs"],
    "max_score": lambda pooled: pooled.largest("max_score"),
    "max_positive_score": lambda pooled: pooled.largest("max_positive_score"),
    "max_score_bound": lambda pooled: pooled.largest("max_score", "max_score_bound"),
    "max_logit": lambda pooled: pooled.largest("max_logit"),
    "max_positive_logit": lambda pooled: pooled.largest("max_positive_logit"),
    "max_logit_bound": lambda pooled: pooled.largest("max_logit", "max_logit_bound"),
    "entropy": lambda pooled: pooled["entropy"] / pooled["rows"],
    "sink": lambda pooled: pooled["sink"] / pooled["rows"],
    "flat_entropy": lambda pooled: pooled["flat_entropy"] / pooled["rows"],
    "component_mean_square_q": lambda pooled: pooled["query_mean_square"] / pooled["queries"],
    "component_variance_q": lambda pooled: pooled["query_variance"] / pooled["queries"],
    "component_mean_square_k": lambda pooled: pooled["key_mean_square"] / pooled["keys"],
    "component_variance_k": lambda pooled: pooled["key_variance"] / pooled["keys"],
    "independent_std": lambda pooled: (pooled["independent_variance"] / pooled["queries"]).sqrt(),
    "input_std_q": lambda pooled: pooled.std("query_inputs", "query_input"),
    "input_std_k": lambda pooled: pooled.std("key_inputs", "key_input"),
    "sensitivity": lambda pooled: pooled["sensitivity"],
    "finite": lambda pooled: pooled.finite(),
}
"""The formula of each statistic, by name."""
