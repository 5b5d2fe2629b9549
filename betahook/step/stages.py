"""The stages of `Hook.step`: check, pool over ranks, observe, control, finish; and afterwards `explain`.

Each reads and writes the `State`; nothing but `explain` reads a value back to the host.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch
from torch import Tensor

from betahook.control import base
from betahook.control.base import DECADES, Controller, Observation
from betahook.control.notes import Note, joined, pooled
from betahook.layer import Layers
from betahook.measure import statistics
from betahook.state import State
from betahook.step import training_loss
from betahook.step.loss_scale import LossScale
from betahook.tap import interface

logger = logging.getLogger(__name__)


def check_seen(state: State) -> None:
    """Refuse a first step before any attention was seen; warn of one that measured none."""
    if state.steps > 0:
        return
    # A rank may be idle in the first step; alone, it is a sign that the tap is passed by.
    if not (state.seen or statistics.is_distributed()):
        raise RuntimeError(
            "step() before any attention of the hooked layers was seen: run a forward of the model first. If one ran, "
            f"{interface.UNKNOWN}"
        )
    if state.seen and not (state.recorded or state.refused):
        logger.warning(
            "no attention was measured before the first step(): the hooked layers ran in evaluation mode or under "
            "torch.no_grad only, and beta stays where it is. Call model.train() and run the forward with gradients, or "
            'attach(..., when="always")'
        )


def pool(state: State, layers: Layers, loss_scale: LossScale) -> Tensor:
    """Add up the sums of all ranks; they become the recent ones. Return which heads they measured, `[heads]`."""
    table = state.collect()
    if loss_scale.skipped or loss_scale.of_step != 1:
        # A NaN tells all ranks that the step was skipped on one.
        table[statistics.ROW["sensitivity"]] /= float("nan") if loss_scale.skipped else loss_scale.of_step
    moments = state.moments
    if statistics.is_distributed():
        own = torch.where(state.factors.own.isnan(), state.beta_default, state.factors.own)
        table, moments, pooled = statistics.all_reduce(table, moments, own)
        state.beta_default.copy_(pooled)
    state.recent, state.recent_moments, measured = latest(state, table, moments)
    if torch.distributed.is_available() and torch.distributed.is_initialized():  # else nothing is sharded
        layers.read_weights(state.turn, sharded=True)
    return measured


def latest(state: State, table: Tensor, moments: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return a table and moments with what was last measured of heads that are idle in them, and which are not."""
    measured = table[statistics.ROW["pairs"]] > 0
    by_component = measured.repeat_interleave(state.widths, output_size=moments.shape[1])
    kept = torch.where(by_component, moments, state.recent_moments)
    return statistics.keep_measured(table, state.recent, measured), kept, measured


def observe(state: State, layers: Layers) -> tuple[Tensor, Observation]:
    """Return beta `[units]` and what else the controllers may look at."""
    units = state.units
    beta, default = units.geometric_mean(torch.stack([state.current_beta, state.beta_default], 1)).unbind(1)
    observed = units.observe(state.recent, state.recent_moments, state.widths)

    def predicted_std() -> Tensor:
        layers.read_weights()
        return units.predicted_std(observed, units.weight_std(state.weights))

    return beta, Observation(
        beta_default=default,
        statistics=observed,
        predicted_std=predicted_std,
        overflow=state.overflow,
        step=state.steps - state.skipped_steps,
        loss=lambda: training_loss.pooled(state),
        spectral_ratio=lambda: torch.stack([x.spectral_ratio().to(beta) for x in layers.values()]).max(),
    )


def control(state: State, controllers: Sequence[Controller], beta: Tensor, observation: Observation) -> None:
    """Run the controllers and write the beta that they choose: a move multiplies all heads of a unit alike."""
    chosen, state.memories = base.apply(controllers, beta, observation, state.memories)
    if chosen is not beta:
        # Heads that differ keep their ratios, and a layer that does not move keeps the bits of every head.
        new, old = state.units.spread(chosen), state.units.spread(beta)
        state.beta.copy_(torch.where(new != old, new * (state.current_beta / old), state.beta))
    state.release_refused()


def finish(
    state: State, controllers: Sequence[Controller], observation: Observation, loss_scale: LossScale, interval: int
) -> None:
    """Count the step and begin the next one."""
    state.steps += 1
    state.loss_scale = loss_scale.of_next
    if loss_scale.skipped:
        state.skipped_steps += 1
    else:  # a skipped step is nothing to warn about
        broken = state.units.spread(~observation.statistics.finite) & (state.nonfinite_since == 0)
        state.nonfinite_since.masked_fill_(broken, state.steps)
    state.start_step(turn(state, controllers, interval))


def turn(state: State, controllers: Sequence[Controller], interval: int) -> range:
    """Return the layers to measure in the next step: as many in one step as in another, each once in `interval` steps.

    All of them in the first step and while a controller is in its opening. A function of counters that every rank and
    every resumed run have alike.
    """
    layers, batch = len(state.ranges), state.steps - state.skipped_steps
    if batch < max(1, *(controller.opening_batches for controller in controllers)):
        return range(layers)
    first, last = (-(-part * layers // interval) for part in (batch % interval, batch % interval + 1))
    return range(first, last)


def explain(state: State, layers: Layers, controllers: Sequence[Controller]) -> list[Note]:
    """Ask the controllers about their last update: one note a layer. Reads the device back."""
    beta, observation = observe(state, layers)
    held = torch.stack([observation.statistics.finite, base.at_bound(beta, observation.beta_default)]).T.tolist()
    notes = [[Note(reason=_held(*each))] for each in held]
    for controller, memory in zip(controllers, state.memories, strict=True):
        if memory or not controller.start(beta):  # it has run, or needs no memory
            for unit, note in enumerate(controller.explain(beta, observation, memory)):
                notes[unit].append(note)
    units = [joined(of_unit) for of_unit in notes]
    return units if len(units) == len(layers) else [pooled(units[place.heads]) for place in state.ranges]


def _held(finite: bool, at_bound: bool) -> str:
    """Reasons for which no controller moves beta, in words."""
    if not finite:
        return "held by a NaN, an infinity or a skipped optimizer step"
    return f"held at its bound, {10**DECADES:g} times the model's own or a thousandth of it" if at_bound else ""
