"""Is betahook right about a generated module, or does it leave it alone by name? An assertion says what is wrong."""

from __future__ import annotations

import collections
import re
from collections.abc import Iterable
from dataclasses import dataclass, field

import pytest
import torch
from torch import Tensor, nn

import betahook
from generated import truth
from generated.attention import GeneratedAttention
from generated.recipe import Recipe

TOLERANCE = 1e-4
NAME = "1"
"""Of the attention in its model."""


@dataclass(frozen=True)
class Verdict:
    """What became of a module that betahook is right about.

    Attributes:
        refusal: why it is left alone; None if it is not.
        late: it was left alone after beta had acted, when its own scale changed.
        folds: None if beta was folded into the weights, else why it cannot be.
    """

    refusal: str | None = None
    late: bool = False
    folds: str | None = None


def verify(recipe: Recipe) -> Verdict:
    """Hold output, statistics and sensitivity under several betas, and the fold, against the truth."""
    torch.manual_seed(recipe.seed)
    model = nn.Sequential(nn.Identity(), GeneratedAttention(recipe)).double()
    attention = model[1]
    x = torch.randn(recipe.batch * recipe.windows, recipe.length, attention.features, dtype=torch.float64)
    x.requires_grad_()
    alone = model(x)
    hook = betahook.attach(model, controller="monitor", per_head=recipe.seed % 2 == 1, interval=1)
    with hook:
        layer = hook.layers[NAME]
        generator = torch.get_rng_state()
        output = model(x)
        assert torch.equal(torch.get_rng_state(), generator)
        assert torch.equal(output.nan_to_num(), alone.nan_to_num()), "monitoring changes the output"
        if layer.refusal is not None:
            check_left_alone(hook, model, x, output)
            return Verdict(layer.refusal)
        own = truth.own_beta(attention, recipe.length)
        assert_close(layer.head_beta_default, own, "beta_default")
        check(hook, model, x, output, own, "own beta")
        spread = torch.linspace(0.5, 2, recipe.heads, dtype=torch.float64).pow(recipe.seed % 2)
        beta = 1.7 * own.mean() * spread
        layer.head_beta = beta
        check(hook, model, x, model(x), beta, "another beta")
        with torch.no_grad():
            attention.temperature += 0.4
            attention.temperatures *= 1.5
        shorter = x[:, : max(recipe.length - 2, 3)]
        output = model(shorter)
        if layer.refusal is not None:
            # Beta had acted already when the scale turned out to be another than in the forwards before.
            assert recipe.temperature == "log n", layer.refusal
            assert "a scale behind a bias" in layer.refusal
            return Verdict(layer.refusal, late=True)
        check(hook, model, shorter, output, beta, "another default")
        return Verdict(folds=check_fold(hook, model, shorter, beta))


def check_left_alone(hook: betahook.Hook, model: nn.Module, x: Tensor, alone: Tensor) -> None:
    """A layer that is left alone says so, and nothing of it is touched or measured."""
    layer = hook.layers[NAME]
    assert layer.refusal in repr(hook)
    with pytest.raises(RuntimeError, match="left alone"):
        layer.beta = 1.0
    alone.square().sum().backward()
    hook.step()
    assert torch.equal(model(x).nan_to_num(), alone.nan_to_num())
    assert int(layer.statistics.count) == 0


def check(hook: betahook.Hook, model: nn.Module, x: Tensor, output: Tensor, beta: Tensor, when: str) -> None:
    """The output of a forward with a beta `[heads]`, its sensitivity and what was measured; a step ends it."""
    model.zero_grad()
    layer = hook.layers[NAME]
    assert layer.refusal is None, f"refused under {when}: {layer.refusal}"
    log_beta = beta.log().requires_grad_()
    expected = truth.of(model[1], x, log_beta.exp())
    assert_close(output, expected.output, f"output under {when}")
    measured = layer.head_statistics
    for name, value in statistics(expected, beta).items():
        # Biases of some hundreds round the float32 logits that the entropy is computed from.
        assert_close(getattr(measured, name), value, f"{name} under {when}", least=1.0 if name == "entropy" else 1e-3)
    (sensitivity,) = torch.autograd.grad(expected.output.square().sum(), log_beta, allow_unused=True)
    output.square().sum().backward()
    if sensitivity is not None:
        # Of terms that may cancel each other, and are added up in float32.
        assert_close(layer.head_statistics.sensitivity, sensitivity, f"sensitivity under {when}", least=0.1)
    hook.step()


def statistics(expected: truth.Truth, beta: Tensor) -> dict[str, Tensor]:
    """What is to be measured, of each head and over all softmaxes."""
    allowed = expected.allowed
    scores = torch.stack([raw.masked_fill(~allowed, 0) for raw in expected.scores])
    count, pairs = allowed.sum(-1), len(scores) * allowed.sum((0, 2, 3))
    of_all = (0, 1, 3, 4)
    mean = scores.sum(of_all) / pairs
    from_mean = (scores - mean.view(-1, 1, 1)).masked_fill(~allowed, 0)
    from_row = (scores - (scores.sum(-1) / count)[..., None]).masked_fill(~allowed, 0)
    weights = torch.stack(expected.weights)
    return {
        "count": pairs,
        "mean": mean,
        "std": (from_mean.square().sum(of_all) / pairs).sqrt(),
        "row_std": (from_row.square().sum(of_all) / pairs).sqrt(),
        "max_score": scores.abs().amax(of_all),
        "max_logit": scores.abs().amax(of_all) * beta,
        "entropy": -torch.special.xlogy(weights, weights).sum(-1).mean((0, 1, 3)),
    }


def check_fold(hook: betahook.Hook, model: nn.Module, x: Tensor, beta: Tensor) -> str | None:
    """Fold beta into the weights: the output stays, with a plain model or, where that is refused, with the hook."""
    expected = truth.of(model[1], x, beta).output
    refusal = None
    try:
        betahook.fold(model)
    except betahook.FoldError as error:
        refusal = str(error)
    assert_close(model(x), expected, "output after the fold")
    return refusal


def assert_close(got: Tensor, expected: Tensor, what: str, least: float = 1e-3) -> None:
    """Equal up to the tolerance, relative to the largest entry or to `least`."""
    got, expected = got.detach().double(), expected.detach().double()
    error = float((got - expected).abs().max()) / float(expected.abs().max().clamp(min=least))
    assert error < TOLERANCE, (
        f"{what} off by {error:.2g}: {got.flatten()[:4].tolist()}, {expected.flatten()[:4].tolist()}"
    )


@dataclass
class Summary:
    """What became of many modules: how many by verdict, and why they were refused.

    Attributes:
        verdicts: "right", "left alone" or "left alone late", of all modules.
        plain: the same of those that are a softmax over beta * q . k plus terms.
        reasons: why plain ones were left alone, without the line.
        folds: how many were folded.
        unfolded: why others were not.
    """

    verdicts: collections.Counter[str] = field(default_factory=collections.Counter)
    plain: collections.Counter[str] = field(default_factory=collections.Counter)
    reasons: collections.Counter[str] = field(default_factory=collections.Counter)
    folds: int = 0
    unfolded: collections.Counter[str] = field(default_factory=collections.Counter)

    @property
    def supported(self) -> float:
        """The share of plain modules that are right to the end."""
        return self.plain["right"] / self.plain.total()

    def add(self, recipe: Recipe, verdict: Verdict) -> None:
        """Count one module."""
        kind = "right" if verdict.refusal is None else "left alone late" if verdict.late else "left alone"
        self.verdicts[kind] += 1
        if recipe.plain:
            self.plain[kind] += 1
            if verdict.refusal is not None:
                self.reasons[re.sub(r",? (in the softmax )?at [a-z_]+\.py:\d+", "", verdict.refusal)] += 1
        if kind == "right":
            self.folds += verdict.folds is None
            if verdict.folds is not None:
                self.unfolded[verdict.folds.partition(": ")[2].partition(". ")[0]] += 1


def verify_all(seeds: Iterable[int]) -> Summary:
    """Verify the recipes of some seeds; an error names the recipe."""
    summary = Summary()
    for seed in seeds:
        recipe = Recipe.draw(seed)
        try:
            verdict = verify(recipe)
        except Exception as error:
            error.add_note(repr(recipe))
            raise
        assert verdict.refusal is not None or recipe.unknown is None, recipe
        summary.add(recipe, verdict)
    return summary
