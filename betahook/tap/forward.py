"""Knowledge of one forward of a hooked attention module while it runs: traces of its tensors, and its products.

Made by the tap in `products` for every forward; the functions of `matrices`, `softmaxes` and `following` work on it.
"""

from __future__ import annotations

import logging
from typing import Any

from torch import Tensor, nn

from betahook import compat
from betahook.tap import heads
from betahook.tap.calls import Call, tensors_in
from betahook.tap.contraction import Axis
from betahook.tap.plan import Plan
from betahook.tap.recorder import Recorder
from betahook.tap.shadows import Shadows
from betahook.tap.sites import find_line, find_site
from betahook.tap.situation import Derived, Situation
from betahook.tap.traces import Factor, Operand, Product, Scores, Trace

logger = logging.getLogger(__name__)


class Forward:
    """One forward of one attention module.

    Attributes:
        layer: the recorder of the module.
        plan: what earlier forwards showed.
        strict: True if scores that are not understood make the module be left alone. Modules of transformers are
            verified by the zoo: what is not understood there does no harm.
        recording: True if scores are measured.
        labels: the features that entries come from, while the places of the heads are not all known.
        shadows: what another beta would do, in the first forward that is measured.
        products: those that may make scores, so far.
        counted: products since the last softmax.
        attended: None before any softmax, then True if one was over scores.
        without_heads: the line of a product of two matrices, in which several heads have no axis; None for none.
    """

    def __init__(self, layer: Recorder, plan: Plan, *, rehearsal: bool = False) -> None:
        self.layer = layer
        self.plan = plan
        self.rehearsal = rehearsal
        self.strict = is_strict(layer.module)
        self.recording = layer.is_recording and layer.refusal is None and not rehearsal
        self.labels = heads.Labels() if self.strict and not plan.complete else None
        self.shadows = Shadows() if self.strict and self.recording and not plan.checked else None
        self.products: list[Product] = []
        self.counted = 0
        self.attended: bool | None = None
        self.without_heads: str | None = None
        self._traces = compat.WeakIdKeyDictionary()
        self._refusal: str | None = None

    def trace_of(self, tensor: Any) -> Trace | None:
        """Look up a trace; None if the argument is not a followed tensor."""
        return self._traces.get(tensor) if isinstance(tensor, Tensor) else None

    def factor_of(self, operand: Tensor) -> Factor:
        """The factor that an operand of a product carries."""
        trace = self.trace_of(operand)
        if isinstance(trace, Scores) and trace.pure and trace.lost is None:
            return trace.factor * trace.prescale
        return trace.factor if isinstance(trace, Operand) else 1.0

    def is_learned(self, tensor: Tensor) -> bool:
        """Return True for a parameter or a view of one."""
        trace = self.trace_of(tensor)
        return isinstance(tensor, nn.Parameter) or (isinstance(trace, Operand) and trace.learned)

    def situation(self, call: Call) -> Situation:
        """A call as a handler gets it."""
        return Situation(call, self.trace_of, self.strict, self.plan.at_first, self._axis_of)

    def score_axis(self, scores: Tensor, operation: str, dim: int = -1) -> Axis | None:
        """The axis of the heads in scores that come to an operation, with their rows moved along the last axis."""
        labels = None if self.labels is None else self.labels.get(scores)
        rows = scores.movedim(dim, -1)
        labels = None if labels is None else labels.movedim(dim, -1)
        site, axes = find_site(operation), self.plan.axes
        return heads.axis_of(rows, labels, None, range(rows.dim() - 2), self.layer.heads, site, axes)

    def _axis_of(self, scores: Tensor) -> int | None:
        axis = self.score_axis(scores, "scale")
        return axis - scores.dim() if isinstance(axis, int) else None

    def note(self, output: Any, derived: Derived) -> None:
        """Remember the traces of what a function returned."""
        if derived is None:
            return
        parts = list(tensors_in(output))
        if not isinstance(derived, list):
            parts = [part for part in parts if part.is_floating_point() or part.is_complex()]
        traces = derived if isinstance(derived, list) else [derived] * len(parts)
        for part, trace in zip(parts, traces, strict=True):
            self._traces[part] = trace.expanded(part.shape) if isinstance(trace, Scores) else trace

    def forget(self, tensor: Any) -> None:
        """Follow a tensor no longer."""
        if isinstance(tensor, Tensor):
            self._traces.pop(tensor, None)

    def changed(self, tensor: Any) -> None:
        """Lose the scores that share the memory of a tensor that was changed in place."""
        if not self.strict or not isinstance(tensor, Tensor):
            return
        trace, (base, _) = self.trace_of(tensor), compat.owner_and_version(tensor)
        if not isinstance(trace, Scores) and base is tensor:
            return
        memory = tensor.untyped_storage().data_ptr()
        for other, of_other in list(self._traces.items()):
            shared = isinstance(of_other, Scores) and other.untyped_storage().data_ptr() == memory
            if shared and other is not tensor:
                self._traces[other] = of_other.losing(f"a change of a view of them at {find_line()}")
        if isinstance(trace, Scores) and self.trace_of(base) is None:
            self._traces[base] = trace.losing(f"a change of a view at {find_line()}")

    def refuse(self, reason: str) -> None:
        """Leave the module alone when the forward has ended."""
        self._refusal = self._refusal or reason

    def finish(self) -> None:
        """Take stock of a forward that has ended: learn from it, or leave the module alone from now on."""
        layer, known = self.layer, not self.strict or self.layer.refusal is not None
        reason = None if known else self._verdict()
        if reason is not None:
            layer.refuse(reason)
            logger.warning(
                "%s is left alone: %s. Its beta stays the model's own, and its scores are not measured. Attention by "
                "F.scaled_dot_product_attention is followed; attach(layers=...) leaves the module out",
                layer.name or "the model",
                reason,
            )
        for product in self.products:
            product.counts = product.acts and (not self.strict or (layer.refusal is None and product.reached))

    def _verdict(self) -> str | None:
        self.plan.checked |= self.shadows is not None
        reason = self._refusal or self.plan.learn(self.products)
        if reason is None and self.attended is False:
            return self._unseen()
        if reason is None and self.attended is None and self.products:
            return f"the product at {self.products[0].site.line} reaches no softmax"
        return reason

    def _unseen(self) -> str:
        if self.without_heads is None:
            return "no product of q and k was seen to reach its softmax"
        heads = self.layer.heads
        return (
            f"the product at {self.without_heads} is of two matrices, in which its {heads} heads have no axis: compute "
            "all of them at once, with q and k as [batch, heads, tokens, d_k]"
        )


def is_strict(module: nn.Module) -> bool:
    """Return True for a module that transformers does not bring along."""
    return not type(module).__module__.startswith("transformers.models.")
