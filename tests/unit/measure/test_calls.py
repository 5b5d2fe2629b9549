"""Everything that one attention call adds, whichever form of the statistics is chosen for it."""

from types import SimpleNamespace

import pytest
import torch

from betahook.measure import calls, components, masks, pairs, rows, statistics
from betahook.measure.largest import norm_bound
from betahook.measure.masks import Band, Mask
from betahook.measure.statistics import ROW
from support.matrices import BANDS, assert_scores, assert_sums, empty_sums, full, make, pairs_of, recorded, used


@pytest.mark.parametrize("name", BANDS)
def test_every_form_measures_the_same(name, monkeypatch):
    band, more = BANDS[name]
    query, key = make(60, 60 + more, heads=4, key_heads=2, query_mean=0.3, key_mean=-0.5)
    whole = recorded(query, key, Mask(band), 0.3)
    monkeypatch.setattr(pairs, "SHORT", 32)
    masks.forget_bands()
    blocks = recorded(query, key, Mask(band), 0.3)
    masks.forget_bands()
    assert_scores(whole, query, key, pairs_of(band, 60, 60 + more))
    assert (blocks.max_score_bound > whole.max_score_bound).all()  # it looked at some rows only
    of_rows = {"rows", "entropy", "sink", "flat_entropy", *statistics.MAXIMA}
    for row in ROW.keys() - of_rows - {"score_square"}:
        torch.testing.assert_close(getattr(blocks, row), getattr(whole, row), rtol=1e-5, atol=1e-2, msg=row)


def test_calls_add_up():
    (query, key), mask = make(20, 20), Mask(Band(None, 0))
    table, moments = empty_sums(2, 16)
    for beta in (2.0, 1.0):
        scales = torch.tensor([[1.0], [beta]]).expand(2, 2)
        calls.add_scores(table, moments, query, key, mask, scales, rows.PLAIN, exact_max_logit=False, inputs=())
    once = recorded(query, key, mask)
    for row in ("pairs", "exact_pairs", "rows", "flat_entropy", "queries", "keys", "score", "score_square"):
        torch.testing.assert_close(table[ROW[row]], 2 * getattr(once, row), rtol=1e-12, atol=1e-9)
    torch.testing.assert_close(table[ROW["max_score"]], once.max_score)
    torch.testing.assert_close(table[ROW["max_logit"]], 2 * once.max_score)


@pytest.mark.parametrize("length", [128, 129])
@pytest.mark.parametrize("exact", [True, False])
def test_the_largest_score_is_exact_or_has_a_bound(length, exact):
    (query, key), mask = make(length, length), Mask(Band(None, 0))
    found = recorded(query, key, mask, 0.5, exact_max_logit=exact)
    scores = used(query, key, pairs_of(Band(None, 0), length, length))
    largest = [x.abs().max().item() for x in scores]
    if exact or length == 128:
        assert found.max_score.tolist() == pytest.approx(largest, rel=1e-6)
        assert found.max_positive_logit.tolist() == pytest.approx([0.5 * x.max().item() for x in scores], rel=1e-6)
        assert found.max_score_bound.tolist() == found.max_logit_bound.tolist() == [0, 0]  # it has nothing to add
    else:
        assert (found.max_score < torch.tensor(largest)).all()
        assert found.max_score_bound.tolist() == pytest.approx(norm_bound(query, key, mask).tolist())
        assert found.max_logit_bound.tolist() == (0.5 * found.max_score_bound).tolist()


def test_tokens_that_take_part_are_those_of_any_head():
    allowed = torch.zeros(2, 2, 2, 3, dtype=torch.bool)
    allowed[0, 0, 0, 2] = allowed[0, 1, 0, 0] = allowed[1, 1, 1, 1] = True
    queries, keys = calls.valid_tokens(allowed, torch.zeros(1, 2, 4, 5), torch.zeros(1, 2, 6, 5))
    assert queries.tolist() == [[True, False, False, True]]
    assert keys.tolist() == [[True, False, True, False, True, False]]
    assert calls.valid_tokens(allowed, torch.zeros(1, 2, 5, 5), torch.zeros(1, 2, 3, 5)) == (None, None)


@pytest.mark.parametrize("length", [40, 200])
@pytest.mark.parametrize("form", ["mask", "score matrix"])
def test_components_are_those_of_the_tokens_that_any_head_uses(form, length):
    query, key = make(length, length)
    allowed = torch.ones(2, 2, length, length, dtype=torch.bool)
    allowed[:, 0, 7:] = allowed[:, 0, :, 5:] = False  # the first head uses few of them
    allowed[:, :, -9:] = allowed[..., -3:] = False
    query[:, :, -9:] = key[:, :, -3:] = 100.0
    if form == "mask":
        found = recorded(query, key, masks.from_tensor(allowed, Band()))
    else:
        scores, (table, moments) = full(query, key), empty_sums(2, 16)
        operands = (x.transpose(0, 1).flatten(1, 2)[None] for x in (query, key))
        calls.add_pairs(table, moments, scores, scores, allowed, *operands, torch.ones(2, 2))
        table = components.with_averages(table, moments, torch.tensor([8, 8]))
        found = SimpleNamespace(**{name: table[row] for name, row in ROW.items()})
    for side, tokens in (("query", query[:, :, :-9]), ("key", key[:, :, :-3])):
        variance = tokens.double().transpose(0, 1).flatten(1, 2).var(1, correction=0).mean(1)
        count = len(tokens) * tokens.shape[2]
        assert (found.queries if side == "query" else found.keys).tolist() == [count] * 2
        torch.testing.assert_close(getattr(found, f"{side}_variance") / count, variance, rtol=1e-5, atol=0)


def test_half_precision_is_measured_in_single():
    query, key = make(20, 20, dtype=torch.bfloat16)
    with torch.autocast("cpu", torch.bfloat16):
        sums = recorded(query, key, Mask(Band(None, 0)))
    assert_sums(sums, used(query, key, pairs_of(Band(None, 0), 20, 20)))


@pytest.mark.parametrize("band", [Band(), Band(None, 0), Band(-99, 0)], ids=["full", "causal", "window"])
def test_sequences_weigh_by_their_rows_whichever_form_measures_them(band):
    """One of 1,000 tokens, of which some rows are looked at, and four of 60, of which all are."""
    table, moments = empty_sums(2, 16)
    of_rows = {"rows": [], "entropy": [], "sink": [], "flat_entropy": []}
    for length in (1000, 60, 60, 60, 60):
        query, key = make(length, length)
        calls.add_scores(
            table, moments, query, key, Mask(band), torch.ones(2, 2), rows.PLAIN, exact_max_logit=False, inputs=()
        )
        allowed = pairs_of(band, length, length)
        weights = full(query, key).masked_fill(~allowed, -torch.inf).softmax(-1)
        first = allowed.byte().argmax(-1)[:, None].expand(*weights.shape[:-1], 1)
        of_rows["rows"].append(torch.full((2,), 2.0 * length).double())
        of_rows["entropy"].append(torch.special.entr(weights).sum((0, 2, 3)))
        of_rows["sink"].append(weights.gather(-1, first).sum((0, 2, 3)))
        of_rows["flat_entropy"].append(2 * allowed.sum(-1).double().log().sum().expand(2))
    expected = {name: torch.stack(parts).sum(0) for name, parts in of_rows.items()}
    torch.testing.assert_close(table[ROW["rows"]], expected["rows"], rtol=1e-12, atol=0)
    mean = {name: (table[ROW[name]] / table[ROW["rows"]], expected[name] / expected["rows"]) for name in of_rows}
    torch.testing.assert_close(*mean["flat_entropy"], rtol=0.01, atol=0)
    torch.testing.assert_close(*mean["entropy"], rtol=0.1, atol=0)
    torch.testing.assert_close(*mean["sink"], rtol=0, atol=0.02)


def test_long_calls_whose_mask_has_no_structure_go_by_their_sampled_rows():
    """The exact sums know of no single pairs."""
    query, key = make(200, 200, heads=2, key_heads=2)
    scattered = torch.rand(1, 1, 200, 200, generator=torch.Generator().manual_seed(0)) < 0.5
    found = recorded(query, key, masks.from_tensor(scattered, Band()), 0.3)
    whole = recorded(query, key, Mask(Band()), 0.3)
    assert (found.exact_pairs == 0).all()
    assert (found.score_square < 0.9 * whole.score_square).all()
