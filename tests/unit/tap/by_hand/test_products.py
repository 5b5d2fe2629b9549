"""The second tap: attention written by hand, or asked of torch, and families of transformers that write theirs."""

import functools
import math

import pytest
import torch
import torch.nn.functional as F
import torch.utils.checkpoint

import betahook
from support.attention import (
    HEADS,
    LENGTH,
    Block,
    ByHandAttention,
    FusedAttention,
    causal_scores,
    components,
    make,
)
from support.matrices import overall_std
from support.models import derivative
from zoo import build, truth


class ScaledAttention(Block):
    """Scale and mask handed over, and factors on q and k that are none of theirs."""

    def mix(self, q, k, v):
        mask = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril()
        return F.scaled_dot_product_attention(q * 0.5, k * 0.25, v, attn_mask=mask, scale=2.0)


class InPlaceAttention(ByHandAttention):
    """Scaled before and after, biased and masked in place, on batch and heads in one axis."""

    def mix(self, q, k, v):
        q, k, v = (x.flatten(0, 1) for x in (q, k, v))
        scores = torch.bmm(q * 0.5, k.mT * 0.25)
        scores *= 2.0
        scores += torch.linspace(0, 3, LENGTH)
        scores += torch.full((LENGTH, LENGTH), -1e4).triu(1)
        return self.values(scores, v).unflatten(0, (-1, HEADS))


class EinsumAttention(ByHandAttention):
    """Heads behind the tokens; the bias comes out of the same call as the product in Bloom."""

    def split(self, x):
        return x.unflatten(-1, (HEADS, -1))

    def mix(self, q, k, v):
        scores = torch.einsum("bind,bjnd->bnij", q, k) * self.head_dim**-0.5
        scores = torch.where(torch.ones(LENGTH, LENGTH).tril().bool(), scores, torch.finfo(scores.dtype).min)
        return self.values(scores, v.transpose(1, 2)).contiguous()


class AddendAttention(ByHandAttention):
    def mix(self, q, k, v):
        q, k, v = (x.flatten(0, 1) for x in (q, k, v))
        mask = torch.full((len(q), LENGTH, LENGTH), -1e9).triu(1)
        scores = mask.to(q.dtype).baddbmm(q, k.mT, alpha=self.head_dim**-0.5)
        return self.values(scores, v).unflatten(0, (-1, HEADS))


class CollectedAttention(ByHandAttention):
    """Scaled scores are put together again, in a buffer and from two tensors that have the others' rows as well."""

    def mix(self, q, k, v):
        scores = q.new_empty(*q.shape[:-1], LENGTH)
        scores[:] = q @ k.mT * self.head_dim**-0.5
        above, below = (torch.cat([half, half], -2) for half in scores.chunk(2, -2))
        scores = torch.where(torch.arange(LENGTH)[:, None] < LENGTH // 2, above, below)
        return self.values(scores.masked_fill(torch.ones(LENGTH, LENGTH).triu(1).bool(), float("-inf")), v)


KINDS = [
    FusedAttention,
    ScaledAttention,
    ByHandAttention,
    InPlaceAttention,
    EinsumAttention,
    AddendAttention,
    CollectedAttention,
]


@pytest.mark.parametrize("kind", KINDS)
def test_monitoring_changes_no_bit(kind, x):
    model = make(kind)

    def run():
        model.zero_grad()
        output = model(x)
        output.square().sum().backward()
        return [output, *(parameter.grad for parameter in model.parameters())]

    expected = run()
    with betahook.attach(model, controller="monitor"):
        assert all(torch.equal(a, b) for a, b in zip(run(), expected, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(run(), expected, strict=True))


@pytest.mark.parametrize("kind", KINDS)
def test_statistics_are_those_of_all_allowed_pairs(kind, x):
    model = make(kind)
    with betahook.attach(model, controller="monitor") as hook:
        model(x)
        layer = hook.layers["1"]
        measured, heads = layer.statistics, layer.head_statistics
    scores = causal_scores(model, x)
    assert measured.count == scores.numel()
    assert measured.exact
    torch.testing.assert_close(measured.mean, scores.mean(), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(overall_std(heads), scores.std(correction=0), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(heads.std, scores.std(1, correction=0), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(measured.max_score, scores.abs().max(), rtol=1e-5, atol=1e-5)
    assert layer.beta_default == pytest.approx(0.25 if kind in (ScaledAttention, InPlaceAttention) else 8**-0.5)
    for tokens, measured_variance in zip(
        components(model, x), (heads.component_variance_q, heads.component_variance_k), strict=True
    ):
        variance = tokens.transpose(0, 1).flatten(1, 2).var(1, correction=0).mean(-1)
        torch.testing.assert_close(measured_variance, variance, rtol=1e-5, atol=0)
    assert layer.weight_std_q > 0


@pytest.mark.parametrize("kind", KINDS)
def test_entropy_is_that_of_the_attention_rows(kind, x):
    model = make(kind)
    rows = []

    def watch(logits):
        weights = logits.double().softmax(-1)
        rows.append(-(weights * weights.clamp(min=1e-300).log()).sum(-1))

    with betahook.attach(model, controller="monitor") as hook:
        model(x)
        entropy = hook.layers["1"].statistics.entropy
    if kind not in (FusedAttention, ScaledAttention):
        model[1].values = lambda logits, v: (watch(logits), torch.softmax(logits, -1) @ v)[1]
        model(x)
    else:
        scores = causal_scores(model, x)
        square = torch.full((HEADS, 3, LENGTH, LENGTH), -math.inf, dtype=torch.float64)
        square[:, :, torch.ones(LENGTH, LENGTH).tril().bool()] = scores.unflatten(1, (3, -1))
        watch(square * (0.25 if kind is ScaledAttention else 8**-0.5))
    torch.testing.assert_close(entropy, rows[0].mean(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_beta_acts_on_the_scores_alone(kind, x):
    """Twice beta is twice the query, where nothing else comes of the query."""
    model = make(kind)
    with betahook.attach(model, controller="monitor") as hook:
        model(x)
        hook.layers["1"].beta = 2 * hook.layers["1"].beta_default
        output = model(x)
    for parameter in model[1].q_proj.parameters():
        parameter.data *= 2
    torch.testing.assert_close(output, model(x), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_a_changed_beta_does_not_change_what_is_measured(kind, x):
    model = make(kind)
    with betahook.attach(model, controller="monitor", interval=1) as hook:
        model(x)
        before = hook.layers["1"].statistics
        hook.step()
        hook.layers["1"].head_beta = torch.tensor([0.1, 0.2, 0.4, 0.8])
        model(x)
        after = hook.layers["1"].statistics
        for quantity in ("mean", "std", "max_score", "component_variance_q", "independent_std"):
            torch.testing.assert_close(getattr(after, quantity), getattr(before, quantity), rtol=1e-5, atol=1e-5)
        assert after.entropy != before.entropy


@pytest.mark.parametrize("kind", KINDS)
def test_sensitivity_is_the_derivative_in_log_beta(kind, x):
    model, x = make(kind).double(), x.double()

    def loss(beta=None):
        if beta is not None:
            hook.layers["1"].beta = beta
        return model(x).square().mean()

    with betahook.attach(model, controller="monitor") as hook:
        loss().backward()
        sensitivity = hook.layers["1"].statistics.sensitivity.item()
        beta = hook.layers["1"].beta_default
        # A five-point stencil, as wide as a beta that is kept in float32 needs.
        two_down, down, up, two_up = (loss(beta * math.exp(0.01 * shift)).item() for shift in (-2, -1, 1, 2))
    assert sensitivity == pytest.approx((8 * (up - down) - (two_up - two_down)) / 0.12, rel=1e-4)


SUMS = ["deberta-v2", "xlnet"]
"""Their scores are sums of products, which they scale together; elsewhere further products make a bias."""
BY_HAND = [*SUMS, "bloom", "big_bird", "gptj", "longformer", "swinv2", "sam_vision_model", "wavlm"]


@pytest.mark.oldest_skips("the zoo reads configs that are dataclasses")
@pytest.mark.parametrize("model_type", BY_HAND)
def test_families_that_write_their_attention(model_type):
    """Attached where the attention is, and half a beta halves what is no bias in the logits."""
    model = build.build(model_type, "eager")
    batch = build.inputs(model_type, model)
    with truth.watch(model) as before:
        model(**batch)
    with betahook.attach(model, controller="monitor", when="always") as hook:
        model(**batch)
        assert set(hook.layers) == set(before)
        for name, attention in before.items():
            assert hook.layers[name].statistics.exact
            if not attention.is_sum:
                std = attention.std / attention.prescale
                assert overall_std(hook.layers[name].head_statistics).item() == pytest.approx(std, rel=1e-5)
        # The last layer: what enters it does not depend on its own beta.
        name, layer = list(hook.layers.items())[-1]
        layer.head_beta = layer.head_beta / 2
        with truth.watch(model) as after:
            model(**batch)
        for old, new in zip(before[name].calls, after[name].calls, strict=True):
            change = (new.logits - old.logits)[old.allowed]
            scaled = old.factor * old.score + (old.others if model_type in SUMS else 0)
            torch.testing.assert_close(change, -0.5 * scaled[old.allowed], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", [ByHandAttention, FusedAttention])
def test_the_sensitivity_needs_a_gradient_of_the_values_alone(kind, x):
    model, x = make(kind).double().requires_grad_(False), x.double()
    model[1].v_proj.requires_grad_(True)
    with betahook.attach(model, controller="monitor") as hook:
        model(x).square().mean().backward()
        layer = hook.layers["1"]
        sensitivity = float(layer.statistics.sensitivity)
        assert sensitivity == pytest.approx(derivative(layer, lambda: model(x).square().mean()), rel=1e-3)


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("kind", [ByHandAttention, AddendAttention, FusedAttention])
def test_gradient_checkpointing(kind, x, reentrant):
    """It counts what the forward saves for its backward, and what the recomputation does."""
    model = make(kind)
    with betahook.attach(model, controller="monitor", interval=1) as hook:
        measured = []
        for checkpointed in (False, True):
            run = functools.partial(torch.utils.checkpoint.checkpoint, model, use_reentrant=reentrant)
            (run if checkpointed else model)(x.clone().requires_grad_()).square().sum().backward()
            statistics = hook.layers["1"].statistics
            measured.append(torch.stack([statistics.sensitivity, statistics.std, statistics.count]))
            hook.step()
    torch.testing.assert_close(*measured, rtol=1e-6, atol=0)
