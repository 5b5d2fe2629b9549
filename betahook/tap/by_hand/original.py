"""The forward that a hooked module would run without its hook, an attribute that hides the forward of the class.

It may change while the hook is on, and the user then expects the new one to run: after `module.__class__ = ...` or
`Attention.forward = ...`, after a notebook reloads the file of the class, or with another `processor` in a module of
diffusers.
"""

from __future__ import annotations

from collections.abc import Callable
from types import FunctionType
from typing import Any

from torch import nn


class Original:
    """The forward of a module without its hook; create it before the hook hides that forward."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._last = module.forward
        self._seen = self._look()
        # An instance's own forward hides that of its class; one that is no function may be a new object at each access.
        self._is_followed = "forward" not in vars(module) and isinstance(type(module).forward, FunctionType)

    def current(self) -> tuple[Callable[..., Any], bool]:
        """Return the present forward, and True if it, its code or the processor has changed since the last call."""
        if not self._is_followed or (seen := self._look()) == self._seen:
            return self._last, False
        function: Any = seen[0]
        self._seen = seen
        self._last = function.__get__(self._module) if hasattr(function, "__get__") else function
        return self._last, True

    def _look(self) -> tuple[object, object, type]:
        """Look up the forward of the module's class, its code, and the class of the `processor` of diffusers."""
        function = type(self._module).forward
        return function, getattr(function, "__code__", None), type(getattr(self._module, "processor", None))
