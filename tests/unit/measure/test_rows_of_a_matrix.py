"""Sums over scores that exist, against the pairs one by one."""

import math

import pytest
import torch

from betahook.measure import rows
from support.matrices import named


def pair_sums(scores, logits, allowed):
    counts, sums, largest = rows.pair_sums(scores, logits, allowed)
    pairs, exact, with_keys, flat_entropy = counts
    assert torch.equal(pairs, exact)
    absolute, positive = largest
    others = {"max_score": absolute, "max_positive_score": positive}
    return named(pairs, sums, rows=with_keys, entropy=sums[3], sink=sums[4], flat_entropy=flat_entropy, **others)


def causal(*sizes):
    return torch.ones(*sizes, dtype=torch.bool).tril()


def test_a_large_mean_leaves_the_digits_of_the_spread():
    scores = torch.randn(2, 3, 20, 20, generator=torch.Generator().manual_seed(0)) + 1e4
    allowed = causal(2, 3, 20, 20)
    sums = pair_sums(scores, scores, allowed)
    mean = sums.score / sums.pairs
    expected = torch.stack([head[allowed[:, 0]] for head in scores.double().unbind(1)])
    torch.testing.assert_close(mean, expected.mean(1), rtol=1e-9, atol=0)
    std = (sums.score_square / sums.pairs - mean**2).sqrt()
    torch.testing.assert_close(std, expected.std(1, correction=0), rtol=1e-5, atol=0)


def test_the_spread_within_rows_leaves_their_offsets_out():
    generator = torch.Generator().manual_seed(0)
    spread = torch.randn(2, 3, 20, 20, generator=generator)
    scores = spread + 1e4 * torch.randn(2, 3, 20, 1, generator=generator)
    allowed = causal(2, 3, 20, 20)
    sums = pair_sums(scores, scores, allowed)
    rows = [[row[: index + 1] for index, row in enumerate(matrix)] for matrix in scores.double().flatten(0, 1)]
    squares = torch.tensor([sum((row - row.mean()).square().sum() for row in matrix) for matrix in rows])
    torch.testing.assert_close(sums.row_square, squares.view(2, 3).sum(0).double(), rtol=1e-5, atol=0)


def test_a_row_without_a_key_has_no_entropy():
    allowed = causal(1, 1, 3, 3)
    allowed[..., 1, :] = False
    logits = torch.zeros(1, 1, 3, 3)
    sums = pair_sums(logits, logits.masked_fill(~allowed, -math.inf), allowed)
    assert sums.rows.tolist() == [2]
    assert sums.entropy.tolist() == sums.flat_entropy.tolist() == pytest.approx([math.log(3)])


def test_the_largest_score_may_be_negative():
    scores = torch.tensor([[[[1.0, 2.0], [-5.0, 3.0]], [[1.0, -9.0], [4.0, 3.0]]]])
    sums = pair_sums(scores, scores, causal(1, 2, 2, 2))
    assert sums.max_score.tolist() == [5, 4]
    assert sums.max_positive_score.tolist() == [3, 4]
