"""Stand-ins for functions that user code calls by name, put there by `guards` and `tap.kernels` for a while."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeAlias

from betahook.models.code import without_partial

_ATTRIBUTE = "_betahook_stand_in"
"""Attribute of a stand-in that holds its `_Replaced`."""


Namespace: TypeAlias = dict[str, Any] | type
"""A place in which code finds a function by its name."""


@dataclass
class _Replaced:
    """Record of a function that was replaced. Only its stand-in holds it, so that it dies with the namespace.

    Attributes:
        namespace: the dictionary or the class in which the function was found.
        name: its name there.
        function: the function.
        users: number of contexts that need the replacement.
    """

    namespace: Namespace
    name: str
    function: Any
    users: int = 0


def find(namespace: Namespace, name: str) -> Any:
    """Look up a name in a namespace, None if it is missing; a class is searched without its bases."""
    return (vars(namespace) if isinstance(namespace, type) else namespace).get(name)


def _assign(namespace: Namespace, name: str, value: Any) -> None:
    if isinstance(namespace, type):
        setattr(namespace, name, value)
    else:
        namespace[name] = value


@contextmanager
def put(namespace: Namespace, name: str, make: Callable[[Any], Any]) -> Iterator[None]:
    """Replace a function in a namespace by `make(function)`, until the last context for it ends."""
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
    replaced = _of_stand_in(function)  # of a stand-in that may have been imported from elsewhere
    if replaced is not None and replaced.namespace is namespace and replaced.name == name:
        return replaced
    made = make(function)
    setattr(without_partial(made), _ATTRIBUTE, new := _Replaced(namespace, name, function))
    _assign(namespace, name, made)
    return new


def _of_stand_in(value: Any) -> _Replaced | None:
    """Return the record of a stand-in; None for any other value.

    It is an attribute of the function inside a partial, since copies of a partial would share an attribute of its own.
    """
    replaced = getattr(without_partial(value), _ATTRIBUTE, None)
    return replaced if isinstance(replaced, _Replaced) else None
