"""Beta as a hook reads, sets and moves it, by layer and by head, and the limits that it keeps."""

import math

import pytest
import torch

import betahook
from betahook.models import discovery
from support.attention import WIDTH, FusedAttention
from support.models import build, inputs
from support.training import LAYER, bits, train


def test_beta_set_before_the_first_forward_acts():
    model, batch = build("llama"), inputs("llama")
    with betahook.attach(model, controller="monitor") as hook:
        assert math.isnan(hook.layers[LAYER].beta)
        hook.layers[LAYER].beta = 0.5
        early = model(**batch).logits
        assert hook.layers[LAYER].beta == 0.5
        assert hook.layers[LAYER].beta_default == pytest.approx(8**-0.5)
    with betahook.attach(model, controller="monitor") as hook:
        model(**batch)
        hook.layers[LAYER].beta = 0.5
        assert torch.equal(early, model(**batch).logits)


def test_beta_of_a_detached_hook_cannot_be_set():
    model = build("llama")
    with betahook.attach(model, controller="monitor") as hook:
        model(**inputs("llama"))
        hook.layers[LAYER].beta = 0.5
    layer = hook.layers[LAYER]
    for name, value in (("beta", 0.1), ("head_beta", torch.full((layer.heads,), 0.1))):
        with pytest.raises(RuntimeError, match=f"beta of '{LAYER}' cannot be set, its hook is detached: attach to the"):
            setattr(layer, name, value)
    assert layer.beta == 0.5


def test_per_head_beta_acts_on_its_head_alone():
    model, batch = build("llama"), inputs("llama")
    heads = torch.tensor([0.1, 0.2, 0.3, 0.4])
    with betahook.attach(model, controller="monitor") as hook:
        hook.layers[LAYER].head_beta = heads
        acted = model(**batch).logits
        assert torch.equal(hook.layers[LAYER].head_beta, heads)
        hook.step()  # a monitor leaves it
        assert torch.equal(hook.layers[LAYER].head_beta, heads)
    with torch.no_grad():
        factor = (heads / 8**-0.5).repeat_interleave(8)[:, None]
        model.get_submodule(LAYER).q_proj.weight.mul_(factor)
    torch.testing.assert_close(acted, model(**batch).logits, rtol=1e-5, atol=1e-5)


def test_per_head_controllers_move_heads_apart_and_per_layer_ones_do_not():
    for per_head in (False, True):
        model = build("llama")
        with betahook.attach(model, controller=betahook.Variance(smoothing=0.0), per_head=per_head) as hook:
            model(**inputs("llama"))
            layer = hook.layers[LAYER]
            std = layer.head_statistics.std if per_head else layer.statistics.std.expand(layer.heads)
            hook.step()
            torch.testing.assert_close(layer.head_beta, (1 / std).float(), rtol=1e-5, atol=0)


@pytest.mark.parametrize(
    ("rule", "name", "target"),
    [
        (betahook.Cap(1.5), "max", 1.5),
        (betahook.Variance(smoothing=0.0), "measured", 1.0),
        (betahook.Variance(source="weights", smoothing=0.0), "predicted", 1.0),
    ],
)
def test_a_layer_whose_heads_have_different_betas_is_judged_by_their_logits(rule, name, target):
    """As the beta of the layer, a geometric mean, moves all of them, so that they keep their ratios."""
    model, heads = build("llama", num_key_value_heads=4), torch.tensor([3.0, 0.03, 0.03, 0.03])
    with betahook.attach(model, controller=rule, interval=1) as hook:
        model(**inputs("llama"))
        layer = hook.layers[LAYER]
        layer.head_beta = heads
        model(**inputs("llama")).loss.backward()
        hook.step()
        torch.testing.assert_close(layer.head_beta / layer.head_beta[0], heads / 3)
        logit = float((layer.head_beta * layer.head_statistics.max_score).max())
        scores = hook.head_metrics()[f"predicted_std/{LAYER}"], layer.head_statistics.std
        stds = dict(zip(("predicted", "measured"), (layer.head_beta * std for std in scores), strict=True))
    found = {"max": logit} | {name: float(std.square().mean().sqrt()) for name, std in stds.items()}
    assert found[name] == pytest.approx(target, rel=0.02)


@pytest.mark.parametrize("learned", [False, True])
def test_search_looks_at_the_weights_of_all_layers_to_begin_below_and_to_wait(learned):
    model = build("llama")
    if learned:  # one layer is enough
        weight = model.model.layers[1].self_attn.k_proj.weight
        torch.nn.init.uniform_(weight.data[:, :1], 1, 2)
    rule = betahook.Search(warmup=2, plateau_batches=3, plateau_fall=1.0)  # the loss falls by a few per cent
    with betahook.attach(model, controller=rule) as hook:
        path = train(model, hook, 4)
        own = hook.layers[LAYER].beta_default
        below = [own / 10**0.5] * 2 + [own / 100] * 2
        assert path == ([[own] * 2] * 4 if learned else [[pytest.approx(beta)] * 2 for beta in below])


def test_weights_that_are_not_found_are_no_reason_to_rise(monkeypatch):
    model = build("llama")
    with betahook.attach(model, controller=betahook.Search(warmup=0)) as hook:
        monkeypatch.setattr(discovery, "locate", lambda *arguments: None)
        assert train(model, hook, 1) == [[hook.layers[LAYER].beta_default] * 2]


def test_a_nan_holds_beta_and_raises_a_flag():
    model, batch = build("llama"), inputs("llama")
    with betahook.attach(model, controller=betahook.Search(window=1, warmup=0, rise=False)) as hook:
        train(model, hook, 2)
        before = [layer.beta for layer in hook.layers.values()]
        state = hook.state_dict()["controllers"][0]["state"]
        with torch.no_grad():
            model.get_submodule("model.layers.1.self_attn").q_proj.weight[0, 0] = torch.nan
        model(**batch).loss.backward()
        hook.step()
        assert [layer.beta for layer in hook.layers.values()] == before
        now = hook.state_dict()["controllers"][0]["state"]
        assert bits(now) == bits(state)
        assert hook.metrics()["nonfinite/model.layers.1.self_attn"] == 1


def test_training_in_evaluation_mode_leaves_beta_alone_and_says_so(caplog):
    """`from_pretrained` returns a model in that mode."""
    model = build("llama").eval()
    with betahook.attach(model, controller=betahook.Search(window=1, warmup=0)) as hook:
        train(model, hook, 3)
        assert all(layer.beta == layer.beta_default for layer in hook.layers.values())
    (record,) = caplog.records
    assert "the hooked layers ran in evaluation mode, under torch.no_grad or in torch.func only" in record.message
    assert "Call model.train() and run the forward with gradients" in record.message


def test_a_low_default_precision_is_not_that_of_beta():
    model = build("llama")
    torch.set_default_dtype(torch.bfloat16)
    try:
        hook = betahook.attach(model, controller=betahook.Gradient(learning_rate=1e-3))
    finally:
        torch.set_default_dtype(torch.float32)
    with hook:
        train(model, hook, 1)
        layer = hook.layers[LAYER]
        assert abs(math.log(layer.beta / layer.beta_default)) == pytest.approx(1e-3, rel=1e-3)


@pytest.fixture
def with_outlier():
    """An attention over 200 tokens, an input whose second token, which is not sampled, has by far the largest q, and a
    function that returns the largest score."""
    torch.manual_seed(0)
    model, x = FusedAttention(), torch.randn(1, 200, WIDTH)
    x[:, 1] *= 30

    def largest():
        q, k = (model.split(projection(x)).double() for projection in (model.q_proj, model.k_proj))
        return (q @ k.mT).tril().abs().max().item()

    return model, x, largest


def test_a_cap_holds_for_rows_that_are_not_sampled(with_outlier):
    model, x, largest_score = with_outlier
    largest = largest_score()
    with betahook.attach(model, controller=betahook.Cap(5.0)) as hook:
        model(x).sum().backward()
        hook.step()
        (layer,) = hook.layers.values()
        metrics = hook.metrics()
        assert metrics[f"max_logit/{layer.name}"] == pytest.approx(largest * layer.beta_default, rel=1e-5)
        assert layer.beta * largest == pytest.approx(5.0, rel=1e-5)
    with betahook.attach(model, controller="monitor") as hook:
        model(x).sum().backward()
        (layer,) = hook.layers.values()
        assert layer.statistics.max_score < 0.5 * largest < largest < layer.statistics.max_score_bound


def test_a_clip_holds_for_rows_that_are_not_sampled(with_outlier):
    model, x, largest_score = with_outlier
    with betahook.attach(model, controller=betahook.Clip(5.0)) as hook:
        model(x).sum().backward()
        hook.step()
        (layer,) = hook.layers.values()
        assert layer.beta_default * largest_score() == pytest.approx(5.0, rel=1e-4)


@pytest.mark.parametrize(
    ("asked", "exact"),
    [
        ({"exact_max_logit": True}, True),
        ({"controller": [betahook.Search(), betahook.Cap()]}, True),
        ({"alerts": betahook.Alerts(print, max_logit=50.0)}, True),
        ({"alerts": betahook.Alerts(print, entropy=0.1)}, False),
        ({"controller": betahook.Search()}, False),
    ],
    ids=str,
)
def test_what_limits_the_largest_logit_asks_for_that_of_all_pairs(with_outlier, asked, exact):
    model, x, largest_score = with_outlier
    largest = largest_score()
    with betahook.attach(model, **asked) as hook:
        model(x).sum().backward()
        (layer,) = hook.layers.values()
        assert (layer.statistics.max_score.item() == pytest.approx(largest, rel=1e-5)) is exact
        assert bool(layer.statistics.max_score == layer.statistics.max_score_bound) is exact


def test_beta_is_read_on_the_cpu_whatever_the_default_device_is():
    model = build("llama")
    with betahook.attach(model, controller="monitor") as hook:
        model(**inputs("llama"))
        with torch.device("meta"):
            assert hook.layers[LAYER].beta == pytest.approx(8**-0.5)


def test_a_move_multiplies_all_heads_of_a_layer_alike():
    """Their betas may differ by hand, or by temperatures that the model has learned."""
    model = build("llama")
    with betahook.attach(model, controller=betahook.Gradient()) as hook:
        train(model, hook, 1)
        layer = hook.layers[LAYER]
        layer.head_beta = before = layer.beta_default * torch.tensor([0.5, 1.0, 2.0, 4.0])
        middle = layer.beta
        train(model, hook, 3)
        assert layer.beta != pytest.approx(middle)
        torch.testing.assert_close(layer.head_beta, before * (layer.beta / middle), rtol=1e-5, atol=0)


def test_a_beta_that_nobody_moved_stays_the_models_own():
    """Also where the model changes its scale while it trains, after steps of a controller that left beta alone."""
    model = build("llama")
    with betahook.attach(model, controller="monitor", interval=1) as hook:
        train(model, hook, 2)
        layer = hook.layers[LAYER]
        layer.module.scaling *= 2
        model(**inputs("llama"))
        assert layer.beta == layer.beta_default == pytest.approx(2 * 8**-0.5)
        assert layer.current_gain.tolist() == [1.0] * 4
