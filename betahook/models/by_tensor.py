"""A map with tensors as its keys, from which entries vanish with their tensors.

The tap for attention written by hand looks tensors up many times in each forward; torch's own weak map takes ten times
as long.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Generic, TypeVar

from torch import Tensor

from betahook import compat

V = TypeVar("V")


class ByTensor(Generic[V]):
    """A map whose keys are tensors, by identity; an entry lives as long as its tensor.

    Attributes:
        ids: the `id` of each tensor.
    """

    __slots__ = ("_entries", "ids")

    def __init__(self) -> None:
        self._entries: dict[int, tuple[compat.WeakIdRef, V]] = {}
        self.ids = self._entries.keys()

    def __contains__(self, tensor: object) -> bool:
        return id(tensor) in self._entries  # an entry vanishes with its tensor, so no id is stale

    def __getitem__(self, tensor: Tensor) -> V:
        return self._entries[id(tensor)][1]

    def __setitem__(self, tensor: Tensor, value: V) -> None:
        key = id(tensor)
        # Not a Python function, which would be compiled when a tensor dies in compiled code. The callback receives the
        # reference, which becomes the default of `pop`.
        self._entries[key] = compat.WeakIdRef(tensor, functools.partial(self._entries.pop, key)), value

    def get(self, tensor: object) -> V | None:
        """Look up the value of a tensor, None if it has none."""
        entry = self._entries.get(id(tensor))
        return None if entry is None else entry[1]

    def pop(self, tensor: Tensor) -> None:
        """Forget a tensor, if it is known."""
        self._entries.pop(id(tensor), None)

    def clear(self) -> None:
        """Forget all tensors."""
        self._entries.clear()

    def items(self) -> Iterator[tuple[Tensor, V]]:
        """Yield every live tensor with its value; the map may change during the iteration."""
        for reference, value in list(self._entries.values()):
            if (tensor := reference()) is not None:
                yield tensor, value
