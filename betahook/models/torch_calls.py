"""Calls of torch functions: their arguments in the order of torch's signatures, and the tensors among them.

Nothing here knows attention.
"""

from __future__ import annotations

import functools
import itertools
import string
from collections.abc import Callable, Mapping
from types import FunctionType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from betahook import compat
from betahook.models import selective

IN_PLACE = {"__imul__", "__itruediv__", "__iadd__", "__isub__", "__setitem__"}
"""Functions without an underscore at the end that change their first operand."""
PERMUTING = (
    "view reshape transpose permute swapaxes swapdims movedim moveaxis t adjoint flatten unflatten "
    "view_as reshape_as as_strided unfold"
)
REGROUPING = "gather take_along_dim flip roll repeat repeat_interleave tile"
PICKING = "__getitem__ select unbind stack squeeze squeeze_ unsqueeze unsqueeze_"
SPLITTING = (
    "expand expand_as broadcast_to narrow split chunk tensor_split index_select cat concat concatenate "
    "atleast_3d view_as_complex view_as_real"
)
DIVIDING = "div div_ divide divide_ true_divide true_divide_ __truediv__ __itruediv__"
MOVING = frozenset(f"{PERMUTING} {REGROUPING} {PICKING} {SPLITTING} pad".split())
"""Functions that only move entries, or leave some out or add some."""
NUMPY = {"axis": "dim", "keepdims": "keepdim"}
"""Names of numpy that torch takes for its own."""
ORDER = {"condition": -1, "input": 0, "tensors": 0, "other": 1, "mask": 1, "pad": 1}
"""Position of keyword arguments in torch's signatures."""
PLAIN = frozenset({int, float, bool, str, type(None), torch.dtype, torch.device})
"""Types of most arguments that are no tensors and hold none."""


class Call:
    """One call of a torch function.

    Attributes:
        function, args, kwargs: the function and its arguments.
        name: see `name_of`.
    """

    __slots__ = ("_operands", "_tensors", "args", "function", "kwargs", "name")

    def __init__(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        self.function, self.args, self.kwargs = function, args, kwargs
        self.name = name_of(function)
        self._operands: list[Any] | None = None
        self._tensors: list[Tensor] | None = None

    @property
    def operands(self) -> list[Any]:
        """The arguments in the order of torch's signatures, those given by name too."""
        if self._operands is None:
            by_name = sorted(self.kwargs, key=lambda name: ORDER.get(name, 2)) if self.kwargs else ()
            self._operands = [*self.args, *(self.kwargs[name] for name in by_name)]
        return self._operands

    @property
    def tensors(self) -> list[Tensor]:
        """All tensors among the arguments."""
        if self._tensors is None:
            self._tensors = tensors_in([*self.args, *self.kwargs.values()] if self.kwargs else self.args)
        return self._tensors

    @property
    def dim(self) -> int:
        """The dimension that a softmax is taken over."""
        input, *rest = self.operands
        given = self.kwargs.get("dim", self.kwargs.get("axis", rest[0] if rest else None))
        # torch's choice where `F.softmax` or `nn.Softmax` is not told
        return given if isinstance(given, int) else int(input.dim() not in (0, 1, 3))

    @property
    def reduced(self) -> tuple[int | tuple[int, ...] | None, bool]:
        """The dimensions that a reduction takes together, None for all, and if it keeps them."""
        dim, keepdim, *_ = *self.args[1:3], None, False
        given = {NUMPY.get(name, name): value for name, value in self.kwargs.items()}
        return given.get("dim", dim), bool(given.get("keepdim", keepdim))

    @property
    def in_place(self) -> bool:
        """True if the call changes its first operand."""
        return is_in_place(self.name) or self.kwargs.get("inplace") is True

    @property
    def has_target(self) -> bool:
        """True if the call writes into a tensor that it was given as `out`."""
        return self.kwargs.get("out") is not None

    def run(self) -> Any:
        """Call the function."""
        with selective.counted():
            return self.function(*self.args, **self.kwargs)

    def run_on(self, replacement: Callable[[Tensor], Tensor]) -> Any:
        """Call the function with another tensor in the place of each floating-point or complex one, and no target."""

        def replace(tensor: Tensor) -> Tensor:
            if not (tensor.is_floating_point() or tensor.is_complex()):
                return tensor
            other = replacement(tensor)
            # A mask may have been broadcast, whose memory has no such view.
            return other.contiguous() if self.name == "view" and other.stride() != tensor.stride() else other

        options = {name: value for name, value in self.kwargs.items() if name != "out"}
        return self.function(*rebuilt(self.args, replace), **rebuilt(options, replace))


def in_place_of_torch(function: object) -> str | None:
    """The name of the function of torch in whose place one of users' stands, as the profiler of DeepSpeed puts it."""
    functions = itertools.chain(*(vars(place).items() for place in (F, torch.Tensor, torch)))
    return next((name for name, value in functions if value is function), None)


def name_of(function: Callable[..., Any]) -> str:
    """The name of a function; "transpose" for a property that does so, and "foreach.mul" for a `mul` of lists.

    That of torch for a function that stands in its place under another.
    """
    if function in compat.TRANSPOSING_GETTERS:
        return "transpose"
    name, module = function.__name__, getattr(function, "__module__", None) or ""
    if module == "torch.foreach":
        return f"foreach.{name}"
    if type(function) is not FunctionType or module.startswith("torch") or hasattr(function, "__wrapped__"):
        return name
    return in_place_of_torch(function) or name


def axes_of(call: Call) -> tuple[str, str, str] | None:
    """A letter for each axis of both operands of a product and of what it returns; axes that meet have the same.

    None for a product of other than two tensors, and for one of vectors.
    """
    if call.name == "einsum":
        return _axes_of_einsum(*call.args)
    if call.name == "baddbmm":
        return None
    left, right = call.operands[:2]
    return _axes_of_matrices(left.dim(), right.dim())


@functools.cache
def _axes_of_matrices(left: int, right: int) -> tuple[str, str, str] | None:
    """`axes_of` matrices, for the number of axes that both operands have."""
    if min(left, right) < 2:
        return None
    batch = "abcdefgh"[: max(left, right) - 2]
    return f"{batch[len(batch) - left + 2 :]}xz", f"{batch[len(batch) - right + 2 :]}zy", f"{batch}xy"


def summed_axes(call: Call) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    """The axes of both operands that a product sums over, those that meet at the same place.

    None where `axes_of` is, and where it sums over none.
    """
    if call.name == "baddbmm":
        return (2,), (1,)
    axes = axes_of(call)
    if axes is None:
        return None
    left, right, output = axes
    summed = [axis for axis in left if axis in right and axis not in output]
    return (tuple(map(left.index, summed)), tuple(map(right.index, summed))) if summed else None


def _axes_of_einsum(equation: str, *operands: Any) -> tuple[str, str, str] | None:
    if len(operands) == 1 and isinstance(operands[0], (list, tuple)):
        operands = tuple(operands[0])
    inputs, _, output = equation.replace(" ", "").partition("->")
    specs = inputs.split(",")
    if len(specs) != 2 or len(operands) != 2 or not all(isinstance(x, Tensor) for x in operands):
        return None
    unused = (letter for letter in string.ascii_letters if letter not in equation)
    dots = "".join(itertools.islice(unused, max(0, operands[0].dim() - len(specs[0].replace("...", "")))))
    left, right, output = (spec.replace("...", dots) for spec in (*specs, output))
    if not output and "->" not in equation:
        letters = left + right
        output = "".join(sorted(x for x in set(letters) if letters.count(x) == 1))
    fits = all(len(axes) == x.dim() for axes, x in zip((left, right), operands, strict=True))
    return (left, right, output) if fits else None


def is_in_place(name: str) -> bool:
    """True for a function that changes its first operand."""
    return name in IN_PLACE or (name.endswith("_") and name[0] != "_")


def is_causal_bias(value: object) -> bool:
    """True for a causal mask of torch that has no entries; by name, as its file loads the compiler, which is slow."""
    return type(value).__name__ == "CausalBias"


def tensors_in(nested: Any) -> list[Tensor]:
    """All tensors in nested lists, tuples and dictionaries, but for the causal masks of torch that have no entries."""
    found: list[Tensor] = []
    _collect(nested, found)
    return found


def _collect(nested: Any, found: list[Tensor]) -> None:
    if isinstance(nested, Tensor):
        if not is_causal_bias(nested):  # torch 2.6 raises where one is asked for anything
            found.append(nested)
    elif isinstance(nested, (list, tuple, dict)):
        for item in nested.values() if isinstance(nested, dict) else nested:
            kind = type(item)
            if kind is Tensor:
                found.append(item)
            elif kind not in PLAIN:
                _collect(item, found)


def rebuilt(nested: Any, of_tensor: Callable[[Tensor], Tensor]) -> Any:
    """Nested lists, tuples and dictionaries, built anew of what stands for each tensor; other objects are the same."""
    if isinstance(nested, Tensor):
        return of_tensor(nested)
    kind = type(nested)
    if kind is dict:
        return {name: rebuilt(item, of_tensor) for name, item in nested.items()}
    return kind([rebuilt(item, of_tensor) for item in nested]) if kind is tuple or kind is list else nested


def copied(inputs: Any) -> Any:
    """Copy the tensors of nested inputs, to which a forward may write; query and key may be one, and stay so."""
    return rebuilt(inputs, functools.cache(lambda x: x if isinstance(x, nn.Parameter) else x.clone()))
