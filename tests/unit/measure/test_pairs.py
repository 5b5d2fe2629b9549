"""Numbers of pairs, rows and tokens of one attention call, against a boolean matrix of all pairs."""

import pytest
import torch

from betahook.measure import masks
from betahook.measure.masks import Band, Mask
from betahook.measure.pairs import COUNTS, call_counts, is_short, row_pairs
from support.matrices import BANDS, pairs_of, scattered

LIKE = torch.empty(0, dtype=torch.bfloat16)
MIDDLES_OF_140 = [int((row + 0.5) * 140 / 32) for row in range(32)]


def counted(mask, queries, keys):
    counts = call_counts(mask, LIKE, 2, 4, queries, keys)
    assert counts.shape == (len(COUNTS), 4)
    assert counts.dtype == torch.float64
    assert (counts == counts[:, :1]).all()
    return dict(zip(COUNTS, counts[:, 0].tolist(), strict=True))


@pytest.mark.parametrize("queries", [20, 140])
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("name", BANDS)
def test_counts_of_a_band(name, padded, queries):
    band, more = BANDS[name]
    keys = queries + more
    allowed, mask = pairs_of(band, queries, keys).expand(2, -1, -1), Mask(band)
    if padded:
        valid = torch.stack([torch.arange(keys) < keys - 3, torch.arange(keys) >= 5])
        mask, allowed = Mask(band, keys=valid), allowed & valid[:, None]
    counts = counted(mask, queries, keys)
    assert counts["pairs"] == counts["exact_pairs"] == allowed.sum()
    assert counts["queries"] == 2 * queries
    assert counts["keys"] == (valid.sum() if padded else 2 * keys)
    short = is_short(queries, keys)
    rows, each = (allowed.sum(-1), 1) if short else (allowed.sum(-1)[:, MIDDLES_OF_140], 140 / 32)
    assert counts["rows"] == each * (rows > 0).sum()
    flat = rows.clamp(min=1).double().log().sum().item()
    assert counts["flat_entropy"] == pytest.approx(each * flat, rel=1e-6)


@pytest.mark.parametrize("structured", [True, False])
def test_moments_of_a_long_sequence_are_exact_under_a_mask_with_structure(structured):
    tensor = pairs_of(Band(None, 0), 140, 140).expand(2, 1, -1, -1) if structured else scattered(1, 140, 140)
    counts = counted(masks.from_tensor(tensor, Band(None, 0)), 140, 140)
    expected = tensor.sum() if structured else 140 / 32 * tensor[:, :, MIDDLES_OF_140].sum()
    assert counts["pairs"] == expected
    assert counts["exact_pairs"] == (expected if structured else 0)


@pytest.mark.parametrize(("queries", "keys", "short"), [(128, 128, True), (129, 128, False), (32, 9000, True)])
def test_a_sequence_is_short_by_its_pairs(queries, keys, short):
    assert is_short(queries, keys) is short
    picked = row_pairs(Mask(Band()), LIKE, queries, keys).picked
    assert (picked is None) is short


def test_what_is_added_to_the_logits_leaves_every_row_a_softmax():
    pairs = scattered(1, 6, 5)
    pairs[0, :, 2] = False
    bias = torch.randn(pairs.shape, generator=torch.Generator().manual_seed(0)).masked_fill(~pairs, -torch.inf)
    rows = row_pairs(masks.from_tensor(bias, Band()), LIKE, 6, 5)
    assert rows.added.isfinite().all()
    expected = bias.softmax(-1)
    expected[0, :, 2] = torch.eye(5)[0]
    torch.testing.assert_close(rows.added.softmax(-1), expected)
    assert torch.equal(rows.used, pairs.float())
    assert rows.count[0, 0, 2] == 0


def test_short_is_what_has_few_pairs():
    assert is_short(128, 128)
    assert is_short(64, 256)
    assert not is_short(128, 129)
    assert is_short(32, 10_000)
    assert not is_short(33, 10_000)
