"""One flat table of sums over all heads of all layers, and the statistics that follow from it.

Every quantity is kept as a sum, so that micro-batches, ranks and the heads of a layer are pooled by adding columns.
The exceptions are the last rows, maxima, and the spread of the scores: heads are pooled about a mean of their own each,
since no softmax sees an offset between heads. Layers add to the table; the hook reduces it over ranks and pools it over
groups of heads. Nothing here may read a value back to the host.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Literal

import torch
from torch import Tensor

from betahook.measure.scores import sum_dtype

SUMS = (
    "pairs",
    "exact_pairs",
    "score",
    "score_square",
    "row_square",  # of the scores about the mean of their row
    "rows",
    "entropy",
    "flat_entropy",  # logarithm of the number of keys that a row may use
    # Numbers of tokens, and, weighted by them, averages over the components of q and k and the variance that
    # independence predicts. `betahook.measure.components` writes the averages once a step; they do not accumulate.
    "queries",
    "query_mean_square",
    "query_variance",
    "keys",
    "key_mean_square",
    "key_variance",
    "independent_variance",
    # Entries of the inputs of the two projections.
    "query_inputs",
    "query_input",
    "query_input_square",
    "key_inputs",
    "key_input",
    "key_input_square",
    "sensitivity",
)
MAXIMA = ("max_score", "max_logit")
ROW = {name: index for index, name in enumerate((*SUMS, *MAXIMA))}


def empty(heads: int, device: torch.device) -> Tensor:
    """A table `[quantities, heads]` of zeros: float64, except where the device has none."""
    return torch.zeros(len(ROW), heads, dtype=sum_dtype(device), device=device)


def add(table: Tensor, values: dict[str, Tensor]) -> None:
    """Add `values`, tensors `[heads]` or scalars by name, to `table` in place; maxima take the larger value."""
    values = {name: value.to(table.device) for name, value in values.items()}  # the layer may be on another device
    zero = table.new_zeros(table.shape[1])
    # All rows at once: on an accelerator one addition per row would cost more than the sums themselves.
    table[: len(SUMS)] += torch.stack([values[name].expand_as(zero) if name in values else zero for name in SUMS])
    for name in MAXIMA:
        if name in values:
            table[ROW[name]] = torch.maximum(table[ROW[name]], values[name])


def pool(table: Tensor, lengths: Tensor) -> Tensor:
    """Pool runs of `lengths [groups]` heads: `[quantities, heads] -> [quantities, groups]`.

    All sums are added but "score_square", from which the part between the means of the heads is taken: the variance of
    a group is the mean of its heads' variances, weighted by pairs. Segments, not scattering, keep the order of the
    additions, and so every bit, the same on all ranks.
    """
    sums, maxima = table.T.split([len(SUMS), len(MAXIMA)], 1)
    pooled = by_segment(sums, "sum", lengths).T
    by_head = by_segment(_mean_part(table), "sum", lengths)
    pooled[ROW["score_square"]] -= by_head - _mean_part(pooled)
    return torch.cat([pooled, by_segment(maxima, "max", lengths).T])


def _mean_part(table: Tensor) -> Tensor:
    """Squares of the scores of each column of `table` if all were equal to their mean."""
    return table[ROW["score"]].square() / table[ROW["pairs"]].clamp(min=1)


def by_segment(values: Tensor, reduction: Literal["sum", "mean", "max"], lengths: Tensor) -> Tensor:
    """Reduce runs of `lengths [segments]` entries of `values [entries, ...]`: `[segments, ...]`."""
    # unsafe=True: checking the lengths would read them back to the host.
    return torch.segment_reduce(values.contiguous(), reduction, lengths=lengths, unsafe=True)


def first_of_each(values: Tensor, lengths: Tensor) -> Tensor:
    """First entry of each run, `[entries] -> [segments]`."""
    return values[lengths.cumsum(0) - lengths]


def geometric_mean(values: Tensor, lengths: Tensor) -> Tensor:
    """Geometric mean of runs of positive values, `[entries] -> [segments]`; equal values give that value to the bit."""
    first = first_of_each(values, lengths)
    ratios = values / first.repeat_interleave(lengths, output_size=len(values))
    return first * by_segment(ratios.log(), "mean", lengths).exp()


def keep_measured(new: Tensor, old: Tensor) -> Tensor:
    """`new`, with the columns of `old` for heads without a score in `new`; the sensitivity is always the new one."""
    kept = torch.where(new[ROW["pairs"]] > 0, new, old)
    kept[ROW["sensitivity"]] = new[ROW["sensitivity"]]
    return kept


def is_distributed() -> bool:
    """True if there are several ranks."""
    distributed = torch.distributed
    return distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1


def all_reduce(table: Tensor, moments: Tensor, beta_default: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Pool a table, the moments and `beta_default [heads]` over all ranks in one collective, to the same bits on all.

    The maxima travel as one slot per rank inside the sum, which saves a second collective. The sensitivity becomes
    the mean over ranks, as the gradients do. A default is NaN for a layer that this rank has not used yet, and is then
    taken from the others. Without a process group everything is returned as it is.
    """
    if not is_distributed():
        return table, moments, beta_default
    distributed = torch.distributed
    world, rank = distributed.get_world_size(), distributed.get_rank()
    sums, own = table.split([len(SUMS), len(MAXIMA)])
    maxima = table.new_zeros(world, *own.shape)
    maxima[rank] = own
    known = ~beta_default.isnan()
    by_head = torch.cat([sums, maxima.flatten(0, 1), torch.stack([beta_default.nan_to_num(), known]).to(table)])
    packed = torch.cat([by_head.flatten(), moments.flatten()])
    distributed.all_reduce(packed)
    by_head, moments = packed[: by_head.numel()].view_as(by_head), packed[by_head.numel() :].view_as(moments)
    sums, maxima, (default, users) = by_head.split([len(SUMS), world * len(MAXIMA), 2])
    sums[ROW["sensitivity"]] /= world
    return torch.cat([sums, maxima.unflatten(0, (world, -1)).amax(0)]), moments, (default / users).to(beta_default)


@dataclass(frozen=True)
class Statistics:
    """Statistics of groups of heads, tensors of shape `[groups]`; or of one group, scalars.

    Every std is a population std: the squares are divided by their number. A quantity that was not measured is NaN;
    `count` is then 0.

    Attributes:
        count: number of query-key pairs.
        mean: mean of the raw scores `q . k`.
        std: standard deviation of the raw scores, not of the logits. Of several heads it is the root of the mean of
            their variances, each about its own mean and weighted by its pairs.
        row_std: standard deviation within rows, about the mean score of each query: the spread that the softmax sees.
        exact: True where mean, std and row_std cover every pair, False where they come from sampled query rows.
        max_score: largest absolute score in the sampled query rows.
        max_logit: largest absolute score times the beta of its forward pass, in the same rows.
        entropy: mean entropy of the attention rows, in nats, over the sampled query rows.
        flat_entropy: the entropy that flat attention would have in these rows: the mean logarithm of the number of keys
            that a row may use. It is 0 where each row has but one.
        component_mean_square_q: square of the mean of a component of q, averaged over the components.
        component_variance_q: variance of a component of q, averaged over the components.
        component_mean_square_k: the same as `component_mean_square_q`, of k.
        component_variance_k: the same as `component_variance_q`, of k.
        independent_std: standard deviation of the scores if the components of q and k were independent, from their
            moments over all tokens of a head.
        input_std_q: standard deviation of the entries that enter the query projection.
        input_std_k: standard deviation of the entries that enter the key projection.
        sensitivity: derivative of the training loss with respect to log beta.
        finite: False where a measured sum is NaN or infinite.
    """

    count: Tensor
    mean: Tensor
    std: Tensor
    row_std: Tensor
    exact: Tensor
    max_score: Tensor
    max_logit: Tensor
    entropy: Tensor
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
    def from_table(cls, table: Tensor) -> Statistics:
        """Statistics of the columns of a table of sums, `[quantities, groups]`."""
        sums = {name: table[index] for name, index in ROW.items()}
        pairs = sums["pairs"]

        def std(count: str, total: str) -> Tensor:
            mean = sums[total] / sums[count]
            return (sums[f"{total}_square"] / sums[count] - mean.square()).clamp(min=0).sqrt()

        return cls(
            count=pairs,
            mean=sums["score"] / pairs,
            std=std("pairs", "score"),
            row_std=(sums["row_square"] / pairs).sqrt(),
            exact=sums["exact_pairs"] == pairs,
            max_score=sums["max_score"].masked_fill(pairs == 0, torch.nan),
            max_logit=sums["max_logit"].masked_fill(pairs == 0, torch.nan),
            entropy=sums["entropy"] / sums["rows"],
            flat_entropy=sums["flat_entropy"] / sums["rows"],
            component_mean_square_q=sums["query_mean_square"] / sums["queries"],
            component_variance_q=sums["query_variance"] / sums["queries"],
            component_mean_square_k=sums["key_mean_square"] / sums["keys"],
            component_variance_k=sums["key_variance"] / sums["keys"],
            independent_std=(sums["independent_variance"] / sums["queries"]).sqrt(),
            input_std_q=std("query_inputs", "query_input"),
            input_std_k=std("key_inputs", "key_input"),
            sensitivity=sums["sensitivity"],
            finite=table.isfinite().all(0),
        )

    def __getitem__(self, group: int | slice) -> Statistics:
        """Statistics of one group, or of a slice of groups."""
        return Statistics(**{field.name: getattr(self, field.name)[group] for field in fields(self)})
