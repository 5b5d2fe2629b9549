"""Folding: the plain model afterwards gives the outputs of the hooked one before."""

import json
from contextlib import nullcontext

import pytest
import torch
from torch import nn
from transformers import DebertaV2Config, DebertaV2Model

import betahook
from support.attention import HEADS, LENGTH, PADDING, WIDTH, ByHandAttention, FusedAttention, padded_encoder
from support.models import CONFIGS, NORMED, build, inputs
from support.training import float32_precision, move, train

FOLDABLE = [family for family in (*CONFIGS, *NORMED) if family != "stablelm"]


ONE_NORM_FOR_ALL_HEADS = {"qwen3", "gemma3", "persimmon"}


@pytest.mark.oldest_skips("T5 writes its attention by hand", family="t5")
@pytest.mark.parametrize(
    ("family", "per_head"),
    [(f, False) for f in FOLDABLE] + [(f, True) for f in FOLDABLE if f not in ONE_NORM_FOR_ALL_HEADS],
)
def test_the_plain_model_keeps_the_outputs(family, per_head):
    model, batch = build(family).eval(), inputs(family)
    hook = betahook.attach(model, controller="monitor")
    before = model(**batch).logits
    move(hook, per_head)
    adapted = model(**batch).logits
    assert (adapted - before).abs().max() > 1e-3
    betahook.fold(model)
    assert not hook.attached
    torch.testing.assert_close(model(**batch).logits, adapted, rtol=1e-5, atol=1e-5)


def test_a_layer_of_which_one_head_moved_folds_too():
    model, batch = build("llama").eval(), inputs("llama")
    hook = betahook.attach(model, controller="monitor", when="always")
    before = model(**batch).logits
    layer = hook.layers["model.layers.0.self_attn"]
    layer.head_beta = layer.head_beta * torch.tensor([4.0] + [1.0] * (layer.heads - 1))
    adapted = model(**batch).logits
    assert (adapted - before).abs().max() > 1e-3
    betahook.fold(model)
    torch.testing.assert_close(model(**batch).logits, adapted, rtol=1e-5, atol=1e-5)


def test_the_folded_model_saves_and_loads_like_any_other(tmp_path):
    model, batch = build("gpt2").eval(), inputs("gpt2")
    with betahook.attach(model, controller="monitor") as hook:
        model(**batch)
        move(hook, per_head=True)
        adapted = model(**batch).logits
        betahook.fold(hook)
    model.save_pretrained(tmp_path)
    plain = type(model).from_pretrained(tmp_path, attn_implementation="eager").eval()
    torch.testing.assert_close(plain(**batch).logits, adapted, rtol=1e-5, atol=1e-5)


class SelfAttention(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)

    def forward(self, x):
        return self.attention(x, x, x)[0]


OUTSIDE = {
    "by hand": lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), ByHandAttention()),
    "asked of torch": lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), FusedAttention()),
    "nn.MultiheadAttention": SelfAttention,
    "nn.TransformerEncoder": lambda: nn.TransformerEncoder(
        nn.TransformerEncoderLayer(WIDTH, HEADS, 2 * WIDTH, dropout=0.0, batch_first=True), 2
    ),
}


@pytest.mark.parametrize("per_head", [False, True])
@pytest.mark.parametrize("name", OUTSIDE)
@torch.no_grad()
def test_attention_outside_the_interface_of_transformers_folds(name, per_head):
    torch.manual_seed(0)
    model, x = OUTSIDE[name](), torch.randn(3, LENGTH, WIDTH)
    for parameter in model.parameters():
        if parameter.dim() == 1:
            parameter.normal_()  # biases too
    with betahook.attach(model, controller="monitor") as hook:
        before = model(x)
        move(hook, per_head)
        adapted = model(x)
        assert (adapted - before).abs().max() > 1e-3
        betahook.fold(model)
        assert not hook.attached
    torch.testing.assert_close(model(x), adapted, rtol=1e-5, atol=1e-5)


@torch.no_grad()
def test_a_block_that_calls_the_forward_of_its_attention_folds():
    """As in llama2.c: `self.attention.forward(x)` runs no hook of the module."""

    class Caller(nn.Module):
        def __init__(self):
            super().__init__()
            self.attention = ByHandAttention()

        def forward(self, x):
            return x + self.attention.forward(x)

    torch.manual_seed(0)
    model, x = Caller(), torch.randn(3, LENGTH, WIDTH)
    with betahook.attach(model, controller="monitor", when="always") as hook:
        model(x)
        hook.layers["attention"].beta *= 2
        adapted = model(x)
        betahook.fold(model)
    torch.testing.assert_close(model(x), adapted, rtol=1e-5, atol=1e-5)


def test_an_encoder_folds_after_a_padded_batch():
    """The check runs in evaluation mode, in which torch would pack that batch."""
    model, x = padded_encoder(), torch.randn(3, LENGTH, WIDTH)
    with betahook.attach(model, controller="monitor") as hook:
        before = model(x, src_key_padding_mask=PADDING)
        move(hook, per_head=True)
        adapted = model(x, src_key_padding_mask=PADDING)
        assert (adapted - before).abs().max() > 1e-3
        betahook.fold(model)
        assert not hook.attached
    torch.testing.assert_close(model(x, src_key_padding_mask=PADDING), adapted, rtol=1e-5, atol=1e-5)


def test_a_model_with_a_hook_for_each_of_its_parts_is_not_folded_by_half():
    model, batch = build("t5").eval(), inputs("t5")
    hooks = [betahook.attach(part, controller="monitor") for part in (model.encoder, model.decoder)]
    model(**batch)
    with pytest.raises(ValueError, match=r"has 2 hooks, of parts of it: fold each, betahook.fold\(hook\)"):
        betahook.fold(model)
    for hook in hooks:
        assert hook.attached
        betahook.fold(hook)
    assert not any(hook.attached for hook in hooks)


@pytest.mark.parametrize(
    ("controller", "ways"),
    [
        (betahook.Search(), ["or use Search.brief(), or choose another beta"]),
        (betahook.Search.brief(), ["or choose another beta"]),
        (betahook.Search(rise=False), []),
    ],
)
def test_a_fold_before_the_search_says_so(controller, ways, caplog):
    model, batch = build("llama"), inputs("llama")
    with betahook.attach(model, controller=controller) as hook:
        for _ in range(2):
            model(**batch).loss.backward()
            hook.step()
        betahook.fold(model)
    messages = [record.message for record in caplog.records]
    assert all(message.startswith("fold() at step 2, while Search(") for message in messages)
    ends = [message.rpartition(". Train a few hundred steps longer, ")[2] for message in messages]
    assert ends == [f'{way} with unfinished="own" or "better"' for way in ways]


def test_layers_that_were_removed_are_folded_as_the_message_says():
    """Not with a new hook, under which those that stay have lost their beta, nor by `restore`."""
    model, batch = build("llama"), inputs("llama")
    hook = betahook.attach(model, betahook.Gradient(0.1))
    train(model, hook, 2)
    del model.model.layers[1]
    train(model, hook, 1)
    expected = model(**batch).logits
    with pytest.raises(betahook.FoldError, match=r"the module is no longer part of the model") as caught:
        betahook.fold(model)
    assert "keep the hook" not in str(caught.value)
    exec(str(caught.value).rpartition("fold again: ")[2], {"hook": hook})
    betahook.fold(model)
    torch.testing.assert_close(model(**batch).logits, expected, rtol=1e-4, atol=1e-5)


def test_a_fold_that_fails_says_nothing_of_the_beta_that_it_would_have_folded(caplog):
    model, batch = build("llama"), inputs("llama")
    with betahook.attach(model) as hook:
        train(model, hook, 1)
        one, other = (block.self_attn for block in model.model.layers)
        one.q_proj.weight = other.q_proj.weight
        model(**batch)
        with pytest.raises(betahook.FoldError, match="cannot fold"):
            betahook.fold(model)
    assert not caplog.records


def opening(worse):
    """A fresh model in its opening; the loss on the last batch is lower with beta in force, or not."""
    model, batch = build("llama"), inputs("llama")
    hook = betahook.attach(model)
    for _ in range(2):
        model(**batch).loss.backward()
        hook.step()
    model.eval()
    factors = (1.0, 0.01, 100.0)
    losses = {}
    for factor in factors:
        for layer in hook.layers.values():
            layer.beta = factor * layer.beta_default
        losses[factor] = model(**batch).loss.item()
    chosen = (max if worse else min)(factors[1:], key=losses.get)
    assert (losses[chosen] > losses[1.0]) is worse
    for layer in hook.layers.values():
        layer.beta = chosen * layer.beta_default
    assert hook.moving
    return model, batch, losses[1.0], losses[chosen]


@pytest.mark.parametrize("worse", [True, False])
@pytest.mark.parametrize("unfinished", ["keep", "own", "better"])
def test_an_unfinished_beta_is_folded_by_choice(unfinished, worse, caplog):
    model, batch, own, in_force = opening(worse)
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    betahook.fold(model, unfinished=unfinished)
    takes_own = unfinished == "own" or (unfinished == "better" and worse)
    assert model(**batch).loss.item() == pytest.approx(own if takes_own else in_force, rel=1e-5)
    assert all(torch.equal(value, weights[name]) for name, value in model.state_dict().items()) is takes_own
    assert ("folding the model's own beta" in caplog.text) is takes_own
    assert ("folding the beta in force" in caplog.text) is not takes_own
    assert ("loss of the last batch:" in caplog.text) is (unfinished == "better")


def test_the_beta_in_force_is_folded_where_both_do_as_well(monkeypatch, caplog):
    model, batch, _, in_force = opening(worse=True)
    monkeypatch.setattr("betahook.keep.transition._losses", lambda hook: (1.5, 1.5))
    betahook.fold(model, unfinished="better")
    assert model(**batch).loss.item() == pytest.approx(in_force, rel=1e-5)
    assert "folding the beta in force (loss of the last batch: 1.5; 1.5 with the model's own)" in caplog.text


def test_losses_that_differ_little_are_told_apart(monkeypatch, caplog):
    model, *_ = opening(worse=True)
    monkeypatch.setattr("betahook.keep.transition._losses", lambda hook: (4.022345, 4.022341))
    betahook.fold(model, unfinished="better")
    assert "(loss of the last batch: 4.022341; 4.022345 with the beta in force)" in caplog.text


def test_without_a_loss_to_judge_by_the_beta_in_force_is_folded(caplog):
    model, batch, _, _ = opening(worse=True)
    del batch["labels"]
    expected = model(**batch).logits
    betahook.fold(model, unfinished="better")
    torch.testing.assert_close(model(**batch).logits, expected, rtol=1e-4, atol=1e-5)
    assert "folding the beta in force. Train" in caplog.text


def test_a_beta_with_which_the_loss_is_nan_is_the_worse_one(caplog):
    model, batch, _, _ = opening(worse=True)
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    layer = next(iter(betahook.hook.hooks_of(model))).layers["model.layers.0.self_attn"]
    layer.beta = 1e10
    layer.module.q_proj.register_forward_hook(lambda module, args, query: query * 1e30)
    assert model(**batch).loss.isnan()
    betahook.fold(model, unfinished="better")
    assert all(torch.equal(value, weights[name]) for name, value in model.state_dict().items())
    assert "folding the model's own beta, which leaves the weights as they are (loss of the last" in caplog.text
    assert "; nan with the beta in force)" in caplog.text


@pytest.mark.parametrize("factor", [1.0, 2.0])
def test_a_model_that_does_not_run_again_to_compare_two_betas(factor, caplog):
    """It has no fold, unless there is nothing to fold."""

    class Fragile(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = build("llama")

        def forward(self, **batch):
            if not self.training:
                raise RuntimeError("not in evaluation mode")
            return self.inner(**batch)

    model = Fragile().train()
    hook = betahook.attach(model)
    model(**inputs("llama")).loss.backward()
    hook.step()
    for layer in hook.layers.values():
        layer.beta = factor * layer.beta_default
    assert hook.moving
    message = r"does not run again on the input .*not in evaluation mode"
    with pytest.raises(betahook.FoldError, match=message) if factor != 1 else nullcontext():
        betahook.fold(model, unfinished="better")
    assert hook.attached is (factor != 1)
    assert ("folding the beta in force. Train" in caplog.text) is (factor == 1)
    hook.detach()


def test_the_warning_names_the_controllers_that_are_on_their_way(caplog):
    model = build("llama")
    with betahook.attach(model, controller=[betahook.Search(rise=False), betahook.Decades()]) as hook:
        model(**inputs("llama")).loss.backward()
        hook.step()
        betahook.fold(hook)
    assert "fold() at step 1, while Decades() was still moving beta" in caplog.text
    assert "Search" not in caplog.text


def test_a_choice_that_is_none():
    with betahook.attach(build("llama")) as hook:
        with pytest.raises(ValueError, match=r'unfinished must be "keep", "own" or "better"; got .best'):
            betahook.fold(hook, unfinished="best")
        assert hook.attached


def test_only_models_and_hooks_are_folded():
    with pytest.raises(TypeError, match=r"fold\(\) takes a hooked model or its hook; got str"):
        betahook.fold("model")


def test_without_a_hook_there_is_nothing_to_fold():
    model = build("llama")
    with pytest.raises(ValueError, match=r"LlamaForCausalLM is not hooked: call betahook.attach\(model\) first"):
        betahook.fold(model)
    hook = betahook.attach(model)
    hook.detach()
    with pytest.raises(ValueError, match="detached hook"):
        betahook.fold(hook)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_folds_up_to_rounding(dtype):
    model, batch = build("llama", dtype=dtype).eval(), inputs("llama")
    with betahook.attach(model, controller="monitor") as hook:
        model(**batch)
        move(hook, per_head=True)
        adapted = model(**batch).logits
        betahook.fold(model)
    torch.testing.assert_close(model(**batch).logits, adapted, rtol=5e-2, atol=5e-2)


def test_a_fold_is_checked_in_full_precision_whatever_the_model_trains_in():
    """A check in TF32, or in bfloat16 on a CPU that multiplies in it, would see nothing but rounding."""
    model, batch = build("llama", hidden_size=256, num_attention_heads=4, head_dim=64), inputs("llama")
    with float32_precision("medium"):
        with betahook.attach(model, controller="monitor") as hook:
            model(**batch)
            move(hook, per_head=True)
            adapted, precisions = model(**batch).logits, set()
            model.model.register_forward_hook(lambda *_: precisions.add(torch.get_float32_matmul_precision()))
            betahook.fold(model)
        assert precisions == {"highest"}
        assert torch.get_float32_matmul_precision() == "medium"
        torch.testing.assert_close(model(**batch).logits, adapted, rtol=0, atol=0.1)


def test_bfloat16_does_not_see_the_bias_that_nearly_flat_attention_loses():
    """As docs/LIMITATIONS.md says: DeBERTa's p2c bias has a query projection of its own, which fold does not scale."""
    sizes = dict(hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, vocab_size=64)
    biases = dict(relative_attention=True, pos_att_type=["p2c", "c2p"], max_relative_positions=16)
    config = DebertaV2Config(**sizes, **biases, initializer_range=0.05)
    ids = torch.randint(64, (2, 24), generator=torch.Generator().manual_seed(0))
    for dtype in (torch.bfloat16, torch.float32):
        torch.manual_seed(0)
        model = DebertaV2Model(config).to(dtype).eval()
        with betahook.attach(model, controller="monitor", when="always") as hook:
            model(ids)
            for layer in hook.layers.values():
                layer.beta = 2 * layer.beta_default
            adapted = model(ids).last_hidden_state
            assert max(float(layer.beta * layer.statistics.std) for layer in hook.layers.values()) < 0.2
            if dtype is torch.bfloat16:
                betahook.fold(model)
                assert not torch.equal(model(ids).last_hidden_state, adapted)  # no rounding: a factor of 2 is exact
            else:
                with pytest.raises(betahook.FoldError, match="its output is not that of a scaled query projection"):
                    betahook.fold(model)


@pytest.mark.oldest_skips("torch cannot trace the models at all")
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # of torch's own tracing
@pytest.mark.parametrize("in_place", [pytest.param(True, marks=pytest.mark.slow), False])
def test_a_compiled_model_folds(in_place):
    model, batch = build("llama", "sdpa").eval(), inputs("llama")
    with betahook.attach(model, controller="monitor") as hook:
        if in_place:
            model.compile(backend="eager", fullgraph=True)
        compiled = model if in_place else torch.compile(model, backend="eager", fullgraph=True)
        compiled(**batch)
        move(hook, per_head=False)
        adapted = compiled(**batch).logits
        betahook.fold(model)
    torch.testing.assert_close(model.forward(**batch).logits, adapted, rtol=1e-5, atol=1e-5)


def folded(factor):
    model = build("llama")
    with betahook.attach(model, controller=betahook.Cap(1e3)) as hook:
        model(**inputs("llama")).loss.backward()
        hook.step()
        for index, layer in enumerate(hook.layers.values()):
            layer.beta = factor ** (index + 1) * layer.beta_default
        betahook.fold(hook)
    return model


def test_the_config_and_the_card_say_what_was_folded(tmp_path):
    model = folded(2.0)
    model.save_pretrained(tmp_path)
    note = json.loads((tmp_path / "config.json").read_text())["betahook_folded"]
    assert note == {
        "version": betahook.__version__,
        "controllers": ["Cap(threshold=1000.0)"],
        "steps": 1,
        "beta_over_own": [2.0, 4.0],
    }
    assert model.model_tags == ["betahook"]
    again = type(model).from_pretrained(tmp_path)
    assert again.config.betahook_folded == note
    betahook.attach(again).detach()  # it is a model like any other
    del again.config.betahook_folded
    again.save_pretrained(tmp_path / "removed")
    assert "betahook" not in (tmp_path / "removed/config.json").read_text()


def test_nothing_is_noted_where_nothing_was_folded(tmp_path):
    model = folded(1.0)
    model.save_pretrained(tmp_path)
    assert "betahook" not in (tmp_path / "config.json").read_text()
    assert not model.model_tags


def test_a_plain_module_takes_no_note():
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), ByHandAttention())
    with betahook.attach(model, controller="monitor") as hook:
        model(torch.randn(3, 12, WIDTH))
        for layer in hook.layers.values():
            layer.beta = 2 * layer.beta_default
        betahook.fold(hook)
    assert not hasattr(model, "config")
