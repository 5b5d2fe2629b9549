"""Groups of heads: maps between heads and groups, and what is known of each group."""

import pytest
import torch

from betahook.measure import calls, weights
from betahook.measure.groups import HeadGroups, LayerSize
from betahook.measure.masks import Band, Mask
from betahook.measure.rows import PLAIN
from betahook.measure.statistics import ROW, empty
from betahook.measure.weights import WeightStd

CPU = torch.device("cpu")


@pytest.fixture
def groups():
    """A layer of four heads, and one of two whose projections are not known."""
    return HeadGroups.of([LayerSize(4, 8, 24, 12), LayerSize(2, 16)], CPU)


def test_groups_are_layers_or_heads(groups):
    values = torch.tensor([1.0, 2, 3, 4, 5, 6])
    heads = groups.by_head()
    assert groups.reduce(values, "max").tolist() == [4, 6]
    assert groups.reduce(values, "sum").tolist() == [10, 11]
    assert groups.geometric_mean(values).tolist() == pytest.approx([24**0.25, 30**0.5])
    assert groups.spread(torch.tensor([7.0, 8.0])).tolist() == [7, 7, 7, 7, 8, 8]
    assert groups.head_dim.tolist() == [8, 16]
    assert heads.reduce(values, "max").tolist() == heads.spread(values).tolist() == values.tolist()
    assert heads.head_dim.tolist() == heads.widths.tolist() == groups.widths.tolist() == [8] * 4 + [16] * 2
    for each in (groups, heads):
        assert len(each.of_head) == 6
        assert (each.query_width[0], each.key_width[0]) == (24, 12)
        assert each.query_width[-1].isnan()
        assert each.key_width[-1].isnan()


def observe(groups, table):
    return groups.observe(table, table.new_zeros(4, int(groups.widths.sum())))


def test_groups_are_observed_from_one_table(groups):
    table = empty(6, CPU)
    table[ROW["pairs"]] = 10
    table[ROW["score"]] = torch.arange(6) * 10
    assert observe(groups, table).mean.tolist() == [1.5, 4.5]
    assert observe(groups.by_head(), table).mean.tolist() == [0, 1, 2, 3, 4, 5]


def test_groups_predict_from_weights_and_inputs(groups):
    table = empty(6, CPU)
    for side, spread in (("query", 1.0), ("key", 3.0)):
        table[ROW[f"{side}_inputs"]] = 2
        table[ROW[f"{side}_input_square"]] = 2 * spread**2
    weight_std = WeightStd(torch.tensor([0.5, torch.nan]), torch.tensor([0.25, torch.nan]))
    predicted = groups.predicted_std(observe(groups, table), weight_std)
    assert predicted[0].item() == pytest.approx((8 * (24 * 0.25) * (12 * 9 * 0.0625)) ** 0.5)
    assert predicted[1].isnan()


def test_std_is_pooled_over_the_heads_of_a_group():
    query, key = torch.randn(2, 4, 3, 5, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    sums = torch.zeros(6, 5, dtype=torch.float64)
    sums[:3, :4], sums[3:, :4] = weights.entry_sums(query), weights.entry_sums(key)
    std = HeadGroups.of([LayerSize(heads, 3, 5, 5) for heads in (3, 1, 1)], CPU).weight_std(sums)
    for got, entries in ((std.query, query), (std.key, key)):
        expected = [entries[:3].std(correction=0), entries[3].std(correction=0)]
        torch.testing.assert_close(got[:2], torch.stack(expected))
        assert got[2].isnan()  # nothing was read


def measured(query, key, layers):
    """Groups, sums and moments of an attention."""
    table = empty(query.shape[1], CPU)
    groups = HeadGroups.of(layers, CPU)
    moments = table.new_zeros(4, int(groups.widths.sum()))
    scales = torch.ones(2, query.shape[1])
    calls.add_scores(table, moments, query, key, Mask(Band()), scales, PLAIN, exact_max_logit=True, inputs=())
    return groups, table, moments


def test_groups_are_observed_as_if_the_query_had_the_ratios_of_beta():
    """Beta of the group times a score is then the logit of each head; heads that are alike keep every bit."""
    query, key = torch.randn(2, 2, 3, 40, 8, generator=torch.Generator().manual_seed(1)) + 0.3
    layers, beta = [LayerSize(2, 8), LayerSize(1, 8)], torch.tensor([0.1, 6.4, 0.7])
    groups, *sums = measured(query, key, layers)
    pooled = groups.compare(groups.geometric_mean(beta), beta)
    of_logits = groups.observe(*measured(query * beta[:, None, None], key, layers)[1:])
    relative = groups.observe(*sums, pooled.ratios)
    squared = ("component_mean_square_q", "component_variance_q")
    scaled = ("mean", "std", "row_std", "max_score", "max_positive_score", "max_score_bound", "independent_std")
    for name in (*scaled, *squared):
        factor = pooled.of_group.square() if name in squared else pooled.of_group
        torch.testing.assert_close(factor * getattr(relative, name), getattr(of_logits, name), rtol=1e-5, atol=1e-6)
    raw = groups.observe(*sums)
    unscaled = ("count", "exact", "entropy", "sink", "flat_entropy", "component_variance_k", "max_logit", "finite")
    for name in unscaled:
        assert torch.equal(getattr(relative, name), getattr(raw, name))
    for name in (*scaled, *squared):
        assert torch.equal(getattr(relative, name)[1], getattr(raw, name)[1])
    assert groups.by_head().compare(beta, beta).ratios is None


def test_heads_whose_beta_is_not_known_are_observed_as_they_are(groups):
    beta = torch.tensor([0.3, 0.3, 0.3, 0.3, torch.nan, torch.nan])
    ratios = groups.compare(groups.geometric_mean(beta), beta).ratios
    assert ratios.tolist() == [1] * 6
    table = empty(6, CPU)
    assert groups.observe(table, table.new_zeros(4, 64), ratios).finite.all()


def test_std_of_w_q_is_that_with_the_ratios_of_beta():
    query, key = torch.randn(2, 4, 3, 5, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    ratios = torch.tensor([0.25, 1.0, 4.0, 1.0])
    groups, sums = HeadGroups.of([LayerSize(3, 3, 5, 5), LayerSize(1, 3, 5, 5)], CPU), torch.zeros(2, 6, 4)
    for table, factor in zip(sums, (torch.ones(4), ratios), strict=True):
        table[:3], table[3:] = weights.entry_sums(query * factor[:, None, None]), weights.entry_sums(key)
    scaled, expected = groups.weight_std(sums[0], ratios), groups.weight_std(sums[1])
    torch.testing.assert_close(scaled.query, expected.query)
    assert torch.equal(scaled.key, expected.key)


def test_groups_move_to_a_device(groups):
    moved = groups.to(torch.device("meta"))
    tensors = [x for x in vars(moved).values() if isinstance(x, torch.Tensor)]
    assert len(tensors) == 7
    assert {x.device.type for x in tensors} == {"meta"}
