"""Try a fold on the input of the model's last forward, before anything is written for good.

`fold` calls `exact_places`. Weights are written to and restored within it; after it the model, its hook and the random
state are as they were, whatever happens.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import ExitStack
from functools import wraps
from typing import Any

import torch
from torch import Tensor

from betahook import rerun
from betahook.keep.refusals import FoldError, FoldPlan
from betahook.layer import AttentionLayer
from betahook.models.scaling import Scaling
from betahook.tap.override import Override

ROUNDINGS = 5
"""How often rounding is measured: once is too little for an output of one number, which may happen to be near."""

Run = Callable[[Tensor], Any]
"""The forward of a layer on its last input, with `gain [heads]` acting in place of `beta / beta_default`."""


def exact_places(plan: FoldPlan) -> dict[AttentionLayer, Scaling]:
    """Run the model on its last input, and find for each layer the place where a factor does what its beta does.

    Once for the layers, each of which runs alone again and again; then, for uses of a weight outside of its layer, with
    all folded weights. Where that differs by more than float32 rounds, up to `ROUNDINGS` times to measure rounding.

    Raises:
        FoldError: a layer has no such place, the model does not run again or not use the layer, or its output differs.
    """
    if _pooled(plan, float(plan.hook.last_call.input is None)):
        raise FoldError(
            "fold() checks itself on the input of the model's last forward, and there was none. Run "
            f"{type(plan.hook.model).__name__}, or the part of it that holds all hooked layers, once without a cache"
        )
    with rerun.without_side_effects(plan.hook):
        places, expected, precision = _check_layers(plan)
        _check_model(plan, places, expected, precision)
    return places


def _check_layers(plan: FoldPlan) -> tuple[dict[AttentionLayer, Scaling], list[Tensor], float]:
    """An exact place for each layer; what the hooked model returns, and the coarsest precision that was met."""
    exact: dict[AttentionLayer, list[Scaling]] = {}
    precision = 0.0

    def checked(layer: AttentionLayer, forward: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(forward)
        def run(*args: Any, **kwargs: Any) -> Any:
            nonlocal precision
            output = forward(*args, **kwargs)
            candidates = exact.get(layer, plan.places[layer])  # those left of an earlier call in the same forward
            with rerun.random_state_kept(plan.hook):
                exact[layer] = _check_layer(plan, layer, candidates, _again(plan, layer, forward, args, kwargs))
            precision = max(precision, rerun.precision([output, exact[layer][0].parameters]))
            return output

        return run

    with ExitStack() as undo:
        for layer in plan.gains:
            # No hook: a block may call `attention.forward`, and FSDP 2 frees the weights in one.
            Override(layer.module, "forward", checked(layer, layer.module.forward), undo)
        expected = _run_model(plan)
    modules = set(plan.hook.model.modules())
    for layer in plan.gains:
        if layer not in exact:
            gone = "the model has lost this module since attach(); detach and attach again"
            idle = "the last forward of the model did not use it; run one that does"
            raise plan.error(idle if layer.module in modules else gone, layer)
    return {layer: places[0] for layer, places in exact.items()}, expected, max(precision, rerun.precision(expected))


def _check_model(
    plan: FoldPlan, places: dict[AttentionLayer, Scaling], expected: list[Tensor], precision: float
) -> None:
    """Compare what the model returns with all folded weights: it shows every use of them."""

    def run_folded(error: float = 0.0, seed: int = 0) -> list[Tensor]:
        with ExitStack() as undo:
            for layer, place in places.items():
                undo.enter_context(layer.acting(torch.ones_like(plan.gains[layer])))
                undo.enter_context(place.scaled(plan.gains[layer], error, seed))
            return _run_model(plan)

    name, actual = type(plan.hook.last_call.module).__name__, run_folded()
    if not expected:
        raise plan.error(f"the output of {name} holds no floating-point tensor that would show a difference")
    if [tensor.shape for tensor in actual] != [tensor.shape for tensor in expected]:
        raise plan.error(f"the output of {name} has another shape each time")
    errors = plan.pooled(rerun.distances(actual, expected))
    norms = plan.pooled(rerun.norms(expected))
    limits = max(1e-5, precision / 4) * norms
    for seed in range(ROUNDINGS):
        if bool((errors <= limits).all()):
            return
        limits = limits.maximum(4 * plan.pooled(rerun.distances(actual, run_folded(precision, seed))))
    beyond = ~(errors <= limits)
    if bool(beyond.any()):
        worst = float((errors / norms)[beyond].max())
        reason = (
            f"the output of {name} would be off by {worst:.2g} of its norm, although each layer alone gives what it "
            "did. Probably a query weight is used outside of its attention too, by a module around it or a function"
        )
        raise plan.error(reason)


def _run_model(plan: FoldPlan) -> list[Tensor]:
    """Run the hooked model on its last input."""
    hook = plan.hook
    try:
        return rerun.run_model(hook)
    except FoldError:
        raise
    except Exception as error:
        reason = f"{type(hook.last_call.module).__name__} does not run again on the input of its last forward"
        raise plan.error(f"{reason} ({type(error).__name__}: {error})") from error


def _again(
    plan: FoldPlan, layer: AttentionLayer, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Run:
    """A forward of a layer on the same arguments and random numbers, which can be called again and again."""
    # A cache that the model makes by itself is full by now.
    again = [None if hasattr(value, "get_seq_length") else value for value in args]
    options = {name: None if hasattr(value, "get_seq_length") else value for name, value in kwargs.items()}

    def run(gain: Tensor) -> Any:
        with rerun.random_state_kept(plan.hook), layer.acting(gain):  # some drop out in evaluation, too
            return forward(*again, **options)

    return run


def _check_layer(plan: FoldPlan, layer: AttentionLayer, places: list[Scaling], run: Run) -> list[Scaling]:
    """The exact ones of the places of a layer, at least one."""
    gain = plan.gains[layer]
    try:
        exact = [place for place in places if _is_exact(plan, place, gain, run)]
    except RuntimeError as error:
        raise plan.error(f"it does not run twice on one input ({error})", layer) from error
    if exact:
        return exact
    if _is_random(plan, gain, run):
        reason = "its output differs each time it runs, even in evaluation mode; make it deterministic"
    elif _has_effect(plan, gain, run):
        reason = (
            "its output is not that of a scaled query projection or norm. Probably a norm without a weight, or a "
            "function that is not linear, comes between, the query has a bias apart from its projection, or it is used "
            "outside the scores too, as in some relative position biases. Exclude the layer with attach(layers=...)"
        )
    else:
        reason = "its output on the input of the last forward does not depend on beta; run one where it does"
    raise plan.error(reason, layer)


def _is_random(plan: FoldPlan, gain: Tensor, run: Run) -> bool:
    """Tell if the output differs by more than rounding without a change: it draws numbers that are not torch's."""
    one, other = run(torch.ones_like(gain)), run(torch.ones_like(gain))
    return _distance(plan, one, other) > max(1e-5, rerun.precision(one)) * _pooled(plan, rerun.norm(one))


def _has_effect(plan: FoldPlan, gain: Tensor, run: Run) -> bool:
    """Tell if the output depends on beta at all; it does not if, for example, every query sees a single key."""
    return _distance(plan, run(torch.ones_like(gain)), run(_probe_gain(gain))) > 0


def _probe_gain(gain: Tensor) -> Tensor:
    """Factors that are far from 1 and from those of the layer."""
    return gain / gain.max() / 2


def _is_exact(plan: FoldPlan, place: Scaling, gain: Tensor, run: Run) -> bool:
    """Tell if scaling a place has the effect of the gain of a layer, and of one far from 1."""

    def run_scaled(factors: Tensor, error: float = 0.0) -> Any:
        with place.scaled(factors, error):
            return run(torch.ones_like(gain))

    plain = run(torch.ones_like(gain))
    for factors in (_probe_gain(gain), gain):
        expected, actual = run(factors), run_scaled(factors)
        error = _distance(plan, actual, expected)
        effect = math.inf if factors is gain else _distance(plan, plain, expected)
        if not error < effect / 4:
            return False
        precision = rerun.precision([expected, place.parameters])
        if error <= max(1e-5, precision / 4) * _pooled(plan, rerun.norm(expected)):
            continue
        rounding = _distance(plan, actual, run_scaled(factors, precision))
        if not error <= 4 * rounding:
            return False
    return True


def _distance(plan: FoldPlan, one: Any, other: Any) -> float:
    return _pooled(plan, rerun.distance(one, other))


def _pooled(plan: FoldPlan, norm: float) -> float:
    return plan.pooled(torch.tensor([norm], dtype=torch.double, device="cpu")).item()
