"""A record of the callback that made each hook, by which it goes on with its own where it comes back to a model."""

from __future__ import annotations

import weakref
from collections.abc import Iterator

from torch import nn

from betahook.hook import Hook, hooks_of

_makers: weakref.WeakKeyDictionary[Hook, weakref.ref[object]] = weakref.WeakKeyDictionary()
"""Not in the callbacks: these can be pickled, and a copy of one has made nothing."""


def note(hook: Hook, callback: object) -> None:
    """Note that a callback made a hook."""
    _makers[hook] = weakref.ref(callback)


def made_by(callback: object, model: nn.Module) -> Iterator[Hook]:
    """The hooks of a model that a callback made."""
    for hook in hooks_of(model):
        if (maker := _makers.get(hook)) is not None and maker() is callback:
            yield hook
