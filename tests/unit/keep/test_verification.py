"""The check on the last input: what is exact passes, rounding included, and everything else leaves no trace."""

import copy
import random
from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F
from accelerate.utils import convert_outputs_to_fp32
from torch import nn

import betahook
from support.attention import LENGTH, WIDTH, Block, ByHandAttention, FusedAttention, ToOneKey
from support.models import build, inputs
from support.training import check_fold, move


def squash(model):
    """A step that is not linear, under a name that nobody knows; at small queries it is nearly linear."""

    class Squashed(nn.Linear):
        def forward(self, x):
            return 10 * (super().forward(x) / 10).tanh()

    model.model.layers[1].self_attn.q_proj.__class__ = Squashed


def silence(model):
    model.set_attn_implementation("sdpa")  # which returns no attention weights
    nn.init.zeros_(model.model.layers[0].self_attn.o_proj.weight)


@pytest.mark.parametrize(
    ("family", "change", "message"),
    [
        ("stablelm", None, "its output is not that of a scaled query projection or norm"),
        ("llama", squash, r"model.layers.1.self_attn \(LlamaAttention\): its output is not that of a scaled"),
        ("llama", silence, "does not depend on beta"),
    ],
)
def test_a_layer_without_an_exact_place_is_refused_and_nothing_changed(family, change, message):
    model, batch = build(family).eval(), inputs(family)
    if change is not None:
        change(model)
    with betahook.attach(model, controller="monitor") as hook:
        model(**batch)
        move(hook, per_head=False)
        weights = copy.deepcopy(model.state_dict())
        with pytest.raises(betahook.FoldError, match=message):
            betahook.fold(model)
        assert hook.attached
        assert all(torch.equal(value, weights[name]) for name, value in model.state_dict().items())


def test_a_model_that_does_not_run_twice_on_one_input_is_not_folded():
    class Reading(nn.Module):
        def __init__(self):
            super().__init__()
            self.model = build("llama").eval()

        def forward(self, batches):
            return self.model(next(batches))

    model, batch = Reading(), inputs("llama")
    with betahook.attach(model, controller="monitor") as hook:
        model(iter([batch["input_ids"]]))
        move(hook, per_head=False)
        message = r"Reading does not run again on the input of its last forward \(StopIteration: \)"
        with pytest.raises(betahook.FoldError, match=message):
            betahook.fold(model)
        assert hook.attached


class Shrinking(nn.Sequential):
    lengths = iter(range(LENGTH, 0, -1))

    def forward(self, x):
        return super().forward(x)[:, : next(self.lengths)]


class Deciding(nn.Sequential):
    def forward(self, x):
        return super().forward(x).argmax(-1)


@pytest.mark.parametrize(
    ("kind", "trouble"),
    [
        (Shrinking, "the output of Shrinking has another shape each time"),
        (Deciding, "the output of Deciding holds no floating-point tensor"),
    ],
)
def test_a_model_whose_output_cannot_be_compared_is_not_folded(kind, trouble):
    model = kind(FusedAttention())
    with betahook.attach(model, controller="monitor") as hook:
        model(torch.randn(3, LENGTH, WIDTH))
        move(hook, per_head=False)
        with pytest.raises(betahook.FoldError, match=trouble):
            betahook.fold(model)


def test_a_layer_runs_again_without_the_cache_that_its_call_filled():
    class Cache(list):
        def get_seq_length(self):
            return len(self)

    class Cached(FusedAttention):
        def forward(self, x, cache=None):
            q, k, v = (self.split(projection(x)) for projection in (self.q_proj, self.k_proj, self.v_proj))
            if cache is not None:
                cache.append((k * (1 + len(cache)), v))
                k, v = (torch.cat(parts, 2) for parts in zip(*cache, strict=True))
            return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)

    class Model(nn.Sequential):
        def forward(self, x):
            return self[0](x, Cache())

    model, x = Model(Cached()), torch.randn(2, LENGTH, WIDTH)
    check_fold(model, x)


class Taking(nn.Module):
    """Takes entries out of one argument, and puts others into a second."""

    def __init__(self):
        super().__init__()
        self.model = build("llama").eval()

    def forward(self, batch, seen):
        seen.setdefault("batches", []).append(batch["inputs"].pop(0))
        return self.model(torch.cat(seen["batches"]))


def test_what_is_run_again_gets_its_arguments_as_they_were_and_leaves_them_as_they_are():
    model = Taking()
    ids, seen = inputs("llama")["input_ids"], {}
    with betahook.attach(model, controller="monitor", when="always") as hook:
        given = {"inputs": [ids]}
        model(given, seen)
        hook.audit()
        move(hook, per_head=False)
        moved = model.model(ids).logits
        betahook.fold(model)
    assert (given, list(seen), len(seen["batches"])) == ({"inputs": []}, ["batches"], 1)
    torch.testing.assert_close(model.model(ids).logits, moved, rtol=1e-4, atol=1e-5)


def test_a_layer_that_writes_to_its_arguments_folds():
    """As in ESPnet."""

    class Inverting(ByHandAttention):
        def forward(self, x, mask):
            assert mask.shape == (len(x), LENGTH, LENGTH)
            q, k, v = (self.split(projection(x)) for projection in (self.q_proj, self.k_proj, self.v_proj))
            scores = (q @ k.mT / self.head_dim**0.5).masked_fill(mask.unsqueeze_(1).eq_(0), -1e9)
            return (scores.softmax(-1) @ v).transpose(1, 2).flatten(2)

    class Model(nn.Sequential):
        def forward(self, x):
            return self[0](x, torch.ones(len(x), LENGTH, LENGTH, dtype=torch.bool).tril_())

    model, x = Model(Inverting()), torch.randn(2, LENGTH, WIDTH)
    check_fold(model, x)


def test_a_cache_in_the_attributes_of_a_layer_outlives_what_is_run_again():
    """As in LLMs-from-scratch, where a forward without a cache drops it."""

    class Caching(FusedAttention):
        def __init__(self):
            super().__init__()
            self.register_buffer("keys", None)
            self.steps, self.seen = 0, []

        def forward(self, x, use_cache=False):
            q, k, v = (self.split(projection(x)) for projection in (self.q_proj, self.k_proj, self.v_proj))
            self.steps = self.steps + x.shape[1] if use_cache else 0
            self.seen.append(x.shape[1])
            self.keys = (k if self.keys is None else torch.cat([self.keys, k], 2)) if use_cache else None
            return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)

    model = Caching().eval()
    with betahook.attach(model, controller="monitor", when="always") as hook, torch.no_grad():
        model(torch.randn(2, LENGTH, WIDTH), use_cache=True)
        model(torch.randn(2, 1, WIDTH), use_cache=True)
        keys = model.keys
        move(hook, per_head=False)
        hook.audit()
        with pytest.raises(betahook.FoldError, match="does not depend on beta"):
            betahook.fold(model)
    assert model.keys is keys
    assert (model.steps, model.seen) == (LENGTH + 1, [LENGTH, 1])


def test_one_token_does_not_tell_where_beta_belongs():
    model, batch = build("llama").eval(), inputs("llama")
    with betahook.attach(model, controller="monitor") as hook:
        model(**batch)
        move(hook, per_head=False)
        model(input_ids=batch["input_ids"][:, :1])
        with pytest.raises(betahook.FoldError, match="the input of the last forward does not depend on beta; run one"):
            betahook.fold(model)


def test_where_training_saw_one_key_alone_no_place_can_be_wrong():
    model, x = nn.Sequential(ToOneKey()), torch.randn(2, LENGTH, WIDTH)
    weight = model[0].q_proj.weight.detach().clone()
    with betahook.attach(model, controller="monitor") as hook:
        expected = model(x)
        expected.sum().backward()
        hook.layers["0"].beta = 1.0
        with pytest.raises(
            betahook.FoldError, match=r"does not depend on beta; run one.* leave it out with attach\(lay"
        ):
            betahook.fold(model)
        hook.step()
        betahook.fold(model)
    torch.testing.assert_close(model[0].q_proj.weight, weight / hook.layers["0"].beta_default)
    assert torch.equal(model(x), expected)


@pytest.mark.oldest_skips("T5 writes its attention by hand")
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
    with pytest.raises(betahook.FoldError, match="the input of the model's last forward, but there was none"):
        betahook.fold(hook)
    hook.model(**batch)
    betahook.fold(hook)


class Wrapper(torch.nn.Module):
    """Without a forward, as a module of Lightning, whose training step calls what it holds."""

    def __init__(self, model):
        super().__init__()
        self.model = model


@pytest.mark.parametrize("inner", ["model", "model.model"])
def test_a_part_that_is_called_instead_of_the_model(inner):
    wrapper, batch = Wrapper(build("llama").eval()), inputs("llama")
    part, options = wrapper.get_submodule(inner), {name: batch[name] for name in ("input_ids", "attention_mask")}
    with betahook.attach(wrapper, controller="monitor") as hook:
        part(**options)
        move(hook, per_head=False)
        hook.last_call.input = None
        with pytest.raises(betahook.FoldError, match="Run Wrapper, or the part of it that"):
            betahook.fold(wrapper)
        expected = part(**options)[0]
        betahook.fold(wrapper)
    torch.testing.assert_close(part(**options)[0], expected, rtol=1e-5, atol=1e-5)


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
        with pytest.raises(
            betahook.FoldError, match="norm without a weight, or a function that is not linear, comes between"
        ):
            betahook.fold(model)


def test_a_module_that_the_model_has_lost_is_named():
    model, batch = build("llama"), inputs("llama")
    with betahook.attach(model, controller="monitor") as hook:
        model(**batch)
        for layer in hook.layers.values():
            layer.beta = 0.7
        del model.model.layers[1]
        model.config.num_hidden_layers = 1
        with pytest.raises(
            betahook.FoldError, match=r"layers.1.self_attn.*: the module is no longer part of the model"
        ):
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


class FaintAttention(Block):
    """A part of the query comes from no projection of it, and attention adds little to the output."""

    share = 0.0

    def mix(self, q, k, v):
        return 1000 + 0.1 * F.scaled_dot_product_attention(q + self.share * v, k, v)


@pytest.mark.parametrize("share", [0.0, 0.5])
def test_an_error_within_rounding_must_be_small_beside_the_effect_of_beta(share):
    torch.manual_seed(0)
    model = nn.Sequential(FaintAttention())
    model[0].share = share
    refused = pytest.raises(betahook.FoldError, match="its output is not that of a scaled query projection")
    with betahook.attach(model, controller="monitor") as hook:
        model(torch.randn(2, LENGTH, WIDTH))
        hook.layers["0"].beta = 1.5 * hook.layers["0"].beta_default
        with refused if share else nullcontext():
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


def test_sharp_attention_folds_in_half_precision():
    """Rounding lets few rows look at another key, which one look at what rounding does may miss."""
    for seed in range(10):
        model = build("t5", dtype=torch.bfloat16)
        ids = torch.randint(3, 64, (2, 24), generator=torch.Generator().manual_seed(seed))
        with betahook.attach(model, controller="monitor") as hook:
            model(input_ids=ids, labels=ids)
            for layer in hook.layers.values():
                layer.beta = 700 * layer.beta_default
            betahook.fold(model)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_weight_that_half_precision_rounds_to_nothing_folds_in_float32(dtype):
    """A norm that adds 1 to its weight would hold 0.01 as -0.99."""
    model, batch = build("gemma3", "sdpa", dtype=dtype), inputs("gemma3")
    hook = betahook.attach(model, controller="monitor")
    model(**batch)
    for layer in hook.layers.values():
        layer.beta = 0.01 * layer.beta_default
    with pytest.raises(betahook.FoldError, match="half precision is too coarse to tell: call model"):
        betahook.fold(model)
    model.float()
    adapted = model(**batch).logits
    betahook.fold(model)
    torch.testing.assert_close(model(**batch).logits, adapted)


def test_a_model_that_draws_random_numbers_in_evaluation_folds():
    class Sampling(nn.Sequential):
        def forward(self, x):
            return super().forward(x + torch.randn_like(x))

    model = Sampling(FusedAttention(), nn.Linear(WIDTH, WIDTH), FusedAttention())
    with betahook.attach(model, controller="monitor") as hook:
        model(torch.randn(3, LENGTH, WIDTH))
        move(hook, per_head=True)
        state = torch.get_rng_state()
        betahook.fold(model)
        assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize(("own", "seed"), [(False, 0), (True, 0), (True, 48), (True, 76), (True, 129)])
def test_a_layer_that_drops_out_in_evaluation_folds_if_torch_draws(own, seed):
    """With the last seeds, numbers of its own happen to make its outputs alike."""
    torch.manual_seed(seed)
    generator = random.Random(0)

    class Dropping(FusedAttention):
        def mix(self, q, k, v):
            if own:
                v = v * (1 + generator.random())
            return F.scaled_dot_product_attention(q, k, v, dropout_p=0.1)

    model, x = Dropping(), torch.randn(3, LENGTH, WIDTH)
    with betahook.attach(model, controller="monitor") as hook:
        model(x)
        move(hook, per_head=True)
        if own:
            with pytest.raises(betahook.FoldError, match="its output differs each time it runs, even in eval"):
                betahook.fold(model)
            return
        with torch.random.fork_rng():
            expected = model(x)
        betahook.fold(model)
        torch.testing.assert_close(model(x), expected)


def test_a_model_that_writes_to_its_input_folds():
    class Overwriting(nn.Sequential):
        def forward(self, x):
            x += 1
            return super().forward(x)

    model, x = Overwriting(FusedAttention()), torch.randn(3, LENGTH, WIDTH)
    with betahook.attach(model, controller="monitor") as hook:
        model(x)
        move(hook, per_head=True)
        kept = x.clone()
        betahook.fold(model)
    assert torch.equal(x, kept)


@pytest.mark.parametrize("wrapped", [True, False])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_deep_models_fold_under_autocast(dtype, wrapped):
    """Rounding adds up over the layers; as Accelerate wraps it, the model returns float32 all the same."""
    for seed in range(3):
        model = build("llama", "sdpa", num_hidden_layers=8)
        torch.manual_seed(seed)
        batch = {"input_ids": torch.randint(3, 64, (2, 24)), "labels": torch.randint(3, 64, (2, 24))}
        with betahook.attach(model, controller="monitor") as hook:
            if wrapped:
                model.forward = convert_outputs_to_fp32(torch.autocast("cpu", dtype)(model.forward))
            with nullcontext() if wrapped else torch.autocast("cpu", dtype):
                model(**batch)
                move(hook, per_head=True)
                betahook.fold(model)


@pytest.mark.parametrize(("dtype", "most"), [(torch.float32, 2), (torch.bfloat16, 5)])
def test_the_number_of_forwards_is_small(dtype, most):
    model, calls = build("llama", dtype=dtype, num_hidden_layers=4), []
    with betahook.attach(model, controller="monitor") as hook:
        model(**inputs("llama"))
        move(hook, per_head=True)
        with model.register_forward_pre_hook(lambda module, args: calls.append(module)):
            betahook.fold(model)
    assert len(calls) <= most


def looks_at_all_modules(layers, monkeypatch):
    """Count how often all modules of a model are listed while it folds."""
    looks, named_modules = [], nn.Module.named_modules
    model = build("llama", num_hidden_layers=layers)

    def counted(module, *args, **kwargs):
        looks.extend([module] if module is model else [])
        return named_modules(module, *args, **kwargs)

    with betahook.attach(model, controller="monitor") as hook, monkeypatch.context() as patch:
        model(**inputs("llama"))
        move(hook, per_head=True)
        patch.setattr(nn.Module, "named_modules", counted)
        betahook.fold(model)
    return len(looks)


def test_folding_looks_at_all_modules_as_often_in_a_deep_model(monkeypatch):
    assert looks_at_all_modules(2, monkeypatch) == looks_at_all_modules(6, monkeypatch) > 0


def test_what_is_nan_with_and_without_the_hook_does_not_keep_it_from_folding():
    class Undefined(Block):
        """A query whose keys are all masked."""

        def mix(self, q, k, v):
            return nn.functional.scaled_dot_product_attention(q, k, v).index_fill(2, torch.tensor([3]), torch.nan)

    model = nn.Sequential(Undefined())
    with betahook.attach(model, controller="monitor") as hook:
        model(torch.randn(3, LENGTH, WIDTH))
        move(hook, per_head=False)
        betahook.fold(model)
