"""The last call of a hooked model, for `betahook.rerun`, which runs it again.

`Hook` makes one; nothing here runs the model.
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
"""Arguments by which models of transformers get a cache: as of 5.24, and before."""


class LastCall:
    """The last call, without a cache, of the outermost module around all hooked layers that was called so far.

    That is the model, unless only a part of it is called, as in a wrapper without a forward.

    Attributes:
        module: the module.
        input: its positional and keyword arguments; None before.
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
        """Keep the arguments without the graphs of their tensors."""
        self.input = rebuilt(self.input, lambda tensor: tensor.detach() if tensor.requires_grad else tensor)

    def _remember(self, depth: int, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        # Tensors that a transform made, or that have no data, mean nothing once it has ended.
        if compat.is_transformed():
            return
        # Not what the module calls in turn; and in a compiled graph, the depth would be a reason to compile again.
        if depth > 0 and (torch.compiler.is_compiling() or depth > self._depth):
            return
        self._depth = depth
        if module is not self.module:
            self.module, self.input = module, None
        # A cache has moved on when it is used again. A list, since torch 2.6 compiles no generator.
        if [name for name in CACHES if kwargs.get(name) is not None]:
            return
        # The forward may take entries out of a dictionary, or put some in.
        self.input = (args, kwargs) if torch.compiler.is_compiling() else rebuilt((args, kwargs), lambda tensor: tensor)


def _around(model: nn.Module, layers: Collection[nn.Module]) -> Iterator[nn.Module]:
    """The modules that hold all layers, from the model inwards."""
    yield model
    layers = set(layers)
    paths = [path.split(".") for path, module in model.named_modules() if path and module in layers]
    for names in zip(*paths, strict=False):
        if len(set(names)) > 1:
            return
        model = model.get_submodule(names[0])
        yield model
