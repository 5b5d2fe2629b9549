"""Finding the attention modules of a model, and counting their heads."""

import functools

import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import nn
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextAttention

from betahook.models.discovery import Survey, count_heads, survey
from support.models import CONFIGS, GROUPED, SIZE, build


class Calls(nn.Module):
    def forward(self, x):
        return transformers.AttentionInterface().get_interface("eager", None)


class Inherits(Calls):
    pass


class Helper(nn.Module):
    def choose(self, registry):
        return registry.get_interface("eager", None)


class Decorated(nn.Module):
    @staticmethod
    def keep(function):
        @functools.wraps(function)
        def inner(*args):
            return function(*args)

        return inner

    forward = keep(Calls.forward)


class ByHandAttention(nn.Module):
    def forward(self, x):
        return (x @ x.mT).softmax(-1) @ x


class MatmulAttention(nn.Module):
    def scores(self, x):
        return torch.matmul(x, x.mT)

    def forward(self, x):
        return nn.Softmax(-1)(self.scores(x)) @ x


class NestedAttention(nn.Module):
    def forward(self, x):
        def weights(y):
            return torch.bmm(y, y.mT).softmax(-1)

        return weights(x)


class Product(nn.Module):
    def forward(self, x):
        return torch.matmul(x, x.mT)


class WithPartsAttention(nn.Module):
    def __init__(self):
        super().__init__()
        self.product, self.normalise = Product(), nn.Softmax(-1)

    def forward(self, x):
        return self.normalise(self.product(x))


class Fused(nn.Module):
    def forward(self, x):
        return F.scaled_dot_product_attention(x, x, x)


class Mixer(nn.Module):
    """A softmax and a product, but nothing that calls it attention."""

    def forward(self, x):
        return (x @ x.mT).softmax(-1) @ x


class LinearAttention(nn.Module):
    def forward(self, x):
        return x @ (x.mT @ x)


def sized(module, heads=2, head_dim=4):
    module.num_heads, module.head_dim = heads, head_dim
    return module


@pytest.mark.parametrize("cls", [Calls, Inherits, Helper, Decorated])
def test_modules_that_ask_the_interface_are_found_by_their_code(cls):
    assert survey(sized(cls())).found[""].route == "interface"


@pytest.mark.parametrize(
    "cls", [ByHandAttention, Fused, MatmulAttention, WithPartsAttention, nn.MultiheadAttention, NestedAttention]
)
def test_modules_that_compute_their_scores_are_found_by_their_code(cls):
    module = cls(8, 2) if cls is nn.MultiheadAttention else sized(cls())
    assert survey(module).found[""].route == ("torch" if cls is Fused else "by hand")


@pytest.mark.parametrize("module", [Mixer(), nn.Linear(2, 2), nn.Module()], ids=type)
def test_modules_that_are_no_attention_are_left_alone(module):
    assert survey(sized(module)) == Survey({}, {})


def test_the_attention_may_be_kept_apart_from_the_module():
    """As in diffusers, whose modules call a processor."""

    class Processor:
        def __call__(self, attention, x):
            return F.scaled_dot_product_attention(x, x, x)

    module = type("Attention", (nn.Module,), {"forward": lambda self, x: self.processor(self, x)})()
    module.processor = Processor()
    assert survey(sized(module)).found[""].route == "torch"


def test_of_two_that_hold_one_another_the_inner_one_is_found():
    outer = sized(ByHandAttention())
    outer.core = sized(Fused())
    assert list(survey(outer).found) == ["core"]


def test_gpt2_goes_past_the_interface_when_it_upcasts():
    model = build("gpt2", reorder_and_upcast_attn=True)
    assert all(found.route == "by hand" for found in survey(model).found.values())


@pytest.mark.parametrize("family", CONFIGS)
def test_every_attention_of_a_model_is_found_with_its_size(family):
    model = build(family)
    found = survey(model).found.values()
    config = model.config
    width = getattr(config, "d_kv", None) or getattr(config, "head_dim", None) or 32 // config.num_attention_heads
    # T5 has self-attention in its encoder, self- and cross-attention in its decoder.
    assert len(found) == config.num_hidden_layers * (3 if family == "t5" else 1)
    assert [(x.heads, x.head_dim) for x in found] == [(config.num_attention_heads, width)] * len(found)


def test_a_gate_in_the_query_projection_adds_no_heads():
    sizes = {**SIZE, **GROUPED, "head_dim": 16, "layer_types": ["full_attention"] * 2}
    attention = Qwen3NextAttention(transformers.Qwen3NextConfig(**sizes), 0)
    assert attention.q_proj.out_features == 2 * 4 * 16
    assert count_heads(attention) == (4, 16)


def module(**attributes):
    result = nn.Module()
    for name, value in attributes.items():
        setattr(result, name, value)
    return result


SIZES = {
    "heads and width": (dict(num_heads=4, head_dim=8), (4, 8)),
    "width from the projection": (dict(num_heads=4, q_proj=nn.Linear(5, 24)), (4, 6)),
    "heads from the projection": (dict(head_dim=6, query=nn.Linear(5, 24)), (4, 6)),
    "heads from the config": (dict(head_dim=6, config=transformers.LlamaConfig(**SIZE)), (4, 6)),
    "a config of another size": (
        dict(head_dim=6, config=transformers.LlamaConfig(**SIZE), q_proj=nn.Linear(5, 18)),
        (3, 6),
    ),
    "no width": (dict(num_heads=4), None),
    "no heads": (dict(head_dim=8), None),
    "nothing": ({}, None),
    "no number": (dict(num_heads="4", head_dim=8), None),
    "a width of zero": (dict(num_heads=4, head_dim=0), None),
}


@pytest.mark.parametrize("case", SIZES)
def test_heads_are_counted_from_what_the_module_says(case):
    attributes, expected = SIZES[case]
    assert count_heads(module(**attributes)) == expected


def test_attention_that_is_not_reached_is_named_with_the_reason():
    model = nn.Module()
    model.inside = sized(Calls())
    model.inside.rotary_attention = LinearAttention()  # part of a layer that is reached
    model.inside.indexer = type("SparseIndexer", (ByHandAttention,), {})()
    model.linear = LinearAttention()
    model.unknown = ByHandAttention()
    model.landmarks = type("NystromformerSelfAttention", (ByHandAttention,), {})()
    model.feed_forward = nn.Linear(2, 2)
    model.output = type("AttentionOutput", (nn.Linear,), {})(2, 2)
    model.around = type("BlockAttention", (nn.Module,), {})()  # holds a layer that is reached
    model.around.attention = sized(Calls())
    seen = survey(model)
    assert list(seen.found) == ["inside", "around.attention"]
    assert seen.not_reached == {
        "inside.indexer": "SparseIndexer: it picks the keys of another attention, without a softmax",
        "linear": "LinearAttention: no product with a softmax behind it was found in its code",
        "unknown": "ByHandAttention: it says neither how many heads it has nor how wide they are",
        "landmarks": "NystromformerSelfAttention: it approximates the softmax by landmarks",
    }
    assert list(survey(LinearAttention()).not_reached) == ["the model"]
