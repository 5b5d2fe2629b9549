"""Models that are not of transformers, or lie inside others: PEFT, sentence-transformers, diffusers, timm."""

import logging

import diffusers
import peft
import pytest
import sentence_transformers
import timm
import torch
from datasets import Dataset
from sentence_transformers.losses import MultipleNegativesRankingLoss
from sentence_transformers.models import Pooling, Transformer
from transformers import BertConfig, BertModel

import betahook
from support.models import build, inputs
from support.pages import blocks, run
from support.trainer import Tokens


def page(heading, adapting=False, **names):
    """Run the blocks below a heading; with beta adapting where they only watch, if asked."""
    code = "".join(blocks("docs/STACKS.md", heading))
    if adapting:
        assert '"monitor"' in code
        code = code.replace('"monitor"', '"default"')
    return run(code, torch=torch, **names)


def sharpen(hook, factor=2.0):
    for layer in hook.layers.values():
        layer.beta = factor * layer.beta_default


def check_fold(model, hook, output, rtol=1e-4):
    """Fold what has another beta than its own: the same output, and not that of the own beta."""
    own = output().detach()
    sharpen(hook)
    expected = output().detach()
    betahook.fold(hook)
    torch.testing.assert_close(output(), expected, rtol=rtol, atol=1e-5)
    assert (own - expected).norm() > 1e-4 * own.norm()


# PEFT


@pytest.mark.parametrize("adapting", [False, True])
def test_lora_from_training_to_merge(tmp_path, adapting):
    model = build("llama")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batches = torch.utils.data.DataLoader(Tokens(), batch_size=16)
    names = page("PEFT", adapting, model=model, optimizer=optimizer, batches=batches)
    again = type(model).from_pretrained(tmp_path / "plain").eval()
    torch.testing.assert_close(again(**inputs("llama")).logits, names["merged"].eval()(**inputs("llama")).logits)
    assert (again.config.betahook_folded["steps"] == 4) if adapting else not hasattr(again.config, "betahook_folded")


# sentence-transformers


@pytest.fixture
def sentences(tokenizer, tmp_path):
    torch.manual_seed(0)
    config = BertConfig(vocab_size=64, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64)
    BertModel(config).save_pretrained(tmp_path / "bert")
    tokenizer.save_pretrained(tmp_path / "bert")
    modules = [Transformer(str(tmp_path / "bert")), Pooling(32)]
    return sentence_transformers.SentenceTransformer(modules=modules, device="cpu")


@pytest.mark.parametrize("adapting", [False, True])
def test_sentence_transformers(sentences, tmp_path, adapting):
    pairs = Dataset.from_list([{"anchor": f"w{n} w{n + 1}", "positive": f"w{n} w{n + 2} w4"} for n in range(16)])
    loss = MultipleNegativesRankingLoss(sentences)
    page("sentence-transformers", adapting, model=sentences, pairs=pairs, loss=loss)
    again = sentence_transformers.SentenceTransformer(str(tmp_path / "plain"), device="cpu")
    text = ["w1 w2 w3"]
    assert (again.encode(text) == sentences.encode(text)).all()
    config = again[0].auto_model.config
    assert (config.betahook_folded["steps"] == 2) if adapting else not hasattr(config, "betahook_folded")


@pytest.mark.parametrize("method", ["save", "save_pretrained"])
def test_beta_of_a_sentence_transformer_is_restored(sentences, tmp_path, method):
    text = ["w1 w2 w3"]
    with betahook.attach(sentences, controller="monitor", when="always") as hook:
        sentences.encode(text)
        sharpen(hook, 10.0)
        expected = sentences.encode(text)
        getattr(sentences, method)(path=str(tmp_path / "hooked"))
    again = sentence_transformers.SentenceTransformer(str(tmp_path / "hooked"), device="cpu")
    with pytest.raises(ValueError, match=r"betahook\.restore"):
        betahook.attach(again)
    with betahook.restore(again, tmp_path / "hooked") as hook:
        assert (again.encode(text) == expected).all()
        betahook.fold(hook)
    torch.testing.assert_close(again.encode(text), expected, rtol=1e-4, atol=1e-6)


# diffusers


def make_unet():
    torch.manual_seed(0)
    return diffusers.UNet2DConditionModel(
        sample_size=8,
        in_channels=4,
        out_channels=4,
        block_out_channels=(32, 64),
        layers_per_block=1,
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
        cross_attention_dim=24,
        attention_head_dim=8,
        norm_num_groups=8,
    )


def noisy(batch=3):
    generator = torch.Generator().manual_seed(0)
    shapes = (batch, 4, 8, 8), (batch, 7, 24), (batch, 4, 8, 8)
    sample, text, noise = (torch.randn(shape, generator=generator) for shape in shapes)
    return sample, torch.tensor([1, 20, 300]), text, noise


def test_diffusers(tmp_path):
    unet = make_unet()
    optimizer = torch.optim.SGD(unet.parameters(), lr=0.1)
    page("diffusers", unet=unet, optimizer=optimizer, batches=[noisy()] * 3)
    again = diffusers.UNet2DConditionModel.from_pretrained(tmp_path / "plain")
    sample, steps, text, _ = noisy()
    torch.testing.assert_close(again(sample, steps, text).sample, unet(sample, steps, text).sample)


@pytest.mark.parametrize("processor", ["AttnProcessor", "AttnProcessor2_0"])
def test_self_and_cross_attention_under_both_processors(processor):
    unet, (sample, steps, text, _) = make_unet().eval(), noisy()
    unet.set_attn_processor(getattr(diffusers.models.attention_processor, processor)())
    name = "down_blocks.0.attentions.0.transformer_blocks.0.attn2"
    seen, cross = {}, unet.get_submodule(name)
    for side in "qk":
        projection = cross.get_submodule(f"to_{side}")
        projection.register_forward_hook(lambda module, args, output, side=side: seen.update({side: output}))
    with betahook.attach(unet, controller="monitor", when="always") as hook:
        assert {layer.rpartition(".")[2] for layer in hook.layers} == {"attn1", "attn2"}
        assert hook.not_reached == {}
        unet(sample, steps, text)
        q, k = (seen[side].unflatten(-1, (cross.heads, -1)).transpose(1, 2).double() for side in "qk")
        scores = (q @ k.mT).transpose(0, 1).flatten(1)
        measured = hook.layers[name].head_statistics
        assert measured.count.tolist() == [scores.shape[1]] * cross.heads
        torch.testing.assert_close(measured.std.double(), scores.std(1, correction=0), rtol=1e-5, atol=1e-8)
        check_fold(unet, hook, lambda: unet(sample, steps, text).sample)


def test_beta_acts_again_after_a_validation_with_sliced_attention():
    unet, (sample, steps, text, _) = make_unet().eval(), noisy()
    with betahook.attach(unet, controller="monitor", when="always") as hook:
        unet(sample, steps, text)
        sharpen(hook)
        expected = unet(sample, steps, text).sample
        unet.set_attention_slice(1)
        unet(sample, steps, text)
        with pytest.raises(betahook.FoldError, match="times the model's own, no longer acts"):
            betahook.fold(unet)
        unet.set_default_attn_processor()
        unet(sample, steps, text)
        betahook.fold(unet)
    torch.testing.assert_close(unet(sample, steps, text).sample, expected, rtol=1e-4, atol=1e-4)


def test_diffusers_says_where_it_loads_a_model_that_beta_is_missing(tmp_path, caplog):
    unet, (sample, steps, text, _) = make_unet().eval(), noisy()
    with betahook.attach(unet, controller="monitor", when="always") as hook:
        unet(sample, steps, text)
        sharpen(hook)
        expected = unet(sample, steps, text).sample
        unet.save_pretrained(tmp_path)
    logging.getLogger("diffusers").propagate = True
    again = diffusers.UNet2DConditionModel.from_pretrained(tmp_path).eval()
    assert "'betahook': 'beta is in betahook.safetensors: load the model, then call betahook.restore" in caplog.text
    with pytest.raises(ValueError, match=r"betahook\.restore"):
        betahook.attach(again)
    betahook.restore(again, tmp_path)
    assert torch.equal(again(sample, steps, text).sample, expected)
    betahook.fold(again)
    again.save_pretrained(tmp_path / "plain")
    assert "betahook" not in (tmp_path / "plain" / "config.json").read_text()


def test_a_model_of_diffusers_that_resumes_with_the_saved_config_folds_to_a_plain_one(tmp_path):
    """As the training scripts of diffusers do it: weights and config of a checkpoint go into the hooked model."""
    unet, (sample, steps, text, _) = make_unet().eval(), noisy()
    with betahook.attach(unet, when="always") as hook:
        unet(sample, steps, text)
        sharpen(hook)
        unet.save_pretrained(tmp_path)
        state, expected = hook.state_dict(), unet(sample, steps, text).sample
    again = make_unet().eval()
    hook = betahook.attach(again, when="always")
    loaded = diffusers.UNet2DConditionModel.from_pretrained(tmp_path)
    again.register_to_config(**loaded.config)
    again.load_state_dict(loaded.state_dict())
    hook.load_state_dict(state)
    torch.testing.assert_close(again(sample, steps, text).sample, expected, rtol=0, atol=0)
    betahook.fold(again)
    again.save_pretrained(tmp_path / "plain")
    plain = diffusers.UNet2DConditionModel.from_pretrained(tmp_path / "plain")
    assert "betahook" not in plain.config
    torch.testing.assert_close(plain(sample, steps, text).sample, expected, rtol=1e-4, atol=1e-5)


def test_lora_of_diffusers_is_merged_before_a_fold():
    unet, (sample, steps, text, _) = make_unet().eval(), noisy()
    unet.add_adapter(peft.LoraConfig(target_modules=["to_q"], init_lora_weights=False))
    with betahook.attach(unet, controller="monitor", when="always") as hook:
        unet(sample, steps, text)
        sharpen(hook)
        expected = unet(sample, steps, text).sample
        with pytest.raises(betahook.FoldError, match=r"model\.fuse_lora\(\), model\.unload_lora\(\)"):
            betahook.fold(unet)
        unet.fuse_lora()
        unet.unload_lora()
        betahook.fold(unet)
    torch.testing.assert_close(unet(sample, steps, text).sample, expected, rtol=1e-4, atol=1e-5)


def test_fused_projections_of_diffusers_are_separated_before_a_fold(tmp_path):
    """It loads the separate ones."""
    unet, (sample, steps, text, _) = make_unet().eval(), noisy()
    with betahook.attach(unet, controller="monitor", when="always") as hook:
        unet(sample, steps, text)
        sharpen(hook)
        expected = unet(sample, steps, text).sample
        unet.fuse_qkv_projections()
        unet(sample, steps, text)
        with pytest.raises(betahook.FoldError, match=r"Call model\.unfuse_qkv_projections\(\), run a forward"):
            betahook.fold(unet)
        unet.unfuse_qkv_projections()
        unet(sample, steps, text)
        betahook.fold(unet)
    unet.save_pretrained(tmp_path)
    again = diffusers.UNet2DConditionModel.from_pretrained(tmp_path).eval()
    torch.testing.assert_close(again(sample, steps, text).sample, expected, rtol=1e-4, atol=1e-5)


def stable_diffusion_3(norm):
    model = diffusers.SD3Transformer2DModel(
        sample_size=8,
        patch_size=2,
        in_channels=4,
        num_layers=2,
        attention_head_dim=8,
        num_attention_heads=4,
        joint_attention_dim=32,
        caption_projection_dim=32,
        pooled_projection_dim=64,
        out_channels=4,
        qk_norm=norm,
    )
    given = dict(hidden_states=torch.randn(4, 4, 8, 8), encoder_hidden_states=torch.randn(4, 7, 32))
    return model, given | dict(pooled_projections=torch.randn(4, 64), timestep=torch.arange(4))


def flux():
    model = diffusers.FluxTransformer2DModel(
        patch_size=1,
        in_channels=4,
        num_layers=1,
        num_single_layers=1,
        attention_head_dim=8,
        num_attention_heads=4,
        joint_attention_dim=32,
        pooled_projection_dim=32,
        axes_dims_rope=[2, 2, 4],
    )
    given = dict(hidden_states=torch.randn(4, 16, 4), encoder_hidden_states=torch.randn(4, 7, 32))
    given |= dict(pooled_projections=torch.randn(4, 32), timestep=torch.rand(4))
    return model, given | dict(img_ids=torch.randn(16, 3), txt_ids=torch.zeros(7, 3))


@pytest.mark.parametrize("kind", ["stable diffusion 3", "stable diffusion 3.5", "flux"])
def test_joint_attention_is_measured_and_folded(kind):
    torch.manual_seed(0)
    model, given = flux() if kind == "flux" else stable_diffusion_3("rms_norm" if kind.endswith("5") else None)
    with betahook.attach(model.eval(), controller="monitor", when="always") as hook:
        model(**given)
        assert len(hook.layers) == 2
        assert [layer.statistics.count for layer in hook.layers.values()] == [4 * 4 * (16 + 7) ** 2] * 2
        check_fold(model, hook, lambda: model(**given).sample)


def hidream():
    model = diffusers.HiDreamImageTransformer2DModel(
        patch_size=2,
        in_channels=4,
        out_channels=4,
        num_layers=1,
        num_single_layers=1,
        attention_head_dim=8,
        num_attention_heads=4,
        caption_channels=[32, 16],
        text_emb_dim=64,
        num_routed_experts=4,
        num_activated_experts=2,
        axes_dims_rope=(4, 2, 2),
        max_resolution=(32, 32),
        llama_layers=(0, 1),
    )
    given = dict(
        hidden_states=torch.randn(2, 4, 8, 8), timesteps=torch.tensor([1, 5]), pooled_embeds=torch.randn(2, 64)
    )
    return model, given | dict(
        encoder_hidden_states_t5=torch.randn(2, 8, 32), encoder_hidden_states_llama3=torch.randn(2, 2, 8, 16)
    )


def prx():
    model = diffusers.PRXTransformer2DModel(
        in_channels=4, patch_size=2, context_in_dim=16, hidden_size=32, num_heads=2, depth=2, axes_dim=[8, 8]
    )
    given = dict(hidden_states=torch.randn(2, 4, 8, 8), encoder_hidden_states=torch.randn(2, 6, 16))
    return model, given | dict(timestep=torch.rand(2))


@pytest.mark.parametrize("make", [hidream, prx])
def test_attention_that_calls_its_weights_by_names_of_its_own_is_folded(make):
    torch.manual_seed(0)
    model, given = make()
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() > 1 and not weight.any():  # as the last projection, before training
                weight.normal_(std=0.1)
    with betahook.attach(model.eval(), controller="monitor", when="always") as hook:
        model(**given)
        assert len(hook.layers) == 2
        check_fold(model, hook, lambda: model(**given).sample)


# timm


def test_timm():
    images = torch.randn(4, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)
    names = page("timm", batches=[(images, torch.arange(4))] * 2, optimizer=optimizer)
    assert len(names["hook"].layers) == 12
    assert names["hook"].metrics()["score_std/blocks.0.attn"] > 0
    names["hook"].detach()


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("vit_tiny_patch16_224", dict(patch_size=8, depth=2)),
        ("swin_tiny_patch4_window7_224", dict(window_size=4, depths=(2,), num_heads=(2,), embed_dim=16)),
        ("eva02_tiny_patch14_224", dict(patch_size=8, depth=2)),
    ],
)
def test_attention_of_timm_is_measured_and_folded(name, options, fused):
    before = timm.layers.use_fused_attn()
    timm.layers.set_fused_attn(fused)
    try:
        torch.manual_seed(0)
        model = timm.create_model(name, img_size=32, num_classes=3, **options).eval()
    finally:
        timm.layers.set_fused_attn(bool(before))
    for parameter in model.blocks.parameters() if hasattr(model, "blocks") else model.layers.parameters():
        parameter.data *= 4  # which are so small at first that attention is flat
    images = torch.randn(3, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    with betahook.attach(model, controller="monitor", when="always") as hook:
        model(images)
        assert all(layer.statistics.std > 0 for layer in hook.layers.values())
        sharpen(hook, 5.0)
        check_fold(model, hook, lambda: model.forward_features(images))


@pytest.mark.parametrize(("name", "size"), [("tiny_vit_5m_224", 64), ("maxvit_nano_rw_256", 256)])
def test_fused_rows_that_go_head_by_head_are_found(name, size):
    torch.manual_seed(0)
    model, images = timm.create_model(name, num_classes=3).eval(), torch.randn(1, 3, size, size)
    with betahook.attach(
        model, controller="monitor", when="always", layers=lambda name, module: hasattr(module, "qkv")
    ) as hook:
        layer = next(iter(hook.layers.values()))
        query, key = layer.projections
        by_head = layer.module.qkv.weight.detach().unflatten(0, (layer.heads, -1))
        assert torch.equal(query.entries, by_head[:, : layer.head_dim])
        assert torch.equal(key.entries, by_head[:, layer.head_dim : 2 * layer.head_dim])
        model(images)
        check_fold(model, hook, lambda: model.forward_features(images))


def test_a_projection_that_its_wrapper_norms_is_not_taken_for_what_acts():
    model = timm.create_model("levit_128s", num_classes=3)
    with betahook.attach(model) as hook:
        assert all(layer.projections is None for layer in hook.layers.values())
