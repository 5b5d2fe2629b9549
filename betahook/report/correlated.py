"""One more forward of a hooked model, in which the audit looks at q and k themselves.

`Hook.audit` calls it; ordinary steps pay nothing for it. The model, its hook and the random state are as before.
"""

from __future__ import annotations

from contextlib import ExitStack
from functools import partial

import torch
from torch import Tensor

from betahook.layer import Layers
from betahook.measure.correlations import Correlations
from betahook.measure.statistics import is_distributed
from betahook.replay import rerun
from betahook.state import State
from betahook.tap.listening import listening
from betahook.tap.recorder import ATTRIBUTE


@torch.no_grad()
def correlations(hook: rerun.Hooked, layers: Layers, state: State) -> dict[str, Correlations]:
    """Measure the correlations in each layer that the last input reaches; of several calls of a layer the first counts.

    Nothing is measured without a last input, or in a run of several processes: they would have to run the model
    together, and an audit may be asked for on one alone.
    """
    found: dict[str, Correlations] = {}

    def listen(name: str, query: Tensor, key: Tensor, valid: tuple[Tensor | None, Tensor | None]) -> None:
        if name not in found:
            found[name] = Correlations.of(query, key, valid)

    if hook.last_call.input is None or is_distributed():
        return found
    with ExitStack() as stack:
        stack.enter_context(rerun.without_side_effects(hook))
        stack.callback(vars(state).update, turn=state.turn, paused=state.paused)
        state.turn, state.paused = range(len(state.ranges)), False
        for name, layer in layers.items():
            stack.enter_context(listening(getattr(layer.module, ATTRIBUTE), partial(listen, name)))
        rerun.run_model(hook)
    return found
