"""`Override`: another value for an attribute of an object, until a stack is closed."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any


class Override:
    """Gives an attribute of an object another value, until `undo` is closed; `active` is True until then."""

    active = True

    def __init__(self, owner: object, name: str, value: Any, undo: ExitStack) -> None:
        self._owner, self._name, self._value = owner, name, value
        self._before = {key: kept for key, kept in vars(owner).items() if key == name}
        vars(owner)[name] = value
        undo.callback(self._remove)

    def _remove(self) -> None:
        """Leave the object as it was, unless another value has taken the place of this one."""
        self.active = False
        attributes = vars(self._owner)
        if attributes.get(self._name) is self._value:
            del attributes[self._name]
            attributes.update(self._before)
        # A value that refers to this object would keep both, and so a model, until the cyclic collector runs.
        del self._owner, self._value, self._before
