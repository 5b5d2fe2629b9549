"""Every tensor and counter that changes while a model trains.

A hook has one `State`. The tap writes to it in every forward, `Hook.step` reads it, runs the controllers and writes
beta, and `betahook.checkpoint` saves it. It holds everything that a checkpoint must contain, or that must follow the
model to another device. Anything kept elsewhere can be found out again in the next forward or step: how a module
computes its scores (the `Plan` of the tap), the beta of its last call (its `Recorder`), and which weights a `Clip`
scales (`step.clipping`).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from betahook import compat
from betahook.measure import components, statistics, weights
from betahook.measure.dtypes import overflow_logit, sum_dtype
from betahook.measure.groups import HeadGroups, LayerSize
from betahook.measure.ranks import is_distributed
from betahook.measure.together import WaitingCalls
from betahook.state.gains import Gains
from betahook.state.pending import Step, add_steps
from betahook.state.ranges import HeadRange, head_ranges
from betahook.state.reported import Reported

SMALLEST_BETA, LARGEST_BETA = 1e-10, 1e10
"""A beta outside these limits is a mistake: the scaled query would vanish or overflow in half precision."""


@dataclass
class LayerTensors:
    """The tensors that the forward of one layer reads and writes.

    A compiled forward receives them as they are. If it had to slice them from the tensors of all layers, the bounds of
    its slice would be constants of the code, and each layer would be compiled separately.

    Attributes:
        table, moments, beta_default: those of the `State`, of all layers.
        beta: float32 `[heads of the layer]`, a view of the state's `beta`.
        probe: see `betahook.state.gains`.
    """

    table: Tensor
    moments: Tensor
    beta_default: Tensor
    beta: Tensor
    probe: Tensor


class State:
    """Everything that changes while a model trains, flat over all heads of all layers.

    `beta`, `beta_default`, `table` and `moments` are written in place, since CUDA graphs refer to their addresses.

    Attributes:
        layers: the heads grouped by layer.
        units: the heads grouped by what has its own beta, a layer or a head.
        ranges: the range of the heads of each layer.
        layers_due: indices of the layers that are measured in this step.
        overflow: the largest logit whose exponential is finite, see `measure.dtypes.overflow_logit`.
        beta: float32 `[heads]`, the inverse temperature; NaN stands for the model's own.
        beta_default: float32 `[heads]`, the model's own; NaN until the first forward.
        beta_acts: False while no beta is set and no controller moves one; layers that are not measured then run
            unhooked.
        all_watched: True if the last step recorded the sensitivity of every layer, as it does while `beta_acts`; False
            if only of those in `layers_due`.
        gains: gain and probe of each layer.
        layer_tensors: for each layer, the tensors that its forward receives.
        table: sums over the steps since the last pooling, `[quantities, heads]`, see `measure.statistics`.
        moments: sums of q and k over the same steps, `[4, components]`, see `measure.components`.
        window: `[2, heads]`, the sum of the finite sensitivities of these steps, and their number.
        recent: for each head, the pooled table of the last pooling that measured it.
        recent_moments: the moments of the same steps.
        weights: sums of the entries of W_q and W_k as last read, `[6, heads]`, see `measure.weights`.
        nonfinite_since: int64 `[heads]`, the first step that saw a NaN or an infinity, from 1 on; 0 for none.
        condition: int64 `[layers]`, a `report.conditions.Condition` each.
        condition_since: int64 `[layers]`, the step that first saw it.
        clips: int64 `[heads]`, the number of steps in which a `Clip` scaled a head's weights, or would have.
        memories: what each controller remembers, tensors `[units]` by name; empty before its first update.
        batches: steps since the last pooling, skipped ones not counted; `batch` is the number of this one in the run.
        steps: number of calls of `Hook.step`.
        skipped_steps: number of these for which the optimizer skipped its own step.
        loss_scale: factor on the loss of the next backward in float16 training; 0 if unknown.
        reported: what has been reported, and what is to be reported.
        exact_max_logit: True if the largest score is to be found among all pairs.
        paused: number of pauses in force.
        seen: True once attention has passed the tap.
        recorded: True once attention was measured.
        has_loss: True once a training loss was recorded.
        loss_ranks: number of ranks whose shares of a loss add up to it, see `step.training_loss`.
        has_broken_graphs: True if a compiled graph breaks at a forward that by now could be part of it.
        resets: number of times that such code was discarded.
        refused: the layers that this rank leaves alone, by index, with the reason.
        left_alone: boolean `[heads]`, the heads left alone by this rank or, at the last pooling, by any rank.
        lost_beta: float32 `[heads]`, the beta that acted in these heads until then, with which the weights were
            trained; NaN where that was the model's own, and once a pooled step has gone on without it.
        is_local: True if the sums of ranks are not pooled.
        ranks_agree: True once all ranks were found to have the same layers and the same start.
        is_detached: True once the hook is off.
        refusals_are_known: True while `refused` includes all layers of `left_alone`.
        first_spectral_ratio: that of W_q and W_k before the first update, see `step.first_look`; None if not computed.
        waiting: calls that are not in the table yet, see `settle`.
        pending: steps that are not in the window yet.
    """

    def __init__(
        self,
        layers: Sequence[LayerSize],
        *,
        per_head: bool,
        controllers: int,
        device: torch.device,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        """Make the state of a hook before its first forward.

        Args:
            layers: the sizes of the attention layers.
            per_head: True for one beta for each head, False for one for each layer.
            controllers: number of controllers.
            device: device of all tensors.
            dtype: dtype of the model.
        """
        heads = sum(layer.heads for layer in layers)
        self.layers = HeadGroups.of(layers, device)
        self.units = self.layers.by_head() if per_head else self.layers
        self.ranges = head_ranges(layers)
        self.layers_due = range(len(layers))
        self.overflow = overflow_logit(dtype)
        self.beta = torch.full((heads,), torch.nan, dtype=torch.float32, device=device)
        self.beta_default = self.beta.clone()
        self.gains = Gains([layer.heads for layer in layers], self.beta)
        self.table, self.recent = (statistics.empty(heads, device) for _ in range(2))
        width = sum(layer.heads * layer.head_dim for layer in layers)
        self.moments, self.recent_moments = (self.table.new_zeros(len(components.ROWS), width) for _ in range(2))
        self.window = self.table.new_zeros(2, heads)
        self.weights = self.table.new_zeros(len(weights.ROWS), heads)
        self.nonfinite_since = torch.zeros(heads, dtype=torch.int64, device=device)
        self.clips = self.nonfinite_since.clone()
        self.condition, self.condition_since = (self.clips.new_zeros(len(layers)) for _ in range(2))
        self.memories: list[dict[str, Tensor]] = [{} for _ in range(controllers)]
        self.batches = self.steps = self.skipped_steps = self.paused = self.resets = 0
        self.loss_ranks = 1
        self.loss_scale, self.reported, self.refused = 0.0, Reported(), dict[int, str]()
        self.exact_max_logit = self.is_detached = self.ranks_agree = False
        self.seen = self.recorded = self.has_loss = self.has_broken_graphs = self.is_local = False
        self.left_alone, self.refusals_are_known = self.beta > 0, True  # all False, since beta is NaN
        self.lost_beta = self.beta.clone()
        self.beta_acts, self.all_watched = True, False
        self.first_spectral_ratio: Tensor | None = None
        self.waiting, self.pending = WaitingCalls(), list[Step]()
        self.layer_tensors = _tensors_of_layers(self)

    @property
    def device(self) -> torch.device:
        """Device of all tensors."""
        return self.beta.device

    @torch.inference_mode(False)
    def to(self, device: torch.device) -> None:
        """Follow the model to another device; float64 tensors get that device's dtype of sums."""

        def moved(value: Tensor) -> Tensor:
            return value.to(device, sum_dtype(device) if value.dtype == torch.float64 else None)

        self.settle()
        for name, value in vars(self).items():
            if isinstance(value, Tensor | HeadGroups):
                setattr(self, name, moved(value) if isinstance(value, Tensor) else value.to(device))
        self.gains.follow(self.beta)
        for part, there in zip(self.layer_tensors, _tensors_of_layers(self), strict=True):
            vars(part).update(vars(there))
        self.memories = [{name: moved(value) for name, value in memory.items()} for memory in self.memories]

    @property
    def batch(self) -> int:
        """Number of batches before this one; those whose optimizer step was skipped do not count."""
        return self.steps - self.skipped_steps

    @property
    def current_beta(self) -> Tensor:
        """Beta as it acts, `[heads]`: the model's own where none was set."""
        return torch.where(self.beta.isnan(), self.beta_default, self.beta)

    def by_component(self, values: Tensor) -> Tensor:
        """Repeat the value of each head for each of its components, `[heads] -> [components]`."""
        return values.repeat_interleave(self.layers.widths, output_size=self.moments.shape[1])

    @contextmanager
    def pause(self) -> Iterator[None]:
        """Measure neither forwards nor their backward passes inside this context."""
        self.paused += 1
        try:
            yield
        finally:  # a counter, since the pause that began first need not end last
            self.paused -= 1

    def note_default(self, head_range: HeadRange, default: float | Tensor) -> None:
        """Remember the inverse temperature that the model itself applies: a number, or a tensor with one per head."""
        self.seen = True
        number, heads = None if isinstance(default, Tensor) else float(default), head_range.heads
        # A CUDA graph writes it in every replay, which the number remembered on the host does not show.
        is_new = compat.is_captured(self.device) or self.gains.note(head_range.layer, heads, number)
        if is_new or number is None:
            with torch.no_grad():
                noted = self.beta_default[heads]
                noted.copy_(default.flatten()) if isinstance(default, Tensor) else noted.fill_(default)

    @torch.no_grad()
    def settle(self) -> None:
        """Add the calls and steps that wait; to be called before sums are read."""
        self.waiting.add(self.table, self.moments)
        if self.pending:
            add_steps(self.window, self.nonfinite_since, self.pending)
            self.pending.clear()

    def collect(self, heads: slice = slice(None)) -> Tensor:
        """Return a copy of the table for some heads, with their sensitivity filled in."""
        self.settle()
        table = self.table[:, heads].clone()
        table[statistics.ROW["sensitivity"]] = self.gains.sensitivity()[heads]
        return table

    def latest(self, table: Tensor, moments: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Replace the columns of unmeasured heads by what was last measured of them, except for the loss.

        Returns:
            Table and moments, and a boolean `[heads]` that is True for heads that were measured.
        """
        measured = table[statistics.ROW["pairs"]] > 0
        kept = torch.where(measured, table, self.recent)
        kept[statistics.OF_STEP] = table[statistics.OF_STEP]
        return kept, torch.where(self.by_component(measured), moments, self.recent_moments), measured

    def latest_of(self, head_range: HeadRange) -> tuple[Tensor, Tensor]:
        """Return copies of the table and moments of a layer, as measured since the last pooling.

        If nothing was measured, they are those of the last pooling that did. The sensitivity follows the same rule, but
        on its own.
        """
        components, row = head_range.components, statistics.ROW["sensitivity"]
        table, recent = self.collect(head_range.heads), self.recent[:, head_range.heads]
        sensitivity = table[row] / (self.loss_scale or 1.0)
        idle = ~(table[statistics.ROW["pairs"]] > 0).any()
        table = torch.where(idle, recent, table)
        table[row] = torch.where(sensitivity.any(), sensitivity, recent[row])
        return table, torch.where(idle, self.recent_moments[:, components], self.moments[:, components])


def _tensors_of_layers(state: State) -> list[LayerTensors]:
    """Collect the tensors of each layer."""
    shared, probes = (state.table, state.moments, state.beta_default), state.gains.probes
    betas = state.beta.split([probe.numel() for probe in probes])
    return [LayerTensors(*shared, *own) for own in zip(betas, probes, strict=True)]


@contextmanager
def writing_to(state: State, table: Tensor, moments: Tensor, beta_default: Tensor) -> Iterator[None]:
    """Write to these tensors instead of the state's: a graph may work on copies, and write them back at its end."""
    kept = state.table, state.moments, state.beta_default
    state.table, state.moments, state.beta_default = table, moments, beta_default
    try:
        yield
    finally:
        state.table, state.moments, state.beta_default = kept


def note_measured(state: State) -> None:
    """Remember that attention was measured. A graph that is captured now will measure without calling this."""
    state.recorded = True
    if compat.is_captured(state.device):
        state.reported.idle_steps = -math.inf
    elif state.reported.idle_steps > 0:  # not if minus infinity: the captured graph may still run
        state.reported.idle_steps = 0


def is_pooled(state: State) -> bool:
    """Return True if sums are added up over several ranks."""
    return is_distributed() and not state.is_local


def set_beta(state: State, head_range: HeadRange, values: Tensor) -> None:
    """Set the beta of a layer, which also replaces one that it may have lost."""
    state.beta[head_range.heads] = values.detach().to(state.device)
    state.lost_beta[head_range.heads] = torch.nan
    state.beta_acts = True


def is_beta(values: Tensor) -> Tensor:
    """Return which values can be an inverse temperature, boolean of the shape of `values`."""
    return (values >= SMALLEST_BETA) & (values <= LARGEST_BETA)  # False for NaN
