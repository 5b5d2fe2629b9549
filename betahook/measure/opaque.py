"""The functions of `betahook.measure.calls`, each as one operation that a compiler does not look into.

A compiler that saw what is measured would compile it into every layer, which takes many times as long as the model
itself. The recorder calls `add_scores`, `add_pairs` and `add_input` here: in an eager forward they are those of
`calls`, in a graph they stand for a single operation that adds to the tables.
"""

from __future__ import annotations

import torch
from torch import Tensor

from betahook.measure import calls
from betahook.measure.masks import Band, Mask

TABLES = ("table", "moments")


def add_scores(
    table: Tensor,
    moments: Tensor,
    query: Tensor,
    key: Tensor,
    mask: Mask,
    beta: Tensor,
    *,
    position_bias: Tensor | None,
    softcap: float | None,
    sinks: Tensor | None,
) -> None:
    """See `calls.add_scores`."""
    if not torch.compiler.is_compiling():
        calls.add_scores(
            table, moments, query, key, mask, beta, position_bias=position_bias, softcap=softcap, sinks=sinks
        )
        return
    tensors = (mask.queries, mask.keys, mask.pairs, mask.bias, mask.documents, mask.structured)
    _add_scores(
        table, moments, query, key, mask.band.low, mask.band.high, *tensors, beta, position_bias, softcap, sinks
    )


@torch.library.custom_op(
    "betahook::add_scores",
    mutates_args=TABLES,
    schema="(Tensor(a!) table, Tensor(b!) moments, Tensor query, Tensor key, SymInt? low, SymInt? high, "
    "Tensor? queries, Tensor? keys, Tensor? pairs, Tensor? bias, Tensor? documents, Tensor? structured, "
    "Tensor beta, Tensor? position_bias, float? softcap, Tensor? sinks) -> ()",
)
def _add_scores(
    table: Tensor,
    moments: Tensor,
    query: Tensor,
    key: Tensor,
    low: int | None,
    high: int | None,
    queries: Tensor | None,
    keys: Tensor | None,
    pairs: Tensor | None,
    bias: Tensor | None,
    documents: Tensor | None,
    structured: Tensor | None,
    beta: Tensor,
    position_bias: Tensor | None,
    softcap: float | None,
    sinks: Tensor | None,
) -> None:
    # Nothing is shared between layers: the memory of a graph's tensors is used again, and a CUDA graph owns it.
    mask = Mask(Band(low, high), queries, keys, pairs, bias, documents, structured, facts=None)
    calls.add_scores(table, moments, query, key, mask, beta, position_bias=position_bias, softcap=softcap, sinks=sinks)


def add_pairs(
    table: Tensor,
    moments: Tensor,
    raw: Tensor,
    logits: Tensor,
    allowed: Tensor,
    query: Tensor,
    key: Tensor,
    beta: Tensor,
) -> None:
    """See `calls.add_pairs`."""
    add = _add_pairs if torch.compiler.is_compiling() else calls.add_pairs
    add(table, moments, raw, logits, allowed, query, key, beta)


@torch.library.custom_op(
    "betahook::add_pairs",
    mutates_args=TABLES,
    schema="(Tensor(a!) table, Tensor(b!) moments, Tensor raw, Tensor logits, Tensor allowed, Tensor query, "
    "Tensor key, Tensor beta) -> ()",
)
def _add_pairs(
    table: Tensor,
    moments: Tensor,
    raw: Tensor,
    logits: Tensor,
    allowed: Tensor,
    query: Tensor,
    key: Tensor,
    beta: Tensor,
) -> None:
    calls.add_pairs(table, moments, raw, logits, allowed, query, key, beta)


def add_input(table: Tensor, inputs: Tensor, sides: list[str]) -> None:
    """See `calls.add_input`."""
    if torch.compiler.is_compiling():
        _add_input(table, inputs, sides)
    else:
        calls.add_input(table, inputs, sides)


@torch.library.custom_op(
    "betahook::add_input", mutates_args=("table",), schema="(Tensor(a!) table, Tensor inputs, str[] sides) -> ()"
)
def _add_input(table: Tensor, inputs: Tensor, sides: list[str]) -> None:
    calls.add_input(table, inputs, sides)


for operation in (_add_scores, _add_pairs, _add_input):
    operation.register_fake(lambda *args: None)
