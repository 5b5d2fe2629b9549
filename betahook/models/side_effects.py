"""Contexts that undo what a forward writes to its module, and to variables around it.

The tap by hand runs a forward dry in one, and `betahook.rerun` a whole model.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from logging import Logger
from types import BuiltinMethodType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from betahook import compat
from betahook.models.code import functions_of, is_user_module, names_in, run_by
from betahook.models.materialise import is_in_parts

CONTAINERS = dict, list, set, OrderedDict, defaultdict
OTHERS = nn.Module, nn.Parameter, Logger, type, FunctionType, ModuleType
"""Types whose contents are not restored; nor are those of betahook's own objects."""
DEPTH = 4
"""Depth to which attributes of a module are restored, e.g. a tensor in a tuple in a list of an object, a cache."""


def is_repeatable(module: nn.Module, inputs: Any) -> bool:
    """Return True if a forward can be `undone`: no input is an object like a cache, and no submodule has a hook."""
    return _is_plain(inputs) and not any(part._forward_hooks for part in module.modules() if part is not module)


def _is_plain(nested: Any) -> bool:
    if type(nested) in (list, tuple, dict):
        return all(map(_is_plain, nested.values() if isinstance(nested, dict) else nested))
    return isinstance(nested, Tensor | torch.Size | bool | int | float | str | None)


@contextmanager
def undone(module: nn.Module, forward: Callable[..., Any]) -> Iterator[None]:
    """Restore what a forward of a module may write to when the context ends.

    That is the buffers and attributes of the module, the global variables that its code names and the variables that it
    closes over, and the contents of all these.
    """
    held: dict[int, Any] = {}
    with ExitStack() as stack:
        for function in {*functions_of(module), *run_by(forward)}:
            for value in _variables(function, stack):
                _collect(value, held, DEPTH - 1)
        for part in module.modules():
            _collect(vars(part), held, DEPTH)
        stack.enter_context(_contents_restored(held))
        yield


@contextmanager
def undone_in_attributes(model: nn.Module) -> Iterator[None]:
    """Restore the attributes of user-defined modules in a model when the context ends, but no contents of tensors.

    Copies of these could take as much memory as the model. FSDP 1 and ZeRO-3 change attributes themselves: under them,
    nothing is restored.
    """
    held: dict[int, Any] = {}
    if not any(map(is_in_parts, model.parameters())):
        for part in filter(is_user_module, model.modules()):
            _collect(vars(part), held, DEPTH)
        for part in model.modules():
            held.pop(id(part._parameters), None)  # FSDP 2 replaces parameters
    with _contents_restored({key: each for key, each in held.items() if not isinstance(each, Tensor)}):
        yield


def _variables(function: FunctionType, stack: ExitStack) -> Iterator[Any]:
    """Yield the values of the variables around a function that it uses; closing the stack assigns them again."""
    space = function.__globals__
    for name in names_in(function):
        if name in space:
            yield space[name]
            stack.callback(space.__setitem__, name, space[name])
        else:
            stack.callback(space.pop, name, None)  # the function may create it
    for cell in function.__closure__ or ():
        try:
            value = cell.cell_contents
        except ValueError:  # the cell is still empty
            continue
        yield value
        stack.callback(setattr, cell, "cell_contents", value)


@contextmanager
def _contents_restored(held: dict[int, Any]) -> Iterator[None]:
    tensors = [(each, each.clone(), compat.inplace_version(each)) for each in held.values() if isinstance(each, Tensor)]
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
                # Tensors of inference mode have no version, and are not restored.
                if compat.inplace_version(tensor) != version:
                    tensor.copy_(values)


def _collect(value: Any, held: dict[int, Any], depth: int) -> None:
    """Collect the tensors, lists, sets and dictionaries in a value, and in the attributes of objects, by id."""
    if isinstance(value, MethodType | BuiltinMethodType):
        value = value.__self__
    if depth < 0 or id(value) in held or isinstance(value, OTHERS) or type(value).__module__.startswith("betahook."):
        return
    if isinstance(value, Tensor) or type(value) in CONTAINERS:
        held[id(value)] = value
    if isinstance(value, dict | list | set | tuple):
        for each in value.values() if isinstance(value, dict) else value:
            _collect(each, held, depth - 1)
    elif not isinstance(value, Tensor) and hasattr(value, "__dict__"):
        _collect(vars(value), held, depth)


def _holds_the_same(one: Any, other: Any) -> bool:
    if isinstance(one, dict):
        return list(one) == list(other) and all(value is other[name] for name, value in one.items())
    if isinstance(one, set):
        return bool(one == other)
    return len(one) == len(other) and all(a is b for a, b in zip(one, other, strict=True))
