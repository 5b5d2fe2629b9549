"""Activations in an attention written by hand: its inputs, and tensors that are computed from them.

Tensors that are computed from parameters and constants alone are not activations.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from betahook.models.by_tensor import ByTensor
from betahook.models.torch_calls import Call, tensors_in

LIKE_ANOTHER = frozenset(["to", "type_as", "view_as", "reshape_as", "expand_as"])
"""Functions whose further tensors only give a dtype, a device or a shape."""


class Activations(ByTensor[bool]):
    """The activations of one forward, beginning with its inputs, except parameters."""

    def __init__(self, inputs: Any) -> None:
        super().__init__()
        for tensor in tensors_in(inputs):
            if not isinstance(tensor, nn.Parameter):
                self[tensor] = True

    def note(self, call: Call, output: Any) -> None:
        """Note the results of a call as activations, if activations are among its arguments."""
        made_of = call.tensors[:1] if call.name in LIKE_ANOTHER else call.tensors
        if any(tensor in self for tensor in made_of):
            for part in tensors_in((output, call.operands[:1] if call.in_place else ())):
                self[part] = True
