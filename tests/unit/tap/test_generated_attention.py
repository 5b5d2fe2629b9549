"""Random attention modules: right in output, statistics and sensitivity, or left alone by name."""

import collections

import pytest
import torch

import betahook
from support.generated import GeneratedAttention, Recipe


def verify(recipe):
    """Return "right", "refused" or "refused late"; an assertion says what is wrong."""
    torch.manual_seed(recipe.seed)
    model = torch.nn.Sequential(torch.nn.Identity(), GeneratedAttention(recipe)).double()
    features, windows = model[1].features, recipe.parts.get("windows", 1)
    x = torch.randn(recipe.batch * windows, recipe.length, features, dtype=torch.float64).requires_grad_()
    alone = model(x)
    with betahook.attach(model, controller="monitor", per_head=recipe.seed % 2 == 1, interval=1) as hook:
        layer = hook.layers["1"]
        generator = torch.get_rng_state()
        output = model(x)
        assert torch.equal(torch.get_rng_state(), generator)
        assert torch.equal(output.nan_to_num(), alone.nan_to_num()), "monitoring changes the output"
        if layer.refusal is not None:
            assert layer.refusal in repr(hook)
            with pytest.raises(RuntimeError, match="left alone"):
                layer.beta = 1.0
            output.square().sum().backward()
            hook.step()
            assert torch.equal(model(x).nan_to_num(), alone.nan_to_num())
            assert int(layer.statistics.count) == 0
            return "refused"
        default = model[1].default(recipe.length)
        assert_close(layer.head_beta_default, default, "beta_default")
        check(hook, layer, model, x, output, default, "own beta")
        hook.step()
        beta = 1.7 * default.mean() * torch.linspace(0.5, 2, recipe.heads, dtype=torch.float64).pow(recipe.seed % 2)
        layer.head_beta = beta
        check(hook, layer, model, x, model(x), beta, "another beta")
        hook.step()
        with torch.no_grad():
            model[1].temperature += 0.4
            model[1].temperatures *= 1.5
        shorter = x[:, :5] if recipe.products != "chunks" else x[:, :4]
        output = model(shorter)
        if layer.refusal is not None:
            # Beta had acted already when the scale turned out to be another than in the forwards before.
            assert recipe.temperature == "log n"
            assert "a scale behind a bias" in layer.refusal
            return "refused late"
        check(hook, layer, model, shorter, output, beta, "another default")
    return "right"


def check(hook, layer, model, x, output, beta, when):
    model.zero_grad()
    assert layer.refusal is None, f"refused under {when}: {layer.refusal}"
    log_beta = beta.log().requires_grad_()
    expected, scores, allowed = model[1].truth(x, log_beta.exp())
    assert_close(output, expected, f"output under {when}")
    measured = layer.head_statistics
    pairs = torch.cat([raw.transpose(0, 1)[allowed.transpose(0, 1)].view(len(beta), -1) for raw in scores], 1)
    assert (measured.count == pairs.shape[1]).all(), f"count under {when}: {measured.count}, {pairs.shape[1]}"
    assert_close(measured.std, pairs.std(1, correction=0), f"std under {when}")
    assert_close(measured.mean, pairs.mean(1), f"mean under {when}")
    assert_close(measured.max_score, pairs.abs().amax(1), f"max_score under {when}")
    (expected_sensitivity,) = torch.autograd.grad(expected.square().sum(), log_beta, allow_unused=True)
    output.square().sum().backward()
    if expected_sensitivity is not None:
        # Of terms that may cancel each other, and are added up in float32.
        assert_close(layer.head_statistics.sensitivity, expected_sensitivity, f"sensitivity under {when}", least=0.1)


def assert_close(got, expected, what, least=1e-3):
    got, expected = got.detach().double(), expected.detach().double()
    scale = float(expected.abs().max().clamp(min=least))
    error = float((got - expected).abs().max()) / scale
    assert error < 1e-4, f"{what} off by {error:.2g}: {got.flatten()[:4].tolist()}, {expected.flatten()[:4].tolist()}"


def verify_all(seeds):
    """Verify the recipes of some seeds; return how often each verdict came, of plain recipes and of all."""
    verdicts = collections.Counter()
    for seed in seeds:
        recipe = Recipe.draw(seed)
        verdict = verify(recipe)
        verdicts[verdict] += 1
        verdicts["plain", verdict] += recipe.plain
        if recipe.unknown is not None:
            assert verdict == "refused", recipe
    return verdicts


@pytest.mark.parametrize("first", range(0, 60, 10))
def test_generated_attention_is_right_or_refused(first):
    verify_all(range(first, first + 10))


@pytest.mark.slow
def test_two_thousand_generated_attentions_are_right_or_refused():
    verdicts = verify_all(range(2000))
    supported, refused = verdicts["plain", "right"], verdicts["plain", "refused"] + verdicts["plain", "refused late"]
    assert supported >= 0.8 * (supported + refused), verdicts
    assert verdicts["refused late"] <= 20, verdicts
