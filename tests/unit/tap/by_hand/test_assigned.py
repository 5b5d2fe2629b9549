"""Scores that are assigned into a tensor, which may have held others."""

import pytest
import torch

import betahook
from support.attention import HEADS, LENGTH, components
from support.mixing import ROOT, check_doubled, check_measured, make

HALF = LENGTH // 2


def halves_of_keys(q, k, v):
    """The first half is a product of k and q."""
    scores = q.new_empty(*q.shape[:-1], LENGTH)
    scores[..., :HALF] = (k[:, :, :HALF] @ q.mT).mT * ROOT
    scores[..., HALF:] = q @ k[:, :, HALF:].mT * ROOT
    return scores.softmax(-1) @ v


def halves_of_queries(q, k, v):
    """Of one sample after the other."""
    scores, outputs = q.new_empty(HEADS, LENGTH, LENGTH), []
    for own_q, own_k, own_v in zip(q, k, v, strict=True):
        scores[:, :HALF] = own_q[:, :HALF] @ own_k.mT * ROOT
        scores[:, HALF:] = own_q[:, HALF:] @ own_k.mT * ROOT
        outputs.append(scores.softmax(-1) @ own_v)
    return torch.stack(outputs)


def mean_square(tensor):
    """Of the means of the components of each head."""
    return tensor.mean((0, 2)).square().mean(-1)


@pytest.mark.parametrize(("mix", "of_q", "of_k"), [(halves_of_keys, 0, HALF), (halves_of_queries, HALF, 0)])
def test_components_are_those_of_the_last_product(mix, of_q, of_k, x):
    model = make(lambda module, q, k, v: mix(q, k, v))
    check_doubled(model, x)
    check_measured(model, x)
    with betahook.attach(model, controller="monitor") as hook:
        model(x)
        found = hook.layers["1"].head_statistics
        q, k = components(model, x)
    torch.testing.assert_close(found.component_mean_square_q, mean_square(q[:, :, of_q:]), rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(found.component_mean_square_k, mean_square(k[:, :, of_k:]), rtol=1e-4, atol=1e-6)
