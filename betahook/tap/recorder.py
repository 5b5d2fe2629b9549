"""The recorder: the tap's access to the part of the state that belongs to one attention module.

Every hooked module holds a `Recorder`. The tap asks it for the gain, reports the model's own beta to it, and passes it
q, k and masks, whose sums it adds to the `State`. It never reads a value back to the host.
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
NO_ATTENTION = "its forward ran, but no attention was seen in it: it may run in a kernel that betahook cannot see"
"""Reason given for a module whose forward showed no attention, if it is not known to have computed queries."""


def _columns(state: State, head_range: HeadRange) -> tuple[Tensor, Tensor]:
    """The columns of these heads in the tables of sums and of the components of q and k."""
    return state.table[:, head_range.heads], state.moments[:, head_range.components]


def of_one_batch(query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
    """Detach q and k, and expand a batch of 1, e.g. of a learned query, to the batch of the other, as torch does."""
    batch = max(len(query), len(key))
    query, key = (x.detach() if len(x) == batch else x.detach().expand(batch, -1, -1, -1) for x in (query, key))
    return query, key


def _scales(state: State, head_range: HeadRange, device: torch.device, *, cached: bool = True) -> Tensor:
    """1 and beta of heads, `[2, heads]`; computed once for all layers if `cached` and the model's beta is a number."""
    heads = head_range.heads
    if cached and state.gains.is_number(head_range.layer) and not compat.is_captured(device):
        return state.gains.scales()[:, heads].to(device)
    beta = state.current_beta[heads]
    return torch.stack([torch.ones_like(beta), beta]).to(device)


def _may_wait(
    state: State, head_range: HeadRange, query: Tensor, key: Tensor, given: GivenMask, score_mod: ScoreMod
) -> bool:
    """Return True for a small call whose pairs are the same for all heads and whose q and k autograd keeps anyway."""
    if score_mod.position_bias is not None or score_mod.sinks is not None:
        return False
    kept = query.requires_grad and key.requires_grad and type(query) is type(key) is Tensor
    # On another device another thread may be running; and a captured graph must contain its own measurement.
    if not kept or len(state.layers_due) < 2 or query.device != state.device or compat.is_captured(query.device):
        return False
    mask = given.tensor
    same = mask is None or (not mask.is_inference() and (mask.dim() == 2 or mask.shape[1] == 1))
    fits = query.shape[3] == head_range.head_dim and state.waiting.may_wait(head_range.heads)
    return same and fits and calls_at_once(query, key) > 1


def is_repeated(recorder: Recorder) -> bool:
    """Return True if gradient checkpointing re-runs a forward that was measured; compiled graphs ask at run time."""
    # Reentrant checkpointing runs the forward under no_grad first. If that run is measured too (`always`), the one in
    # the backward pass is a repetition; by default, only the latter is measured.
    return compat.is_in_backward() if recorder.always else compat.is_recomputation()


class _Inputs:
    """Sums over the inputs of W_q and W_k, computed once if both receive the same tensor, one after the other."""

    def __init__(self) -> None:
        self._last: tuple[weakref.ref[Tensor], int, inputs.Entries] | None = None

    def entries_of(self, tensor: Tensor) -> inputs.Entries:
        """Return `inputs.entries_of(tensor)`, or the last result if it is the same tensor, unchanged."""
        last, self._last = self._last, None
        version = compat.inplace_version(tensor)
        if last is not None and last[0]() is tensor and last[1] == version:
            return last[2]
        entries = inputs.entries_of(tensor.detach())
        if version is not None:
            self._last = weakref.ref(tensor), version, entries
        return entries


def follow_again(recorder: Recorder) -> None:
    """If a layer was left alone, follow it again with the beta that it lost, since its module has a new forward."""
    take_up(recorder.state, recorder._head_range)


def _beta_left_alone(recorder: Recorder) -> str:
    """Part of the warning that says what happens to the beta of a layer that has just been left alone."""
    gain = lost_gain(recorder.state, recorder._head_range)
    return " stays the model's own" if gain == 1 else f", {gain:.3g} times the model's own, no longer acts"


def shows_shapes(tensor: Tensor | None, state: State) -> bool:
    """Return True in a forward on the meta device, which only computes shapes, unless the state is there too."""
    return tensor is not None and tensor.is_meta and state.device.type != "meta"


def _first_of_this_rank(attention: AttentionModule, heads: int) -> int | None:
    """Index of the first head that this rank computes if each computes `heads`; None if the mesh does not fit that."""
    projections = attention.projections
    mesh = getattr(projections[0].stored, "device_mesh", None) if projections else None
    if mesh is None or heads * mesh.size(mesh.ndim - 1) != attention.heads:
        return None
    first: int = mesh.get_local_rank(mesh.ndim - 1) * heads  # the innermost dimension; the outer are data-parallel
    return first


def _of_this_rank(recorder: Recorder, values: Tensor) -> Tensor:
    """Select the values of the heads that this rank computes from those of all heads of the layer."""
    if recorder._local_heads == recorder.heads:  # the bounds of a slice would be constants of a compiled layer
        return values
    first = recorder._local_range.heads.start - recorder._head_range.heads.start
    return values[first : first + recorder._local_heads]


def _as_of_now(values: Tensor) -> Tensor:
    """The given values of the state; in an export a copy, or the program would read them whenever it runs."""
    return _copied(values) if compat.is_exporting() else values


def _copied(values: Tensor) -> Tensor:
    with compat.untransformed():
        return values.detach().clone()


setattr(_copied, compat.CALLED_BY_GRAPHS, True)  # otherwise strict export would trace it


class Recorder:
    """Records the attention calls of one module.

    Attributes:
        name: name of the module, as in `model.named_modules()`, without the parts that wrappers add.
        attention: the facts that discovery found about the module.
        module: the attention module.
        heads, head_dim: number of query heads, and d_k of each.
        route: the source of the module's scores, see `models.discovery.AttentionModule`.
        state: the state of the hook.
        owner: the hook; this reference keeps it alive as long as the hooked model.
        always: True if every forward is recorded, also in evaluation mode and under `no_grad`.
        tensors: the state's tensors for this layer, see `state.LayerTensors`.
        runs: number of watched forwards of the module that are running now.
        is_watched: True if a hook on the query projection notices its calls.
        computed_queries: True if the last forward called the query projection; only known if `is_watched`.
        showed_no_attention: True once a measured forward ended without showing an attention.
        modes_run: the modes in which forwards ran: holds True for training, False for evaluation.
        in_function: True while the attention function from transformers runs; read only while compiling.
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
        self.runs, self.modes_run = 0, set[bool]()
        self.is_watched = self.computed_queries = self.showed_no_attention = self.in_function = False

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        """Refuse to be copied: `tap.copies` leaves the recorder out, unless a module has its own method for copies."""
        raise TypeError(
            f"{shown_name(self.name)} is hooked and has a method of its own for copies, which cannot leave the hook "
            "out: copy or pickle the model before attach, or detach() first"
        )

    @property
    def is_recording(self) -> bool:
        """True if the current forward is to be measured: only once, even if gradient checkpointing runs it twice."""
        measured = self.always or (self.module.training and torch.is_grad_enabled())
        if not (self.is_due() and measured) or self.state.paused or compat.is_transformed():
            return False
        return not is_repeated(self)

    def is_due(self) -> bool:
        """Return True if the layer is measured in this step, or if a graph is being captured.

        A compiled graph asks again when it runs; a CUDA graph cannot ask, and measures in every replay.
        """
        return compat.is_captured(self.state.device) or self._head_range.layer in self.state.layers_due

    @property
    def is_idle(self) -> bool:
        """True if a forward in training is neither measured nor scaled, and may run as if there were no hook.

        This also holds for its recomputation in the backward pass, which must save the same tensors. It is never True
        in evaluation: there torch's own attention would take its fast path, which rounds differently.
        """
        return not self.state.beta_acts and self.module.training and not self.is_due()

    @property
    def is_set(self) -> Tensor:
        """True for heads whose beta was set, boolean `[heads]`; the others use the model's own."""
        return ~self.state.beta[self._head_range.heads].isnan()

    @property
    def refusal(self) -> str | None:
        """The reason why the layer is left alone; None if it is not."""
        return self.state.refused.get(self._head_range.layer)

    def leave_alone(self, reason: str, advice: str = "") -> None:
        """Leave the layer alone from now on, and warn; `advice` is put before the advice that always applies."""
        refuse(self.state, self._head_range, reason)
        logger.warning(LEFT_ALONE, shown_name(self.name), reason, _beta_left_alone(self), advice)

    def note_default(self, beta: float | Tensor) -> None:
        """Remember the inverse temperature that the model itself applies: a number, or a tensor with one per head."""
        if compat.is_exporting():  # the program keeps the current beta
            return
        if not compat.is_transformed():
            self.state.note_default(self._head_range, beta)
        elif not isinstance(beta, Tensor):
            with compat.untransformed():
                self.state.note_default(self._head_range, beta)

    def move_state_to(self, device: torch.device) -> None:
        """Move the state from the CPU to the model's device, but never to the meta device, see `shows_shapes`."""
        if device.type not in ("cpu", "meta") and self.state.device.type == "cpu":
            self.state.to(device)

    def select_local_heads(self, heads: int) -> bool:
        """Point the recorder at the heads that this rank computes; return False if a query cannot have that many.

        Under tensor parallelism each rank computes an equal, consecutive share of the heads, in the order of ranks.
        """
        if heads == self._local_heads:
            return True
        if (first := _first_of_this_rank(self.attention, heads)) is None:
            return False
        self._local_range, self._local_heads = self._head_range.part(first, heads), heads
        return True

    def local_gain(self, default: float | Tensor | None) -> Tensor:
        """`beta / beta_default` of the heads that this rank computes, with the `default` of this call if given.

        A compiled graph may recompute it in the backward pass, after later layers have written their defaults.
        """
        beta = _as_of_now(_of_this_rank(self, self.tensors.beta))
        if default is None:
            default = _as_of_now(self.state.beta_default[self._local_range.heads])
        elif isinstance(default, Tensor):
            default = default.to(beta).flatten()
            default = torch.where(default == 0, beta, default)  # scores scaled by 0 are 0 for any beta
        return gain_of(beta, default)

    def ready_gain(self, *, as_leaf: bool) -> Tensor | None:
        """The gain for the default that was last noted, `[heads, 1, 1]`; None if another rank computes some heads.

        With `as_leaf` it requires grad, and its gradient gives the sensitivity. While paused, and for a layer that is
        left alone, the leaf is a temporary one, so the gradient is dropped.
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
        """Zeros whose gradient is the sensitivity of the heads that this rank computes.

        Scaled by the number of tensor-parallel ranks, because the reduction averages over all ranks although only one
        of them computes a head.
        """
        probe, ranks = _of_this_rank(self, self.tensors.probe), self.heads // self._local_heads
        return probe if ranks == 1 else ranks * probe

    @torch.no_grad()
    def record(self, query: Tensor, key: Tensor, mask: Mask | GivenMask, score_mod: ScoreMod = PLAIN) -> None:
        """Add one attention call; `query [batch, heads, queries, d_k]` and `key` are the operands of its score product.

        A small call with a `GivenMask` may wait for that of the last layer; all that wait are then measured at once.
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
            if local.layer == state.layers_due[-1]:
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
        """Add one attention call by its score matrix: `raw`, `logits`, `allowed` are `[batch, heads, queries, keys]`.

        `operands` are q and k, `[1, heads, tokens, d_k]`. `raw` holds the scores times `factor`.
        """
        note_measured(self.state)
        scales = _scales(self.state, self._local_range, raw.device)
        calls.add_pairs(*_columns(self.state, self._local_range), raw / factor, logits, allowed, *operands, scales)

    @torch.no_grad()
    def record_input(self, tensor: Tensor, sides: list[str], *, may_wait: bool = True) -> None:
        """Add sums over the input of the projections `sides`; they may not wait in a graph, which reuses memory."""
        if shows_shapes(tensor, self.state):
            return
        tensor = materialise.local(tensor)  # a DTensor under tensor parallelism, the same on all ranks
        self.move_state_to(tensor.device)
        entries = self._inputs.entries_of(tensor) if may_wait else inputs.entries_of(tensor)
        waiting = self.state.waiting.inputs
        waiting.note(self.state.table, self._local_range.heads, sides, entries)
        if not may_wait:
            waiting.add_all(self.state.table)
