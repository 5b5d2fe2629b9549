"""Keep changes that betahook makes to objects out of their copies and pickles, where they would act on the original.

`copy.deepcopy`, `pickle` and what builds on them (`torch.save` of a model, `AveragedModel`, `spawn`) get the attributes
of an object from `__reduce_ex__`. Code that changes a user's object registers here how to undo the change in a copy.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any, NoReturn

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

Attributes = dict[str, Any]
_REDUCE = "__reduce_ex__"


def keep_out(owner: object, take_off: Callable[[Attributes], None], undo: ExitStack) -> None:
    """Call `take_off` on the attributes that a copy of an object is about to receive, until `undo` is closed.

    Args:
        owner: the object.
        take_off: changes the attributes in place; it may raise an exception to refuse the copy.
        undo: exit stack that ends this.
    """
    reduce = vars(owner).get(_REDUCE)
    if not isinstance(reduce, _Reduce):
        reduce = vars(owner)[_REDUCE] = _Reduce(owner)
    reduce.changes.append(take_off)
    undo.callback(reduce.forget, take_off)


def refuse_adapted(consequence: str) -> NoReturn:
    """Refuse a copy while an adapted beta acts; `consequence` completes "the copy would ..."."""
    raise TypeError(
        f"a hooked model whose beta is adapted cannot be copied or pickled, as the copy would {consequence}: copy it "
        "before attach, fold() or detach() first, or copy its state_dict() and that of its hook"
    )


def takes_hooks(module: nn.Module) -> bool:
    """Return False for a module compiled by `torch.jit.script`, which raises when a hook is put on it."""
    return not isinstance(module, torch.jit.RecursiveScriptModule)  # type: ignore[attr-defined]


def keep_hook(module: nn.Module, handle: RemovableHandle, undo: ExitStack) -> None:
    """Remove a hook of a module when `undo` is closed, and keep it out of copies until then."""
    undo.callback(handle.remove)
    holders = [reference() for reference in (handle.hooks_dict_ref, *handle.extra_dict_ref)]
    names = [name for name, value in vars(module).items() if any(value is holder for holder in holders)]
    keep_out(module, functools.partial(_take_off_hook, handle.id, names), undo)


def _take_off_hook(identity: int, names: Sequence[str], attributes: Attributes) -> None:
    """Remove a hook from the dictionaries in which torch keeps it."""
    for name in set(names) & attributes.keys():  # a class may choose other attributes for a copy
        held = attributes[name]
        attributes[name] = type(held)((key, hook) for key, hook in held.items() if key != identity)


class Uncopied:
    """Base class of objects that belong to one model, and so refuse to be copied."""

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise TypeError(
            f"a {type(self).__name__} cannot be copied or pickled, since it belongs to its model: copy its "
            "state_dict(), which a hook on another model can load"
        )


class _Reduce:
    """The `__reduce_ex__` of one changed object."""

    def __init__(self, owner: object) -> None:
        self._owner = owner
        self.changes: list[Callable[[Attributes], None]] = []

    def forget(self, change: Callable[[Attributes], None]) -> None:
        """Forget a change; after the last one, remove this from the object."""
        self.changes.remove(change)
        if not self.changes:
            del vars(self._owner)[_REDUCE]

    def __call__(self, protocol: int) -> str | tuple[Any, ...]:
        reduced = type(self._owner).__reduce_ex__(self._owner, protocol)
        if isinstance(reduced, str) or len(reduced) < 3 or not isinstance(reduced[2], dict):
            return reduced  # the class has a format of its own
        attributes = {name: value for name, value in reduced[2].items() if value is not self}
        for take_off in reversed(self.changes):
            take_off(attributes)
        return *reduced[:2], attributes, *reduced[3:]
