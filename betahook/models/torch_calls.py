"""Calls of torch functions: their arguments in the order of torch's signatures, and the tensors among them.

`trial` and the tap wrap each call that they intercept in a `Call`. Nothing here knows about attention.
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
"""Functions that change their first operand, besides those with a trailing underscore such as `add_`."""
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
"""Functions that only rearrange entries, or leave some out or add some."""
NUMPY = {"axis": "dim", "keepdims": "keepdim"}
"""Argument names of numpy that torch accepts, with its own."""
ORDER = {"condition": -1, "input": 0, "tensors": 0, "other": 1, "mask": 1, "pad": 1}
"""Positions of keyword arguments in torch's signatures; 2 for any other."""
PLAIN = frozenset({int, float, bool, str, type(None), torch.dtype, torch.device})
"""Types of common arguments that neither are tensors nor contain any."""


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
        """All arguments in the order of torch's signatures, keyword arguments included."""
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
        # torch's default for `F.softmax` and `nn.Softmax`
        return given if isinstance(given, int) else int(input.dim() not in (0, 1, 3))

    @property
    def reduced(self) -> tuple[int | tuple[int, ...] | None, bool]:
        """The `dim` of a reduction, None for all dimensions, and its `keepdim`."""
        dim, keepdim, *_ = *self.args[1:3], None, False
        given = {NUMPY.get(name, name): value for name, value in self.kwargs.items()}
        return given.get("dim", dim), bool(given.get("keepdim", keepdim))

    @property
    def in_place(self) -> bool:
        """True if the call changes its first operand."""
        return is_in_place(self.name) or self.kwargs.get("inplace") is True

    @property
    def has_target(self) -> bool:
        """True if the call writes to a tensor given as `out`."""
        return self.kwargs.get("out") is not None

    def run(self) -> Any:
        """Call the function."""
        with selective.counted():
            return self.function(*self.args, **self.kwargs)

    def run_on(self, replacement: Callable[[Tensor], Tensor]) -> Any:
        """Call the function with each floating-point or complex tensor replaced, and without `out`."""

        def replace(tensor: Tensor) -> Tensor:
            if not (tensor.is_floating_point() or tensor.is_complex()):
                return tensor
            other = replacement(tensor)
            # The replacement may be a broadcast mask, whose memory has no such view.
            return other.contiguous() if self.name == "view" and other.stride() != tensor.stride() else other

        options = {name: value for name, value in self.kwargs.items() if name != "out"}
        return self.function(*rebuilt(self.args, replace), **rebuilt(options, replace))


def in_place_of_torch(function: object) -> str | None:
    """Name of the torch function in whose place a user-defined one is, as DeepSpeed's profiler does; None if none."""
    functions = itertools.chain(*(vars(place).items() for place in (F, torch.Tensor, torch)))
    return next((name for name, value in functions if value is function), None)


def name_of(function: Callable[..., Any]) -> str:
    """Name of a function; "transpose" for properties such as `x.T`, and "foreach.mul" for a `mul` of lists.

    A function that replaces one of torch's goes by the name of that one.
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
    """A letter for each axis of the two operands and the output of a product; axes that correspond share a letter.

    For example `("axz", "azy", "axy")` for a batched product of two 3-D tensors. None for a product of other than two
    tensors, and for one with a vector.
    """
    if call.name == "einsum":
        return _axes_of_einsum(*call.args)
    if call.name == "baddbmm":
        return None
    left, right = call.operands[:2]
    return _axes_of_matrices(left.dim(), right.dim())


@functools.cache
def _axes_of_matrices(left: int, right: int) -> tuple[str, str, str] | None:
    """Return `axes_of` a matrix product whose operands have so many axes."""
    if min(left, right) < 2:
        return None
    batch = "abcdefgh"[: max(left, right) - 2]
    return f"{batch[len(batch) - left + 2 :]}xz", f"{batch[len(batch) - right + 2 :]}zy", f"{batch}xy"


def summed_axes(call: Call) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    """The axes of both operands that a product sums over, in corresponding order.

    None if it sums over none, or if `axes_of` is None, `baddbmm` aside.
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
    """True for torch's `CausalBias`, a mask without entries; by name, as importing it loads the compiler, slowly."""
    return type(value).__name__ == "CausalBias"


def tensors_in(nested: Any) -> list[Tensor]:
    """Return all tensors in nested lists, tuples and dictionaries, except torch's causal masks without entries."""
    found: list[Tensor] = []
    _collect(nested, found)
    return found


def _collect(nested: Any, found: list[Tensor]) -> None:
    if isinstance(nested, Tensor):
        if not is_causal_bias(nested):  # in torch 2.6, any access to one raises
            found.append(nested)
    elif isinstance(nested, (list, tuple, dict)):
        for item in nested.values() if isinstance(nested, dict) else nested:
            kind = type(item)
            if kind is Tensor:
                found.append(item)
            elif kind not in PLAIN:
                _collect(item, found)


def rebuilt(nested: Any, of_tensor: Callable[[Tensor], Tensor]) -> Any:
    """Rebuild nested lists, tuples and dictionaries with `of_tensor(x)` for each tensor; keep other objects."""
    if isinstance(nested, Tensor):
        return of_tensor(nested)
    kind = type(nested)
    if kind is dict:
        return {name: rebuilt(item, of_tensor) for name, item in nested.items()}
    return kind([rebuilt(item, of_tensor) for item in nested]) if kind is tuple or kind is list else nested


def copied(inputs: Any) -> Any:
    """Copy the tensors of nested inputs, as a forward may write to them; one passed twice, as q and k, stays one."""

    def copy(tensor: Tensor) -> Tensor:
        return tensor if isinstance(tensor, nn.Parameter) or is_causal_bias(tensor) else tensor.clone()

    return rebuilt(inputs, functools.cache(copy))
