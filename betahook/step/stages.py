"""The stages of `Hook.step`: add; if anything is due, pool over ranks and control; finish. For reports, `explain`.

Between two poolings all sums except the loss keep adding up, as over the micro-batches of a step. Each stage reads and
writes the `State`. Only `explain` reads a value back to the host.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from math import ceil

import torch
from torch import Tensor

from betahook.control import base
from betahook.control.base import DECADES, Controller, Observation
from betahook.control.notes import Note, checked, combine_controller_notes, combine_head_notes
from betahook.layer import Layers
from betahook.measure import ranks, statistics
from betahook.measure.groups import GroupBeta
from betahook.state import pending
from betahook.state.left_alone import has_refused, release_refused
from betahook.state.ranges import heads_of
from betahook.state.state import State, is_pooled
from betahook.step import training_loss
from betahook.step.loss_scale import LossScale


def add(state: State, layers: Layers, loss_scale: LossScale) -> None:
    """Record the sensitivities of this step, to be added later to those since the last pooling."""
    distributed = torch.distributed
    if state.layers_due and distributed.is_available() and distributed.is_initialized():  # else nothing is sharded
        layers.read_weights(state.layers_due, sharded=True)
    state.waiting.add(state.table, state.moments)
    state.all_watched = state.beta_acts
    if loss_scale.skipped:  # nothing to learn from, and nothing to warn about
        state.settle()  # waiting steps must be consecutive
        _forget_nonfinite(state)
        return
    state.batches += 1
    watched = range(len(state.ranges)) if state.all_watched else state.layers_due
    if not watched:
        return
    heads, last = heads_of(state.ranges, watched), state.pending[-1:]
    if last and (last[0].heads, last[0].number) != (heads, state.steps):
        state.settle()
    gradients, gain = state.gains.gradients(watched, heads)
    sums = state.table[:, heads].sum(0)
    state.pending.append(pending.Step(state.steps + 1, heads, gradients, gain, loss_scale.of_step, sums))
    if len(state.pending) == pending.MOST:
        state.settle()


def _forget_nonfinite(state: State) -> None:
    """Forget everything measured since the last pooling in heads whose sums are not finite."""
    broken = state.table.sum(0) * 0 != 0
    state.table.masked_fill_(broken, 0)
    state.moments.masked_fill_(state.by_component(broken), 0)


def is_due(state: State, controllers: Sequence[Controller], interval: int, loss_scale: LossScale) -> bool:
    """Return whether to pool in this step: the first one, every `interval` steps, and when a controller is due.

    This depends only on numbers that are the same on every rank and in every resumed run. A skipped step ends no
    window, since the next step has the same batch number.
    """
    batch = state.batch
    due = batch == 0 or (batch + 1) % interval == 0 or any(rule.uses_loss or rule.is_due(batch) for rule in controllers)
    return due and not (loss_scale.skipped and state.batches > 0)


def pool(state: State, *, skipped: bool = False, begun: range = range(0)) -> Tensor:
    """Add the sums over all ranks and keep them as the recent ones; return which heads were measured, `[heads]`.

    Args:
        state: the state.
        skipped: True if the optimizer skipped its step.
        begun: layers measured in a step that has not ended, which may therefore have no sensitivity yet.
    """
    state.settle()
    if skipped:  # NaN shows all ranks that the step was skipped on one
        state.window.fill_(torch.nan)
    table, summed, moments = _over_ranks(state) if is_pooled(state) else (state.table, state.window, state.moments)
    before = state.recent[statistics.ROW["sensitivity"]]
    state.recent, state.recent_moments, measured = state.latest(table, moments)
    sensitivity = state.recent[statistics.ROW["sensitivity"]]
    if state.all_watched:
        torch.div(*summed, out=sensitivity)  # NaN where none was finite
    else:  # a layer that was not due keeps its last sensitivity
        has_ended = measured
        if begun:
            heads, has_ended = heads_of(state.ranges, begun), measured.clone()
            has_ended[heads] &= summed[1, heads] > 0
        torch.where(has_ended, torch.div(*summed), before, out=sensitivity)
    return measured


def _over_ranks(state: State) -> tuple[Tensor, Tensor, Tensor]:
    """Add table, window and moments over all ranks, and update what else must be the same in the state of each."""
    of_this_rank = torch.where(state.gains.default.isnan(), state.beta_default, state.gains.default)
    since, next_step = state.nonfinite_since, state.steps + 2
    # All ranks receive the largest age, from the rank that saw it first: 1 for this step, 0 for never.
    age = torch.where(since > 0, next_step - since, 0)
    table, summed, moments, default, age, left_alone = statistics.all_reduce(
        state.table, state.window, state.moments, of_this_rank, age, state.left_alone
    )
    state.beta_default.copy_(default)
    since.copy_(torch.where(age > 0, next_step - age, 0))
    _leave_alone(state, table, summed, left_alone)
    return table, summed, moments


def _leave_alone(state: State, table: Tensor, summed: Tensor, left_alone: Tensor) -> None:
    """Treat heads that any rank leaves alone as not measured in the pooled sums, without reading back which."""
    state.left_alone, state.refusals_are_known = left_alone, False
    for sums in (table[statistics.ROW["pairs"]], summed, state.recent):
        sums.masked_fill_(left_alone, 0)
    state.recent_moments.masked_fill_(state.by_component(left_alone), 0)
    release_refused(state)


@torch.inference_mode(False)  # its tensors could not be written to outside of it
@torch.no_grad()
def refreshed(state: State, layers: Layers) -> State:
    """Bring sums and weight statistics in the state up to date for a report, and return the state.

    With several ranks nothing is pooled, since one rank may ask for metrics alone and would wait for ever.
    """
    layers.read_weights()
    state.settle()
    if state.batches > 0 and not is_pooled(state):
        pool(state, begun=state.layers_due)
    return state


def observe(state: State, layers: Layers) -> tuple[GroupBeta, Observation]:
    """Return the beta of each unit, pooled over its heads, and the observation for the controllers."""
    units, current = state.units, state.current_beta
    pooled, default = units.geometric_mean(torch.stack([current, state.beta_default], 1)).unbind(1)
    beta = units.compare(pooled, current)
    observed = units.observe(state.recent, state.recent_moments, beta.ratios)

    def predicted_std() -> Tensor:
        layers.read_weights()
        return units.predicted_std(observed, units.weight_std(state.weights, beta.ratios))

    def spectral_ratio() -> Tensor:
        first = state.first_spectral_ratio if state.batch == 0 else None
        ratio = layers.spectral_ratio() if first is None else first
        if not is_pooled(state):
            return ratio
        # A rank that was idle in the first batch only has weights that are already updated.
        is_late = state.batch == 0 and not state.seen
        return ranks.largest_over_ranks(torch.full_like(ratio, torch.nan) if is_late else ratio, state.table)

    return beta, Observation(
        beta_default=default,
        statistics=observed,
        predicted_std=predicted_std,
        overflow=state.overflow,
        step=state.batch,
        batches=state.batches,
        loss=lambda: training_loss.pooled(state),
        has_loss=lambda: training_loss.was_recorded(state),
        spectral_ratio=spectral_ratio,
    )


def control(state: State, layers: Layers, controllers: Sequence[Controller]) -> None:
    """Run the controllers and write the beta that they choose, by the same factor for all heads of a unit."""
    if not any(controller.moves_beta for controller in controllers):
        return
    beta, observation = observe(state, layers)
    chosen, state.memories = base.apply(controllers, beta.of_group, observation, state.memories)
    if chosen is not beta.of_group:
        # Heads of different beta keep their ratios, and where a unit does not move, every head keeps its exact bits.
        new = state.units.spread(chosen)
        moved = new != beta.of_head
        if has_refused(state):
            moved &= ~state.left_alone
        torch.where(moved, new if beta.ratios is None else new * beta.ratios, state.beta, out=state.beta)


@contextmanager
def pooling(state: State, loss_scale: LossScale) -> Iterator[Tensor]:
    """Pool the sums, yield which heads were measured, and reset the sums at the end, whatever happens."""
    measured = pool(state, skipped=loss_scale.skipped)
    try:
        yield measured
    finally:
        for sums in (state.table, state.moments, state.window):
            sums.zero_()
        if has_refused(state):
            state.lost_beta.fill_(torch.nan)  # from here on, the weights are trained with the model's own beta
        state.batches = 0


def finish(state: State, controllers: Sequence[Controller], loss_scale: LossScale, interval: int) -> None:
    """Count the step and prepare the next one."""
    state.steps += 1
    state.reported.idle_steps += 1
    state.skipped_steps += loss_scale.skipped
    state.loss_scale = loss_scale.of_next
    training_loss.forget(state, controllers)
    state.gains.set_sensitivity(None)
    state.layers_due = layers_due(state, controllers, interval)
    if state.has_broken_graphs:
        torch.compiler.reset()
        state.has_broken_graphs = False
        state.resets += 1


def layers_due(state: State, controllers: Sequence[Controller], interval: int) -> range:
    """Return the layers to measure in the next step: each one once in `interval` steps, in pairs or equal groups.

    All layers are measured in the first step and during a controller's opening. Two small layers measured together cost
    little more than one. This depends only on counters that are the same on every rank and in every resumed run.
    """
    layers, batch = len(state.ranges), state.batch
    if batch < max(1, *(controller.opening_batches for controller in controllers)):
        return range(layers)
    groups = min(interval, ceil(layers / 2))
    first, last = (ceil(part * groups / interval) for part in (batch % interval, batch % interval + 1))
    return range(ceil(first * layers / groups), ceil(last * layers / groups))


def explain(state: State, layers: Layers, controllers: Sequence[Controller]) -> list[Note]:
    """Let the controllers explain their last update, in one note per layer. Synchronises with the device."""
    pooled_beta, observation = observe(state, layers)
    beta = pooled_beta.of_group
    moves = any(controller.moves_beta for controller in controllers)
    at_bound = base.is_at_bound(beta, observation.beta_default) & moves
    is_above = beta > observation.beta_default
    has_one_key = (observation.statistics.flat_entropy == 0) & moves
    held = torch.stack([observation.statistics.finite, has_one_key, at_bound, is_above]).T.tolist()
    notes = [[Note(reason=_held(*each))] for each in held]
    for controller, memory in zip(controllers, state.memories, strict=True):
        if memory or not controller.start(beta):  # it has run, or needs no memory
            said = controller.explain(beta, observation, memory)
            for unit, note in enumerate(checked(controller, said, len(beta))):
                notes[unit].append(note)
    units = [combine_controller_notes(of_unit) for of_unit in notes]
    of_layers = units if len(units) == len(layers) else [combine_head_notes(units[each.heads]) for each in state.ranges]
    alone = Note(reason="left alone")
    return [alone if layer.refusal else note for layer, note in zip(layers.values(), of_layers, strict=True)]


def _held(finite: bool, has_one_key: bool, at_bound: bool, is_above: bool) -> str:
    """Return the reason why no controller can move beta, in words; empty if there is none."""
    if not finite:
        return "held by a NaN, an infinity or a skipped optimizer step"
    if has_one_key:
        return "without effect, since each row has but one key"
    bound = f"upper bound, {10**DECADES:g} times" if is_above else f"lower bound, {10**-DECADES:g} times"
    return f"held at its {bound} the model's own" if at_bound else ""
