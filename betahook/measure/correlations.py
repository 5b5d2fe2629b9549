"""Correlations among the components of q and k, and among tokens: the paper's assumptions (iii) and (iv) to the letter.

`betahook.report.audit` measures them in one forward. No step does, since they need `d_k x d_k` covariance matrices.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from betahook.measure.dtypes import at_least_float32


@dataclass(frozen=True)
class Correlations:
    """Correlations of one layer in one forward, over the tokens that its mask allows to take part.

    Variances are population variances. Correlations are Pearson's; `within_q`, `within_k` and `between` are root mean
    squares over pairs of components and over heads, minus what the same number of independent tokens gives by chance.

    Attributes:
        variance_q, variance_k: (iii) smallest and largest variance of a component, assumed to be 1.
        within_q, within_k: (iv) correlation of two components of one q, or of one k, assumed to be 0.
        between: (iv) correlation of a component of q with one of k, of the same token; NaN if q and k have different
            numbers of tokens.
        tokens_q, tokens_k: (iv) mean correlation of a component at two tokens of one sequence, assumed to be 0; NaN
            with a single sequence, whose mean cannot be distinguished from the overall mean.
    """

    variance_q: tuple[float, float]
    variance_k: tuple[float, float]
    within_q: float
    within_k: float
    between: float
    tokens_q: float
    tokens_k: float

    @classmethod
    def of(cls, query: Tensor, key: Tensor, valid: tuple[Tensor | None, Tensor | None]) -> Correlations:
        """Measure `query [batch, heads, queries, d_k]` and `key [batch, groups, keys, d_k]` at their `valid` tokens."""
        q, k = (_Standardised.of(tokens, used) for tokens, used in zip((query, key), valid, strict=True))
        return cls(
            variance_q=q.range,
            variance_k=k.range,
            within_q=_correlation(q, q, off_diagonal=True),
            within_k=_correlation(k, k, off_diagonal=True),
            between=_correlation(q, k) if q.values.shape[2] == k.values.shape[2] else torch.nan,
            tokens_q=q.between_tokens(),
            tokens_k=k.between_tokens(),
        )


@dataclass(frozen=True)
class _Standardised:
    """Components with mean 0 and variance 1 each, `[batch, heads, tokens, d_k]`, zero for tokens that take no part."""

    values: Tensor
    used: Tensor
    variance: Tensor

    @classmethod
    def of(cls, tokens: Tensor, valid: Tensor | None) -> _Standardised:
        tokens = at_least_float32(tokens)
        batch, _, length, _ = tokens.shape
        used = tokens.new_ones(batch, length) if valid is None else valid.expand(batch, -1).to(tokens)
        weight, count = used[:, None, :, None], used.sum()
        mean = (tokens * weight).sum((0, 2), keepdim=True) / count
        centred = (tokens - mean) * weight
        variance = centred.square().sum((0, 2), keepdim=True) / count
        # A constant component correlates with nothing, nor does one that varies only by the rounding of its mean.
        changes = variance.sqrt() > 16 * torch.finfo(tokens.dtype).eps * mean.abs()
        return cls((centred / variance.sqrt()).where(changes, 0), used, variance)

    @property
    def range(self) -> tuple[float, float]:
        """Smallest and largest variance of a component of any head."""
        return self.variance.min().item(), self.variance.max().item()

    def between_tokens(self) -> float:
        """Mean correlation of a component at two tokens of a sequence, over all pairs of them."""
        lengths = self.used.sum(1)
        if int((lengths > 0).sum()) < 2:
            return torch.nan
        pairs = (lengths * (lengths - 1)).sum()
        products = self.values.sum(2).square().sum(0) - self.values.square().sum((0, 2))
        return float((products / pairs).mean())


def _correlation(one: _Standardised, other: _Standardised, *, off_diagonal: bool = False) -> float:
    """Root mean square correlation of components at the same token, minus what as many independent tokens give."""
    group = one.values.shape[1] // other.values.shape[1]
    count = (one.used * other.used).sum()
    matrix = torch.einsum("bhti,bhtj->hij", one.values, other.values.repeat_interleave(group, 1)) / count
    squares = matrix.square()
    width = squares.shape[-1]
    total = squares.sum((1, 2))
    if off_diagonal:
        total, width = total - squares.diagonal(dim1=1, dim2=2).sum(1), width - 1
    mean = total / (squares.shape[1] * max(width, 1))
    return float((mean.mean() - 1 / count).clamp(min=0).sqrt())
