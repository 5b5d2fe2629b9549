"""What is measured: one flat table of sums over all heads of all layers, and the statistics that follow from it.

Every quantity is kept as a sum, so that micro-batches, ranks and the heads of a layer are pooled by adding columns.
The exceptions are the last rows, maxima.
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
    "rows",
    "entropy",
    # Tokens, and weighted by them: averages over the components of q and k, and the variance that independence
    # predicts. The averages are written once a step (`betahook.measure.components`), not accumulated.
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
    # Entries of the two projections; written once a step, not accumulated.
    "query_weights",
    "query_weight",
    "query_weight_square",
    "key_weights",
    "key_weight",
    "key_weight_square",
    "sensitivity",
)
MAXIMA = ("max_score", "max_logit")
ROW = {name: index for index, name in enumerate((*SUMS, *MAXIMA))}


def empty(heads: int, device: torch.device) -> Tensor:
    """A table `[quantities, heads]` of zeros: float64, except where the device has none."""
    return torch.zeros(len(ROW), heads, dtype=sum_dtype(device), device=device)


def add(table: Tensor, values: dict[str, Tensor]) -> None:
    """Add `values`, name to a tensor `[heads]` or scalar, to `table` in place; maxima take the larger one."""
    values = {name: value.to(table.device) for name, value in values.items()}  # a layer may be on another device
    zero = table.new_zeros(table.shape[1])
    # All at once: on an accelerator an addition for each row would cost more than the sums themselves.
    table[: len(SUMS)] += torch.stack([values[name].expand_as(zero) if name in values else zero for name in SUMS])
    for name in MAXIMA:
        if name in values:
            table[ROW[name]] = torch.maximum(table[ROW[name]], values[name])


def pool(table: Tensor, lengths: Tensor) -> Tensor:
    """Pool runs of heads into units: `[quantities, heads] -> [quantities, units]`, `lengths [units]` heads each.

    By segments and not by scattering, so that the order of the additions, and every bit, is the same on all ranks.
    """
    sums, maxima = table.T.split([len(SUMS), len(MAXIMA)], 1)
    return torch.cat([by_segment(sums, "sum", lengths), by_segment(maxima, "max", lengths)], 1).T


def by_segment(values: Tensor, reduction: Literal["sum", "mean", "max"], lengths: Tensor) -> Tensor:
    """Reduce runs of `lengths [segments]` entries of `values [entries, ...]`: `[segments, ...]`."""
    # unsafe: the check of the lengths would read them back to the host.
    return torch.segment_reduce(values.contiguous(), reduction, lengths=lengths, unsafe=True)


def first_of_each(values: Tensor, lengths: Tensor) -> Tensor:
    """The first entry of each run, `[entries] -> [segments]`."""
    return values[lengths.cumsum(0) - lengths]


def geometric_mean(values: Tensor, lengths: Tensor) -> Tensor:
    """Of runs of positive values, `[entries] -> [segments]`; where those of a run agree, that value bit by bit."""
    first = first_of_each(values, lengths)
    ratios = values / first.repeat_interleave(lengths, output_size=len(values))
    return first * by_segment(ratios.log(), "mean", lengths).exp()


def keep_measured(new: Tensor, old: Tensor) -> Tensor:
    """`new`, but what was last measured of the heads that it has no scores of; the sensitivity is always new."""
    kept = torch.where(new[ROW["pairs"]] > 0, new, old)
    kept[ROW["sensitivity"]] = new[ROW["sensitivity"]]
    return kept


def is_distributed() -> bool:
    """Whether there are several ranks."""
    distributed = torch.distributed
    return distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1


def all_reduce(table: Tensor, moments: Tensor, beta_default: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Pool a table, the moments and `beta_default [heads]` over all ranks in one collective, to the same bits on all.

    The maxima travel as one slot per rank inside the sum, which saves a second collective. The sensitivity becomes
    the mean over ranks, as the gradients do. A default that is NaN, of a layer that this rank has not used yet, is that
    of the others. Without a process group they are returned as they are.
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
    """Statistics per unit, a unit being a layer or a head. Tensors of shape `[units]`, or scalars for one layer.

    A quantity that was not measured is NaN, `count` is then 0.

    Attributes:
        count: number of query-key pairs.
        mean: mean of the raw scores `q . k`.
        std: standard deviation of the raw scores, not of the logits.
        exact: True where mean and std cover every pair, False where they come from sampled query rows.
        max_score: largest absolute score in the sampled query rows.
        max_logit: largest absolute score times the beta of its forward, in the same rows.
        entropy: mean entropy of the attention rows, in nats, over the sampled query rows.
        component_mean_square_q: square of the mean of a component of q, averaged over the components.
        component_variance_q: variance of a component of q, averaged over the components.
        component_mean_square_k: the same as `component_mean_square_q`, of k.
        component_variance_k: the same as `component_variance_q`, of k.
        independent_std: standard deviation that independent components of q and k would give the scores, from their
            moments over all tokens of a head.
        input_std_q: standard deviation of the entries that enter the query projection.
        input_std_k: standard deviation of the entries that enter the key projection.
        weight_std_q: standard deviation of the entries of W_q.
        weight_std_k: standard deviation of the entries of W_k.
        sensitivity: derivative of the training loss with respect to log beta.
        finite: False where a measured sum is NaN or infinite.
    """

    count: Tensor
    mean: Tensor
    std: Tensor
    exact: Tensor
    max_score: Tensor
    max_logit: Tensor
    entropy: Tensor
    component_mean_square_q: Tensor
    component_variance_q: Tensor
    component_mean_square_k: Tensor
    component_variance_k: Tensor
    independent_std: Tensor
    input_std_q: Tensor
    input_std_k: Tensor
    weight_std_q: Tensor
    weight_std_k: Tensor
    sensitivity: Tensor
    finite: Tensor

    @classmethod
    def from_table(cls, table: Tensor) -> Statistics:
        """Statistics of the columns of a table of sums, `[quantities, units]`."""
        sums = {name: table[index] for name, index in ROW.items()}
        pairs = sums["pairs"]

        def std(count: str, total: str) -> Tensor:
            mean = sums[total] / sums[count]
            return (sums[f"{total}_square"] / sums[count] - mean.square()).clamp(min=0).sqrt()

        return cls(
            count=pairs,
            mean=sums["score"] / pairs,
            std=std("pairs", "score"),
            exact=sums["exact_pairs"] == pairs,
            max_score=sums["max_score"].masked_fill(pairs == 0, torch.nan),
            max_logit=sums["max_logit"].masked_fill(pairs == 0, torch.nan),
            entropy=sums["entropy"] / sums["rows"],
            component_mean_square_q=sums["query_mean_square"] / sums["queries"],
            component_variance_q=sums["query_variance"] / sums["queries"],
            component_mean_square_k=sums["key_mean_square"] / sums["keys"],
            component_variance_k=sums["key_variance"] / sums["keys"],
            independent_std=(sums["independent_variance"] / sums["queries"]).sqrt(),
            input_std_q=std("query_inputs", "query_input"),
            input_std_k=std("key_inputs", "key_input"),
            weight_std_q=std("query_weights", "query_weight"),
            weight_std_k=std("key_weights", "key_weight"),
            sensitivity=sums["sensitivity"],
            finite=table.isfinite().all(0),
        )

    def __getitem__(self, unit: int | slice) -> Statistics:
        """The statistics of one unit, or of a slice of units."""
        return Statistics(**{field.name: getattr(self, field.name)[unit] for field in fields(self)})
