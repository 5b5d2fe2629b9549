"""What a hooked model must be, compared with what the model alone really computes (`zoo.truth`)."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

import betahook
from betahook import Hook
from betahook.measure.pairs import is_short
from support.matrices import overall_std
from zoo import build, catalogue, truth
from zoo.truth import Attention


@dataclass(frozen=True)
class Verdict:
    """What was found out about one model type on one backend.

    Attributes:
        layers: how many attention modules are hooked and were measured.
        exact: how many of them exactly, all pairs counted.
        located: how many with their W_q and W_k.
        beside: attention modules that are not reached.
        folds: "exact" where the model with beta folded in computes what the hooked one did, or why it cannot be folded.
        clips: "yes" where no logit is above the threshold of a clipped model, in how many layers that shows, or why it
            cannot be clipped.
        refusal: why nothing attaches, or None.
        problems: what is wrong, a sentence each.
    """

    layers: int = 0
    exact: int = 0
    located: int = 0
    beside: tuple[str, ...] = ()
    folds: str = ""
    clips: str = ""
    refusal: str | None = None
    problems: tuple[str, ...] = ()


def verify(model_type: str, backend: str) -> Verdict | None:
    """Attach to the tiny model of a type, and hold everything that is promised against the truth.

    None where transformers has no such backend for the model.
    """
    try:
        model = build.build(model_type, backend)
    except build.NoBackendError:
        return None
    batch = build.inputs(model_type, model)
    return verify_model(model, lambda: model(**batch))


def verify_model(model: nn.Module, forward: Callable[[], Any]) -> Verdict:
    """The same for any model in evaluation mode, and a forward of it."""

    def run() -> Any:
        torch.manual_seed(0)
        numpy.random.seed(0)
        with torch.no_grad():
            return forward()

    with truth.watch(model) as watched:
        run()
    found = {name: attention for name, attention in watched.items() if len(attention.scores)}
    before = fingerprint(model)
    with recorded(model, found) as outputs:
        alone, generators = run(), random_state()
    try:
        hook = betahook.attach(model, controller="monitor", when="always")
    except betahook.UnsupportedModelError as error:
        return Verdict(beside=tuple(found), refusal=str(error))
    problems: list[str] = []
    with hook:
        if not same(run(), alone) or not same(random_state(), generators):
            problems.append("monitoring changes the outputs")
        measured = {name: layer for name, layer in hook.layers.items() if is_measured(layer)}
        reached = {name: attention for name, attention in found.items() if name in hook.layers}
        exact = sum(bool(layer.statistics.exact) for layer in measured.values())
        problems += wrong_layers(hook, found)
        problems += [p for name, attention in reached.items() for p in wrong_statistics(hook, name, attention)]
        halve(measured)
        # What measures takes products and a softmax too.
        with hook.pause(), replayed(model, outputs), truth.watch(model) as halved:
            run()
        problems += [p for name, attention in reached.items() for p in wrong_beta(hook, name, attention, halved[name])]
    if fingerprint(model) != before or not same(run(), alone):
        problems.append("detach leaves something behind")
    names = set(measured)
    return Verdict(
        layers=len(measured),
        exact=exact,
        located=sum(layer.projections is not None for layer in measured.values()),
        beside=tuple(name for name in found if name not in hook.layers),
        folds=fold(model, run, names) if names else "",
        clips=clip(model, run, names) if names else "",
        problems=tuple(problems),
    )


def halve(layers: dict[str, betahook.AttentionLayer]) -> None:
    for layer in layers.values():
        layer.head_beta = layer.head_beta / 2


def fold(model: nn.Module, run: Callable[[], Any], names: set[str]) -> str:
    """Fold a beta of each layer's own into a model: "exact" where it then computes what the hooked one did."""
    with betahook.attach(model, controller="monitor", layers=lambda name, module: name in names) as hook:
        run()
        for index, layer in enumerate(hook.layers.values()):
            layer.head_beta = (1.3 + 0.1 * (index % 5)) * layer.head_beta  # no power of two: that rounds nothing
        hooked = run()
        try:
            betahook.fold(model)
        except betahook.FoldError as error:
            return str(error) if hook.attached and same(run(), hooked) else f"changed the model: {error}"
    return compare(run(), hooked)


def compare(folded: Any, hooked: Any) -> str:
    """Say "exact" where all outputs differ by rounding alone, of all together and of each."""
    pairs = [
        (float((a - b).nan_to_num().abs().max()), float(b.nan_to_num().abs().max()))
        for a, b in zip(tree_leaves(tensors(folded)), tree_leaves(tensors(hooked)), strict=True)
        if isinstance(a, Tensor) and a.is_floating_point() and a.numel()
    ]
    worst = max(error for error, _ in pairs) / max(1.0, *(size for _, size in pairs))
    worst_of_one = max(error / max(size, 1e-6) for error, size in pairs)
    return "exact" if worst < 1e-5 and worst_of_one < 1e-4 else f"off by {worst:.1g}, {worst_of_one:.1g} of an output"


def clip(model: nn.Module, run: Callable[[], Any], names: set[str]) -> str:
    """Clip at half of the largest logit until all layers have come to rest: "yes" where none is above it then.

    Layers that the outputs do not depend on, as behind a gate that is zero, wait, and do not count.
    """
    options: dict[str, Any] = dict(layers=lambda name, module: name in names, when="always")
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    with betahook.attach(model, controller="monitor", **options) as hook:
        expected = run()
        logits = {name: largest_logit(layer) for name, layer in hook.layers.items()}
        shown = [name for name, layer in hook.layers.items() if acts(layer, run, expected)]
        threshold = max(logits[name] for name in shown or logits) / 2
    if not threshold > 0:
        return "no logit is above 0"
    try:
        with betahook.attach(model, controller=betahook.Clip(threshold), **options) as hook:
            below = 0
            for _ in range(len(hook.layers) + 4):  # a layer changes the logits of the next ones
                run()
                is_below = all(largest_logit(hook.layers[name]) <= threshold for name in shown)
                below = below + 1 if is_below else 0
                if below == 2:
                    return "yes" if len(shown) == len(logits) else f"{len(shown)} of {len(logits)}, the others wait"
                hook.step()
            return "above the threshold"
    except betahook.UnsupportedModelError as error:
        unchanged = all(torch.equal(value, weights[name]) for name, value in model.state_dict().items())
        return str(error) if unchanged else f"changed the model: {error}"


def acts(layer: betahook.AttentionLayer, run: Callable[[], Any], expected: Any) -> bool:
    """Tell if another beta of a layer changes an output by more than rounding."""
    layer.head_beta = 16 * layer.head_beta_default
    pairs = [*zip(tree_leaves(tensors(run())), tree_leaves(tensors(expected)), strict=True)]
    layer.head_beta = layer.head_beta_default
    floating = [(a.nan_to_num(), b.nan_to_num()) for a, b in pairs if isinstance(a, Tensor) and a.is_floating_point()]
    return any(a.shape != b.shape or bool((a - b).norm() > 1e-5 * b.norm()) for a, b in floating)


def largest_logit(layer: betahook.AttentionLayer) -> float:
    return float((layer.head_statistics.max_score * layer.head_beta).nan_to_num().max())


def is_measured(layer: betahook.AttentionLayer) -> bool:
    return bool(layer.statistics.count > 0)


def wrong_layers(hook: Hook, found: dict[str, Attention]) -> Iterator[str]:
    """Attention that is neither hooked nor named, and what is hooked and no attention."""
    for name in found:
        if name not in hook.layers and name not in hook.not_reached:
            yield f"{name}: is attention, neither hooked nor named"
    for name, layer in hook.layers.items():
        if is_measured(layer) and name not in found:
            yield f"{name}: is measured, but is no attention"


def wrong_statistics(hook: Hook, name: str, attention: Attention) -> Iterator[str]:
    """The model's own factor on its raw scores, their count, mean and std, and what whole rows show."""
    layer = hook.layers[name]
    seen, seen_std = layer.statistics, overall_std(layer.head_statistics).item()
    if not is_measured(layer):
        yield f"{name}: is not measured"
        return
    default = sorted(set(layer.head_beta.tolist()))  # none was set yet: the model's own
    # What the model multiplied q or k by before the product may be part of the scores, or of beta.
    prescale = next(
        (
            x
            for x in (1.0, attention.prescale)
            if default == pytest.approx([x * f for f in attention.factors], rel=1e-4)
        ),
        0,
    )
    if not prescale:
        yield f"{name}: beta_default {default} instead of {attention.factors}, {attention.prescale} in the operands"
        return
    scores = (attention.whole_scores if is_whole(hook, name, attention) else attention.scores) / prescale
    mean, std = scores.mean().item(), scores.std(correction=0).item()
    if not bool(seen.exact):
        if not math.isclose(seen_std, std, rel_tol=0.2):
            yield f"{name}: sampled score std {seen_std:.6g} instead of {std:.6g}"
        return
    if int(seen.count) != len(scores):
        yield f"{name}: {int(seen.count)} pairs instead of {len(scores)}"
    if not math.isclose(seen_std, std, rel_tol=1e-3, abs_tol=1e-6):
        yield f"{name}: score std {seen_std:.6g} instead of {std:.6g}"
    if not math.isclose(seen.mean.item(), mean, rel_tol=1e-3, abs_tol=1e-3 * std + 1e-6):
        yield f"{name}: score mean {seen.mean.item():.6g} instead of {mean:.6g}"
    yield from wrong_rows(name, seen, attention, scores.abs().max().item())


def wrong_rows(name: str, seen: betahook.Statistics, attention: Attention, largest: float) -> Iterator[str]:
    """Entropy and largest score, which are those of some rows where a sequence is long."""
    sampled = not all(is_short(*call.logits.shape[-2:]) for call in attention.calls)
    if not math.isclose(seen.entropy.item(), attention.entropy, rel_tol=0.05 if sampled else 1e-3, abs_tol=1e-4):
        yield f"{name}: entropy {seen.entropy.item():.6g} instead of {attention.entropy:.6g}"
    seen_largest = seen.max_score.item()
    if not (math.isclose(seen_largest, largest, rel_tol=1e-3) or (sampled and seen_largest <= 1.001 * largest)):
        yield f"{name}: largest score {seen_largest:.6g} instead of {largest:.6g}"


def is_whole(hook: Hook, name: str, attention: Attention) -> bool:
    """Whether beta scales all products of a sum, and the statistics are of the sum."""
    return attention.is_sum and type(hook.layers[name].module).__name__ in catalogue.SUMS


def wrong_beta(hook: Hook, name: str, before: Attention, halved: Attention) -> Iterator[str]:
    """Half the beta is half of what the scores put into every logit."""
    whole = is_whole(hook, name, before)
    for old, new in zip(before.calls, halved.calls, strict=True):
        scaled, half = ((call.score * call.factor + whole * call.others)[old.allowed] for call in (old, new))
        if len(scaled) and not (half - scaled / 2).abs().max() <= 1e-4 * scaled.abs().max():
            yield f"{name}: half the beta is not half the logits, off by {(half - scaled / 2).abs().max():.3g}"
            return


@contextmanager
def recorded(model: nn.Module, names: dict[str, Attention]) -> Iterator[dict[str, list[Any]]]:
    """What each of these modules returns, call by call."""
    calls: dict[str, list[Any]] = {name: [] for name in names}

    def keep(name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            calls[name].append(tree_map_only(Tensor, torch.clone, output))

        return hook

    handles = [model.get_submodule(name).register_forward_hook(keep(name)) for name in names]
    try:
        yield calls
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def replayed(model: nn.Module, outputs: dict[str, list[Any]]) -> Iterator[None]:
    """Let these modules return what they returned before, so that no change in one reaches the inputs of another."""

    def play(calls: list[Any]) -> Callable[..., Any]:
        return lambda module, args, output: calls.pop(0)

    handles = [model.get_submodule(name).register_forward_hook(play(list(calls))) for name, calls in outputs.items()]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def fingerprint(model: nn.Module) -> list[Any]:
    """Everything about a model that attaching could have left behind."""
    marks: list[Any] = [list(model.state_dict())]
    for name, module in model.named_modules():
        hooks = [len(value) for key, value in vars(module).items() if key.endswith("_hooks")]
        marks.append((name, type(module), sorted(vars(module)), hooks, getattr(module, "forward", None)))
    return marks


def random_state() -> list[Any]:
    state = numpy.random.get_state()
    return [torch.get_rng_state(), torch.from_numpy(state[1].astype("int64")), state[2]]


def same(left: Any, right: Any) -> bool:
    """Whether two outputs agree in every bit; NaN equals NaN."""
    pairs = zip(tree_leaves(tensors(left)), tree_leaves(tensors(right)), strict=True)
    return all(
        torch.equal(a.nan_to_num(), b.nan_to_num()) and torch.equal(a.isnan(), b.isnan())
        for a, b in pairs
        if isinstance(a, Tensor)
    )


def tensors(output: Any) -> Any:
    """An output as plain containers, so that its tensors are found."""
    return dict(output) if hasattr(output, "to_tuple") else output
