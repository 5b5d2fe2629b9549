"""Where the query may take a factor: the rows of q, wherever they lie in the weights."""

import pytest
import torch
import transformers
from torch import nn

import betahook
from betahook.keep.places import Place, overlap
from betahook.models.projections import Part
from support.training import move

SIZES = {"num_attention_heads": 8, "num_hidden_layers": 1, "hidden_size": 64, "vocab_size": 64}


APART = {
    "codegen": (transformers.CodeGenForCausalLM, transformers.CodeGenConfig(**SIZES, rotary_dim=4, n_positions=64)),
    "falcon": (
        transformers.FalconForCausalLM,
        transformers.FalconConfig(**SIZES, new_decoder_architecture=True, num_kv_heads=2),
    ),
}
"""Fused projections in which the rows of q lie in several runs, each of several heads."""


@pytest.mark.parametrize("per_head", [False, True])
@pytest.mark.parametrize("family", APART)
def test_the_rows_of_q_may_lie_apart(family, per_head):
    torch.manual_seed(0)
    kind, config = APART[family]
    model, ids = kind(config).eval(), torch.arange(3, 15)[None]
    for parameter in model.parameters():
        parameter.data *= 3
    with betahook.attach(model, controller="monitor") as hook:
        before = model(ids).logits
        move(hook, per_head)
        adapted = model(ids).logits
        assert (adapted - before).abs().max() > 1e-3
        betahook.fold(model)
    torch.testing.assert_close(model(ids).logits, adapted, rtol=1e-5, atol=1e-5)


def test_a_place_scales_the_rows_of_each_head_and_no_others():
    weight = nn.Parameter(torch.arange(1.0, 13.0).view(6, 2))
    rows = torch.tensor([[0, 1], [4, 5]])  # of two heads
    place = Place([Part(weight, weight.detach(), rows)])
    place.write(place.scaled(torch.tensor([2.0, 0.5])))
    assert weight.tolist() == [[2, 4], [6, 8], [5, 6], [7, 8], [4.5, 5], [5.5, 6]]


def test_the_offset_of_a_norm_is_scaled_with_its_weight_but_not_with_its_bias():
    weight, bias = nn.Parameter(torch.tensor([0.0, 1.0])), nn.Parameter(torch.tensor([2.0, 4.0]))
    parts = [Part(p, p.detach()[:, None], torch.tensor([[0, 1]])) for p in (weight, bias)]
    place = Place(parts, offset=1.0)
    place.write(place.scaled(torch.tensor([3.0])))
    assert weight.tolist() == [2, 5]  # 1 + w is three times what it was
    assert bias.tolist() == [6, 12]


def test_an_error_moves_each_entry_up_or_down_and_differs_from_seed_to_seed():
    weight = nn.Parameter(torch.ones(64, 1))
    place = Place([Part(weight, weight.detach(), torch.arange(64).view(1, -1))])
    values = [place.scaled(torch.tensor([2.0]), 0.5, seed)[0] for seed in (0, 0, 1)]
    assert set(values[0].flatten().tolist()) == {1.0, 3.0}
    assert torch.equal(values[0], values[1])
    assert not torch.equal(values[0], values[2])


@pytest.mark.parametrize(
    ("other", "expected"),
    [
        (lambda flat: flat[8:], False),
        (lambda flat: flat[7:], True),
        (lambda flat: flat.view(4, 4).mT[:, 3], False),
        (lambda flat: flat.view(4, 4)[:, 3], True),
        (lambda flat: flat.view(torch.uint8)[32:], False),
        (lambda flat: flat.view(torch.uint8)[31:], True),
        (lambda flat: flat[8:8], False),
    ],
)
def test_memory_overlaps_or_only_lies_near(other, expected):
    flat = torch.arange(16.0)
    query = flat[:8].view(2, 4)
    assert overlap(query, other(flat)) is overlap(other(flat), query) is expected


@pytest.mark.filterwarnings("ignore:.*CPU Autocast")
def test_autocast_does_not_go_on_with_the_old_values():
    linear, x = nn.Linear(4, 4, bias=False), torch.ones(1, 4)
    place = Place([Part(linear.weight, linear.weight.detach(), torch.arange(4).view(1, -1))])
    with torch.autocast("cpu", torch.bfloat16):
        before = linear(x)
        place.write(place.scaled(torch.tensor([2.0])))
        torch.testing.assert_close(linear(x), 2 * before)
