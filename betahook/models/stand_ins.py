"""Stand-ins for functions that users' code calls by name, as long as hooks need them there."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

_ATTRIBUTE = "_betahook_stand_in"
"""Attribute of a stand-in that holds its `_Replaced`."""


@dataclass
class _Replaced:
    """A function that was replaced. Its stand-in holds it: nothing else outlives the namespace that it is in.

    Attributes:
        namespace: where it was found.
        function: the function.
        users: number of contexts that need the replacement.
    """

    namespace: dict[str, Any]
    function: Any
    users: int = 0


@contextmanager
def put(namespace: dict[str, Any], name: str, make: Callable[[Any], Any]) -> Iterator[None]:
    """Replace a function in a namespace by `make(function)` until the last such context ends."""
    replaced = _replaced(namespace, name, make)
    replaced.users += 1
    try:
        yield
    finally:
        replaced.users -= 1
        if replaced.users == 0 and getattr(namespace.get(name), _ATTRIBUTE, None) is replaced:
            namespace[name] = replaced.function


def _replaced(namespace: dict[str, Any], name: str, make: Callable[[Any], Any]) -> _Replaced:
    function = namespace[name]
    replaced = getattr(function, _ATTRIBUTE, None)
    if isinstance(replaced, _Replaced) and replaced.namespace is namespace:  # not imported from another one
        return replaced
    namespace[name] = make(function)
    setattr(namespace[name], _ATTRIBUTE, new := _Replaced(namespace, function))
    return new
