"""State of one forward pass of a hooked attention module: the traces of its tensors, and its products so far.

The tap in `watching` creates it for every forward; the functions of `matrices`, `softmaxes` and `following` read and
update it. At the end `finish` updates the module's `Plan`, or leaves the module alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from betahook import compat
from betahook.models.discovery import shown_name
from betahook.models.labels import FeaturePair, Labels
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
from betahook.tap.recorder import NO_ATTENTION, Recorder, shows_shapes

UNSEEN = (
    "a forward computed queries, but no attention over them was seen: it may run in a kernel that betahook cannot see"
)
"""The reason to leave a module alone whose query projection ran and no attention was seen, even if one was before."""


class FollowedForward:
    """Everything known about one forward of one attention module, while it is followed and at its end.

    Raises:
        RuntimeError: no forward has shown yet how the module computes its scores, and this one cannot, since it runs
            within `torch.export` or a similar transform.

    Attributes:
        recorder: the module's recorder.
        plan: what earlier forwards showed.
        is_rehearsal: True for a dry run: beta does not act, and nothing is measured.
        is_recording: True if scores are measured.
        form: the form of the inputs, by which the plan keeps the axes of the heads.
        is_empty: True if the first input has no entries, as in a batch without samples: such a forward shows nothing.
        axes: the axes of the heads that are known for inputs of this form, by site.
        labels: the feature that each entry comes from; only in the first forward with inputs of this form, else None.
        of_inputs: further labels in that forward, which also tell the entries of the inputs apart. Only these can
            distinguish heads that share one projection, each applied to its own part of the input.
        activations: the tensors computed from the inputs, in that forward.
        shadows: the tensors under another beta, in the first forward that is measured, else None.
        is_settled: True if neither labels nor shadows are needed.
        traces: the traces of the tensors that are followed.
        products: the products so far that may make scores.
        nodes: the autograd nodes of their results, while autograd is on.
        has_softmax: True once there was a softmax outside of a fused kernel.
        attended: True once there was attention: a softmax over scores or attention weights, or a fused kernel.
        default: the model's own beta at the first softmax.
        fused_only: True while all attention is `F.scaled_dot_product_attention` in the form that `tap.compiled` takes.
        features: those that q and k come from, for each product that reached a softmax; only if there are labels.
        unread_product: name and line of an unrecognised product that reached a softmax on its own; None for none.
        unscored_line: the line of a product of activations in a form that is not read; None for none.
        headless_line: the line of a product of two matrices, which have no axis for several heads; None for none.
        refused: the reason to leave the module alone once the forward has ended; None for none.
    """

    def __init__(self, recorder: Recorder, plan: Plan, inputs: Any, *, is_rehearsal: bool = False) -> None:
        self.recorder, self.plan, self.is_rehearsal = recorder, plan, is_rehearsal
        recorder.computed_queries = False
        given = next(iter(tensors_in(inputs)), None)
        is_dry = is_rehearsal or shows_shapes(given, recorder.state)
        self.is_recording = recorder.is_recording and not (is_dry or recorder.refusal)
        form = form_of(inputs)
        self.form = plan.nearest(form) if compat.is_exporting() else form
        self.axes = plan.axes.get(self.form, {})
        self.is_empty = given is not None and given.numel() == 0
        is_first = self.form not in plan.axes and recorder.refusal is None
        if is_first and (compat.is_exporting() or (is_rehearsal and compat.is_transformed())):
            raise RuntimeError(
                f"{shown_name(recorder.name)}: no forward has shown yet how this attention computes its scores. Run a "
                "forward of the model outside of torch.export, torch.func and torch.jit.trace first"
            )
        self.labels = Labels(self.is_learned) if is_first and not compat.is_without_data() else None
        self.of_inputs = None if self.labels is None else _label_inputs(self, inputs)
        self.activations = Activations(inputs) if is_first else None
        self.shadows = Shadows() if self.is_recording and not plan.checked else None
        self.products: list[Product] = []
        self.nodes: dict[Product, Any] = {}
        self.has_softmax = self.attended = False
        self.default: Factor | None = None
        self.fused_only = True
        self.features: list[FeaturePair] = []
        self.unread_product: str | None = None
        self.unscored_line: str | None = None
        self.headless_line: str | None = None
        self.is_settled = self.labels is None and self.shadows is None
        self.traces = Traces()
        self.refused: str | None = None

    def trace_of_values(self) -> Operand | None:
        """The trace of weights times values; None if no product or softmax of earlier forwards took such a tensor."""
        return Operand(from_values=True) if self.plan.takes_values or not self.is_settled else None

    def factors_of(self, history: History, query: Tensor, key: Tensor) -> tuple[Factor, Factor]:
        """Return the factors that q and k carry; an untraced key, as from a cache, carries that of earlier keys."""
        of_query, of_key = self._factor_of(query), self._factor_of(key)
        if key not in self.traces and history.key_factor is not None:
            of_key = history.key_factor
        if not compat.is_transformed():
            history.key_factor = of_key
        return of_query, of_key

    def _factor_of(self, operand: Tensor) -> Factor:
        trace = self.traces.get(operand)
        if isinstance(trace, Scores) and trace.unbiased and trace.lost is None:
            return trace.factor * trace.prescale
        return trace.factor if isinstance(trace, Operand) else 1.0

    def is_learned(self, tensor: Tensor) -> bool:
        """Return True for a parameter, a view of one, or a tensor computed from parameters alone."""
        return is_learned(tensor, self.traces.get(tensor))

    def _always(self, now: bool) -> bool:
        """Return `plan.always(now)`, but skip its look-up of the site for a False `now` after the first forward."""
        return (now or self.labels is not None) and self.plan.always(now)

    def _is_activation(self, tensor: Tensor) -> bool:
        return self.activations is not None and tensor in self.activations

    def situation(self, call: Call) -> Situation:
        """Wrap a call as the argument of a handler."""
        return Situation(call, self.traces.get, self.plan.at_first, self._always, self._is_activation, self._axis_of)

    def score_axis(self, scores: Tensor, operation: str, dim: int = -1) -> Axis | None:
        """Find the axis of the heads in scores at an operation, after moving `dim`, along which rows lie, last."""
        labels, rows = self.labels_of(scores), scores.movedim(dim, -1)
        labels = None if labels is None else labels.movedim(dim, -1)
        return self.head_axis(rows, labels, None, range(rows.dim() - 2), find_site(operation))

    def labels_of(self, tensor: Tensor, summed: int | None = None) -> Tensor | None:
        """Return the labels of a tensor; None if it has none, or if this is not the first forward of its form.

        If the features in an operand vary along no axis but `summed`, and so show no heads, these are the labels that
        also tell the entries of the inputs apart.
        """
        found = None if self.labels is None else self.labels.get(tensor)
        if self.of_inputs is None or (found is not None and (summed is None or head_axes.varying(found, summed))):
            return found
        return self.of_inputs.get(tensor)

    def head_axis(
        self, tensor: Tensor, labels: Tensor | None, summed: int | None, shared: Sequence[int], site: Site
    ) -> Axis | None:
        """Find the axis of the heads in a tensor; None if it cannot be told apart from other axes.

        Args:
            tensor: an operand or scores.
            labels: its labels, if any; the axis found by them is remembered for the site.
            summed: the axis of the components in an operand; None for scores.
            shared: the axes that may be that of the heads.
            site: the site where the tensor is used.
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
        # None is stored too: a recomputation, which has no labels, must not fall back to sizes.
        self.axes[site] = head_axes.find(labels, summed, count)
        return self.axes[site]

    def _axis_of(self, scores: Tensor) -> int | None:
        axis = self.score_axis(scores, "scale")
        return axis - scores.dim() if isinstance(axis, int) else None

    def note_default(self, default: Factor) -> None:
        """Note the model's own beta at a softmax; refuse if an earlier softmax had another, as one must fit both."""
        if is_zero(default):
            self._note_nothing()
            return
        if self.recorder.refusal is None:
            self.recorder.note_default(default)
        if self.default is None:
            self.default = default
        elif not are_alike(self.default, default, are_read=self.labels is not None):
            self.refuse(f"its softmax at {find_line()} and an earlier one receive scores that are scaled differently")

    def refuse(self, reason: str) -> None:
        """Leave the module alone when the forward has ended."""
        self.refused = self.refused or reason

    def finish(self) -> None:
        """Learn from the forward, which has ended, or leave the module alone from now on."""
        recorder = self.recorder
        self.traces.record_log_softmaxes()
        if self.is_empty:
            self._note_nothing()
        # Tensors under a transform mean nothing outside of it, and those of an empty batch show nothing.
        if not (compat.is_transformed() or self.is_empty):
            self._learn()
        for product in self.products:
            product.counts = product.acts and recorder.refusal is None and product.reached
        self.labels = self.of_inputs = None  # they would keep the autograd graph alive
        self.traces.release()

    def _note_nothing(self) -> None:
        """Note that the layer was reached, by a forward that shows nothing."""
        self.recorder.state.seen = True
        note_measured(self.recorder.state)

    def _learn(self) -> None:
        """Learn from a forward that is neither empty nor transformed, or leave the module alone."""
        recorder, plan = self.recorder, self.plan
        reason = _verdict(self) if recorder.refusal is None else recorder.refusal
        choices = self.form.choices
        fused = reason is None and self.attended and self.fused_only and plan.fused.get(choices, True)
        plan.fused[choices] = fused
        if fused and plan.broken_since.get(choices) == recorder.state.resets:
            recorder.state.has_broken_graphs = True
        if recorder.refusal is None and reason is not None:
            recorder.leave_alone(reason, "Attention by F.scaled_dot_product_attention is followed. ")
        elif reason is None and self.is_recording and not self.attended:
            recorder.showed_no_attention = True
            self._note_nothing()
        elif reason is None and self.labels is not None and self.features:
            recorder.attention.learn_places(self.features, self.labels.linears)


def _verdict(forward: FollowedForward) -> str | None:
    """Learn from a forward that has ended; return the reason to leave the module alone, or None."""
    recorder, plan = forward.recorder, forward.plan
    plan.checked |= forward.shadows is not None
    plan.axes[forward.form] = forward.axes
    # A rehearsal shows what the steps before a resume had shown, and counts as one of them: the first step after the
    # resume then computes as they did.
    step = recorder.state.steps - forward.is_rehearsal
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
    line = forward.products[0].site.line if forward.products else forward.unscored_line
    if line is not None:
        return f"the product at {line} reaches no softmax"
    concerns = forward.is_recording or recorder.state.beta_acts  # otherwise it may pass, e.g. in evaluation
    if recorder.computed_queries and concerns:
        return UNSEEN
    return NO_ATTENTION if plan.only_projects and concerns else None


def _label_inputs(forward: FollowedForward, inputs: Any) -> Labels:
    """Label the features of inputs `[..., ..., heads * d_k]`, and of those in which heads have an axis, if any.

    An input in which another axis is as long as the last one shows nothing, and has no labels.
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
    """Explain why no product of q and k was seen to reach the softmax of a forward."""
    if forward.headless_line is not None:
        return (
            f"the product at {forward.headless_line} is of two matrices, in which its {forward.recorder.heads} heads "
            "have no axis: compute all of them at once, with q and k as [batch, heads, tokens, d_k]"
        )
    if forward.unread_product is not None:
        return f"its softmax takes the result of {forward.unread_product}, a product that is not followed"
    return "no product of q and k was seen to reach its softmax"
