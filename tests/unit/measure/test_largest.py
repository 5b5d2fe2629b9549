"""The largest scores of all pairs against the full score matrix in float64."""

from dataclasses import replace

import pytest
import torch

from betahook.measure import largest, masks
from betahook.measure.largest import extreme_scores, norm_bound
from betahook.measure.masks import Band, Mask
from support.matrices import BANDS, full, make, pairs_of, scattered, used

QUERIES = 150


@pytest.fixture(autouse=True, params=[64 * 64, 2**20], ids=["many blocks", "one block"])
def area(request, monkeypatch):
    """How many scores are worked on at once."""
    monkeypatch.setattr(largest, "_area", lambda device, matrices: request.param)


def assert_extremes(query, key, mask, allowed):
    """Compare with every allowed pair: nothing is above the bound, and the largest are the largest."""
    pairs = used(query, key, allowed)
    absolute, positive = extreme_scores(query, key, mask)
    assert positive.tolist() == pytest.approx([max([0.0, *x.tolist()]) for x in pairs], rel=1e-6)
    expected = [max([0.0, *x.abs().tolist()]) for x in pairs]
    assert absolute.tolist() == pytest.approx(expected, rel=1e-6)
    assert (norm_bound(query, key, mask) >= torch.tensor(expected) * (1 - 1e-6)).all()


@pytest.mark.parametrize("name", BANDS)
def test_over_bands(name):
    band, more = BANDS[name]
    query, key = make(QUERIES, QUERIES + more)
    assert_extremes(query, key, Mask(band), pairs_of(band, QUERIES, QUERIES + more))


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("row", [0, 1, 63, 64, 100, 149])
def test_an_outlier_is_found_in_whatever_row(row, sign):
    query, key = make(QUERIES, QUERIES, batch=1)
    query[:, 1, row] = sign * 100 * key[:, 1, row]  # on the diagonal, the last key that a causal mask leaves
    assert_extremes(query, key, Mask(Band(None, 0)), pairs_of(Band(None, 0), QUERIES, QUERIES))
    absolute = extreme_scores(query, key, Mask(Band(None, 0)))[0]
    assert absolute[1] > 10 * absolute[0]


@pytest.mark.parametrize("position", [(127, 0), (128, 1), (0, 127), (1, 128)])
def test_a_pair_right_outside_of_the_band_does_not_count(position):
    """In the corner of a block, too."""
    query, key = make(QUERIES, QUERIES, batch=1)
    row, column = position
    query[:, :, row] = 100 * key[:, :, column]
    band = Band(-127, 126) if row < column else Band(-127, None)
    assert_extremes(query, key, Mask(band), pairs_of(band, QUERIES, QUERIES))


def test_what_a_mask_hides_is_no_extreme():
    """Padding, the future, other documents and masked pairs hold numbers that dwarf all others, and NaN."""
    valid = torch.arange(QUERIES).expand(2, -1) < torch.tensor([[QUERIES], [90]])
    query, key = make(QUERIES, QUERIES)
    for tokens in (query, key):
        tokens.masked_fill_(~valid[:, None, :, None], float("nan"))
    allowed = pairs_of(Band(-20, 0), QUERIES, QUERIES) & valid[:, None, :, None] & valid[:, None, None, :]
    padded = Mask(Band(-20, 0), valid, valid)
    clean = [x.nan_to_num() for x in (query, key)]
    assert torch.equal(extreme_scores(query, key, padded)[0], extreme_scores(*clean, padded)[0])
    assert torch.equal(norm_bound(query, key, padded), norm_bound(*clean, padded))
    assert_extremes(*clean, padded, allowed)
    written = masks.from_tensor(allowed, Band(None, 0))
    assert torch.equal(extreme_scores(query, key, written)[0], extreme_scores(*clean, padded)[0])
    documents = torch.tensor([0] * 40 + [1] * 60 + [2] * 50)[None]
    allowed = pairs_of(Band(None, 0), QUERIES, QUERIES) & (documents.mT == documents)
    query, key = make(QUERIES, QUERIES, batch=1)
    key[:, :, :40] *= 1e3 * (torch.arange(40) == 39).view(-1, 1) + 1  # of the first document, whose last query sees it
    assert_extremes(query, key, masks.from_documents(documents, Band(None, 0)), allowed[None])


@pytest.mark.parametrize("mask_heads", [1, 4])
@pytest.mark.parametrize("key_heads", [1, 2, 4])
def test_grouped_queries_and_masks_of_heads(key_heads, mask_heads):
    query, key = make(QUERIES, QUERIES, heads=4, key_heads=key_heads)
    query *= torch.arange(1.0, 5).view(4, 1, 1)
    allowed = scattered(mask_heads, QUERIES, QUERIES)
    if mask_heads == 4:
        allowed[:, 0, 5] = False  # a row that only other heads may use
        query[:, 3, 5] *= 100
    assert_extremes(query, key, masks.from_tensor(allowed, Band(None, 0)), allowed)


def test_scores_of_one_sign():
    query, key = (x.abs() for x in make(QUERIES, QUERIES))
    absolute, positive = extreme_scores(-query, key, Mask(Band()))
    assert positive.tolist() == [0, 0]
    assert absolute.tolist() == pytest.approx(full(query, key).amax((0, 2, 3)).tolist(), rel=1e-6)
    assert extreme_scores(query, key, Mask(Band()))[1].tolist() == absolute.tolist()


def test_without_any_pair_there_is_no_extreme():
    query, key = make(QUERIES, QUERIES)
    for mask in (Mask(Band(None, -QUERIES)), Mask(Band(), keys=torch.zeros(2, QUERIES, dtype=torch.bool))):
        assert [x.tolist() for x in extreme_scores(query, key, mask)] == [[0, 0], [0, 0]]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_half_precision_does_not_overflow(dtype):
    query, key = (300 * x for x in make(QUERIES, QUERIES, dtype=dtype))
    absolute, positive = extreme_scores(query, key, Mask(Band()))
    matrix = full(query, key)
    assert absolute.min() > torch.finfo(torch.float16).max
    assert absolute.tolist() == pytest.approx(matrix.abs().amax((0, 2, 3)).tolist(), rel=1e-6)
    assert positive.tolist() == pytest.approx(matrix.amax((0, 2, 3)).tolist(), rel=1e-6)
    bound = norm_bound(query, key, Mask(Band()))
    assert bound.isfinite().all()
    assert (bound >= absolute * (1 - 1e-6)).all()


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_bad_numbers_are_not_hidden(bad):
    query, key = make(QUERIES, QUERIES)
    query[0, 1, 70, 3] = bad
    for values in (*extreme_scores(query, key, Mask(Band(None, 0))), norm_bound(query, key, Mask(Band(None, 0)))):
        assert values.isfinite().tolist() == [True, False]


@pytest.mark.parametrize("mask", [Mask(Band(-70, 0)), masks.from_tensor(scattered(1, 130, 130), Band(None, 0))])
def test_nothing_is_read_back_to_the_host(mask):
    # Meta tensors have no values: reading one back would raise.
    query, key = (x.to("meta") for x in make(130, 130))
    tensors = ("queries", "keys", "pairs")
    mask = replace(mask, **{name: x.to("meta") for name in tensors if (x := getattr(mask, name)) is not None})
    assert extreme_scores(query, key, mask).shape == (2, 2)
    assert norm_bound(query, key, mask).shape == (2,)
