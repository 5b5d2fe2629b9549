"""The tensors that are followed in one forward, each with its trace.

`Forward` holds it; the functions of `matrices`, `softmaxes` and `following` write down what they made.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from betahook import compat
from betahook.models.by_tensor import ByTensor
from betahook.models.torch_calls import tensors_in
from betahook.tap.sites import find_line
from betahook.tap.situation import Derived
from betahook.tap.traces import Scores, Trace


class Followed(ByTensor[Trace]):
    """Traces by tensor. Scores are lost where the memory that they share with others is changed."""

    def __init__(self) -> None:
        super().__init__()
        self._before = ByTensor[tuple[Tensor, Scores]]()  # what was lost by a change of a view, and this

    def note(self, output: Any, derived: Derived) -> None:
        """Remember the traces of what a function returned."""
        if derived is None:
            return
        parts = list(tensors_in(output))
        if not isinstance(derived, list):
            parts = [part for part in parts if part.is_floating_point() or part.is_complex()]
        traces = derived if isinstance(derived, list) else [derived] * len(parts)
        for part, trace in zip(parts, traces, strict=True):
            self[part] = trace.expanded(part.shape) if isinstance(trace, Scores) else trace

    def changed(self, tensor: Any) -> None:
        """Lose the scores that share the memory of a tensor that was changed in place."""
        # Tensors of an export or a transform show no memory, and no layer is left alone for what happens there.
        passing = compat.is_exporting() or compat.is_transformed()
        if passing or not isinstance(tensor, Tensor):
            return
        trace, base = self.get(tensor), compat.owner(tensor)
        if not isinstance(trace, Scores) and base is tensor:
            return
        memory = tensor.untyped_storage().data_ptr()
        for other, of_other in self.items():
            if not isinstance(of_other, Scores) or other is tensor:
                continue
            if other.untyped_storage().data_ptr() == memory:
                if of_other.lost is None:
                    self._before[other] = tensor, of_other
                self[other] = of_other.losing(f"a change of a view of them at {find_line()}")
        if isinstance(trace, Scores) and base not in self:
            self[base] = trace.losing(f"a change of a view at {find_line()}")

    def before_change(self, tensor: Tensor, view: Tensor) -> Scores | None:
        """Look up the trace of scores before a change of this view of them."""
        found = self._before.get(tensor)
        return found[1] if found is not None and found[0] is view else None
