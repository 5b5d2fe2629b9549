"""The functions of `betahook.measure.calls` as single operations that a compiler does not look into.

A compiler that saw what is measured would compile it into every layer, which takes many times as long as the model
itself. The recorder calls these functions while a graph is made; in the graph each stands for one operation that adds
to the tables.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from betahook.measure import calls, statistics
from betahook.measure.masks import Band, Mask


@dataclass(frozen=True)
class Place:
    """Place of the heads of a layer in the tensors over all heads of all layers.

    Attributes:
        table: see `betahook.measure.statistics`.
        moments: see `betahook.measure.components`.
        beta: `[heads]`, NaN for the model's own.
        beta_default: `[heads]`, the model's own.
        bounds: first and last head, first and last component.
    """

    table: Tensor
    moments: Tensor
    beta: Tensor
    beta_default: Tensor
    bounds: list[int]

    def columns(self, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
        """Tables and beta of these heads, the latter on a device."""
        first, last, left, right = self.bounds
        beta, default = (x[first:last].to(device) for x in (self.beta, self.beta_default))
        return self.table[:, first:last], self.moments[:, left:right], torch.where(beta.isnan(), default, beta)


PLACE = "Tensor(a!) table, Tensor(b!) moments, Tensor beta, Tensor beta_default, int[] bounds"


def add_scores(
    place: Place,
    query: Tensor,
    key: Tensor,
    mask: Mask,
    *,
    position_bias: Tensor | None,
    softcap: float | None,
    sinks: Tensor | None,
    exact_max_logit: bool,
) -> None:
    """See `calls.add_scores`."""
    tensors = [mask.queries, mask.keys, mask.pairs, mask.bias, mask.documents, mask.structured]
    where = place.table, place.moments, place.beta, place.beta_default, place.bounds
    options = position_bias, softcap, sinks, exact_max_logit
    _add_scores(*where, query, key, mask.band.low, mask.band.high, tensors, *options)


@torch.library.custom_op(
    "betahook::add_scores",
    mutates_args=("table", "moments"),
    schema=f"({PLACE}, Tensor query, Tensor key, SymInt? low, SymInt? high, Tensor?[] mask, Tensor? position_bias, "
    "float? softcap, Tensor? sinks, bool exact_max_logit) -> ()",
)
def _add_scores(
    table: Tensor,
    moments: Tensor,
    beta: Tensor,
    beta_default: Tensor,
    bounds: list[int],
    query: Tensor,
    key: Tensor,
    low: int | None,
    high: int | None,
    mask: list[Tensor | None],
    position_bias: Tensor | None,
    softcap: float | None,
    sinks: Tensor | None,
    exact_max_logit: bool,
) -> None:
    # Nothing is shared between layers: the memory of a graph's tensors is used again, and a CUDA graph owns it.
    queries, keys, pairs, bias, documents, structured = mask
    described = Mask(Band(low, high), queries, keys, pairs, bias, documents, structured, facts=None)
    table, moments, beta = Place(table, moments, beta, beta_default, bounds).columns(query.device)
    calls.add_scores(
        *(table, moments, query, key, described, beta),
        position_bias=position_bias,
        softcap=softcap,
        sinks=sinks,
        exact_max_logit=exact_max_logit,
    )


def add_pairs(place: Place, raw: Tensor, logits: Tensor, allowed: Tensor, query: Tensor, key: Tensor) -> None:
    """See `calls.add_pairs`."""
    where = place.table, place.moments, place.beta, place.beta_default, place.bounds
    _add_pairs(*where, raw, logits, allowed, query, key)


@torch.library.custom_op(
    "betahook::add_pairs",
    mutates_args=("table", "moments"),
    schema=f"({PLACE}, Tensor raw, Tensor logits, Tensor allowed, Tensor query, Tensor key) -> ()",
)
def _add_pairs(
    table: Tensor,
    moments: Tensor,
    beta: Tensor,
    beta_default: Tensor,
    bounds: list[int],
    raw: Tensor,
    logits: Tensor,
    allowed: Tensor,
    query: Tensor,
    key: Tensor,
) -> None:
    table, moments, beta = Place(table, moments, beta, beta_default, bounds).columns(raw.device)
    calls.add_pairs(table, moments, raw, logits, allowed, query, key, beta)


def add_input(place: Place, inputs: Tensor, sides: list[str]) -> None:
    """Add `calls.input_sums` to the rows of some sides, "query", "key" or both."""
    first, last = place.bounds[:2]
    _add_input(place.table, first, last, inputs, sides)


@torch.library.custom_op(
    "betahook::add_input",
    mutates_args=("table",),
    schema="(Tensor(a!) table, int first, int last, Tensor inputs, str[] sides) -> ()",
)
def _add_input(table: Tensor, first: int, last: int, inputs: Tensor, sides: list[str]) -> None:
    sums = calls.input_sums(inputs)
    for side in sides:
        statistics.add(table[:, first:last], f"{side}_inputs", sums)


for operation in (_add_scores, _add_pairs, _add_input):
    operation.register_fake(lambda *args: None)
