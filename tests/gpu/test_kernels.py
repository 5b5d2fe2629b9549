"""Kernels that run on a GPU alone, and compiled models with and without CUDA graphs."""

import inspect

import pytest
import torch
from torch import nn
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

import betahook
from support.gpu import HEAD_DIM, HEADS, LENGTH, WIDTH, Block, ByHand, Fused, components, expected, llama, network

try:
    from torch.nn.attention.varlen import varlen_attn
except ImportError:  # of torch before 2.10
    varlen_attn = None

FIRST = 130
"""Tokens of the first of two packed sequences."""

CAUSAL = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril()
PACKED = (torch.arange(LENGTH) < FIRST) == (torch.arange(LENGTH) < FIRST)[:, None]


class Varlen(Block):
    """Two packed sequences."""

    @property
    def options(self):
        return {}

    def forward(self, x):
        q, k, v = (p(x)[0].unflatten(-1, (HEADS, HEAD_DIM)) for p in (self.q_proj, self.k_proj, self.v_proj))
        ends = torch.tensor([0, FIRST, LENGTH], dtype=torch.int32, device=x.device)
        return varlen_attn(q, k, v, ends, ends, FIRST, FIRST, **self.options).flatten(1)[None]


class CausalVarlen(Varlen):
    @property
    def options(self):
        windows = "window_size" in inspect.signature(varlen_attn).parameters  # from torch 2.11 on
        return {"window_size": (-1, 0)} if windows else {"is_causal": True}


compiled_flex_attention = None
"""Compiled in the test: to load the compiler takes seconds."""


class Flex(Block):
    """As it is meant to be called: compiled, with a mask in blocks."""

    def mix(self, q, k, v, padding):
        mask = create_block_mask(lambda b, h, i, j: i >= j, None, None, LENGTH, LENGTH, device="cuda")
        return compiled_flex_attention(q, k, v, block_mask=mask)


@pytest.mark.parametrize(
    ("kind", "allowed"),
    [(Varlen, PACKED), (CausalVarlen, PACKED & CAUSAL), (Flex, CAUSAL)],
    ids=["varlen", "causal varlen", "flex"],
)
def test_a_kernel_is_measured_and_scaled(kind, allowed, monkeypatch):
    monkeypatch.setitem(globals(), "compiled_flex_attention", torch.compile(flex_attention))
    if issubclass(kind, Varlen) and varlen_attn is None:
        pytest.skip("torch has no varlen_attn")
    model, x = network(kind, torch.bfloat16)
    x, allowed = x[:1], allowed.cuda()
    q, k = components(model, x)
    with betahook.attach(model, controller="monitor", interval=1) as hook:
        layer = hook.layers["1"]
        model(x).float().square().mean().backward()
        error = 1e-4 if bool(layer.statistics.exact) else 0.2  # of some rows
        for name, value in expected(q, k, allowed, HEAD_DIM**-0.5).items():
            if name in ("std", "row_std"):
                assert float((getattr(layer.head_statistics, name) / value - 1).abs().max()) < error, name
        layer.beta = 2 * layer.beta
        v = model[1].split(model[1].v_proj(model[0](x))).double()
        logits = 2 * HEAD_DIM**-0.5 * q.double() @ k.double().mT
        truth = (logits.masked_fill(~allowed, -torch.inf).softmax(-1) @ v).transpose(1, 2).flatten(2)
        assert float((model(x).double() - truth).norm() / truth.norm()) < 1e-2


def test_flex_attention_of_transformers_is_measured_as_that_of_torch():
    said = []
    for backend in ("flex_attention", "sdpa"):
        model, batch = llama(backend=backend)
        with betahook.attach(model, controller="monitor", interval=1) as hook:
            model(**batch).loss.backward()
            said.append(torch.stack([layer.statistics.std for layer in hook.layers.values()]))
    torch.testing.assert_close(*said, rtol=1e-2, atol=0)


OPTIONS = {"compiled": {}, "CUDA graphs": dict(mode="reduce-overhead")}


def said_by(model, forward, loss, options, backwards=1):
    """Losses and metrics of some steps, all but the first compiled if there are options, with a beta that moves."""
    said = []
    torch.compiler.reset()
    # A CUDA graph measures every layer in every step.
    with betahook.attach(model, controller=betahook.Search(warmup=0, window=1, rise=False), interval=1) as hook:
        for number in range(6):
            if number == 1 and options is not None:
                forward = torch.compile(forward, **options)
            model.zero_grad(set_to_none=False)  # a CUDA graph adds to gradients that lie outside of it
            for _ in range(backwards):
                torch.compiler.cudagraph_mark_step_begin()
                value = loss(forward)
                value.backward()
            hook.step()
            said.append([value.item(), *hook.metrics().values()])
    return said


def assert_same(said):
    for a, b in zip(*said, strict=True):
        assert b == pytest.approx(a, rel=2e-3, abs=1e-4)


@pytest.mark.parametrize("backwards", [1, 2], ids=["", "accumulated"])
@pytest.mark.parametrize("options", OPTIONS)
def test_a_compiled_llama_knows_of_beta_and_of_the_statistics(options, backwards):
    said = []
    for each in (None, dict(fullgraph=True, **OPTIONS[options])):
        model, batch = llama(torch.float32)
        loss = lambda forward, batch=batch: forward(**batch, use_cache=False).loss  # noqa: E731
        said.append(said_by(model, model, loss, each, backwards))
    assert_same(said)


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("kind", [Fused, ByHand])
def test_a_compiled_model_of_users_knows_of_beta_and_of_the_statistics(kind, options):
    """Attention by hand runs outside of the graphs."""
    said = []
    for each in (None, dict(fullgraph=kind is Fused, **OPTIONS[options])):
        model, x = network(kind)
        torch.manual_seed(1)
        model.append(nn.Linear(WIDTH, WIDTH, device="cuda"))
        said.append(said_by(model, model, lambda forward, x=x: forward(x).square().mean(), each))
    assert_same(said)


def test_a_graph_that_users_capture_measures_every_layer_in_every_run():
    model, batch = llama(torch.float32)
    with betahook.attach(model, controller="monitor", interval=3) as hook:
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):
                model(**batch).loss.backward()
                hook.step()
        torch.cuda.current_stream().wait_stream(side)
        model.zero_grad()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            loss = model(**batch).loss
            loss.backward()
        hook.step()
        for beta in (0.1, 0.3):
            for layer in hook.layers.values():
                layer.beta = beta
            graph.replay()
            torch.testing.assert_close(loss, model(**batch).loss, rtol=1e-4, atol=0)
            assert all(layer.statistics.count > 0 for layer in hook.layers.values())
            hook.step()
