"""The second tap: attention written by hand, or asked of torch, and families of transformers that write theirs."""

import functools
import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import torch.utils.checkpoint
from accelerate.hooks import ModelHook, add_hook_to_module, remove_hook_from_module
from torch import nn

import betahook
from support.attention import HEADS, LENGTH, WIDTH, Block, ByHandAttention, FusedAttention
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


@pytest.fixture
def x():
    return torch.randn(3, LENGTH, WIDTH, generator=torch.Generator().manual_seed(0))


def make(kind):
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), kind())
    for parameter in model.parameters():
        parameter.data *= 3
    return model


@torch.no_grad()
def components(model, x):
    """q and k in float64, `[batch, heads, tokens, d_k]` each."""
    model = model.double()
    hidden = model[0](x.double())
    q, k = (
        projection(hidden).unflatten(-1, (HEADS, -1)).transpose(1, 2)
        for projection in (model[1].q_proj, model[1].k_proj)
    )
    model.float()
    return q, k


def causal_scores(model, x):
    """Raw scores over the causal pairs, in float64, `[heads, pairs]`."""
    q, k = components(model, x)
    return (q @ k.mT)[:, :, torch.ones(LENGTH, LENGTH).tril().bool()].transpose(0, 1).flatten(1)


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


CALLS = {
    "a number of numpy": lambda q, k: (q @ k.mT) / np.float32(math.sqrt(8)),
    "a number of numpy, by the query": lambda q, k: (np.float32(8**-0.5) * q) @ k.mT,
    "matmul": lambda q, k: torch.matmul(other=k.mT, input=q) * 8**-0.5,
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


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt, SystemExit])
def test_the_mode_ends_with_the_forward_whatever_is_raised(x, error):
    class FailingAttention(ByHandAttention):
        fails = True

        def values(self, logits, v):
            if self.fails:
                raise error("out of order")
            return torch.softmax(logits, -1) @ v

    model = make(FailingAttention)
    expected = make(ByHandAttention)(x)
    with betahook.attach(model, controller="monitor", when="always") as hook:
        with pytest.raises(error, match="out of order"):
            model(x)
        assert torch.overrides._get_current_function_mode_stack() == []
        FailingAttention.fails = False
        assert torch.equal(model(x), expected)
        assert hook.layers["1"].statistics.count == causal_scores(make(ByHandAttention), x).numel()


@pytest.mark.parametrize("order", ["before", "after"])
def test_a_forward_that_accelerate_wraps_is_followed_and_left_alone(x, order):
    model = make(ByHandAttention)
    expected = model(x)
    if order == "before":
        add_hook_to_module(model[1], ModelHook())
    own = dict(vars(model[1]))
    hook = betahook.attach(model, controller="monitor")
    if order == "after":
        add_hook_to_module(model[1], ModelHook())
    model(x)
    hook.layers["1"].beta = 2 * hook.layers["1"].beta_default
    doubled = model(x)
    assert hook.layers["1"].statistics.count == 2 * causal_scores(make(ByHandAttention), x).numel()
    hook.detach()
    assert torch.equal(model(x), expected)
    if order == "before":
        assert vars(model[1]) == own
    remove_hook_from_module(model[1])
    assert torch.equal(model(x), expected)
    for parameter in model[1].q_proj.parameters():
        parameter.data *= 2
    torch.testing.assert_close(doubled, model(x), rtol=1e-5, atol=1e-5)


def test_a_beta_before_the_first_forward_is_refused():
    with (
        betahook.attach(make(ByHandAttention)) as hook,
        pytest.raises(RuntimeError, match=r"beta of '1' cannot be set before the first forward.*Run a forward first"),
    ):
        hook.layers["1"].beta = 1.0


def test_other_heads_than_were_found_are_an_error(x):
    model = make(ByHandAttention)
    model[1].num_heads = 3
    with (
        betahook.attach(model),
        pytest.raises(ValueError, match=r"^1: expected an axis of 3 heads .* got axes of \[2, 4\]"),
    ):
        model(x[:2])


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


def test_nothing_of_it_stays_behind():
    model = make(ByHandAttention)
    before = [dict(vars(module)) for module in model.modules()]
    hooks = [(len(module._forward_hooks), len(module._forward_pre_hooks)) for module in model.modules()]
    betahook.attach(model).detach()
    assert [vars(module) for module in model.modules()] == before
    assert [(len(module._forward_hooks), len(module._forward_pre_hooks)) for module in model.modules()] == hooks


def test_keys_that_nobody_sees_have_no_part_in_the_moments():
    class PaddedAttention(ByHandAttention):
        def mix(self, q, k, v):
            scores = q @ k.transpose(-1, -2) / math.sqrt(self.head_dim)
            return self.values(scores.masked_fill(torch.arange(LENGTH) >= LENGTH - 4, float("-inf")), v)

    model, x = make(PaddedAttention), torch.randn(3, LENGTH, WIDTH)
    x[:, -4:] *= 100
    with betahook.attach(model, controller="monitor") as hook:
        model(x)
        measured = hook.layers["1"].head_statistics
    keys = model[1].split(model[1].k_proj(model[0](x[:, :-4])))
    expected = keys.double().transpose(0, 1).flatten(1, 2).var(1, correction=0).mean(-1)
    torch.testing.assert_close(measured.component_variance_k, expected, rtol=1e-4, atol=0)


def test_the_factor_of_a_part_of_the_query_is_not_one_of_beta(x):
    class AddedAttention(ByHandAttention):
        def mix(self, q, k, v):
            return super().mix(q * 0.5 + torch.linspace(0, 1, self.head_dim), k, v)

    model = make(AddedAttention)
    with betahook.attach(model, controller="monitor") as hook:
        model(x)
        assert hook.layers["1"].beta_default == pytest.approx(8**-0.5)


@pytest.mark.parametrize("kind", [ByHandAttention, FusedAttention])
def test_the_sensitivity_needs_a_gradient_of_the_values_alone(kind, x):
    model, x = make(kind).double().requires_grad_(False), x.double()
    model[1].v_proj.requires_grad_(True)
    with betahook.attach(model, controller="monitor") as hook:
        model(x).square().mean().backward()
        layer = hook.layers["1"]
        sensitivity = float(layer.statistics.sensitivity)
        assert sensitivity == pytest.approx(derivative(layer, lambda: model(x).square().mean()), rel=1e-3)


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


class EinsumAttention(ByHandAttention):
    def mix(self, q, k, v):
        return torch.einsum("bhnm,bhmd->bhnd", torch.einsum("bhnd,bhmd->bhnm", q, k).softmax(-1), v)


def test_an_einsum_of_other_dimensions_gets_the_error_of_torch(x):
    model = make(EinsumAttention)
    with betahook.attach(model, controller="monitor") as hook:
        model(x)
        count = hook.layers["1"].statistics.count
        with pytest.raises(
            RuntimeError, match=r"subscripts in the equation \(4\) does not match the number of dimensions"
        ):
            model(x[0])
        assert hook.layers["1"].statistics.count == count > 0
        assert hook.layers["1"].refusal is None


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
def test_nested_tensors_in_attention_written_by_hand_leave_it_alone(caplog):
    class NestedAttention(Block):
        mix = None

        def forward(self, x):
            q, k, v = (self.split(projection(x)) for projection in (self.q_proj, self.k_proj, self.v_proj))
            return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(-2)

    model = make(NestedAttention)
    nested = torch.nested.nested_tensor([torch.randn(3, WIDTH), torch.randn(5, WIDTH)], layout=torch.jagged)
    expected = model(nested)
    with betahook.attach(model, controller="monitor") as hook:
        got = model(nested)
        assert hook.layers["1"].refusal == "its input is a nested tensor, whose scores are not followed: pad it"
        assert "1 is left alone: its input is a nested tensor" in caplog.text
    assert torch.equal(got.values(), expected.values())


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


def test_without_keys_nothing_is_added(x):
    """As in a memory that is still empty."""

    class MemoryAttention(ByHandAttention):
        def mix(self, q, k, v):
            return F.scaled_dot_product_attention(q, k[:, :, :0], v[:, :, :0])

    model = make(MemoryAttention)
    with betahook.attach(model, controller="monitor") as hook:
        assert model(x).shape == (3, LENGTH, WIDTH)
        assert hook.layers["1"].statistics.count == 0


@pytest.mark.parametrize("kind", [ByHandAttention, FusedAttention])
def test_an_empty_batch_adds_nothing(kind, x):
    model = make(kind)
    with betahook.attach(model, controller="monitor") as hook:
        assert model(x[:0]).shape == (0, LENGTH, WIDTH)
        assert hook.layers["1"].statistics.count == 0
