"""Facts on classes, and that a new family takes one entry there and nothing else."""

import pytest
import torch
from torch import nn

import betahook
from betahook.models import layouts
from betahook.models.families import FACTS, Facts, facts

HEADS, HEAD_DIM = 4, 3
WIDTH = HEADS * HEAD_DIM


class MadeUpAttention(nn.Module):
    """An attention that stacks v, k and q in this order, and learns a factor for each head.

    The products before the scores make a bias of positions.
    """

    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.temperature = nn.Parameter(torch.tensor([0.5, 1.0, 2.0, 4.0]))

    def forward(self, x):
        v, k, q = (part.unflatten(-1, (HEADS, HEAD_DIM)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        scores = (q @ k.mT) * self.temperature.view(-1, 1, 1)
        return (scores.softmax(-1) @ v).transpose(1, 2).flatten(2)


def values_first(module, heads, head_dim, rows):
    size = heads * head_dim
    return layouts.run(2 * size, heads, head_dim), layouts.run(size, heads, head_dim)


MADE_UP = Facts(
    heads=HEADS,
    fused=values_first,
    remark="it is made up",
)


@pytest.fixture
def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), MadeUpAttention())


def test_a_new_family_takes_one_entry(model, monkeypatch):
    monkeypatch.setitem(FACTS, "MadeUpAttention", MADE_UP)
    attention, x = model[1], torch.randn(2, 5, WIDTH, generator=torch.Generator().manual_seed(1))
    plain = model(x)
    with betahook.attach(model, controller="monitor") as hook:
        layer = hook.layers["1"]
        assert torch.equal(model(x), plain)
        assert (layer.heads, layer.head_dim) == (HEADS, HEAD_DIM)
        assert "it is made up" in layer.remarks
        torch.testing.assert_close(layer.head_beta_default, attention.temperature.detach())
        _, k, q = attention.qkv(model[0](x)).chunk(3, -1)
        scores = torch.einsum("bqhd,bkhd->hbqk", *(y.unflatten(-1, (HEADS, HEAD_DIM)) for y in (q, k)))
        torch.testing.assert_close(layer.head_statistics.std.float(), scores.detach().flatten(1).std(1, correction=0))
        rows = attention.qkv.weight[2 * WIDTH :].detach()
        assert layer.weight_std_q == pytest.approx(rows.std(correction=0).item(), rel=1e-5)
        layer.head_beta = torch.tensor([0.25, 2.0, 1.0, 1.0])
        adapted = model(x)
        betahook.fold(model)
    assert not torch.allclose(adapted, plain, atol=1e-3)
    torch.testing.assert_close(model(x), adapted)


def test_facts_are_those_of_the_nearest_known_class():
    known = type("WhisperAttention", (nn.Module,), {})
    assert facts(type("Mine", (known,), {})()) is FACTS["WhisperAttention"]
    assert facts(type("OPTAttention", (known,), {})()) is FACTS["OPTAttention"]
    assert facts(nn.Linear(1, 1)) == Facts()


def test_any_indexer_is_known_for_what_it_is(monkeypatch):
    indexer = type("SparseIndexer", (nn.Module,), {})()
    assert facts(indexer).not_attention == "it picks the keys of another attention, without a softmax"
    monkeypatch.setitem(FACTS, "SparseIndexer", Facts(remark="but this one is known better"))
    assert facts(indexer).remark == "but this one is known better"


@pytest.mark.parametrize(
    ("name", "module", "rows", "query", "key"),
    [
        ("CodeGenAttention", {}, 24, [0, 6, 12, 18], [4, 10, 16, 22]),
        ("GPTBigCodeAttention", {"multi_query": True}, 12, [0, 2, 4, 6], [8]),
        ("GPTBigCodeAttention", {"multi_query": False}, 24, [0, 6, 12, 18], [2, 8, 14, 20]),
        ("FalconAttention", {"new_decoder_architecture": False, "multi_query": True}, 12, [0, 2, 4, 6], [8]),
        (
            "FalconAttention",
            {"new_decoder_architecture": False, "multi_query": False},
            24,
            [0, 6, 12, 18],
            [2, 8, 14, 20],
        ),
        ("FalconAttention", {"new_decoder_architecture": True, "num_kv_heads": 2}, 16, [0, 2, 8, 10], [4, 12]),
    ],
)
def test_layouts_that_only_one_family_has(name, module, rows, query, key):
    attention = type(name, (nn.Module,), module)()
    selections = facts(attention).fused(attention, 4, 2, rows)
    first = [select(torch.arange(rows)[:, None])[:, 0, 0].tolist() for select in selections]
    assert first == [query, key]
