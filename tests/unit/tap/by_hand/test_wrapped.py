"""Functions of torch that somebody wraps while a model is hooked, as the profiler of DeepSpeed does for a step."""

import functools

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import handle_torch_function, has_torch_function

import betahook
from support.attention import HEADS, LENGTH, WIDTH, ByHandAttention, FusedAttention, make

NAMES = [(torch.Tensor, name) for name in ("__matmul__", "matmul")] + [(torch, name) for name in ("softmax", "bmm")]
NAMES += [(F, name) for name in ("softmax", "scaled_dot_product_attention")]
ATTENTION = (F, "multi_head_attention_forward")


def wrap(monkeypatch, names, *, says_so=True):
    """Wrap functions; returns a list of the calls to come. DeepSpeed's wrappers do not say what they wrap."""
    calls = []

    def wrapped(original):
        def wrapper(*args, **kwargs):
            calls.append(original)
            return original(*args, **kwargs)

        return functools.wraps(original)(wrapper) if says_so else wrapper

    for owner, name in names:
        monkeypatch.setattr(owner, name, wrapped(getattr(owner, name)))
    return calls


def encoder():
    torch.manual_seed(1)
    return nn.Sequential(nn.Identity(), nn.TransformerEncoderLayer(WIDTH, HEADS, WIDTH, 0.0, batch_first=True))


class Functional(ByHandAttention):
    def values(self, logits, v):
        return F.softmax(logits, -1) @ v


@pytest.mark.parametrize("says_so", [True, False])
@pytest.mark.parametrize("begins", [0, 1])
@pytest.mark.parametrize("kind", [ByHandAttention, Functional, FusedAttention, encoder])
def test_a_wrapper_that_comes_or_goes_changes_nothing(kind, begins, says_so, monkeypatch):
    x = torch.randn(HEADS - 1, LENGTH, WIDTH, generator=torch.Generator().manual_seed(0))

    def outputs(*, wrapped):
        model = encoder() if kind is encoder else make(kind)
        found = []
        with betahook.attach(model, controller="monitor", interval=1) as hook:
            (layer,) = hook.layers.values()
            for step in range(3):
                with monkeypatch.context() as patches:
                    calls = wrap(patches, NAMES if wrapped and step % 2 == begins else [], says_so=says_so)
                    found.append(model(x))
                found[-1].square().sum().backward()
                hook.step()
                assert bool(calls) is (wrapped and step % 2 == begins)
                found += [layer.statistics.std, layer.statistics.sensitivity]
                layer.beta = 0.7
        return [tensor.detach() for tensor in found]

    torch.testing.assert_close(outputs(wrapped=True), outputs(wrapped=False), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("need_weights", [False, True])
def test_the_attention_of_torch_itself_is_wrapped(need_weights, monkeypatch, x):
    model = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)
    expected = model(x, x, x, need_weights=need_weights)[0]
    with betahook.attach(model, controller="monitor", interval=1) as hook:
        calls = wrap(monkeypatch, [ATTENTION])
        assert torch.equal(model(x, x, x, need_weights=need_weights)[0], expected)
        assert len(calls) == 1
        assert hook.layers[""].statistics.count > 0


def test_a_copy_in_the_place_of_the_attention_of_torch_is_run(monkeypatch, x):
    """With what it has in a closure; it hands itself over as torch's does."""
    add = 1.0

    def multi_head_attention_forward(query, *args, **kwargs):
        if has_torch_function((query,)):
            return handle_torch_function(multi_head_attention_forward, (query,), query, *args, **kwargs)
        return query + add, None

    model = nn.MultiheadAttention(WIDTH, HEADS)
    monkeypatch.setattr(F, "multi_head_attention_forward", multi_head_attention_forward)
    expected = model(x, x, x)[0]
    with betahook.attach(model, controller="monitor"):
        assert torch.equal(model(x, x, x)[0], expected)
