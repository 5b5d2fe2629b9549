"""The full score matrix in float64, and sums that are to agree with it."""

import math
from types import SimpleNamespace

import pytest
import torch

from betahook.measure import calls, components, rows, scores, statistics
from betahook.measure.masks import Band, once_per_mask
from betahook.measure.pairs import keys_per_query, row_pairs

HEAD_DIM, CPU = 8, torch.device("cpu")

BANDS = {
    "full": (Band(), 0),
    "causal": (Band(None, 0), 0),
    "causal behind a cache": (Band(None, 5), 5),
    "causal behind a cache longer than a block": (Band(None, 70), 70),
    "sliding window": (Band(-9, 0), 0),
    "sliding window longer than a block": (Band(-67, 0), 0),
    "sliding window behind a cache": (Band(-4, 6), 6),
    "sliding window longer than everything": (Band(-1000, 0), 0),
    "window in both directions": (Band(-8, 7), 0),
    "window in both directions longer than a block": (Band(-70, 69), 0),
    "full, fewer keys": (Band(), -3),
    "causal, fewer keys": (Band(None, -3), -3),
    "causal, fewer keys, all that came before": (Band(None, 0), -3),
    "window in both directions, fewer keys": (Band(-8, 7), -3),
    "open above": (Band(2, None), 0),
}
"""A band, and by how many the keys exceed the queries."""


def make(queries, keys, *, batch=2, heads=2, key_heads=2, dtype=torch.float32, query_mean=0.0, key_mean=0.0):
    generator = torch.Generator().manual_seed(1)
    query = torch.randn(batch, heads, queries, HEAD_DIM, generator=generator, dtype=torch.float64)
    key = torch.randn(batch, key_heads, keys, HEAD_DIM, generator=generator, dtype=torch.float64)
    return (query + query_mean).to(dtype), (2 * key + key_mean).to(dtype)


def pairs_of(band, queries, keys):
    distance = torch.arange(keys) - torch.arange(queries)[:, None]
    low = -math.inf if band.low is None else band.low
    high = math.inf if band.high is None else band.high
    return (distance > low) & (distance <= high)


def full(query, key):
    """All scores in float64, `[batch, heads, queries, keys]`, the keys repeated for grouped-query attention."""
    key = key.double().repeat_interleave(query.shape[1] // key.shape[1], 1)
    return torch.einsum("bhqd,bhkd->bhqk", query.double(), key)


def used(query, key, allowed):
    """The scores of each head over the allowed pairs, one flat tensor a head."""
    matrix = full(query, key)
    return [head[pairs] for head, pairs in zip(matrix.unbind(1), allowed.expand_as(matrix).unbind(1), strict=True)]


def row_std(query, key, allowed):
    """Standard deviation of the scores over the allowed pairs, each about the mean of its row: `[heads]`."""
    matrix = full(query, key)
    allowed = allowed.expand_as(matrix)
    mean = (matrix * allowed).sum(-1, keepdim=True) / allowed.sum(-1, keepdim=True).clamp(min=1)
    return (((matrix - mean) * allowed).square().sum((0, 2, 3)) / allowed.sum((0, 2, 3))).sqrt()


def assert_row_std(sums, expected, rel=1e-5):
    """Compare the spread within rows; where it is nothing, what rounding leaves is a trifle beside the whole spread."""
    found = (sums.row_square / sums.pairs).clamp(min=0).sqrt()
    variance = sums.score_square / sums.pairs - (sums.score / sums.pairs).square()
    tolerance = rel * expected + (expected < 1e-9) * 2e-3 * variance.clamp(min=0).sqrt()
    assert ((found - expected).abs() <= tolerance)[sums.pairs > 0].all(), (found, expected)
    assert not sums.row_square[sums.pairs == 0].any()


def assert_scores(sums, query, key, allowed, *, weight=1.0):
    """Compare sums with those over the allowed pairs of the full score matrix, and their spread within rows."""
    assert_sums(sums, used(query, key, allowed), weight=weight)
    assert_row_std(sums, row_std(query, key, allowed))


def named(pairs, sums, **others):
    """The sums of `scores.pool_rows`, the entropy mostly not among them, by name."""
    return SimpleNamespace(
        **dict(zip(("score", "score_square", "row_square"), sums, strict=False)), pairs=pairs, **others
    )


def exact(query, key, mask):
    """`score_sums` as a layer calls it, centred at the mean of the queries that take part."""
    seen = once_per_mask(keys_per_query, mask, query, query.shape[2], key.shape[2])
    seen = seen.expand(len(query), -1).sum().double()
    return named(seen.expand(query.shape[1]), with_key_moments(query, key, mask)[0])


def with_key_moments(query, key, mask):
    return scores.score_sums(query, key, mask, scores.components(query, mask.queries).mean)


def looked_at(query, key, mask, beta=1.0, **score_mod):
    """What `row_sums` finds, with the numbers of pairs and rows that it looks at."""
    operands = query, key, mask, torch.as_tensor(beta), rows.ScoreMod(**score_mod)
    parts, largest = rows.row_sums(*operands, moments=True)
    sums = torch.cat([part if part.dim() == 2 else part[None] for part in parts])
    count = row_pairs(mask, query, query.shape[2], key.shape[2]).count.expand(*query.shape[:2], -1).double()
    flat = count.clamp(min=1).log().sum((0, 2))
    return named(
        count.sum((0, 2)),
        sums,
        rows=(count > 0).sum((0, 2)),
        entropy=sums[3],
        sink=sums[4],
        flat_entropy=flat,
        max_score=largest[0],
    )


def empty_sums(heads, width, device=CPU):
    """The table and the moments of heads that measured nothing yet, all components together of this width."""
    table = statistics.empty(heads, device)
    return table, table.new_zeros(len(components.ROWS), width)


def recorded(query, key, mask, beta=1.0, *, exact_max_logit=False, inputs=(), **score_mod):
    """Everything that a layer adds to the table for one call, by the names of its rows."""
    heads, width = query.shape[1], query.shape[3]
    table, moments = empty_sums(heads, heads * width, query.device)
    beta = torch.as_tensor(beta, device=query.device).expand(heads)
    scales = torch.stack([torch.ones_like(beta), beta])
    operands = query, key, mask, scales, rows.ScoreMod(**score_mod)
    calls.add_scores(table, moments, *operands, exact_max_logit=exact_max_logit, inputs=inputs)
    table = components.with_averages(table, moments, torch.full((heads,), width, device=query.device))
    return SimpleNamespace(**{name: table[row] for name, row in statistics.ROW.items()})


def assert_sums(sums, expected, rel=1e-5, *, weight=1.0):
    """Compare number, mean and standard deviation; the sums themselves would hide a wrong spread under a large mean.

    Each of the expected scores stands for `weight` of those that were counted.
    """
    assert sums.pairs.tolist() == [weight * len(x) for x in expected]
    for head, x in enumerate(expected):
        count = sums.pairs[head].item()
        if count == 0:
            assert sums.score[head] == sums.score_square[head] == 0
            continue
        mean = sums.score[head].item() / count
        variance = sums.score_square[head].item() / count - mean**2
        assert mean == pytest.approx(x.mean().item(), rel=rel, abs=rel * x.std(correction=0).item() + 1e-12)
        # One score has no spread: what is left is the rounding of its square.
        noise = 1e-6 * x.square().mean().item()
        assert math.sqrt(max(variance, 0)) == pytest.approx(
            x.std(correction=0).item(), rel=rel, abs=math.sqrt(noise) if count == 1 else 0
        )


def overall_std(heads):
    """Std of all scores of a layer about one mean, from the statistics of its heads: what a flat list of them has."""
    seen = heads.count > 0
    count, mean, std = (x[seen].double() for x in (heads.count, heads.mean, heads.std))
    share = count / count.sum()
    return ((share * (std.square() + mean.square())).sum() - (share * mean).sum().square()).clamp(min=0).sqrt()


def scattered(heads, queries, keys):
    """A 4-D mask without structure, which leaves at least one key to every query."""
    mask = torch.rand(2, heads, queries, keys, generator=torch.Generator().manual_seed(4)) < 0.3
    mask[..., 0] = True
    return mask
