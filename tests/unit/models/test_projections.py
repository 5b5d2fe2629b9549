"""The located projections against the q and k that the attention modules themselves compute."""

from functools import partial

import pytest
import torch
import transformers
from torch import nn
from transformers.modeling_utils import AttentionInterface
from transformers.pytorch_utils import Conv1D

import betahook
from betahook.models import projections
from support.models import GROUPED, SIZE, build
from zoo.build import build as zoo_build

HEADS, HEAD_DIM, WIDTH = 4, 8, 32
"""Those of every tiny model."""


def base(name, config_class, **config):
    """A tiny model without a head, of a family that `build` does not know."""
    torch.manual_seed(0)
    return getattr(transformers, name)._from_config(config_class(**config), attn_implementation="eager")


def gpt2_with_cross_attention():
    return build("gpt2", add_cross_attention=True).transformer.h[0]


def bigcode(*, multi_query):
    sizes = dict(n_embd=WIDTH, n_head=HEADS, n_layer=1, vocab_size=64, multi_query=multi_query)
    return base("GPTBigCodeModel", transformers.GPTBigCodeConfig, **sizes).h[0].attn


def persimmon():
    sizes = {**SIZE, "num_hidden_layers": 1, "qk_layernorm": False}
    return base("PersimmonModel", transformers.PersimmonConfig, **sizes).layers[0].self_attn


def qwen3_next():
    experts = dict(num_experts=2, num_experts_per_tok=1, moe_intermediate_size=8, shared_expert_intermediate_size=8)
    sizes = {**SIZE, **GROUPED, **experts, "head_dim": HEAD_DIM, "num_hidden_layers": 1}
    model = base("Qwen3NextModel", transformers.Qwen3NextConfig, **sizes, layer_types=["full_attention"])
    attention = model.layers[0].self_attn
    attention.q_norm = attention.k_norm = nn.Identity()  # the projections end before the norms
    return attention


UNROTATED = {"attention_mask": None, "position_embeddings": (torch.ones(1, 1, 1), torch.zeros(1, 1, 1))}

ATTENTIONS = {
    "llama": (lambda: build("llama").model.layers[0].self_attn, UNROTATED),
    "gpt2": (lambda: build("gpt2").transformer.h[0].attn, {}),
    "gpt2 beside cross-attention": (lambda: gpt2_with_cross_attention().attn, {}),
    "gpt2 cross-attention": (lambda: gpt2_with_cross_attention().crossattention, "encoder_hidden_states"),
    "bert": (lambda: build("bert").bert.encoder.layer[0].attention.self, {}),
    "gpt_neox": (lambda: build("gpt_neox").gpt_neox.layers[0].attention, UNROTATED),
    "phi3": (lambda: build("phi3").model.layers[0].self_attn, UNROTATED),
    "persimmon": (persimmon, UNROTATED),
    "gpt_bigcode": (lambda: bigcode(multi_query=False), {}),
    "gpt_bigcode with one key head": (lambda: bigcode(multi_query=True), {}),
    "qwen3_next": (qwen3_next, UNROTATED),
    "t5": (lambda: build("t5").encoder.block[0].layer[0].SelfAttention, {}),
    "t5 cross-attention": (lambda: build("t5").decoder.block[0].layer[1].EncDecAttention, "key_value_states"),
}
"""An attention module and the options of its forward; a name stands for the option that takes what the keys see."""


@pytest.fixture
def operands(monkeypatch):
    """What a module hands to its attention function: query and key, `[batch, heads, tokens, d_k]`."""
    calls = []

    def function(module, query, key, *args, **kwargs):
        calls.append((query.detach(), key.detach()))
        return torch.zeros_like(query).transpose(1, 2), None

    def run(attention, inputs, others, options):
        options = {options: others} if isinstance(options, str) else options
        monkeypatch.setattr(AttentionInterface, "get_interface", lambda *args: function)
        attention(inputs, **options)
        return calls.pop()

    return run


@pytest.mark.oldest_skips("T5 writes its attention by hand", name="t5*")
@pytest.mark.parametrize("name", ATTENTIONS)
def test_projections_are_those_of_the_module(name, operands):
    make, options = ATTENTIONS[name]
    attention = make().double()
    inputs, others = torch.randn(2, 2, 6, WIDTH, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    # The difference of two runs is free of the bias.
    computed, biases = (
        operands(attention, inputs, others, options),
        operands(attention, 0 * inputs, 0 * others, options),
    )
    located = projections.locate(attention, HEADS, HEAD_DIM)
    of = (inputs, others if isinstance(options, str) else inputs)
    for projection, x, result, bias in zip(located, of, computed, biases, strict=True):
        weight = projection.entries
        assert weight.shape == (result.shape[1], HEAD_DIM, WIDTH)
        torch.testing.assert_close(torch.einsum("btx,hdx->bhtd", x, weight), result - bias, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("rank", [8, None])
def test_latent_attention_is_known_by_its_projections_up(rank, operands):
    sizes = dict(kv_lora_rank=8, q_lora_rank=rank, qk_nope_head_dim=6, qk_rope_head_dim=2, v_head_dim=8)
    config = transformers.DeepseekV3Config(**SIZE, **sizes, rope_interleave=False, attn_implementation="eager")
    torch.manual_seed(0)
    attention = transformers.models.deepseek_v3.modeling_deepseek_v3.DeepseekV3Attention(config, 0).double()
    located = projections.locate(attention, HEADS, HEAD_DIM)
    entered = []
    for projection in located:
        projection.module.register_forward_pre_hook(lambda module, args: entered.append(args[0].flatten(0, -3)))
    inputs = torch.randn(2, 6, WIDTH, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    computed = operands(attention, inputs, None, UNROTATED)
    for projection, x, result in zip(located, entered, computed, strict=True):
        made = torch.einsum("btx,hdx->bhtd", x, projection.entries)
        torch.testing.assert_close(made, result[..., : made.shape[-1]], rtol=1e-10, atol=1e-10)
    assert [projection.entries.shape[1] for projection in located] == [HEAD_DIM, 6]


class Holder(nn.Module):
    """A module with the given children, as an attention module of another library would have them."""

    def __init__(self, **children):
        super().__init__()
        for name, child in children.items():
            setattr(self, name, child)


def linear(rows=HEADS * HEAD_DIM):
    return nn.Linear(WIDTH, rows)


@pytest.mark.parametrize("wrap", [lambda x: Holder(linear=x), lambda x: Holder(base_layer=Holder(linear=x))])
@pytest.mark.parametrize("names", [("q_proj", "k_proj"), ("qkv_proj",)])
def test_a_wrapped_linear_is_seen_through(names, wrap):
    owners = [linear(HEADS * HEAD_DIM * (3 if len(names) == 1 else 1)) for _ in names]
    found = projections.locate(Holder(**dict(zip(names, map(wrap, owners), strict=True))), HEADS, HEAD_DIM)
    assert [projection.module for projection in found] == (owners * 2)[:2]


def with_weight(*shape):
    module = nn.Module()
    module.weight = nn.Parameter(torch.zeros(shape))
    return module


def adding(inside):
    """A LoRA as litgpt writes it."""
    wrapper = Holder(linear=inside)
    wrapper.down, wrapper.up = (nn.Parameter(torch.zeros(2, 2)) for _ in range(2))
    return wrapper


UNKNOWN = {
    "nothing": {},
    "other names": {"first": linear(), "second": linear()},
    "a query alone": {"q_proj": linear()},
    "a weight a codebook": {"q_proj": with_weight(3, 32, 32), "k_proj": with_weight(3, 32, 32)},
    "a norm": {"q": nn.LayerNorm(WIDTH), "k": nn.LayerNorm(WIDTH)},
    "a wrapper that adds": {"q_proj": adding(linear()), "k_proj": adding(linear())},
    "a wrapper of something else": {"q_proj": Holder(inner=linear()), "k_proj": Holder(inner=linear())},
    "no room for keys": {"qkv": linear(HEADS * HEAD_DIM)},
    "a fused projection of an odd size": {"qkv": linear(3 * HEADS * HEAD_DIM + 1)},
    "no linear": {"qkv": nn.ReLU()},
    "a weight without a shape yet": {"q_proj": nn.LazyLinear(WIDTH), "k_proj": nn.LazyLinear(WIDTH)},
}


@pytest.mark.parametrize("children", UNKNOWN)
def test_what_is_not_known_is_none(children):
    assert projections.locate(Holder(**UNKNOWN[children]), HEADS, HEAD_DIM) is None


def latent_heads():
    children = {"kv_b_proj": linear(4 * 6), "q_b_proj": linear(), "q_proj": linear()}
    holder = Holder(**children)
    holder.qk_nope_head_dim = 6
    return holder


STRATEGIES = {
    "torch": (projections.torch_attention, nn.MultiheadAttention(WIDTH, HEADS), ("in_proj", "in_proj")),
    "torch, a weight each": (
        projections.torch_attention,
        nn.MultiheadAttention(WIDTH, HEADS, kdim=5),
        ("in_proj", "in_proj"),
    ),
    "not torch's": (projections.torch_attention, Holder(in_proj=linear(96)), None),
    "side by side": (projections.separate, Holder(to_q=linear(), to_k=linear()), ("to_q", "to_k")),
    "of two pairs": (projections.separate, Holder(q_proj=linear(), to_q=linear(), to_k=linear()), ("to_q", "to_k")),
    "latent": (projections.latent, latent_heads(), ("q_b_proj", "kv_b_proj")),
    "latent without its width": (projections.latent, Holder(kv_b_proj=linear(), q_proj=linear()), None),
    "cross-attention": (projections.cross_attention, Holder(c_attn=linear(64), q_attn=linear()), ("q_attn", "c_attn")),
    "no cross-attention": (projections.cross_attention, Holder(c_attn=linear(96)), None),
    "a query alone": (projections.cross_attention, Holder(q_attn=linear()), None),
    "fused": (projections.fused, Holder(qkv=linear(96)), ("qkv", "qkv")),
    "fused of another size": (projections.fused, Holder(qkv=linear(97)), None),
}


@pytest.mark.parametrize("case", STRATEGIES)
def test_a_strategy_locates_what_it_knows(case):
    strategy, module, names = STRATEGIES[case]
    found = strategy(module, HEADS, HEAD_DIM)
    if names is None or names[0] == "in_proj":
        assert [x.module for x in found or ()] == ([] if names is None else [module] * 2)
    else:
        assert [x.module for x in found] == [getattr(module, name) for name in names]


def test_the_weights_of_torch_attention_with_keys_of_another_width_share_one_bias():
    query, key = projections.locate(nn.MultiheadAttention(WIDTH, HEADS, kdim=5), HEADS, HEAD_DIM)
    assert (query.weight, query.width, query.bias, query.bias_offset) == ("q_proj_weight", WIDTH, "in_proj_bias", 0)
    assert (key.weight, key.width, key.bias, key.bias_offset) == ("k_proj_weight", 5, "in_proj_bias", WIDTH)


def test_the_first_strategy_that_knows_a_module_locates_its_projections():
    module = Holder(q_proj=linear(), k_proj=linear(), qkv=linear(96), q_attn=linear())
    for expected in ("q_proj", "q_attn", "qkv"):
        assert projections.locate(module, HEADS, HEAD_DIM)[0].module is getattr(module, expected)
        delattr(module, expected)
    assert projections.locate(module, HEADS, HEAD_DIM) is None


class FSDPModule:
    """That of torch, which `fully_shard` puts before a class."""


class FSDPConv1D(FSDPModule, Conv1D):
    pass


KINDS = {
    "Linear": nn.Linear,
    "Conv1D": lambda width, out: Conv1D(out, width),
    "divided": lambda width, out: FSDPConv1D(out, width),
}


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_the_entries_are_out_by_in(kind):
    module = Holder(q_proj=kind(6, 8), k_proj=kind(6, 8))
    query, _ = projections.locate(module, 2, 4)
    inputs = torch.randn(3, 6, generator=torch.Generator().manual_seed(1))
    made = inputs @ query.entries.flatten(0, 1).T + query.module.bias
    torch.testing.assert_close(made, query.module(inputs))
    assert (query.width, query.features) == (6, 8)


def tiny_falcon(**options):
    torch.manual_seed(0)
    return transformers.FalconModel._from_config(
        transformers.FalconConfig(vocab_size=64, hidden_size=32, num_attention_heads=4, num_hidden_layers=1, **options),
        attn_implementation="eager",
    )


FUSED = {
    "bloom": partial(zoo_build, "bloom", "eager"),
    "codegen": partial(zoo_build, "codegen", "eager"),
    "gpt_neox_japanese": partial(zoo_build, "gpt_neox_japanese", "eager"),
    "falcon, one key": partial(tiny_falcon, multi_query=True),
    "falcon, as many keys": partial(tiny_falcon, multi_query=False),
    "falcon, groups": partial(tiny_falcon, new_decoder_architecture=True, num_kv_heads=2),
}


@pytest.mark.oldest_skips("the zoo reads configs that are dataclasses")
@pytest.mark.parametrize("of", [0, 1], ids=["query", "key"])
@pytest.mark.parametrize("family", FUSED)
@torch.no_grad()
def test_the_rows_of_a_fused_projection_are_those_that_make_the_scores(family, of):
    """Twice those rows are twice the scores, of every head."""
    model = FUSED[family]()
    ids = torch.arange(3, 15)[None]
    with betahook.attach(model, controller="monitor", when="always", interval=1) as hook:
        layer = next(iter(hook.layers.values()))
        model(ids)
        before = layer.head_statistics.std
        hook.step()
        projection = layer.projections[of]
        for parameter in projection.module.parameters():
            parameter[projection.select(torch.arange(len(parameter))[:, None]).flatten()] *= 2
        model(ids)
        torch.testing.assert_close(layer.head_statistics.std, 2 * before, rtol=1e-4, atol=1e-6)


class TwoScoreMatrices(nn.Module):
    """Twice as many features of q and k as its heads have, as differential attention has."""

    def __init__(self, queries, keys):
        super().__init__()
        self.num_heads, self.head_dim = 4, 8
        self.q_proj, self.k_proj = nn.Linear(32, queries), nn.Linear(32, keys)


@pytest.mark.parametrize(("queries", "keys"), [(64, 64), (64, 32), (32, 64), (32, 24), (32, 20)])
def test_projections_that_do_not_fit_the_heads_are_of_no_known_form(queries, keys):
    assert projections.locate(TwoScoreMatrices(queries, keys), 4, 8) is None


@pytest.mark.parametrize("keys", [8, 16, 32])
def test_projections_that_fit_the_heads(keys):
    query, key = projections.locate(TwoScoreMatrices(32, keys), 4, 8)
    assert query.entries.shape == (4, 8, 32)
    assert key.entries.shape == (keys // 8, 8, 32)


class ByHandAttention(nn.Module):
    num_heads, head_dim = HEADS, HEAD_DIM

    def __init__(self, wrapped):
        super().__init__()
        self.q_proj, self.k_proj = wrapped(linear()), wrapped(linear())

    def forward(self, x):
        query, key = (side(x).unflatten(-1, (HEADS, HEAD_DIM)).transpose(1, 2) for side in (self.q_proj, self.k_proj))
        return (query @ key.mT / HEAD_DIM**0.5).softmax(-1) @ key


@pytest.mark.filterwarnings("ignore:.*torch.jit")
def test_projections_that_torch_jit_traced_are_measured():
    """They do not tell what their arguments are called."""
    model = nn.Sequential(ByHandAttention(lambda module: torch.jit.trace(module, torch.ones(2, WIDTH))))
    x = torch.randn(2, 6, WIDTH)
    with betahook.attach(model, controller="monitor") as hook:
        model(x).sum().backward()
        hook.step()
        layer = hook.layers["0"]
        weight = model[0].q_proj.weight.detach()
        assert layer.weight_std_q == pytest.approx(weight.std(correction=0).item(), rel=1e-5)
        assert layer.statistics.input_std_q.item() == pytest.approx(x.std(correction=0).item(), rel=1e-5)


@pytest.mark.filterwarnings("ignore:.*torch.jit")
def test_projections_that_torch_jit_scripted_are_measured_without_their_inputs():
    """They take no hooks."""
    model = nn.Sequential(ByHandAttention(torch.jit.script))
    x = torch.randn(2, 6, WIDTH)
    expected = model(x)
    with betahook.attach(model) as hook:
        model(x).sum().backward()
        hook.step()
        layer = hook.layers["0"]
        assert layer.weight_std_q == pytest.approx(model[0].q_proj.weight.detach().std(correction=0).item(), rel=1e-5)
        assert layer.statistics.input_std_q.isnan()
        layer.beta = 2 * layer.beta_default
        doubled = model(x)
        assert not torch.allclose(doubled, expected)
        betahook.fold(model)
    torch.testing.assert_close(model(x), doubled)
