"""Bands and masks against nested loops over positions."""

import itertools
import weakref
from unittest import mock

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from betahook import compat
from betahook.measure import masks
from betahook.measure.masks import Band, GivenMask, Mask

BANDS = [Band(), Band(None, 0), Band(None, 3), Band(-4, 0), Band(-3, 2), Band(2, None), Band(None, -20), Band(-50, 50)]


def loop(band, queries, keys):
    """The pairs of a band, one comparison at a time."""
    return [
        [(band.low is None or k - q > band.low) and (band.high is None or k - q <= band.high) for k in keys]
        for q in queries
    ]


@pytest.mark.parametrize("band", BANDS, ids=str)
@pytest.mark.parametrize("positions", [([0, 1, 2, 3, 4], [0, 1, 2, 3, 4, 5, 6]), ([9, 2, 7], [0, 8, 4, 3])])
def test_band_equals_a_double_loop(band, positions):
    allowed = band.allowed(*map(torch.tensor, positions))
    assert allowed.dtype == torch.bool
    assert allowed.tolist() == loop(band, *positions)


class Dtypes(TorchDispatchMode):
    """Dtypes of all tensors with an entry for each pair."""

    def __init__(self, pairs):
        super().__init__()
        self.pairs, self.seen = pairs, set()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        output = function(*args, **(kwargs or {}))
        if output.numel() == self.pairs:
            self.seen.add(output.dtype)
        return output


@pytest.mark.parametrize("band", BANDS, ids=str)
def test_a_band_takes_one_byte_a_pair(band):
    with Dtypes(pairs=7 * 9) as dtypes:
        band.allowed(torch.arange(7), torch.arange(9))
    assert dtypes.seen == {torch.bool}


def padded(band, queries, keys):
    """A banded mask `[2, 1, 7, 9]` whose padded rows and columns are struck out."""
    pairs = torch.tensor(loop(band, range(7), range(9)))
    return (pairs & queries[:, :, None] & keys[:, None, :])[:, None]


@pytest.fixture
def padding():
    """Valid queries and keys: nothing padded in the first sequence, both ends in the second."""
    queries, keys = torch.ones(2, 7, dtype=torch.bool), torch.ones(2, 9, dtype=torch.bool)
    queries[1, :1] = keys[1, :1] = queries[1, -2:] = keys[1, -3:] = False
    return queries, keys


MASKED = {
    "min": lambda dtype: torch.finfo(dtype).min,
    "min and a bias": lambda dtype: torch.finfo(dtype).min * 0.75,
    "-inf": lambda dtype: float("-inf"),
}
FORMS = {
    "bool": lambda pairs: pairs,
    **{
        f"{dtype}, {name}": lambda pairs, dtype=dtype, masked=masked: torch.zeros(pairs.shape, dtype=dtype).masked_fill(
            ~pairs, masked(dtype)
        )
        for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64)
        for name, masked in MASKED.items()
    },
}
"""The ways in which a mask is written."""


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("band", [Band(), Band(None, 2), Band(-3, 2), Band(-4, 3)], ids=str)
def test_padded_bands_are_recognised_in_every_form(band, form, padding):
    pairs = padded(band, *padding)
    mask = masks.from_tensor(FORMS[form](pairs), band)
    assert torch.equal(mask.pairs, pairs)
    assert mask.structured.item() is True
    assert torch.equal(mask.queries, pairs.any(-1)[:, 0])
    assert torch.equal(mask.keys, pairs.any(-2)[:, 0])
    assert (mask.bias is None) == (form == "bool")


def flip(pairs, position):
    flipped = pairs.clone()
    flipped[position] = ~flipped[position]
    return flipped


WITHOUT_STRUCTURE = {
    "one pair less": lambda pairs: flip(pairs, (1, 0, 4, 3)),
    "one pair more": lambda pairs: flip(pairs, (0, 0, 2, 5)),
    "heads that differ": lambda pairs: torch.cat([pairs, flip(pairs, (0, 0, 3, 1))], 1),
    "a narrower band": lambda pairs: pairs & torch.tensor(loop(Band(-2, 2), range(7), range(9))),
}


@pytest.mark.parametrize("change", WITHOUT_STRUCTURE)
def test_other_masks_have_no_structure(change, padding):
    band = Band(None, 2)
    pairs = WITHOUT_STRUCTURE[change](padded(band, *padding))
    mask = masks.from_tensor(pairs, band)
    assert torch.equal(mask.pairs, pairs)
    assert mask.structured.item() is False


def test_a_bias_masks_nothing():
    bias = torch.linspace(-80, 1e4, 63).view(1, 1, 7, 9)
    mask = masks.from_tensor(bias, Band())
    assert mask.pairs.all()
    assert torch.equal(mask.bias, bias)
    assert mask.structured.item() is True


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("masked", ["-inf", "min", "-1e9"])
def test_far_pairs_of_alibi_are_no_masked_pairs(dtype, masked, padding):
    """They count, with a weight of nothing; the pairs that are masked, too, do not."""
    masked = torch.finfo(dtype).min if masked == "min" else torch.tensor(float(masked)).to(dtype).item()
    pairs = padded(Band(None, 2), *padding)
    bias = -20.0 * (torch.arange(7)[:, None] - torch.arange(9)).abs().double().expand(pairs.shape)
    for added in (bias.masked_fill(~pairs, masked), bias + (0 * bias).masked_fill(~pairs, masked)):
        mask = masks.from_tensor(added.to(dtype), Band(None, 2))
        assert torch.equal(mask.pairs, pairs)
        assert mask.structured.item() is True


@pytest.mark.parametrize("masked", [-100.0, -1e4])
def test_what_a_gap_parts_from_the_rest_is_masked(masked, padding):
    """Swin adds -100 to a learned bias."""
    pairs = padded(Band(None, 2), *padding)
    bias = torch.linspace(-4.0, 4.0, pairs.numel()).view(pairs.shape)
    mask = masks.from_tensor(bias + torch.zeros_like(bias).masked_fill(~pairs, masked), Band(None, 2))
    assert torch.equal(mask.pairs, pairs)


def test_the_least_number_of_float16_masks_in_a_mask_of_float32():
    bias = -torch.linspace(0, 110, 63).square().view(1, 1, 7, 9)
    bias[..., 6:] = torch.finfo(torch.float16).min
    assert torch.equal(masks.from_tensor(bias, Band()).pairs, bias != bias.min())


@pytest.mark.parametrize("queries", [4, 2, 1, 5])
def test_padding_is_that_of_the_keys_and_of_the_last_as_many_queries(queries):
    """As in `_upad_input` of transformers, which makes an exception of a single query; 5 are of another sequence."""
    mask = masks.from_padding(torch.tensor([[1, 1, 1, 1], [0, 1, 1, 0]]), Band(None, 0), queries)
    expected = torch.tensor([[True, True, True, True], [False, True, True, False]])
    assert torch.equal(mask.keys, expected)
    assert mask.queries is None if queries in (1, 5) else torch.equal(mask.queries, expected[:, -queries:])
    assert mask.band == Band(None, 0)
    assert mask.pairs is mask.bias is mask.structured is None


@pytest.mark.parametrize("dtype", [torch.bool, torch.float32])
def test_the_structure_is_decided_on_the_device(dtype):
    # A meta tensor has no values: reading one back would raise.
    mask = masks.from_tensor(torch.empty(2, 1, 7, 9, dtype=dtype, device="meta"), Band(None, 2))
    assert mask.structured.shape == ()
    assert mask.structured.device.type == "meta"


@pytest.mark.parametrize("taken_off", [100.0, 1e4, 1e9, torch.finfo(torch.float32).max, torch.inf])
def test_what_leaves_a_pair_no_share_of_its_row_masks_it(taken_off):
    bias = torch.zeros(1, 1, 7, 9)
    bias[..., 6:] = -taken_off
    mask = masks.from_tensor(bias, Band())
    assert torch.equal(mask.pairs, bias == 0)
    assert mask.structured.item() is True


@pytest.fixture
def structures():
    """The calls of the function that looks at every pair of a mask."""
    with mock.patch.object(masks, "_structure", wraps=masks._structure) as calls:
        yield calls


def test_a_mask_that_was_expanded_is_looked_at_without_its_repetitions():
    pairs = torch.rand(3, 2, 5, 6, generator=torch.Generator().manual_seed(0)) < 0.5
    for heads, batch in itertools.product((1, 2), (1, 3)):
        mask = pairs[:batch, :heads].expand(3, 2, -1, -1)
        found = masks.from_tensor(mask, Band())
        assert found.pairs.shape[:2] == (batch, heads)
        assert torch.equal(found.pairs.expand_as(mask), mask)
        added = masks.from_tensor(mask.float().log(), Band()).pairs
        assert torch.equal(added.expand_as(mask), mask)
    assert masks.from_tensor(torch.ones(5, 6).tril().bool().expand(3, 2, -1, -1), Band(None, 0)).structured


def test_layers_share_what_is_known_of_their_mask(structures, padding):
    tensor = torch.zeros(2, 1, 7, 12)
    tensor[..., :9].masked_fill_(~padded(Band(None, 2), *padding), -torch.inf)
    for heads in (1, 1, 4, 4):
        assert masks.from_tensor(tensor[..., :9].expand(2, heads, 7, 9), Band(None, 2)).structured
    assert structures.call_count == 2  # one for each shape
    assert not masks.from_tensor(tensor[..., :9], Band(None, 1)).structured
    assert not masks.from_tensor(tensor[..., 3:], Band(None, 2)).structured
    tensor[1, 0, 4, 3] = -torch.inf
    assert not masks.from_tensor(tensor[..., :9], Band(None, 2)).structured


def test_no_more_is_kept_of_a_mask_than_a_few_of_its_views(structures):
    tensor = torch.ones(1, 1, 40, 40, dtype=torch.bool)
    lengths = [*range(1, 40), 39]
    for length in lengths:
        assert masks.from_tensor(tensor[..., :length, :length], Band()).structured
    assert structures.call_count == len(set(lengths))
    _, known = masks._structures[tensor]
    assert len(known) <= masks.KEPT


def test_what_is_known_of_a_mask_is_forgotten_with_it(structures):
    tensor = torch.ones(1, 1, 7, 9, dtype=torch.bool)
    known = [weakref.ref(tensor), weakref.ref(masks.from_tensor(tensor[:, :], Band()).structured)]
    assert None not in [reference() for reference in known]
    del tensor
    structures.reset_mock()
    assert [reference() for reference in known] == [None, None]


def test_inference_tensors_are_looked_at_each_time(structures):
    with torch.inference_mode():
        tensor = torch.zeros(1, 1, 7, 9)
        assert masks.from_tensor(tensor, Band()).structured
        tensor[0, 0, 1, 2] = -torch.inf
        assert not masks.from_tensor(tensor, Band()).structured


def test_a_graph_that_is_captured_looks_at_a_mask_that_is_known(structures, monkeypatch):
    """Its later runs find another mask there."""
    tensor = torch.ones(1, 1, 7, 9, dtype=torch.bool)
    known = masks.from_tensor(tensor, Band()).structured
    monkeypatch.setattr(compat, "is_captured", lambda device: True)
    looked = masks.from_tensor(tensor, Band()).structured
    assert looked is not known  # which no run of the graph would write to
    assert looked == known


@pytest.mark.parametrize(("documents", "one"), [([3, 3, 3], True), ([0, 0, 1], False), ([0, 1, 0], False)])
def test_packed_sequences_have_the_structure_of_a_band_where_there_is_one(documents, one):
    documents = torch.tensor([documents])
    mask = masks.from_documents(documents, Band(None, 0))
    assert mask.structured.item() is one
    assert mask.documents is documents
    assert mask.band == Band(None, 0)


@pytest.fixture
def make():
    return mock.Mock(side_effect=lambda mask, like, *sizes: object())


LIKE = torch.empty(2)


def test_layers_with_the_same_band_share_what_is_derived_of_it(make):
    first = masks.once_per_mask(make, Mask(Band(-3, 0)), LIKE, 5)
    assert masks.once_per_mask(make, Mask(Band(-3, 0)), LIKE, 5) is first
    others = [(Mask(Band(-4, 0)), LIKE, 5), (Mask(Band(-3, 0)), LIKE.double(), 5), (Mask(Band(-3, 0)), LIKE, 6)]
    others += [(Mask(Band(-3, 0)), LIKE.to("meta"), 5), (Mask(Band(-3, 0), keys=torch.ones(1, 5)), LIKE, 5)]
    assert len({first, *(masks.once_per_mask(make, *other) for other in others)}) == 6


def test_layers_with_the_same_mask_share_what_is_derived_of_it(make):
    tensor = torch.zeros(1, 1, 7, 9)
    first = masks.once_per_mask(make, masks.from_tensor(tensor, Band()), LIKE)
    assert masks.once_per_mask(make, masks.from_tensor(tensor[:], Band()), LIKE) is first
    assert masks.once_per_mask(make, masks.from_tensor(tensor.clone(), Band()), LIKE) is not first
    tensor[0, 0, 1, 2] = -torch.inf
    assert masks.once_per_mask(make, masks.from_tensor(tensor, Band()), LIKE) is not first


def test_layers_with_the_same_addend_share_the_pairs_that_it_masks():
    tensor = torch.zeros(1, 1, 7, 9)
    found = masks.from_tensor(tensor[:], Band()).pairs
    assert masks.from_tensor(tensor[:], Band()).pairs is found
    known = weakref.ref(found)
    del found, tensor
    assert known() is None


def test_no_more_is_kept_than_a_few_shapes(make):
    mask = Mask(Band(-7, 7))
    for length in range(100):
        masks.once_per_mask(make, mask, LIKE, length)
    assert len(masks._of_band(mask.band).cache) <= masks.KEPT


def test_a_cache_that_another_thread_clears_still_answers(make):
    class Cleared(dict):
        def __setitem__(self, name, value):
            super().__setitem__(name, value)
            self.clear()

    mask = Mask(Band(), keys=torch.ones(1, 5), cache=Cleared())
    assert masks.once_per_mask(make, mask, LIKE) is not masks.once_per_mask(make, mask, LIKE)


def test_nothing_is_kept_of_fake_tensors(make):
    with FakeTensorMode():
        fake = torch.empty(2)
    first = masks.once_per_mask(make, Mask(Band(-3, 5)), fake)
    assert masks.once_per_mask(make, Mask(Band(-3, 5)), fake) is not first


def test_a_graph_keeps_nothing_of_a_mask_beyond_its_run(make):
    tensor = torch.ones(1, 1, 7, 9, dtype=torch.bool)
    for given in (GivenMask("none", band=Band(-3, 5)), GivenMask("pairs", tensor)):
        mask, other = (given.describe(7, 9, of_graph=True) for _ in range(2))
        first = masks.once_per_mask(make, mask, LIKE)
        assert masks.once_per_mask(make, mask, LIKE) is first
        assert masks.once_per_mask(make, other, LIKE) is not first


def test_what_is_known_goes_with_the_mask(make):
    tensor = torch.zeros(1, 1, 7, 9)
    known = weakref.ref(
        masks.once_per_mask(lambda mask, like: mask.queries.clone(), masks.from_tensor(tensor, Band()), LIKE)
    )
    assert known() is not None
    del tensor
    assert known() is None
