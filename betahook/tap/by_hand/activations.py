"""Activations in an attention written by hand: what is made of its inputs, not of parameters and constants alone."""

from __future__ import annotations

from typing import Any

from torch import nn

from betahook.models.by_tensor import ByTensor
from betahook.models.torch_calls import Call, tensors_in

LIKE_ANOTHER = frozenset(["to", "type_as", "view_as", "reshape_as", "expand_as"])
"""Functions whose further tensors give a dtype, a device or a shape alone."""


class Activations(ByTensor[bool]):
    """The activations of one forward. All that it was given are such, but for parameters."""

    def __init__(self, inputs: Any) -> None:
        super().__init__()
        for tensor in tensors_in(inputs):
            if not isinstance(tensor, nn.Parameter):
                self[tensor] = True

    def note(self, call: Call, output: Any) -> None:
        """Note what a call made of activations."""
        made_of = call.tensors[:1] if call.name in LIKE_ANOTHER else call.tensors
        if any(tensor in self for tensor in made_of):
            for part in tensors_in((output, call.operands[:1] if call.in_place else ())):
                self[part] = True
