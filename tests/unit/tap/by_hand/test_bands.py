"""Mask tensors that a user gives to `F.scaled_dot_product_attention`: those with a structure are measured in full."""

import itertools
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention.bias import causal_lower_right, causal_upper_left

import betahook
from betahook.measure import masks
from betahook.measure.masks import Band
from betahook.tap.kernels import find_band
from support.attention import HEADS, WIDTH, Block
from support.matrices import pairs_of

LENGTH = 160
"""Longer than the sequences of which every row is looked at in any case."""
EVERY = torch.ones(LENGTH, LENGTH, dtype=torch.bool)
CAUSAL = EVERY.tril()
PADDED = torch.arange(LENGTH) < torch.tensor([LENGTH, LENGTH - 30])[:, None, None, None]
MASKS = {
    "causal": (CAUSAL, Band(None, 0)),
    "causal, to be added": (torch.zeros(LENGTH, LENGTH).masked_fill(~CAUSAL, float("-inf")), Band(None, 0)),
    "the other way": (EVERY.triu(), Band(-1, None)),
    "a few keys ahead": (EVERY.tril(9), Band(None, 9)),
    "a window": (CAUSAL & ~CAUSAL.tril(-30), Band(-30, 0)),
    "on both sides": (EVERY.tril(9) & EVERY.triu(-5), Band(-6, 9)),
    "padding": (PADDED, Band()),
    "causal and padding": (CAUSAL & PADDED, Band(None, 0)),
    "a window and padding": (CAUSAL & ~CAUSAL.tril(-30) & PADDED, Band(-30, 0)),
}


class Masked(Block):
    mask = CAUSAL

    def mix(self, q, k, v):
        return F.scaled_dot_product_attention(q, k, v, self.mask)


class Last(Masked):
    """The last queries alone."""

    def mix(self, q, k, v):
        return super().mix(q[:, :, -4:], k, v)


def scores_of(model, x, mask):
    allowed = mask if mask.dtype == torch.bool else mask == 0
    q, k = (model.split(part(x)) for part in (model.q_proj, model.k_proj))
    scores = (q @ k.mT).double()
    return [scores[:, head][allowed.expand_as(scores)[:, head]] for head in range(HEADS)]


def measured(model, hook, x):
    model(x)
    (layer,) = hook.layers.values()
    statistics = layer.head_statistics
    hook.step()
    return statistics


@pytest.mark.parametrize("kind", MASKS)
def test_scores_under_a_mask_with_a_structure_are_measured_in_full(kind):
    torch.manual_seed(0)
    model, x = Masked().double(), torch.randn(2, LENGTH, WIDTH, dtype=torch.float64)
    model.mask, band = MASKS[kind]
    with betahook.attach(model, controller="monitor", when="always", interval=1) as hook:
        statistics = measured(model, hook, x)
    assert statistics.exact.all()
    scores = scores_of(model, x, model.mask)
    assert statistics.count.tolist() == [len(each) for each in scores]
    assert statistics.mean.tolist() == pytest.approx([each.mean().item() for each in scores], rel=1e-6)
    assert statistics.std.tolist() == pytest.approx([each.std(correction=0).item() for each in scores], rel=1e-6)
    pairs = (model.mask if model.mask.dtype == torch.bool else model.mask == 0).expand(2, 1, -1, -1)
    assert find_band(pairs) == band


@pytest.mark.parametrize("kind", ["causal", "causal, to be added"])
@pytest.mark.parametrize(("is_shared", "looks"), [(True, 1), (False, 3)])
def test_a_mask_is_looked_at_once_for_all_layers_that_share_it(kind, is_shared, looks):
    model, (mask, _) = nn.Sequential(Masked(), Masked(), Masked()), MASKS[kind]
    mask = mask.clone().requires_grad_(mask.is_floating_point())
    for module in model:
        module.mask = mask if is_shared else mask.detach().clone()
    with betahook.attach(model, controller="monitor", when="always", interval=1) as hook:
        for _ in range(2):  # the first forward shows which structure to expect
            masks._structures.clear()
            with mock.patch.object(masks, "_structure", wraps=masks._structure) as calls:
                model(torch.ones(2, LENGTH, WIDTH))
            hook.step()
    assert calls.call_count == looks


@pytest.mark.parametrize(("queries", "keys"), [(4, 4), (3, 5), (5, 3), (1, 4)])
def test_every_window_is_found(queries, keys):
    """Also one that hides a single pair, of the first query and the last key or the other way round."""
    distances = torch.arange(keys) - torch.arange(queries)[:, None]
    for low, high in itertools.product(range(-queries, keys), repeat=2):
        pairs = (distances > low) & (distances <= high)
        if pairs.any(0).all() and pairs.any(1).all():  # else it may be padding as well
            assert torch.equal(pairs_of(find_band(pairs[None, None]), queries, keys), pairs), (low, high)


def test_other_masks_are_looked_at_row_by_row():
    """As are those that differ from the first one."""
    torch.manual_seed(0)
    model, x = Masked(), torch.randn(2, LENGTH, WIDTH)
    others = {"any": torch.rand(LENGTH, LENGTH) < 0.5, "none": ~EVERY, "later": MASKS["a window"][0]}
    with betahook.attach(model, controller="monitor", when="always", interval=1) as hook:
        assert measured(model, hook, x).exact.all()
        for mask in others.values():
            model.mask = mask
            assert not measured(model, hook, x).exact.any() or mask is others["none"]
        model.mask = CAUSAL
        assert measured(model, hook, x).exact.all()
    model.mask = others["any"]
    with betahook.attach(model, controller="monitor", when="always", interval=1) as hook:
        assert not measured(model, hook, x).exact.any()


@pytest.mark.parametrize(
    ("mask", "pairs"),
    [
        (causal_upper_left, torch.ones(4, LENGTH, dtype=torch.bool).tril()),
        (causal_lower_right, CAUSAL[-4:]),
    ],
)
def test_causal_masks_of_torch_that_have_no_entries(mask, pairs):
    torch.manual_seed(0)
    plain, biased = Last(), Last()
    plain.mask, biased.mask = pairs, mask(*pairs.shape)
    biased.load_state_dict(plain.state_dict())
    x, found = torch.randn(2, LENGTH, WIDTH), []
    for model in (plain, biased):
        expected = model(x)
        with betahook.attach(model, controller="monitor", when="always", interval=1) as hook:
            statistics = measured(model, hook, x)
            assert torch.equal(model(x), expected)
        assert statistics.exact.all()
        found.append(torch.stack([statistics.count, statistics.mean, statistics.std, statistics.entropy]))
    torch.testing.assert_close(*found)


def test_the_causal_mask_of_torch_is_measured_in_full_at_every_length():
    torch.manual_seed(0)
    model = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)
    with betahook.attach(model, controller="monitor", when="always", interval=1) as hook:
        (layer,) = hook.layers.values()
        for length in (LENGTH, LENGTH + 40):
            x, mask = torch.randn(2, length, WIDTH), nn.Transformer.generate_square_subsequent_mask(length)
            model(x, x, x, attn_mask=mask, need_weights=False)
            assert layer.statistics.exact
            assert int(layer.statistics.count) == 2 * HEADS * length * (length + 1) // 2
            hook.step()
