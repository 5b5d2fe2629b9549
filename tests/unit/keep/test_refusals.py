"""What `fold` refuses on sight, each with its message; nothing is changed by that."""

import copy

import pytest
import torch
from torch import nn
from torch.nn.utils import prune
from torch.nn.utils.parametrizations import spectral_norm, weight_norm

import betahook
from betahook.keep.candidates import find_candidates
from betahook.keep.folding import warn_of_refusals
from betahook.keep.refusals import foresee
from betahook.models.scaling import NoScalingError
from support.attention import HEADS, LENGTH, WIDTH, FusedAttention
from support.models import build, inputs
from support.training import move


def adapter(model):
    class Adapter(nn.Module):
        def __init__(self, base_layer):
            super().__init__()
            self.base_layer = base_layer

        def forward(self, x):
            return self.base_layer(x) + 1

    attention = model.model.layers[0].self_attn
    attention.q_proj = Adapter(attention.q_proj)


def share(model):
    first, second = (layer.self_attn for layer in model.model.layers)
    second.q_proj.weight = first.q_proj.weight


def poison(model):
    with torch.no_grad():
        model.model.layers[1].self_attn.q_proj.weight[0, 0] = torch.inf


def hide(model):
    attention = model.model.layers[0].self_attn
    attention.q_proj = nn.Sequential(attention.q_proj)


def quantise(model):
    class Quantised(nn.Linear):
        def forward(self, x):
            return nn.functional.linear(x, self.weight * 0.01)

    query = model.model.layers[0].self_attn.q_proj
    query.__class__ = Quantised
    query.weight = nn.Parameter((query.weight / query.weight.abs().max() * 100).to(torch.int8), requires_grad=False)


def parametrise(model):
    weight_norm(model.model.layers[0].self_attn.q_proj)


def prune_bias(model):
    prune.l1_unstructured(model.transformer.h[0].attn.c_attn, "bias", 0.5)


def partition(model):
    """What DeepSpeed's ZeRO-3 leaves on its parameters."""
    model.lm_head.weight.ds_id = 0


@pytest.mark.parametrize(
    ("family", "change", "per_head", "message"),
    [
        ("qwen3", None, True, r"model.layers.0.self_attn \(Qwen3Attention\): its query norm is shared by all heads"),
        ("llama", adapter, False, "q_proj is wrapped by an adapter.*merge that first.*Or keep the hook: save"),
        ("llama", share, False, "another module shares its query weight, which cannot hold two factors"),
        ("llama", poison, False, "would be NaN or infinite"),
        ("llama", hide, False, "its query projection has no known form"),
        ("llama", quantise, False, "its weight is quantised .* of torch.int8; fold the whole, dequantised model"),
        (
            "llama",
            parametrise,
            False,
            r"is computed from other parameters in every forward \(remove the parametrization or pruning first\); fold",
        ),
        (
            "gpt2",
            prune_bias,
            False,
            r"its bias, is computed from other parameters in every forward \(remove the .* pruning",
        ),
        ("llama", partition, False, "its weights are sharded over ranks. Save the whole model"),
        (
            "llama",
            lambda model: setattr(model.model.layers[0].self_attn, "clip_qkv", 8.0),
            False,
            "it clips q, k and v",
        ),
    ],
)
def test_refusals_change_nothing(family, change, per_head, message):
    model, batch = build(family).eval(), inputs(family)
    if change is not None:
        change(model)
    with betahook.attach(model, controller="monitor") as hook:
        model(**batch)
        move(hook, per_head)
        weights = copy.deepcopy(model.state_dict())
        with pytest.raises(betahook.FoldError, match=message):
            betahook.fold(model)
        assert hook.attached
        assert all(torch.equal(value, weights[name]) for name, value in model.state_dict().items())


def test_a_projection_that_makes_the_keys_too_is_refused():
    """As in the cross-attention of LightGlue."""
    model, x = nn.Sequential(FusedAttention()), torch.randn(2, LENGTH, WIDTH)
    model[0].k_proj = model[0].q_proj
    with betahook.attach(model, controller="monitor") as hook:
        model(x)
        move(hook, False)
        with pytest.raises(
            betahook.FoldError, match="its query weight makes its keys too, where beta would act a second"
        ):
            betahook.fold(model)


class Fusing(FusedAttention):
    """Keeps its separate projections beside the one that it fuses them into, as diffusers does."""

    @torch.no_grad()
    def fuse_projections(self):
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        parts = self.q_proj, self.k_proj, self.v_proj
        self.qkv.weight.copy_(torch.cat([part.weight for part in parts]))
        self.qkv.bias.copy_(torch.cat([part.bias for part in parts]))

    def forward(self, x):
        if not hasattr(self, "qkv"):
            return super().forward(x)
        return self.mix(*map(self.split, self.qkv(x).chunk(3, -1))).transpose(1, 2).flatten(2)


def test_a_fused_copy_of_separate_projections_is_refused():
    torch.manual_seed(0)
    model, x = nn.Sequential(Fusing()), torch.randn(2, LENGTH, WIDTH)
    model[0].fuse_projections()
    with betahook.attach(model, controller="monitor") as hook:
        model(x)
        move(hook, False)
        expected = model(x)
        with pytest.raises(betahook.FoldError, match=r"which would keep the model's own beta\. Call model\.unfuse_qkv"):
            betahook.fold(model)
        del model[0].qkv
        model(x)
        betahook.fold(model)
    torch.testing.assert_close(model(x), expected)


class Normed(FusedAttention):
    def __init__(self):
        super().__init__()
        self.k_proj = self.q_proj
        self.q_norm = nn.RMSNorm(WIDTH // HEADS)

    def mix(self, q, k, v):
        return super().mix(self.q_norm(q), k, v)


def test_a_norm_of_the_query_takes_beta_where_one_projection_makes_the_keys_too():
    model, x = nn.Sequential(Normed()), torch.randn(2, LENGTH, WIDTH)
    with betahook.attach(model, controller="monitor") as hook:
        model(x)
        move(hook, False)
        expected = model(x)
        betahook.fold(model)
    torch.testing.assert_close(model(x), expected)


def test_a_weight_that_overflows_is_not_written():
    model, batch = build("llama", dtype=torch.float16).eval(), inputs("llama")
    with torch.no_grad():
        model.model.layers[1].self_attn.k_proj.weight.mul_(1e-2)
        model.model.layers[1].self_attn.q_proj.weight.mul_(1e2)
    with betahook.attach(model, controller="monitor") as hook:
        model(**batch)
        layer = hook.layers["model.layers.1.self_attn"]
        layer.beta = 5e3 * layer.beta_default
        weights = copy.deepcopy(model.state_dict())
        with pytest.raises(betahook.FoldError, match=r"would be NaN or infinite; .* call model\.float\(\) and run"):
            betahook.fold(model)
        assert all(torch.equal(value, weights[name]) for name, value in model.state_dict().items())


def test_a_bias_that_overflows_is_not_written_though_its_weight_fits():
    model, x = nn.Sequential(FusedAttention()), torch.randn(2, LENGTH, WIDTH)
    with torch.no_grad():
        model[0].q_proj.bias.fill_(2e38)
        model[0].k_proj.weight.zero_()
        model[0].k_proj.bias.zero_()
    with betahook.attach(model, controller="monitor", when="always") as hook:
        assert model(x).isfinite().all()
        hook.layers["0"].beta = 2 * hook.layers["0"].beta_default
        with pytest.raises(betahook.FoldError, match="would be NaN or infinite"):
            betahook.fold(model)


def test_beta_set_before_any_forward_cannot_be_folded_yet():
    with betahook.attach(build("llama")) as hook:
        hook.layers["model.layers.0.self_attn"].beta = 0.5
        with pytest.raises(betahook.FoldError, match="unknown before the first forward; run one"):
            betahook.fold(hook)


def test_a_projection_module_that_two_attentions_share_is_refused():
    model, batch = build("llama"), inputs("llama")
    first, second = (layer.self_attn for layer in model.model.layers)
    second.q_proj = first.q_proj
    with betahook.attach(model, controller="monitor") as hook:
        model(**batch)
        for layer, factor in zip(hook.layers.values(), (2.0, 0.5), strict=True):
            layer.beta = factor * layer.beta_default
        with pytest.raises(betahook.FoldError, match="another module shares its query weight"):
            betahook.fold(model)


def test_the_root_s_own_parameter_is_a_user_of_a_query_weight():
    model = nn.Sequential(FusedAttention())
    model.tied = model[0].q_proj.weight
    with betahook.attach(model, controller="monitor") as hook:
        model(torch.randn(2, LENGTH, WIDTH))
        hook.layers["0"].beta = 0.7
        with pytest.raises(betahook.FoldError, match="another module shares its query weight"):
            betahook.fold(model)


def test_a_module_that_is_listed_besides_is_no_other():
    model, x = nn.Sequential(FusedAttention()), torch.randn(2, LENGTH, WIDTH)
    model.listed = nn.ModuleList([model[0].q_proj, model[0]])
    model.forward = lambda x: model[0](x)
    with betahook.attach(model, controller="monitor") as hook:
        model(x)
        (layer,) = hook.layers.values()
        layer.beta = 0.7
        adapted = model(x)
        betahook.fold(model)
    torch.testing.assert_close(model(x), adapted)


def test_an_offloaded_weight_is_refused():
    model = build("llama").eval()
    query = model.model.layers[0].self_attn.q_proj
    with betahook.attach(model, controller="monitor") as hook:
        model(**inputs("llama"))
        move(hook, per_head=False)
        query.weight = nn.Parameter(query.weight.to("meta"))
        with pytest.raises(
            betahook.FoldError, match="its weight is offloaded, on the meta device outside the forward; fold the whole"
        ):
            betahook.fold(model)


@pytest.mark.parametrize(
    ("build_model", "message"),
    [
        (lambda: build("llama"), r"Or keep the hook: save_pretrained\(\) writes beta beside the weights"),
        (
            lambda: FusedAttention(),
            r"into the model \(FusedAttention\): .* Or keep the hook: save hook.state_dict\(\) beside model.state_dict",
        ),
    ],
)
def test_a_refusal_suggests_what_the_model_has(build_model, message):
    model = build_model()
    with betahook.attach(model, controller="monitor") as hook:
        model(**inputs("llama")) if hasattr(model, "config") else model(torch.randn(2, LENGTH, WIDTH))
        move(hook, per_head=False)
        next(iter(hook.layers.values())).module.clip_qkv = 8.0
        with pytest.raises(betahook.FoldError, match=message) as error:
            betahook.fold(model)
    assert ("save_pretrained" in str(error.value)) == hasattr(model, "save_pretrained")


def on_one_storage(model):
    """A second parameter in the memory of the first one's, as after `.data = ` or a careless conversion."""
    model[1].weight = nn.Parameter(model[0].q_proj.weight.data)


def partly_on_one_storage(model):
    """One row of the query weight, transposed."""
    model.register_buffer("row", model[0].q_proj.weight.data[3:4].mT)


def as_a_buffer(model):
    model.register_buffer("kept", model[0].q_proj.weight)


def as_bytes(model):
    model.register_buffer("raw", model[0].q_proj.bias.data.view(torch.uint8))


@pytest.mark.parametrize("share", [on_one_storage, partly_on_one_storage, as_a_buffer, as_bytes])
def test_a_tensor_in_the_memory_of_a_query_weight_is_found(share):
    model = nn.Sequential(FusedAttention(), nn.Linear(WIDTH, WIDTH))
    share(model)
    with betahook.attach(model, controller="monitor") as hook:
        model(torch.randn(2, LENGTH, WIDTH))
        move(hook, per_head=False)
        weights = copy.deepcopy(model.state_dict())
        with pytest.raises(betahook.FoldError, match="lies in the memory of its query weight, which cannot hold"):
            betahook.fold(model)
        assert hook.attached
        assert all(torch.equal(value, weights[name]) for name, value in model.state_dict().items())


def test_a_tensor_around_the_hooked_model_is_found_too():
    inner = nn.Sequential(FusedAttention())
    outer = nn.ModuleDict({"model": inner, "head": nn.Linear(WIDTH, WIDTH)})
    outer["head"].weight = nn.Parameter(inner[0].q_proj.weight.data)
    with betahook.attach(inner, controller="monitor") as hook:
        inner(torch.randn(2, LENGTH, WIDTH))
        move(hook, per_head=False)
        with pytest.raises(betahook.FoldError, match=r"head\.weight lies in the memory of its query weight"):
            betahook.fold(outer)


def average(model):
    """An exponential moving average, which has memory of its own."""
    attention = model.transformer.h[0].attn
    attention.register_buffer("average", attention.c_attn.weight.detach().clone())


def one_flat_memory(model):
    """As optimizers leave it that keep all parameters in one tensor."""
    parameters = [*model.parameters()]
    flat = torch.cat([parameter.detach().flatten() for parameter in parameters])
    for parameter, part in zip(parameters, flat.split([p.numel() for p in parameters]), strict=True):
        parameter.data = part.view_as(parameter)


@pytest.mark.parametrize("change", [lambda model: None, average, one_flat_memory])
def test_memory_that_only_lies_near_is_no_obstacle(change):
    """Nor are tied embeddings, as those of GPT-2."""
    model, batch = build("gpt2").eval(), inputs("gpt2")
    change(model)
    assert model.lm_head.weight is model.transformer.wte.weight
    with betahook.attach(model, controller="monitor") as hook:
        model(**batch)
        move(hook, per_head=True)
        adapted, embeddings = model(**batch).logits, model.lm_head.weight.detach().clone()
        betahook.fold(model)
    torch.testing.assert_close(model(**batch).logits, adapted, rtol=1e-5, atol=1e-5)
    assert torch.equal(model.lm_head.weight, embeddings)


@pytest.mark.parametrize(
    ("controller", "targets", "is_said"),
    [("default", ["q_proj"], True), ("monitor", ["q_proj"], False), ("default", None, False)],
)
def test_what_cannot_be_folded_is_said_before_the_training(controller, targets, is_said, caplog):
    """And not at its end alone, when all of it has been spent."""
    model = build("llama")
    if targets is not None:
        peft = pytest.importorskip("peft")
        peft.inject_adapter_in_model(peft.LoraConfig(r=2, target_modules=targets), model)
    with betahook.attach(model, controller=controller) as hook:
        warn_of_refusals(hook)
    said = "beta of 2 of 2 layers cannot be folded at the end of training (model.layers.0.self_attn: "
    assert (said in caplog.text) is is_said
    assert ("q_proj is wrapped by an adapter" in caplog.text) is is_said


@pytest.mark.parametrize("per_head", [True, False])
def test_heads_that_share_a_norm_are_named_before_their_betas_differ(per_head, caplog):
    with betahook.attach(build("qwen3"), per_head=per_head) as hook:
        warn_of_refusals(hook)
    said = "beta of 2 of 2 layers cannot be folded at the end of training (model.layers.0.self_attn: its query norm is "
    assert (said + "shared by all heads, whose betas differ. Attach with per_head=False" in caplog.text) is per_head


def test_each_layer_has_a_reason_of_its_own(monkeypatch):
    def none_in_the_first(layer):
        if ".0." in layer.name:
            raise NoScalingError("its projections take no factor")
        return find_candidates(layer)

    peft = pytest.importorskip("peft")
    model = build("llama")
    peft.inject_adapter_in_model(peft.LoraConfig(r=2, target_modules=["q_proj"]), model)
    monkeypatch.setattr("betahook.keep.refusals.find_candidates", none_in_the_first)
    with betahook.attach(model) as hook:
        first, second = foresee(hook, from_weights=True).values()
    assert first.startswith("its projections take no factor; model.layers.0.self_attn.q_proj is wrapped by an adapter")
    assert second.startswith("model.layers.0.self_attn.q_proj is wrapped by an adapter")


def test_of_a_model_without_weights_it_is_seen_that_some_are_made_of_others():
    """The weight of one layer, and the bias alone of another."""
    with torch.device("meta"):
        model = build("gpt2")
    first, second = (block.attn for block in model.transformer.h)
    prune_bias(model)
    with betahook.attach(model, controller="monitor") as hook:
        assert [layer.module for layer in foresee(hook, from_weights=False)] == [first]
        weight_norm(second.c_attn)
        assert [layer.module for layer in foresee(hook, from_weights=False)] == [first, second]


def test_foreseeing_takes_no_step_of_a_spectral_norm():
    model = build("llama").train()
    spectral_norm(model.model.layers[0].self_attn.q_proj)
    before = copy.deepcopy(model.state_dict())
    with betahook.attach(model) as hook:
        assert len(foresee(hook, from_weights=True)) == 1
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_an_adapter_without_a_place_for_beta_does_not_keep_a_training_from_its_begin(caplog, monkeypatch):
    def none(layer):
        raise NoScalingError("its projections take no factor")

    peft = pytest.importorskip("peft")
    model = build("llama")
    peft.inject_adapter_in_model(peft.LoraConfig(r=2, target_modules=["q_proj"]), model)
    monkeypatch.setattr("betahook.keep.refusals.find_candidates", none)
    with betahook.attach(model) as hook:
        warn_of_refusals(hook)
    assert "its projections take no factor" in caplog.text
