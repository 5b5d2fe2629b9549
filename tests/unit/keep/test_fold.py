"""Folding: the plain model afterwards gives the outputs of the hooked one before."""

import copy

import pytest
import torch
import transformers
from torch import nn
from torch.nn.utils.parametrizations import weight_norm

import betahook
from support.attention import HEADS, LENGTH, PADDING, WIDTH, Block, ByHandAttention, FusedAttention, padded_encoder
from support.models import CONFIGS, NORMED, build, inputs
from support.training import move

FOLDABLE = [family for family in (*CONFIGS, *NORMED) if family != "stablelm"]
ONE_NORM_FOR_ALL_HEADS = {"qwen3", "gemma3", "persimmon"}


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


def squash(model):
    """A step that is not linear, under a name that nobody knows; at small queries it is nearly linear."""

    class Squashed(nn.Linear):
        def forward(self, x):
            return 10 * (super().forward(x) / 10).tanh()

    model.model.layers[1].self_attn.q_proj.__class__ = Squashed


def silence(model):
    model.set_attn_implementation("sdpa")  # which returns no attention weights
    nn.init.zeros_(model.model.layers[0].self_attn.o_proj.weight)


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


def partition(model):
    """What DeepSpeed's ZeRO-3 leaves on its parameters."""
    model.lm_head.weight.ds_id = 0


@pytest.mark.parametrize(
    ("family", "change", "per_head", "message"),
    [
        ("qwen3", None, True, r"model.layers.0.self_attn \(Qwen3Attention\): its query norm is shared by all heads"),
        ("stablelm", None, False, "its output is not that of a scaled query projection or norm"),
        ("llama", adapter, False, "q_proj is wrapped by an adapter.*merge that first.*Or keep the hook: save"),
        ("llama", share, False, "another module shares its query weight, which cannot hold two factors"),
        ("llama", poison, False, "would be NaN or infinite"),
        ("llama", squash, False, r"model.layers.1.self_attn \(LlamaAttention\): its output is not that of a scaled"),
        ("llama", silence, False, "does not depend on beta"),
        ("llama", hide, False, "its query projection has no known form"),
        ("llama", quantise, False, "its query weight is of torch.int8; dequantise it first"),
        ("llama", parametrise, False, "its query weight is made of others in every forward; fold the whole, plain"),
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


def test_a_model_that_does_not_run_twice_on_one_input_is_not_folded():
    class Taking(nn.Module):
        def __init__(self):
            super().__init__()
            self.model = build("llama").eval()

        def forward(self, batch):
            return self.model(batch.pop("input_ids"))

    model, batch = Taking(), inputs("llama")
    with betahook.attach(model, controller="monitor") as hook:
        model({"input_ids": batch["input_ids"]})
        move(hook, per_head=False)
        message = r"Taking does not run again on the input of its last forward \(KeyError: 'input_ids'\)"
        with pytest.raises(betahook.FoldError, match=message):
            betahook.fold(model)
        assert hook.attached


def test_one_token_does_not_tell_where_beta_belongs():
    model, batch = build("llama").eval(), inputs("llama")
    with betahook.attach(model, controller="monitor") as hook:
        model(**batch)
        move(hook, per_head=False)
        model(input_ids=batch["input_ids"][:, :1])
        with pytest.raises(betahook.FoldError, match="the input of the last forward does not depend on beta; run one"):
            betahook.fold(model)


@pytest.mark.parametrize("rise", [True, False])
def test_a_fold_before_the_search_says_so(rise, caplog):
    model, batch = build("llama"), inputs("llama")
    with betahook.attach(model, controller=betahook.Search(rise=rise)) as hook:
        for _ in range(2):
            model(**batch).loss.backward()
            hook.step()
        betahook.fold(model)
    messages = [record.message for record in caplog.records]
    assert ["fold() after 2 steps, in the warm-up or the rise of" in message for message in messages] == [True] * rise


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
        with pytest.raises(betahook.FoldError, match="would be NaN or infinite"):
            betahook.fold(model)
        assert all(torch.equal(value, weights[name]) for name, value in model.state_dict().items())


def test_beta_set_before_any_forward_cannot_be_folded_yet():
    with betahook.attach(build("llama")) as hook:
        hook.layers["model.layers.0.self_attn"].beta = 0.5
        with pytest.raises(betahook.FoldError, match="unknown before the first forward; run one"):
            betahook.fold(hook)


def test_a_layer_that_was_not_used_cannot_be_checked():
    model, batch = build("t5").eval(), inputs("t5")
    with betahook.attach(model, controller="monitor") as hook:
        model(**batch)
        move(hook, per_head=False)
        encoded = model.encoder(batch["input_ids"])
        model(encoder_outputs=encoded, labels=batch["labels"])
        with pytest.raises(betahook.FoldError, match=r"encoder.block.0.*the last forward of the model did not use it"):
            betahook.fold(model)
        model(**batch)
        betahook.fold(model)


def test_a_restored_model_runs_once_before_it_is_folded(tmp_path):
    model, batch = build("llama").eval(), inputs("llama")
    with betahook.attach(model, controller="monitor") as hook:
        model(**batch)
        move(hook, per_head=False)
        model.save_pretrained(tmp_path)
    hook = betahook.restore(type(model).from_pretrained(tmp_path, attn_implementation="eager"), tmp_path)
    with pytest.raises(betahook.FoldError, match="the input of the model's last forward, and there was none; run one"):
        betahook.fold(hook)
    hook.model(**batch)
    betahook.fold(hook)


@pytest.mark.parametrize("works", [True, False])
def test_the_check_leaves_no_trace(works):
    """In training, with dropout and caches: modes, statistics, random state and config are as before."""
    model, batch = build("llama", attention_dropout=0.5).train(), inputs("llama")
    for module in model.modules():
        if hasattr(module, "attention_dropout"):
            module.attention_dropout = 0.5
    model.lm_head.eval()
    if not works:
        squash(model)
    with betahook.attach(model, controller="monitor", when="always") as hook:
        model(**batch, use_cache=True).loss.backward()
        move(hook, per_head=True)
        before = [str(hook.state_dict()), torch.get_rng_state(), [m.training for m in model.modules()]]
        try:
            betahook.fold(model)
        except betahook.FoldError:
            assert not works
            assert hook.attached
            assert str(hook.state_dict()) == before[0]
        assert torch.equal(torch.get_rng_state(), before[1])
        assert [m.training for m in model.modules()] == before[2]
        assert model.config.use_cache
        assert not any(module._forward_hooks for module in model.modules())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_folds_up_to_rounding(dtype):
    model, batch = build("llama", dtype=dtype).eval(), inputs("llama")
    with betahook.attach(model, controller="monitor") as hook:
        model(**batch)
        move(hook, per_head=True)
        adapted = model(**batch).logits
        betahook.fold(model)
    torch.testing.assert_close(model(**batch).logits, adapted, rtol=5e-2, atol=5e-2)


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # of torch's own tracing
@pytest.mark.parametrize("in_place", [True, False])
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


def test_a_layer_that_does_not_run_twice_keeps_its_beta():
    class TiringAttention(ByHandAttention):
        calls = 0

        def forward(self, x):
            self.calls += 1
            if self.calls == 4:
                raise RuntimeError("no more")
            return super().forward(x)

    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), TiringAttention())
    with betahook.attach(model, controller="monitor") as hook:
        model(torch.randn(3, LENGTH, WIDTH))
        move(hook, per_head=True)
        before = hook.layers["1"].head_beta
        with pytest.raises(betahook.FoldError, match=r"does not run twice on one input \(no more\)"):
            betahook.fold(model)
        assert torch.equal(hook.layers["1"].head_beta, before)


def test_bounds_that_only_the_folded_query_meets_are_noticed():
    class ClampedAttention(ByHandAttention):
        def mix(self, q, k, v):
            return super().mix(q.clamp(-self.bound, self.bound), k, v)

    model, x = nn.Sequential(nn.Linear(WIDTH, WIDTH), ClampedAttention()), torch.randn(3, LENGTH, WIDTH)
    with torch.no_grad():
        model[1].bound = 1.01 * float(model[1].q_proj(model[0](x)).abs().max())
    with betahook.attach(model, controller="monitor") as hook:
        model(x)
        hook.layers["1"].beta = 2 * hook.layers["1"].beta_default
        with pytest.raises(betahook.FoldError, match="not that of a scaled query projection or norm"):
            betahook.fold(model)


SIZES = {"num_attention_heads": 8, "num_hidden_layers": 1, "hidden_size": 64, "vocab_size": 64}
APART = {
    "codegen": (transformers.CodeGenForCausalLM, transformers.CodeGenConfig(**SIZES, rotary_dim=4, n_positions=64)),
    "falcon": (
        transformers.FalconForCausalLM,
        transformers.FalconConfig(**SIZES, new_decoder_architecture=True, num_kv_heads=2),
    ),
}
"""Fused projections in which the rows of q lie in several runs, each of several heads."""


@pytest.mark.parametrize("per_head", [False, True])
@pytest.mark.parametrize("family", APART)
def test_the_rows_of_q_may_lie_apart(family, per_head):
    torch.manual_seed(0)
    kind, config = APART[family]
    model, ids = kind(config).eval(), torch.arange(3, 15)[None]
    for parameter in model.parameters():
        parameter.data *= 3
    with betahook.attach(model, controller="monitor") as hook:
        before = model(ids).logits
        move(hook, per_head)
        adapted = model(ids).logits
        assert (adapted - before).abs().max() > 1e-3
        betahook.fold(model)
    torch.testing.assert_close(model(ids).logits, adapted, rtol=1e-5, atol=1e-5)


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


def test_a_module_that_the_model_has_lost_is_named():
    model, batch = build("llama"), inputs("llama")
    with betahook.attach(model, controller="monitor") as hook:
        model(**batch)
        for layer in hook.layers.values():
            layer.beta = 0.7
        del model.model.layers[1]
        model.config.num_hidden_layers = 1
        with pytest.raises(betahook.FoldError, match=r"layers.1.self_attn.*: the model has lost this module since att"):
            betahook.fold(model)


def test_a_model_whose_logits_have_exploded_folds():
    """The rounding of a weight moves a logit of ten thousand by a thousandth, and the output with it."""
    for seed in range(6):
        model = build("llama", num_hidden_layers=1)
        torch.manual_seed(seed)
        tokens = torch.randint(3, 64, (4, 64))
        attention = model.model.layers[0].self_attn
        for projection in (attention.q_proj, attention.k_proj):
            nn.init.normal_(projection.weight, std=10)
        with betahook.attach(model, controller="monitor") as hook:
            model(tokens)
            (layer,) = hook.layers.values()
            assert layer.statistics.max_logit > 1e4
            layer.beta = 1.37 * layer.beta_default
            betahook.fold(model)


class LeakingAttention(Block):
    """The query, `leak` times, goes past the scores into the output."""

    def __init__(self, leak):
        super().__init__()
        self.leak = leak

    def mix(self, q, k, v):
        return nn.functional.scaled_dot_product_attention(q, k, v) + self.leak * q


@pytest.mark.parametrize(("dtype", "leak"), [(torch.float32, 1e-4), (torch.bfloat16, 0.03), (torch.float16, 0.003)])
def test_the_check_tells_a_small_error_from_rounding(dtype, leak):
    for seed in range(5):
        torch.manual_seed(seed)
        x = torch.randn(2, LENGTH, WIDTH, dtype=dtype)
        for refused in (True, False):
            model = nn.Sequential(LeakingAttention(leak if refused else 0.0))
            for projection in (model[0].q_proj, model[0].k_proj):
                projection.weight.data *= 4
            model = model.to(dtype)
            with betahook.attach(model, controller="monitor") as hook:
                model(x)
                hook.layers["0"].beta = 1.5 * hook.layers["0"].beta_default
                if refused:
                    with pytest.raises(betahook.FoldError, match="its output is not that of a scaled query projection"):
                        betahook.fold(model)
                else:
                    betahook.fold(model)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("gain", [0.01, 1 / 3, 3.0])
def test_nearly_flat_attention_folds(dtype, gain):
    """It moves the output by less than the dtype can tell."""
    for seed in range(5):
        torch.manual_seed(seed)
        model = build("llama", "sdpa", dtype=dtype)
        with betahook.attach(model, controller="monitor") as hook:
            model(torch.randint(3, 64, (1, 8)))
            for layer in hook.layers.values():
                layer.beta = gain * layer.beta_default
            betahook.fold(model)


def test_the_root_s_own_parameter_is_a_user_of_a_query_weight():
    model = nn.Sequential(LeakingAttention(0.0))
    model.tied = model[0].q_proj.weight
    with betahook.attach(model, controller="monitor") as hook:
        model(torch.randn(2, LENGTH, WIDTH))
        hook.layers["0"].beta = 0.7
        with pytest.raises(betahook.FoldError, match="another module shares its query weight"):
            betahook.fold(model)


def test_a_module_that_is_listed_besides_is_no_other():
    model, x = nn.Sequential(LeakingAttention(0.0)), torch.randn(2, LENGTH, WIDTH)
    model.listed = nn.ModuleList([model[0].q_proj, model[0]])
    model.forward = lambda x: model[0](x)
    with betahook.attach(model, controller="monitor") as hook:
        model(x)
        (layer,) = hook.layers.values()
        layer.beta = 0.7
        adapted = model(x)
        betahook.fold(model)
    torch.testing.assert_close(model(x), adapted)
