"""Pooled moments of q and k against those of all tokens at once, in float64."""

import pytest
import torch

from betahook import theory
from betahook.measure import components, scores, statistics
from betahook.measure.statistics import ROW, Statistics
from support.matrices import empty_sums

CPU = torch.device("cpu")
HEADS, KEY_HEADS, WIDTH = 4, 2, 8


def draw(mean, spread=1.0, tokens=60):
    """Queries and keys of two batch rows whose components have means of their own around `mean`."""
    generator = torch.Generator().manual_seed(int(mean) + tokens)

    def normal(*shape):
        return torch.randn(*shape, generator=generator)

    return tuple(
        normal(2, heads, tokens, WIDTH) * spread + mean + normal(heads, 1, WIDTH) for heads in (HEADS, KEY_HEADS)
    )


def measured(calls):
    """Statistics of each head of calls `(query, key, valid or None)`."""
    table, sums = empty_sums(HEADS, HEADS * WIDTH)
    for query, key, valid in calls:
        of_query, of_key = scores.components(query, valid), scores.components(key, valid)
        counts = [len(x) * x.shape[2] if valid is None else valid.sum() for x in (query, key)]
        tokens = torch.tensor(counts)[:, None].expand(2, HEADS)
        components.add(sums, of_query, of_key, tokens)
        statistics.add(table, "queries", tokens)
    return Statistics.from_table(components.with_averages(table, sums, torch.tensor([WIDTH] * HEADS)))


def expected(calls):
    """Mean square, variance of q and of k, and the std of independent scores, of each head."""

    def joined(index):
        parts = [(call[index].double().transpose(1, 2), call[2]) for call in calls]
        every = torch.cat([x.flatten(0, 1) if valid is None else x[valid] for x, valid in parts])
        every = every.repeat_interleave(HEADS // every.shape[1], 1)
        return every.mean(0), every.var(0, correction=0)

    query, key = joined(0), joined(1)
    of_scores = theory.independent_variance(*query, *key).sqrt()
    return *(x for mean, variance in (query, key) for x in (mean.square().mean(1), variance.mean(1))), of_scores


def assert_moments(calls, rel):
    found = measured(calls)
    names = (
        *("component_mean_square_q", "component_variance_q", "component_mean_square_k", "component_variance_k"),
        "independent_std",
    )
    for name, value in zip(names, expected(calls), strict=True):
        torch.testing.assert_close(getattr(found, name), value, rtol=rel, atol=0, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize("mean", [0, 3, 300])
def test_calls_are_pooled_as_if_they_were_one(mean):
    assert_moments([(*draw(mean), None), (*draw(mean + 1, tokens=17), None), (*draw(mean, 2.0), None)], rel=1e-5)


def test_a_mean_far_above_the_spread_leaves_the_digits_of_the_variance():
    """What float32 can tell of such numbers: their spread is a thousand of its steps."""
    assert_moments([(*draw(10_000), None), (*draw(10_000, tokens=17), None)], rel=1e-4)


def test_padding_has_no_part():
    valid = torch.arange(60) < torch.tensor([[60], [20]])
    assert_moments([(*draw(2), valid), (*draw(3), None)], rel=1e-5)


def test_the_order_of_calls_does_not_matter():
    one, other = (*draw(1), None), (*draw(5, tokens=30), None)
    torch.testing.assert_close(
        measured([one, other]).independent_std, measured([other, one]).independent_std, rtol=1e-12, atol=0
    )


def test_heads_may_have_different_widths():
    """Each head as if it were alone."""
    widths, tokens = [2, 5, 3], 40
    parts = [torch.randn(1, 1, tokens, width, generator=torch.Generator().manual_seed(width)) for width in widths]
    table, sums = empty_sums(3, sum(widths))
    for index, (part, columns) in enumerate(zip(parts, sums.split(widths, 1), strict=True)):
        found = scores.components(part, None)
        count = torch.full((2, 1), tokens)
        components.add(columns, found, found, count)
        statistics.add(table[:, index : index + 1], "queries", count)
    table = components.with_averages(table, sums, torch.tensor(widths))
    variances = [part.double().var((0, 1, 2), correction=0) for part in parts]
    torch.testing.assert_close(
        Statistics.from_table(table).component_variance_q, torch.stack([v.mean() for v in variances]), rtol=1e-5, atol=0
    )


def test_what_was_not_measured_says_nothing():
    found = measured([])
    assert found.independent_std.isnan().all()
    assert found.finite.all()


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_number_that_is_not_finite_shows(bad):
    query, key = draw(0)
    query[0, 1, 0, 0] = bad
    assert measured([(query, key, None)]).finite.tolist() == [True, False, True, True]


def test_the_table_has_a_row_for_everything_that_is_written():
    table = statistics.empty(HEADS, CPU)
    table[ROW["queries"]] = table[ROW["keys"]] = 1
    table = components.with_averages(
        table, torch.ones(4, HEADS * WIDTH, dtype=torch.float64), torch.tensor([WIDTH] * HEADS)
    )
    assert {name for name, row in ROW.items() if table[row].any()} == {
        *("queries", "keys", "query_mean_square", "key_mean_square")
    }


def test_heads_without_moments_keep_the_averages_of_an_old_file():
    table, moments = empty_sums(2, 2 * WIDTH)
    table[[ROW["queries"], ROW["keys"]]] = 4
    table[ROW["query_variance"]] = 7
    moments[:, WIDTH:] = 4
    given = table.clone()
    found = components.with_averages(table, moments, torch.tensor([WIDTH] * 2))
    assert found[ROW["query_variance"]].tolist() == [7, 0]
    assert found[ROW["query_mean_square"]].tolist() == [0, 4]
    assert torch.equal(table, given)
