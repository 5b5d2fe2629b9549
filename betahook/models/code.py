"""Names that the code of a class uses, and the functions behind them.

`classifiers` decides by these names what a class computes; `guards` and `tap.kernels` find in these functions what they
replace.
"""

from __future__ import annotations

import dis
import functools
import inspect
import re
from collections.abc import Callable, Collection, Iterable, Iterator
from types import BuiltinFunctionType, CodeType, FunctionType, ModuleType, SimpleNamespace
from typing import Any, TypeGuard

from torch import nn
from torch.autograd import Function
from torch.jit import ScriptFunction

from betahook.compat import class_of

LIBRARIES = {"torch", "transformers", "einops", "numpy", "betahook"}
"""Packages whose functions and classes are recognised by name, or compute no attention; their code is not read."""

PRODUCTS = ("matmul", "linalg_matmul", "__matmul__", "mm", "bmm", "baddbmm", "einsum")
"""Functions that multiply matrices, by the names that a `TorchFunctionMode` sees."""

SOFTMAXES = ("softmax", "log_softmax")
"""Softmax functions, by the names that a `TorchFunctionMode` sees."""


def names_used(kind: type) -> frozenset[str]:
    """Global names and attributes that the methods of a class use; "@" for the operator.

    Functions that they call are included; in a class of `LIBRARIES`, only those that patched-in user methods call.
    """
    if not is_user_class(kind):
        patches = _closed(method for method in methods(kind) if is_user_function(method))
        called = (value for patch in patches for value in _named(patch) if isinstance(value, FunctionType))
        return _names_in([*methods(kind), *called])
    functions = reachable(kind)
    compiled = {type(each).__name__ for each in scripted(kind)}
    return _names_in(functions).union(compiled, *map(_real_names, functions))


def names_held(module: nn.Module) -> frozenset[str]:
    """Names of the functions that a module holds as attributes, and the names that their code uses."""
    held = (value for value in _held(module) if isinstance(value, FunctionType | BuiltinFunctionType))
    return _names_in(functions_held(module)).union(function.__name__ for function in held)


def functions_held(module: nn.Module) -> list[FunctionType]:
    """User-defined functions that a module holds as attributes, and those that they call."""
    return _closed(value for value in _held(module) if is_user_function(value))


def functions_of(module: nn.Module) -> list[FunctionType]:
    """User-defined functions and methods that make up the code of a module and of its parts."""
    parts = list(module.modules())
    held = [function for part in parts for function in functions_held(part)]
    kinds = {class_of(part): None for part in parts}
    return held + [function for kind in kinds if is_user_class(kind) for function in reachable(kind)]


def run_by(function: Any) -> list[FunctionType]:
    """User-defined functions that a callable runs: its own, those that it wraps, and those that they call by name."""
    chain = []
    while function is not None:
        inner = without_partial(function)
        chain.append(getattr(inner, "__func__", inner))
        function = getattr(function, "__wrapped__", None)
    return _closed(filter(is_user_function, chain))


def argument_names(module: nn.Module) -> list[str]:
    """Names of the arguments of a module's forward; empty if it has no signature, as after `torch.jit.trace`."""
    try:
        return list(inspect.signature(module.forward).parameters)
    except ValueError:
        return []


def _held(module: nn.Module) -> Iterator[object]:
    values = map(without_partial, vars(module).values())
    return (inspect.unwrap(value) if isinstance(value, FunctionType) else value for value in values)


def without_partial(value: Any) -> Any:
    """The function inside a `functools.partial`; any other value as it is."""
    return value.func if isinstance(value, functools.partial) else value


def _names_in(functions: Iterable[FunctionType]) -> frozenset[str]:
    return frozenset[str]().union(*map(names_in, functions))


def names_in(function: FunctionType) -> frozenset[str]:
    """Global names and attributes that the code of a function uses, nested functions included."""
    return _names(function.__code__)


def names_in_method(kind: type, code: CodeType) -> frozenset[str]:
    """Names that the code of a method uses, and that of other methods that it names; `forward` is left out."""
    members = {method.__name__: method.__code__ for method in methods(kind) if method.__name__ != "forward"}
    found, waiting = frozenset[str](), {code}
    seen = set[CodeType]()
    while waiting:
        seen.add(current := waiting.pop())
        found |= _names(current)
        waiting |= {members[name] for name in members.keys() & _names(current)} - seen
    return found


def _real_names(function: FunctionType) -> set[str]:
    """Names under which the callees of a function were defined, which compiled functions share with their originals."""
    called = (without_partial(function.__globals__.get(name)) for name in function.__code__.co_names)
    names = (getattr(each, "__name__", None) for each in called if callable(each))
    return {name for name in names if isinstance(name, str)}


def is_user_class(kind: type) -> bool:
    """True for a class that is not from one of `LIBRARIES`, but user-defined."""
    return not _is_of_library(kind.__module__)


def is_user_module(module: nn.Module) -> bool:
    """True for a module whose class is user-defined."""
    return is_user_class(class_of(module))


def is_user_function(value: object) -> TypeGuard[FunctionType]:
    """True for a Python function that is not from one of `LIBRARIES`, but user-defined."""
    return isinstance(value, FunctionType) and not _is_of_library(value.__module__)


def methods(kind: type) -> list[FunctionType]:
    """The functions among the members of a class and its bases, without overridden ones."""
    return [function for function in _members(kind) if isinstance(function, FunctionType)]


def _members(kind: type) -> list[Callable[..., Any]]:
    members = {name: member for cls in reversed(_classes(kind)) for name, member in vars(cls).items()}
    return [inspect.unwrap(without_partial(member)) for member in members.values() if callable(member)]


def scripted(kind: type) -> list[ScriptFunction[Any, Any]]:
    """Functions compiled by `torch.jit.script`, among the members of a class and what its code calls by name."""
    named = (value for function in reachable(kind) for value in _named(function))
    return [value for value in (*_members(kind), *named) if isinstance(value, ScriptFunction)]


def operations(function: ScriptFunction[Any, Any]) -> set[str]:
    """Names of torch's operations in a function compiled by `torch.jit.script`."""
    return {*re.findall(r"aten::(\w+)", str(function.inlined_graph))}


def reachable(kind: type) -> list[FunctionType]:
    """The methods of a class, and the user-defined functions that they call by name."""
    return _closed([*methods(kind), *_inherited(kind)])


def _closed(functions: Iterable[FunctionType]) -> list[FunctionType]:
    """Functions, and all user-defined functions that they call by name, directly or not."""
    seen: dict[FunctionType, None] = {}
    waiting = list(functions)
    while waiting:
        function = waiting.pop()
        if function not in seen:
            seen[function] = None
            waiting += _called(function)
    return list(seen)


def _inherited(kind: type) -> Iterator[FunctionType]:
    """Yield base-class methods that an overriding method may call, by `super()` or by the name of the base."""
    classes = _classes(kind)
    for number, cls in enumerate(classes, start=1):
        bases = classes[number:]
        for name, member in vars(cls).items():
            overridden = filter(callable, (vars(base).get(name) for base in bases))
            above = next(map(inspect.unwrap, overridden), None)
            if name != "__init__" and isinstance(above, FunctionType) and _names_one(member, bases):
                yield above


def _names_one(member: object, bases: Collection[type]) -> bool:
    """True for a method whose code uses `super`, or refers to one of the bases under any name."""
    function = inspect.unwrap(without_partial(member))
    if not isinstance(function, FunctionType):
        return False
    return "super" in names_in(function) or any(isinstance(each, type) and each in bases for each in _named(function))


def _classes(kind: type) -> list[type]:
    """A class and its bases in method resolution order, without `nn.Module` and `object`."""
    return [cls for cls in kind.__mro__ if cls not in (nn.Module, object)]


def namespaces(names: Iterable[str], *first: dict[str, Any]) -> list[dict[str, Any]]:
    """The namespaces in which code finds `names`: the given ones, and those of the modules that they name."""
    found = list(first)
    for namespace in found:  # the list grows in the loop
        for value in map(namespace.get, names):
            if isinstance(value, ModuleType | SimpleNamespace) and all(vars(value) is not other for other in found):
                found.append(vars(value))
    return found


def _called(function: FunctionType) -> Iterator[FunctionType]:
    """Yield user-defined functions and static methods that code names, and the forwards of autograd functions."""
    return filter(is_user_function, _named(function))


def _named(function: FunctionType) -> Iterator[object]:
    """Yield callables that code names: functions, compiled ones too, static methods, forwards of autograd functions."""
    names, cells = names_in(function), dict[str, Any]()
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        try:
            cells[name] = cell.cell_contents
        except ValueError:  # the cell is still empty
            continue
    spaces = namespaces({*names, *cells}, function.__globals__, cells)
    values = [without_partial(space.get(name)) for space in spaces for name in {*names, *cells}]
    of_classes = [vars(value).get(name) for value in values if isinstance(value, type) for name in names]
    values += [member.__func__ for member in of_classes if isinstance(member, staticmethod)]
    for value in values:
        if isinstance(value, type) and issubclass(value, Function):
            value = value.forward
        if callable(value):
            yield inspect.unwrap(value)


def _is_of_library(module: str | None) -> bool:
    return (module or "").partition(".")[0] in LIBRARIES


@functools.lru_cache(maxsize=2**14)
def _names(code: CodeType) -> frozenset[str]:
    """The names in a code object; cached by code and not by class, whose methods may be replaced later."""
    multiplies = any(i.opname == "BINARY_OP" and i.argrepr in ("@", "@=") for i in dis.get_instructions(code))
    inner = (_names(constant) for constant in code.co_consts if isinstance(constant, CodeType))
    return frozenset(code.co_names).union(["@"] * multiplies, *inner)
