"""The factor that float16 training puts on the loss, and so on the sensitivities."""

from __future__ import annotations

from dataclasses import dataclass

from torch.amp.grad_scaler import GradScaler

from betahook import compat


@dataclass(frozen=True)
class LossScale:
    """Scale of the loss around one optimizer step.

    Attributes:
        of_step: what the loss of the step was multiplied by.
        of_next: what that of the next step is multiplied by; 0 for unknown.
        skipped: True if the scaler skipped the optimizer step, since a gradient was not finite.
    """

    of_step: float
    of_next: float
    skipped: bool

    @classmethod
    def read(cls, scaler: GradScaler | None, expected: float) -> LossScale:
        """Read a scaler after its `update()`; `expected` is `of_next` of the step before.

        Raises:
            TypeError: it is no `GradScaler`.
            RuntimeError: its `update()` is yet to come, before which it does not tell whether it skipped this step.
        """
        if not isinstance(scaler, GradScaler | None):
            raise TypeError(
                f"step(scaler) takes a GradScaler or None; got {type(scaler).__name__}. If it wraps a scaler, "
                "give that one; give a loss by name, step(loss=loss)"
            )
        if scaler is not None and compat.is_before_update(scaler):
            raise RuntimeError("hook.step(scaler) came before scaler.update(): call it after that, once per update")
        if scaler is None or not (state := scaler.state_dict()):  # which is empty where the scaler is disabled
            return cls(1.0, expected, skipped=False)
        scale = float(state["scale"])
        if compat.steps_since_rescaling(state) > 0:
            return cls(scale, scale, skipped=False)
        # The scaler counts anew: its scale fell as it skipped a step, or grew as it skipped none for long.
        if not expected:
            # In the first step: the scale that the scaler was made with, or what a larger one grew from. If it fell
            # before the hook came, the step counts as skipped.
            expected = max(compat.initial_scale(scaler), scale / scaler.get_growth_factor())
        return cls(expected, scale, skipped=scale < expected)
