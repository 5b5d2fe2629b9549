"""Stand-ins for functions that users' code calls by name, as long as hooks need them there."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeAlias

from betahook.models.code import whole

_ATTRIBUTE = "_betahook_stand_in"
"""Attribute of a stand-in that holds its `_Replaced`."""


Namespace: TypeAlias = dict[str, Any] | type
"""A place in which code finds a function by its name."""


@dataclass
class _Replaced:
    """A function that was replaced. Its stand-in holds it: nothing else outlives the namespace that it is in.

    Attributes:
        namespace: where it was found, a dictionary or a class.
        name: by which it was found there.
        function: the function.
        users: number of contexts that need the replacement.
    """

    namespace: Namespace
    name: str
    function: Any
    users: int = 0


def find(namespace: Namespace, name: str) -> Any:
    """Look up a name in a namespace, None for nothing: in a class alone, not in its bases."""
    return (vars(namespace) if isinstance(namespace, type) else namespace).get(name)


def _assign(namespace: Namespace, name: str, value: Any) -> None:
    if isinstance(namespace, type):
        setattr(namespace, name, value)
    else:
        namespace[name] = value


@contextmanager
def put(namespace: Namespace, name: str, make: Callable[[Any], Any]) -> Iterator[None]:
    """Replace a function in a namespace by `make(function)` until the last such context ends."""
    replaced = _replaced(namespace, name, make)
    replaced.users += 1
    try:
        yield
    finally:
        replaced.users -= 1
        if replaced.users == 0 and _of_stand_in(find(namespace, name)) is replaced:
            _assign(namespace, name, replaced.function)


def _replaced(namespace: Namespace, name: str, make: Callable[[Any], Any]) -> _Replaced:
    function = find(namespace, name)
    replaced = _of_stand_in(function)  # which may have been imported from elsewhere
    if replaced is not None and replaced.namespace is namespace and replaced.name == name:
        return replaced
    made = make(function)
    setattr(whole(made), _ATTRIBUTE, new := _Replaced(namespace, name, function))
    _assign(namespace, name, made)
    return new


def _of_stand_in(value: Any) -> _Replaced | None:
    """Tell what a stand-in replaced; None for any other value. A partial function would hand it on to its copies."""
    replaced = getattr(whole(value), _ATTRIBUTE, None)
    return replaced if isinstance(replaced, _Replaced) else None
