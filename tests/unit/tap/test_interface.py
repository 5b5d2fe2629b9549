"""The tap against the model alone, bit by bit, and against an independent trace of its attention."""

import functools
import gc
import math
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from unittest import mock

import pytest
import torch
import transformers
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS, AttentionInterface

import betahook
from betahook.measure.masks import Band
from betahook.tap import interface
from betahook.tap.interface import given_mask
from support.matrices import overall_std
from support.models import FAMILIES, GROUPED, SIZE, build, delegating, derivative, inputs, trace
from support.training import enable_checkpointing


def run(model, batch):
    """Outputs, gradients and the random state after one forward and backward."""
    torch.manual_seed(3)
    output = model(**batch)
    output.loss.backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return output.logits.detach(), output.loss.detach(), gradients, torch.get_rng_state()


def assert_identical(a, b):
    for x, y in zip(a, b, strict=True):
        if isinstance(x, dict):
            assert x.keys() == y.keys()
            assert all(torch.equal(x[name], y[name]) for name in x)
        else:
            assert torch.equal(x, y)


@pytest.mark.oldest_skips("T5 writes its attention by hand, and has no sdpa", family="t5")
@pytest.mark.parametrize(("family", "backend"), FAMILIES)
def test_monitoring_changes_no_bit(family, backend):
    model, batch = build(family, backend), inputs(family)
    alone = run(model, batch)
    with betahook.attach(model, controller="monitor") as hook:
        assert_identical(alone, run(model, batch))
        hook.step()
        assert_identical(alone, run(model, batch))
    assert_identical(alone, run(model, batch))


SCALED_QUERY = {"opt": 8**-0.5}
"""What a family has put on its query when it asks for its attention; no part of a raw score."""


@pytest.mark.oldest_skips("T5 writes its attention by hand, and has no sdpa", family="t5")
@pytest.mark.parametrize(("family", "backend"), FAMILIES)
def test_statistics_equal_brute_force(family, backend):
    batch = inputs(family)
    with trace() as calls:
        build(family, "eager")(**batch)
    model = build(family, backend)
    hook = betahook.attach(model, controller="monitor")
    model(**batch)
    layers = list(hook.layers.values())
    assert len(layers) == len(calls)
    # Encoder-decoder models run in another order than they list their modules.
    for call in calls:
        scores, allowed = call.scores()
        scores = scores / SCALED_QUERY.get(family, 1.0)
        used = [scores[:, head][allowed.expand_as(scores)[:, head]] for head in range(scores.shape[1])]
        mean = torch.stack([x.mean() for x in used])
        std = torch.stack([x.std(correction=0) for x in used])
        candidates = [
            layer
            for layer in layers
            if torch.allclose(layer.head_statistics.std, std, rtol=1e-5)
            and torch.allclose(layer.head_statistics.mean, mean, rtol=1e-5, atol=float(std.max()) * 1e-6)
        ]
        assert len(candidates) == 1, (std, [layer.head_statistics.std for layer in layers])
        (layer,) = candidates
        assert layer.head_statistics.count.tolist() == [x.numel() for x in used]
        assert bool(layer.statistics.exact)
        assert float(layer.statistics.max_score) == pytest.approx(max(float(x.abs().max()) for x in used), rel=1e-5)
        layers.remove(layer)
    hook.detach()


@pytest.mark.oldest_skips("T5 writes its attention by hand, and has no sdpa", family="t5")
@pytest.mark.parametrize(("family", "backend"), FAMILIES)
def test_entropy_equals_that_of_the_softmax(family, backend):
    batch = inputs(family)
    with trace() as calls:
        build(family, "eager")(**batch)
    model = build(family, backend)
    with betahook.attach(model, controller="monitor") as hook:
        model(**batch)
        measured = sorted(float(layer.statistics.entropy) for layer in hook.layers.values())
    expected = []
    for call in calls:
        p = call.softmax_input.double().softmax(-1)
        expected.append(float(torch.special.entr(p).sum(-1).mean()))
    assert measured == pytest.approx(sorted(expected), rel=1e-4)


@pytest.mark.oldest_skips("GPT-2 passes no scaling that the test could change", family="gpt2", backend="eager")
@pytest.mark.oldest_skips("T5 writes its attention by hand, and has no sdpa", family="t5")
@pytest.mark.parametrize(("family", "backend"), FAMILIES)
def test_half_of_beta_is_half_of_the_query(family, backend):
    """Beta acts as a factor on the scores: the same as scaling them where eager multiplies."""
    model, batch = build(family, backend), inputs(family)
    with betahook.attach(model, controller="monitor") as hook:
        model(**batch)
        for layer in hook.layers.values():
            layer.beta = 0.5 * layer.beta_default
        halved = model(**batch).logits
    expected = _with_scores_scaled(model, batch, 0.5)
    torch.testing.assert_close(halved, expected, rtol=1e-5, atol=1e-5)


def _with_scores_scaled(model, batch, factor):
    """The model with the `scaling` argument of every attention call multiplied by `factor`."""
    original = AttentionInterface.get_interface

    def get_interface(self, name, default):
        function = original(self, name, default)

        def scaled(module, query, *args, **kwargs):
            scaling = kwargs.get("scaling") or query.shape[-1] ** -0.5
            return function(module, query, *args, **{**kwargs, "scaling": scaling * factor})

        return scaled

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(AttentionInterface, "get_interface", get_interface)
        return model(**batch).logits


SMOOTH = {"t5": {"dense_act_fn": "gelu_new", "feed_forward_proj": "gelu"}, "opt": {"activation_function": "gelu"}}
"""A finite difference across the kinks of a ReLU says nothing about a derivative."""


@pytest.mark.oldest_skips("T5 writes its attention by hand, and has no sdpa", family="t5")
@pytest.mark.parametrize(("family", "backend"), FAMILIES)
def test_sensitivity_equals_a_finite_difference(family, backend):
    model = build(family, backend, **SMOOTH.get(family, {})).double()
    batch = {name: x.double() if x.is_floating_point() else x for name, x in inputs(family).items()}

    def loss():
        # Softmax and norms ask for torch.float32 by name, whose noise would drown the differences.
        with mock.patch.object(torch, "float32", torch.float64):
            logits = model(**batch).logits.flatten(0, -2)
        return torch.nn.functional.cross_entropy(logits, batch["labels"].flatten())

    with betahook.attach(model, controller="monitor") as hook:
        loss().backward()
        layers = list(hook.layers.values())
        sensitivities = [float(layer.statistics.sensitivity) for layer in layers]
        for layer, sensitivity in zip(layers, sensitivities, strict=True):
            default, h = layer.beta_default, 0.01
            values = {}
            for shift in (-2, -1, 1, 2):
                layer.beta = default * math.exp(shift * h)
                values[shift] = loss().item()
            layer.beta = default
            # Five-point stencil: the error is of fourth order in h.
            expected = (8 * (values[1] - values[-1]) - (values[2] - values[-2])) / (12 * h)
            assert sensitivity == pytest.approx(expected, rel=1e-4)


def test_sensitivity_of_a_loss_that_contains_a_gradient():
    """A gradient penalty: beta acts in the forward and in the backward that is differentiated again."""
    model, batch = build("llama", "eager").double(), inputs("llama")
    embedded = model.get_input_embeddings()(batch.pop("input_ids")).detach().requires_grad_()

    def loss():
        with mock.patch.object(torch, "float32", torch.float64):
            output = model(inputs_embeds=embedded, **batch).loss
        (gradient,) = torch.autograd.grad(output, embedded, create_graph=True)
        return 1e3 * gradient.square().sum()

    with betahook.attach(model, controller="monitor") as hook:
        loss().backward()
        layers = list(hook.layers.values())
        sensitivities = [float(layer.statistics.sensitivity) for layer in layers]
        assert sensitivities == pytest.approx([derivative(layer, loss) for layer in layers], rel=1e-3)


def delegated(backend, reentrant=None):
    """Bits of a step with a beta of its own, and its statistics."""
    model, batch = build("llama", "sdpa"), inputs("llama")
    model.config._attn_implementation = backend
    if reentrant is not None:
        enable_checkpointing(model, reentrant)
        model.enable_input_require_grads()
    with betahook.attach(model, controller="monitor", interval=1) as hook:
        for layer in hook.layers.values():
            layer.beta = 1.0
        bits = run(model, batch)
        measured = [torch.stack(list(vars(layer.statistics).values())) for layer in hook.layers.values()]
    return [*bits, *(each.nan_to_num(-1) for each in measured)]


@pytest.mark.parametrize("reentrant", [None, False, True], ids=["plain", "checkpointed", "reentrant"])
def test_a_function_that_asks_the_interface_for_another_one_is_scaled_and_measured_once(reentrant):
    with delegating() as backend:
        assert_identical(delegated(backend, reentrant), delegated("sdpa", reentrant))


@pytest.fixture
def attend():
    """Calls an attention function for a module of the tiny llama."""
    query, key = torch.randn(1, 4, 6, 8, requires_grad=True), torch.randn(1, 2, 6, 8)
    return lambda module, name="sdpa": ALL_ATTENTION_FUNCTIONS.get_interface(name, None)(module, query, key, key, None)


def test_a_function_that_failed_may_be_called_again(attend):
    def fail(module):
        if failing:
            raise KeyboardInterrupt

    model, failing = build("llama", "sdpa"), True
    with delegating(fail) as backend, betahook.attach(model, controller="monitor") as hook:
        with pytest.raises(KeyboardInterrupt):
            attend(model.model.layers[0].self_attn, backend)
        failing = False
        once = hook.layers["model.layers.0.self_attn"].statistics.count
        attend(model.model.layers[0].self_attn, backend)
        assert hook.layers["model.layers.0.self_attn"].statistics.count == 2 * once > 0


def test_attention_of_other_modules_and_threads_within_a_function_is_measured_too(attend):
    model = build("llama", "sdpa")
    first, second = (layer.self_attn for layer in model.model.layers)

    def attend_elsewhere(module):
        attend(second)
        with ThreadPoolExecutor() as pool:
            pool.submit(attend, first).result()

    with delegating(attend_elsewhere) as backend, betahook.attach(model, controller="monitor") as hook:
        attend(first, backend)
        counts = [float(layer.statistics.count) for layer in hook.layers.values()]
    assert counts[0] == 2 * counts[1] > 0


@pytest.mark.filterwarnings("ignore:Using backward")
def test_statistics_have_no_graph():
    model = build("llama", "eager")
    with betahook.attach(model, controller="monitor") as hook:
        model(**inputs("llama")).loss.backward(create_graph=True)
        assert not any(layer.statistics.sensitivity.requires_grad for layer in hook.layers.values())
        hook.step()
        model.zero_grad()


@pytest.fixture
def original():
    """The method of transformers, free of the hooks of earlier tests, which go with the garbage collector."""
    gc.collect()
    assert not hasattr(AttentionInterface.get_interface, "betahook_original")
    return AttentionInterface.get_interface


def test_one_registration_removed_with_the_last_hook(original):
    first = betahook.attach(build("llama"))
    second = betahook.attach(build("gpt2"))
    assert AttentionInterface.get_interface is not original
    first.detach()
    assert AttentionInterface.get_interface.betahook_original is original
    second.detach()
    second.detach()
    assert AttentionInterface.get_interface is original


def test_other_models_are_left_alone_while_one_is_hooked():
    model, batch = build("llama", "sdpa"), inputs("llama")
    alone = run(model, batch)
    with betahook.attach(build("gpt2"), controller="monitor"):
        assert_identical(alone, run(model, batch))


def test_detach_restores_every_attribute_and_hook():
    def fingerprint(model):
        return [
            (name, sorted(vars(module)), [len(getattr(module, h)) for h in vars(module) if h.endswith("_hooks")])
            for name, module in model.named_modules()
        ]

    model = build("llama")
    before, state = fingerprint(model), {k: v.clone() for k, v in model.state_dict().items()}
    hook = betahook.attach(model)
    assert fingerprint(model) != before
    assert model.state_dict().keys() == state.keys()
    model(**inputs("llama")).loss.backward()
    hook.step()
    model.zero_grad()
    hook.detach()
    assert fingerprint(model) == before
    assert all(torch.equal(v, state[k]) for k, v in model.state_dict().items())


@pytest.mark.parametrize("change", [None, lambda self, name: None], ids=["none", "of two parameters"])
def test_a_transformers_without_the_interface_is_named(monkeypatch, change):
    """When its attention is to be hooked first, as if this were it."""
    model = build("llama")
    monkeypatch.delitem(sys.modules, interface.__name__)
    monkeypatch.delattr("betahook.tap.interface")
    if change is None:
        monkeypatch.delattr(AttentionInterface, "get_interface")
    else:
        monkeypatch.setattr(AttentionInterface, "get_interface", change)
    with pytest.raises(ImportError, match=r"betahook needs transformers 5\.1 or later"):
        betahook.attach(model)


@pytest.mark.slow
def test_models_of_transformers_are_loaded_where_one_is_hooked():
    """They take longer to import than all else; a model of one's own does not need them."""
    code = """
import sys, torch, betahook
model = torch.nn.TransformerEncoderLayer(16, 2, batch_first=True)
with betahook.attach(model, controller="monitor") as hook:
    model(torch.randn(2, 5, 16)).sum().backward()
    hook.step()
    print(len(hook.layers), "transformers.modeling_utils" in sys.modules)
"""
    assert subprocess.check_output([sys.executable, "-c", code], text=True) == "1 False\n"


def test_a_transformers_that_asks_elsewhere_is_named(monkeypatch, original):
    """As if the functions were kept by another class, on which the wrapped method has no effect."""
    elsewhere = type("Elsewhere", (), {"get_interface": lambda self, name, default: default})()
    monkeypatch.setattr(interface, "ALL_ATTENTION_FUNCTIONS", elsewhere)
    with pytest.raises(RuntimeError, match=r"does not know how transformers \S+ looks up its attention functions"):
        betahook.attach(build("llama"))
    assert AttentionInterface.get_interface is original


def test_attention_that_bypasses_the_tap_is_no_silent_success(monkeypatch):
    """As if the modules had bound their attention function before."""
    model = build("llama")
    with betahook.attach(model) as hook:
        with monkeypatch.context() as patch:
            patch.setattr(AttentionInterface, "get_interface", AttentionInterface.get_interface.betahook_original)
            model(**inputs("llama"))
        with pytest.raises(RuntimeError, match="If it did not, this version of betahook does not know"):
            hook.step()


def test_the_factor_that_a_query_carries_is_a_part_of_beta():
    """OPT scales its query before it asks for its attention, with 1.0 for what is left to do."""
    model = build("opt")
    with betahook.attach(model, controller="monitor") as hook, trace() as calls:
        model(**inputs("opt"))
        for layer, call in zip(hook.layers.values(), calls, strict=True):
            scaled, allowed = call.scores()
            raw = scaled[allowed] * 8**0.5
            assert layer.beta_default == pytest.approx(8**-0.5)
            torch.testing.assert_close(
                overall_std(layer.head_statistics), raw.double().std(correction=0), rtol=1e-5, atol=1e-6
            )


@pytest.mark.parametrize(
    ("implementation", "queries", "keys", "mask", "options", "band"),
    [
        ("flash_attention_2", 5, 5, None, {}, Band(None, 0)),
        ("flash_attention_2", 3, 8, None, {}, Band(None, 5)),
        ("flash_attention_2", 3, 8, None, {"sliding_window": 4}, Band(1, 5)),
        ("flash_attention_2", 5, 5, None, {"is_causal": False}, Band()),
        ("flash_attention_2", 5, 5, None, {"is_causal": False, "sliding_window": 2}, Band(-2, 1)),
        ("flash_attention_2", 3, 8, (2, 8), {}, Band(None, 5)),
        ("flash_attention_2", 5, 5, (2, 5), {"is_causal": False, "sliding_window": 2}, Band(-2, 1)),
        ("sdpa", 5, 5, (2, 1, 5, 5), {"is_causal": False, "sliding_window": 2}, Band(-2, 1)),
        ("sdpa", 5, 5, None, {}, Band(None, 0)),
        ("sdpa", 3, 8, None, {}, Band(None, 0)),  # which counts positions from the beginning of the keys
        ("sdpa", 1, 8, None, {}, Band()),
        ("sdpa", 5, 5, None, {"is_causal": False}, Band()),
        ("sdpa", 3, 8, (2, 1, 3, 8), {"sliding_window": 4}, Band(1, 5)),
        ("eager", 5, 5, None, {}, Band()),
    ],
)
def test_which_pairs_an_attention_uses(implementation, queries, keys, mask, options, band):
    query, key = torch.zeros(2, 4, queries, 8), torch.zeros(2, 4, keys, 8)
    mask = None if mask is None else torch.ones(mask, dtype=torch.bool)
    assert given_mask(implementation, torch.nn.Module(), query, key, mask, options).band == band


def test_positions_behind_a_cache_tell_of_no_documents():
    query, key = torch.zeros(1, 2, 3, 4), torch.zeros(1, 2, 8, 4)
    options = {"position_ids": torch.tensor([[5, 6, 7]]), "is_causal": True}
    assert given_mask("flash_attention_2", torch.nn.Module(), query, key, None, options).kind == "none"


@pytest.mark.parametrize(
    ("implementation", "mask", "options", "band"),
    [
        ("flash_attention_2", None, {"sliding_window": None}, Band(None, 0)),
        ("flash_attention_2", None, {"sliding_window": 0}, Band(None, 0)),  # the kernel takes it for none
        ("flash_attention_2", None, {}, Band(None, 0)),
        ("flash_attention_2", None, {"sliding_window": 2}, Band(-2, 0)),
        ("sdpa", (2, 1, 5, 5), {"sliding_window": None}, Band(None, 0)),
        ("sdpa", (2, 1, 5, 5), {}, Band(-3, 0)),
    ],
)
def test_the_window_of_a_call_is_that_of_its_options(implementation, mask, options, band):
    """Layers of Exaone 4 keep the window of their config where they do not use it; others pass theirs in no option."""
    module, tokens = torch.nn.Module(), torch.zeros(2, 4, 5, 8)
    module.sliding_window = 3
    mask = None if mask is None else torch.ones(mask, dtype=torch.bool)
    assert given_mask(implementation, module, tokens, tokens, mask, options).band == band


@pytest.mark.parametrize(("implementation", "adds"), [("eager", True), ("sdpa", False)])
def test_eager_attention_adds_a_boolean_mask(implementation, adds):
    tokens, mask = torch.zeros(2, 4, 5, 8), torch.ones(2, 1, 5, 5, dtype=torch.bool).tril()
    found = given_mask(implementation, torch.nn.Module(), tokens, tokens, mask, {}).describe(5, 5)
    assert torch.equal(found.pairs, torch.ones_like(mask) if adds else mask)
    assert torch.equal(found.bias, mask.float()) if adds else found.bias is None


@pytest.mark.parametrize(("mask", "reach"), [((2, 1, 9, 9), 3), ((2, 9), 2), (None, 2)], ids=["4-D", "2-D", "none"])
def test_a_window_to_both_sides_goes_by_the_config_where_a_mask_does(mask, reach):
    """T5Gemma calls its attention with the number of its config, ModernBERT with one more."""
    module, tokens = torch.nn.Module(), torch.zeros(2, 4, 9, 8)
    module.config = transformers.PretrainedConfig(sliding_window=3)
    mask = None if mask is None else torch.ones(mask, dtype=torch.bool)
    options = {"is_causal": False, "sliding_window": 3}
    found = given_mask("flash_attention_2", module, tokens, tokens, mask, options)
    assert found.band == Band(-reach - 1, reach)


def attend_to_neighbours(module, query, key, value, attention_mask, scaling=None, sliding_window=None, **_):
    """As flash attention of transformers does."""
    positions = torch.arange(query.shape[2])
    near = (positions - positions[:, None]).abs() < (sliding_window or len(positions))
    output = torch.nn.functional.scaled_dot_product_attention(query, key, value, near, scale=scaling)
    return output.transpose(1, 2).contiguous(), None


@pytest.mark.oldest_skips("its config has other names")
@pytest.mark.parametrize("implementation", ["sdpa", "flash_attention_2"])
def test_the_windows_of_modernbert_are_measured_exactly(implementation):
    config = transformers.ModernBertConfig(
        **SIZE, local_attention=32, global_attn_every_n_layers=2, pad_token_id=0, bos_token_id=1, eos_token_id=2
    )
    model = transformers.ModernBertForMaskedLM._from_config(config, attn_implementation="sdpa").train()
    model.config._attn_implementation = implementation  # which is not installed
    interface = mock.patch.dict(AttentionInterface._global_mapping, flash_attention_2=attend_to_neighbours)
    with interface, betahook.attach(model, controller="monitor", interval=1) as hook:
        model(input_ids=torch.arange(600).view(2, 300) % 64)
        measured = hook.layers["model.layers.1.attn"].statistics
    positions = torch.arange(300)
    pairs = (positions - positions[:, None]).abs() <= 16
    assert measured.exact
    assert measured.count == 2 * 4 * pairs.sum()


@pytest.mark.oldest_skips("its config has other names")
def test_learned_sinks_take_part_in_the_entropy():
    """gpt-oss: the last column of what eager attention hands to its softmax is no key."""
    config = transformers.GptOssConfig(
        **{**SIZE, **GROUPED, "num_hidden_layers": 1}, head_dim=8, num_local_experts=2, num_experts_per_tok=1
    )
    torch.manual_seed(0)
    model = transformers.GptOssForCausalLM._from_config(config, attn_implementation="eager").train()
    torch.nn.init.normal_(model.model.layers[0].self_attn.sinks)
    ids = torch.randint(3, 64, (2, 12))
    with betahook.attach(model, controller="monitor") as hook, trace() as calls:
        model(input_ids=ids)
        measured = next(iter(hook.layers.values())).head_statistics
    weights = calls[0].softmax_input.double().softmax(-1)
    assert weights.shape[-1] == 13
    torch.testing.assert_close(measured.entropy, torch.special.entr(weights).sum(-1).mean((0, 2)), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(measured.sink, weights[..., 0].mean((0, 2)), rtol=1e-5, atol=1e-6)


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # of torch's compiler
@pytest.mark.oldest_skips("torch cannot trace the models at all", compiled="True")
@pytest.mark.needs_torch("2.10", "a graph rounds otherwise", compiled="True")
@pytest.mark.parametrize("compiled", [False, True])
def test_a_query_of_other_heads_than_a_module_states_is_left_alone(compiled, caplog):
    model, batch = build("llama").train(), inputs("llama")
    attention = model.model.layers[0].self_attn
    expected = run(model, batch)
    attention.num_heads, attention.head_dim = 3, 8
    with betahook.attach(model, controller="monitor") as hook:
        if compiled:
            model.compile(backend="aot_eager", fullgraph=True)
        assert_identical(expected, run(model, batch))
        hook.step()
        first, second = hook.layers
        assert f"max_logit/{second}" in hook.metrics()
        assert f"max_logit/{first}" not in hook.metrics()
        if compiled:
            assert f"not reached: {first}" in repr(hook)
            return
        assert "its query is [2, 4, 24, 8], not [batch, 3, queries, d_k]" in hook.layers[first].refusal
        assert f"{first} is left alone: its query is" in caplog.text
        fitting = torch.randn(2, 3, 5, 8)
        AttentionInterface().get_interface("sdpa", None)(attention, fitting, fitting, fitting, None)
        assert hook.layers[first].statistics.count == 0


class Pooler(torch.nn.Module):
    """Attention through the interface, of a query and keys of which one may be the same for all samples."""

    is_causal = False

    def __init__(self, config):
        super().__init__()
        self.config, self.num_heads, self.head_dim = config, 4, 8
        self.q_proj, self.k_proj, self.v_proj = (torch.nn.Linear(32, 32) for _ in range(3))

    def forward(self, of_query, of_key, mask):
        inputs = zip((self.q_proj, self.k_proj, self.v_proj), (of_query, of_key, of_key), strict=True)
        self.made = [layer(x).unflatten(-1, (4, 8)).transpose(1, 2) for layer, x in inputs]
        attention = AttentionInterface().get_interface(self.config._attn_implementation, None)
        return attention(self, *self.made, mask, scaling=8**-0.5)[0].flatten(2)


class PoolerModel(transformers.PreTrainedModel):
    config_class, _supports_sdpa = transformers.PretrainedConfig, True

    def __init__(self, config, queries):
        super().__init__(config)
        self.query = torch.nn.Parameter(torch.randn(1, queries, 32))
        self.layers = torch.nn.ModuleList([Pooler(config), Pooler(config)])
        self.post_init()

    def forward(self, x, learned, masked):
        of_query, of_key = (self.query, x) if learned == "queries" else (x, self.query)
        mask = torch.ones(len(x), 1, of_query.shape[1], of_key.shape[1], dtype=torch.bool) if masked else None
        return sum(layer(of_query, of_key, mask).square().mean() for layer in self.layers)


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("tokens", [5, 160])
@pytest.mark.parametrize("learned", ["queries", "keys"])
def test_what_is_the_same_for_all_samples_counts_for_each(learned, tokens, masked):
    """Learned queries of a batch of 1 over the keys of each sample, as torch's function broadcasts them."""
    torch.manual_seed(0)
    model = PoolerModel(transformers.PretrainedConfig(attn_implementation="sdpa"), tokens)
    x = torch.randn(3, 120, 32) * torch.tensor([0.1, 1, 5]).view(-1, 1, 1)
    with betahook.attach(model, controller="monitor") as hook:
        model(x, learned, masked).backward()
        for layer, attention in zip(hook.layers.values(), model.layers, strict=True):
            query, key, _ = (made.detach().double() for made in attention.made)
            scores = query @ key.mT
            assert layer.statistics.count == scores.numel()
            rows = scores.var(-1, correction=0).mean((0, 2))
            torch.testing.assert_close(layer.head_statistics.row_std, rows.sqrt(), rtol=1e-5, atol=0)
            square = query.square().mean((0, 2, 3)).mean()
            mean_square = layer.statistics.component_mean_square_q + layer.statistics.component_variance_q
            assert float(mean_square) == pytest.approx(float(square), rel=1e-5)
        hook.step()
        assert all(each.correlations is not None for each in hook.audit())


def plain_attention(module, query, key, value, mask, scaling=None, **options):
    output = torch.nn.functional.scaled_dot_product_attention(query, key, value, mask, scale=scaling)
    return output.transpose(1, 2), None


@pytest.mark.parametrize(("implementation", "caps"), [("sdpa", False), ("my_capped", True)])
def test_a_soft_cap_counts_where_the_implementation_takes_one(implementation, caps):
    """The sdpa of transformers 5.1 ignores that of Gemma 2."""
    torch.manual_seed(0)
    model = torch.nn.ModuleList([Pooler(transformers.PretrainedConfig(attn_implementation="eager"))])
    query, key = torch.randn(2, 2, 4, 9, 8).mul(3)
    functions = mock.patch.dict(AttentionInterface._global_mapping, {implementation: plain_attention})
    with functions, betahook.attach(model, controller="monitor") as hook:
        attention = AttentionInterface().get_interface(implementation, None)
        attention(model[0], query.requires_grad_(), key, key, None, scaling=0.5, softcap=2.0, is_causal=False)
        (layer,) = hook.layers.values()
        logits = 0.5 * query.detach() @ key.mT
        weights = (2 * torch.tanh(logits / 2) if caps else logits).softmax(-1)
        expected = torch.special.entr(weights).sum(-1).mean((0, 2))
        torch.testing.assert_close(layer.head_statistics.entropy.to(expected), expected, rtol=1e-5, atol=1e-6)


AGAIN = """
import importlib, sys, torch, betahook
from support.models import build, inputs
model, batch = build("llama"), inputs("llama")
expected = model(**batch).logits
hook = betahook.attach(model, "monitor")
model(**batch).loss.backward()
hook.step()
names = sorted(name for name in sys.modules if name.startswith("betahook"))
for name in names:
    {again}
import betahook
assert torch.equal(model(**batch).logits, expected)
other = build("llama")
hook = betahook.attach(other, "monitor")
other(**batch).loss.backward()
hook.step()
for layer in hook.layers.values():
    layer.beta = 2 * layer.beta
    model.get_submodule(layer.name).q_proj.weight.data *= 2
torch.testing.assert_close(other(**batch).logits, model(**batch).logits)
"""


@pytest.mark.slow
@pytest.mark.parametrize("again", ["importlib.reload(sys.modules[name])", "del sys.modules[name]"])
def test_betahook_may_be_imported_again_while_a_model_is_hooked(again):
    """As a notebook does after an update; beta acts once."""
    paths = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    subprocess.run([sys.executable, "-c", AGAIN.format(again=again)], check=True, env=paths)


def test_a_wrapper_of_another_library_is_asked_and_stays(monkeypatch, original):
    """Also one that came after betahook was loaded, and one that came while a model was hooked."""
    asked = []

    def wrapped(name, inner):
        @functools.wraps(inner)
        def get_interface(self, implementation, default):
            asked.append(name)
            return inner(self, implementation, default)

        return get_interface

    model, batch = build("llama"), inputs("llama")
    before = wrapped("before", original)
    monkeypatch.setattr(AttentionInterface, "get_interface", before)
    first = betahook.attach(model)
    meanwhile = wrapped("meanwhile", AttentionInterface.get_interface)
    monkeypatch.setattr(AttentionInterface, "get_interface", meanwhile)
    first.detach()
    assert AttentionInterface.get_interface is meanwhile
    with betahook.attach(model) as second:
        asked.clear()
        for layer in second.layers.values():
            layer.beta = 0.5 * layer.head_dim**-0.5
        halved = model(**batch).logits
        assert {*asked} == {"before", "meanwhile"}
    torch.testing.assert_close(halved, _with_scores_scaled(model, batch, 0.5), rtol=1e-5, atol=1e-5)
    assert AttentionInterface.get_interface is meanwhile
