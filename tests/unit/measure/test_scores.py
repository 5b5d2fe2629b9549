"""Sums over scores against the full score matrix in float64."""

import pytest
import torch

from betahook.measure import dtypes, scores
from betahook.measure.masks import Band, Mask
from betahook.measure.pairs import ROWS, is_short, sampled_rows
from support.largest import Largest
from support.matrices import (
    BANDS,
    HEAD_DIM,
    assert_row_std,
    assert_scores,
    assert_sums,
    exact,
    full,
    looked_at,
    make,
    named,
    pairs_of,
    row_std,
    used,
    with_key_moments,
)

LENGTHS = [1, 2, 63, 64, 65, 130, 200]
"""Around the ends of blocks."""

PADDING = {
    "right": lambda tokens: tokens < 50,
    "left": lambda tokens: tokens >= 20,
    "scattered": lambda tokens: tokens % 3 != 1,
    "everything": lambda tokens: tokens < 0,
}


def assert_components(found, tokens, valid, rel=1e-5):
    """Compare mean and variance with those of the tokens that take part, in float64."""
    keep = torch.ones(1, tokens.shape[2], dtype=torch.bool) if valid is None else valid
    chosen = tokens.double().transpose(1, 2)[keep.expand(len(tokens), -1)]
    torch.testing.assert_close(found.mean.double(), chosen.mean(0), rtol=rel, atol=1e-6)
    torch.testing.assert_close(found.variance.double(), chosen.var(0, correction=0), rtol=rel, atol=0)


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("name", BANDS)
def test_sums_over_bands(name, length):
    band, more = BANDS[name]
    keys = max(length + more, 1)
    query, key = make(length, keys, query_mean=0.3, key_mean=-0.5)
    allowed = pairs_of(band, length, keys)
    found = [exact(query, key, Mask(band))]
    if is_short(length, keys):
        found.append(looked_at(query, key, Mask(band)))
    for sums in found:
        assert_scores(sums, query, key, allowed)


@pytest.mark.parametrize("batch", [1, 2], ids=["one padding for all", "its own for each"])
@pytest.mark.parametrize("name", ["full", "causal", "sliding window behind a cache", "window in both directions"])
@pytest.mark.parametrize("side", PADDING)
@pytest.mark.parametrize("of", ["queries", "keys", "both"])
@pytest.mark.parametrize("length", [70, 140])
def test_padding_takes_no_part(name, side, of, batch, length):
    band, more = BANDS[name]
    queries, keys = length, length + more
    query, key = make(queries, keys, query_mean=0.3, key_mean=-0.5)
    valid = [PADDING[side](torch.arange(size)).repeat(batch, 1) for size in (queries, keys)]
    if batch == 2:
        valid = [torch.cat([torch.ones_like(part[:1]), part[1:]]) for part in valid]
    valid = [part if of in (which, "both") else None for part, which in zip(valid, ("queries", "keys"), strict=True)]
    allowed = pairs_of(band, queries, keys).expand(batch, 1, -1, -1)
    for part, dim, tokens in zip(valid, (-1, -2), (query, key), strict=True):
        if part is not None:
            allowed = allowed & part[:, None].unsqueeze(dim)
            tokens.masked_fill_(~part[:, None, :, None], 1e3)  # whatever padding holds, it must not be seen
    mask = Mask(band, *valid)
    found = exact(query, key, mask)
    assert_scores(found, query, key, allowed)
    picked = sampled_rows(queries, keys, query.device)
    sampled = looked_at(query, key, mask)
    expected = used(query[:, :, picked], key, allowed[:, :, picked])
    assert_sums(sampled, expected)
    assert_row_std(sampled, row_std(query[:, :, picked], key, allowed[:, :, picked]))
    assert sampled.max_score.tolist() == pytest.approx([max([0, *x.abs().tolist()]) for x in expected], rel=1e-5)


@pytest.mark.parametrize("key_heads", [1, 2, 4])
@pytest.mark.parametrize("name", ["full", "causal behind a cache", "window in both directions"])
def test_grouped_queries_share_their_key_head(name, key_heads):
    band, more = BANDS[name]
    query, key = make(65, 65 + more, heads=4, key_heads=key_heads, query_mean=0.3, key_mean=-0.5)
    query *= torch.arange(1.0, 5).view(4, 1, 1)  # heads that cannot be taken for each other
    allowed = pairs_of(band, 65, 65 + more)
    found = exact(query, key, Mask(band))
    assert_scores(found, query, key, allowed)
    picked = sampled_rows(65, 65 + more, query.device)
    sampled = looked_at(query, key, Mask(band))
    assert_sums(sampled, used(query[:, :, picked], key, allowed[picked]))


@pytest.mark.parametrize("name", ["full", "causal", "sliding window", "window in both directions"])
def test_a_mean_far_above_the_spread_costs_no_digits(name):
    band, more = BANDS[name]
    query, key = make(130, 130 + more, query_mean=100, key_mean=-200)
    allowed = pairs_of(band, 130, 130 + more)
    expected = used(query, key, allowed)
    assert abs(expected[0].mean()) > 200 * expected[0].std()
    found = exact(query, key, Mask(band))
    assert_sums(found, expected)
    assert_row_std(found, row_std(query, key, allowed))


@pytest.mark.parametrize("name", ["full", "causal", "sliding window", "window in both directions"])
def test_an_offset_of_each_row_far_above_its_spread_costs_no_digits(name):
    """Keys with a large mean in common add to each score what its query makes of that mean."""
    band, more = BANDS[name]
    query, key = make(130, 130 + more, key_mean=2e4)
    allowed, of_rows = pairs_of(band, 130, 130 + more), full(query, key).std((0, 2, 3), correction=0)
    expected = row_std(query, key, allowed)
    assert (of_rows > 9e3 * expected).all()
    assert_row_std(exact(query, key, Mask(band)), expected, rel=1e-4)
    assert_row_std(
        looked_at(query[:, :, :32], key, Mask(band)),
        row_std(query[:, :, :32], key, allowed[:32]),
        rel=1e-2,
    )


def test_the_centre_changes_the_rounding_only():
    query, key = make(70, 70, dtype=torch.float64)
    centre = torch.randn(2, HEAD_DIM, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    expected = used(query, key, pairs_of(Band(None, 0), 70, 70))
    for query_mean in (centre, torch.zeros_like(centre)):
        sums, _ = scores.score_sums(query, key, Mask(Band(None, 0)), query_mean)
        assert_sums(named(torch.tensor([70 * 71] * 2), sums), expected, rel=1e-10)


@pytest.mark.parametrize(("dtype", "rel"), [(torch.float64, 1e-10), (torch.float32, 1e-5), (torch.bfloat16, 1e-2)])
@pytest.mark.parametrize("name", ["full", "causal"])
def test_dtypes(name, dtype, rel):
    band, more = BANDS[name]
    query, key = make(130, 130 + more, dtype=dtype)
    sums, allowed = exact(query, key, Mask(band)), pairs_of(band, 130, 130 + more)
    assert {x.dtype for x in vars(sums).values()} == {torch.float64}
    assert_sums(sums, used(*make(130, 130 + more, dtype=torch.float64), allowed), rel)
    # Against the rounded tokens bfloat16 loses nothing: the sums are taken in float32 or better.
    assert_sums(sums, used(query, key, allowed), min(rel, 1e-5))


@pytest.mark.parametrize("valid", [None, torch.arange(50) < 33, torch.stack([torch.arange(50) > 5] * 2)], ids=str)
def test_component_moments(valid):
    tokens = make(50, 1, dtype=torch.bfloat16, query_mean=1.5)[0]
    mask = valid if valid is None or valid.dim() == 2 else valid[None]
    assert_components(scores.components(tokens, mask), tokens, mask)


@pytest.mark.parametrize("padding", [None, *PADDING])
@pytest.mark.parametrize("length", [70, 300])
@pytest.mark.parametrize("name", BANDS)
def test_moments_of_the_keys_are_of_all_of_them(name, length, padding):
    """Of those too that no query sees, and of both keys under a group of queries."""
    band, more = BANDS[name]
    query, key = make(70, length + more, heads=4, key_mean=-1.5)
    valid = None if padding is None else PADDING[padding](torch.arange(length + more))[None]
    if padding is not None:
        key.masked_fill_(~valid[:, None, :, None], 1e3)
    _, of_key = with_key_moments(query, key, Mask(band, keys=valid))
    if padding != "everything":
        assert_components(of_key, key, valid)
    for found in (of_key.mean, of_key.variance):
        assert found.any() == (padding != "everything")


def test_component_moments_under_a_mean_far_above_the_spread():
    query, key = make(4000, 4000, query_mean=300, key_mean=600)
    of_query = scores.components(query, None)
    _, of_key = with_key_moments(query, key, Mask(Band(None, 0)))
    for found, tokens in ((of_query, query), (of_key, key)):
        assert_components(found, tokens, None, rel=1e-4)


def test_component_moments_without_a_token_are_zero():
    result = scores.components(make(5, 1)[0], torch.zeros(1, 5, dtype=torch.bool))
    assert not result.mean.any()
    assert not result.variance.any()


@pytest.mark.parametrize("band", [Band(), Band(None, 0), Band(-300, 0), Band(-300, 299)], ids=str)
def test_no_quadratic_tensor_is_made(band):
    length = 2048
    query, key = make(length, length, batch=1, heads=1, key_heads=1)
    with Largest() as largest:
        exact(query, key, Mask(band))
        looked_at(query, key, Mask(band))
    assert 0 < largest.elements <= length * max(scores.BLOCK, ROWS)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_the_overflow_bound_is_where_the_exponential_overflows(dtype):
    bound = dtypes.overflow_logit(dtype)
    softmax = torch.promote_types(dtype, torch.float32)
    assert torch.tensor(bound * (1 - 1e-6), dtype=softmax).exp().isfinite()
    assert torch.tensor(bound * (1 + 1e-6), dtype=softmax).exp().isinf()


def test_the_largest_of_scores_that_are_all_zero_has_no_sign():
    largest, _ = scores.extremes(torch.zeros(1, 16, 3, 4))
    assert not largest.signbit().any()
