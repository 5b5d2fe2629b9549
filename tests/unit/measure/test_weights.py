"""Sums over the entries of W_q and W_k."""

import pytest
import torch

from betahook.measure import weights


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_sums_of_entries(dtype, transposed):
    weight = torch.randn(3, 4, 50, generator=torch.Generator().manual_seed(1)).to(dtype) + 0.5
    if transposed:  # as `Conv1D` keeps it
        weight = weight.permute(2, 0, 1).contiguous().permute(1, 2, 0)
    count, total, square = (x.double() for x in weights.entry_sums(weight))
    heads = weight.double().flatten(1)
    assert count.tolist() == [200] * 3
    torch.testing.assert_close(total / count, heads.mean(1), rtol=1e-5, atol=0)
    std = (square / count - (total / count).square()).sqrt()
    torch.testing.assert_close(std, heads.std(1, correction=0), rtol=1e-5, atol=0)
