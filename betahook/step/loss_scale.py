"""The factor that float16 training puts on the loss, and hence on the sensitivities; `Hook.step` reads it."""

from __future__ import annotations

from dataclasses import dataclass

from torch.amp.grad_scaler import GradScaler

from betahook import compat


@dataclass(frozen=True)
class LossScale:
    """Scale of the loss around one optimizer step.

    Attributes:
        of_step: factor on the loss of this step.
        of_next: factor on the loss of the next step; 0 if unknown.
        skipped: True if the scaler skipped the optimizer step because a gradient was not finite.
    """

    of_step: float
    of_next: float
    skipped: bool

    @classmethod
    def read(cls, scaler: GradScaler | None, expected: float) -> LossScale:
        """Read a scaler after its `update()`; `expected` is `of_next` of the step before.

        Raises:
            TypeError: `scaler` is not a `GradScaler`.
            RuntimeError: its `update()` was not called yet, so it does not show whether it skipped this step.
        """
        if not isinstance(scaler, GradScaler | None):
            raise TypeError(
                f"step(scaler) takes a GradScaler or None; got {type(scaler).__name__}. If it wraps a scaler, "
                "give that one; give a loss by name, step(loss=loss)"
            )
        if scaler is not None and compat.is_before_update(scaler):
            raise RuntimeError("hook.step(scaler) came before scaler.update(): call it after that, once per update")
        if scaler is None or not (state := scaler.state_dict()):  # empty if the scaler is disabled
            return cls(1.0, expected, skipped=False)
        scale = float(state["scale"])
        if compat.steps_since_rescaling(state) > 0:
            return cls(scale, scale, skipped=False)
        # The count was reset: the scale fell because a step was skipped, or grew because none was for long.
        if not expected:
            # In the first step, expect the scale that the scaler was created with or, if it has grown, the one that it
            # grew from. If it fell before the hook was attached, the step counts as skipped.
            expected = max(compat.initial_scale(scaler), scale / scaler.get_growth_factor())
        return cls(expected, scale, skipped=scale < expected)
