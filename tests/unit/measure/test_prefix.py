"""Sums over scores in the form for accelerators, run on the CPU, against the full score matrix in float64."""

import pytest
import torch

from betahook.measure import prefix, scores
from betahook.measure.masks import Band, Mask
from support.largest import Largest
from support.matrices import (
    BANDS,
    assert_row_std,
    assert_scores,
    assert_sums,
    exact,
    full,
    make,
    named,
    pairs_of,
    row_std,
    used,
)


def found(query, key, mask):
    sums = prefix.score_sums(query, key, mask, scores.components(key, mask.keys))
    return named(exact(query, key, mask).pairs, sums)


@pytest.fixture(params=[(4096, 2**26), (64, 2**26), (128, 1)], ids=["at once", "block by block", "one by one"])
def at_once(request, monkeypatch):
    """How many queries, and entries of a tensor, are worked on at once."""
    for name, value in zip(("SLAB", "AT_ONCE"), request.param, strict=True):
        monkeypatch.setattr(prefix, name, value)


@pytest.mark.usefixtures("at_once")
@pytest.mark.parametrize("length", [64, 65, 130, 200])
@pytest.mark.parametrize("name", BANDS)
def test_sums_over_bands(name, length):
    band, more = BANDS[name]
    query, key = make(length, length + more, query_mean=0.3, key_mean=-0.5)
    allowed, sums = pairs_of(band, length, length + more), found(query, key, Mask(band))
    assert_scores(sums, query, key, allowed)


@pytest.mark.usefixtures("at_once")
@pytest.mark.parametrize("batch", [1, 2], ids=["one padding for all", "its own for each"])
@pytest.mark.parametrize("name", ["full", "causal", "sliding window behind a cache", "window in both directions"])
def test_padding_takes_no_part(name, batch):
    band, more = BANDS[name]
    query, key = make(140, 140 + more, query_mean=0.3, key_mean=-0.5)
    valid = [torch.arange(size) % 3 != 1 for size in (140, 140 + more)]
    valid = [torch.stack([part, torch.arange(len(part)) < 90][:batch]) for part in valid]
    allowed = pairs_of(band, 140, 140 + more) & valid[0][:, None, :, None] & valid[1][:, None, None, :]
    for part, tokens in zip(valid, (query, key), strict=True):
        tokens.masked_fill_(~part[:, None, :, None], 1e3)
    sums = found(query, key, Mask(band, *valid))
    assert_scores(sums, query, key, allowed)


@pytest.mark.usefixtures("at_once")
@pytest.mark.parametrize("key_heads", [1, 2, 4])
@pytest.mark.parametrize("name", ["full", "causal behind a cache", "window in both directions"])
def test_grouped_queries_share_their_key_head(name, key_heads):
    band, more = BANDS[name]
    query, key = make(140, 140 + more, heads=4, key_heads=key_heads, query_mean=0.3, key_mean=-0.5)
    query *= torch.arange(1.0, 5).view(4, 1, 1)  # heads that cannot be taken for each other
    allowed, sums = pairs_of(band, 140, 140 + more), found(query, key, Mask(band))
    assert_scores(sums, query, key, allowed)


@pytest.mark.parametrize("name", ["full", "causal", "sliding window", "window in both directions"])
def test_a_mean_far_above_the_spread_costs_no_digits(name):
    band, more = BANDS[name]
    query, key = make(130, 130 + more, query_mean=100, key_mean=-200)
    allowed, sums = pairs_of(band, 130, 130 + more), found(query, key, Mask(band))
    expected = used(query, key, allowed)
    assert abs(expected[0].mean()) > 200 * expected[0].std()
    assert_sums(sums, expected)
    assert_row_std(sums, row_std(query, key, allowed))


@pytest.mark.parametrize("name", ["full", "causal", "sliding window", "window in both directions"])
def test_an_offset_of_each_row_far_above_its_spread_costs_no_digits(name):
    band, more = BANDS[name]
    query, key = make(130, 130 + more, key_mean=2e4)
    expected = row_std(query, key, pairs_of(band, 130, 130 + more))
    assert (full(query, key).std((0, 2, 3), correction=0) > 9e3 * expected).all()
    assert_row_std(found(query, key, Mask(band)), expected, rel=1e-4)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_dtypes(dtype):
    query, key = make(130, 130, dtype=dtype)
    sums = found(query, key, Mask(Band(None, 0)))
    assert sums.score.dtype == torch.float64
    assert_sums(sums, used(query, key, pairs_of(Band(None, 0), 130, 130)), 1e-10 if dtype == torch.float64 else 1e-5)


@pytest.mark.parametrize("band", [Band(), Band(None, 0), Band(-300, 299)], ids=str)
def test_memory_does_not_grow_with_the_length_but_by_tokens(band):
    query, key = make(2048, 2048, batch=1, heads=1, key_heads=1)
    with Largest() as largest:
        found(query, key, Mask(band))
    assert 0 < largest.elements <= 2048 * (scores.BLOCK + 8 + 2)
