"""Attention over queries and keys that come in with an axis of the heads, which it merges with the batch."""

import pytest
import torch
from torch import nn

import betahook
from betahook.tap.by_hand.head_axes import of_inputs

HEADS, HEAD_DIM, LENGTH = 4, 8, 9


class CoreAttention(nn.Module):
    """As in Megatron-LM: `[tokens, batch, heads, d_k]` becomes `[batch * heads, tokens, d_k]`."""

    def __init__(self, way):
        super().__init__()
        self.num_attention_heads_per_partition, self.hidden_size_per_attention_head = HEADS, HEAD_DIM
        self.way = way

    def forward(self, query, key, value):
        key, value = (x.repeat_interleave(HEADS // x.shape[2], 2) for x in (key, value))
        q, k, v = (x.reshape(len(x), -1, HEAD_DIM).transpose(0, 1) for x in (query, key, value))
        if self.way == "baddbmm":
            buffer = torch.empty(len(q), q.shape[1], k.shape[1], dtype=q.dtype)
            scores = torch.baddbmm(buffer, q, k.mT, beta=0.0, alpha=HEAD_DIM**-0.5)
        else:
            scores = torch.bmm(q, k.mT) * HEAD_DIM**-0.5
        if self.way != "bmm, not unflattened":
            scores = scores.unflatten(0, (-1, HEADS))
        out = torch.bmm(scores.softmax(-1).flatten(0, -3), v)
        return out.unflatten(0, (-1, HEADS)).permute(2, 0, 1, 3).flatten(2)


def operands(batch, key_heads=HEADS):
    torch.manual_seed(batch)
    return [
        torch.randn(LENGTH, batch, heads, HEAD_DIM, dtype=torch.float64, requires_grad=True)
        for heads in (HEADS, key_heads, key_heads)
    ]


def by_definition(q, k, v, beta):
    k, v = (x.repeat_interleave(HEADS // x.shape[2], 2) for x in (k, v))
    scores = torch.einsum("nbhd,mbhd->bhnm", q, k)
    weights = (beta.view(-1, 1, 1) * scores).softmax(-1)
    return torch.einsum("bhnm,mbhd->nbhd", weights, v).flatten(2), scores.transpose(0, 1).flatten(1)


def check(hook, core, inputs, beta):
    """Hold output, statistics and sensitivity against those by definition."""
    layer = hook.layers[""]
    layer.head_beta = beta
    output = core(*inputs)
    log_beta = beta.double().log().requires_grad_()
    expected, scores = by_definition(*inputs, log_beta.exp())
    torch.testing.assert_close(output, expected, rtol=1e-6, atol=1e-6)
    (derivatives,) = torch.autograd.grad(expected.square().sum(), log_beta)
    output.square().sum().backward()
    statistics = layer.head_statistics
    torch.testing.assert_close(statistics.std.double(), scores.std(1, correction=0), rtol=1e-5, atol=0)
    torch.testing.assert_close(statistics.sensitivity.double(), derivatives, rtol=1e-4, atol=1e-5)
    hook.step()


@pytest.mark.parametrize("sizes", [[1, 3], [2, 1], [3, HEADS, 1]], ids=str)
@pytest.mark.parametrize("way", ["baddbmm", "bmm", "bmm, not unflattened"])
@pytest.mark.parametrize("key_heads", [HEADS, 2])
def test_heads_that_come_in_along_an_axis_are_told_apart(way, sizes, key_heads):
    core = CoreAttention(way)
    with betahook.attach(core, controller="monitor", per_head=True, interval=1, when="always") as hook:
        for size in sizes:
            inputs = operands(size, key_heads)
            output, beta = core(*inputs), hook.layers[""].head_beta_default
            torch.testing.assert_close(beta, torch.full([HEADS], HEAD_DIM**-0.5))
            torch.testing.assert_close(output, by_definition(*inputs, beta.double())[0], rtol=1e-6, atol=1e-6)
            hook.step()
        for size in sizes:
            check(hook, core, operands(size, key_heads), torch.tensor([0.1, 0.3, 0.9, 2.7]))
        with pytest.raises(betahook.FoldError, match="its query projection has no known form"):
            betahook.fold(core)


@pytest.mark.parametrize("key_heads", [HEADS, 2])
def test_as_many_sequences_as_heads_that_come_in_tell_no_heads_apart(key_heads):
    core = CoreAttention("bmm")
    with betahook.attach(core, controller="monitor") as hook:
        core(*operands(HEADS, key_heads))
        assert "heads cannot be told" in hook.layers[""].refusal


@pytest.mark.parametrize(
    ("shapes", "axis"),
    [
        ([(9, 3, 4, 8), (7, 3, 4, 8)], 2),
        ([(9, 3, 4, 8), (9, 3, 2, 8)], 2),
        ([(3, 4, 9, 8)], 1),
        ([(9, 3, 4, 8), (4, 3, 4, 8)], None),  # as many keys
        ([(9, 4, 4, 8), (9, 4, 2, 8)], None),  # as many sequences
        ([(3, 4, 9, 8), (9, 3, 4, 8)], None),  # heads before the queries, but behind the keys
        ([(9, 3, 4, 8), (8, 3, 4, 8)], None),  # as many keys as components
        ([(4, 9, 2, 8)], None),  # as many sequences, and no queries
        ([(9, 3, 2, 8)], None),
        ([], None),
    ],
    ids=str,
)
def test_the_axis_of_the_heads_in_inputs(shapes, axis):
    assert of_inputs(shapes, 4) == axis
