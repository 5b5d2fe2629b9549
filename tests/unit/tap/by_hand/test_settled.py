"""Attention written by hand in later steps, when earlier ones have shown how it computes its scores."""

import inspect
import math
import os
import sys
from collections import Counter

import pytest
import torch
import torch.utils.checkpoint

import betahook
from betahook.tap.by_hand import matrices
from betahook.tap.by_hand.products import Product
from betahook.tap.by_hand.sites import find_site
from support.attention import LENGTH, WIDTH, Block, ByHandAttention, FusedAttention, make
from support.models import derivative


def settle(model, x, steps=2):
    """Attach, and run some steps."""
    hook = betahook.attach(model, controller="monitor", interval=1)
    for _ in range(steps):
        model(x).square().mean().backward()
        hook.step()
    return hook


def names_of(node, seen=None):
    """The names of a backward's functions."""
    seen = {} if seen is None else seen
    if node is not None and node not in seen:
        seen[node] = node.name()
        for following, _ in node.next_functions:
            names_of(following, seen)
    return set(seen.values())


def test_a_product_is_the_same_whoever_calls_the_forward(x, monkeypatch):
    """Its site lists the callers within the forward, none of those around it."""
    found = []
    monkeypatch.setattr(matrices, "find_site", lambda operation: found.append(find_site(operation)) or found[-1])
    model = make(ByHandAttention)
    with betahook.attach(model, controller="monitor", interval=1):
        model(x)
        first, once = {*found}, len(found)
        (lambda: [model(x)])()
    assert len(found) > once > 0
    assert {*found} == first


def test_the_line_of_a_product_is_that_of_its_call(x, monkeypatch):
    found = []
    monkeypatch.setattr(matrices, "Product", lambda site, *args, **kw: found.append(site) or Product(site, *args, **kw))
    model = make(ByHandAttention)
    with betahook.attach(model, controller="monitor"):
        model(x)
    lines, first = inspect.getsourcelines(ByHandAttention.mix)
    number = next(number for number, line in enumerate(lines, first) if "q @ k" in line)
    assert found[0].line == f"attention.py:{number}"


@pytest.mark.parametrize("kind", [ByHandAttention, FusedAttention])
@pytest.mark.parametrize("small", [True, False])
def test_the_sensitivity_of_later_steps(kind, small, x, monkeypatch):
    """Of a small query without Python in the backward."""
    if not small:
        monkeypatch.setattr("betahook.tap.gain.SMALL", 0)
    model, x = make(kind).double(), x.double()
    with settle(model, x) as hook:
        layer = hook.layers["1"]
        layer.head_beta = torch.tensor([0.5, 1.0, 2.0, 4.0]) * layer.beta_default
        loss = model(x).square().mean()
        assert ("ScaleQueryBackward" in names_of(loss.grad_fn)) is not small
        loss.backward()
        sensitivity = layer.statistics.sensitivity.item()
        assert sensitivity == pytest.approx(derivative(layer, lambda: model(x).square().mean()), rel=1e-3)


@pytest.mark.parametrize("batches", [1, 2])
@pytest.mark.parametrize("kind", [ByHandAttention, FusedAttention])
def test_checkpointed_forwards_save_alike_in_every_step(kind, x, batches):
    """The recomputation in the first step knows more than its forward did."""
    model = make(kind)
    with betahook.attach(model, controller="monitor", interval=1) as hook:
        measured = []
        for _ in range(3):
            for _ in range(batches):
                output = torch.utils.checkpoint.checkpoint(model, x.clone().requires_grad_(), use_reentrant=False)
                output.square().sum().backward()
            statistics = hook.layers["1"].statistics
            measured.append(torch.stack([statistics.sensitivity, statistics.std]))
            hook.step()
    for later in measured[1:]:
        torch.testing.assert_close(later, measured[0], rtol=1e-5, atol=0)


@pytest.mark.parametrize("scaled", [lambda q, k, scale: q @ k.mT * scale, lambda q, k, scale: (q * scale) @ k.mT])
def test_a_scale_that_changes_in_later_steps(x, scaled):
    """The gain goes by the scale of the call, not by that of the last one."""

    class LengthScaled(ByHandAttention):
        scale = 0.3

        def mix(self, q, k, v):
            return self.values(scaled(q, k, self.scale), v)

    model = make(LengthScaled)
    with settle(model, x) as hook:
        layer = hook.layers["1"]
        for scale in (0.3, 0.6, 0.2):
            model[1].scale = scale
            expected = make(LengthScaled)
            expected[1].scale = 0.5
            layer.beta = 0.5
            torch.testing.assert_close(model(x), expected(x), rtol=1e-5, atol=1e-5)
            assert layer.beta_default == pytest.approx(scale)


def test_a_layer_that_is_left_alone_later_has_no_sensitivity(x):
    class Branching(ByHandAttention):
        sharpens = False

        def values(self, logits, v):
            return super().values(logits.pow(3) if self.sharpens else logits, v)

    model = make(Branching)
    with settle(model, x) as hook:
        model[1].sharpens = True
        output = model(x)
        assert "pow" in hook.layers["1"].refusal
        state = hook.state_dict()
        assert not any(state[name].any() for name in ("table", "recent", "moments", "recent_moments", "window"))
        output.square().mean().backward()
        assert hook.layers["1"].statistics.sensitivity == 0
        hook.step()
        model(x).square().mean().backward()
        assert hook.layers["1"].statistics.sensitivity == 0


def test_products_of_values_are_told_from_scores_in_every_step(x):
    """They come to nothing that is followed, as in a loss that keeps heads apart."""

    class Decorrelated(ByHandAttention):
        def values(self, logits, v):
            values = super().values(logits, v)
            self.overlap = (values @ values.mT).pow(2).mean()
            return values

    model = make(Decorrelated)
    with settle(model, x, steps=4) as hook:
        layer = hook.layers["1"]
        assert layer.refusal is None
        layer.beta = 2 * layer.beta_default
        output = model(x)
        overlap = model[1].overlap
    for parameter in model[1].q_proj.parameters():
        parameter.data *= 2
    torch.testing.assert_close(output, model(x), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(overlap, model[1].overlap, rtol=1e-4, atol=0)


def test_attention_over_values_of_attention(x):
    """Two softmaxes, of which the second looks at what the first made: its scores go by beta in every step."""

    class Twice(Block):
        def mix(self, q, k, v):
            first = (q @ k.mT / math.sqrt(self.head_dim)).softmax(-1) @ v
            return (first @ k.mT / math.sqrt(self.head_dim)).softmax(-1) @ v

    model, x = make(Twice).double(), x.double()
    with settle(model, x, steps=3) as hook:
        layer = hook.layers["1"]
        assert layer.refusal is None
        layer.beta = 2 / math.sqrt(model[1].head_dim)
        output = model(x)
    q, k, v = (model[1].split(p(model[0](x))) for p in (model[1].q_proj, model[1].k_proj, model[1].v_proj))
    beta = 2 / math.sqrt(model[1].head_dim)
    first = (beta * q @ k.mT).softmax(-1) @ v
    expected = ((beta * first @ k.mT).softmax(-1) @ v).transpose(1, 2).flatten(2)
    torch.testing.assert_close(output, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("checkpointed", [False, True])
def test_a_resumed_run_has_the_same_bits_in_half_precision(checkpointed):
    """The factor on the query rounds in another way before a product is known to make scores."""

    def steps(model, hook, first, last):
        for step in range(first, last):
            torch.manual_seed(step)
            x = torch.randn(3, LENGTH, WIDTH).bfloat16()
            y = torch.utils.checkpoint.checkpoint(model, x, use_reentrant=False) if checkpointed else model(x)
            y.square().mean().backward()
            hook.step()
            model.zero_grad()
        (entry,) = hook.state_dict()["controllers"]
        return torch.stack([hook.state_dict()["beta"].mean(), *(value.mean() for value in entry["state"].values())])

    model = make(ByHandAttention).bfloat16()
    with betahook.attach(model, betahook.Gradient(0.1)) as hook:
        steps(model, hook, 0, 3)
        state = hook.state_dict()
        expected = steps(model, hook, 3, 6)
    with betahook.attach(model, betahook.Gradient(0.1)) as hook:
        hook.load_state_dict(state)
        assert torch.equal(steps(model, hook, 3, 6), expected)
        assert hook.layers["1"].beta != pytest.approx(hook.layers["1"].beta_default, rel=0.01)


@pytest.mark.parametrize(("kind", "most"), [(ByHandAttention, 500), (FusedAttention, 240)])
def test_a_small_model_does_not_wait_for_python(kind, most, x):
    """It would, for each function of betahook that runs in a forward which is scaled and not measured, as most are."""
    own, ran = os.path.dirname(betahook.__file__), Counter()

    def count(frame, event, argument):
        if event == "call" and frame.f_code.co_filename.startswith(own):
            ran[frame.f_code.co_qualname] += 1

    model = make(kind)
    with betahook.attach(model, controller="monitor", interval=1000) as hook:
        for _ in range(3):
            model(x).sum().backward()
            hook.step()
            hook.layers["1"].beta = 0.5
        sys.setprofile(count)
        try:
            model(x)
        finally:
            sys.setprofile(None)
    assert ran["scale_query"] == 1
    assert ran["Recorder.record"] == ran["Recorder.record_pairs"] == 0
    assert ran.total() <= most, ran.most_common(10)
