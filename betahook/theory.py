"""The formulas of the paper: the standard deviation that theory predicts for the scores.

There are three predictions, from the strongest to the weakest assumptions. Their gaps to the measured value show which
assumption of W. Chuang, "The scaling factor in self-attention" (2023), does not hold:

(i)   the shapes: `d_k` components per head;
(ii)  unit variance of the projections of the input;
(iii) zero mean and unit variance of each component of q and k;
(iv)  no covariance among the components.

Every variance is a population variance. Tensors in, tensors out; controllers, metrics and the audit call these.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.linalg import vector_norm

POWER_ITERATIONS = 10


def classic_std(head_dim: Tensor) -> Tensor:
    """Score std for zero means, unit variances and no covariance, `sqrt(d_k)`: the reason for `beta = 1/sqrt(d_k)`."""
    return head_dim.sqrt()


def projected_variance(width: Tensor, input_std: Tensor, weight_std: Tensor) -> Tensor:
    """Variance of a projected component, `d_x sigma_X^2 sigma_W^2`; assumption (ii) says 1."""
    return width * (input_std * weight_std).square()


def predicted_std(head_dim: Tensor, query_variance: Tensor, key_variance: Tensor) -> Tensor:
    """Score std with assumption (ii) relaxed, `sqrt(d_k (d_x sigma_X^2 sigma_Wq^2)(d_x sigma_X^2 sigma_Wk^2))`.

    The two variances are those of `projected_variance` for W_q and W_k.
    """
    return (head_dim * query_variance * key_variance).sqrt()


def independent_variance(query_mean: Tensor, query_variance: Tensor, key_mean: Tensor, key_variance: Tensor) -> Tensor:
    """Variance of `q . k` for independent components with the given moments: assumption (iii) relaxed.

    `sum_i [(var q_i + mu_q,i^2)(var k_i + mu_k,i^2) - mu_q,i^2 mu_k,i^2]`; arguments `[..., d_k]`, result `[...]`.
    """
    return product_variance(query_mean, query_variance, key_mean, key_variance).sum(-1)


def product_variance(query_mean: Tensor, query_variance: Tensor, key_mean: Tensor, key_variance: Tensor) -> Tensor:
    """Variance of the product of two independent numbers with the given moments; the shapes broadcast."""
    query_mean_square, key_mean_square = query_mean.square(), key_mean.square()
    squares = (query_variance + query_mean_square) * (key_variance + key_mean_square)
    return squares - query_mean_square * key_mean_square


def spectral_ratio(weight: Tensor) -> Tensor:
    """Ratio of the largest singular value of `weight [m, n]` to that of a random matrix of its size and std: a scalar.

    A matrix of independent entries with mean 0 and standard deviation sigma has `sigma (sqrt(m) + sqrt(n))` in the
    limit of large matrices (Bai and Yin, 1993). Power iteration approaches the ratio from below: it is 0.85 to 1.05 for
    random entries, soon 2 and more for weights that have learned, whose first singular values stand out, and 0 for a
    matrix of zeros.
    """
    weight = weight.to(torch.promote_types(weight.dtype, torch.float32))
    rows, columns = weight.shape
    tiny = torch.finfo(weight.dtype).tiny
    vector = torch.arange(columns, device=weight.device, dtype=weight.dtype).cos()  # any vector without symmetry
    for _ in range(POWER_ITERATIONS):
        vector = weight.mT @ (weight @ (vector / vector_norm(vector).clamp(min=tiny)))
    spread = weight.square().mean().sqrt()
    ratio: Tensor = vector_norm(vector).sqrt() / (spread * (math.sqrt(rows) + math.sqrt(columns))).clamp(min=tiny)
    return ratio
