"""Scores that are assigned into a tensor, which may have held others."""

import pytest
import torch

import betahook
from support.attention import HEADS, LENGTH, components
from support.mixing import ROOT, check_doubled, check_measured, make

HALF = LENGTH // 2


def scaled_in_place(q, k, v):
    scores = q @ k.mT
    scores[:] *= ROOT
    return scores.softmax(-1) @ v


def replaced(q, k, v):
    scores = q @ k.mT
    scores[..., :LENGTH] = scores * ROOT
    return scores.softmax(-1) @ v


def sample_by_sample(q, k, v):
    scores, outputs = q.new_empty(HEADS, LENGTH, LENGTH), []
    for own_q, own_k, own_v in zip(q, k, v, strict=True):
        scores[...] = own_q @ own_k.mT * ROOT
        outputs.append(scores.softmax(-1) @ own_v)
    return torch.stack(outputs)


@pytest.mark.parametrize("mix", [scaled_in_place, replaced, sample_by_sample])
def test_scores_that_are_overwritten_count_no_more(mix, x):
    model = make(lambda module, q, k, v: mix(q, k, v))
    check_doubled(model, x)
    check_measured(model, x)
    with betahook.attach(model, controller="monitor") as hook:
        model(x)
        assert hook.layers["1"].beta_default == pytest.approx(ROOT)


def test_scales_that_differ_are_refused_in_one_tensor_too(x):
    def mix(module, q, k, v):
        scores = q.new_empty(*q.shape[:-1], LENGTH)
        scores[:] = q @ k.mT * ROOT
        first = scores.softmax(-1)
        scores[:] = q @ k.mT * (2 * ROOT)
        return (first + scores.softmax(-1)) @ v

    with betahook.attach(make(mix), controller="monitor") as hook:
        hook.model(x)
        assert "receive scores that are scaled differently" in hook.layers["1"].refusal


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


def test_scores_that_are_not_overwritten_still_count(x):
    def mix(module, q, k, v):
        scores, samples = q @ k.mT * ROOT, torch.tensor([0, 0, 1])  # as many as there are, and yet not all
        scores[samples] = scores[samples]
        return scores.softmax(-1) @ v

    check_measured(make(mix), x)


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
