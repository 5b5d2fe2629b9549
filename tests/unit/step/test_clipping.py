"""Clipping: after a step no logit of the same batch exceeds the threshold, and what need not move keeps its bits."""

import copy
import itertools
import math

import pytest
import torch
from peft import LoraConfig, inject_adapter_in_model
from torch import nn
from torch.nn.utils import prune

import betahook
from support.attention import HEADS, LENGTH, WIDTH, ByHandAttention, FusedAttention
from support.models import FAMILIES, NORMED, build, inputs, trace
from support.training import LAYER

SHARED_NORM = {"qwen3", "gemma3", "persimmon"}
"""Families whose heads share the weight of a query norm, so that a layer is clipped as one."""


def first_scores(model, batch, beta):
    """The largest logit of each head of the first layer that runs, from the products of eager attention alone."""
    with trace() as calls:
        model(**batch)
    scores, allowed = calls[0].scores()
    return (scores.abs() * allowed).amax((0, 2, 3)) * beta


def largest(model, batch):
    """The largest logit of each head, by layer, as a hook of its own measures it."""
    with betahook.attach(model, controller="monitor", when="always") as hook:
        model(**batch)
        return {name: layer.head_statistics.max_score * layer.head_beta for name, layer in hook.layers.items()}


def clip(model, batch, rules, steps=1):
    """Forwards and steps without an optimizer; returns the hook, detached."""
    with betahook.attach(model, controller=rules, when="always") as hook:
        for _ in range(steps):
            model(**batch)
            hook.step()
    return hook


@pytest.mark.oldest_skips("T5 writes its attention by hand", family="t5")
@pytest.mark.parametrize(
    ("family", "backend"), [*FAMILIES, *((family, "sdpa") for family in NORMED if family != "stablelm")]
)
def test_no_logit_of_the_same_batch_exceeds_the_threshold(family, backend):
    model, batch = build(family, backend).eval(), inputs(family)
    before = largest(model, batch)
    threshold = float(torch.cat([*before.values()]).max()) / 2
    layers = len(before)
    hook = clip(model, batch, betahook.Clip(threshold), steps=layers + 3)  # each changes the logits of the next ones
    after = largest(model, batch)
    for name, logits in after.items():
        assert (logits <= threshold).all(), (name, before[name], logits)
        assert hook.layers[name].beta == hook.layers[name].beta_default
    assert any((logits < 0.9 * before[name]).any() for name, logits in after.items())


@pytest.mark.parametrize("family", ["llama", "gpt2", "opt", "olmo2", "gpt_neox"])
def test_the_other_heads_keep_every_bit(family):
    """Those of the layer that is clipped: the next one sees other inputs."""
    model, batch = build(family).eval(), inputs(family)
    before = next(iter(largest(model, batch).values()))
    threshold = float(before.sort().values[-2:].mean())  # only one head is above
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    with betahook.attach(model, controller=betahook.Clip(threshold), layers="*0.*", when="always") as hook:
        (layer,) = hook.layers.values()
        with trace() as calls:
            model(**batch)
        untouched, _ = calls[0].scores()
        hook.step()
        with trace() as calls:
            model(**batch)
        scores, _ = calls[0].scores()
        clipped = (before > threshold).nonzero().flatten().tolist()
        assert len(clipped) == 1
        for head in range(layer.heads):
            if head in clipped:
                expected = untouched[:, head] * threshold / float(before[head])
                torch.testing.assert_close(scores[:, head], expected, rtol=2e-5, atol=1e-5 * threshold)
            else:
                assert torch.equal(scores[:, head], untouched[:, head])
        # In every matrix that changed, the rows of the other heads, and of v, have their bits.
        for name, value in model.state_dict().items():
            same = value == weights[name]
            moved = len(same) - int(same.flatten(1).all(1).sum()) if value.dim() == 2 and family != "gpt2" else 0
            assert moved in (0, layer.head_dim, 2 * layer.head_dim), name
        assert hook.metrics()[f"clips/{layer.name}"] == 1
        assert hook.head_metrics()[f"clips/{layer.name}"].nan_to_num(0).tolist() == [
            float(head in clipped) for head in range(layer.heads)
        ]


def test_q_and_k_of_one_head_share_the_factor():
    model, batch = build("opt").eval(), inputs("opt")
    attention = model.model.decoder.layers[0].self_attn
    parts = [attention.q_proj.weight, attention.q_proj.bias, attention.k_proj.weight, attention.k_proj.bias]
    for bias in parts[1::2]:
        nn.init.normal_(bias)
    before = [part.detach().clone() for part in parts]
    (logits, *_) = largest(model, batch).values()
    clip(model, batch, betahook.Clip(float(logits.min()) / 2))
    root = (float(logits.min()) / 2 / logits).float().sqrt().repeat_interleave(len(parts[0]) // len(logits))
    for part, old in zip(parts, before, strict=True):
        torch.testing.assert_close(part.detach(), old * (root if old.dim() == 1 else root[:, None]), rtol=2e-5, atol=0)


class GroupedAttention(nn.Module):
    """Two query heads to a key."""

    def __init__(self):
        super().__init__()
        self.num_heads, self.head_dim = HEADS, WIDTH // HEADS
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(WIDTH, WIDTH // part) for part in (1, 2, 2))

    def forward(self, x):
        q, k, v = (
            projection(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            for projection in (self.q_proj, self.k_proj, self.v_proj)
        )
        return nn.functional.scaled_dot_product_attention(q, k, v, enable_gqa=True).transpose(1, 2).flatten(2)


def test_a_key_that_several_heads_share_stays_as_it_was():
    torch.manual_seed(0)
    model, x = GroupedAttention(), torch.randn(1, LENGTH, WIDTH)
    kept = {name: value.clone() for name, value in model.state_dict().items() if not name.startswith("q_proj")}
    with betahook.attach(model, controller=betahook.Clip(1.0)) as hook:
        for _ in range(100):
            model.q_proj.weight.data.mul_(1.5)  # as an optimizer might
            model(x)
            hook.step()
        assert hook.head_metrics()["clips/"].min() > 90
        model(x)
        assert hook.layers[""].head_statistics.max_logit.tolist() == pytest.approx([1.0] * HEADS, rel=1e-4)
    assert all(torch.equal(value, model.state_dict()[name]) for name, value in kept.items())


@pytest.mark.oldest_skips("the zoo reads configs that are dataclasses")
def test_rotary_parts_of_latent_attention_keep_the_shared_key():
    """MLA: the part of k that all heads share stays, and that of q which meets it takes all of the factor."""
    from zoo.build import build as build_zoo
    from zoo.build import inputs as zoo_inputs

    model = build_zoo("deepseek_v3")
    batch = zoo_inputs("deepseek_v3", model)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    logits = largest(model, batch)
    name, first = next(iter(logits.items()))
    threshold = float(first.min()) / 4
    with betahook.attach(model, controller=betahook.Clip(threshold), layers=name, when="always") as hook:
        model(**batch)
        hook.step()
    assert (largest(model, batch)[name] <= threshold).all()
    module = model.get_submodule(name)
    changed = {key for key, value in model.state_dict().items() if not torch.equal(value, before[key])}
    assert changed == {f"{name}.{part}.weight" for part in ("q_b_proj", "kv_b_proj")}
    ratio = (module.q_b_proj.weight / before[f"{name}.q_b_proj.weight"]).unflatten(0, (hook.layers[name].heads, -1))
    unturned, turned = ratio.detach().nanmedian(-1).values.split([module.qk_nope_head_dim, module.qk_rope_head_dim], 1)
    torch.testing.assert_close(unturned[:, :1].square(), turned[:, :1], rtol=1e-4, atol=0)
    torch.testing.assert_close(turned[:, 0], (threshold / first).to(turned), rtol=1e-4, atol=0)


@pytest.mark.parametrize("family", sorted(SHARED_NORM))
def test_heads_that_share_a_norm_are_clipped_as_one(family):
    model, batch = build(family, "sdpa").eval(), inputs(family)
    name, before = next(iter(largest(model, batch).items()))
    threshold = float(before.sort().values[-2:].mean())
    clip(model, batch, betahook.Clip(threshold))
    torch.testing.assert_close(largest(model, batch)[name], before * (threshold / before.max()), rtol=1e-4, atol=0)


def test_nothing_changes_within_the_threshold_or_in_log_only_mode():
    batch = inputs("llama")
    for rule in (betahook.Clip(1e6), betahook.Clip(1e-3, log_only=True)):
        model = build("llama").eval()
        weights = copy.deepcopy(model.state_dict())
        hook = clip(model, batch, rule, steps=3)
        assert all(torch.equal(value, weights[name]) for name, value in model.state_dict().items())
        metrics = hook.metrics()
        assert (f"clips/{LAYER}" in metrics) is rule.log_only
        if rule.log_only:
            assert metrics[f"clips/{LAYER}"] == 3 * hook.layers[LAYER].heads
            assert hook.head_metrics()[f"clips/{LAYER}"].tolist() == [3.0] * hook.layers[LAYER].heads


def test_log_only_says_where_weights_could_not_be_clipped_too():
    model, batch = build("llama").eval(), inputs("llama")
    model.model.layers[0].self_attn.clip_qkv = 8.0
    hook = clip(model, batch, betahook.Clip(1e-3, log_only=True))
    assert hook.metrics()[f"clips/{LAYER}"] == hook.layers[LAYER].heads


def test_it_comes_after_the_other_controllers_and_leaves_beta_to_them():
    """The threshold holds for the beta that they choose."""
    model, batch = build("gpt2").eval(), inputs("gpt2")
    hook = clip(model, batch, [betahook.Clip(3.0), betahook.Variance(target=20.0, smoothing=0.0)])
    layer = next(iter(hook.layers.values()))
    assert layer.beta > 2 * layer.beta_default
    (name, scores) = next((name, logits / layer.beta_default) for name, logits in largest(model, batch).items())
    assert name == layer.name
    assert (scores * layer.head_beta <= 3.0).all()
    assert float((scores * layer.head_beta).max()) == pytest.approx(3.0, rel=1e-3)


def test_the_state_of_the_optimizer_is_left_alone():
    model, batch = build("llama"), inputs("llama")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    with betahook.attach(model, controller=betahook.Clip(0.5)) as hook:
        for _ in range(2):
            model(**batch).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            kept = copy.deepcopy(optimizer.state_dict()["state"])
            query = model.get_submodule(LAYER).q_proj.weight.detach().clone()
            hook.step()
    assert not torch.equal(model.get_submodule(LAYER).q_proj.weight, query)
    for index, entry in optimizer.state_dict()["state"].items():
        assert all(torch.equal(value, kept[index][name]) for name, value in entry.items())


def test_a_step_that_measured_nothing_clips_nothing():
    """What was measured before says nothing about weights that were clipped since."""
    model, batch = build("llama").eval(), inputs("llama")
    with betahook.attach(model, controller=betahook.Clip(0.5), when="always") as hook:
        model(**batch)
        hook.step()
        weights = copy.deepcopy(model.state_dict())
        hook.step()
        assert all(torch.equal(value, weights[name]) for name, value in model.state_dict().items())


def test_a_logit_that_is_not_finite_clips_nothing():
    model, batch = build("llama").eval(), inputs("llama")
    with betahook.attach(model, controller=betahook.Clip(0.5), when="always") as hook:
        model(**batch)
        hook.step()
        model.get_submodule(LAYER).q_proj.weight.data[0, 0] = math.inf
        weights = copy.deepcopy(model.state_dict())
        model(**batch)
        hook.step()
        assert torch.equal(model.state_dict()[f"{LAYER}.q_proj.weight"], weights[f"{LAYER}.q_proj.weight"])


def test_the_check_leaves_no_trace():
    """Two models train alike, though one of them ran again and again to check itself."""
    ends = []
    for rule in (betahook.Clip(1e6), betahook.Monitor()):
        model = build("gpt2")
        model.transformer.drop.p = 0.1
        torch.manual_seed(7)
        hook = betahook.attach(model, controller=rule)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(3):
            model(**inputs("gpt2")).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            hook.step()
        ends.append([*model.state_dict().values()])
        hook.detach()
    assert all(map(torch.equal, *ends))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(dtype):
    """The bound of the threshold holds up to the rounding of the weights."""
    model, batch = build("llama", dtype=dtype).eval(), inputs("llama")
    clip(model, batch, betahook.Clip(1.0), steps=5)
    logits = torch.cat([*largest(model, batch).values()])
    assert logits.max() <= 1 + torch.finfo(dtype).eps


class LeakingAttention(FusedAttention):
    """A small part of the query goes past the scores into the output."""

    def mix(self, q, k, v):
        return super().mix(q, k, v) + 0.003 * q


def test_half_precision_excuses_no_effect_but_that_of_beta():
    """What a norm adds 1 to is rounded, but no weight of a projection."""
    torch.manual_seed(0)
    x = torch.randn(3, LENGTH, WIDTH, dtype=torch.bfloat16)
    clip(nn.Sequential(FusedAttention()).bfloat16(), {"input": x}, betahook.Clip(1e-3))
    with pytest.raises(betahook.UnsupportedModelError, match=r"cannot clip 0 \(LeakingAttention\)"):
        clip(nn.Sequential(LeakingAttention()).bfloat16(), {"input": x}, betahook.Clip(1e-3))


def test_norms_that_add_1_to_their_weight_are_clipped_in_half_precision():
    model, batch = build("gemma3", dtype=torch.bfloat16, num_hidden_layers=1).eval(), inputs("gemma3")
    nn.init.uniform_(model.model.layers[0].self_attn.q_norm.weight, -0.1, 0.1)  # with zeros, powers of 2 are exact
    before = torch.cat([*largest(model, batch).values()]).max()
    clip(model, batch, betahook.Clip(float(before) / 2), steps=5)
    assert torch.cat([*largest(model, batch).values()]).max() < 0.6 * before


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_rounding_of_norms_that_add_1_to_their_weight_does_not_pass_through_layers(dtype):
    model, batch = build("gemma3", dtype=dtype, num_hidden_layers=3).eval(), inputs("gemma3")
    torch.manual_seed(0)
    norms = [norm for layer in model.model.layers for norm in (layer.self_attn.q_norm, layer.self_attn.k_norm)]
    for norm in norms:
        nn.init.uniform_(norm.weight, -1.5, 3.0)
        norm.weight.data[0] = -1.0  # what multiplies is 0
    before = [norm.weight.clone() for norm in norms]
    clip(model, batch, betahook.Clip(1e9))
    for norm, weight in zip(norms, before, strict=True):
        assert torch.equal(norm.weight, weight)
    smallest = min(logits.max() for logits in largest(model, batch).values())
    clip(model, batch, betahook.Clip(float(smallest) / 4))
    assert all(not torch.equal(norm.weight, weight) for norm, weight in zip(norms, before, strict=True))


class CentredNorm(nn.RMSNorm):
    """Its weight is the factor less 1."""

    def forward(self, x):
        return nn.functional.rms_norm(x.float(), self.normalized_shape, 1 + self.weight.float(), self.eps).to(x)


class CentredNormAttention(FusedAttention):
    """A small part of the query may go past the scores into the output."""

    def __init__(self, leak):
        super().__init__()
        self.leak = leak
        self.q_norm, self.k_norm = (CentredNorm(WIDTH // HEADS, eps=1e-6) for _ in range(2))
        for norm in (self.q_norm, self.k_norm):
            nn.init.uniform_(norm.weight, -0.5, 0.5)

    def mix(self, q, k, v):
        q = self.q_norm(q)
        return super().mix(q, self.k_norm(k), v) + self.leak * q


def test_norms_that_add_1_to_their_weight_excuse_no_effect_but_that_of_beta():
    torch.manual_seed(0)
    x = torch.randn(3, LENGTH, WIDTH, dtype=torch.bfloat16)
    clip(nn.Sequential(CentredNormAttention(0.0)).bfloat16(), {"input": x}, betahook.Clip(1e-3))
    with pytest.raises(betahook.UnsupportedModelError, match=r"cannot clip 0 \(CentredNormAttention\)"):
        clip(nn.Sequential(CentredNormAttention(0.001)).bfloat16(), {"input": x}, betahook.Clip(1e-3))


def test_norms_that_multiply_by_far_more_or_far_less_than_1_are_clipped_in_half_precision():
    torch.manual_seed(0)
    attention, x = CentredNormAttention(0.0).bfloat16(), torch.randn(3, LENGTH, WIDTH, dtype=torch.bfloat16)
    nn.init.constant_(attention.q_norm.weight, 400.0)
    nn.init.constant_(attention.k_norm.weight, -0.97)
    clip(nn.Sequential(attention), {"input": x}, betahook.Clip(1e-3))
    assert (attention.q_norm.weight < 100).all()


class NormalisedAttention(ByHandAttention):
    """Its logits do not see the length of q."""

    def mix(self, q, k, v):
        return super().mix(nn.functional.normalize(q, dim=-1), k, v)


class AttentionTwice(ByHandAttention):
    """Its query goes elsewhere too."""

    def mix(self, q, k, v):
        return super().mix(q, k, v) + q


class KeyTwiceAttention(ByHandAttention):
    """Its key goes elsewhere too, so that the factor must go into the query alone."""

    def mix(self, q, k, v):
        return super().mix(q, k, v) + k


class EarlyNormAttention(ByHandAttention):
    """What is called a norm of the query stands in front of its projection."""

    def __init__(self):
        super().__init__()
        self.head_dim, self.q_norm, self.k_norm = WIDTH // HEADS, nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)
        self.value_norm = self.q_norm

    def forward(self, x):
        q, k = self.split(self.q_proj(self.q_norm(x))), self.split(self.k_proj(self.k_norm(x)))
        return self.mix(q, k, self.split(self.v_proj(self.q_norm(x)))).transpose(1, 2).flatten(2)


@pytest.mark.parametrize("kind", [KeyTwiceAttention, EarlyNormAttention])
def test_the_first_step_finds_that_the_query_has_to_take_all_of_the_factor(kind):
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(WIDTH, WIDTH), kind()), 4 * torch.randn(3, LENGTH, WIDTH)
    weights = copy.deepcopy(model.state_dict())
    before = largest(model, {"input": x})["1"]
    threshold = float(before.sort().values[-2:].mean())
    with betahook.attach(model, controller=betahook.Clip(threshold), when="always") as hook:
        for _ in range(2):
            model(x)
            hook.step()
    after = largest(model, {"input": x})["1"]
    torch.testing.assert_close(after, before.clamp(max=threshold), rtol=1e-4, atol=0)
    changed = {name for name, value in model.state_dict().items() if not torch.equal(value, weights[name])}
    assert changed == {"1.q_proj.weight", "1.q_proj.bias"}


class BiasApart(nn.Module):
    """As in timm's BEiT: a bias of q and one of v, which are the attention's own."""

    def __init__(self, bias):
        super().__init__()
        self.num_heads, self.head_dim = HEADS, WIDTH // HEADS
        self.qkv, self.proj = nn.Linear(WIDTH, 3 * WIDTH, bias=False), nn.Linear(WIDTH, WIDTH)
        self.q_bias, self.v_bias = nn.Parameter(bias * torch.randn(WIDTH)), nn.Parameter(torch.randn(WIDTH))

    def project(self, x):
        bias = torch.cat([self.q_bias, torch.zeros_like(self.v_bias), self.v_bias])
        return nn.functional.linear(x, self.qkv.weight, bias).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)

    def forward(self, x):
        q, k, v = self.project(x)
        return self.proj(nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class JointAttention(ByHandAttention):
    """The second half of the sequence has projections of its own, as text beside an image in SD 3."""

    def __init__(self):
        super().__init__()
        self.add_q_proj, self.add_k_proj, self.add_v_proj = (nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def project(self, x):
        sides = [[getattr(self, f"{start}{name}_proj") for start in ("", "add_")] for name in "qkv"]
        return [
            self.split(torch.cat([part(y) for part, y in zip(side, x.chunk(2, 1), strict=True)], 1)) for side in sides
        ]

    def forward(self, x):
        return self.mix(*self.project(x)).transpose(1, 2).flatten(2)

    def mix(self, q, k, v):
        return nn.functional.scaled_dot_product_attention(q, k, v)


class NormedJointAttention(JointAttention):
    """As in Flux and SD 3.5: each sequence has a norm of q and a norm of k, which all heads share."""

    def __init__(self):
        super().__init__()
        self.norm_q, self.norm_k, self.norm_added_q, self.norm_added_k = (
            nn.RMSNorm(WIDTH // HEADS, eps=1e-6) for _ in range(4)
        )

    def project(self, x):
        q, k, v = super().project(x)
        sides = ((q, self.norm_q, self.norm_added_q), (k, self.norm_k, self.norm_added_k))
        q, k = (torch.cat([norm(y) for norm, y in zip(norms, z.chunk(2, 2), strict=True)], 2) for z, *norms in sides)
        return q, k, v


@torch.no_grad()
def logits_of(model, x):
    """In float64, by the module's own projections: `[batch, heads, tokens, tokens]`."""
    q, k, _ = copy.deepcopy(model).double().project(x.double())
    return q @ k.mT / math.sqrt(WIDTH // HEADS)


@pytest.mark.parametrize("make", [lambda: BiasApart(3.0), lambda: BiasApart(0.0), JointAttention])
def test_a_query_that_several_parameters_make(make):
    """A bias that is zero when the weights are checked may grow."""
    torch.manual_seed(0)
    model, x = make(), 4 * torch.randn(3, LENGTH, WIDTH)
    with betahook.attach(model, controller=betahook.Clip(1.0), when="always") as hook:
        model(x)
        hook.step()
        nn.init.normal_(model.q_bias if isinstance(model, BiasApart) else model.add_q_proj.weight, std=3.0)
        before = logits_of(model, x)
        model(x)
        hook.step()
    largest = before.abs().amax((0, 2, 3))
    expected = before * (1 / largest).clamp(max=1)[:, None, None]
    assert (largest > 1).any()
    torch.testing.assert_close(logits_of(model, x), expected, rtol=1e-4, atol=1e-5)


def test_norms_of_two_sequences_take_the_same_factor():
    torch.manual_seed(0)
    model, x = NormedJointAttention(), torch.randn(3, LENGTH, WIDTH)
    nn.init.normal_(model.norm_added_q.weight, std=3.0)
    before = logits_of(model, x)
    with betahook.attach(model, controller=betahook.Clip(1.0), when="always") as hook:
        model(x)
        hook.step()
    torch.testing.assert_close(logits_of(model, x), before / before.abs().max(), rtol=1e-4, atol=1e-5)


def test_adapters_of_two_sequences_are_each_clipped():
    torch.manual_seed(0)
    model, x = JointAttention(), 4 * torch.randn(3, LENGTH, WIDTH)
    targets = ["q_proj", "add_q_proj"]
    model = inject_adapter_in_model(LoraConfig(r=2, target_modules=targets, init_lora_weights=False), model)
    before = logits_of(model, x)
    with betahook.attach(model, controller=betahook.Clip(1.0), when="always") as hook:
        model(x)
        hook.step()
    largest = before.abs().amax((0, 2, 3))
    assert (largest > 1).all()
    torch.testing.assert_close(logits_of(model, x), before / largest[:, None, None], rtol=1e-4, atol=1e-5)


def test_adapters_that_come_after_the_first_clipping_are_clipped():
    model, batch = build("llama").eval(), inputs("llama")
    with betahook.attach(model, controller=betahook.Clip(1e-3), when="always") as hook:
        model(**batch)
        hook.step()
        inject_adapter_in_model(LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False), model)
        ups = [weight for name, weight in model.named_parameters() if "lora_B" in name]
        before = [weight.clone() for weight in ups]
        model(**batch)
        hook.step()
    assert len(ups) == 2
    assert not any(map(torch.equal, ups, before))


@pytest.mark.parametrize("kind", [NormalisedAttention, AttentionTwice])
def test_weights_that_do_not_act_as_they_look_are_refused_at_the_first_step(kind):
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(WIDTH, WIDTH), kind(), FusedAttention()), torch.randn(3, LENGTH, WIDTH)
    weights = copy.deepcopy(model.state_dict())
    with betahook.attach(model, controller=betahook.Clip(1e-3)) as hook:
        model(x).sum().backward()
        with pytest.raises(
            betahook.UnsupportedModelError, match=rf"cannot clip 1 \({kind.__name__}\): the model's out"
        ):
            hook.step()
    assert all(torch.equal(value, weights[name]) for name, value in model.state_dict().items())
    with betahook.attach(model[1], controller=betahook.Clip(1e-3)) as hook:
        model(x).sum().backward()
        with pytest.raises(betahook.UnsupportedModelError, match=rf"cannot clip the model \({kind.__name__}\): the mo"):
            hook.step()
    with betahook.attach(model, controller=betahook.Clip(1e-3), layers="2") as hook:
        model(x).sum().backward()
        hook.step()


class InTurn(nn.Module):
    """Calls one of its attentions at a time."""

    def __init__(self, *kinds):
        super().__init__()
        self.parts, self.chosen = nn.ModuleList(kind() for kind in kinds), 0

    def forward(self, x):
        return self.parts[self.chosen](x)


@pytest.mark.parametrize("missing", ["input", "layer"])
def test_what_the_first_step_could_not_check_is_checked_later(missing):
    torch.manual_seed(0)
    model, x = InTurn(FusedAttention, NormalisedAttention), torch.randn(3, LENGTH, WIDTH)
    model.chosen = int(missing == "input")
    with betahook.attach(model, controller=betahook.Clip(1e6)) as hook:
        model(x).sum().backward()
        if missing == "input":
            hook.last_call.input = None
        hook.step()
        model.chosen = 1
        model(x).sum().backward()
        with pytest.raises(betahook.UnsupportedModelError, match=r"cannot clip parts\.1 \(Norm"):
            hook.step()


def first_weights(model):
    return [part.q_proj.weight.detach().clone() for part in model.parts]


def test_weights_stay_where_no_forward_can_check_them_and_a_warning_says_what_can(caplog):
    """The parts of a model are called, as the towers of CLIP, and not the model itself."""
    torch.manual_seed(0)
    model, x = InTurn(FusedAttention, NormalisedAttention), 4 * torch.randn(3, LENGTH, WIDTH)
    before = first_weights(model)
    with betahook.attach(model, controller=betahook.Clip(1e-3)) as hook:
        for _ in range(3):
            (model.parts[0](x).sum() + model.parts[1](x).sum()).backward()
            hook.step()
        assert all(map(torch.equal, first_weights(model), before))
        (record,) = caplog.records
        assert "does not scale the weights of parts.0, parts.1 yet" in record.message
        assert "Run the forward of hook.model" in record.message
        model.chosen = 1
        with torch.no_grad():
            model.eval()(x)
        model.train().parts[0](x).sum().backward()
        with pytest.raises(betahook.UnsupportedModelError, match=r"cannot clip parts\.1 \(Norm"):
            hook.step()


def test_a_layer_that_the_last_input_does_not_reach_waits(caplog):
    """Gradients of two batches, each through one of two attentions, are one step."""
    torch.manual_seed(0)
    model, x = InTurn(NormalisedAttention, FusedAttention), 4 * torch.randn(3, LENGTH, WIDTH)
    before = first_weights(model)
    with betahook.attach(model, controller=betahook.Clip(1e-3)) as hook:
        for _ in range(17):
            for model.chosen in range(2):
                model(x).sum().backward()
            hook.step()
        moved = [not torch.equal(*each) for each in zip(first_weights(model), before, strict=True)]
        assert moved == [False, True]
        (record,) = caplog.records
        assert "does not scale the weights of parts.0 yet" in record.message
        assert "let that forward use these layers" in record.message


class Projected(nn.Sequential):
    """An attention behind an output projection of zeros."""

    def __init__(self, kind):
        super().__init__(kind(), nn.Linear(WIDTH, WIDTH))
        nn.init.zeros_(self[1].weight)


@pytest.mark.parametrize("kind", [FusedAttention, NormalisedAttention])
def test_a_layer_that_the_output_does_not_depend_on_is_tried_again_at_growing_distances(kind):
    torch.manual_seed(0)
    model, x = Projected(kind), 4 * torch.randn(3, LENGTH, WIDTH)
    before, runs = model[0].q_proj.weight.detach().clone(), []
    model.register_forward_pre_hook(lambda *_: runs.append(None))
    with betahook.attach(model, controller=betahook.Clip(1e-3)) as hook:
        tried = []
        for step in range(12):
            model(x).sum().backward()
            alone = len(runs)
            hook.step()
            if len(runs) > alone:
                tried.append(step)
        assert tried == [0, 1, 2, 4, 8]
        assert torch.equal(model[0].q_proj.weight, before)
        nn.init.eye_(model[1].weight)
        for _ in range(4):
            model(x).sum().backward()
            hook.step()
        model(x).sum().backward()
        if kind is FusedAttention:
            hook.step()  # the next one after 8
            assert not torch.equal(model[0].q_proj.weight, before)
        else:
            with pytest.raises(betahook.UnsupportedModelError, match=r"cannot clip 0 \(Normalised"):
                hook.step()


def test_noise_of_the_model_is_no_effect_of_the_weights():
    class Drifting(nn.Sequential):
        calls = itertools.count(1)  # an attribute that changes would be restored after a rerun

        def forward(self, x):
            return super().forward(x) * (1 + 1e-3 * next(self.calls))

    torch.manual_seed(0)
    model, x = Drifting(FusedAttention()), 4 * torch.randn(3, LENGTH, WIDTH)
    with betahook.attach(model, controller=betahook.Clip(1e-3)) as hook:
        before = model[0].q_proj.weight.detach().clone()
        model(x).sum().backward()
        hook.step()
        assert not torch.equal(model[0].q_proj.weight, before)


class FromIterator(nn.Sequential):
    """Takes its input out of an iterator, which has none for another run."""

    def forward(self, batches):
        return super().forward(next(batches))


def test_a_model_that_does_not_run_twice_on_one_input_is_refused():
    model, x = FromIterator(FusedAttention()), torch.randn(3, LENGTH, WIDTH)
    with betahook.attach(model, controller=betahook.Clip(1e-3)) as hook:
        for _ in range(2):
            model(iter([x])).sum().backward()
            with pytest.raises(
                betahook.UnsupportedModelError,
                match=r"cannot clip 0 \(FusedAttention\): FromIterator does not run again on the input of its last "
                r"forward \(StopIteration: \)\. Exclude",
            ):
                hook.step()


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda attention: setattr(attention, "clip_qkv", 8.0), "it clips q, k and v after their projections"),
        (lambda attention: setattr(attention, "q_proj", nn.Identity()), "projections have no known form"),
        (
            lambda attention: nn.utils.parametrizations.weight_norm(attention.q_proj),
            "is computed from other parameters in",
        ),
        (lambda attention: attention.q_proj.to("meta"), "offloaded, on the meta device"),
    ],
)
def test_what_has_no_weight_to_clip_is_refused_by_name_when_attached(change, reason):
    model = build("llama")
    change(model.model.layers[1].self_attn)
    with pytest.raises(betahook.UnsupportedModelError, match=rf"cannot clip model.layers.1.self_attn .*{reason}"):
        betahook.attach(model, controller=betahook.Clip())
    assert not any(hasattr(module, "_betahook") for module in model.modules())
    betahook.attach(model, controller=betahook.Clip(), layers="*.0.*").detach()


@pytest.mark.parametrize("key_width", [WIDTH, 8])
def test_the_heads_of_torch_attention_are_clipped(key_width):
    torch.manual_seed(0)
    model = nn.MultiheadAttention(WIDTH, HEADS, kdim=key_width, batch_first=True)
    nn.init.normal_(model.in_proj_bias)
    before = model.in_proj_bias.detach().clone()
    x = 5 * torch.randn(3, LENGTH, WIDTH)
    with betahook.attach(model, controller=betahook.Clip(0.5)) as hook:
        (layer,) = hook.layers.values()
        model(x, x[..., :key_width], x)
        assert layer.statistics.max_logit > 0.5
        hook.step()
        model(x, x[..., :key_width], x)
        assert layer.statistics.max_logit <= 0.5
    assert (model.in_proj_bias != before).unflatten(0, (3, WIDTH)).all(1).tolist() == [True, True, False]


def test_weights_that_take_no_factor_any_more_are_refused_in_every_step():
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(WIDTH, WIDTH), FusedAttention()), torch.randn(3, LENGTH, WIDTH)
    with betahook.attach(model, controller=betahook.Clip(1e-3)) as hook:
        nn.utils.parametrizations.weight_norm(hook.layers["1"].projections[0].module)
        for _ in range(2):
            model(x).sum().backward()
            with pytest.raises(
                betahook.UnsupportedModelError, match=r"cannot clip 1 \(.*computed from other parameters"
            ):
                hook.step()


def test_weights_that_are_pruned_in_the_middle_of_training_are_refused_by_name():
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(WIDTH, WIDTH), FusedAttention()), torch.randn(3, LENGTH, WIDTH)
    with betahook.attach(model, controller=betahook.Clip(1e-3)) as hook:
        model(x).sum().backward()
        hook.step()
        prune.l1_unstructured(model[1].q_proj, "weight", 0.5)
        model(x).sum().backward()
        with pytest.raises(betahook.UnsupportedModelError, match=r"cannot clip 1 \(.*computed from other parameters"):
            hook.step()


@pytest.mark.parametrize("options", [{"threshold": 0.0}, {"threshold": -1.0}])
def test_thresholds_that_make_no_sense(options):
    with pytest.raises(ValueError, match=r"Clip\(threshold=...\) must be a positive number"):
        betahook.Clip(**options)


def test_log_only_is_a_boolean():
    with pytest.raises(ValueError, match=r"Clip\(log_only=...\) must be True or False; got 1"):
        betahook.Clip(log_only=1)


def test_the_counts_go_on_after_a_resume():
    model, batch = build("llama").eval(), inputs("llama")
    rule = betahook.Clip(1e-3, log_only=True)
    state = clip(model, batch, rule, steps=2).state_dict()
    with betahook.attach(model, controller=rule, when="always") as hook:
        hook.load_state_dict(state)
        model(**batch)
        hook.step()
        assert hook.metrics()[f"clips/{LAYER}"] == 3 * hook.layers[LAYER].heads
        del state["clips"]  # as an older version wrote it
        hook.load_state_dict(state)
        assert f"clips/{LAYER}" not in hook.metrics()
