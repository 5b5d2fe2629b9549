"""What is put on a model so that its attention passes betahook, and taken off again.

Attention that transformers computes passes `betahook.tap.interface`, any other `betahook.tap.products`.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Collection
from contextlib import ExitStack
from typing import Any

from torch import nn

from betahook.layers import ATTRIBUTE, AttentionLayer
from betahook.tap import products
from betahook.tap.gain import is_recording


def connect(model: nn.Module, layers: Collection[AttentionLayer], undo: ExitStack) -> None:
    """Let the modules of the layers pass through the tap, and what enters W_q and W_k too, until `undo` is closed."""
    for layer in layers:
        setattr(layer.module, ATTRIBUTE, layer)
        undo.callback(delattr, layer.module, ATTRIBUTE)
        watched: dict[tuple[nn.Module, int], list[str]] = {}
        for made, projection in zip(("query", "key"), layer.projections or (), strict=False):
            watched.setdefault((projection.module, projection.argument), []).append(made)
        for (module, argument), of in watched.items():
            record = functools.partial(_record_input, layer, of, argument, _name_of(argument, module))
            undo.callback(module.register_forward_pre_hook(record, with_kwargs=True).remove)
        if layer.route != "interface":
            undo.callback(products.connect(layer).remove)
    for override in products.keep_padding(model, layers):
        undo.callback(override.remove)


def _name_of(argument: int, module: nn.Module) -> str | None:
    """The name of a positional argument of a module; None where its forward does not tell."""
    try:
        names = list(inspect.signature(module.forward).parameters)
    except ValueError:  # of code that is not Python's
        return None
    return names[argument] if argument < len(names) else None


def _record_input(
    layer: AttentionLayer,
    of: list[str],
    argument: int,
    name: str | None,
    module: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> None:
    """Record the argument that stands at a position, or is given by name."""
    given = args[argument] if len(args) > argument else kwargs.get(name or "")
    if given is not None and is_recording(layer):
        layer.record_input(given, *of)
