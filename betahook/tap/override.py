"""An attribute of an object that has another value for a while."""

from __future__ import annotations

from typing import Any


class Override:
    """Gives an attribute of an object another value, until `remove()`; `active` says whether that is still to come."""

    active = True

    def __init__(self, owner: object, name: str, value: Any) -> None:
        self._owner, self._name, self._value = owner, name, value
        self._before = {key: kept for key, kept in vars(owner).items() if key == name}
        vars(owner)[name] = value

    def remove(self) -> None:
        """Leave the object as it was, unless another value has taken the place of this one."""
        if not self.active:
            return
        self.active = False
        attributes = vars(self._owner)
        if attributes.get(self._name) is self._value:
            del attributes[self._name]
            attributes.update(self._before)
        # A value that refers to this object would keep both, and so a model, until the cyclic collector runs.
        del self._owner, self._value, self._before
