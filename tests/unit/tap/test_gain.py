"""The factor on the query against finite differences, where beta is not the model's own."""

import pytest
import torch
from torch import nn

from betahook.tap import gain
from betahook.tap.gain import ScaleQuery, scale_query
from support.layers import attention, make

HEADS, DEFAULT = 2, 0.25
GAINS = torch.tensor([0.5, 3.0])
"""Beta over the model's own, of each head."""


@pytest.fixture
def recorder():
    state, (layer,), (recorder,) = make(attention(nn.Module(), HEADS, 8))
    recorder.note_default(DEFAULT)
    layer.head_beta = DEFAULT * GAINS
    recorder.state = state
    return recorder


@pytest.fixture(params=["made in the forward", "large", "small"])
def scale(request, monkeypatch):
    """Each way in which a query is scaled."""
    if request.param == "made in the forward":
        return lambda recorder, query, others: scale_query(recorder, query, others, None)
    monkeypatch.setattr(gain, "SMALL", 0 if request.param == "large" else 1000)
    return lambda recorder, query, others: scale_query(recorder, query, others, DEFAULT)


def operands(dtype=torch.float64):
    generator = torch.Generator().manual_seed(0)
    return torch.randn(3, 2, HEADS, 5, 8, generator=generator, dtype=dtype).unbind(0)


def loss(query, key, value, scale=DEFAULT):
    """That of an attention, not linear in the logits."""
    return ((scale * query @ key.mT).softmax(-1) @ value).square().sum()


def difference(value_of, shift=1e-4):
    """Central difference with respect to log beta of each head."""
    differences = []
    for moved in torch.eye(HEADS, dtype=torch.float64):
        up, down = (value_of((GAINS * (sign * shift * moved).exp()).view(-1, 1, 1)).item() for sign in (1, -1))
        differences.append((up - down) / (2 * shift))
    return differences


@pytest.mark.parametrize("default", [None, DEFAULT])
def test_a_query_is_scaled_by_head(recorder, default):
    query, key, value = operands()
    expected = query * GAINS.view(-1, 1, 1)
    assert torch.equal(scale_query(recorder, query, (key, value), default), expected)
    assert torch.equal(scale_query(recorder, query.transpose(1, 2), (), default, axis=2), expected.transpose(1, 2))
    query.requires_grad_()
    assert torch.equal(scale_query(recorder, query, (), default), expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_query_keeps_its_dtype(scale, recorder, dtype):
    query, key, value = operands(dtype)
    for leaf in (query, query.requires_grad_()):
        assert scale(recorder, leaf, (key, value)).dtype == dtype


def test_the_sensitivity_away_from_the_beta_of_the_model(scale, recorder):
    """The gradient meets the scaled query, not the query itself."""
    query, key, value = operands()
    query.requires_grad_()
    loss(scale(recorder, query, (key, value)), key, value).backward()
    expected = difference(lambda factor: loss(query.detach() * factor, key, value))
    assert recorder.state.gains.sensitivity().tolist() == pytest.approx(expected, rel=1e-6)


def test_the_gradient_of_the_query_is_that_of_the_product(scale, recorder):
    query, key, value = (x.requires_grad_() for x in operands())
    gradients = torch.autograd.grad(loss(scale(recorder, query, ()), key, value), (query, key, value))
    expected = torch.autograd.grad(loss(query * GAINS.view(-1, 1, 1), key, value), (query, key, value))
    for one, other in zip(gradients, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=0)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.filterwarnings("ignore:There is a performance drop:UserWarning")  # of vmap
def test_batched_gradients_are_those_one_by_one(scale, recorder, dtype):
    query = operands(dtype)[0].requires_grad_()
    scaled = scale(recorder, query, ())
    gradients = torch.randn(3, *scaled.shape, generator=torch.Generator().manual_seed(1), dtype=dtype)
    (found,) = torch.autograd.grad(scaled, query, gradients, retain_graph=True, is_grads_batched=True)
    of_func = torch.func.vmap(lambda one: torch.autograd.grad(scaled, query, one, retain_graph=True)[0])(gradients)
    expected = torch.stack([torch.autograd.grad(scaled, query, one, retain_graph=True)[0] for one in gradients])
    assert torch.equal(found, expected)
    assert torch.equal(of_func, expected)


def test_a_query_of_several_samples_is_scaled_without_gradients(scale, recorder):
    queries = operands(torch.bfloat16)[0]
    with torch.no_grad():
        expected = scale(recorder, queries, ())
        found = torch.func.vmap(lambda query: scale(recorder, query[None], ())[0])(queries)
    assert torch.equal(found, expected)


def test_the_sensitivity_of_a_gradient(scale, recorder):
    """A gradient penalty: beta acts in the backward too."""
    query, key, value = operands()

    def penalty(scaled):
        (gradient,) = torch.autograd.grad(loss(scaled(leaf), key, value), leaf, create_graph=True)
        return gradient.square().sum()

    leaf = query.requires_grad_()
    penalty(lambda x: scale(recorder, x, (key, value))).backward()
    expected = difference(lambda factor: penalty(lambda x: x * factor))
    assert recorder.state.gains.sensitivity().tolist() == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("which", [0, 1])
def test_a_query_without_a_gradient_has_a_sensitivity_where_key_or_value_have_one(scale, recorder, which):
    query, *others = operands()
    others[which].requires_grad_()
    loss(scale(recorder, query, others), *others).backward()
    expected = difference(lambda factor: loss(query * factor, *(x.detach() for x in others)))
    assert recorder.state.gains.sensitivity().tolist() == pytest.approx(expected, rel=1e-6)


def test_nothing_that_asks_for_a_gradient_has_no_graph(scale, recorder):
    query, key, value = operands()
    assert not scale(recorder, query, (key, value)).requires_grad
    with torch.no_grad():
        assert not scale(recorder, query.requires_grad_(), (key, value)).requires_grad


def test_a_hook_that_is_paused_has_no_sensitivity(scale, recorder):
    query, key, value = operands()
    query.requires_grad_()
    recorder.state.paused = True
    loss(scale(recorder, query, (key, value)), key, value).backward()
    assert not recorder.state.gains.sensitivity().any()
    assert query.grad.abs().sum() > 0


def test_the_sensitivity_of_half_precision_is_summed_in_float32():
    query = torch.ones(1, 1, 4096, 1, dtype=torch.bfloat16, requires_grad=True)
    probe = torch.zeros(1, requires_grad=True)
    scaled = ScaleQuery.apply(query, torch.ones(1, 1, 1, 1), probe, 1, True)
    scaled.backward(torch.ones_like(scaled))
    assert probe.grad.tolist() == [4096.0]
    assert query.grad.dtype == torch.bfloat16


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_both_forms_agree_in_half_precision(recorder, monkeypatch, dtype):
    query, weights = torch.randn(2, 1, HEADS, 64, 32, generator=torch.Generator().manual_seed(0)).to(dtype)
    found = []
    for small in (0, 2**18):
        monkeypatch.setattr(gain, "SMALL", small)
        leaf = query.clone().requires_grad_()
        recorder.state.gains.set_sensitivity(None)
        scaled = scale_query(recorder, leaf, (), DEFAULT)
        (scaled * weights).sum().backward()
        found.append((scaled, leaf.grad, recorder.state.gains.sensitivity()))
    (large, of_large, expected), (small, of_small, sensitivity) = found
    assert large.dtype == small.dtype == dtype
    assert torch.equal(large, small)
    assert torch.equal(of_large, of_small)
    # The function has the scaled query, which was rounded; both add up in float32.
    torch.testing.assert_close(sensitivity, expected, rtol=1e-2, atol=0.1)
    exact = (query.double() * weights.double()).sum((0, 2, 3)) * GAINS
    torch.testing.assert_close(sensitivity.double(), exact, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("small", [True, False])
def test_autograd_keeps_the_query_itself_where_it_is_small(recorder, monkeypatch, small):
    """Of a large one it keeps the scaled query, which the attention keeps anyway."""
    query = operands(torch.float32)[0].requires_grad_()
    monkeypatch.setattr(gain, "SMALL", query.numel() - (not small))
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x.data_ptr()) or x, lambda x: x):
        scaled = scale_query(recorder, query, (), DEFAULT)
    assert (query.data_ptr() in kept) is small
    assert (scaled.data_ptr() in kept) is not small


@pytest.mark.parametrize("recomputed", [True, False])
def test_what_is_recomputed_is_not_recorded_again(recorder, monkeypatch, recomputed):
    monkeypatch.setattr(gain.compat, "is_recomputation", lambda: recomputed)
    assert recorder.is_recording is not recomputed
    recorder.state.layers_due = range(0)
    assert not recorder.is_recording
