"""`Override`: replaces the value of an attribute until an exit stack is closed, as the tap does with modules."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

from betahook.tap import copies


class Override:
    """Another value for an attribute of an object, until `undo` is closed; `active` is True until then.

    Copies of the object get the original value. If one attribute is overridden twice, the later override acts. If the
    earlier one ends first, the end of the later one brings its value back for good, so the value must check `active`.
    """

    active = True

    def __init__(self, owner: object, name: str, value: Any, undo: ExitStack) -> None:
        self._owner, self._name, self._value = owner, name, value
        self._before = {key: kept for key, kept in vars(owner).items() if key == name}
        vars(owner)[name] = value
        undo.callback(self._remove)
        copies.keep_out(owner, self._take_off_copy, undo)

    def _remove(self) -> None:
        """Restore the attribute, unless something else has replaced this value since."""
        self.active = False
        self._restore(vars(self._owner))
        # Break the cycle with a value that refers to this object, which would keep a model alive until gc runs.
        del self._owner, self._value, self._before

    def _restore(self, attributes: dict[str, Any]) -> None:
        if attributes.get(self._name) is self._value:
            del attributes[self._name]
            attributes.update(self._before)

    def _take_off_copy(self, attributes: dict[str, Any]) -> None:
        """Give a copy the original value.

        Raises:
            TypeError: something else has replaced this value, and may refer to it.
        """
        if self._name in attributes and attributes[self._name] is not self._value:
            raise TypeError(
                f"{self._name} of a {type(self._owner).__name__} was wrapped after attach, so that a copy would call "
                "the original: copy or pickle the model before attach, or attach after the wrapping"
            )
        self._restore(attributes)
