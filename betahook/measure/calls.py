"""Measure one attention call, and add the results to the tables of a hook.

The recorder of a layer calls `add_scores` if it has q and k, and `add_pairs` if it has the score matrix. `_score_sums`
chooses the cheapest form of the statistics. The inputs of W_q and W_k are summed in `betahook.measure.inputs`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from betahook.measure import components, devices, prefix, scores, statistics
from betahook.measure.dtypes import at_least_float32, no_autocast
from betahook.measure.inputs import Entries, input_rows
from betahook.measure.largest import extreme_scores, norm_bound
from betahook.measure.masks import Mask, once_per_mask
from betahook.measure.pairs import call_counts, count_tokens, is_short, sampling_weight
from betahook.measure.rows import ScoreMod, pair_sums, row_sums
from betahook.measure.scores import Components


def add_scores(
    table: Tensor,
    moments: Tensor,
    query: Tensor,
    key: Tensor,
    mask: Mask,
    scales: Tensor,
    score_mod: ScoreMod,
    *,
    exact_max_logit: bool,
    inputs: Sequence[Entries],
) -> None:
    """Add one attention call to the sums of its layer, in place.

    Args:
        table: `[quantities, heads]`, see `betahook.measure.statistics`.
        moments: `[4, heads * d_k]`, see `betahook.measure.components`; unchanged by a call with another d_k.
        query: `[batch, heads, queries, d_k]`, any floating dtype.
        key: `[batch, key_heads, keys, d_k]`; `heads` is a multiple of `key_heads` (grouped-query attention).
        mask: the pairs that the call uses.
        scales: `[2, heads]`, 1 and the acting inverse temperature.
        score_mod: what the model does to its logits.
        exact_max_logit: True to search all pairs of a long sequence for the largest score, False to bound it.
        inputs: `inputs.Entries` of the inputs of W_q and W_k in this call, to be added too; empty for none.
    """
    if is_short(query.shape[2], key.shape[2]) or not devices.is_cpu(query.device):
        query, key = at_least_float32(query), at_least_float32(key)
    with no_autocast(query.device):
        counts = once_per_mask(call_counts, mask, query, *query.shape[:3], key.shape[2])
        of_query = scores.components(query, mask.queries)
        sums, largest, of_key = _score_sums(query, key, mask, scales[1], of_query, score_mod)
        if not is_short(query.shape[2], key.shape[2]):
            if exact_max_logit:
                largest = extreme_scores(query, key, mask).unbind()
            else:
                largest = *largest, norm_bound(query, key, mask)
        if inputs:
            sums = [*sums, *input_rows(mask, query, inputs)]
        _add(table, moments, [counts, *sums], largest, scales, of_query, of_key)


def _score_sums(
    query: Tensor, key: Tensor, mask: Mask, beta: Tensor, of_query: Components, score_mod: ScoreMod
) -> tuple[list[Tensor], tuple[Tensor, ...], Components]:
    """Choose the form; return the sums of the scores for `_add`, their `extremes`, and the moments of the keys."""
    short = is_short(query.shape[2], key.shape[2])
    with_moments = short or mask.structured is not None
    sampled, largest = row_sums(query, key, mask, beta, score_mod, moments=with_moments)
    if short:
        return sampled, largest, scores.components(key, mask.keys)
    weight = sampling_weight(query.shape[2], key.shape[2])
    sampled = [weight * sums for sums in sampled]
    if devices.is_cpu(query.device):
        exact, of_key = scores.score_sums(query, key, mask, of_query.mean)
    else:
        of_key = scores.components(key, mask.keys)
        exact = prefix.score_sums(query, key, mask, of_key)
    if mask.structured is not None:
        exact = torch.where(mask.structured, exact, sampled.pop(0))
    return [exact, *sampled], largest, of_key


def add_pairs(
    table: Tensor,
    moments: Tensor,
    raw: Tensor,
    logits: Tensor,
    allowed: Tensor,
    query: Tensor,
    key: Tensor,
    scales: Tensor,
) -> None:
    """Add one attention call by its score matrix; `table`, `moments` and `scales` are as in `add_scores`.

    Args:
        raw: scores `[batch, heads, queries, keys]`.
        logits: of the same shape, the input of the softmax.
        allowed: boolean, of the same shape.
        query, key: `[1, heads, tokens, d_k]`, all tokens that took part in the scores.
    """
    with no_autocast(raw.device):
        counts, sums, largest = pair_sums(raw, logits, allowed)
        sides = list(zip((query, key), valid_tokens(allowed, query, key), strict=True))
        tokens = [count_tokens(counts[0], valid, 1, x.shape[2]) for x, valid in sides]
        counts = torch.cat([counts, torch.stack(tokens)])
        of_query, of_key = (scores.components(x, valid) for x, valid in sides)
        _add(table, moments, [counts, sums], largest, scales, of_query, of_key)


def valid_tokens(allowed: Tensor, query: Tensor, key: Tensor) -> tuple[Tensor | None, Tensor | None]:
    """Return the queries and the keys that any head uses, boolean `[1, tokens]` each.

    Args:
        allowed: the pairs in use, boolean `[batch, heads, queries, keys]`.
        query, key: `[1, heads, tokens, d_k]`; None is returned for one with another number of tokens.
    """
    used = allowed.any((1, 3)).view(1, -1), allowed.any((1, 2)).view(1, -1)
    queries, keys = (x if x.shape[1] == side.shape[2] else None for x, side in zip(used, (query, key), strict=True))
    return queries, keys


def _add(
    table: Tensor,
    moments: Tensor,
    sums: list[Tensor],
    largest: Sequence[Tensor],
    scales: Tensor,
    query: Components,
    key: Components,
) -> None:
    """Add one call: its sums, the `extremes` of its scores with any bound on them, and its components.

    The sums fill the table from its first row on: `COUNTS`, others `[rows, heads]`, then single rows `[heads]`.
    """
    counts = sums[0]
    if query.mean.numel() == moments.shape[1]:
        components.add(moments, query, key, counts[4:])
    else:  # d_k is not the one that the module states
        sums[0] = F.pad(counts[:4], (0, 0, 0, 2))
    statistics.add(table, "pairs", torch.cat([x if x.dim() == 2 else x[None] for x in sums]))
    statistics.raise_maxima(table, torch.stack(tuple(largest)), scales)
