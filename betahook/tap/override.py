"""An attribute of a module that has another value for a while."""

from __future__ import annotations

from typing import Any

from torch import nn


class Override:
    """Gives an attribute of a module another value, until `remove()`; `active` says whether that is still to come."""

    active = True

    def __init__(self, module: nn.Module, name: str, value: Any) -> None:
        self._module, self._name, self._value = module, name, value
        self._before = {key: kept for key, kept in vars(module).items() if key == name}
        vars(module)[name] = value

    def remove(self) -> None:
        """Leave the module as it was, unless another value has taken the place of this one."""
        self.active = False
        attributes = vars(self._module)
        if attributes.get(self._name) is self._value:
            del attributes[self._name]
            attributes.update(self._before)
