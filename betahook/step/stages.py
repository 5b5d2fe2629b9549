"""The stages of `Hook.step`: add, where something is due pool over ranks and control, finish; and `explain`.

Between two poolings all sums but the loss go on adding up, as they do over the micro-batches of a step. Each stage
reads and writes the `State`. Only `explain` reads a value back to the host.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from math import ceil

import torch
from torch import Tensor

from betahook.control import base
from betahook.control.base import DECADES, Controller, Observation
from betahook.control.notes import Note, checked, joined, pooled
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
    """Take note of the sensitivities of this step, to be added to those since the last pooling."""
    distributed = torch.distributed
    if state.turn and distributed.is_available() and distributed.is_initialized():  # else nothing is sharded
        layers.read_weights(state.turn, sharded=True)
    state.waiting.add(state.table, state.moments)
    if loss_scale.skipped:  # nothing to learn from, and nothing to warn about
        state.settle()  # the steps that wait follow one another
        _forget_nonfinite(state)
        return
    state.batches += 1
    watched = range(len(state.ranges)) if state.beta_acts else state.turn
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
    """Forget all scores since the last pooling of heads whose sums are not finite."""
    broken = state.table.sum(0) * 0 != 0
    state.table.masked_fill_(broken, 0)
    state.moments.masked_fill_(state.by_component(broken), 0)


def is_due(state: State, controllers: Sequence[Controller], interval: int, loss_scale: LossScale) -> bool:
    """Tell if this step is pooled: a controller is due, or the metrics are, in the first step and every `interval`.

    A function of numbers that every rank and every resumed run have alike. A skipped step ends no window, since the
    next step has the same batch number.
    """
    batch = state.batch
    due = batch == 0 or (batch + 1) % interval == 0 or any(rule.uses_loss or rule.is_due(batch) for rule in controllers)
    return due and not (loss_scale.skipped and state.batches > 0)


def pool(state: State, *, skipped: bool = False, begun: range = range(0)) -> Tensor:
    """Add up the sums of all ranks; they become the recent ones. Return which heads they measured, `[heads]`.

    Args:
        state: the state.
        skipped: the optimizer skipped its step.
        begun: the layers that are measured in a step which has not ended: they may have no sensitivity yet.
    """
    state.settle()
    if skipped:  # tells all ranks that the step was skipped on one
        state.window.fill_(torch.nan)
    table, summed, moments = _over_ranks(state) if is_pooled(state) else (state.table, state.window, state.moments)
    before = state.recent[statistics.ROW["sensitivity"]]
    state.recent, state.recent_moments, measured = state.latest(table, moments)
    sensitivity = state.recent[statistics.ROW["sensitivity"]]
    if state.beta_acts:
        torch.div(*summed, out=sensitivity)  # NaN where none was finite
    else:  # a layer that had no turn keeps the last one
        has_ended = measured
        if begun:
            heads, has_ended = heads_of(state.ranges, begun), measured.clone()
            has_ended[heads] &= summed[1, heads] > 0
        torch.where(has_ended, torch.div(*summed), before, out=sensitivity)
    return measured


def _over_ranks(state: State) -> tuple[Tensor, Tensor, Tensor]:
    """Add up table, window and moments over all ranks, and give the state what else all of them must have alike."""
    own = torch.where(state.gains.own.isnan(), state.beta_default, state.gains.own)
    since, next_step = state.nonfinite_since, state.steps + 2
    # Of the ages all ranks get the largest, that of the rank that saw it first: 1 in this step, 0 stands for never.
    age = torch.where(since > 0, next_step - since, 0)
    table, summed, moments, default, age, left_alone = statistics.all_reduce(
        state.table, state.window, state.moments, own, age, state.left_alone
    )
    state.beta_default.copy_(default)
    since.copy_(torch.where(age > 0, next_step - age, 0))
    _leave_alone(state, table, summed, left_alone)
    return table, summed, moments


def _leave_alone(state: State, table: Tensor, summed: Tensor, left_alone: Tensor) -> None:
    """Take heads that any rank leaves alone for not measured on all, in pooled sums; nobody reads back which."""
    state.left_alone, state.refusals_are_known = left_alone, False
    for sums in (table[statistics.ROW["pairs"]], summed, state.recent):
        sums.masked_fill_(left_alone, 0)
    state.recent_moments.masked_fill_(state.by_component(left_alone), 0)
    release_refused(state)


@torch.inference_mode(False)  # its tensors could not be written to outside of it
@torch.no_grad()
def refreshed(state: State, layers: Layers) -> State:
    """Bring the state up to date for a report, and return it: its sums, and what it says of W_q and W_k.

    With several ranks nothing is pooled: one rank may ask for metrics alone, and would wait for ever.
    """
    layers.read_weights()
    state.settle()
    if state.batches > 0 and not is_pooled(state):
        pool(state, begun=state.turn)
    return state


def observe(state: State, layers: Layers) -> tuple[GroupBeta, Observation]:
    """Return beta, pooled from that of the heads, and the observation that controllers get beside it."""
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
        # A rank that is idle in the first batch has only weights that were updated already.
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
    """Run the controllers and write the beta that they choose: a move multiplies all heads of a unit alike."""
    if not any(controller.moves_beta for controller in controllers):
        return
    beta, observation = observe(state, layers)
    chosen, state.memories = base.apply(controllers, beta.of_group, observation, state.memories)
    if chosen is not beta.of_group:
        # Heads that differ keep their ratios, and a layer that does not move keeps the bits of every head.
        new = state.units.spread(chosen)
        moved = new != beta.of_head
        if has_refused(state):
            moved &= ~state.left_alone
        torch.where(moved, new if beta.ratios is None else new * beta.ratios, state.beta, out=state.beta)


@contextmanager
def pooling(state: State, loss_scale: LossScale) -> Iterator[Tensor]:
    """Pool the sums, give which heads they measured, and begin new sums at the end, whatever happens."""
    measured = pool(state, skipped=loss_scale.skipped)
    try:
        yield measured
    finally:
        for sums in (state.table, state.moments, state.window):
            sums.zero_()
        if has_refused(state):
            state.lost.fill_(torch.nan)  # the weights now belong to the model's own
        state.batches = 0


def finish(state: State, controllers: Sequence[Controller], loss_scale: LossScale, interval: int) -> None:
    """Count the step and begin the next one."""
    state.steps += 1
    state.reported.idle_steps += 1
    state.skipped_steps += loss_scale.skipped
    state.loss_scale = loss_scale.of_next
    training_loss.forget(state, controllers)
    state.gains.set_sensitivity(None)
    state.turn = turn(state, controllers, interval)
    if state.has_broken_graphs:
        torch.compiler.reset()
        state.has_broken_graphs = False
        state.resets += 1


def turn(state: State, controllers: Sequence[Controller], interval: int) -> range:
    """Return the layers to measure in the next step: each once in `interval` steps, in pairs or equal groups.

    All of them in the first step and while a controller is in its opening. Two small layers are measured as one, for
    little more than the cost of one. A function of counters that every rank and every resumed run have alike.
    """
    layers, batch = len(state.ranges), state.batch
    if batch < max(1, *(controller.opening_batches for controller in controllers)):
        return range(layers)
    groups = min(interval, ceil(layers / 2))
    first, last = (ceil(part * groups / interval) for part in (batch % interval, batch % interval + 1))
    return range(ceil(first * layers / groups), ceil(last * layers / groups))


def explain(state: State, layers: Layers, controllers: Sequence[Controller]) -> list[Note]:
    """Ask the controllers about their last update: one note a layer. Reads the device back."""
    pooled_beta, observation = observe(state, layers)
    beta = pooled_beta.of_group
    moves = any(controller.moves_beta for controller in controllers)
    at_bound = base.at_bound(beta, observation.beta_default) & moves
    is_above = beta > observation.beta_default
    has_one_key = (observation.statistics.flat_entropy == 0) & moves
    held = torch.stack([observation.statistics.finite, has_one_key, at_bound, is_above]).T.tolist()
    notes = [[Note(reason=_held(*each))] for each in held]
    for controller, memory in zip(controllers, state.memories, strict=True):
        if memory or not controller.start(beta):  # it has run, or needs no memory
            said = controller.explain(beta, observation, memory)
            for unit, note in enumerate(checked(controller, said, len(beta))):
                notes[unit].append(note)
    units = [joined(of_unit) for of_unit in notes]
    of_layers = units if len(units) == len(layers) else [pooled(units[each.heads]) for each in state.ranges]
    alone = Note(reason="left alone")
    return [alone if layer.refusal else note for layer, note in zip(layers.values(), of_layers, strict=True)]


def _held(finite: bool, has_one_key: bool, at_bound: bool, is_above: bool) -> str:
    """Reasons for which no controller moves beta, in words."""
    if not finite:
        return "held by a NaN, an infinity or a skipped optimizer step"
    if has_one_key:
        return "without effect, since each row has but one key"
    bound = f"upper bound, {10**DECADES:g} times" if is_above else f"lower bound, {10**-DECADES:g} times"
    return f"held at its {bound} the model's own" if at_bound else ""
