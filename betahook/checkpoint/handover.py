"""A state that continues with other controllers than the saved ones: they start afresh, if nothing is lost by that.

`betahook.checkpoint.schema` calls this when it matches a state with a hook. Every rank reads the same state, so that
all of them decide alike.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import torch

from betahook.control.base import Controller, defaults, format_controller
from betahook.measure.ranks import is_first_rank
from betahook.state.gains import gain_of

logger = logging.getLogger(__name__)


def difference(given: list[dict[str, Any]], own: list[dict[str, Any]], controllers: Sequence[Controller]) -> str:
    """Describe how the controllers of a state differ from the hook's `own`; empty if they do not.

    An option that the state lacks is newer than the state, and counts as its default.
    """
    other = f"expected {_listed(own, controllers)}, got {_listed(given, controllers)}"
    if [entry["class"] for entry in given] != [entry["class"] for entry in own]:
        return other
    for entry, like, controller in zip(given, own, controllers, strict=True):
        if unknown := sorted(entry["options"].keys() - like["options"].keys()):
            return f"{other}. {like['class']} has no option {', '.join(unknown)}: renamed or removed since then"
        if {**defaults(type(controller)), **entry["options"]} != like["options"]:
            return other
    return ""


def begun_anew(
    state: dict[str, Any], own: dict[str, Any], controllers: Sequence[Controller], other: str
) -> dict[str, Any]:
    """Return the state with the controllers of the hook in place of the saved ones, and log a warning.

    This is possible as long as beta is the model's own.

    Args:
        state: from `schema.parse`.
        own: the state dict of the hook.
        controllers: the controllers of the hook.
        other: the `difference` of its controllers from the saved ones.

    Raises:
        ValueError: beta has moved, and what the saved controllers were about to do would be lost.
    """
    if bool((gain_of(state["beta"], state["beta_default"]) != 1).any()):
        raise ValueError(
            f"the state belongs to other controllers, and beta is not the model's own any more: {other}. Use the saved "
            "ones. Or fold first, and begin a new training with others: load the weights, betahook.restore(model, "
            "folder), one forward, betahook.fold(model). Without a folder attach with the saved ones and load the "
            "state, instead of restore"
        )
    if is_first_rank():
        logger.warning(
            "the state was saved with %s, which left beta the model's own: %s takes over at step %d",
            _listed(state["controllers"], controllers),
            _listed(own["controllers"], controllers),
            state["steps"],
        )
    # The sums since the last pooling are of steps that the new controllers did not see, and perhaps of fewer rows.
    begun = {name: torch.zeros_like(state[name]) for name in ("table", "moments", "window")}
    if own["options"]["exact_max_logit"] and not state["options"].get("exact_max_logit"):
        begun |= {name: torch.zeros_like(state[name]) for name in ("recent", "recent_moments")}
    return {**state, **begun, "batches": 0, "controllers": [{**entry, "state": {}} for entry in own["controllers"]]}


def _listed(entries: list[dict[str, Any]], controllers: Sequence[Controller]) -> str:
    kinds = {type(controller).__qualname__: type(controller) for controller in controllers}
    words = (format_controller(entry["class"], entry["options"], kinds.get(entry["class"])) for entry in entries)
    return f"[{', '.join(words)}]"
