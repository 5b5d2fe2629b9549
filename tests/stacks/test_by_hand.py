"""Attention that others wrote by hand, against what torch's own operations show of it (`zoo.truth`)."""

import importlib

import pytest
import torch

from zoo.build import strengthen
from zoo.verify import verify_model

SIZES = dict(image_size=32, patch_size=8, num_classes=5, dim=32, depth=2, heads=4, mlp_dim=48)
PICTURE = dict(image_size=32, num_classes=5)
OTHERS = {
    "deepvit": ("DeepViT", SIZES),
    "cct": ("CCT", dict(img_size=32, embedding_dim=32, n_conv_layers=1, num_layers=2, num_heads=4, num_classes=5)),
    "max_vit": ("MaxViT", dict(num_classes=5, dim=16, dim_head=8, depth=(1, 1), window_size=2)),
    "nest": ("NesT", dict(PICTURE, patch_size=4, dim=32, heads=2, num_hierarchies=2, block_repeats=(1, 1))),
    "pit": ("PiT", dict(PICTURE, patch_size=8, dim=32, depth=(1, 1), heads=2, mlp_dim=32)),
    "t2t": ("T2TViT", dict(PICTURE, dim=32, depth=2, heads=4, mlp_dim=48, t2t_layers=((7, 4), (3, 2)))),
}
FOLDED = {name: ("SimpleViT", SIZES) for name in ("simple_vit", "simple_vit_with_register_tokens")}
FOLDED |= {name: ("SimpleViT", SIZES) for name in ("simple_vit_with_value_residual", "simple_vit_with_patch_dropout")}
FOLDED |= {name: ("ViT", SIZES) for name in ("vit", "vit_for_small_dataset", "learnable_memory_vit")}
FOLDED |= OTHERS


def check(name, kind, sizes):
    torch.manual_seed(0)
    model = getattr(importlib.import_module(f"vit_pytorch.{name}"), kind)(**sizes)
    strengthen(model)
    model.eval()
    picture = torch.randn(2, 3, 32, 32)
    verdict = verify_model(model, lambda: model(picture))
    assert verdict.refusal is None
    assert verdict.problems == ()
    assert verdict.beside == ()
    return verdict


@pytest.mark.parametrize("name", FOLDED)
def test_a_vision_transformer_is_measured_located_folded_and_clipped(name):
    verdict = check(name, *FOLDED[name])
    assert verdict.layers == verdict.exact == verdict.located
    assert verdict.layers > 0
    assert (verdict.folds, verdict.clips) == ("exact", "yes")


@pytest.mark.parametrize("name", ["simple_vit_with_qk_norm", "normalized_vit"])
def test_norms_without_a_weight_of_every_component_are_not_folded(name):
    verdict = check(name, "nViT" if name == "normalized_vit" else "SimpleViT", SIZES)
    assert verdict.layers == verdict.exact == verdict.located == 2
    assert "cannot fold beta into" in verdict.folds


def test_heads_that_are_mixed_before_the_softmax_are_left_alone():
    sizes = dict(SIZES, cls_depth=1)
    del sizes["num_classes"]
    model = importlib.import_module("vit_pytorch.cait").CaiT(num_classes=5, **sizes).eval()
    picture = torch.randn(2, 3, 32, 32)
    verdict = verify_model(model, lambda: model(picture))
    assert verdict.layers == 0
    assert all("is not measured" in problem or "half the beta" in problem for problem in verdict.problems)
