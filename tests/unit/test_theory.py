"""The predictions against closed forms, enumeration and simulation."""

import itertools
import math

import pytest
import torch

from betahook import theory


@pytest.fixture
def normal():
    """Standard normal draws in float64, reproducible."""
    generator = torch.Generator().manual_seed(1)
    return lambda *shape: torch.randn(shape, generator=generator, dtype=torch.float64)


def test_classic_is_the_root_of_the_head_dimension():
    assert theory.classic_std(torch.tensor([1.0, 20.0, 64.0])).tolist() == pytest.approx([1, math.sqrt(20), 8])


@pytest.mark.parametrize("head_dim", [4, 64])
def test_classic_std_is_seen_in_standard_normal_scores(head_dim, normal):
    scores = (normal(40_000, head_dim) * normal(40_000, head_dim)).sum(-1)
    # The kurtosis of a score is at most 9: four standard errors of the variance are 4 * sqrt(8 / 40,000) = 6 %.
    assert theory.classic_std(torch.tensor(float(head_dim))).item() == pytest.approx(scores.std().item(), rel=0.03)


def test_projected_variance_closed_form():
    result = theory.projected_variance(torch.tensor([100.0, 4.0]), torch.tensor([1.0, 3.0]), torch.tensor([0.1, 0.5]))
    assert result.tolist() == pytest.approx([1, 9])


def test_projected_variance_is_seen_in_random_projections(normal):
    width, input_std, weight_std = 48, 0.7, 0.3
    inputs = (torch.rand(200, width, generator=torch.Generator().manual_seed(2)).double() - 0.5) * math.sqrt(12)
    projected = (input_std * inputs) @ (weight_std * normal(width, 500))
    expected = theory.projected_variance(*torch.tensor([width, input_std, weight_std]))
    assert projected.var().item() == pytest.approx(expected.item(), rel=0.03)


def test_predicted_std_closed_form():
    result = theory.predicted_std(torch.tensor([16.0, 9.0]), torch.tensor([1.0, 4.0]), torch.tensor([1.0, 0.25]))
    assert result.tolist() == pytest.approx([4, 3])


def test_predicted_std_is_seen_in_scores_of_random_projections(normal):
    width, head_dim, input_std, query_std, key_std = 64, 32, 1.3, 0.2, 0.05
    squares = []
    for _ in range(200):
        inputs = input_std * normal(2, 16, width)
        query, key = inputs[0] @ (query_std * normal(width, head_dim)), inputs[1] @ (key_std * normal(width, head_dim))
        squares.append((query @ key.T).square().mean())
    variances = (theory.projected_variance(*torch.tensor([width, input_std, std])) for std in (query_std, key_std))
    predicted = theory.predicted_std(torch.tensor(float(head_dim)), *variances)
    assert torch.stack(squares).mean().sqrt().item() == pytest.approx(predicted.item(), rel=0.03)


MOMENTS = {
    # Mean of q, deviation of q, mean of k, deviation of k; one number a component.
    "centred": ([0, 0, 0], [1, 2, 0.5], [0, 0, 0], [3, 1, 0.2]),
    "q off centre": ([1, -2, 0.5], [1, 2, 0.5], [0, 0, 0], [3, 1, 0.2]),
    "both off centre": ([1, -2, 0.5], [1, 2, 0.5], [-4, 0.1, 2], [3, 1, 0.2]),
    "constant": ([1, -2, 0.5], [0, 0, 0], [-4, 0.1, 2], [0, 0, 0]),
    "constant q": ([1, -2, 0.5], [0, 0, 0], [-4, 0.1, 2], [3, 1, 0.2]),
}


@pytest.mark.parametrize("case", MOMENTS)
def test_independent_variance_equals_an_enumeration(case):
    query_mean, query_std, key_mean, key_std = (torch.tensor(x, dtype=torch.float64) for x in MOMENTS[case])
    # Every component takes mean - std or mean + std: all combinations are equally likely, and these are all of them.
    signs = torch.tensor(list(itertools.product((-1, 1), repeat=6)), dtype=torch.float64)
    scores = ((query_mean + query_std * signs[:, :3]) * (key_mean + key_std * signs[:, 3:])).sum(-1)
    result = theory.independent_variance(query_mean, query_std.square(), key_mean, key_std.square())
    assert result.item() == pytest.approx(scores.var(correction=0).item(), rel=1e-12, abs=1e-12)


def test_independent_variance_is_seen_in_independent_components(normal):
    query_mean, key_mean = normal(8), normal(8)
    query_std, key_std = normal(8).abs(), normal(8).abs()
    scores = ((query_mean + query_std * normal(100_000, 8)) * (key_mean + key_std * normal(100_000, 8))).sum(-1)
    result = theory.independent_variance(query_mean, query_std.square(), key_mean, key_std.square())
    assert result.item() == pytest.approx(scores.var().item(), rel=0.04)


def test_independent_variance_of_standard_components_is_classic():
    zero, one = torch.zeros(2, 3, 20), torch.ones(2, 3, 20)
    result = theory.independent_variance(zero, one, zero, one)
    assert result.shape == (2, 3)
    torch.testing.assert_close(result, theory.classic_std(torch.tensor(20.0)).square().expand(2, 3))


@pytest.mark.parametrize("shape", [(20, 20), (64, 256), (300, 100)])
def test_spectral_ratio_of_random_entries_is_about_one(shape, normal):
    weight = 0.02 * normal(*shape)
    exact = torch.linalg.matrix_norm(weight, 2) / weight.square().mean().sqrt() / sum(math.sqrt(x) for x in shape)
    assert 0.8 < theory.spectral_ratio(weight).item() <= exact.item() < 1.1


def test_spectral_ratio_is_exact_where_one_singular_value_stands_out(normal):
    weight = normal(64, 128) + torch.outer(normal(64), normal(128))
    exact = torch.linalg.matrix_norm(weight, 2) / weight.square().mean().sqrt() / (8 + math.sqrt(128))
    assert exact > 2
    assert theory.spectral_ratio(weight).item() == pytest.approx(exact.item(), rel=1e-3)
    assert theory.spectral_ratio(weight.bfloat16()).item() == pytest.approx(exact.item(), rel=1e-2)


def test_spectral_ratio_of_zeros_is_zero():
    """A fresh query projection may be zero, and is then no sign of training."""
    assert theory.spectral_ratio(torch.zeros(4, 4)) == 0
    assert theory.spectral_ratio(torch.full((4, 4), torch.nan)).isnan()
