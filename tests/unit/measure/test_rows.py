"""What sampled rows show, against the same rows of the full score matrix in float64."""

import itertools
import math

import pytest
import torch

from betahook.measure import masks, rows
from betahook.measure.masks import Band, Mask
from betahook.measure.rows import ROWS, choose, is_exact, row_sums, sampled_rows
from support.matrices import assert_row_std, assert_sums, exact, full, make, pairs_of, row_std, scattered, used


@pytest.mark.parametrize("heads", [1, 2], ids=["one mask for all heads", "its own for each head"])
@pytest.mark.parametrize("queries", [2, 31, 32, 33, 130])
def test_masks_without_structure_are_sampled(queries, heads):
    query, key = make(queries, queries + 3)
    pairs = scattered(heads, queries, queries + 3)
    mask = masks.from_tensor(pairs, Band())
    assert not mask.structured
    rows = row_sums(query, key, mask, torch.tensor(1.0))
    picked = sampled_rows(queries, query.device)
    sums = choose(exact(query, key, mask), rows.scores, mask)
    assert_sums(sums, used(query[:, :, picked], key, pairs[:, :, picked]))
    assert_row_std(sums, row_std(query[:, :, picked], key, pairs[:, :, picked]))
    assert bool(is_exact(mask, queries)) == (queries <= ROWS)


@pytest.mark.parametrize("queries", [20, 130])
def test_masks_with_structure_are_exact(queries):
    query, key = make(queries, queries)
    pairs = pairs_of(Band(None, 0), queries, queries)
    for mask in (masks.from_tensor(pairs.expand(2, 1, -1, -1), Band(None, 0)), Mask(Band(None, 0))):
        rows = row_sums(query, key, mask, torch.tensor(1.0))
        sums = choose(exact(query, key, mask), rows.scores, mask)
        assert_sums(sums, used(query, key, pairs))
        assert_row_std(sums, row_std(query, key, pairs))
        assert is_exact(mask, queries)


@pytest.mark.parametrize("queries", [1, 31, 32, 33, 64, 1000])
def test_sampled_rows_are_evenly_spaced_with_both_ends(queries):
    rows = sampled_rows(queries, torch.device("cpu")).tolist()
    assert len(rows) == min(queries, ROWS)
    assert (rows[0], rows[-1]) == (0, queries - 1)
    gaps = {b - a for a, b in itertools.pairwise(rows)}
    assert min(gaps, default=1) >= 1
    assert max(gaps, default=1) - min(gaps, default=1) <= 1


def noise(*shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(5))


def additive(queries, keys):
    """A causal mask in its additive form, with a bias that differs by pair and is different for each sequence."""
    bias = noise(2, 1, queries, keys)
    return bias.masked_fill(~pairs_of(Band(None, keys - queries), queries, keys), torch.finfo(torch.float32).min)


ENTROPY_MASKS = {
    "none": lambda queries, keys: Mask(Band()),
    "causal": lambda queries, keys: Mask(Band(None, keys - queries)),
    "padded": lambda queries, keys: Mask(Band(), None, (torch.arange(keys) < keys - 4)[None]),
    "boolean": lambda queries, keys: masks.from_tensor(scattered(2, queries, keys), Band()),
    "additive": lambda queries, keys: masks.from_tensor(additive(queries, keys), Band(None, keys - queries)),
}


@pytest.mark.parametrize("queries", [24, 100])
@pytest.mark.parametrize("name", ENTROPY_MASKS)
@pytest.mark.parametrize("softcap", [None, 3.0])
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("beta", [torch.tensor(0.35), torch.tensor([0.1, 2.0])], ids=["one beta", "one a head"])
def test_entropy_is_that_of_the_softmax(queries, name, softcap, biased, beta):
    keys = queries + 3
    query, key = make(queries, keys)
    mask = ENTROPY_MASKS[name](queries, keys)
    position_bias = noise(1, 2, queries, keys) if biased else None

    logits = full(query, key) * beta.double().view(-1, 1, 1)
    if softcap:
        logits = softcap * (logits / softcap).tanh()
    if biased:
        logits = logits + position_bias
    if mask.pairs is None:
        allowed = pairs_of(mask.band, queries, keys) & (True if mask.keys is None else mask.keys[0])
    else:
        allowed = mask.pairs
        logits = logits if mask.bias is None else logits + mask.bias
    picked = sampled_rows(queries, query.device)
    weights = logits.masked_fill(~allowed, -math.inf)[:, :, picked].softmax(-1)
    expected = torch.special.entr(weights).sum((0, 2, 3))

    rows = row_sums(query, key, mask, beta, position_bias=position_bias, softcap=softcap)
    torch.testing.assert_close(rows.entropy, expected, rtol=1e-5, atol=1e-5)
    assert rows.rows.tolist() == [2 * len(picked)] * 2
    flat = torch.zeros_like(logits).masked_fill(~allowed, -math.inf)[:, :, picked].softmax(-1)
    flat = torch.special.entr(flat).sum((0, 2, 3))
    torch.testing.assert_close(rows.flat_entropy, flat, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("form", ["boolean", "additive"])
def test_rows_without_a_key_count_for_nothing(form):
    query, key = make(20, 20)
    pairs = scattered(1, 20, 20)
    pairs[:, :, 7] = False
    pairs[1, :, 9:12] = False
    tensor = (
        pairs if form == "boolean" else torch.zeros(pairs.shape).masked_fill(~pairs, torch.finfo(torch.float32).min)
    )
    rows = row_sums(query, key, masks.from_tensor(tensor, Band()), torch.tensor(1.0))
    weights = full(query, key).masked_fill(~pairs, -math.inf).softmax(-1).nan_to_num(nan=0.0)
    assert rows.rows.tolist() == [2 * 20 - 2 - 3] * 2
    torch.testing.assert_close(rows.entropy, torch.special.entr(weights).sum((0, 2, 3)), rtol=1e-5, atol=1e-5)
    flat = 2 * [sum(math.log(n) for n in pairs.sum(-1).flatten().tolist() if n)]
    assert rows.flat_entropy.tolist() == pytest.approx(flat)
    assert_sums(rows.scores, used(query, key, pairs))
    assert_row_std(rows.scores, row_std(query, key, pairs))


def test_a_mean_far_above_the_spread_costs_no_digits():
    query, key = make(20, 20, query_mean=50, key_mean=-100)
    pairs = scattered(2, 20, 20)
    expected = used(query, key, pairs)
    assert abs(expected[0].mean()) > 90 * expected[0].std()
    found = row_sums(query, key, masks.from_tensor(pairs, Band()), torch.tensor(1.0)).scores
    assert_sums(found, expected, rel=1e-4)  # a score in float32 has no more digits left
    assert_row_std(found, row_std(query, key, pairs), rel=1e-4)


def test_without_any_pair_everything_is_zero():
    query, key = make(20, 20)
    mask = masks.from_tensor(torch.zeros(2, 1, 20, 20, dtype=torch.bool), Band(None, 0))
    rows = row_sums(query, key, mask, torch.tensor(1.0))
    for sums in (exact(query, key, mask), rows.scores):
        assert_sums(sums, [torch.empty(0)] * 2)
    assert rows.rows.tolist() == rows.entropy.tolist() == rows.max_score.tolist() == [0, 0]


@pytest.mark.parametrize("scale", [1e4, 1e-4], ids=["a single key", "all keys alike"])
def test_entropy_at_its_ends(scale):
    query, key = make(16, 16)
    rows = row_sums(query, key, Mask(Band()), torch.tensor(scale))
    expected = 0.0 if scale > 1 else math.log(16)
    assert (rows.entropy / rows.rows).tolist() == pytest.approx([expected] * 2, abs=1e-4)


def test_the_largest_score_is_of_the_sampled_pairs_in_use():
    query, key = make(20, 20, batch=1)
    key[:, :, 19] = 1e3  # future: only the last query may see it
    rows = row_sums(query[:, :, :19], key, Mask(Band(None, 0)), torch.tensor(7.0))
    expected = [x.abs().max().item() for x in used(query[:, :, :19], key, pairs_of(Band(None, 0), 19, 20))]
    assert max(expected) < 1e3
    assert rows.max_score.tolist() == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("beta", [0.05, 0.5])
def test_sampled_rows_are_as_good_as_documented(beta):
    """On unrelated queries, whose rows any subset samples as well as a random one."""
    query, key = make(1000, 1000)
    rows = row_sums(query, key, Mask(Band()), torch.tensor(beta))
    every = full(query, key)
    number, largest = rows.rows[0].item(), rows.max_score.view(1, 2, 1)
    assert number == 2 * ROWS
    assert (largest <= every.abs().amax((0, 2, 3), keepdim=True).view(1, 2, 1) * (1 + 1e-6)).all()
    assert ((every.abs().amax(-1) > largest).double().mean((0, 2)) <= 3 / number).all()
    entropy = torch.special.entr((beta * every).softmax(-1)).sum(-1).mean((0, 2))
    standard_error = math.log(1000) / (2 * math.sqrt(number))
    assert ((rows.entropy / rows.rows - entropy).abs() <= 2 * standard_error).all()


def everything(query, key, mask):
    """All that a layer computes in one call, as flat tensors."""
    rows = row_sums(query, key, mask, torch.tensor(0.5), position_bias=noise(1, 2, 130, 130))
    chosen = choose(exact(query, key, mask), rows.scores, mask)
    return [*vars(chosen).values(), rows.rows, rows.entropy, rows.max_score]


STRUCTURES = {
    "band": lambda n: Mask(Band(-70, 0)),
    "mask": lambda n: masks.from_tensor(scattered(1, n, n), Band(None, 0)),
}


@pytest.mark.parametrize("structure", STRUCTURES)
def test_measuring_draws_nothing_and_writes_nothing(structure):
    query, key = make(130, 130)
    operands = [query, key, *filter(torch.is_tensor, vars(mask := STRUCTURES[structure](130)).values())]
    copies = [x.clone() for x in operands]
    torch.manual_seed(10)
    first = everything(query, key, mask)
    torch.manual_seed(11)
    state = torch.get_rng_state()
    second = everything(query, key, mask)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(operands, copies, strict=True))


@pytest.mark.parametrize("structure", STRUCTURES)
def test_nothing_is_read_back_to_the_host(structure):
    # Meta tensors have no values: reading one back would raise.
    query, key = (x.to("meta") for x in make(130, 130))
    mask = Mask(
        **{name: x.to("meta") if torch.is_tensor(x) else x for name, x in vars(STRUCTURES[structure](130)).items()}
    )
    rows = row_sums(query, key, mask, torch.empty(2, device="meta"))
    chosen = choose(exact(query, key, mask), rows.scores, mask)
    assert {x.shape for x in (*vars(chosen).values(), rows.rows, rows.entropy, rows.max_score)} == {(2,)}


@pytest.mark.parametrize("slab", [1, 3, 32])
@pytest.mark.parametrize("band", [Band(-9, 0), Band(-9, 8), Band(None, 0), Band(-9, None)], ids=str)
def test_it_does_not_matter_how_many_rows_are_worked_on_at_once(band, slab, monkeypatch):
    query, key = make(100, 100)
    monkeypatch.setattr(rows, "CACHED", slab * 2 * 2 * 100)
    sums = row_sums(query, key, Mask(band), torch.tensor(0.35))
    picked = sampled_rows(100, query.device)
    scores, allowed = full(query, key)[:, :, picked], pairs_of(band, 100, 100)[picked]
    weights = (0.35 * scores).masked_fill(~allowed, -math.inf).softmax(-1)
    torch.testing.assert_close(sums.entropy, torch.special.entr(weights).sum((0, 2, 3)), rtol=1e-5, atol=1e-5)
    expected = scores.masked_fill(~allowed, 0)
    torch.testing.assert_close(sums.max_score, expected.abs().amax((0, 2, 3)), rtol=1e-5, atol=0)
    torch.testing.assert_close(sums.scores.score, expected.sum((0, 2, 3)), rtol=1e-5, atol=1e-4)
    assert_row_std(sums.scores, row_std(query[:, :, picked], key, allowed))


def test_thirty_two_rows_are_sampled():
    """So many as docs/METRICS.md and docs/LIMITATIONS.md tell."""
    for queries, expected in ((5, 5), (32, 32), (33, 32), (1000, 32)):
        picked = rows.sampled_rows(queries, torch.device("cpu"))
        assert len(set(picked.tolist())) == expected
        assert picked[[0, -1]].tolist() == [0, queries - 1]
