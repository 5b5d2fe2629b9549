"""The second tap on torch's own modules: `nn.MultiheadAttention`, and the encoders that are made of it."""

import math

import pytest
import torch
from torch import nn

import betahook
from support.attention import HEADS, LENGTH, PADDING, WIDTH, padded_encoder
from support.matrices import overall_std

MASKS = {
    "none": {},
    "causal": {"attn_mask": torch.full((LENGTH, LENGTH), -math.inf).triu(1)},
    "padding": {"key_padding_mask": PADDING},
}


@pytest.mark.parametrize("need_weights", [True, False])
@pytest.mark.parametrize("mask", MASKS)
def test_multihead_attention(x, mask, need_weights):
    torch.manual_seed(0)
    model = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)
    expected = model(x, x, x, need_weights=need_weights, **MASKS[mask])
    with betahook.attach(model, controller="monitor") as hook:
        got = model(x, x, x, need_weights=need_weights, **MASKS[mask])
        statistics, heads = hook.layers[""].statistics, hook.layers[""].head_statistics
        assert hook.layers[""].beta_default == pytest.approx(8**-0.5)
        hook.layers[""].beta = 2 * hook.layers[""].beta_default
        doubled = model(x, x, x, need_weights=need_weights, **MASKS[mask])[0]
    assert torch.equal(got[0], expected[0])
    assert (got[1] is None) == (not need_weights)
    if need_weights:
        assert torch.equal(got[1], expected[1])

    q, k, _ = (x.double() @ model.in_proj_weight.double().T + model.in_proj_bias.double()).chunk(3, -1)
    q, k = (t.unflatten(-1, (HEADS, -1)).transpose(1, 2) for t in (q, k))
    allowed = torch.ones(3, HEADS, LENGTH, LENGTH, dtype=torch.bool)
    if mask == "causal":
        allowed = allowed.tril()
    if mask == "padding":
        allowed &= ~MASKS[mask]["key_padding_mask"][:, None, None, :]
    scores = (q @ k.mT)[allowed]
    assert statistics.count == scores.numel()
    torch.testing.assert_close(overall_std(heads), scores.std(correction=0), rtol=1e-5, atol=1e-6)
    with torch.no_grad():
        model.in_proj_weight[:WIDTH] *= 2
        model.in_proj_bias[:WIDTH] *= 2
    torch.testing.assert_close(doubled, model(x, x, x, **MASKS[mask])[0], rtol=1e-5, atol=1e-5)


def test_a_look_at_the_weights_later_is_followed_too(x):
    """Torch then takes a branch in which batch and heads lie in one axis."""
    torch.manual_seed(0)
    model = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)
    with betahook.attach(model, controller="monitor") as hook:
        model(x, x, x, need_weights=False)
        hook.layers[""].head_beta = torch.linspace(0.1, 1, HEADS)
        fused, _ = model(x, x, x, need_weights=False)
        by_hand, _ = model(x, x, x, need_weights=True)
        assert hook.layers[""].refusal is None
    torch.testing.assert_close(by_hand, fused, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("need_weights", [True, False])
def test_a_first_batch_of_one_sequence(x, need_weights):
    """Torch puts batch and heads into one axis, which has as many entries as heads then."""
    torch.manual_seed(0)
    model = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)
    with betahook.attach(model, controller="monitor") as hook:
        model(x[:1], x[:1], x[:1], need_weights=need_weights)
        hook.layers[""].head_beta = torch.linspace(0.1, 1, HEADS)
        got = model(x, x, x, need_weights=need_weights)[0]
    with torch.no_grad():
        factors = torch.linspace(0.1, 1, HEADS).repeat_interleave(8) * 8**0.5
        model.in_proj_weight[:WIDTH] *= factors[:, None]
        model.in_proj_bias[:WIDTH] *= factors
    torch.testing.assert_close(got, model(x, x, x)[0], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("need_weights", [True, False])
def test_a_first_forward_that_is_not_measured(x, need_weights):
    """As in a look at the validation set before training."""
    model, statistics = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True), []
    for evaluates in (False, True):
        with betahook.attach(model, controller="monitor") as hook:
            if evaluates:
                with torch.no_grad():
                    model.eval()(x, x, x, need_weights=need_weights)
            model.train()(x, x, x, need_weights=need_weights)
            statistics.append((hook.layers[""].refusal, hook.layers[""].statistics.std))
    assert statistics[0] == statistics[1]
    assert statistics[0][0] is None


@pytest.mark.parametrize("average", [True, False])
@pytest.mark.parametrize("need_weights", [True, False])
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
def test_nested_tensors(need_weights, average):
    """In evaluation and without gradients, as torch takes them: each sequence by itself."""
    torch.manual_seed(0)
    model = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True).eval()
    sequences = [torch.randn(length, WIDTH) for length in (3, 5, 1)]
    nested = torch.nested.nested_tensor(sequences)
    options = {"need_weights": need_weights, "average_attn_weights": average}
    with betahook.attach(model, controller="monitor", when="always") as hook, torch.no_grad():
        got, weights = model(nested, nested, value=nested, **options)
        measured = hook.layers[""].statistics
        hook.layers[""].beta = 2 * hook.layers[""].beta_default
        doubled = model(query=nested, key=nested, value=nested, **options)[0]
        hook.step()
        betahook.fold(model)
        folded = model(nested, nested, nested, **options)[0]
    with torch.no_grad():
        model.in_proj_weight[:WIDTH] /= 2
        model.in_proj_bias[:WIDTH] /= 2
        expected, expected_weights = model(nested, nested, nested, **options)
    for one, other in ((got, expected), (doubled, folded)):
        for a, b in zip(one.unbind(), other.unbind(), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)
    assert (weights is None) == (not need_weights)
    if need_weights:
        torch.testing.assert_close(weights, expected_weights, rtol=1e-5, atol=1e-6)
    assert measured.count == HEADS * (9 + 25 + 1)
    torch.testing.assert_close(float(measured.input_std_q), float(torch.cat(sequences).std(correction=0)))


@pytest.mark.parametrize("layout", [torch.strided, torch.jagged])
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
def test_nested_tensors_that_torch_does_not_take(layout):
    model = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)
    nested = torch.nested.nested_tensor([torch.randn(3, WIDTH), torch.randn(5, WIDTH)], layout=layout)
    with (
        betahook.attach(model, controller="monitor"),
        pytest.raises(AssertionError, match="because training is enabled"),
    ):
        model(nested, nested, nested)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
def test_nested_tensors_in_an_encoder():
    encoder = padded_encoder().eval()
    nested = torch.nested.nested_tensor([torch.randn(3, WIDTH), torch.randn(5, WIDTH)])
    with torch.no_grad():
        expected = encoder(nested)
        with betahook.attach(encoder, controller="monitor", when="always") as hook:
            got = encoder(nested)
            assert [float(layer.statistics.count) for layer in hook.layers.values()] == [HEADS * (9 + 25)] * 2
    for a, b in zip(got.unbind(), expected.unbind(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


def test_a_row_without_a_key_in_evaluation(x):
    """Zero as in training, where torch's fast path, which a hooked module does not take, gives NaN."""
    model = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True).eval()
    padding = torch.zeros(3, LENGTH, dtype=torch.bool)
    padding[0] = True
    with torch.no_grad(), betahook.attach(model, controller="monitor"):
        got = model(x, x, x, key_padding_mask=padding, need_weights=False)[0]
    assert (got[0] == 0).all()
    with_gradients = model(x, x, x, key_padding_mask=padding, need_weights=False)[0]
    torch.testing.assert_close(got, with_gradients, rtol=0, atol=0)
    with torch.no_grad():
        assert model(x, x, x, key_padding_mask=padding, need_weights=False)[0][0].isnan().all()


def test_the_weights_and_inputs_of_multihead_attention(x):
    """Query and key enter one module, as its first two arguments, and meet two thirds of one weight."""
    torch.manual_seed(0)
    model, keys = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True), 3 * x + 1
    with betahook.attach(model, controller="monitor") as hook:
        model(x, keys, keys)
        layer, measured = hook.layers[""], hook.layers[""].statistics
    query_rows, key_rows, _ = model.in_proj_weight.detach().chunk(3)
    for got, entries in (
        (layer.weight_std_q, query_rows),
        (layer.weight_std_k, key_rows),
        (float(measured.input_std_q), x),
        (float(measured.input_std_k), keys),
    ):
        assert got == pytest.approx(entries.double().std(correction=0).item(), rel=1e-5)


def test_the_weights_and_inputs_of_multihead_attention_with_keys_of_another_width(x):
    """Query and key meet a weight each, and two thirds of one bias."""
    torch.manual_seed(0)
    model, x = nn.MultiheadAttention(WIDTH, HEADS, kdim=8, batch_first=True).double(), x.double()
    nn.init.normal_(model.in_proj_bias)
    keys = 3 * x[..., :8] + 1
    with betahook.attach(model, controller="monitor", per_head=True) as hook:
        model(x, keys, x)
        layer, measured = hook.layers[""], hook.layers[""].statistics
        for got, entries in (
            (layer.weight_std_q, model.q_proj_weight),
            (layer.weight_std_k, model.k_proj_weight),
            (float(measured.input_std_q), x),
            (float(measured.input_std_k), keys),
        ):
            assert got == pytest.approx(entries.std(correction=0).item(), rel=1e-10)
        layer.head_beta = torch.linspace(0.1, 1, HEADS)
        expected = model(x, keys, x)[0]
        betahook.fold(model)
    torch.testing.assert_close(model(x, keys, x)[0], expected, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("training", [True, False])
def test_transformer_encoder_and_its_fast_path(x, training):
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 2 * WIDTH, dropout=0.0, batch_first=True)
    model = nn.TransformerEncoder(layer, 2).train(training)
    with torch.no_grad():
        expected = model(x)
        with betahook.attach(model, controller="monitor", when="always") as hook:
            assert list(hook.layers) == ["layers.0.self_attn", "layers.1.self_attn"]
            torch.testing.assert_close(model(x), expected, rtol=1e-5, atol=1e-5)
            assert all(layer.statistics.count == 3 * HEADS * LENGTH**2 for layer in hook.layers.values())
        assert torch.equal(model(x), expected)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
@torch.no_grad()
def test_a_transformer_encoder_takes_padding_in_evaluation(x):
    """Where it alone makes a nested tensor of the batch, for its fast path."""
    model = nn.Sequential(padded_encoder()).eval()
    expected = model[0](x, src_key_padding_mask=PADDING)
    assert (expected[PADDING] == 0).all()
    with betahook.attach(model, controller="monitor", when="always") as hook:
        got = model[0](x, src_key_padding_mask=PADDING)
        for layer in hook.layers.values():
            assert layer.statistics.count == HEADS * LENGTH * (~PADDING).sum()
    torch.testing.assert_close(got[~PADDING], expected[~PADDING], rtol=1e-5, atol=1e-5)
    assert torch.equal(model[0](x, src_key_padding_mask=PADDING), expected)


@pytest.mark.parametrize("first", [0, 1])
@pytest.mark.parametrize("nested", [True, False])
def test_the_nested_tensors_of_an_encoder_come_back(nested, first):
    model = nn.ModuleList([padded_encoder(), padded_encoder(), padded_encoder()])
    model[0].use_nested_tensor = nested
    hooks = [betahook.attach(model, layers="0.layers.1.*"), betahook.attach(model[1])]
    assert [encoder.use_nested_tensor for encoder in model] == [False, False, True]
    hooks[first].detach()
    assert [encoder.use_nested_tensor for encoder in model] == [nested and first == 0, first == 1, True]
    hooks[1 - first].detach()
    assert [encoder.use_nested_tensor for encoder in model] == [nested, True, True]


def test_arguments_may_be_given_by_name(x):
    model = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)
    predicted = []
    for call in (lambda: model(x, 2 * x, x), lambda: model(value=x, key=2 * x, query=x)):
        with betahook.attach(model, controller="monitor") as hook:
            call()
            hook.step()
            predicted.append(hook.metrics()["predicted_std/"])
    assert predicted[0] == predicted[1]


@pytest.mark.parametrize("need_weights", [True, False])
@pytest.mark.parametrize("shape", [(2, 0, WIDTH), (0, 4, WIDTH)])
def test_an_empty_query_adds_nothing(shape, need_weights):
    """No boxes to track, or no sample on this rank."""
    model = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)
    query, key = torch.zeros(shape), torch.zeros(shape[0], 4, WIDTH)
    with betahook.attach(model, controller="monitor") as hook:
        output, _ = model(query, key, key, need_weights=need_weights)
        assert output.shape == shape
        assert hook.layers[""].statistics.count == 0


def test_a_patch_of_torch_is_seen(x, monkeypatch):
    """By someone else, while the model is hooked."""
    model, linear, calls = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True), torch.nn.functional.linear, []
    with betahook.attach(model, controller="monitor"):
        model(x, x, x, need_weights=False)
        monkeypatch.setattr(torch.nn.functional, "linear", lambda *args: (calls.append(1), linear(*args))[1])
        model(x, x, x, need_weights=False)
    assert calls
