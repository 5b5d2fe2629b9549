"""What sampled rows show, against the same rows of the full score matrix in float64."""

import itertools
import math

import pytest
import torch

from betahook.measure import masks, rows
from betahook.measure.masks import Band, Mask
from betahook.measure.pairs import ROWS, SHORT, is_short, sampled_rows, sampling_weight
from support.matrices import (
    assert_row_std,
    assert_scores,
    assert_sums,
    exact,
    full,
    looked_at,
    make,
    pairs_of,
    recorded,
    row_std,
    scattered,
    used,
)


@pytest.mark.parametrize("heads", [1, 2], ids=["one mask for all heads", "its own for each head"])
@pytest.mark.parametrize("queries", [2, 31, 33, 126, 127, 150])
def test_masks_without_structure_are_sampled(queries, heads):
    keys = queries + 3
    query, key = make(queries, keys)
    pairs = scattered(heads, queries, keys)
    mask = masks.from_tensor(pairs, Band())
    assert not mask.structured
    picked = sampled_rows(queries, keys, query.device)
    sums = recorded(query, key, mask)
    assert_scores(sums, query[:, :, picked], key, pairs[:, :, picked], weight=sampling_weight(queries, keys))
    assert is_short(queries, keys) == (queries <= 126)
    assert sums.exact_pairs.tolist() == (sums.pairs if queries <= 126 else 0 * sums.pairs).tolist()


@pytest.mark.parametrize("queries", [20, 130])
def test_masks_with_structure_are_exact(queries):
    query, key = make(queries, queries)
    pairs = pairs_of(Band(None, 0), queries, queries)
    for mask in (masks.from_tensor(pairs.expand(2, 1, -1, -1), Band(None, 0)), Mask(Band(None, 0))):
        sums = recorded(query, key, mask)
        assert_scores(sums, query, key, pairs)
        assert sums.exact_pairs.tolist() == sums.pairs.tolist()


@pytest.mark.parametrize(("queries", "keys"), [(1, 1), (32, 9000), (128, 128), (33, 9000), (129, 128), (1000, 1000)])
def test_sampled_rows_are_the_middles_of_equal_runs(queries, keys):
    rows = sampled_rows(queries, keys, torch.device("cpu")).tolist()
    assert len(rows) == (queries if queries <= ROWS or queries * keys <= SHORT**2 else ROWS)
    half = (queries / len(rows) - 1) / 2
    assert rows[0] == pytest.approx(half, abs=1)
    assert queries - 1 - rows[-1] == pytest.approx(half, abs=1)
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


@pytest.mark.parametrize("queries", [24, 100, 140])
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
    picked = sampled_rows(queries, keys, query.device)
    weights = logits.masked_fill(~allowed, -math.inf)[:, :, picked].softmax(-1)
    expected = torch.special.entr(weights).sum((0, 2, 3))

    rows = looked_at(query, key, mask, beta, position_bias=position_bias, softcap=softcap)
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
    rows = looked_at(query, key, masks.from_tensor(tensor, Band()), 1.0)
    weights = full(query, key).masked_fill(~pairs, -math.inf).softmax(-1).nan_to_num(nan=0.0)
    assert rows.rows.tolist() == [2 * 20 - 2 - 3] * 2
    torch.testing.assert_close(rows.entropy, torch.special.entr(weights).sum((0, 2, 3)), rtol=1e-5, atol=1e-5)
    flat = 2 * [sum(math.log(n) for n in pairs.sum(-1).flatten().tolist() if n)]
    assert rows.flat_entropy.tolist() == pytest.approx(flat)
    assert_scores(rows, query, key, pairs)


def test_a_mean_far_above_the_spread_costs_no_digits():
    query, key = make(20, 20, query_mean=50, key_mean=-100)
    pairs = scattered(2, 20, 20)
    expected = used(query, key, pairs)
    assert abs(expected[0].mean()) > 90 * expected[0].std()
    found = looked_at(query, key, masks.from_tensor(pairs, Band()), 1.0)
    assert_sums(found, expected, rel=1e-4)  # a score in float32 has no more digits left
    assert_row_std(found, row_std(query, key, pairs), rel=1e-4)


def test_without_any_pair_everything_is_zero():
    query, key = make(20, 20)
    mask = masks.from_tensor(torch.zeros(2, 1, 20, 20, dtype=torch.bool), Band(None, 0))
    rows = looked_at(query, key, mask, 1.0)
    for sums in (exact(query, key, mask), rows):
        assert_sums(sums, [torch.empty(0)] * 2)
    assert rows.rows.tolist() == rows.max_score.tolist() == [0, 0]
    assert rows.entropy.tolist() == pytest.approx([0, 0], abs=1e-20)


@pytest.mark.parametrize("scale", [1e4, 1e-4], ids=["a single key", "all keys alike"])
def test_entropy_at_its_ends(scale):
    query, key = make(16, 16)
    rows = looked_at(query, key, Mask(Band()), scale)
    expected = 0.0 if scale > 1 else math.log(16)
    assert (rows.entropy / rows.rows).tolist() == pytest.approx([expected] * 2, abs=1e-4)


def test_the_largest_score_is_of_the_sampled_pairs_in_use():
    query, key = make(20, 20, batch=1)
    key[:, :, 19] = 1e3  # future: only the last query may see it
    rows = looked_at(query[:, :, :19], key, Mask(Band(None, 0)), 7.0)
    expected = [x.abs().max().item() for x in used(query[:, :, :19], key, pairs_of(Band(None, 0), 19, 20))]
    assert max(expected) < 1e3
    assert rows.max_score.tolist() == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("beta", [0.05, 0.5])
def test_sampled_rows_are_as_good_as_documented(beta):
    """On unrelated queries, whose rows any subset samples as well as a random one."""
    query, key = make(1000, 1000)
    rows = looked_at(query, key, Mask(Band()), beta)
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
    return list(vars(recorded(query, key, mask, 0.5, position_bias=noise(1, 2, 140, 140))).values())


STRUCTURES = {
    "band": lambda n: Mask(Band(-70, 0)),
    "mask": lambda n: masks.from_tensor(scattered(1, n, n), Band(None, 0)),
}


@pytest.mark.parametrize("structure", STRUCTURES)
def test_measuring_draws_nothing_and_writes_nothing(structure):
    query, key = make(140, 140)
    operands = [query, key, *filter(torch.is_tensor, vars(mask := STRUCTURES[structure](140)).values())]
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
    query, key = (x.to("meta") for x in make(140, 140))
    mask = Mask(
        **{name: x.to("meta") if torch.is_tensor(x) else x for name, x in vars(STRUCTURES[structure](140)).items()}
    )
    assert {x.shape for x in vars(recorded(query, key, mask)).values()} == {(2,)}


@pytest.mark.parametrize("length", [100, 200], ids=["all rows", "sampled rows"])
@pytest.mark.parametrize("scores", [1, 3 * 2 * 100, 2 * 2 * 100 * 100])
@pytest.mark.parametrize("band", [Band(-9, 0), Band(-9, 8), Band(None, 0), Band(-9, None)], ids=str)
def test_it_does_not_matter_how_much_is_worked_on_at_once(band, scores, length, monkeypatch):
    query, key = make(length, length, batch=3)
    monkeypatch.setattr(rows, "CACHED", scores)
    sums = looked_at(query, key, Mask(band), 0.35)
    picked = sampled_rows(length, length, query.device)
    scores, allowed = full(query, key)[:, :, picked], pairs_of(band, length, length)[picked]
    weights = (0.35 * scores).masked_fill(~allowed, -math.inf).softmax(-1).nan_to_num(nan=0.0)
    torch.testing.assert_close(sums.entropy, torch.special.entr(weights).sum((0, 2, 3)), rtol=1e-5, atol=1e-5)
    expected = scores.masked_fill(~allowed, 0)
    torch.testing.assert_close(sums.max_score.double(), expected.abs().amax((0, 2, 3)), rtol=1e-5, atol=0)
    torch.testing.assert_close(sums.score, expected.sum((0, 2, 3)), rtol=1e-5, atol=1e-3)
    assert_row_std(sums, row_std(query[:, :, picked], key, allowed))


def test_thirty_two_rows_are_sampled():
    """So many as docs/METRICS.md and docs/LIMITATIONS.md tell."""
    for queries, expected in ((5, 5), (32, 32), (128, 128), (129, 32), (1000, 32)):
        picked = sampled_rows(queries, queries, torch.device("cpu"))
        assert len(set(picked.tolist())) == expected


def first_shares(logits, allowed):
    """Attention on the first allowed key of each row, one by one, summed over rows, `[heads]`."""
    weights = logits.double().masked_fill(~allowed, -math.inf).softmax(-1)
    totals = torch.zeros(logits.shape[1], dtype=torch.float64)
    for batch, head, row in itertools.product(*map(range, logits.shape[:3])):
        keys = allowed[batch, head, row].nonzero().flatten()
        if len(keys):
            totals[head] += weights[batch, head, row, keys[0]]
    return totals


@pytest.mark.parametrize("length", [1, 12, 200])
@pytest.mark.parametrize("kind", ["full", "causal", "window", "padded left", "padded right", "scattered"])
def test_the_sink_is_the_attention_on_the_first_allowed_key_of_each_row(kind, length):
    generator = torch.Generator().manual_seed(5)
    query, key = (torch.randn(2, 3, length, 8, generator=generator) for _ in range(2))
    positions = torch.arange(length)
    valid = {"padded left": positions >= length // 3, "padded right": positions < length - length // 3}.get(kind)
    if kind == "scattered":
        mask = Mask(Band(), pairs=scattered(3, length, length))
        allowed = mask.pairs
    else:
        band = {"full": Band(), "window": Band(-(length // 4) - 1, 0)}.get(kind, Band(None, 0))
        padding = None if valid is None else torch.stack([valid, torch.ones_like(valid)])
        mask = Mask(band) if padding is None else masks.from_padding(padding.long(), band, length)
        allowed = band.allowed(positions, positions)[None, None].expand(2, 3, -1, -1)
        if padding is not None:
            allowed = allowed & padding[:, None, None] & padding[:, None, :, None]
    found = looked_at(query, key, mask, 0.7)
    rows = sampled_rows(length, length, query.device)
    logits = 0.7 * (query.double() @ key.double().mT)
    expected = first_shares(logits[:, :, rows], allowed.expand(2, 3, -1, -1)[:, :, rows])
    torch.testing.assert_close(found.sink, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    "sinks",
    [torch.tensor([[[-20.0], [0.5], [4.0]]]), torch.linspace(-20, 4, 72).view(2, 3, 12)],
    ids=["of each head", "of each query"],
)
def test_sinks_are_one_more_key(sinks):
    generator = torch.Generator().manual_seed(6)
    query, key = (torch.randn(2, 3, 12, 8, generator=generator) for _ in range(2))
    valid = torch.ones(2, 12, dtype=torch.long)
    valid[1, :4] = 0
    mask = masks.from_padding(valid, Band(None, 0), 12)
    found = looked_at(query, key, mask, 0.7, sinks=sinks)
    allowed = (torch.ones(12, 12).tril().bool() & valid.bool()[:, None, None] & valid.bool()[:, None, :, None]).expand(
        2, 3, 12, 12
    )
    logits = (0.7 * query.double() @ key.double().mT).masked_fill(~allowed, -math.inf)
    weights = torch.cat([logits, sinks.double()[..., None].expand(2, 3, 12, 1)], -1).softmax(-1)
    filled = allowed.any(-1)
    entropy = torch.special.entr(weights).sum(-1).masked_fill(~filled, 0).sum((0, 2))
    torch.testing.assert_close(found.entropy, entropy, rtol=1e-5, atol=1e-6)
    first = weights.gather(-1, allowed.byte().argmax(-1, keepdim=True))[..., 0].masked_fill(~filled, 0).sum((0, 2))
    torch.testing.assert_close(found.sink, first, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("cached", [True, False], ids=["in its cache", "at once"])
@pytest.mark.parametrize(
    "sinks",
    [None, torch.tensor([[[0.5], [-1.0]]]), torch.linspace(-1, 1, 800).view(2, 2, 200)],
    ids=["", "sinks of each head", "sinks of each query"],
)
def test_a_padded_row_has_no_entropy_though_a_window_hides_the_first_keys(monkeypatch, cached, sinks):
    monkeypatch.setattr(rows, "FEW", 0 if cached else 2**20)
    monkeypatch.setattr(rows, "CACHED", 2**12 if cached else 2**20)
    query, key = make(200, 200, heads=2, key_heads=2)
    real = torch.ones(len(query), 200, dtype=torch.bool)
    real[0, 100:] = False
    mask = masks.from_padding(real, Band(-20, 0), 200)
    found = looked_at(query, key, mask, 0.5, sinks=sinks)
    picked = sampled_rows(200, 200, query.device)
    positions = torch.arange(200)
    allowed = Band(-20, 0).allowed(picked, positions) & real[:, picked, None] & real[:, None, :]
    logits = (0.5 * query.double()[:, :, picked] @ key.double().mT).masked_fill(~allowed[:, None], -1e30)
    if sinks is not None:
        of_rows = sinks.expand(-1, -1, 200)[..., picked, None].double()
        logits = torch.cat([logits, of_rows.expand(*logits.shape[:-1], 1)], -1)
    weights, seen = logits.softmax(-1), allowed.any(-1)[:, None]
    first = allowed.byte().argmax(-1)[:, None, :, None].expand(*weights.shape[:-1], 1)
    entropy, sink = torch.special.entr(weights).sum(-1), weights.gather(-1, first)[..., 0]
    torch.testing.assert_close(found.entropy.double(), (entropy * seen).sum((0, 2)), rtol=1e-5, atol=0)
    torch.testing.assert_close(found.sink.double(), (sink * seen).sum((0, 2)), rtol=1e-5, atol=0)
