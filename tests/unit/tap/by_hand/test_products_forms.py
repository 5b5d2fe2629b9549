"""Forms of attention written by hand: scales, calls, joint and latent attention, several in one forward."""

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import torch.utils.checkpoint
from torch import nn

import betahook
from support.attention import HEADS, LENGTH, WIDTH, Block, ByHandAttention, causal_scores, make
from support.matrices import overall_std

SCALED = {
    "scores by a tensor": lambda q, k, root: (q @ k.mT) / root,
    "scores by its power": lambda q, k, root: (q @ k.mT) * root**-1,
    "scores by a tensor of as many axes": lambda q, k, root: torch.mul(1 / root[None, None, None], q @ k.mT),
    "scores by a number times a tensor": lambda q, k, root: (q @ k.mT) / (root * 0.5) / 2,
    "query by a tensor": lambda q, k, root: (q / root) @ k.mT,
    "tensor by the query": lambda q, k, root: (1 / root * q) @ k.mT,
    "a product of tensors by the query": lambda q, k, root: (0.5 * root * q) @ (2 * k / root**2).mT,
}


@pytest.mark.parametrize("way", SCALED)
def test_a_factor_may_be_a_tensor_of_one_element(x, way):
    """As in `self.scale = torch.sqrt(torch.FloatTensor([head_dim]))`."""

    class TensorScaledAttention(Block):
        def __init__(self):
            super().__init__()
            self.register_buffer("root", torch.sqrt(torch.FloatTensor([self.head_dim])))

        def mix(self, q, k, v):
            scores = SCALED[way](q, k, self.root)
            return torch.softmax(scores + torch.full((LENGTH, LENGTH), -1e4).triu(1), -1) @ v

    check_whole(TensorScaledAttention, x)


def into_a_buffer(q, k):
    buffer = torch.empty(*q.shape[:-1], LENGTH)
    torch.matmul(q.detach(), k.detach().mT, out=buffer)
    return buffer * 8**-0.5


def shifted(q, k):
    """As in the code of DeBERTa's authors."""
    scores = (q @ k.mT * 8**-0.5).flatten(0, 1)
    return (scores - scores.max(-1, keepdim=True).values.detach()).view(-1, HEADS, LENGTH, LENGTH)


CALLS = {
    "a view of rows that were shifted": shifted,
    "a number of numpy": lambda q, k: (q @ k.mT) / np.float32(math.sqrt(8)),
    "a number of numpy, by the query": lambda q, k: (np.float32(8**-0.5) * q) @ k.mT,
    "matmul": lambda q, k: torch.matmul(other=k.mT, input=q) * 8**-0.5,
    "linalg.matmul": lambda q, k: torch.linalg.matmul(q, k.mT) * 8**-0.5,
    "matmul with out": into_a_buffer,
    "mul": lambda q, k: torch.mul(other=8**-0.5, input=q @ k.mT),
    "mul by a tensor": lambda q, k: torch.mul(input=torch.tensor(8**-0.5), other=q @ k.mT),
    "div": lambda q, k: torch.div(input=q @ k.mT, rounding_mode=None, other=math.sqrt(8)),
    "div of the query": lambda q, k: torch.div(input=q, other=math.sqrt(8)) @ k.mT,
    "add": lambda q, k: torch.add(input=q @ k.mT * 8**-0.5, other=torch.zeros(LENGTH)),
    "transpose": lambda q, k: torch.transpose(input=k @ q.mT * 8**-0.5, dim0=-2, dim1=-1),
    "cat": lambda q, k: torch.cat(dim=-1, tensors=(q @ k.mT * 8**-0.5).split([5, LENGTH - 5], -1)),
    "masked_fill": lambda q, k: torch.masked_fill(
        input=q @ k.mT * 8**-0.5, mask=torch.ones(LENGTH, LENGTH).triu(1).bool(), value=-1e9
    ),
    "maximum": lambda q, k: torch.max(input=q @ k.mT * 8**-0.5, other=torch.tensor(-1e9)),
}


@pytest.mark.parametrize("call", CALLS)
def test_the_operands_of_a_call_may_be_of_numpy_or_named(x, call):
    class NamedAttention(Block):
        def mix(self, q, k, v):
            scores = CALLS[call](q, k)
            return torch.softmax(input=scores + torch.full((LENGTH, LENGTH), -1e4).triu(1), dim=-1) @ v

    check_whole(NamedAttention, x)


def check_whole(kind, x):
    """Against the causal scores in float64, and the effect of beta against another query."""
    model, expected = make(kind), make(ByHandAttention)(x)
    scores = causal_scores(make(kind), x)
    with betahook.attach(model, controller="monitor") as hook:
        torch.testing.assert_close(model(x), expected, rtol=1e-5, atol=1e-5)
        measured, heads = hook.layers["1"].statistics, hook.layers["1"].head_statistics
        assert hook.layers["1"].beta_default == pytest.approx(8**-0.5)
        hook.layers["1"].beta = 2 * hook.layers["1"].beta_default
        doubled = model(x)
    assert measured.count == scores.numel()
    torch.testing.assert_close(overall_std(heads), scores.std(correction=0), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(measured.max_score, scores.abs().max(), rtol=1e-5, atol=1e-5)
    for parameter in model[1].q_proj.parameters():
        parameter.data *= 2
    torch.testing.assert_close(doubled, model(x), rtol=1e-5, atol=1e-5)


class ScaledChannels(ByHandAttention):
    """A learned factor for each channel before the projections, and one behind the attention, as LayerScale's."""

    def __init__(self):
        super().__init__()
        self.before, self.behind = nn.Parameter(torch.rand(WIDTH)), nn.Parameter(torch.rand(WIDTH))

    def forward(self, x):
        output = super().forward(torch.einsum("bnc,c->bnc", x, self.before))
        return torch.einsum("bnc,c->bnc", output, self.behind)


def test_a_factor_for_each_channel_as_an_einsum(x):
    model = make(ScaledChannels)
    expected = model(x)
    with betahook.attach(model, controller="monitor") as hook:
        assert torch.equal(model(x), expected)
        hook.layers["1"].beta = 2 * hook.layers["1"].beta_default
        doubled = model(x)
    for parameter in model[1].q_proj.parameters():
        parameter.data *= 2
    torch.testing.assert_close(doubled, model(x), rtol=1e-5, atol=1e-5)


class JointAttention(Block):
    """Two parts of a sequence, each with projections of its own, attend to one another, as image and text in SD 3."""

    def __init__(self):
        super().__init__()
        self.add_q_proj, self.add_k_proj, self.add_v_proj = (nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def project(self, x, side):
        parts = (
            getattr(self, name)(part) for name, part in zip((side, f"add_{side}"), x.split([7, 5], 1), strict=True)
        )
        return torch.cat([self.split(part) for part in parts], 2)

    def forward(self, x):
        return self.mix(*(self.project(x, side) for side in ("q_proj", "k_proj", "v_proj"))).transpose(1, 2).flatten(2)

    def mix(self, q, k, v):
        return F.scaled_dot_product_attention(q, k, v)


@pytest.mark.parametrize("batch", [3, HEADS])
def test_joint_attention_of_two_projections(batch):
    x = torch.randn(batch, LENGTH, WIDTH, generator=torch.Generator().manual_seed(0))
    model = make(JointAttention)
    with torch.no_grad():
        q, k = (model[1].project(model[0](x), side).double() for side in ("q_proj", "k_proj"))
    with betahook.attach(model, controller="monitor") as hook:
        model(x)
        statistics = hook.layers["1"].head_statistics
        scores = (q @ k.mT).transpose(0, 1).flatten(1)
        torch.testing.assert_close(statistics.std.double(), scores.std(1, correction=0), rtol=1e-5, atol=1e-5)
        hook.layers["1"].beta = 2 * hook.layers["1"].beta_default
        doubled, weight = model(x), model[1].add_q_proj.weight.clone()
        betahook.fold(model)
    torch.testing.assert_close(model[1].add_q_proj.weight, 2 * weight)
    torch.testing.assert_close(doubled, model(x), rtol=1e-5, atol=1e-5)


def test_the_factor_of_a_part_of_the_query_is_not_one_of_beta(x):
    class AddedAttention(ByHandAttention):
        def mix(self, q, k, v):
            return super().mix(q * 0.5 + torch.linspace(0, 1, self.head_dim), k, v)

    model = make(AddedAttention)
    with betahook.attach(model, controller="monitor") as hook:
        model(x)
        assert hook.layers["1"].beta_default == pytest.approx(8**-0.5)


class LatentAttention(Block):
    """Learned queries that are the same for all samples, or keys that are."""

    def __init__(self, learned):
        super().__init__()
        self.learned = learned
        self.latents = nn.Parameter(torch.randn(1, 40, WIDTH))

    def forward(self, x):
        of_query, of_key = (self.latents, x) if self.learned == "queries" else (x, self.latents)
        q, k, v = self.q_proj(of_query), self.k_proj(of_key), self.v_proj(of_key)
        return self.mix(*map(self.split, (q, k, v))).transpose(1, 2).flatten(2)


class FusedLatentAttention(LatentAttention):
    def mix(self, q, k, v):
        return F.scaled_dot_product_attention(q, k, v)


class MaskedLatentAttention(LatentAttention):
    """The mask is of the samples, which one operand does not tell apart; it lets everything pass."""

    def mix(self, q, k, v):
        pairs = torch.ones(max(len(q), len(k)), 1, 1, k.shape[-2], dtype=torch.bool)
        return F.scaled_dot_product_attention(q, k, v, pairs)


class ByHandLatentAttention(LatentAttention):
    def mix(self, q, k, v):
        return (q @ k.mT * self.head_dim**-0.5).softmax(axis=-1) @ v


@pytest.mark.parametrize("learned", ["queries", "keys"])
@pytest.mark.parametrize("kind", [FusedLatentAttention, MaskedLatentAttention, ByHandLatentAttention])
def test_what_is_the_same_for_all_samples_counts_for_each(x, kind, learned):
    model = nn.Sequential(kind(learned))
    attention, x = model[0], x * torch.tensor([0.1, 1, 5]).view(-1, 1, 1)
    with betahook.attach(model, controller="monitor", when="always") as hook, torch.no_grad():
        model(x)
        measured = hook.layers["0"].head_statistics
    of_query, of_key = (attention.latents, x) if learned == "queries" else (x, attention.latents)
    q, k = attention.split(attention.q_proj(of_query)), attention.split(attention.k_proj(of_key))
    scores = q.double() @ k.double().mT
    expected = scores.transpose(0, 1).flatten(1)
    assert (measured.count == expected.shape[1]).all()
    torch.testing.assert_close(measured.std, expected.std(1, correction=0), rtol=1e-5, atol=0)


class BroadcastAttention(Block):
    """Operands without axes that the other has: `windows` share keys; learned `keys`, or `queries`, have no batch."""

    def __init__(self, shared, by_hand):
        super().__init__()
        self.shared, self.by_hand = shared, by_hand
        self.learned = nn.Parameter(torch.randn(LENGTH, WIDTH))
        self.register_buffer("mask", torch.rand(4, 1, 1, LENGTH) < 0.7)

    def split(self, x):
        return x.unflatten(-1, (HEADS, -1)).transpose(-3, -2)

    def forward(self, x):
        of_query = self.learned if self.shared == "queries" else x
        of_key = {"keys": self.learned, "queries": x, "windows": x[:, :1]}[self.shared]
        q, k, v = map(self.split, (self.q_proj(of_query), self.k_proj(of_key), self.v_proj(of_key)))
        if self.by_hand:
            q, k, v = torch.broadcast_tensors(q, k, v)
        return self.mix(q, k, v).transpose(-3, -2).flatten(-2)

    def mix(self, q, k, v):
        return F.scaled_dot_product_attention(q, k, v, self.mask)


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # of torch's compiler
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")  # of the same
@pytest.mark.parametrize("compiles", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize("shared", ["windows", "keys", "queries"])
def test_operands_that_broadcast_count_as_those_expanded_by_hand(shared, compiles):
    seen = []
    for by_hand in (True, False):
        torch.manual_seed(0)
        torch.compiler.reset()
        attention = BroadcastAttention(shared, by_hand)
        x = torch.randn(3, 4, LENGTH, WIDTH) if shared == "windows" else torch.randn(4, LENGTH, WIDTH)
        plain = attention(x)
        with betahook.attach(attention, controller="monitor", when="always", interval=1) as hook:
            assert torch.equal(attention(x), plain)
            hook.step()
            hook.layers[""].beta = 2 * hook.layers[""].beta_default
            output = (torch.compile(attention, backend="aot_eager") if compiles else attention)(x)
            output.square().sum().backward()
            measured = (vars(of).values() for of in (hook.layers[""].statistics, hook.layers[""].head_statistics))
            seen.append([output, *(x for values in measured for x in values if isinstance(x, torch.Tensor))])
    for found, expected in zip(*seen, strict=True):
        torch.testing.assert_close(found, expected, equal_nan=True)
    assert not torch.allclose(output, plain, atol=1e-3)


def test_each_of_several_attentions_in_one_forward_is_followed(x):
    class TwiceAttention(ByHandAttention):
        def mix(self, q, k, v):
            return super().mix(q, k, super().mix(q, k, v))

    model = make(TwiceAttention)
    with betahook.attach(model, controller="monitor") as hook:
        model(x)
        layer = hook.layers["1"]
        assert layer.statistics.count == 2 * causal_scores(model, x).numel()
        layer.beta = 2 * layer.beta_default
        output = model(x)
    for parameter in model[1].q_proj.parameters():
        parameter.data *= 2
    torch.testing.assert_close(output, model(x), rtol=1e-5, atol=1e-5)


class ScaledKeys(ByHandAttention):
    """As nanochat: q and k are scaled, and k is kept in a cache; `keep` puts it there."""

    def __init__(self, keep, fused):
        super().__init__()
        self.keep, self.fused, self.cache = keep, fused, None

    def mix(self, q, k, v):
        q, k = q * 1.2, k * 1.3
        if self.cache is not None:
            k, v = self.keep(self.cache, k, v)
        if self.fused:
            return F.scaled_dot_product_attention(q, k, v)
        return torch.softmax(q @ k.mT / math.sqrt(self.head_dim), -1) @ v


def concatenated(cache, k, v):
    cache[:] = [torch.cat([past, new], 2) for past, new in zip(cache, (k, v), strict=True)] if cache else [k, v]
    return cache


def preallocated(cache, k, v):
    if not cache:
        cache[:] = [k.new_zeros(len(k), HEADS, LENGTH, k.shape[-1]) for _ in range(2)] + [0]
    start, end = cache[2], cache[2] + k.shape[2]
    cache[0][:, :, start:end], cache[1][:, :, start:end], cache[2] = k, v, end
    return cache[0][:, :, :end], cache[1][:, :, :end]


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("keep", [concatenated, preallocated])
def test_a_factor_on_keys_out_of_a_cache(keep, fused, x):
    """It is the one that they carried when they were put there."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(WIDTH, WIDTH), ScaledKeys(keep, fused))
    with betahook.attach(model, controller="monitor", interval=1) as hook:
        layer = hook.layers["1"]
        model(x).sum().backward()
        own = layer.beta_default
        assert own == pytest.approx(1.2 * 1.3 / math.sqrt(model[1].head_dim))
        layer.beta = 2 * own
        with torch.no_grad():
            whole = model(x)
            model[1].cache = []
            model(x[:, :-1])
            last = model(x[:, -1:])
        assert layer.beta_default == pytest.approx(own)
    torch.testing.assert_close(last[:, 0], whole[:, -1], rtol=1e-5, atol=1e-6)
