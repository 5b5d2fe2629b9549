"""Operations of betahook that are to have no part in selective activation checkpointing.

That saves the outputs of some operations of a forward, and hands them out when it runs the forward again, by the name
of the operation and its number. What only one of the two runs computes would shift the numbers of the rest.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch

# https://github.com/pytorch/pytorch/blob/v2.13.0/torch/utils/_python_dispatch.py
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack, _pop_mode, _push_mode

# https://github.com/pytorch/pytorch/blob/v2.13.0/torch/utils/checkpoint.py
from torch.utils.checkpoint import _CachedTorchDispatchMode, _CachingTorchDispatchMode

_NOTHING = nullcontext()


class _Hidden(threading.local):
    modes: list[TorchDispatchMode] | None = None
    """Those that were in force before `hidden`, the innermost last; None outside of it."""


_hidden = _Hidden()


def is_counted() -> bool:
    """True in a forward whose operations are numbered."""
    if torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack() == 0:
        return False
    return any(map(_counts, _get_current_dispatch_mode_stack()))


def _counts(mode: object) -> bool:
    return isinstance(mode, _CachingTorchDispatchMode | _CachedTorchDispatchMode)


def hidden() -> AbstractContextManager[None]:
    """Return a context whose operations have no number, but for those in `shown`."""
    return _hide() if is_counted() else _NOTHING


def shown() -> AbstractContextManager[None]:
    """Return a context for the model's own operations in one that is `hidden`."""
    return _NOTHING if _hidden.modes is None else _show()


def apart() -> AbstractContextManager[None]:
    """Return a context in which nothing is `shown`."""
    return _NOTHING if _hidden.modes is None else _show(again=False)


@contextmanager
def _hide() -> Iterator[None]:
    modes, before = _get_current_dispatch_mode_stack(), _hidden.modes
    _exchange([mode for mode in modes if not _counts(mode)])
    _hidden.modes = modes
    try:
        yield
    finally:
        _hidden.modes = before
        _exchange(modes)


@contextmanager
def _show(*, again: bool = True) -> Iterator[None]:
    modes, _hidden.modes = _hidden.modes, None
    assert modes is not None
    others = _exchange(modes) if again else None
    try:
        yield
    finally:
        if others is not None:
            _exchange(others)
        _hidden.modes = modes


def _exchange(modes: list[TorchDispatchMode]) -> list[TorchDispatchMode]:
    """Put modes in force in place of those that are, which are returned; the innermost is the last."""
    before = [_pop_mode() for _ in range(torch._C._len_torch_dispatch_stack())][::-1]
    for mode in modes:
        _push_mode(mode)
    return before
