"""The one warning of a NaN or an infinity, with the layers and their steps."""

from __future__ import annotations

import logging

from betahook.layer import Layers
from betahook.state import State

logger = logging.getLogger("betahook")

NAMED = 3
"""So many layers are named, the others are counted."""


def warn_of_nonfinite(state: State, layers: Layers) -> None:
    """Log a warning if scores or gradients were not finite in any step, unless one was logged before."""
    if state.warned_of_nonfinite:
        return
    heads = state.nonfinite_since.cpu().split([layer.heads for layer in layers.values()])
    first = {name: int(since[since > 0].min()) for name, since in zip(layers, heads, strict=True) if since.any()}
    if not first:
        return
    state.warned_of_nonfinite = True
    places = [f"{name} in step {first[name]}" for name in sorted(first, key=first.__getitem__)]
    others = f" and {len(places) - NAMED} other layers" if len(places) > NAMED else ""
    logger.warning(
        "NaN or infinity in the scores or gradients of %s%s: beta stays where it was", ", ".join(places[:NAMED]), others
    )
