"""Try a fold on the input of the model's last forward, before anything is written for good.

`fold` calls `exact_places`. Weights are written to and restored within it; after it the model, its hook and the random
state are as they were, whatever happens.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import ExitStack
from functools import cached_property, partial, wraps
from typing import Any

import torch
from torch import Tensor

from betahook import rerun
from betahook.keep.refusals import FoldError, FoldPlan
from betahook.layer import AttentionLayer, has_one_key
from betahook.models.modes import RandomState
from betahook.models.scaling import Scaling
from betahook.tap.override import Override

ROUNDINGS = 5
"""How often rounding is measured: once is too little for an output of one number, which may happen to be near."""


def exact_places(plan: FoldPlan) -> dict[AttentionLayer, Scaling]:
    """Run the model on its last input, and find for each layer the place where a factor does what its beta does.

    Once for the layers, each of which runs alone again and again; then, for uses of a weight outside of its layer, with
    all folded weights. Where that differs by more than float32 rounds, up to `ROUNDINGS` times to measure rounding.

    Raises:
        FoldError: a layer has no such place, the model does not run again or not use the layer, or its output differs.
    """
    if plan.is_on_any_rank(plan.hook.last_call.input is None):
        raise FoldError(
            "fold() checks itself on the input of the model's last forward, and there was none, or it had a cache. Run "
            f"{type(plan.hook.model).__name__}, or the part of it that holds all hooked layers, once without a cache. "
            "Where several parts are called by themselves, call a forward that runs them, or attach to each"
        )
    with rerun.without_side_effects(plan.hook):
        places, expected, precision = _check_layers(plan)
        _check_model(plan, places, expected, precision)
    return places


def _check_layers(plan: FoldPlan) -> tuple[dict[AttentionLayer, Scaling], list[Tensor], float]:
    """An exact place for each layer; what the hooked model returns, and the coarsest precision that was met."""
    exact: dict[AttentionLayer, list[Scaling]] = {}
    precision = 0.0
    left = _calls_on_all_ranks(plan)  # calls still to be checked; ranks check in step
    random_state = RandomState(plan.hook.model)  # once: to look at a whole deep model for each layer would take long

    def checked(layer: AttentionLayer, forward: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(forward)
        def run(*args: Any, **kwargs: Any) -> Any:
            nonlocal precision
            output = forward(*args, **kwargs)
            if not left[layer]:
                return output
            left[layer] -= 1
            candidates = exact.get(layer, plan.places(layer))  # those left of an earlier call in the same forward
            exact[layer] = _LayerCheck(plan, layer, random_state, forward, args, kwargs).exact(candidates)
            precision = max(precision, rerun.coarsest_eps([output, exact[layer][0].parameters]))
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
            if layer.module not in modules:
                raise plan.error(_lost(layer), layer, can_keep=False)  # such a hook is not restored either
            where = ", here or on another rank" if plan.is_sharded else ""
            raise plan.error(f"the last forward of the model did not use it{where}; run one that does", layer)
    return {layer: places[0] for layer, places in exact.items()}, expected, max(precision, rerun.coarsest_eps(expected))


def _calls_on_all_ranks(plan: FoldPlan) -> dict[AttentionLayer, float]:
    """How many calls of each layer are checked: where ranks check together, as many as each of them has.

    The model runs to count them, before ranks wait for one another in each call.
    """
    if not plan.is_sharded:
        return dict.fromkeys(plan.gains, math.inf)
    calls = dict.fromkeys(plan.gains, 0)

    def counted(layer: AttentionLayer, forward: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(forward)
        def run(*args: Any, **kwargs: Any) -> Any:
            calls[layer] += 1
            return forward(*args, **kwargs)

        return run

    with ExitStack() as undo:
        for layer in calls:
            Override(layer.module, "forward", counted(layer, layer.module.forward), undo)
        _run_model(plan)
    return {layer: least for layer, (least, _) in zip(calls, plan.ranges([*calls.values()]), strict=True)}


def _lost(layer: AttentionLayer) -> str:
    return (
        "the model has lost this module since attach(), perhaps to another one, which has not its beta. Fold before "
        "you remove or replace layers. If it was only removed, give it the model's own beta and fold again: layer = "
        f"hook.layers[{layer.name!r}]; layer.head_beta = layer.head_beta_default"
    )


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
    ((fewest, most),) = plan.ranges([len(expected)])
    if fewest == 0:
        raise plan.error(f"the output of {name} holds no floating-point tensor that would show a difference")
    if fewest < most:
        raise plan.error(f"the output of {name} holds other tensors on another rank")
    if plan.is_on_any_rank([tensor.shape for tensor in actual] != [tensor.shape for tensor in expected]):
        raise plan.error(f"the output of {name} has another shape each time")
    errors = plan.pooled(rerun.distances(actual, expected))
    norms = plan.pooled(rerun.norms(expected))

    def blurred(seed: int) -> Tensor:
        return plan.pooled(rerun.distances(actual, run_folded(precision, seed)))

    beyond = _beyond_rounding(errors, norms, precision, blurred)
    if bool(beyond.any()):
        worst = float((errors / norms)[beyond].max())
        reason = (
            f"the output of {name} would be off by {worst:.2g} of its norm, although each layer alone gives what it "
            "did. Probably a query weight is used outside of its attention too, by a module around it or a function"
            f"{_coarse(precision)}"
        )
        raise plan.error(reason)


def _run_model(plan: FoldPlan) -> list[Tensor]:
    """Run the hooked model on its last input; all ranks that hold it together raise where one does."""
    hook, output, error = plan.hook, list[Tensor](), None
    try:
        output = rerun.run_model(hook)
    except FoldError:  # of a layer, on all ranks
        raise
    except Exception as raised:
        error = raised
    if plan.is_on_any_rank(error is not None):
        raise plan.error(rerun.does_not_run(hook, error)) from error
    return output


class _LayerCheck:
    """A layer on the arguments of its last call, with which it runs again and again."""

    def __init__(
        self,
        plan: FoldPlan,
        layer: AttentionLayer,
        random_state: RandomState,
        forward: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> None:
        def kept(value: Any) -> Any:
            # A cache that the model makes by itself is full by now.
            return None if hasattr(value, "get_seq_length") else value

        self._plan = plan
        self._layer = layer
        self._random_state = random_state
        self._forward = partial(forward, *map(kept, args), **{name: kept(value) for name, value in kwargs.items()})
        self._gain = plan.gains[layer]
        self._own = torch.ones_like(self._gain)
        self._probe = self._gain / self._gain.max() / 2  # far from 1 and from the gain of the layer

    def exact(self, places: list[Scaling]) -> list[Scaling]:
        """Return those of the places where a factor does what beta does, at least one."""
        exact = [place for place in places if self._is_exact(place)]
        if exact:
            return exact
        if self._is_random:
            reason = "its output differs each time it runs, even in evaluation mode; make it deterministic"
        elif self._distance(self._run(self._own), self._run(self._probe)) > 0:
            reason = (
                "its output is not that of a scaled query projection or norm. Probably a norm without a weight, or a "
                "function that is not linear, comes between, the query has a bias apart from its projection, or it is "
                "used outside the scores too, as in some relative position biases. Exclude the layer with "
                f"attach(layers=...){_coarse(rerun.coarsest_eps([place.parameters for place in places]))}"
            )
        else:  # as where every query sees a single key, in this forward
            reason = (
                "its output on the input of the last forward does not depend on beta; run one where it does. Or leave "
                "it out with attach(layers=...)"
            )
        raise self._plan.error(reason, self._layer)

    def _run(self, gain: Tensor) -> object:
        """Run with `gain [heads]` acting in place of `beta / beta_default`, on the same random numbers each time."""
        output, error = None, None
        try:
            # Some drop out in evaluation, too, perhaps on a device where the weights are while the layer runs.
            with self._random_state.kept(self._layer.module.parameters()), self._layer.acting(gain):
                output = self._forward()
        except RuntimeError as raised:
            error = raised
        if self._plan.is_on_any_rank(error is not None):
            found = rerun.ELSEWHERE if error is None else error
            raise self._plan.error(f"it does not run twice on one input ({found})", self._layer) from error
        return output

    def _run_scaled(self, place: Scaling, factors: Tensor, error: float = 0.0, seed: int = 0) -> object:
        """Run with factors in the weights, and the model's own beta."""
        with place.scaled(factors, error, seed):
            return self._run(self._own)

    def _is_exact(self, place: Scaling) -> bool:
        """Tell if scaling a place has the effect of the gain of the layer, and of one far from 1."""
        plain = self._run(self._own)
        for factors in (self._probe, self._gain):
            expected, actual = self._run(factors), self._run_scaled(place, factors)
            error = self._distance(actual, expected)
            shown = factors is not self._probe or bool(error < self._distance(plain, expected) / 4)
            # Where training saw one key alone, too, no place would be wrong.
            if not shown and self._plan.is_on_any_rank(not has_one_key(self._layer)):
                return False
            precision = rerun.coarsest_eps([expected, place.parameters])
            blurred = partial(self._blurred, actual, place, factors, precision)
            if _beyond_rounding(error, self._norm(expected), precision, blurred):
                return False
        return True

    def _blurred(self, actual: object, place: Scaling, factors: Tensor, precision: float, seed: int) -> Tensor:
        """Distance by which rounding of the scaled weights moves the output."""
        if self._is_random:  # then any error would be explained by what is no rounding
            return torch.zeros(1, device="cpu")
        return self._distance(actual, self._run_scaled(place, factors, precision, seed))

    @cached_property
    def _is_random(self) -> bool:
        """True if the output differs by more than rounding without a change: it draws numbers that are not torch's."""
        one, other = self._run(self._own), self._run(self._own)
        return bool(self._distance(one, other) > max(1e-5, rerun.coarsest_eps(one)) * self._norm(one))

    def _distance(self, one: object, other: object) -> Tensor:
        return self._plan.pooled(rerun.distances([one], [other]))

    def _norm(self, output: object) -> Tensor:
        return self._plan.pooled(rerun.norms([output]))


def _beyond_rounding(errors: Tensor, norms: Tensor, precision: float, blurred: Callable[[int], Tensor]) -> Tensor:
    """Tell which errors of outputs with these norms rounding does not explain; `blurred` measures it, given a seed."""
    limits = max(1e-5, precision / 4) * norms
    for seed in range(ROUNDINGS):  # where a row looks at one key, few of them may show another one
        if bool((errors <= limits).all()):
            break
        limits = limits.fmax(4 * blurred(seed))
    return ~(errors <= limits)


def _coarse(precision: float) -> str:
    """Say what else a difference may come from where the coarsest dtype is of half precision."""
    if precision <= torch.finfo(torch.float32).eps:
        return ""
    return ". Or half precision is too coarse to tell: call model.float(), run a forward and fold then"
