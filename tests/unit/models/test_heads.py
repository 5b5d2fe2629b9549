"""Counting heads: each strategy alone, and their order."""

import pytest
import transformers
from torch import nn
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextAttention

from betahook.models import heads
from betahook.models.families import FACTS, Facts
from support.models import GROUPED, SIZE

CONFIG = transformers.LlamaConfig(**SIZE)
"""Four heads; no head_dim but the one that it derives, 8."""


def module(**attributes):
    result = nn.Module()
    for name, value in attributes.items():
        setattr(result, name, value)
    return result


def linear(rows):
    return nn.Linear(5, rows)


STRATEGIES = [
    (heads.stated, dict(num_heads=4, head_dim=8), (4, 8)),
    (heads.stated, dict(n_head=4, attention_head_size=8), (4, 8)),
    (heads.stated, dict(num_heads=4), (4, None)),
    (heads.stated, dict(head_dim=8), (None, 8)),
    (heads.stated, dict(num_heads="4", head_dim=8), (None, 8)),
    (heads.stated, dict(num_heads=4, head_dim=0), (4, None)),
    (heads.config_heads, dict(head_dim=6, config=CONFIG), (4, 6)),
    (heads.config_heads, dict(head_dim=6, config=CONFIG, q_proj=linear(24)), (4, 6)),
    (heads.config_heads, dict(head_dim=6, config=CONFIG, q_proj=linear(48)), (4, 6)),  # gated
    (heads.config_heads, dict(head_dim=6, config=CONFIG, q_proj=linear(18)), (None, 6)),
    (heads.config_heads, dict(config=CONFIG), (4, None)),
    (heads.config_heads, dict(head_dim=6), (None, 6)),
    (heads.heads_in_query, dict(head_dim=6, query=linear(24)), (4, 6)),
    (heads.heads_in_query, dict(head_dim=6), (None, 6)),
    (heads.heads_in_query, dict(query=linear(24)), (None, None)),
    (heads.heads_in_query, dict(head_dim=25, query=linear(24)), (0, 25)),
    (heads.config_only, dict(config=CONFIG), (4, 8)),
    (heads.config_only, dict(config=CONFIG, num_heads=2), (None, 8)),
    (heads.config_only, dict(), (None, None)),
    (heads.shared_width, dict(num_heads=4, q_proj=linear(24)), (4, 6)),
    (heads.shared_width, dict(num_heads=4, qkv=linear(72)), (4, 6)),
    (heads.shared_width, dict(num_heads=4, qkv=linear(48), embed_dim=32), (4, 4)),
    (heads.shared_width, dict(num_heads=4, qkv=linear(40), embed_dim=16), (4, None)),  # more than q, k and v of a size
    (heads.shared_width, dict(num_heads=4, q_proj=linear(18)), (4, None)),
    (heads.shared_width, dict(num_heads=4, k_proj=linear(24)), (4, 6)),
    (heads.shared_width, dict(num_heads=4, embed_dim=24), (4, 6)),
    (heads.shared_width, dict(num_heads=4, q_proj=linear(24), qkv=linear(12), embed_dim=8), (4, 6)),
    (heads.shared_width, dict(num_heads=4, qkv=linear(72), k_proj=linear(12), embed_dim=8), (4, 6)),
    (heads.shared_width, dict(num_heads=4, k_proj=linear(24), embed_dim=8), (4, 6)),
    (heads.shared_width, dict(num_heads=4, q_proj=nn.ReLU()), (4, None)),
    (heads.shared_width, dict(num_heads=4), (4, None)),
    (heads.shared_width, dict(q_proj=linear(24)), (None, None)),
]


@pytest.mark.parametrize(("strategy", "attributes", "expected"), STRATEGIES)
def test_a_strategy_counts_what_it_knows(strategy, attributes, expected):
    assert strategy(module(**attributes)) == expected


ORDER = {
    "heads and width": (dict(num_heads=4, head_dim=8, q_proj=linear(6), config=CONFIG), (4, 8)),
    "width from the projection": (dict(num_heads=4, q_proj=linear(24), config=CONFIG), (4, 6)),
    "heads from the projection": (dict(head_dim=6, query=linear(24)), (4, 6)),
    "as OpenFold": (dict(no_heads=4, linear_q=linear(24), linear_k=linear(24)), (4, 6)),
    "as DI-engine": (dict(head_num=4, head_dim=6), (4, 6)),
    "as the Informer": (dict(n_heads=4, query_projection=linear(24), key_projection=linear(24)), (4, 6)),
    "as ESPnet": (dict(h=4, d_k=6, linear_q=linear(24), linear_k=linear(24)), (4, 6)),
    "heads from the config": (dict(head_dim=6, config=CONFIG), (4, 6)),
    "a config of another size": (dict(head_dim=6, config=CONFIG, q_proj=linear(18)), (3, 6)),
    "all from the config": (dict(config=CONFIG, q_proj=linear(18)), (4, 8)),
    "all from a config of a shorter name": (dict(cfg=CONFIG), (4, 8)),
    "no width": (dict(num_heads=4), None),
    "no heads": (dict(head_dim=8), None),
    "nothing": ({}, None),
    "no number": (dict(num_heads="4", head_dim=8), None),
    "a width of zero": (dict(num_heads=4, head_dim=0), None),
    "no room for a head": (dict(head_dim=25, query=linear(24)), None),
}


@pytest.mark.parametrize("case", ORDER)
def test_heads_are_counted_from_what_the_module_says(case):
    attributes, expected = ORDER[case]
    assert heads.count_heads(module(**attributes)) == expected


@pytest.mark.parametrize(
    ("attributes", "words"),
    [
        ({}, "neither how many heads it has nor how wide they are: set its attributes num_heads and head_dim"),
        (dict(num_heads=4), "does not say how wide its 4 heads are: set its attribute head_dim"),
        (dict(head_dim=8), "does not say how many heads of 8 it has: set its attribute num_heads"),
    ],
)
def test_what_is_missing_is_said(attributes, words):
    assert words in heads.missing(module(**attributes))


def test_facts_say_what_the_module_does_not(monkeypatch):
    monkeypatch.setitem(FACTS, "Lonely", Facts(heads=1))
    lonely = type("Lonely", (nn.Module,), {})()
    lonely.num_heads, lonely.q_proj = 4, linear(24)
    assert heads.count_heads(lonely) == (1, 24)


def test_a_gate_in_the_query_projection_adds_no_heads():
    sizes = {**SIZE, **GROUPED, "head_dim": 16, "layer_types": ["full_attention"] * 2}
    attention = Qwen3NextAttention(transformers.Qwen3NextConfig(**sizes), 0)
    assert attention.q_proj.out_features == 2 * 4 * 16
    assert heads.count_heads(attention) == (4, 16)
