"""The last call of a hooked model, remembered so that `betahook.rerun` can run it again.

`Hook` makes one `LastCall`; nothing here runs the model.
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Iterator
from contextlib import ExitStack
from typing import Any

import torch
from torch import nn

from betahook import compat
from betahook.models.torch_calls import rebuilt
from betahook.tap import copies

CACHES = "cache", "past_key_values"
"""Arguments through which models of transformers receive a cache: as of 5.24, and before."""


class LastCall:
    """The last call, without a cache, of the outermost module around all hooked layers that was called so far.

    That is the model itself, unless only a part of it is called, e.g. in a wrapper without a forward.

    Attributes:
        module: the module.
        input: its positional and keyword arguments; None before the first call.
    """

    def __init__(self, model: nn.Module, layers: Collection[nn.Module], undo: ExitStack) -> None:
        self.module = model
        self.input: tuple[tuple[Any, ...], dict[str, Any]] | None = None
        around = list(_around(model, layers))
        self._depth = len(around)
        for depth, module in enumerate(around):
            remember = functools.partial(self._remember, depth)
            copies.keep_hook(module, module.register_forward_pre_hook(remember, with_kwargs=True), undo)

    def release_graph(self) -> None:
        """Detach the remembered arguments from the autograd graph."""
        self.input = rebuilt(self.input, lambda tensor: tensor.detach() if tensor.requires_grad else tensor)

    def _remember(self, depth: int, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        # Tensors of a transform, or without data, are meaningless once it has ended.
        if compat.is_transformed():
            return
        # Ignore calls from inside the module; a compiled graph that read the depth would be recompiled when it changes.
        if depth > 0 and (torch.compiler.is_compiling() or depth > self._depth):
            return
        self._depth = depth
        if module is not self.module:
            self.module, self.input = module, None
        # A rerun would find an advanced cache. A list, because torch 2.6 cannot compile a generator.
        if [name for name in CACHES if kwargs.get(name) is not None]:
            return
        # Copy the containers, since the forward may change a dictionary.
        self.input = (args, kwargs) if torch.compiler.is_compiling() else rebuilt((args, kwargs), lambda tensor: tensor)


def _around(model: nn.Module, layers: Collection[nn.Module]) -> Iterator[nn.Module]:
    """Yield the modules that contain all layers, from the model inwards."""
    yield model
    layers = set(layers)
    paths = [path.split(".") for path, module in model.named_modules() if path and module in layers]
    for names in zip(*paths, strict=False):
        if len(set(names)) > 1:
            return
        model = model.get_submodule(names[0])
        yield model
