"""Record of the callback that made each hook: a callback that comes back to a model continues with its own hook."""

from __future__ import annotations

import weakref
from collections.abc import Iterator

from torch import nn

from betahook.hook import Hook, hooks_of

_makers: weakref.WeakKeyDictionary[Hook, weakref.ref[object]] = weakref.WeakKeyDictionary()
"""Hook to the callback that made it. It is not kept in the callbacks, as an unpickled copy of one has made no hook."""


def note(hook: Hook, callback: object) -> None:
    """Record that a callback made a hook."""
    _makers[hook] = weakref.ref(callback)


def made_by(callback: object, model: nn.Module) -> Iterator[Hook]:
    """Yield the hooks of a model that this callback made."""
    for hook in hooks_of(model):
        if (maker := _makers.get(hook)) is not None and maker() is callback:
            yield hook
