"""`Override`: another value for an attribute of an object, until a stack is closed."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

from betahook.tap import copies


class Override:
    """Gives an attribute of an object another value, until `undo` is closed; `active` is True until then.

    A copy of the object has the value from before. Of two on one attribute, the later one acts. If the earlier one ends
    first, its value comes back at the end of the later one, and stays: it must look at `active`.
    """

    active = True

    def __init__(self, owner: object, name: str, value: Any, undo: ExitStack) -> None:
        self._owner, self._name, self._value = owner, name, value
        self._before = {key: kept for key, kept in vars(owner).items() if key == name}
        vars(owner)[name] = value
        undo.callback(self._remove)
        copies.keep_out(owner, self._take_off_copy, undo)

    def _remove(self) -> None:
        """Leave the object as it was, unless another value has taken the place of this one."""
        self.active = False
        self._restore(vars(self._owner))
        # A value that refers to this object would keep both, and so a model, until the cyclic collector runs.
        del self._owner, self._value, self._before

    def _restore(self, attributes: dict[str, Any]) -> None:
        if attributes.get(self._name) is self._value:
            del attributes[self._name]
            attributes.update(self._before)

    def _take_off_copy(self, attributes: dict[str, Any]) -> None:
        """Give a copy the value from before.

        Raises:
            TypeError: another value has taken the place of this one, and may hold it.
        """
        if self._name in attributes and attributes[self._name] is not self._value:
            raise TypeError(
                f"{self._name} of a {type(self._owner).__name__} was wrapped after attach, so that a copy would call "
                "the original: copy or pickle the model before attach, or attach after the wrapping"
            )
        self._restore(attributes)
