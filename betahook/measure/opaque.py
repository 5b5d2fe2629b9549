"""The functions of `betahook.measure.calls` as single operations that a compiler does not look into.

A compiler that saw what is measured would compile it into every layer, which takes many times as long as the model
itself. The recorder calls these functions while a graph is made; in the graph each stands for one operation that adds
to the tables, in the steps that measure the layer.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Protocol
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from betahook import compat
from betahook.measure import calls, statistics
from betahook.measure.masks import Band, Mask


class Turned(Protocol):
    """The state of a hook, as a graph asks it when it runs.

    Attributes:
        turn: the layers that are measured in this step, by index.
    """

    turn: range


_numbers = itertools.count()
_hooks: WeakValueDictionary[int, Turned] = WeakValueDictionary()


def register(hook: Turned) -> int:
    """Return a number under which a graph finds a hook; each of its layers may have one."""
    number = next(_numbers)
    _hooks[number] = hook
    return number


def _is_due(turn: list[int], device: torch.device) -> bool:
    """Tell if a layer is measured in this step, by the number of its hook and its index.

    A CUDA graph, which the host does not run, measures in every step.
    """
    number, layer = turn
    hook = _hooks.get(number)
    return hook is None or layer in hook.turn or compat.is_captured(device)


@dataclass(frozen=True)
class Place:
    """Place of the heads of a layer in the tensors over all heads of all layers.

    Attributes:
        table: see `betahook.measure.statistics`.
        moments: see `betahook.measure.components`.
        beta: `[heads]`, NaN for the model's own.
        beta_default: `[heads]`, the model's own.
        bounds: first and last head, first and last component.
        turn: the number of `register`, and the index of the layer.
    """

    table: Tensor
    moments: Tensor
    beta: Tensor
    beta_default: Tensor
    bounds: list[int]
    turn: list[int]

    def columns(self, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
        """Tables and beta of these heads, the latter on a device."""
        first, last, left, right = self.bounds
        beta, default = (x[first:last].to(device) for x in (self.beta, self.beta_default))
        return self.table[:, first:last], self.moments[:, left:right], torch.where(beta.isnan(), default, beta)


PLACE = "Tensor(a!) table, Tensor(b!) moments, Tensor beta, Tensor beta_default, int[] bounds, int[] turn"


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
    where = place.table, place.moments, place.beta, place.beta_default, place.bounds, place.turn
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
    turn: list[int],
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
    if not _is_due(turn, table.device):
        return
    # Nothing is shared between layers: the memory of a graph's tensors is used again, and a CUDA graph owns it.
    queries, keys, pairs, bias, documents, structured = mask
    described = Mask(Band(low, high), queries, keys, pairs, bias, documents, structured, facts=None)
    table, moments, beta = Place(table, moments, beta, beta_default, bounds, turn).columns(query.device)
    calls.add_scores(
        *(table, moments, query, key, described, beta),
        position_bias=position_bias,
        softcap=softcap,
        sinks=sinks,
        exact_max_logit=exact_max_logit,
    )


def add_pairs(place: Place, raw: Tensor, logits: Tensor, allowed: Tensor, query: Tensor, key: Tensor) -> None:
    """See `calls.add_pairs`."""
    where = place.table, place.moments, place.beta, place.beta_default, place.bounds, place.turn
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
    turn: list[int],
    raw: Tensor,
    logits: Tensor,
    allowed: Tensor,
    query: Tensor,
    key: Tensor,
) -> None:
    if not _is_due(turn, table.device):
        return
    table, moments, beta = Place(table, moments, beta, beta_default, bounds, turn).columns(raw.device)
    calls.add_pairs(table, moments, raw, logits, allowed, query, key, beta)


def add_input(place: Place, inputs: Tensor, sides: list[str]) -> None:
    """Add `calls.input_sums` to the rows of some sides, "query", "key" or both."""
    first, last = place.bounds[:2]
    _add_input(place.table, first, last, place.turn, inputs, sides)


@torch.library.custom_op(
    "betahook::add_input",
    mutates_args=("table",),
    schema="(Tensor(a!) table, int first, int last, int[] turn, Tensor inputs, str[] sides) -> ()",
)
def _add_input(table: Tensor, first: int, last: int, turn: list[int], inputs: Tensor, sides: list[str]) -> None:
    if not _is_due(turn, table.device):
        return
    sums = calls.input_sums(inputs)
    for side in sides:
        statistics.add(table[:, first:last], f"{side}_inputs", sums)


for operation in (_add_scores, _add_pairs, _add_input):
    operation.register_fake(lambda *args: None)
