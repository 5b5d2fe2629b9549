"""The recorder, which the tap writes to: the part of the state that belongs to one attention module.

Every hooked module holds its `Recorder`. The tap asks it for the gain, tells it the model's own beta, and hands it q, k
and masks; it adds their sums to the `State`. It never reads a value back to the host.
"""

from __future__ import annotations

import logging
import weakref
from typing import NoReturn

import torch
from torch import Tensor

from betahook import compat
from betahook.measure import calls, inputs
from betahook.measure.masks import GivenMask, Mask
from betahook.measure.rows import PLAIN, ScoreMod
from betahook.measure.together import AttentionCall, calls_at_once
from betahook.models import materialise
from betahook.models.discovery import AttentionModule, shown_name
from betahook.state.gains import gain_of
from betahook.state.left_alone import lost_gain, refuse, take_up
from betahook.state.ranges import HeadRange
from betahook.state.state import State, note_measured

logger = logging.getLogger(__name__)
ATTRIBUTE = "_betahook"
"""Attribute under which a hooked module keeps its `Recorder`."""
LEFT_ALONE = (
    "%s is left alone: %s. Its beta%s, and its scores are not measured. %sTo silence this, "
    "leave the module out with attach(layers=...)"
)
PASSED = "its forward ran, but no attention was seen in it: it may run in a kernel that betahook cannot see"
"""Said of a module whose forward showed no attention, where nothing tells that it computed queries."""


def _columns(state: State, head_range: HeadRange) -> tuple[Tensor, Tensor]:
    """Columns of heads in the tables of sums and of the components of q and k."""
    return state.table[:, head_range.heads], state.moments[:, head_range.components]


def of_one_batch(query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
    """q and k without their graphs; where one has a batch of 1, as a learned query, it is that of all, as for torch."""
    batch = max(len(query), len(key))
    query, key = (x.detach() if len(x) == batch else x.detach().expand(batch, -1, -1, -1) for x in (query, key))
    return query, key


def _scales(state: State, head_range: HeadRange, device: torch.device, *, cached: bool = True) -> Tensor:
    """1 and beta of heads, `[2, heads]`: made once for all layers if `cached`, and the model's own beta is a number."""
    heads = head_range.heads
    if cached and state.gains.is_number(head_range.layer) and not compat.is_captured(device):
        return state.gains.scales()[:, heads].to(device)
    beta = state.current_beta[heads]
    return torch.stack([torch.ones_like(beta), beta]).to(device)


def _may_wait(
    state: State, head_range: HeadRange, query: Tensor, key: Tensor, given: GivenMask, score_mod: ScoreMod
) -> bool:
    """Tell if a call is small, its pairs are the same for all heads, and autograd keeps its q and k as they are."""
    if score_mod.position_bias is not None or score_mod.sinks is not None:
        return False
    kept = query.requires_grad and key.requires_grad and type(query) is type(key) is Tensor
    # On another device another thread may be at work; and a graph that is captured must measure within itself.
    if not kept or len(state.turn) < 2 or query.device != state.device or compat.is_captured(query.device):
        return False
    mask = given.tensor
    same = mask is None or (not mask.is_inference() and (mask.dim() == 2 or mask.shape[1] == 1))
    fits = query.shape[3] == head_range.head_dim and state.waiting.takes(head_range.heads)
    return same and fits and calls_at_once(query, key) > 1


def is_repeated(recorder: Recorder) -> bool:
    """Tell if gradient checkpointing runs a forward again that has been measured; a graph asks when it runs."""
    # Reentrant checkpointing runs a forward without gradients first; by default, the one in the backward counts.
    return compat.is_in_backward() if recorder.always else compat.is_recomputation()


class _Inputs:
    """Sums of what enters W_q and W_k: computed once where both get the same tensor, one after the other."""

    def __init__(self) -> None:
        self._last: tuple[weakref.ref[Tensor], int, inputs.Entries] | None = None

    def entries_of(self, tensor: Tensor) -> inputs.Entries:
        """`inputs.entries_of` a tensor, those of the last one if it is that one, unchanged."""
        last, self._last = self._last, None
        version = compat.version(tensor)
        if last is not None and last[0]() is tensor and last[1] == version:
            return last[2]
        entries = inputs.entries_of(tensor.detach())
        if version is not None:
            self._last = weakref.ref(tensor), version, entries
        return entries


def follow_again(recorder: Recorder) -> None:
    """Follow a layer again, with the beta that it had, if it was left alone: its module has another forward."""
    take_up(recorder.state, recorder._head_range)


def _beta_left_alone(recorder: Recorder) -> str:
    """Say what becomes of the beta of a layer that has just been left alone."""
    gain = lost_gain(recorder.state, recorder._head_range)
    return " stays the model's own" if gain == 1 else f", {gain:.3g} times the model's own, no longer acts"


def shows_shapes(tensor: Tensor | None, state: State) -> bool:
    """Return True for a tensor of a forward on the meta device: a look at shapes, unless the state is there too."""
    return tensor is not None and tensor.is_meta and state.device.type != "meta"


def _first_of_this_rank(attention: AttentionModule, heads: int) -> int | None:
    """Index of the first head of a rank that computes so many; None if none computes that many."""
    projections = attention.projections
    mesh = getattr(projections[0].stored, "device_mesh", None) if projections else None
    if mesh is None or heads * mesh.size(mesh.ndim - 1) != attention.heads:
        return None
    first: int = mesh.get_local_rank(mesh.ndim - 1) * heads  # on the innermost dimension: the outer are data-parallel
    return first


def _of_this_rank(recorder: Recorder, values: Tensor) -> Tensor:
    """The values of the heads that this rank computes, of those of all heads of a layer."""
    if recorder._local_heads == recorder.heads:  # a slice of them would make constants of a compiled layer
        return values
    first = recorder._local_range.heads.start - recorder._head_range.heads.start
    return values[first : first + recorder._local_heads]


def _as_of_now(values: Tensor) -> Tensor:
    """Values of the state; in an export a copy, since the program would have those of whenever it runs."""
    return _copied(values) if compat.is_exporting() else values


def _copied(values: Tensor) -> Tensor:
    with compat.untransformed():
        return values.detach().clone()


setattr(_copied, compat.CALLED_BY_GRAPHS, True)  # a strict export would trace it


class Recorder:
    """Records the attention calls of one module.

    Attributes:
        name: of the module, as in `model.named_modules()`, without what wrappers add to that.
        attention: the module as it was found.
        module: the attention module.
        heads, head_dim: number of query heads, and d_k of each.
        route: where the module's scores come from, see `models.discovery.AttentionModule`.
        state: of the hook.
        owner: the hook, so that it lives as long as the hooked model even if nobody else holds it.
        always: True if every forward is recorded, also in evaluation mode and under `no_grad`.
        tensors: of the layer alone, see `state.LayerTensors`.
        runs: how many forwards of the module run now, of those that the tap watches.
        is_watched: True if a hook of the query projection tells when a forward calls it.
        projected: True if the last one called it, as far as it is watched.
        has_passed: True once a forward that is measured ended without an attention.
        ran_in: True if one ran in training mode, False if one ran in evaluation mode.
        in_function: True while the attention function runs that the module got of transformers, as graphs see it.
    """

    def __init__(
        self, name: str, attention: AttentionModule, state: State, head_range: HeadRange, owner: object, when: str
    ) -> None:
        self.name = name
        self.attention = attention
        self.module = attention.module
        self.heads, self.head_dim, self.route = attention.heads, attention.head_dim, attention.route
        self.owner = owner
        self.state = state
        self._head_range = head_range
        self.always = when == "always"
        self._local_range = head_range  # all heads of the layer, unless this rank computes only some of them
        self._local_heads = attention.heads
        self._inputs = _Inputs()
        self.tensors = state.layer_tensors[head_range.layer]
        self.runs, self.ran_in = 0, set[bool]()
        self.is_watched = self.projected = self.has_passed = self.in_function = False

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        """Refuse: `tap.copies` leaves the recorder out, unless a module copies itself in a way of its own."""
        raise TypeError(
            f"{shown_name(self.name)} is hooked and has a method of its own for copies, which cannot leave the hook "
            "out: copy or pickle the model before attach, or detach() first"
        )

    @property
    def is_recording(self) -> bool:
        """True if the forward that runs now is to be measured: once, though gradient checkpointing runs it twice."""
        measured = self.always or (self.module.training and torch.is_grad_enabled())
        if not (self.is_due() and measured) or self.state.paused or compat.is_transformed():
            return False
        return not is_repeated(self)

    def is_due(self) -> bool:
        """Tell if the layer is measured in this step; a graph of the compiler asks when it runs, a CUDA graph never."""
        return compat.is_captured(self.state.device) or self._head_range.layer in self.state.turn

    @property
    def is_idle(self) -> bool:
        """True if a forward in training is neither measured nor scaled, and may run as if there were no hook.

        Asked about its recomputation in the backward, which must save as much, it says the same. In evaluation torch's
        own attention would take its fast path, with another rounding than in a forward that is measured.
        """
        return not self.state.beta_acts and self.module.training and not self.is_due()

    @property
    def is_set(self) -> Tensor:
        """True for heads whose beta was set, boolean `[heads]`; the others have the model's own."""
        return ~self.state.beta[self._head_range.heads].isnan()

    @property
    def refusal(self) -> str | None:
        """The reason why the layer is left alone, None if it is not."""
        return self.state.refused.get(self._head_range.layer)

    def leave_alone(self, reason: str, advice: str = "") -> None:
        """Leave the layer alone from now on, with a warning; `advice` stands before what can always be done."""
        refuse(self.state, self._head_range, reason)
        logger.warning(LEFT_ALONE, shown_name(self.name), reason, _beta_left_alone(self), advice)

    def note_default(self, beta: float | Tensor) -> None:
        """Remember the inverse temperature that the model itself applies: one, or one for each head.

        Noted in no export: the program keeps the current beta.
        """
        if compat.is_exporting():
            return
        if not compat.is_transformed():
            self.state.note_default(self._head_range, beta)
        elif not isinstance(beta, Tensor):
            with compat.untransformed():
                self.state.note_default(self._head_range, beta)

    def move_state_to(self, device: torch.device) -> None:
        """Move the state to where the model went, but not to the meta device, see `shows_shapes`."""
        if device.type not in ("cpu", "meta") and self.state.device.type == "cpu":
            self.state.to(device)

    def select_local_heads(self, heads: int) -> bool:
        """Point the recorder at the heads that this rank computes; False if a query cannot have so many.

        Under tensor parallelism a rank has one of as many equal runs of heads as there are ranks, in their order.
        """
        if heads == self._local_heads:
            return True
        if (first := _first_of_this_rank(self.attention, heads)) is None:
            return False
        self._local_range, self._local_heads = self._head_range.part(first, heads), heads
        return True

    def local_gain(self, default: float | Tensor | None) -> Tensor:
        """`beta / beta_default` of the heads that this rank computes, by the `default` of this call if given.

        Compiled graphs may ask again in the backward, when later layers have written theirs.
        """
        beta = _as_of_now(_of_this_rank(self, self.tensors.beta))
        if default is None:
            default = _as_of_now(self.state.beta_default[self._local_range.heads])
        elif isinstance(default, Tensor):
            default = default.to(beta).flatten()
            default = torch.where(default == 0, beta, default)  # scores that are scaled by 0 are so by any beta
        return gain_of(beta, default)

    def ready_gain(self, *, as_leaf: bool) -> Tensor | None:
        """The gain by the number that was last noted, `[heads, 1, 1]`; None if another rank computes some heads.

        As a leaf it requires grad, and its gradient gives the sensitivity; in a pause, or for a layer that is left
        alone, its gradient is dropped.
        """
        gains, layer = self.state.gains, self._head_range.layer
        if self._local_heads < self.heads:
            return None
        if not as_leaf:
            return gains.gain(layer)
        leaf = gains.leaf(layer)
        return leaf.detach().requires_grad_() if self.state.paused or self.refusal else leaf

    @property
    def probe(self) -> Tensor:
        """Zeros whose gradient is the sensitivity, of the heads that this rank computes.

        Scaled by the number of tensor-parallel ranks: the reduction takes the mean over all ranks, and only one of them
        computes a head.
        """
        probe, ranks = _of_this_rank(self, self.tensors.probe), self.heads // self._local_heads
        return probe if ranks == 1 else ranks * probe

    @torch.no_grad()
    def record(self, query: Tensor, key: Tensor, mask: Mask | GivenMask, score_mod: ScoreMod = PLAIN) -> None:
        """Add one attention call; `query [batch, heads, queries, d_k]` and `key` as the score product gets them.

        With a mask that nobody has looked at yet, a small call may wait until the last layer's: all that wait are then
        measured at once.
        """
        if query.numel() == 0 or key.numel() == 0 or shows_shapes(query, self.state):
            return
        state, local = self.state, self._local_range
        note_measured(state)
        exact, entries = state.exact_max_logit, state.waiting.inputs.take(local.heads)
        is_number, operands = state.gains.is_number(local.layer), of_one_batch(query, key)
        if is_number and isinstance(mask, GivenMask) and _may_wait(state, local, query, key, mask, score_mod):
            scales, columns = state.gains.scales(), (local.heads, local.components)
            call = AttentionCall(*columns, *operands, mask, scales, score_mod, exact, entries)
            state.waiting.note(state.table, state.moments, call)
            if local.layer == state.turn[-1]:
                state.waiting.add_calls(state.table, state.moments)
            return
        if isinstance(mask, GivenMask):
            mask = mask.describe(query.shape[2], key.shape[2])
        scales = _scales(state, local, query.device, cached=not mask.of_graph)
        sums = _columns(state, local)
        calls.add_scores(*sums, *operands, mask, scales, score_mod, exact_max_logit=exact, inputs=entries)

    @torch.no_grad()
    def record_pairs(
        self, raw: Tensor, logits: Tensor, allowed: Tensor, operands: tuple[Tensor, Tensor], factor: Tensor
    ) -> None:
        """Add one attention whose scores exist: `raw`, `logits` and `allowed` are `[batch, heads, queries, keys]`.

        `operands` are q and k, `[1, heads, tokens, d_k]`. `raw` carries a `factor`, which is not part of a score.
        """
        note_measured(self.state)
        scales = _scales(self.state, self._local_range, raw.device)
        calls.add_pairs(*_columns(self.state, self._local_range), raw / factor, logits, allowed, *operands, scales)

    @torch.no_grad()
    def record_input(self, tensor: Tensor, sides: list[str], *, may_wait: bool = True) -> None:
        """Add the entries that enter the projections `sides`; at once unless they `may_wait`: a graph reuses memory."""
        if shows_shapes(tensor, self.state):
            return
        tensor = materialise.local(tensor)  # a DTensor under tensor parallelism, the same on all ranks
        self.move_state_to(tensor.device)
        entries = self._inputs.entries_of(tensor) if may_wait else inputs.entries_of(tensor)
        waiting = self.state.waiting.inputs
        waiting.note(self.state.table, self._local_range.heads, sides, entries)
        if not may_wait:
            waiting.add_all(self.state.table)
