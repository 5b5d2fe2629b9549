"""Attention of users in graphs of the compiler: `F.scaled_dot_product_attention`, and what stays outside."""

import pytest
import torch
import torch._dynamo.testing
import torch.nn.functional as F
from torch import nn
from torch.nn.attention.bias import causal_lower_right
from torch.utils.checkpoint import checkpoint

import betahook
from support.attention import HEADS, WIDTH, OfTorch

D = WIDTH // HEADS
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning"),  # of torch's own tracing
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning"),  # of the same
]


class FusedAttention(nn.Module):
    """As nanoGPT has it."""

    def __init__(self, heads=HEADS, key_heads=HEADS):
        super().__init__()
        self.n_head = heads
        self.q_proj, self.out = nn.Linear(WIDTH, heads * D), nn.Linear(heads * D, WIDTH)
        self.k_proj, self.v_proj = (nn.Linear(WIDTH, key_heads * D) for _ in range(2))
        self.key_heads = key_heads

    def forward(self, x):
        q = self.q_proj(x).unflatten(-1, (self.n_head, D)).transpose(1, 2)
        k, v = (p(x).view(*x.shape[:2], self.key_heads, D).transpose(1, 2) for p in (self.k_proj, self.v_proj))
        return self.out(self.attend(q, k, v).transpose(1, 2).flatten(2))

    def attend(self, q, k, v):
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)


class Padded(FusedAttention):
    def attend(self, q, k, v):
        allowed = torch.arange(k.shape[2]) < k.shape[2] - 2
        return F.scaled_dot_product_attention(q, k, v, allowed.expand(q.shape[2], -1))


class OwnMask(FusedAttention):
    """With another mask in each layer, of the same shape."""

    def attend(self, q, k, v):
        allowed = (v.sum((1, 3)) > 0) | (torch.arange(k.shape[2]) == 0)
        return F.scaled_dot_product_attention(q, k, v, allowed[:, None, None].expand(-1, 1, q.shape[2], -1))


class Biased(FusedAttention):
    def attend(self, q, k, v):
        distance = torch.arange(k.shape[2])[None] - torch.arange(q.shape[2])[:, None]
        slopes = 2.0 ** -torch.arange(1, HEADS + 1)[:, None, None]
        bias = (slopes * distance).masked_fill(distance > 0, -torch.inf)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=bias[None], scale=0.5)


class Grouped(FusedAttention):
    def __init__(self):
        super().__init__(key_heads=2)

    def attend(self, q, k, v):
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)


class OneHead(FusedAttention):
    def __init__(self):
        super().__init__(heads=1, key_heads=1)


class ByHand(FusedAttention):
    def attend(self, q, k, v):
        return (q @ k.mT * D**-0.5).softmax(-1) @ v


class ScaledQuery(FusedAttention):
    def attend(self, q, k, v):
        return F.scaled_dot_product_attention(q * 0.5, k, v)


class Branching(ByHand):
    """With a softmax of its own in evaluation, as where the weights are asked for."""

    def attend(self, q, k, v):
        return FusedAttention.attend(self, q, k, v) if self.training else super().attend(q, k, v)


class Biasable(FusedAttention):
    """With a branch of its own for a bias, which scales q."""

    def forward(self, x, bias=None):
        self.bias = bias
        return super().forward(x)

    def attend(self, q, k, v):
        if self.bias is None:
            return F.scaled_dot_product_attention(q, k, v)
        return F.scaled_dot_product_attention(q * D**-0.5, k, v, self.bias, scale=1.0)


class Interrupted(FusedAttention):
    """With a place at which every graph ends."""

    def attend(self, q, k, v):
        torch._dynamo.graph_break()
        return super().attend(q, k, v)


class LastCausal(FusedAttention):
    """The last queries alone, with a mask of torch that has no entries, at which every graph ends."""

    def attend(self, q, k, v):
        output = F.scaled_dot_product_attention(q[:, :, 2:], k, v, causal_lower_right(q.shape[2] - 2, k.shape[2]))
        return F.pad(output, (0, 0, 2, 0))


class Model(nn.Module):
    def __init__(self, kind, layers=2):
        super().__init__()
        self.layers = nn.ModuleList(kind() for _ in range(layers))

    def forward(self, x, *further):
        for layer in self.layers:
            x = x + layer(x, *further)
        return x


FITTING = [
    FusedAttention,
    Padded,
    OwnMask,
    Grouped,
    OfTorch,
    *(pytest.param(x, marks=pytest.mark.slow) for x in (Biased, OneHead)),
]
OUTSIDE = [ByHand, ScaledQuery]


def made(kind, layers=2):
    torch.manual_seed(0)
    return Model(kind, layers)


def inputs():
    return torch.randn(2, 6, WIDTH, generator=torch.Generator().manual_seed(1))


def trained(kind, compiles=None, shown=True, steps=4):
    """Outputs, gradients and statistics of steps with another beta each."""
    model, seen = made(kind), []
    with betahook.attach(model, controller="monitor", interval=1) as hook:
        if shown:
            model(inputs()).sum().backward()
            hook.step()
        forward = compiles(model) if compiles else model
        for step in range(steps):
            model.zero_grad()
            output = forward(inputs())
            output.square().mean().backward()
            statistics = [torch.stack(list(vars(layer.statistics).values())) for layer in hook.layers.values()]
            gradients = [parameter.grad.clone() for parameter in model.parameters()]
            seen.append([output.detach(), *gradients, *(each.nan_to_num(-1) for each in statistics)])
            hook.step()
            for number, layer in enumerate(hook.layers.values()):
                layer.beta = layer.beta_default * (1.2 + number + step)
    return seen


@pytest.fixture
def counter():
    torch.compiler.reset()
    yield torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    torch.compiler.reset()


def assert_same(actual, expected):
    for one, other in zip(actual, expected, strict=True):
        for a, b in zip(one, other, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


@pytest.mark.oldest_skips("torch cannot trace the models at all")
@pytest.mark.parametrize("kind", FITTING)
def test_fused_attention_compiles_into_one_graph(kind, counter):
    actual = trained(kind, lambda model: torch.compile(model, backend=counter, fullgraph=True))
    assert counter.frame_count == 1
    assert_same(actual, trained(kind))


@pytest.mark.parametrize("kind", OUTSIDE)
def test_what_has_to_be_followed_stays_outside(kind, counter):
    assert_same(trained(kind, lambda model: torch.compile(model, backend=counter)), trained(kind))


@pytest.mark.oldest_skips("torch does not tell why a graph ends")
@pytest.mark.parametrize("kind", OUTSIDE)
def test_one_graph_is_refused_with_the_reason(kind, counter):
    with pytest.raises(RuntimeError, match="betahook follows attention by hand outside of graphs"):
        trained(kind, lambda model: torch.compile(model, backend=counter, fullgraph=True))


@pytest.mark.oldest_skips("torch cannot trace the models at all")
def test_what_is_compiled_before_any_forward_is_compiled_again(counter):
    """Once: the first forward shows that it can be."""
    actual = trained(FusedAttention, lambda model: torch.compile(model, backend=counter), shown=False)
    assert_same(actual, trained(FusedAttention, shown=False))
    assert counter.frame_count == 1  # of the second step on; a loop that leaves a graph is not compiled at all


CAUSAL_BIAS = pytest.param(LastCausal, marks=pytest.mark.oldest_skips("torch cannot trace its causal masks"))


@pytest.mark.parametrize("kind", [pytest.param(Interrupted, marks=pytest.mark.slow), CAUSAL_BIAS])
def test_graphs_that_end_within_the_attention(kind, counter):
    assert_same(trained(kind, lambda model: torch.compile(model, backend=counter)), trained(kind))


def test_a_softmax_that_comes_later_is_followed_outside(counter):
    outputs = []
    for compiles in (False, True):
        model = made(Branching)
        with betahook.attach(model, controller="monitor", when="always") as hook:
            model(inputs())
            for layer in hook.layers.values():
                layer.beta = 2.0
            forward = torch.compile(model, backend=counter) if compiles else model
            outputs.append([forward(inputs()), model.eval() and forward(inputs())])
    assert counter.frame_count > 0
    torch.testing.assert_close(*outputs)


@pytest.mark.oldest_skips("torch cannot trace the models at all")
def test_a_branch_that_another_argument_chooses_is_followed_outside(counter):
    """The branch that forwards have shown stays in its graph."""
    model, x, bias = made(Biasable), inputs(), torch.zeros(6, 6)
    with betahook.attach(model, controller="monitor", interval=1) as hook:
        model(x)
        hook.step()
        for layer in hook.layers.values():
            layer.beta = 2.0
        one_graph, compiled = (torch.compile(model, backend=counter, fullgraph=full) for full in (True, False))
        for _ in range(3):
            torch.testing.assert_close(compiled(x, bias), one_graph(x))
            hook.step()
        assert [layer.beta_default for layer in hook.layers.values()] == pytest.approx([D**-0.5] * 2)


@pytest.mark.needs_torch("2.11", "each module with hooks is compiled anew")
@pytest.mark.oldest_skips("torch cannot trace the models at all")
def test_layers_that_are_compiled_one_by_one_share_their_code(counter):
    model, x = made(FusedAttention, layers=12), inputs().requires_grad_()
    with betahook.attach(model) as hook:
        model(x).sum().backward()
        hook.step()
        for layer in model.layers:
            layer.compile(backend=counter, fullgraph=True)
        model(x).sum().backward()
        assert counter.frame_count == 1
        assert all(layer.statistics.count > 0 for layer in hook.layers.values())


@pytest.mark.oldest_skips("torch cannot trace the models at all")
def test_a_checkpoint_of_compiled_layers_runs_the_same_graph_again(counter):
    """Also in the step whose first forward shows that a graph can hold it, with several micro-batches in it."""

    def seen(compiles):
        model, x, found = made(FusedAttention), inputs().requires_grad_(), []
        with betahook.attach(model, controller="monitor", interval=1) as hook:
            if compiles:
                for layer in model.layers:
                    layer.compile(backend=counter)
            for _ in range(3):
                for shift in range(2):
                    hidden = x + shift
                    for layer in model.layers:
                        hidden = hidden + checkpoint(layer, hidden, use_reentrant=False)
                    hidden.square().mean().backward()
                statistics = [torch.stack(list(vars(layer.statistics).values())) for layer in hook.layers.values()]
                gradients = [parameter.grad.clone() for parameter in model.parameters()]
                found.append([*gradients, *(each.nan_to_num(-1) for each in statistics)])
                hook.step()
        return found

    actual = seen(compiles=True)
    assert counter.frame_count > 0
    assert_same(actual, seen(compiles=False))


class Flexible(FusedAttention):
    """Turns to sequences without a batch."""

    batched = True

    def attend(self, q, k, v):
        if self.batched:
            return super().attend(q, k, v)
        return torch.stack([super(Flexible, self).attend(*each) for each in zip(q, k, v, strict=True)])


def test_a_layout_that_comes_later_is_looked_at_outside(counter):
    outputs, refusals = [], []
    for compiles in (False, True):
        model = made(Flexible, layers=1)
        with betahook.attach(model, controller="monitor", when="always") as hook:
            model(inputs())
            (layer,) = hook.layers.values()
            model.layers[0].batched = False
            forward = torch.compile(model, backend=counter) if compiles else model
            outputs.append(forward(inputs()))
            refusals.append(layer.refusal)
    torch.testing.assert_close(*outputs)
    assert refusals[0] == refusals[1]
    assert refusals[1].startswith("its heads cannot be told from the batch")
