"""attach: its options, and what it refuses."""

import gc

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from transformers import SwiftFormerConfig, SwiftFormerModel
from transformers.modeling_utils import AttentionInterface

import betahook
from betahook.checkpoint import pretrained
from support.models import build, inputs
from support.training import fingerprint

LAYER = "model.layers.0.self_attn"


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        (
            {"controller": "adam"},
            ValueError,
            r'"default", "monitor", a controller \(Search\(\), .*\) or a list of them; got .adam.',
        ),
        ({"controller": []}, ValueError, 'use "monitor"'),
        ({"controller": [betahook.Cap(), 3]}, TypeError, "or a list of them"),
        ({"layers": "*.attention"}, ValueError, "none of the attention layers of LlamaForCausalLM: model.layers.0-1."),
        ({"layers": 3}, TypeError, "glob, a list of globs or a predicate"),
        ({"layers": ["*", 3]}, TypeError, "glob, a list of globs or a predicate"),
        ({"per_head": 1}, TypeError, "per_head must be True or False; got 1"),
        ({"interval": 0}, ValueError, "interval must be a whole number of steps, 1 or more; got 0"),
        ({"interval": 1.5}, ValueError, "interval must be a whole number"),
        ({"when": "never"}, ValueError, 'when must be "training" or "always"; got .never.'),
        ({"color": "red"}, TypeError, "color"),
    ],
)
def test_bad_options_are_refused_and_the_model_untouched(options, error, message):
    model = build("llama")
    before = fingerprint(model)
    with pytest.raises(error, match=message):
        betahook.attach(model, **options)
    assert fingerprint(model) == before


def test_the_controller_may_come_without_its_name():
    model = build("llama")
    with betahook.attach(model, "monitor") as hook:
        assert list(hook.controllers) == [betahook.Monitor()]
    with pytest.raises(TypeError, match="positional"):
        betahook.attach(model, "monitor", "*")


def test_no_module():
    with pytest.raises(TypeError, match=r"takes a torch module, the model itself; got 'gpt2'"):
        betahook.attach("gpt2")


def test_a_model_whose_attention_is_none_of_q_and_k_is_refused_by_name():
    model = SwiftFormerModel(SwiftFormerConfig(image_size=32, depths=[1] * 4, embed_dims=[8] * 4))
    reason = r"SwiftFormerModel: encoder.*, SwiftFormerEfficientAdditiveAttention: its scores are additive"
    with pytest.raises(betahook.UnsupportedModelError, match=reason):
        betahook.attach(model)


def test_a_model_without_attention_is_refused():
    with pytest.raises(betahook.UnsupportedModelError, match=r"Linear.*no module that computes softmax attention"):
        betahook.attach(nn.Linear(2, 2))


def test_a_tensor_parallel_model_that_computes_its_scores_by_hand_is_refused():
    model = build("llama")
    model._tp_size = 2  # as from_pretrained(tp_plan="auto") on two ranks leaves it
    betahook.attach(model).detach()
    model.model.layers[1].self_attn = HandWrittenAttention()
    with pytest.raises(betahook.UnsupportedModelError, match=r"it is tensor-parallel, and.*FSDP \(fully_shard\)"):
        betahook.attach(model)
    betahook.attach(model, layers="*.0.self_attn").detach()


class HandWrittenAttention(nn.Module):
    """An attention that does not go through the interface."""

    def __init__(self):
        super().__init__()
        self.num_heads, self.head_dim = 2, 8

    def forward(self, q, k, v):
        return torch.softmax(q @ k.mT, -1) @ v


def test_attaching_twice():
    model = build("llama")
    with betahook.attach(model), pytest.raises(RuntimeError, match=r"hooked already.*detach\(model\)"):
        betahook.attach(model)
    betahook.attach(model).detach()


def test_detaching_without_the_hook():
    model = build("llama")
    before = fingerprint(model)
    hooks = [betahook.attach(layer) for layer in model.model.layers]
    betahook.detach(nn.Sequential(model))
    assert not any(hook.attached for hook in hooks)
    assert fingerprint(model) == before
    betahook.detach(model)  # nothing is left to detach
    hook = betahook.attach(model)
    betahook.detach(model.model.layers[0])
    assert not hook.attached
    with pytest.raises(TypeError, match="expected a model, a torch module; got Hook"):
        betahook.detach(hook)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_wrapped_and_compiled_models():
    with pytest.raises(ValueError, match=r"wrapped in DataParallel.*attach\(model.module\)"):
        betahook.attach(nn.DataParallel(build("llama")))
    with pytest.raises(ValueError, match="attach first, then compile"):
        betahook.attach(torch.compile(build("llama")))
    compiled_in_place = build("llama")
    compiled_in_place.compile()
    with pytest.raises(ValueError, match="attach first, then compile"):
        betahook.attach(compiled_in_place)


@pytest.mark.parametrize(
    "layers", ["*.0.self_attn", [LAYER], lambda name, module: name == LAYER and hasattr(module, "q_proj")]
)
def test_a_choice_of_layers(layers):
    with betahook.attach(build("llama"), layers=layers) as hook:
        assert list(hook.layers) == [LAYER]
        with pytest.raises(KeyError, match=f"no hooked layer is called 'x'; there are {LAYER}"):
            hook.layers["x"]


JUNK = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-3, 3),
    st.floats(),
    st.sampled_from(["", "default", "monitor", "*", "*.self_attn", "always", "[", LAYER]),
    st.text(max_size=4),
    st.lists(st.sampled_from(["*.0.*", "x", 3, betahook.Cap]), max_size=2),
    st.sampled_from([betahook.Cap(), betahook.Monitor, print, len, bool, torch.zeros(2), {}, nn.Linear(1, 1)]),
    st.builds(lambda: [betahook.Search(), betahook.Cap()]),
    st.builds(lambda: betahook.Alerts(print, max_logit=50)),
)
OPTIONS = ["controller", "layers", "per_head", "interval", "when", "alerts", "model"]


@pytest.fixture(scope="module")
def target():
    model = build("llama")
    return model, fingerprint(model), model(**inputs("llama")).logits


@given(options=st.dictionaries(st.sampled_from(OPTIONS), JUNK, max_size=3))
@settings(max_examples=300, deadline=None)
def test_any_arguments_attach_or_are_refused_with_a_reason(target, options):
    model, before, expected = target
    arguments = {"model": model, **options}
    refusal = None
    try:
        hook = betahook.attach(**arguments)
    except (TypeError, ValueError) as caught:
        refusal = str(caught)
    else:
        with hook:
            assert torch.equal(model(**inputs("llama")).logits, expected)
            hook.step()
    if refusal is not None and not callable(options.get("layers")):  # what a predicate raises is its own
        assert any(word in refusal for word in ("attach", "layers", *options))
    assert fingerprint(model) == before
    assert torch.equal(model(**inputs("llama")).logits, expected)


def test_an_attach_that_fails_half_way_leaves_the_model_as_it_was(monkeypatch):
    gc.collect()  # hooks of other tests
    model, registered = build("llama"), AttentionInterface.get_interface
    before = fingerprint(model)

    def fail(*args):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(pretrained, "connect", fail)
        with pytest.raises(KeyboardInterrupt):
            betahook.attach(model)
    assert fingerprint(model) == before
    assert AttentionInterface.get_interface is registered
    with betahook.attach(model):
        assert fingerprint(model) != before
    assert fingerprint(model) == before


@pytest.mark.parametrize("forward", [lambda f: lambda *args: f(*args), lambda f: lambda x: f(x)])
def test_a_forward_that_does_not_tell_its_arguments(forward):
    model, batch = build("llama"), inputs("llama")
    projection = model.model.layers[0].self_attn.q_proj
    projection.forward = forward(projection.forward)
    attention = nn.MultiheadAttention(8, 2)
    attention.forward = forward(attention.forward)
    for module in (model, attention):
        with betahook.attach(module, controller="monitor") as hook:
            if module is model:
                model(**batch)
                assert hook.layers[LAYER].statistics.input_std_q > 0
