"""The note that `fold` leaves in the config of a model, and so in its config.json and on its page on the Hub.

A folded model is plain: nothing reads the note. `del model.config.betahook_folded` removes it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from betahook.hook import Hook
from betahook.version import __version__

KEY = "betahook_folded"
"""Of the note in the config; another one than that of a model whose beta is not in its weights."""
TAG = "betahook"


def leave(hook: Hook, gains: list[Tensor]) -> None:
    """Note what was folded in the config of the model, and tag the model card that the Hub gets.

    Args:
        hook: of the folded model.
        gains: `beta / beta_default` of the layers that were folded, `[heads]` each; nothing is noted without one.
    """
    model: Any = hook.model
    if not gains:
        return
    if hasattr(getattr(model, "config", None), "to_json_file"):  # it is a config of transformers
        all_gains = torch.cat(gains)
        note = {
            "version": __version__,
            "controllers": [repr(controller) for controller in hook.controllers],
            "steps": hook.steps,
            "beta_over_own": [float(f"{float(limit):.6g}") for limit in all_gains.aminmax()],
        }
        setattr(model.config, KEY, note)
    if hasattr(model, "add_model_tags"):
        model.add_model_tags([TAG])
