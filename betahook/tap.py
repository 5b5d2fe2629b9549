"""What is put on a model so that its attention passes betahook, and taken off again.

Attention that transformers computes passes `betahook.interface`, any other `betahook.products`.
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Iterable

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from betahook import products
from betahook.gain import is_recording
from betahook.layers import ATTRIBUTE, AttentionLayer


def connect(model: nn.Module, layers: Collection[AttentionLayer]) -> list[RemovableHandle | products.Override]:
    """Let the modules of the layers pass through the tap, and what enters W_q and W_k too.

    Returns:
        Handles, of which each undoes a part by its `remove()`; the rest is undone by `disconnect`.
    """
    handles: list[RemovableHandle | products.Override] = []
    for layer in layers:
        setattr(layer.module, ATTRIBUTE, layer)
        if layer.route != "interface":
            handles.append(products.connect(layer))
        watched: dict[tuple[nn.Module, int], list[str]] = {}
        for of, projection in zip(("query", "key"), layer.projections or (), strict=False):
            watched.setdefault((projection.module, projection.argument), []).append(of)
        handles += [
            module.register_forward_pre_hook(functools.partial(_record_input, layer, of, argument))
            for (module, argument), of in watched.items()
        ]
    return handles + products.keep_padding(model, layers)


def disconnect(layers: Iterable[AttentionLayer]) -> None:
    """Undo `connect`, but for the handles."""
    for layer in layers:
        delattr(layer.module, ATTRIBUTE)


def _record_input(
    layer: AttentionLayer, of: list[str], argument: int, module: nn.Module, args: tuple[Tensor, ...]
) -> None:
    if len(args) > argument and is_recording(layer):
        layer.record_input(args[argument], *of)
