"""The forward that a hooked module would run without its hook, which is an attribute of the module and covers it.

Who changes the class meanwhile expects the new forward to run: `module.__class__ = ...`, `Attention.forward = ...`, or
a notebook that loads the file of the class again.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn


class Original:
    """The forward of a module.

    Attributes:
        at_first: the forward before it was covered, which is when this object is made.
    """

    def __init__(self, module: nn.Module) -> None:
        self.at_first: Callable[..., Any] = module.forward
        self._module = None if "forward" in vars(module) else module  # one of its own hides that of its class
        self._found = _find(module)
        self._code = _code(self._found)

    def now(self) -> tuple[Callable[..., Any], bool]:
        """Return the forward as it is now, and True if it is another one than at the last call, or has other code."""
        if self._module is None:
            return self.at_first, False
        found = _find(self._module)
        code = _code(found)
        is_new = found is not self._found or code != self._code
        self._found, self._code = found, code
        return found.__get__(self._module) if hasattr(found, "__get__") else found, is_new


def _find(module: nn.Module) -> Any:
    """The forward among the members of the classes of a module, not bound to it."""
    return next(vars(kind)["forward"] for kind in type(module).__mro__ if "forward" in vars(kind))


def _code(found: Any) -> Any:
    return getattr(found, "__code__", None)
