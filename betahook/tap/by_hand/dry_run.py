"""A forward that is run twice: first dry, after which what its module holds is put back.

`watching` does so where a beta was loaded before any forward showed on which products it acts.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from types import FunctionType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from betahook import compat
from betahook.tap.recorder import Recorder

CONTAINERS = dict, list, set, OrderedDict, defaultdict
OTHERS = nn.Module, nn.Parameter, Recorder, type, FunctionType, ModuleType
"""Kinds whose contents are not put back."""
DEPTH = 4
"""How deep the contents of what a module holds are put back: a tensor in a tuple in a list of a cache, say."""


def is_repeatable(module: nn.Module, inputs: Any) -> bool:
    """Tell if a dry run leaves no trace: no object goes in, such as a cache, and no user's hook runs in it."""
    return _is_plain(inputs) and not any(part._forward_hooks for part in module.modules() if part is not module)


def _is_plain(nested: Any) -> bool:
    if type(nested) in (list, tuple, dict):
        return all(map(_is_plain, nested.values() if isinstance(nested, dict) else nested))
    return isinstance(nested, Tensor | torch.Size | bool | int | float | str | None)


@contextmanager
def put_back(module: nn.Module) -> Iterator[None]:
    """Undo what a forward does to the buffers and attributes of a module, and to what these hold."""
    held: dict[int, Any] = {}
    for part in module.modules():
        _collect(vars(part), held, DEPTH)
    tensors = [(each, each.clone(), compat.version(each)) for each in held.values() if isinstance(each, Tensor)]
    contents = [(each, each.copy()) for each in held.values() if not isinstance(each, Tensor)]
    try:
        yield
    finally:
        for each, before in contents:
            if not _holds_the_same(each, before):
                each.clear()
                each.extend(before) if isinstance(each, list) else each.update(before)
        with torch.no_grad():
            for tensor, values, version in tensors:
                if compat.version(tensor) != version:  # tensors of inference mode have none, and stay as they are
                    tensor.copy_(values)


def _collect(value: Any, held: dict[int, Any], depth: int) -> None:
    """Collect the tensors, lists, sets and dictionaries of a value, also those of an object, by id."""
    if depth < 0 or id(value) in held or isinstance(value, OTHERS):
        return
    if isinstance(value, Tensor) or type(value) in CONTAINERS:
        held[id(value)] = value
    if isinstance(value, dict | list | set | tuple):
        for each in value.values() if isinstance(value, dict) else value:
            _collect(each, held, depth - 1)
    elif not isinstance(value, Tensor) and hasattr(value, "__dict__"):
        _collect(vars(value), held, depth - 1)


def _holds_the_same(one: Any, other: Any) -> bool:
    if isinstance(one, dict):
        return list(one) == list(other) and all(value is other[name] for name, value in one.items())
    if isinstance(one, set):
        return bool(one == other)
    return len(one) == len(other) and all(a is b for a, b in zip(one, other, strict=True))
