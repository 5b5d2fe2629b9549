"""Correlations against numpy's, token by token and component by component."""

import math

import numpy as np
import pytest
import torch

from betahook.measure.correlations import Correlations

BATCH, HEADS, GROUPS, LENGTH, WIDTH = 3, 4, 2, 50, 5


def tokens(heads, seed=0, length=LENGTH):
    generator = torch.Generator().manual_seed(seed)
    mix = torch.randn(WIDTH, WIDTH, generator=generator)
    shared = torch.randn(BATCH, heads, 1, WIDTH, generator=generator)  # of all tokens of a sequence
    return torch.randn(BATCH, heads, length, WIDTH, generator=generator) @ mix + shared + 3


def by_head(values, head, used):
    """`[tokens that are used, d]` of one head."""
    return values[:, head][used].double().numpy()


def root_mean_square(blocks, count):
    return math.sqrt(max(0.0, np.mean([np.mean(block**2) for block in blocks]) - 1 / count))


@pytest.mark.parametrize("padded", [False, True])
def test_components_of_q_of_k_and_of_both(padded):
    query, key = tokens(HEADS), tokens(GROUPS, seed=1)
    key = key + query[:, ::2]
    used = torch.ones(BATCH, LENGTH, dtype=torch.bool)
    if padded:
        used[1, -20:] = False
    valid = (used, used) if padded else (None, None)
    found, count = Correlations.of(query, key, valid), int(used.sum())
    off = ~np.eye(WIDTH, dtype=bool)
    q, k = ([by_head(x, head, used) for head in range(x.shape[1])] for x in (query, key))
    within = [np.corrcoef(x.T)[off] for x in q]
    assert found.within_q == pytest.approx(root_mean_square(within, count), rel=1e-4)
    assert found.within_k == pytest.approx(root_mean_square([np.corrcoef(x.T)[off] for x in k], count), rel=1e-4)
    between = [np.corrcoef(q[head].T, k[head // 2].T)[:WIDTH, WIDTH:] for head in range(HEADS)]
    assert found.between == pytest.approx(root_mean_square(between, count), rel=1e-4)
    variances = [x.var(0) for x in q]
    assert found.variance_q == pytest.approx((np.min(variances), np.max(variances)), rel=1e-4)


def test_components_that_never_change_correlate_with_nothing():
    """Nor if their mean is no number of float32, as behind a projection that is a bias alone."""
    query = tokens(HEADS)
    query[..., :2] = torch.tensor([0.1, 7.7])
    zeros = query.clone()
    zeros[..., :2] = 0
    found, expected = (Correlations.of(x, x, (None, None)) for x in (query, zeros))
    for name in ("within_q", "between", "tokens_q"):
        assert getattr(found, name) == pytest.approx(getattr(expected, name), rel=1e-5)


def test_tokens_of_one_sequence():
    query = tokens(HEADS)
    values = query.double()
    centred = (values - values.mean((0, 2), keepdim=True)) / values.std((0, 2), correction=0, keepdim=True)
    products = centred[:, :, :, None] * centred[:, :, None]
    other = ~torch.eye(LENGTH, dtype=torch.bool)
    expected = products[:, :, other].mean().item()
    found = Correlations.of(query, query, (None, None))
    assert expected > 0.1
    assert found.tokens_q == pytest.approx(expected, rel=1e-4)
    assert found.tokens_k == found.tokens_q


def test_what_cannot_be_told_is_nan():
    query, key = tokens(HEADS), tokens(HEADS, length=7)
    assert math.isnan(Correlations.of(query, key, (None, None)).between)
    assert math.isnan(Correlations.of(query[:1], key[:1], (None, None)).tokens_q)
    only = torch.tensor([[True], [False], [False]]).expand(BATCH, LENGTH)  # the others are padding from end to end
    assert math.isnan(Correlations.of(query, query, (only, only)).tokens_q)


def test_a_component_that_never_changes_correlates_with_nothing():
    query = tokens(HEADS)
    query[..., 0] = 2.0
    found = Correlations.of(query, query, (None, None))
    assert 0 <= found.within_q <= 1
    assert found.variance_q[0] == 0
