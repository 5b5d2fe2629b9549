"""The table of sums against statistics of the raw numbers."""

import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields, replace

import pytest
import torch

from betahook.measure import statistics
from betahook.measure.statistics import FORMULAS, FROM_MOMENTS, MAXIMA, ROW, SUMS, Pooled, Statistics
from support.operations import Operations

CPU = torch.device("cpu")

SAMPLES = {
    # Statistic of the spread: number of entries, their sum and the sum of their squares.
    "std": ("pairs", "score", "score_square"),
    "input_std_q": ("query_inputs", "query_input", "query_input_square"),
    "input_std_k": ("key_inputs", "key_input", "key_input_square"),
}
WEIGHTED = {
    "query_mean_square": "component_mean_square_q",
    "query_variance": "component_variance_q",
    "key_mean_square": "component_mean_square_k",
    "key_variance": "component_variance_k",
    "independent_variance": "independent_std",
    "row_square": "row_std",
}
"""Sums that are weighted by tokens or pairs, and the statistics that are made of them."""


def random_table(heads, seed=0):
    table = torch.rand(len(ROW), heads, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return 1 + 99 * table


@pytest.fixture
def raw():
    """Samples `[heads, entries]` for every spread, entropies `[heads, rows]`, and one number a head for the rest."""
    generator = torch.Generator().manual_seed(1)
    samples = {
        name: torch.randn(3, 40 + 7 * i, generator=generator, dtype=torch.float64) * (i + 1) + i
        for i, name in enumerate(SAMPLES)
    }
    entropy = torch.rand(3, 11, generator=generator, dtype=torch.float64)
    weighted = {name: torch.rand(3, generator=generator, dtype=torch.float64) for name in WEIGHTED}
    weighted["row_square"] = torch.rand(3, generator=generator, dtype=torch.float64)
    sensitivity = torch.randn(3, generator=generator, dtype=torch.float64)
    return samples, entropy, weighted, sensitivity


def add(table, values):
    """Add values by the names of their rows, numbers or `[heads]`."""
    for name, value in values.items():
        if name in MAXIMA:
            table[ROW[name]].clamp_(min=value)
        else:
            statistics.add(table, name, value.expand(table.shape[1])[None])


def tabulate(raw, part=slice(None)):
    """A table of a slice of the samples."""
    samples, entropy, weighted, sensitivity = raw
    table = statistics.empty(3, CPU)
    for name, rows in SAMPLES.items():
        x = samples[name][:, part]
        add(table, dict(zip(rows, (torch.tensor(x.shape[1]), x.sum(1), x.square().sum(1)), strict=True)))
    scores, entropy = samples["std"][:, part], entropy[:, part]
    values = {name: scores.shape[1] * x for name, x in weighted.items()}
    values |= {name: torch.tensor(scores.shape[1]) for name in ("queries", "keys")}
    values |= {"rows": torch.tensor(entropy.shape[1]), "entropy": entropy.sum(1), "sensitivity": sensitivity}
    values |= {"flat_entropy": 3 * entropy.sum(1), "sink": entropy.sum(1) / 9}
    values |= {"exact_pairs": torch.tensor(scores.shape[1])}
    values |= {"max_score": scores.abs().amax(1), "max_logit": 2 * scores.abs().amax(1)}
    values |= {"max_positive_score": scores.amax(1), "max_positive_logit": 2 * scores.amax(1)}
    values |= {"max_score_bound": 3 * scores.abs().amax(1), "max_logit_bound": 6 * scores.abs().amax(1)}
    add(table, values)
    return table


def test_an_empty_table_has_a_row_for_every_sum_and_maximum():
    table = statistics.empty(3, CPU)
    assert table.shape == (len(SUMS) + len(MAXIMA), 3)
    assert table.dtype == torch.float64
    assert not table.any()
    assert list(ROW) == [*SUMS, *MAXIMA]


def test_adding_sums_everything_but_the_maxima():
    table = random_table(4)
    before = table.clone()
    add(table[:, 1:3], {"score": torch.tensor([1.0, -2.0]), "rows": torch.tensor(5)})
    add(table[:, 1:3], {"max_score": torch.tensor([1e3, -1.0]), "max_logit": torch.tensor([-1.0, 1e4])})
    expected = before.clone()
    expected[ROW["score"], 1:3] += torch.tensor([1.0, -2.0])
    expected[ROW["rows"], 1:3] += 5
    expected[ROW["max_score"], 1] = 1e3
    expected[ROW["max_logit"], 2] = 1e4
    assert torch.equal(table, expected)


@pytest.mark.parametrize("lengths", [[1, 1, 1, 1, 1, 1], [1, 3, 2], [6]])
def test_pooling_adds_runs_of_heads_and_takes_their_largest(lengths):
    table = random_table(6)
    expected, start = [], 0
    for length in lengths:
        columns = table[:, start : start + length]
        expected.append(torch.cat([columns[: len(SUMS)].sum(1), columns[len(SUMS) :].amax(1)]))
        # Squares about a mean of its own for each head, and about that of all for the rest.
        pairs, score, square = (columns[ROW[name]] for name in ("pairs", "score", "score_square"))
        within = (square - score.square() / pairs).sum()
        expected[-1][ROW["score_square"]] = within + score.sum().square() / pairs.sum()
        start += length
    pooled = Pooled(table, torch.tensor(lengths))
    torch.testing.assert_close(
        torch.stack([pooled[name] for name in ROW]), torch.stack(expected, 1), rtol=1e-14, atol=0
    )


def test_maxima_are_raised_of_scores_and_of_logits():
    table = statistics.empty(2, torch.device("cpu"))
    scales = torch.tensor([[1.0, 1.0], [0.5, 3.0]])
    statistics.raise_maxima(table, torch.tensor([[4.0, 1.0], [2.0, 1.0], [6.0, 1.0]]), scales)
    statistics.raise_maxima(table, torch.tensor([[2.0, 2.0], [-1.0, -1.0]]), scales)  # without a bound
    expected = {"max_score": [4, 2], "max_positive_score": [2, 1], "max_score_bound": [6, 1]}
    expected |= {"max_logit": [2, 6], "max_positive_logit": [1, 3], "max_logit_bound": [3, 3]}
    assert {name: table[ROW[name]].tolist() for name in MAXIMA} == expected


def test_a_layer_may_be_on_another_device_than_the_table():
    table = statistics.empty(2, torch.device("meta"))
    statistics.add(table, "pairs", torch.ones(1, 2))
    statistics.raise_maxima(table, torch.ones(2, 2), torch.ones(2, 2))
    assert table.is_meta


@pytest.mark.parametrize("row", ["score", "max_score", "max_logit"])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_pooling_hides_no_bad_number(row, bad):
    table = random_table(6)
    table[ROW[row], 2] = bad
    finite = Statistics.from_table(table, torch.tensor([1, 3, 2])).finite
    assert finite.tolist() == [True, False, True]


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_adding_hides_no_bad_maximum(bad):
    table = random_table(1)
    for value in (bad, 1.0):
        statistics.raise_maxima(table, torch.full((2, 1), value), torch.ones(2, 1))
    assert not table[ROW["max_score"]].isfinite()


def test_a_maximum_of_all_rows_is_its_own_bound():
    table = statistics.empty(2, CPU)
    add(table, {"pairs": torch.ones(2), "max_score": torch.tensor([3.0, 4.0]), "max_logit": torch.tensor([5.0, 6.0])})
    add(table[:, 1:], {"max_score_bound": torch.tensor([7.0]), "max_logit_bound": torch.tensor([1.0])})
    measured = Statistics.from_table(table)
    assert measured.max_score_bound.tolist() == [3, 7]
    assert measured.max_logit_bound.tolist() == [5, 6]  # never below, by rounding


def test_statistics_are_those_of_the_raw_numbers(raw):
    samples, entropy, weighted, sensitivity = raw
    # Two micro-batches of different size.
    table = tabulate(raw, slice(0, 5))
    second = tabulate(raw, slice(5, None))
    add(table, {name: second[row] for name, row in ROW.items()})
    measured = Statistics.from_table(table)
    expected = {
        "count": torch.full((3,), 40.0, dtype=torch.float64),
        "mean": samples["std"].mean(1),
        "exact": torch.tensor([True] * 3),
        "max_score": samples["std"].abs().amax(1),
        "max_positive_score": samples["std"].amax(1),
        "max_score_bound": 3 * samples["std"].abs().amax(1),
        "max_logit": 2 * samples["std"].abs().amax(1),
        "max_positive_logit": 2 * samples["std"].amax(1),
        "max_logit_bound": 6 * samples["std"].abs().amax(1),
        "entropy": entropy.mean(1),
        "flat_entropy": 3 * entropy.mean(1),
        "sink": entropy.mean(1) / 9,
        "sensitivity": 2 * sensitivity,
        "finite": torch.tensor([True] * 3),
        **{name: x.std(1, correction=0) for name, x in samples.items()},
        **{name: weighted[row].sqrt() if name.endswith("std") else weighted[row] for row, name in WEIGHTED.items()},
    }
    assert expected.keys() == {field.name for field in fields(Statistics)}
    for name, value in expected.items():
        torch.testing.assert_close(
            getattr(measured, name), value, rtol=1e-12, atol=0, msg=lambda m, n=name: f"{n}: {m}"
        )


def table_of(scores):
    """The table of the raw scores `[heads, rows, keys]`."""
    flat = scores.flatten(1)
    table = statistics.empty(len(scores), CPU)
    sums = {"pairs": torch.tensor(flat.shape[1]), "score": flat.sum(1), "score_square": flat.square().sum(1)}
    row_square = (scores - scores.mean(-1, keepdim=True)).square().sum((1, 2))
    add(table, {**sums, "row_square": row_square})
    return table


@pytest.mark.parametrize("offset", [0.0, 3.0, 1e4])
def test_heads_that_differ_in_their_means_have_the_spread_of_each(offset):
    """What no softmax sees is in no std: offsets between heads in neither, those between rows not in that of rows."""
    generator = torch.Generator().manual_seed(2)
    noise = torch.randn(4, 6, 30, generator=generator, dtype=torch.float64)
    scores = noise + offset * torch.randn(4, 1, 1, generator=generator, dtype=torch.float64)
    layer = Statistics.from_table(table_of(scores), torch.tensor([4]))[0]
    torch.testing.assert_close(layer.std, noise.flatten(1).var(1, correction=0).mean().sqrt(), rtol=1e-6, atol=0)
    torch.testing.assert_close(layer.row_std, noise.var(2, correction=0).mean().sqrt(), rtol=1e-9, atol=0)
    torch.testing.assert_close(layer.mean, scores.mean(), rtol=1e-12, atol=0)
    scores = scores + offset * torch.randn(4, 6, 1, generator=generator, dtype=torch.float64)
    rows = Statistics.from_table(table_of(scores), torch.tensor([4]))[0]
    torch.testing.assert_close(rows.row_std, layer.row_std, rtol=1e-9, atol=0)
    assert rows.std > 0.5 * offset


def test_heads_are_weighted_by_their_pairs():
    wide = torch.tensor([[[0.0, 4.0]]], dtype=torch.float64)
    narrow = torch.tensor([[[1.0, 3.0, 1.0, 3.0, 1.0, 3.0]]], dtype=torch.float64)
    table = torch.cat([table_of(wide), table_of(narrow), statistics.empty(1, CPU)], 1)
    layer = Statistics.from_table(table, torch.tensor([3]))[0]
    assert layer.std.item() == layer.row_std.item() == pytest.approx(((2 * 4 + 6 * 1) / 8) ** 0.5)
    first, second, _ = Statistics.from_table(table, torch.tensor([1, 1, 1])).std.tolist()
    assert (first, second) == (2, 1)


def test_what_was_not_measured_is_nan():
    measured = Statistics.from_table(statistics.empty(2, CPU))
    known = {"count": 0, "sensitivity": 0, "exact": 1, "finite": 1}
    for field in fields(Statistics):
        value = getattr(measured, field.name)
        if field.name in known:
            assert value.tolist() == [known[field.name]] * 2
        else:
            assert value.isnan().all(), field.name


def test_rounding_cannot_make_the_spread_imaginary():
    table = statistics.empty(1, CPU)
    value = torch.tensor(0.1, dtype=torch.float64)
    # Three equal scores: the mean of the squares falls below the square of the mean.
    total, square = value + value + value, torch.nextafter(3 * value.square(), torch.tensor(0.0, dtype=torch.float64))
    add(table, {"pairs": torch.tensor(3), "score": total, "score_square": square})
    assert Statistics.from_table(table).std.tolist() == [0.0]


def test_exact_and_finite_are_told_for_each_unit():
    table = random_table(3)
    table[ROW["exact_pairs"]] = table[ROW["pairs"]]
    table[ROW["exact_pairs"], 1] -= 1
    table[ROW["entropy"], 2] = torch.nan
    measured = Statistics.from_table(table)
    assert measured.exact.tolist() == [True, False, True]
    assert measured.finite.tolist() == [True, True, False]


@pytest.mark.parametrize("index", [1, slice(1, 3)], ids=str)
def test_indexing_picks_units_in_every_field(index):
    table = random_table(3)
    part, whole = Statistics.from_table(table)[index], Statistics.from_table(table)
    for field in fields(Statistics):
        assert torch.equal(getattr(part, field.name), getattr(whole, field.name)[index])


def test_a_statistic_is_computed_when_it_is_asked_for():
    with Operations() as operations:
        found = Statistics.from_table(random_table(6), torch.tensor([4, 2]), lambda table: table)
        before = operations.calls.total()
        assert found.sensitivity is found.sensitivity
        assert operations.calls.total() - before == 2  # the sums of all rows, of a copy that lies head by head
    with pytest.raises(AttributeError, match="'Statistics' object has no attribute 'spread'"):
        _ = found.spread


def test_statistics_are_shown_as_plain_numbers_a_line_each():
    found = Statistics.from_table(random_table(2))
    heads, head = repr(found).splitlines(), repr(found[0]).splitlines()
    assert len(heads) == len(head) == len(fields(Statistics)) + 2
    assert [heads[0], head[0], heads[-1], head[-1]] == ["Statistics("] * 2 + [")"] * 2
    assert f"  std=[{found.std[0]:.5g}, {found.std[1]:.5g}]," in heads
    assert f"  std={found.std[0]:.5g}," in head
    assert f"  exact={bool(found.exact[0])}," in head


def test_a_change_of_a_statistic_leaves_the_others():
    found = Statistics.from_table(random_table(3))
    changed = replace(found, std=torch.zeros(3))
    assert changed.std.tolist() == [0, 0, 0]
    assert torch.equal(changed.mean, found.mean)


def test_there_is_a_formula_for_every_statistic():
    assert [field.name for field in fields(Statistics)] == list(FORMULAS)


def test_averages_over_components_are_those_of_a_table_that_is_filled_in_when_they_are_asked_for():
    table, other = random_table(4, seed=1), random_table(4, seed=2)
    lengths, asked = torch.tensor([1, 3]), []
    found = Statistics.from_table(table, lengths, lambda: asked.append(True) or other)
    assert torch.equal(found.mean, Statistics.from_table(table, lengths).mean)
    assert not asked
    assert torch.equal(found.component_variance_q * found._pooled["queries"], Pooled(other, lengths)["query_variance"])
    for name in FROM_MOMENTS:
        assert torch.equal(found._pooled[name], Pooled(other, lengths)[name])
    assert len(asked) == 1


@pytest.fixture
def ranks(monkeypatch):
    """Call a function with each of two ranks, in threads that meet where they add up; real ranks: tests/distributed."""
    own, meeting, shares = threading.local(), threading.Barrier(2, timeout=10), [None, None]

    def all_reduce(tensor):
        shares[own.rank] = tensor.clone()
        meeting.wait()
        tensor.copy_(shares[0] + shares[1])

    def run(rank, function):
        own.rank = rank
        return function(rank)

    fake = dict(is_initialized=lambda: True, get_world_size=lambda: 2, get_rank=lambda: own.rank, all_reduce=all_reduce)
    for name, function in fake.items():
        monkeypatch.setattr(torch.distributed, name, function)
    with ThreadPoolExecutor(2) as pool:
        yield lambda function: list(pool.map(run, range(2), [function] * 2))


def test_two_ranks_reduce_to_one_table_of_everything(raw, ranks):
    def reduce(rank):
        table = tabulate(raw, [slice(0, 9), slice(9, None)][rank])  # unequal shares of the samples
        window = torch.ones(2, table.shape[1], dtype=torch.float64) * (1 + rank)
        age = torch.arange(table.shape[1]) * (1 - rank)
        default = torch.full(table.shape[1:], 1 / 3)
        default[rank] = torch.nan  # a layer that this rank has not used
        default[2] = torch.nan  # one that neither has
        moments = torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]], dtype=torch.float64) * 10**rank
        alone = torch.arange(table.shape[1]) == rank  # a head that this rank alone leaves alone
        return statistics.all_reduce(table, window, moments, default, age, alone)

    (first, *pooled, moments, default, age, alone), of_other = ranks(reduce)
    second, *others, moments_other, default_other, _, alone_other = of_other
    assert alone.tolist() == alone_other.tolist() == [head < 2 for head in range(first.shape[1])]
    assert torch.equal(first, second)
    assert [x.tolist() for x in pooled] == [x.tolist() for x in others] == [[[3.0] * first.shape[1]] * 2]
    assert torch.equal(age, torch.arange(first.shape[1]))
    assert moments.tolist() == moments_other.tolist() == [[11.0, 22.0, 33.0], [44.0, 55.0, 66.0]]
    for of_rank in (default, default_other):
        assert of_rank[2].isnan()
        assert torch.equal(of_rank[[0, 1]], torch.full((2,), 1 / 3))
    expected = tabulate(raw)
    expected[ROW["sensitivity"]] *= 2
    torch.testing.assert_close(first, expected, rtol=1e-12, atol=1e-12)


def test_the_geometric_mean_of_runs():
    values = torch.tensor([0.1, 0.1, 0.1, 2.0, 8.0, 5.0])
    mean = statistics.geometric_mean(values, torch.tensor([3, 2, 1]), torch.tensor([0, 0, 0, 1, 1, 2]))
    assert mean[1].item() == pytest.approx(4.0)
    assert torch.equal(mean[[0, 2]], values[[0, 5]])  # bit by bit, where all agree
