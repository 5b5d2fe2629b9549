"""The forward that a hooked module would run without its hook, which is an attribute of the module and covers it.

Who changes the class meanwhile expects the new forward to run: `module.__class__ = ...`, `Attention.forward = ...`, or
a notebook that loads the file of the class again. So does who gives a module of diffusers another `processor`.
"""

from __future__ import annotations

from collections.abc import Callable
from types import FunctionType
from typing import Any

from torch import nn


class Original:
    """The forward of a module, made before it is covered."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._last = module.forward
        self._seen = self._look()
        # A forward of its own hides that of its class; what is no function may be another object at each look.
        self._is_followed = "forward" not in vars(module) and isinstance(type(module).forward, FunctionType)

    def now(self) -> tuple[Callable[..., Any], bool]:
        """Return the forward as it is now, and True if it is another one than at the last call, or has other code."""
        if not self._is_followed or (seen := self._look()) == self._seen:
            return self._last, False
        function: Any = seen[0]
        self._seen = seen
        self._last = function.__get__(self._module) if hasattr(function, "__get__") else function
        return self._last, True

    def _look(self) -> tuple[object, object, type]:
        """Look up the forward of the class of the module, its code, and the class of what diffusers lets it call."""
        function = type(self._module).forward
        return function, getattr(function, "__code__", None), type(getattr(self._module, "processor", None))
