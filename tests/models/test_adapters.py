"""Adapters and quantised weights: the weights as they act are what is measured, and what is folded."""

import copy
import warnings

import pytest
import torch
from torch import nn

import betahook
from betahook import checkpoint
from betahook.tap import adapters
from support.models import build, derivative, inputs
from support.training import train

peft = pytest.importorskip("peft")

LAYER = "model.layers.0.self_attn"
pytestmark = [
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning"),  # PEFT reads it
    pytest.mark.filterwarnings("ignore:.*needs_betahook_restore"),
]


def adapt(model, **options):
    """LoRA on q and k, with a B that is not zero."""
    config = peft.LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "k_proj"], **options)
    adapted = peft.get_peft_model(model, config)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_B" in name:
                parameter.copy_(torch.randn(parameter.shape, generator=generator))
    return adapted


def stds(model, name):
    """What W + BA of q and k spread by, without betahook or PEFT's own sums."""
    attention = model.get_submodule(name)
    for projection in (attention.q_proj, attention.k_proj):
        added = projection.lora_B["default"].weight @ projection.lora_A["default"].weight
        weight = projection.base_layer.weight + 8 / 4 * added
        yield weight.double().std(correction=0).item()


@pytest.mark.parametrize("before", [True, False])
def test_the_std_of_adapted_weights_is_that_of_their_sum(before):
    model, batch = build("llama"), inputs("llama")
    if before:
        hook = betahook.attach(model, controller="monitor")
        adapted, name = adapt(model), LAYER
    else:
        adapted, name = adapt(model), f"base_model.model.{LAYER}"
        hook = betahook.attach(adapted, controller="monitor")
    with hook:
        adapted(**batch).loss.backward()
        hook.step()
        metrics = hook.metrics()
        expected = list(stds(model, LAYER))
        measured = [metrics[f"weight_std_q/{name}"], metrics[f"weight_std_k/{name}"]]
        assert measured == pytest.approx(expected, rel=1e-5)
        assert metrics[f"sensitivity/{name}"] != 0
        with adapted.disable_adapter():
            seen = hook.layers[name].weight_std_q
            base = model.get_submodule(LAYER).q_proj.base_layer.weight
            assert seen == pytest.approx(base.double().std(correction=0).item(), rel=1e-5)
        adapted.merge_adapter()
        assert hook.layers[name].weight_std_q == pytest.approx(expected[0], rel=1e-5)


def test_what_is_sharded_in_the_adapter_alone_takes_all_ranks():
    model = adapt(build("llama"))
    with betahook.attach(model, controller="monitor") as hook:
        query, key = hook.layers[f"base_model.model.{LAYER}"].projections
        query.adapter.lora_A["default"].weight.full_tensor = None
        assert (query.is_sharded, key.is_sharded) == (True, False)


def test_an_adapter_on_a_transposed_weight():
    """GPT-2 stores q, k and v as one matrix `[d_x, 3 d_x]`."""
    config = peft.LoraConfig(r=4, lora_alpha=8, target_modules=["c_attn"], fan_in_fan_out=True)
    adapted = peft.get_peft_model(build("gpt2"), config)
    name = "base_model.model.transformer.h.0.attn"
    projection = adapted.get_submodule(name).c_attn
    torch.nn.init.normal_(projection.lora_B["default"].weight, generator=torch.Generator().manual_seed(3))
    whole = (
        projection.base_layer.weight
        + 8 / 4 * (projection.lora_B["default"].weight @ projection.lora_A["default"].weight).mT
    )
    with betahook.attach(adapted, controller="monitor") as hook:
        adapted(**inputs("gpt2"))
        hook.step()
        for part, columns in zip("qk", whole.double().chunk(3, dim=1), strict=False):
            expected = columns.std(correction=0).item()
            assert hook.metrics()[f"weight_std_{part}/{name}"] == pytest.approx(expected, rel=1e-5)


def test_an_adapter_of_another_kind_is_not_measured_and_said_so():
    config = peft.IA3Config(target_modules=["q_proj", "k_proj"], feedforward_modules=[])
    adapted = peft.get_peft_model(build("llama"), config)
    with betahook.attach(adapted, controller="monitor") as hook:
        adapted(**inputs("llama"))
        hook.step()
        assert not any(key.startswith("weight_std") for key in hook.metrics())
        said = (
            "layers.0-1.self_attn: the std of W_q and W_k is not measured, they are under an adapter of an unknown kind"
        )
        assert said in repr(hook)
        sharpen(hook)
        with pytest.raises(betahook.FoldError, match=r"under an adapter of an unknown kind.*merge that first"):
            betahook.fold(hook)


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_the_std_under_dora_is_that_of_the_merged_weight(family):
    transposed = dict(target_modules=["c_attn"], fan_in_fan_out=True) if family == "gpt2" else {}
    config = dict(target_modules=["q_proj"], init_lora_weights=False, use_dora=True) | transposed
    adapted = peft.get_peft_model(build(family), peft.LoraConfig(**config))
    with betahook.attach(adapted, controller="monitor") as hook:
        layer = next(iter(hook.layers.values()))
        with torch.no_grad():
            for magnitude in (p for name, p in adapted.named_parameters() if "magnitude" in name):
                magnitude.mul_(torch.linspace(0.5, 2, len(magnitude)))
        measured = layer.weight_std_q
        adapted.merge_adapter()
        assert measured == pytest.approx(layer.weight_std_q, rel=1e-5)


@pytest.mark.parametrize("late", [False, True])
def test_beta_is_folded_into_what_is_saved_with_an_adapter(tmp_path, late):
    """Into the magnitudes of DoRA, whose rows have no other scale."""
    model, batch = build("llama").eval(), inputs("llama")
    own = model(**batch).logits
    base = copy.deepcopy(model.state_dict())
    hook = betahook.attach(model, controller="monitor") if late else None
    adapted = adapt(model, use_dora=True).eval()
    hook = hook or betahook.attach(adapted, controller="monitor")
    adapted(**batch)
    for layer in hook.layers.values():
        layer.head_beta = layer.head_beta_default * torch.linspace(0.5, 2, layer.heads)
    expected = adapted(**batch).logits
    betahook.fold(adapted)
    torch.testing.assert_close(adapted(**batch).logits, expected, rtol=1e-4, atol=1e-5)
    adapted.save_pretrained(tmp_path)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        again = build("llama")
        again.load_state_dict(base)
        again = peft.PeftModel.from_pretrained(again, tmp_path).eval()
    torch.testing.assert_close(again(**batch).logits, expected, rtol=1e-4, atol=1e-5)
    with again.disable_adapter():
        assert torch.equal(again(**batch).logits, own)


@pytest.mark.parametrize(("saved", "folds"), [(["q_norm"], True), ([], False)])
def test_the_norm_that_beta_goes_into_must_be_saved_with_the_adapter(saved, folds):
    config = peft.LoraConfig(target_modules=["q_proj"], use_dora=True, modules_to_save=saved, init_lora_weights=False)
    adapted, batch = peft.get_peft_model(build("qwen3"), config).eval(), inputs("qwen3")
    with betahook.attach(adapted, controller="monitor") as hook:
        adapted(**batch)
        sharpen(hook)
        expected = adapted(**batch).logits
        if folds:
            betahook.fold(adapted)
            torch.testing.assert_close(adapted(**batch).logits, expected, rtol=1e-4, atol=1e-5)
        else:
            with pytest.raises(betahook.FoldError, match="saved without the weights below; merge that first"):
                betahook.fold(adapted)


@pytest.mark.parametrize(
    "options",
    [dict(target_modules=["q_proj"], use_dora=True), dict(target_modules=["v_proj"], modules_to_save=["q_proj"])],
)
def test_beta_is_not_folded_into_one_of_two_adapters(options):
    config = peft.LoraConfig(init_lora_weights=False, **options)
    adapted, batch = peft.get_peft_model(build("llama"), config).eval(), inputs("llama")
    adapted.add_adapter("other", config)
    with betahook.attach(adapted, controller="monitor", when="always") as hook:
        adapted(**batch)
        sharpen(hook)
        expected = adapted(**batch).logits
        with pytest.raises(betahook.FoldError, match=r"\(other\) would keep the model's own beta\. Delete them first"):
            betahook.fold(adapted)
        adapted.delete_adapter("other")
        betahook.fold(adapted)
    torch.testing.assert_close(adapted(**batch).logits, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("before", [True, False])
def test_folding_waits_for_the_merge(before):
    """The base weights are no part of a saved adapter, so beta must not go there."""
    model, batch = build("llama"), inputs("llama")
    hook = betahook.attach(model, controller=betahook.Search(window=1, warmup=0, rise=False)) if before else None
    adapted = adapt(model)
    hook = hook or betahook.attach(adapted, controller=betahook.Search(window=1, warmup=0, rise=False))
    train(adapted, hook, 3)
    adapted.eval()
    expected = adapted(**batch).logits
    weights = copy.deepcopy(adapted.state_dict())
    with pytest.raises(betahook.FoldError, match=r"q_proj is wrapped by an adapter.*merge that first"):
        betahook.fold(hook)
    assert all(torch.equal(value, weights[name]) for name, value in adapted.state_dict().items())

    merged = adapted.merge_and_unload()
    torch.testing.assert_close(merged(**batch).logits, expected, rtol=1e-4, atol=1e-5)
    betahook.fold(hook)
    assert merged is model
    torch.testing.assert_close(model(**batch).logits, expected, rtol=1e-4, atol=1e-5)


def test_an_adapter_saves_beta_beside_it(tmp_path):
    adapted = adapt(build("llama"))
    with betahook.attach(adapted, controller=betahook.Search(window=1, warmup=0, rise=False)) as hook:
        train(adapted, hook, 3)
        adapted.eval()
        adapted.save_pretrained(tmp_path)
        expected = adapted(**inputs("llama")).logits
        adapted.save_pretrained(tmp_path / "other rank", is_main_process=False)
    assert not list(tmp_path.glob("other rank/betahook*"))
    again = peft.PeftModel.from_pretrained(build("llama"), tmp_path).eval()
    with betahook.restore(again, tmp_path):
        assert torch.equal(again(**inputs("llama")).logits, expected)


def test_a_model_that_is_merged_under_its_hook_saves_beta(tmp_path):
    adapted, batch = adapt(build("llama")).eval(), inputs("llama")
    with betahook.attach(adapted, controller="monitor", when="always") as hook:
        adapted(**batch)
        sharpen(hook)
        merged = adapted.merge_and_unload()
        expected = merged(**batch).logits
        merged.save_pretrained(tmp_path)
    again = type(merged).from_pretrained(tmp_path).eval()
    with pytest.raises(ValueError, match="was saved with its beta beside the weights"):
        betahook.attach(again)
    with betahook.restore(again, tmp_path):
        torch.testing.assert_close(again(**batch).logits, expected, rtol=1e-5, atol=1e-5)


class Packed(nn.Module):
    """A linear module with eight bits a weight, in a form that nobody knows."""

    def __init__(self, linear):
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.scale = linear.weight.detach().abs().max() / 127
        self.weight = nn.Parameter((linear.weight / self.scale).round().to(torch.int8), requires_grad=False)

    def forward(self, x):
        return x @ (self.weight * self.scale).T


def test_weights_quantised_in_an_unknown_way_leave_the_scores():
    model, batch = build("llama"), inputs("llama")
    attention = model.get_submodule(LAYER)
    attention.q_proj = Packed(attention.q_proj)
    with betahook.attach(model, controller="monitor") as hook:
        model(**batch).loss.backward()
        hook.step()
        metrics = hook.metrics()
        said = f"{LAYER}: the std of W_q is not measured, it is quantised in an unknown way, a Parameter of torch.int8"
        assert said in repr(hook)
    assert metrics[f"score_std/{LAYER}"] > 0
    assert metrics[f"sensitivity/{LAYER}"] != 0
    assert f"weight_std_q/{LAYER}" not in metrics
    assert metrics[f"weight_std_k/{LAYER}"] > 0


def bits(module, kind):
    """`module` with q and k quantised by a library, which keeps them as weights of its own class."""
    if kind == "torchao":
        quantization = pytest.importorskip("torchao.quantization")
        quantization.quantize_(module, quantization.Int8WeightOnlyConfig(), lambda m, name: name.endswith("q_proj"))
        return
    library = pytest.importorskip("bitsandbytes").nn
    for attention in (layer.self_attn for layer in module.model.layers):
        old = attention.q_proj
        if kind == "4 bit":
            new = library.Linear4bit(old.in_features, old.out_features, bias=False, compute_dtype=torch.float32)
        else:
            new = library.Linear8bitLt(old.in_features, old.out_features, bias=False, has_fp16_weights=False)
        new.load_state_dict(old.state_dict())
        attention.q_proj = new.to("cpu")


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("kind", "tolerance"), [("torchao", 1e-2), ("8 bit", 1e-2), ("4 bit", 5e-2)])
def test_quantised_weights_are_dequantised(kind, tolerance):
    model, batch = build("llama", hidden_size=64), inputs("llama")
    exact = model.get_submodule(LAYER).q_proj.weight.double().std(correction=0).item()
    bits(model, kind)
    with betahook.attach(model, controller="monitor") as hook:
        model(**batch).loss.backward()
        hook.step()
        metrics = hook.metrics()
        assert metrics[f"weight_std_q/{LAYER}"] == pytest.approx(exact, rel=tolerance)
        assert metrics[f"weight_std_q/{LAYER}"] != exact
        assert metrics[f"predicted_std/{LAYER}"] > 0
        hook.layers[LAYER].beta = 0.5
        with pytest.raises(betahook.FoldError, match="its weight is quantised"):
            betahook.fold(hook)


@pytest.mark.parametrize("target", ["v_proj", "k_proj"])
def test_the_sensitivity_needs_no_gradient_of_the_query(target):
    model = build("llama").double()
    model = peft.get_peft_model(model, peft.LoraConfig(target_modules=[target], layers_to_transform=[0]))
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter)
    batch = inputs("llama")
    with betahook.attach(model, controller="monitor") as hook:
        model(**batch).loss.backward()
        layer = next(iter(hook.layers.values()))
        sensitivity = float(layer.statistics.sensitivity)
        assert sensitivity == pytest.approx(derivative(layer, lambda: model(**batch).loss), rel=1e-3)


PROMPTS = {
    "in the model": lambda: peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4),
    "in its attention": lambda: peft.AdaptionPromptConfig(task_type="CAUSAL_LM", adapter_len=3, adapter_layers=2),
}
"""The second kind is LLaMA-Adapter."""


@pytest.mark.parametrize("kind", PROMPTS)
@pytest.mark.parametrize("before", [True, False])
def test_a_model_of_learned_prompts_is_saved_without_the_weights_that_would_be_folded(before, kind):
    prompts, model = PROMPTS[kind](), build("llama")
    model = peft.get_peft_model(model, prompts) if before else model
    with betahook.attach(model, controller="monitor") as hook:
        model(**inputs("llama"))
        for layer in hook.layers.values():
            layer.beta = 2 * layer.beta_default
        with pytest.raises(betahook.FoldError, match="learns prompts, which are saved without the weights"):
            betahook.fold(model if before else peft.get_peft_model(model, prompts))
        assert hook.attached


@pytest.mark.filterwarnings("ignore:`past_key_values` is deprecated:FutureWarning")  # PEFT passes it
@pytest.mark.parametrize(
    ("kind", "options"),
    [("PromptEncoderConfig", {}), ("PrefixTuningConfig", dict(prefix_projection=True, encoder_hidden_size=8))],
)
def test_beta_of_a_model_with_computed_prompts_is_restored(tmp_path, kind, options):
    """PEFT saves the prompts, not what they are computed from."""
    config = getattr(peft, kind)(task_type="CAUSAL_LM", num_virtual_tokens=3, **options)
    adapted, batch = peft.get_peft_model(build("llama"), config).eval(), inputs("llama")
    with betahook.attach(adapted, controller="monitor", when="always") as hook:
        adapted(**batch)
        sharpen(hook)
        expected = adapted(**batch).logits
        adapted.save_pretrained(tmp_path)
    again = peft.PeftModel.from_pretrained(build("llama"), tmp_path).eval()
    with betahook.restore(again, tmp_path):
        torch.testing.assert_close(again(**batch).logits, expected)
    with torch.no_grad():
        again.get_base_model().lm_head.weight.add_(1)
    with pytest.raises(ValueError, match="its beta belongs to other weights than those of this PeftModel"):
        betahook.restore(again, tmp_path)


@pytest.mark.parametrize("merged", [False, True])
def test_adapted_weights_are_clipped_with_what_lies_below(merged, caplog):
    """Also where a second adapter, which does not act now, is given the same base."""
    model, batch = build("llama").eval(), inputs("llama")
    adapted = adapt(model)
    adapted.add_adapter("other", peft.LoraConfig(r=2, target_modules=["q_proj"]))
    if merged:
        adapted.merge_adapter()
    name = f"base_model.model.{LAYER}"
    projections = {side: model.get_submodule(LAYER).get_submodule(f"{side}_proj") for side in "qk"}

    def acting(side):
        projection = projections[side]
        weight = projection.base_layer.weight.detach()
        return weight.clone() if merged else weight + projection.get_delta_weight("default").detach()

    before = {side: acting(side) for side in "qk"}
    with betahook.attach(adapted, controller=betahook.Clip(1.0), when="always") as hook:
        adapted(**batch)
        logits = hook.layers[name].head_statistics.max_logit
        hook.step()
        adapted(**batch)
        factor = (1.0 / logits).repeat_interleave(hook.layers[name].head_dim)[:, None].float()
        torch.testing.assert_close(acting("q"), before["q"] * factor, rtol=1e-3, atol=1e-5)
        assert torch.equal(acting("k"), before["k"])  # which two heads share
        assert hook.layers[name].head_statistics.max_logit.max() <= 1 + 1e-5
    assert "a saved adapter does not contain" in caplog.text


def test_an_adapter_that_comes_later_is_clipped_too():
    model, batch = build("llama").eval(), inputs("llama")
    with betahook.attach(model, controller=betahook.Clip(1.0), when="always") as hook:
        model(**batch)
        hook.step()
        adapted = adapt(model)
        for _ in range(4):
            adapted(**batch)
            hook.step()
        adapted(**batch)
        assert hook.layers[LAYER].head_statistics.max_logit.max() <= 1 + 1e-5


def test_dora_is_clipped_in_its_magnitudes():
    model, batch = build("llama").eval(), inputs("llama")
    adapted = adapt(model, use_dora=True)
    below = copy.deepcopy(model.get_submodule(LAYER).q_proj.base_layer.weight)
    with betahook.attach(adapted, controller=betahook.Clip(1.0), when="always") as hook:
        adapted(**batch)
        hook.step()
        adapted(**batch)
        assert hook.layers[f"base_model.model.{LAYER}"].head_statistics.max_logit.max() <= 1 + 1e-5
    assert torch.equal(model.get_submodule(LAYER).q_proj.base_layer.weight, below)


@pytest.mark.parametrize("acts", [True, False])
def test_peft_says_where_it_loads_an_adapter_that_beta_is_missing(tmp_path, acts):
    adapted, batch = adapt(build("llama")).eval(), inputs("llama")
    with betahook.attach(adapted, controller="monitor") as hook:
        adapted(**batch)
        if acts:
            for layer in hook.layers.values():
                layer.beta = 2 * layer.beta_default
        expected = adapted(**batch).logits
        adapted.save_pretrained(tmp_path)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        again = peft.PeftModel.from_pretrained(build("llama"), tmp_path).eval()
    assert any("needs_betahook_restore" in str(warning.message) for warning in caught) is acts
    if acts:
        with betahook.restore(again, tmp_path):
            torch.testing.assert_close(again(**batch).logits, expected, rtol=1e-5, atol=1e-5)


def sharpen(hook):
    for layer in hook.layers.values():
        layer.beta = 2 * layer.beta_default


def test_beta_is_off_with_the_adapters():
    model, batch = build("llama").eval(), inputs("llama")
    own = model(**batch).logits
    adapted = peft.get_peft_model(model, peft.LoraConfig(target_modules=["q_proj"], init_lora_weights=False)).eval()
    with betahook.attach(adapted, when="always") as hook:
        before = adapted.disable_adapter
        adapted(**batch)
        hook.step()
        sharpen(hook)
        trained = adapted(**batch).logits
        measured = [layer.statistics.count.clone() for layer in hook.layers.values()]
        with adapted.disable_adapter():
            assert torch.equal(adapted(**batch).logits, own)
        with torch.inference_mode(), adapted.disable_adapter():
            assert torch.equal(adapted(**batch).logits, own)
        assert [layer.statistics.count for layer in hook.layers.values()] == measured
        assert torch.equal(adapted(**batch).logits, trained)
    betas = [layer.beta for layer in hook.layers.values()]
    with before():  # kept from the time when the model was hooked
        assert torch.equal(adapted(**batch).logits, own)
        assert [layer.beta for layer in hook.layers.values()] == betas
    assert "disable_adapter" not in vars(adapted)


def test_beta_is_off_with_adapters_that_came_after_the_hook(tmp_path):
    model, batch = build("llama").eval(), inputs("llama")
    own = model(**batch).logits
    with betahook.attach(model, when="always") as hook:
        adapted = peft.get_peft_model(model, peft.LoraConfig(target_modules=["q_proj"], init_lora_weights=False)).eval()
        adapted(**batch)
        hook.step()
        sharpen(hook)
        for _ in range(2):
            trained = adapted(**batch).logits
            measured = [layer.statistics.count for layer in hook.layers.values()]
            with adapted.disable_adapter():
                assert torch.equal(adapted(**batch).logits, own)
            assert [layer.statistics.count for layer in hook.layers.values()] == measured
            assert torch.equal(adapted(**batch).logits, trained)
            hook.step()
            sharpen(hook)
        checkpoint.save(hook, tmp_path)
        betas = [layer.beta for layer in hook.layers.values()]
        with adapted.disable_adapter():
            hook.detach()
            assert torch.equal(adapted(**batch).logits, own)
        assert [layer.beta for layer in hook.layers.values()] == betas
    assert "enable_adapters" not in vars(adapters.first_adapter(model))
    with betahook.restore(adapted, tmp_path), adapted.disable_adapter():  # attaches to the model below
        assert torch.equal(adapted(**batch).logits, own)


@pytest.mark.parametrize("name", ["default", "other"])
def test_an_adapter_that_was_made_after_attach_says_that_beta_is_missing(tmp_path, name):
    model, batch = build("llama").eval(), inputs("llama")
    config = peft.LoraConfig(target_modules=["q_proj"], init_lora_weights=False)
    with betahook.attach(model, controller="monitor", when="always") as hook:
        adapted = peft.get_peft_model(model, config, adapter_name=name).eval()
        adapted(**batch)
        hook.step()
        adapted.save_pretrained(tmp_path / "own")
        sharpen(hook)
        expected = adapted(**batch).logits
        adapted.save_pretrained(tmp_path)
    assert "save_pretrained" not in vars(config)
    assert "needs_betahook_restore" not in next(tmp_path.glob("own/**/adapter_config.json")).read_text()
    model.peft_config = config  # of one's own, not of PEFT
    with betahook.attach(model, when="always") as hook:
        model(**batch)
        hook.step()
    folder = tmp_path if name == "default" else tmp_path / name
    with pytest.warns(UserWarning, match="needs_betahook_restore"):
        again = peft.PeftModel.from_pretrained(build("llama"), folder).eval()
    assert not torch.allclose(again(**batch).logits, expected, rtol=1e-3)
    with betahook.restore(again, folder):
        torch.testing.assert_close(again(**batch).logits, expected)


def test_beta_is_found_above_the_folder_of_a_named_adapter(tmp_path, monkeypatch):
    config = peft.LoraConfig(target_modules=["q_proj"], init_lora_weights=False)
    adapted, batch = peft.get_peft_model(build("llama"), config, adapter_name="other").eval(), inputs("llama")
    with betahook.attach(adapted, controller="monitor", when="always") as hook:
        adapted(**batch)
        sharpen(hook)
        expected = adapted(**batch).logits
        adapted.save_pretrained(tmp_path)
    monkeypatch.chdir(tmp_path / "other")
    again = peft.PeftModel.from_pretrained(build("llama"), ".", "other").eval()
    with betahook.restore(again, "."):
        assert torch.equal(again(**batch).logits, expected)
    (tmp_path / checkpoint.FILE).unlink()
    with pytest.raises(FileNotFoundError, match="beta of this model is in that file: the folder was copied without it"):
        betahook.restore(again, tmp_path / "other")


def test_beta_of_one_of_several_adapters_is_restored(tmp_path):
    """PEFT loads it as `default`, the name that another one was saved under."""
    adapted, batch = adapt(build("llama")).eval(), inputs("llama")
    adapted.add_adapter("other", peft.LoraConfig(target_modules=["q_proj", "v_proj"], init_lora_weights=False))
    adapted.set_adapter("other")
    with betahook.attach(adapted, controller="monitor", when="always") as hook:
        adapted(**batch)
        sharpen(hook)
        expected = adapted(**batch).logits
        adapted.save_pretrained(tmp_path)
    again = peft.PeftModel.from_pretrained(build("llama"), tmp_path / "other").eval()
    with betahook.restore(again, tmp_path / "other"):
        torch.testing.assert_close(again(**batch).logits, expected)
    both = peft.PeftModel.from_pretrained(build("llama"), tmp_path)
    both.load_adapter(tmp_path / "other", "other")
    with torch.no_grad():
        both.get_submodule(f"base_model.model.{LAYER}").q_proj.lora_A["other"].weight.add_(1)
    with pytest.raises(ValueError, match=r"its beta belongs to other weights .*: 1 of .*q_proj.lora_A.other.weight"):
        betahook.restore(both, tmp_path)


@pytest.mark.parametrize("of", ["model", "adapted"])
def test_beta_of_an_adapted_model_is_restored_from_either(tmp_path, of):
    model, batch = build("llama").eval(), inputs("llama")
    adapted = peft.get_peft_model(model, peft.LoraConfig(target_modules=["q_proj"], init_lora_weights=False)).eval()
    with betahook.attach(model if of == "model" else adapted, controller="monitor", when="always") as hook:
        adapted(**batch)
        sharpen(hook)
        expected = adapted(**batch).logits
        adapted.save_pretrained(tmp_path)
        checkpoint.save(hook, tmp_path)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        again = peft.PeftModel.from_pretrained(build("llama"), tmp_path).eval()
    with betahook.restore(again, tmp_path):
        torch.testing.assert_close(again(**batch).logits, expected)
