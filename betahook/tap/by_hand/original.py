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
    """The forward of a module.

    Attributes:
        at_first: the forward before it was covered, which is when this object is made.
    """

    def __init__(self, module: nn.Module) -> None:
        self._last = self.at_first = module.forward
        self._function = _function(module)
        self._with_processor = module if hasattr(module, "processor") else None
        self._code = _code(self._function, self._with_processor)
        # A forward of its own hides that of its class; what is no function may be another object at each look.
        is_followed = "forward" not in vars(module) and isinstance(self._function, FunctionType)
        self._module = module if is_followed else None

    def now(self) -> tuple[Callable[..., Any], bool]:
        """Return the forward as it is now, and True if it is another one than at the last call, or has other code."""
        module = self._module
        if module is None:
            return self.at_first, False
        function = _function(module)
        code = _code(function, self._with_processor)
        if function is self._function and code == self._code:
            return self._last, False
        self._function, self._code = function, code
        self._last = function.__get__(module) if hasattr(function, "__get__") else function
        return self._last, True


def _function(module: nn.Module) -> Any:
    """The forward of the class of a module, not bound to it."""
    return type(module).forward


def _code(function: Any, with_processor: nn.Module | None) -> tuple[object, type]:
    return getattr(function, "__code__", None), type(getattr(with_processor, "processor", None))
