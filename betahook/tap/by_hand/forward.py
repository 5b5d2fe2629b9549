"""State of one forward of a hooked attention module: the traces of its tensors, and its products so far.

Made by the tap in `watching` for every forward; the functions of `matrices`, `softmaxes` and `following` work on it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from betahook import compat
from betahook.models.discovery import shown_name
from betahook.models.labels import Labels, MadeOf
from betahook.models.torch_calls import Call, tensors_in
from betahook.state.state import note_measured
from betahook.tap.by_hand import head_axes
from betahook.tap.by_hand.activations import Activations
from betahook.tap.by_hand.contraction import Axis
from betahook.tap.by_hand.factors import Factor, are_alike, is_zero
from betahook.tap.by_hand.plan import Plan, form_of
from betahook.tap.by_hand.products import History, Product
from betahook.tap.by_hand.shadows import Shadows
from betahook.tap.by_hand.sites import Site, find_line, find_site
from betahook.tap.by_hand.situation import Situation
from betahook.tap.by_hand.traces import Operand, Scores, Traces, is_learned
from betahook.tap.recorder import PASSED, Recorder, shows_shapes

UNSEEN = (
    "a forward computed queries, but no attention over them was seen: it may run in a kernel that betahook cannot see"
)
"""The reason to leave a module alone in which another forward, perhaps, showed one."""


class FollowedForward:
    """All that is known of one forward of one attention module, while it is followed and at its end.

    Raises:
        RuntimeError: it is the first one, and shows nothing, as it runs within `torch.export` or the like.

    Attributes:
        recorder: of the module.
        plan: what earlier forwards showed.
        rehearsal: True for a dry run: beta does not act, and nothing is measured.
        recording: True if scores are measured.
        form: of the inputs.
        is_empty: True where the first of them has no entries, as in a batch without samples: it shows nothing.
        axes: the axes of the heads with inputs of this form, as far as they are known.
        labels: the features that entries come from, in the first forward with inputs of this form.
        of_inputs: further labels in that forward, which tell apart the entries of the inputs too: heads that share one
            projection, each of its part of the input, are told apart by these alone.
        activations: what is made of the inputs, in that forward.
        shadows: what another beta would do, in the first forward that is measured.
        is_settled: True if neither labels nor shadows are needed.
        traces: of the tensors that are followed.
        products: those that may make scores, so far.
        nodes: the nodes of autograd that made them, where it is on.
        has_softmax, attended: True once there was a softmax by itself, and once there was one over scores.
        default: the model's own beta at the first softmax.
        fused_only: all attention so far was `F.scaled_dot_product_attention`, as `tap.compiled` takes it.
        made_of: the features that q and k are made of in each product that came to a softmax, if there are labels.
        unread: a product that is not understood, which came to a softmax alone; None for none.
        unscored: the line of a product of activations in a form that is not read; None for none.
        without_heads: the line of a product of two matrices, in which several heads have no axis; None for none.
        refused: the reason to leave the module alone once the forward has ended; None for none.
    """

    def __init__(self, recorder: Recorder, plan: Plan, inputs: Any, *, rehearsal: bool = False) -> None:
        self.recorder, self.plan, self.rehearsal = recorder, plan, rehearsal
        recorder.projected = False
        given = next(iter(tensors_in(inputs)), None)
        is_dry = rehearsal or shows_shapes(given, recorder.state)
        self.recording = recorder.is_recording and not (is_dry or recorder.refusal)
        form = form_of(inputs)
        self.form = plan.nearest(form) if compat.is_exporting() else form
        self.axes = plan.axes.get(self.form, {})
        self.is_empty = given is not None and given.numel() == 0
        is_first = self.form not in plan.axes and recorder.refusal is None
        if is_first and (compat.is_exporting() or (rehearsal and compat.is_transformed())):
            raise RuntimeError(
                f"{shown_name(recorder.name)}: no forward has shown yet how this attention computes its scores. Run a "
                "forward of the model outside of torch.export, torch.func and torch.jit.trace first"
            )
        self.labels = Labels(self.is_learned) if is_first and not compat.is_without_data() else None
        self.of_inputs = None if self.labels is None else _label_inputs(self, inputs)
        self.activations = Activations(inputs) if is_first else None
        self.shadows = Shadows() if self.recording and not plan.checked else None
        self.products: list[Product] = []
        self.nodes: dict[Product, Any] = {}
        self.has_softmax = self.attended = False
        self.default: Factor | None = None
        self.fused_only = True
        self.made_of: list[MadeOf] = []
        self.unread: str | None = None
        self.unscored: str | None = None
        self.without_heads: str | None = None
        self.is_settled = self.labels is None and self.shadows is None
        self.traces = Traces()
        self.refused: str | None = None

    def trace_of_values(self) -> Operand | None:
        """The trace of weighted values; None if nothing in earlier forwards asks for it."""
        return Operand(mixed=True) if self.plan.mixes or not self.is_settled else None

    def factors_of(self, history: History, query: Tensor, key: Tensor) -> tuple[Factor, Factor]:
        """The factors that the operands of a product carry; a key out of a cache carries what keys did before."""
        of_query, of_key = self._factor_of(query), self._factor_of(key)
        if key not in self.traces and history.key_factor is not None:
            of_key = history.key_factor
        if not compat.is_transformed():
            history.key_factor = of_key
        return of_query, of_key

    def _factor_of(self, operand: Tensor) -> Factor:
        trace = self.traces.get(operand)
        if isinstance(trace, Scores) and trace.pure and trace.lost is None:
            return trace.factor * trace.prescale
        return trace.factor if isinstance(trace, Operand) else 1.0

    def is_learned(self, tensor: Tensor) -> bool:
        """Return True for a parameter, a view of one, or what was made of parameters alone."""
        return is_learned(tensor, self.traces.get(tensor))

    def _always(self, now: bool) -> bool:
        """`Plan.always`, for which a site is looked up: for what does not hold, in the first forward of a form only."""
        return (now or self.labels is not None) and self.plan.always(now)

    def _is_activation(self, tensor: Tensor) -> bool:
        return self.activations is not None and tensor in self.activations

    def situation(self, call: Call) -> Situation:
        """A call as a handler gets it."""
        return Situation(call, self.traces.get, self.plan.at_first, self._always, self._is_activation, self._axis_of)

    def score_axis(self, scores: Tensor, operation: str, dim: int = -1) -> Axis | None:
        """The axis of the heads in scores that come to an operation, with their rows moved along the last axis."""
        labels, rows = self.labels_of(scores), scores.movedim(dim, -1)
        labels = None if labels is None else labels.movedim(dim, -1)
        return self.head_axis(rows, labels, None, range(rows.dim() - 2), find_site(operation))

    def labels_of(self, tensor: Tensor, summed: int | None = None) -> Tensor | None:
        """The labels of a tensor; None where it has none, or no forward needs them any more.

        In an operand, where features alone do not tell of heads, those that its projection made them of may.
        """
        found = None if self.labels is None else self.labels.get(tensor)
        if self.of_inputs is None or (found is not None and (summed is None or head_axes.varying(found, summed))):
            return found
        return self.of_inputs.get(tensor)

    def head_axis(
        self, tensor: Tensor, labels: Tensor | None, summed: int | None, shared: Sequence[int], site: Site
    ) -> Axis | None:
        """The axis of the heads in a tensor; None if it is not told apart from others.

        Args:
            tensor: an operand or scores.
            labels: its labels, if any; what they tell is remembered.
            summed: the axis of the components in an operand.
            shared: the axes that may be of heads.
            site: where the tensor is used.
        """
        count = self.recorder.heads
        if count == 1:
            return "single"
        if site in self.axes:
            axis = self.axes[site]
            return axis if not isinstance(axis, int) or tensor.shape[axis : axis + 1] == (count,) else None
        if labels is None:
            fitting = [axis for axis in shared if tensor.shape[axis] == count]
            return fitting[0] if len(fitting) == 1 and tensor.dim() > 3 else None
        # Also that they do not tell: a recomputation, which has no labels, must not go by sizes instead.
        self.axes[site] = head_axes.find(labels, summed, count)
        return self.axes[site]

    def _axis_of(self, scores: Tensor) -> int | None:
        axis = self.score_axis(scores, "scale")
        return axis - scores.dim() if isinstance(axis, int) else None

    def note_default(self, default: Factor) -> None:
        """Note the model's own beta at a softmax; where another one had another, no beta can be that of both."""
        if is_zero(default):
            self._note_nothing()
            return
        if self.recorder.refusal is None:
            self.recorder.note_default(default)
        if self.default is None:
            self.default = default
        elif not are_alike(self.default, default, are_read=self.labels is not None):
            self.refuse(f"its softmax at {find_line()} and one before it get scores that are scaled differently")

    def refuse(self, reason: str) -> None:
        """Leave the module alone when the forward has ended."""
        self.refused = self.refused or reason

    def finish(self) -> None:
        """Take stock of a forward that has ended: learn from it, or leave the module alone from now on."""
        recorder = self.recorder
        if self.is_empty:
            self._note_nothing()
        # The tensors of a transform mean nothing outside of it, those of an empty batch nothing at all.
        if not (compat.is_transformed() or self.is_empty):
            self._learn()
        for product in self.products:
            product.counts = product.acts and recorder.refusal is None and product.reached
        self.labels = self.of_inputs = None  # they hold on to the forward, and so to the graph of autograd
        self.traces.release()

    def _note_nothing(self) -> None:
        """Note that the layer was reached, in a forward that shows nothing."""
        self.recorder.state.seen = True
        note_measured(self.recorder.state)

    def _learn(self) -> None:
        """Learn from a forward whose tensors mean something, or leave the module alone."""
        recorder, plan = self.recorder, self.plan
        reason = _verdict(self) if recorder.refusal is None else recorder.refusal
        choices = self.form.choices
        fused = reason is None and self.attended and self.fused_only and plan.fused.get(choices, True)
        plan.fused[choices] = fused
        if fused and plan.broken_since.get(choices) == recorder.state.resets:
            recorder.state.has_broken_graphs = True
        if recorder.refusal is None and reason is not None:
            recorder.leave_alone(reason, "Attention by F.scaled_dot_product_attention is followed. ")
        elif reason is None and self.recording and not self.attended:
            recorder.has_passed = True
            self._note_nothing()
        elif reason is None and self.labels is not None and self.made_of:
            recorder.attention.correct(self.made_of, self.labels.linears)


def _verdict(forward: FollowedForward) -> str | None:
    """Learn from a forward that has ended; return why the module is to be left alone, or None."""
    recorder, plan = forward.recorder, forward.plan
    plan.checked |= forward.shadows is not None
    plan.axes[forward.form] = forward.axes
    # What a rehearsal shows, the steps before a resume did: so the first step after it computes as they.
    step = recorder.state.steps - forward.rehearsal
    learned = (product.learn(step, are_read=forward.labels is not None) for product in forward.products)
    reason = forward.refused or next(filter(None, learned), None)
    if forward.attended:
        plan.only_projects = False
    elif plan.only_projects is None and forward.labels is not None and forward.labels.linears:
        plan.only_projects = not recorder.is_watched
    if reason is not None or forward.attended:
        return reason
    if forward.has_softmax:
        return _obstacle(forward)
    line = forward.products[0].site.line if forward.products else forward.unscored
    if line is not None:
        return f"the product at {line} reaches no softmax"
    concerns = forward.recording or recorder.state.beta_acts  # else it may pass, as one in evaluation
    if recorder.projected and concerns:
        return UNSEEN
    return PASSED if plan.only_projects and concerns else None


def _label_inputs(forward: FollowedForward, inputs: Any) -> Labels:
    """Labels of the inputs `[..., ..., heads * d_k]`, and of those in which heads have an axis, if any.

    An input with a second axis of the size of its last one tells nothing.
    """
    heads, head_dim = forward.recorder.heads, forward.recorder.head_dim
    labels, width = Labels(forward.is_learned, everywhere=True), heads * head_dim
    floating = [tensor for tensor in tensors_in(inputs) if tensor.is_floating_point()]
    for tensor in floating:
        if tensor.dim() == 3 and tensor.shape[-1] == width not in tensor.shape[:-1]:
            labels.note_input(tensor)
    in_heads = [tensor for tensor in floating if tensor.dim() == 4 and tensor.shape[-1] == head_dim]
    axis = head_axes.of_inputs([tensor.shape for tensor in in_heads], heads)
    if axis is not None:
        for tensor in in_heads:
            labels.note_input(tensor, axis)
    return labels


def _obstacle(forward: FollowedForward) -> str:
    """The reason why no product of q and k was seen to reach the softmax of a forward."""
    if forward.without_heads is None:
        made = forward.unread and f"its softmax takes what {forward.unread} made, a product that is not followed"
        return made or "no product of q and k was seen to reach its softmax"
    return (
        f"the product at {forward.without_heads} is of two matrices, in which its {forward.recorder.heads} heads have "
        "no axis: compute all of them at once, with q and k as [batch, heads, tokens, d_k]"
    )
