"""Check a fold on the input of the model's last forward, before any change of the weights becomes permanent.

`fold` calls `exact_places`, which scales weights and restores them. Afterwards the model, its hook and the random state
are as they were, even after an error.
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
from betahook.models.torch_calls import copied
from betahook.tap.override import Override

ROUNDINGS = 5
"""Maximum number of measurements of the rounding error: for a scalar output, a single one may be small by chance."""


def exact_places(plan: FoldPlan) -> dict[AttentionLayer, Scaling]:
    """Run the model on its last input, and find for each layer the place where a factor acts exactly as its beta does.

    In the first run, each layer reruns alone with every candidate place. The second run has all weights folded, which
    shows uses of a weight outside its layer. If its output differs by more than float32 rounding, up to `ROUNDINGS`
    further runs measure the rounding of the folded weights.

    Raises:
        FoldError: a layer has no such place, the model does not run again or does not use the layer, or its output
            differs.
    """
    if plan.is_on_any_rank(plan.hook.last_call.input is None):
        raise FoldError(
            "fold() checks itself on the input of the model's last forward, but there was none, or it used a cache. "
            f"Run {type(plan.hook.model).__name__}, or the part of it that contains all hooked layers, once without a "
            "cache. If its parts are called separately, call a forward that runs them all, or attach to each part"
        )
    with rerun.without_side_effects(plan.hook):
        places, expected, precision = _check_layers(plan)
        _check_model(plan, places, expected, precision)
    return places


def _check_layers(plan: FoldPlan) -> tuple[dict[AttentionLayer, Scaling], list[Tensor], float]:
    """Return an exact place for each layer, the outputs of the hooked model, and the coarsest machine epsilon met."""
    exact: dict[AttentionLayer, list[Scaling]] = {}
    precision = 0.0
    left = _calls_on_all_ranks(plan)  # calls still to be checked; ranks check in lockstep
    random_state = RandomState(plan.hook.model)  # once: it searches the whole model, which is slow to do per layer

    def checked(layer: AttentionLayer, forward: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(forward)
        def run(*args: Any, **kwargs: Any) -> Any:
            nonlocal precision
            if not left[layer]:
                return forward(*args, **kwargs)
            left[layer] -= 1
            given = copied((args, kwargs))
            output = forward(*args, **kwargs)
            candidates = exact.get(layer, plan.places(layer))  # those that passed earlier calls in this forward
            exact[layer] = _LayerCheck(plan, layer, random_state, forward, *given).exact(candidates)
            precision = max(precision, rerun.coarsest_eps([output, exact[layer][0].parameters]))
            return output

        return run

    with ExitStack() as undo:
        for layer in plan.gains:
            # Not a forward hook: a block may call `attention.forward`, and FSDP 2 frees the weights in a hook.
            Override(layer.module, "forward", checked(layer, layer.module.forward), undo)
        expected = _run_model(plan)
    modules = set(plan.hook.model.modules())
    for layer in plan.gains:
        if layer not in exact:
            if layer.module not in modules:
                raise plan.error(_lost(layer), layer, can_keep=False)  # `restore` would need the module too
            where = ", here or on another rank" if plan.is_sharded else ""
            raise plan.error(f"the last forward of the model did not use it{where}; run one that does", layer)
    return {layer: places[0] for layer, places in exact.items()}, expected, max(precision, rerun.coarsest_eps(expected))


def _calls_on_all_ranks(plan: FoldPlan) -> dict[AttentionLayer, float]:
    """Return how many calls of each layer to check: all of them or, if the model is sharded, as many as every rank has.

    In the latter case, the model runs once to count them, since ranks wait for one another in each check.
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
        "the module is no longer part of the model; another one in its place does not have its beta. Fold before you "
        "remove or replace layers. If it was only removed, give it the model's own beta and fold again: layer = "
        f"hook.layers[{layer.name!r}]; layer.head_beta = layer.head_beta_default"
    )


def _check_model(
    plan: FoldPlan, places: dict[AttentionLayer, Scaling], expected: list[Tensor], precision: float
) -> None:
    """Compare the outputs of the model with all weights folded, which shows uses of a weight outside its layer."""

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
    """Run the hooked model on its last input; if the model is sharded, an error on one rank is raised on all."""
    hook, output, error = plan.hook, list[Tensor](), None
    try:
        output = rerun.run_model(hook)
    except FoldError:  # from the check of a layer, raised on all ranks
        raise
    except Exception as raised:
        error = raised
    if plan.is_on_any_rank(error is not None):
        raise plan.error(rerun.failure_message(hook, error)) from error
    return output


class _LayerCheck:
    """The checks of one layer, which rerun it with the arguments of one call."""

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
            # Drop a cache that the model made itself: this call has filled it.
            return None if hasattr(value, "get_seq_length") else value

        self._plan = plan
        self._layer = layer
        self._random_state = random_state
        self._forward = forward
        self._given = [kept(value) for value in args], {name: kept(value) for name, value in kwargs.items()}
        self._gain = plan.gains[layer]
        self._own = torch.ones_like(self._gain)
        self._probe = self._gain / self._gain.max() / 2  # at most 0.5, so far from 1

    def exact(self, places: list[Scaling]) -> list[Scaling]:
        """Return the places where a factor acts exactly as beta does.

        Raises:
            FoldError: there are none; the message gives the probable cause.
        """
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
        else:  # for example, every query sees a single key in this forward
            reason = (
                "its output on the input of the last forward does not depend on beta; run one where it does. Or leave "
                "it out with attach(layers=...)"
            )
        raise self._plan.error(reason, self._layer)

    def _run(self, gain: Tensor) -> object:
        """Run the layer with `gain [heads]` in place of `beta / beta_default`, on the same random numbers each time."""
        output, error = None, None
        try:
            # Some layers use dropout in evaluation mode too, perhaps on a device that only holds weights during a call.
            with self._random_state.preserved(self._layer.module.parameters()), self._layer.acting(gain):
                args, kwargs = copied(self._given)
                output = self._forward(*args, **kwargs)
        except RuntimeError as raised:
            error = raised
        if self._plan.is_on_any_rank(error is not None):
            found = rerun.ELSEWHERE if error is None else error
            raise self._plan.error(f"it does not run twice on one input ({found})", self._layer) from error
        return output

    def _run_scaled(self, place: Scaling, factors: Tensor, error: float = 0.0, seed: int = 0) -> object:
        """Run the layer with scaled weights and the model's own beta."""
        with place.scaled(factors, error, seed):
            return self._run(self._own)

    def _is_exact(self, place: Scaling) -> bool:
        """Return True if scaling a place has the same effect as the layer's gain, and as a gain far from 1."""
        plain = self._run(self._own)
        for factors in (self._probe, self._gain):
            expected, actual = self._run(factors), self._run_scaled(place, factors)
            error = self._distance(actual, expected)
            shown = factors is not self._probe or bool(error < self._distance(plain, expected) / 4)
            # No visible effect is only acceptable if every query had a single key in training too.
            if not shown and self._plan.is_on_any_rank(not has_one_key(self._layer)):
                return False
            precision = rerun.coarsest_eps([expected, place.parameters])
            blurred = partial(self._blurred, actual, place, factors, precision)
            if _beyond_rounding(error, self._norm(expected), precision, blurred):
                return False
        return True

    def _blurred(self, actual: object, place: Scaling, factors: Tensor, precision: float, seed: int) -> Tensor:
        """Return by how much rounding of the scaled weights changes the output."""
        if self._is_random:  # its noise is no rounding, and would excuse any error
            return torch.zeros(1, device="cpu")
        return self._distance(actual, self._run_scaled(place, factors, precision, seed))

    @cached_property
    def _is_random(self) -> bool:
        """True if two equal runs differ by more than rounding, as with random numbers that torch does not draw."""
        one, other = self._run(self._own), self._run(self._own)
        return bool(self._distance(one, other) > max(1e-5, rerun.coarsest_eps(one)) * self._norm(one))

    def _distance(self, one: object, other: object) -> Tensor:
        return self._plan.pooled(rerun.distances([one], [other]))

    def _norm(self, output: object) -> Tensor:
        return self._plan.pooled(rerun.norms([output]))


def _beyond_rounding(errors: Tensor, norms: Tensor, precision: float, blurred: Callable[[int], Tensor]) -> Tensor:
    """Return which errors are larger than rounding explains, boolean like `errors`.

    `norms` are those of the outputs, and `blurred(seed)` measures the errors that rounding alone causes.
    """
    limits = max(1e-5, precision / 4) * norms
    for seed in range(ROUNDINGS):  # where a row selects one key, only some seeds may select another
        if bool((errors <= limits).all()):
            break
        limits = limits.fmax(4 * blurred(seed))
    return ~(errors <= limits)


def _coarse(precision: float) -> str:
    """Return a hint that half precision may cause the difference; empty if the coarsest dtype is finer than that."""
    if precision <= torch.finfo(torch.float32).eps:
        return ""
    return ". Or half precision is too coarse to tell: call model.float(), run a forward and fold then"
