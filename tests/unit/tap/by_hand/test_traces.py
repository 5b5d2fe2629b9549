"""Scores and weights that a module changes in unusual ways are followed to the end."""

import gc

import pytest
import torch
import torch.nn.functional as F
import torch.utils.checkpoint

import betahook
from betahook.tap.by_hand.forward import FollowedForward
from support.attention import HEADS, LENGTH
from support.mixing import ROOT, check_doubled, check_measured, make


def halves_in_place(module, q, k, v):
    scores = (q * ROOT) @ k.mT
    half = len(scores) // 2
    scores[half:] = scores[half:].softmax(-1)
    scores[:half] = scores[:half].softmax(-1)
    return scores @ v


def samples_in_place(module, q, k, v):
    scores = q @ k.mT * ROOT
    for sample in range(len(scores)):
        scores[sample, :] = scores[sample, :].softmax(-1)
    gated = [scores[sample, :] * module.temperature for sample in range(len(scores))]
    return torch.stack([(weights + weights**2) @ values for weights, values in zip(gated, v, strict=True)])


def places_in_place(module, q, k, v):
    scores = q @ k.mT * ROOT
    for places in (torch.tensor([2, 0]), torch.tensor([1])):
        scores[places] = scores[places].softmax(-1)
    return scores @ v


@pytest.mark.parametrize("way", [halves_in_place, samples_in_place, places_in_place])
def test_a_softmax_in_place_of_its_scores(x, way):
    check_doubled(make(way), x)
    check_measured(make(way), x)


def top_three(a):
    values, indices = a.topk(3, -1)
    return torch.zeros_like(a).scatter(-1, indices, values)


AFTERWARDS = {
    "normalised": lambda module, a: F.normalize(a, p=1, dim=-1),
    "squared": lambda module, a: a.square(),
    "detached": lambda module, a: a.detach(),
    "in float64": lambda module, a: a.double().float(),
    "taken from one": lambda module, a: 1 - a,
    "rectified": lambda module, a: F.relu(a - 0.05),
    "thresholded": lambda module, a: F.threshold(a, 0.05, 0.0),
    "largest three": lambda module, a: top_three(a),
    "linear over heads": lambda module, a: module.mixer(a.permute(0, 2, 3, 1)).permute(0, 3, 1, 2),
    "convolution over heads": lambda module, a: module.conv(a),
    "einsum over heads": lambda module, a: torch.einsum("bhij,hg->bgij", a, module.table),
    "computed mixing": lambda module, a: torch.einsum("bhij,hg->bgij", a, module.table.softmax(-1)),
    "power": lambda module, a: a @ a,
    "sorted": lambda module, a: a.sort(-1).values,
    "normalised over queries": lambda module, a: a / a.sum(-2, keepdim=True),
    "layer norm over heads": lambda module, a: F.layer_norm(a.permute(0, 2, 3, 1), [HEADS]).permute(0, 3, 1, 2),
    "cumulated": lambda module, a: a.cumsum(-1),
}


@pytest.mark.parametrize("way", AFTERWARDS)
def test_weights_are_followed_by_any_operation(x, way):
    check_doubled(make(lambda module, q, k, v: AFTERWARDS[way](module, (q @ k.mT * ROOT).softmax(-1)) @ v), x)


def bias_on_a_part(scores):
    scores[:, :, :, 3:] += torch.linspace(-2, 2, LENGTH - 3)
    return scores


def two_biases_on_parts(scores):
    scores[:, 1] += torch.linspace(-2, 2, LENGTH)
    scores[:, 2:] -= torch.linspace(-1, 1, LENGTH)
    return scores


def biased_in_another_shape(scores):
    """All of them, as MViT adds relative positions."""
    biased = scores[:, :, 0:, 0:].unflatten(-1, (2, -1)) + torch.tensor([[-2.0], [2.0]])
    scores[:, :, 0:, 0:] = biased.flatten(-2)
    return scores


@pytest.mark.parametrize("way", [bias_on_a_part, two_biases_on_parts, biased_in_another_shape])
def test_a_part_of_the_scores_that_is_changed_in_its_place(x, way):
    model = make(lambda module, q, k, v: way(q * ROOT @ k.mT).softmax(-1) @ v)
    check_doubled(model, x)
    check_measured(model, x)


def test_a_later_product_of_activations_is_none_of_scores(x):
    def mix(module, q, k, v):
        values = (q @ k.mT * ROOT).softmax(-1) @ v
        return values + 0.01 * (values @ v.mT) @ v

    check_doubled(make(mix), x)


KEYS_OF_EACH_QUERY = {
    "heads": "bhid,bhijd->bhij",
    "heads behind the queries": "bihd,bijhd->bihj",
}


@pytest.mark.parametrize("equation", KEYS_OF_EACH_QUERY.values(), ids=KEYS_OF_EACH_QUERY)
def test_keys_of_each_query(x, equation):
    """As those that a memory finds, put beside the common ones."""

    def mix(module, q, k, v):
        own = k[:, :, None].roll(1, 3).expand(-1, -1, LENGTH, -1, -1)
        if equation == KEYS_OF_EACH_QUERY["heads"]:
            scores = torch.einsum(equation, q, own)
        else:
            scores = torch.einsum(equation, q.transpose(1, 2), own.permute(0, 2, 3, 1, 4)).transpose(1, 2)
        return (torch.cat([q @ k.mT, scores], -1) * ROOT).softmax(-1) @ torch.cat([v, v], 2)

    check_doubled(make(mix), x)
    check_measured(make(mix), x, times=2)


def test_a_first_forward_goes_away_by_itself(x):
    """It holds nodes of autograd, and so what is saved for the backward."""
    model = make(lambda module, q, k, v: (q @ k.mT * ROOT).softmax(-1) @ v)
    with betahook.attach(model, controller="monitor"):
        gc.collect()
        gc.disable()
        try:
            model(x)
            assert not any(isinstance(each, FollowedForward) for each in gc.get_objects())
        finally:
            gc.enable()


@pytest.mark.parametrize("shared", ["q", "k"])
def test_a_kernel_may_get_one_query_or_one_key_for_all_sequences(x, shared):
    def operands(q, k):
        return (q[:1], k) if shared == "q" else (q, k[:1])

    def fused(module, q, k, v):
        return F.scaled_dot_product_attention(*operands(q, k), v)

    model = make(fused)
    with betahook.attach(model, controller="monitor") as hook:
        model(x)
        statistics = hook.layers["1"].statistics
    hidden, attention = model[0](x), model[1]
    q, k = operands(*(attention.split(layer(hidden)).double() for layer in (attention.q_proj, attention.k_proj)))
    scores = q @ k.mT
    assert statistics.count == scores.numel()
    assert statistics.std == pytest.approx(scores.var((0, 2, 3), correction=0).mean().sqrt().item(), rel=1e-5)
