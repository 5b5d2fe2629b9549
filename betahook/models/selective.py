"""Contexts that hide operations of betahook from selective activation checkpointing.

It saves the outputs of some operations of a forward and, when it runs the forward again, looks them up by the name and
the running number of the operation. An operation in only one of the two runs would shift the numbers of the others.
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


class _Uncounted(threading.local):
    modes: list[TorchDispatchMode] | None = None
    """Modes from before `uncounted`, which `counted` restores, the innermost last; None outside of `uncounted`."""


_uncounted = _Uncounted()


def is_counted() -> bool:
    """True in a forward whose operations are numbered."""
    if torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack() == 0:
        return False
    return any(map(_counts, _get_current_dispatch_mode_stack()))


def _counts(mode: object) -> bool:
    return isinstance(mode, _CachingTorchDispatchMode | _CachedTorchDispatchMode)


def uncounted() -> AbstractContextManager[None]:
    """Return a context whose operations are not numbered, except those in `counted`."""
    if not is_counted():
        return _NOTHING
    modes = _get_current_dispatch_mode_stack()
    return _under([mode for mode in modes if not _counts(mode)], uncounted=modes)


def counted() -> AbstractContextManager[None]:
    """Return a context for the model's own operations inside `uncounted`."""
    return _NOTHING if _uncounted.modes is None else _under(_uncounted.modes)


def apart() -> AbstractContextManager[None]:
    """Return a context in which `counted` has no effect."""
    return _NOTHING if _uncounted.modes is None else _under(_get_current_dispatch_mode_stack())


@contextmanager
def _under(modes: list[TorchDispatchMode], uncounted: list[TorchDispatchMode] | None = None) -> Iterator[None]:
    """Activate dispatch modes, and record those from before `uncounted`; restore both afterwards."""
    before, kept = _exchange(modes), _uncounted.modes
    _uncounted.modes = uncounted
    try:
        yield
    finally:
        _uncounted.modes = kept
        _exchange(before)


def _exchange(modes: list[TorchDispatchMode]) -> list[TorchDispatchMode]:
    """Replace the active dispatch modes and return them; the innermost is the last."""
    before = [_pop_mode() for _ in range(torch._C._len_torch_dispatch_stack())][::-1]
    for mode in modes:
        _push_mode(mode)
    return before
