"""Clipping: the stage of `Hook.step` that scales the weights of single heads, as the hook's `Clip` controllers ask.

Nothing here reads a value back to the host except the check of each layer. It takes place in the first step in which
the layer is used, or later if the output did not depend on the layer then.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import cached_property

import torch
from torch import Tensor, nn

from betahook import compat, rerun
from betahook.control.base import Controller
from betahook.control.rules import Clip
from betahook.layer import AttentionLayer, Layers
from betahook.measure import ranks
from betahook.models import materialise
from betahook.models.discovery import shown_name
from betahook.models.projections import added_queries
from betahook.models.scaling import NoScalingError, Scaling, find_scalings
from betahook.options import UnsupportedModelError
from betahook.rerun import Hooked
from betahook.state.ranges import HeadRange
from betahook.state.state import State

logger = logging.getLogger(__name__)
NOT_PROPORTIONAL = (
    "the model's output shows that its scores are not proportional to its weights, as behind a norm without a weight, "
    "or that something else uses them"
)
NO_INPUT = (
    "on the input of the model's last forward that scaled weights act as beta does, but there was none, or it had a "
    "cache. Run the forward of hook.model, or of the part of it that holds all hooked layers, once without a cache; "
    "evaluation mode and torch.no_grad() will do"
)
NO_EFFECT = (
    "that scaled weights act as beta does, and what the model returned on the inputs that were tried does not depend "
    "on beta there. It tries again at growing distances, on the input of the last forward before hook.step(): let that "
    "forward use these layers"
)
PATIENCE = 16
"""Number of steps in which a layer may have no effect, as in a warm-up, before a warning."""
EXPONENTS = -4, 8
"""Range of exponents e for which bfloat16 holds `2**e - 1` and `2**e / 16 - 1` exactly."""
SAME, DIFFERENT, FAILED = range(3)
"""Results of comparing outputs on one rank; the largest over all ranks counts."""


class Clipping:
    """The stage that applies the `Clip`s of a hook after its other controllers; does nothing if there are none.

    Raises:
        UnsupportedModelError: a layer has no weights to scale; the message says which and why.
    """

    def __init__(self, layers: Layers, state: State, controllers: Sequence[Controller]) -> None:
        self._state = state
        self._rules = [controller for controller in controllers if isinstance(controller, Clip)]
        writes = not all(rule.log_only for rule in self._rules)
        self._clipped = [_Clipped(*each) for each in zip(layers.values(), state.ranges, strict=True) if writes]
        self._is_sharded: bool | None = None
        self._has_warned = False

    def step(self, hook: Hooked, measured: Tensor) -> None:
        """Count the heads that exceed a threshold, and scale their weights.

        Only heads `measured` in this step (boolean `[heads]`) count, since an older maximum says nothing about weights
        that were clipped since.

        Raises:
            UnsupportedModelError: scaled weights do not act as beta does; the message names the layers.
        """
        if not self._rules:
            return
        state, beta = self._state, self._state.current_beta
        observed = state.layers.by_head().observe(state.recent, state.recent_moments)
        healthy = measured & observed.finite
        factors, exceeding = torch.ones_like(beta), torch.zeros_like(healthy)
        for rule in self._rules:
            clipped = torch.where(healthy, rule.factor(beta, observed), 1.0)
            exceeding |= clipped < 1
            if not rule.log_only:
                factors = torch.minimum(factors, clipped)
        state.clips += exceeding
        if self._clipped:
            self._scale(hook, factors)

    @torch.no_grad()
    def _scale(self, hook: Hooked, factors: Tensor) -> None:
        """Scale weights so that the scores of each head take its factor, `[heads]`; a factor of 1 keeps every bit.

        Layers that are not checked yet are not scaled.

        All ranks must call this with the same factors.
        """
        if self._is_sharded is None:  # adapters and sharding may be added after attach
            self._is_sharded = any(compat.is_fsdp2(module) for module in hook.model.modules())
            if any(compat.is_adapter(module) for module in hook.model.modules()):
                logger.warning(
                    "Clip scales the weights below an adapter too, which a saved adapter does not contain: call "
                    "model.merge_and_unload() before you save"
                )
        self._check(hook)
        if self._is_sharded:
            materialise.reshard(hook.model)
        for each in (each for each in self._clipped if each.is_checked):
            each.weights().scale(factors[each.heads])

    def _check(self, hook: Hooked) -> None:
        """Check each layer once, on the input of the last forward pass.

        A layer is checked in the first step in which it is used and there is such an input. If the output does not
        depend on the layer, e.g. behind an output projection of zeros, it is tried again 1, 2, 4, ... steps after the
        first try. The ranks communicate, so each must reach every collective call. They do, since after pooling beta
        and the layers left alone are the same on all ranks.
        """
        unchecked = [each for each in self._clipped if not each.is_checked and each.layer.refusal is None]
        used = [each for each in unchecked if not math.isnan(each.layer.beta_default)]
        due = [each for each in used if each.waited & (each.waited - 1) == 0]  # 0 and powers of 2
        if due and not self._on_any_rank(hook.last_call.input is not None):
            self._warn_of_waiting(due, NO_INPUT)
            return
        if due:
            self._find_again(due)
            with rerun.without_side_effects(hook), _powers_of_2(hook, [each.weights() for each in due]):
                self._try(_Trial(hook, due, self._state.device))
        for each in used:
            each.waited += 1
        if late := [each for each in due if not each.is_checked and each.waited > PATIENCE]:
            self._warn_of_waiting(late, NO_EFFECT)

    def _try(self, trial: _Trial) -> None:
        """Mark layers whose beta changes the output as checked; raise on all ranks if their weights act otherwise."""
        shown = [each for each in trial.due if trial.differs([each], beta_alone=True)]
        if shown and trial.differs(shown):
            wrong = [each for each in shown if not self._settle(trial, each)]
            if wrong or trial.differs(shown):
                raise _refusal([each.layer for each in wrong or shown], NOT_PROPORTIONAL)
        for each in shown:
            each.is_checked = True

    def _warn_of_waiting(self, waiting: Sequence[_Clipped], reason: str) -> None:
        if not self._has_warned:
            self._has_warned = True
            names = ", ".join(shown_name(each.layer.name) for each in waiting)
            logger.warning("Clip does not scale the weights of %s yet: it first checks %s", names, reason)

    def _find_again(self, due: Sequence[_Clipped]) -> None:
        """Find the weights of layers anew; raise on all ranks if any rank finds weights that take no factor."""
        error: UnsupportedModelError | None = None
        try:
            for each in due:
                each.weights(anew=True)  # the first forward pass may have revealed other W_q and W_k
        except UnsupportedModelError as found:
            error = found
        if self._on_any_rank(error is not None):
            raise error or UnsupportedModelError(f"cannot clip {rerun.ELSEWHERE}")

    def _settle(self, trial: _Trial, clipped: _Clipped) -> bool:
        """Choose the first candidate weights of a layer that act like beta; return False if none do."""
        fewest, _ = ranks.range_over_ranks(len(clipped.scalings), self._state.device)
        for choice in range(fewest):
            clipped.choice = choice
            if not trial.differs([clipped]):
                return True
        return False

    def _on_any_rank(self, here: bool) -> bool:
        _, largest = ranks.range_over_ranks(int(here), self._state.device)
        return largest > 0


class _Trial:
    """Runs of the model on its last input, with other betas and weights in the layers that are `due`."""

    def __init__(self, hook: Hooked, due: Sequence[_Clipped], device: torch.device) -> None:
        self.due = due
        self._hook = hook
        self._device = device

    def differs(self, clipped: Sequence[_Clipped], *, beta_alone: bool = False) -> bool:
        """Return whether scaled weights and a compensating beta, or that beta alone, change the output on any rank.

        Raises:
            UnsupportedModelError: the model cannot be run again on some rank; raised on all ranks.
        """
        scalings = [(each.layer, each.weights()) for each in clipped]
        answer, error = SAME, None
        if self._hook.last_call.input is not None:  # an idle rank leaves it to the others
            try:
                answer = DIFFERENT if self._differs_here(scalings, beta_alone=beta_alone) else SAME
            except Exception as raised:  # the model may raise anything, and the other ranks wait for an answer
                answer, error = FAILED, raised
        _, worst = ranks.range_over_ranks(answer, self._device)
        if worst == FAILED:
            raise _refusal([each.layer for each in self.due], rerun.failure_message(self._hook, error)) from error
        return worst == DIFFERENT

    def _differs_here(self, scalings: Sequence[tuple[AttentionLayer, Scaling]], *, beta_alone: bool) -> bool:
        """Compare on this rank; the factors are powers of 4, whose square roots are exact."""
        expected, noise = self._unchanged
        with ExitStack() as undo:
            for layer, weights in scalings:
                factors = 4.0 ** -(1 + torch.arange(layer.heads, device=layer.current_gain.device) % 2)
                factors = factors.amin().expand_as(factors) if weights.as_one else factors
                undo.enter_context(layer.acting(layer.current_gain / factors))
                if not beta_alone:
                    undo.enter_context(weights.scaled(factors))
            actual = rerun.run_model(self._hook)
        limits = 1e-5 * rerun.norms(expected) + 4 * noise
        return not bool((rerun.distances(actual, expected) <= limits).all())

    @cached_property
    def _unchanged(self) -> tuple[list[Tensor], Tensor]:
        """The output of the unchanged model, and the distance of a second run's output from it."""
        expected = rerun.run_model(self._hook)
        return expected, rerun.distances(rerun.run_model(self._hook), expected)


@contextmanager
def _powers_of_2(hook: Hooked, scalings: Sequence[Scaling]) -> Iterator[None]:
    """Set weights `w` of norms that multiply by `1 + w` so that `1 + w` is a power of 2, which scales without rounding.

    In half precision, the rounding of these weights alone would change the output, more with every layer.
    """
    materialise.reshard(hook.model)
    with ExitStack() as undo:
        for scaling in scalings:
            offset = [weight for weight in scaling.weights if weight.offset]
            undo.enter_context(replace(scaling, weights=offset).preserved())
            for weight in offset:
                stored = materialise.local(weight.parameter.detach())
                exponents = (stored.float() + weight.offset).abs().log2().round().clamp(*EXPONENTS)
                stored.copy_(2.0**exponents - weight.offset)
        yield


class _Clipped:
    """A layer and the weights that take its factors, one of several candidates `scalings`, see `find_scalings`.

    Attributes:
        choice: index of the candidate in use; the first one unless it proves not to act like beta.
        is_checked: True once a run of the model has confirmed that the weights act like beta.
        waited: steps since the first one in which the layer could be checked.
    """

    def __init__(self, layer: AttentionLayer, head_range: HeadRange) -> None:
        self.layer = layer
        self.heads = head_range.heads
        self.choice = 0
        self.is_checked = False
        self.waited = 0
        self._owners: list[nn.Module] | None = None
        self.weights()

    def weights(self, *, anew: bool = False) -> Scaling:
        """Return the weights, found anew if adapters were added or removed; raise if they take no factor."""
        layer, pair = self.layer, self.layer.projections
        projections = () if pair is None else (*pair, *added_queries(layer.module, pair[0]))
        owners = [owner for projection in projections for owner in projection.owners]
        try:
            if anew or owners != self._owners:
                self.scalings = list(find_scalings(layer.module, pair, layer.heads, layer.head_dim))
                self._owners = owners
            self.scalings[self.choice].check()  # they may be pruned or parametrised by now
        except NoScalingError as error:
            raise _refusal([layer], error) from error
        return self.scalings[self.choice]


def _refusal(layers: Sequence[AttentionLayer], reason: object) -> UnsupportedModelError:
    """Return the error for layers whose weights take no factor, with advice."""
    names, kind = ", ".join(shown_name(layer.name) for layer in layers), type(layers[0].module).__name__
    return UnsupportedModelError(
        f"cannot clip {names} ({kind}): {reason}. Exclude the layer with attach(layers=...), or use Cap, which acts on "
        "beta"
    )
