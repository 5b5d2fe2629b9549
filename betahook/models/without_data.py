"""Runs without data: user code runs for the shapes of its results, on copies of modules that hold no weights.

`trial` uses them. User code may cache a mask or slopes outside the module, in an `lru_cache`, a dictionary or a class
attribute, and use them in all later forwards. So constants, which depend on no weight and no input, are computed.
"""

from __future__ import annotations

import copy
import logging
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

# https://github.com/pytorch/pytorch/blob/v2.13.0/torch/_ops.py
from torch._ops import OpOverload

# https://github.com/pytorch/pytorch/blob/v2.13.0/torch/_subclasses/fake_tensor.py
from torch._subclasses.fake_tensor import FakeCopyMode, FakeTensor, FakeTensorMode

# https://github.com/pytorch/pytorch/blob/v2.13.0/torch/multiprocessing/reductions.py
from torch.multiprocessing.reductions import StorageWeakRef

from betahook import compat
from betahook.models.torch_calls import rebuilt, tensors_in

LARGEST = 2**26
"""Largest constant, in bytes, that is computed: some trials run the longest sequence that the module states."""

_ATEN = torch.ops.aten
SHAPED = {
    *(_ATEN.new_empty, _ATEN.new_empty_strided, _ATEN.new_zeros, _ATEN.new_ones, _ATEN.new_full),
    *(_ATEN.empty_like, _ATEN.zeros_like, _ATEN.ones_like, _ATEN.full_like),
}
"""Operators that create a constant and use only the shape, dtype and device of their first argument."""
LIFTING = {_ATEN.lift, _ATEN.lift_fresh, _ATEN.lift_fresh_copy}
"""Operators to which `torch.tensor` passes its result."""
KINDS = Tensor, nn.Parameter
"""Tensor classes that hold data; other classes define themselves what operators do with them."""

LEFTOVER_ERROR = (
    "a tensor without data is used: while `attach` tried the forward of an attention module, its code computed the "
    "tensor from inputs, weights or random numbers, and kept it outside of the module, e.g. in an `lru_cache` or a "
    "global dictionary. Empty that after `attach`, e.g. with `cache_clear()`"
)


@contextmanager
def without_data() -> Iterator[WithoutData]:
    """Run code for the shapes of its results alone."""
    logger = logging.getLogger(FakeTensorMode.__module__)
    disabled, logger.disabled = logger.disabled, True  # it logs errors that the caller is about to catch
    made = WithoutData()
    try:
        with made.mode, warnings.catch_warnings(action="ignore"):  # the user need not know of made-up inputs
            yield made
    finally:
        made.has_ended = True
        logger.disabled = disabled


class WithoutData:
    """A run without data; the caller must preserve the random state.

    Attributes:
        mode: the mode in which no operator computes, except those that create constants while user code runs.
        has_ended: True once the run is over; using a tensor without data then raises an error.
    """

    def __init__(self) -> None:
        self.mode, self.has_ended = FakeTensorMode(allow_non_fake_inputs=True), False
        # Not a subclass: higher-order operators look up the exact type of a mode.
        self.mode.dispatch = self._dispatch  # type: ignore[method-assign]
        self._computes_constants = False
        self._own: set[StorageWeakRef] = set()  # memory of constants that were computed in this run
        self._unknown: set[StorageWeakRef] = set()  # memory of real tensors whose writes were not computed

    def copied(self, module: nn.Module) -> nn.Module:
        """Copy a module without its data, hooks, shards and adapters."""
        with FakeCopyMode(self.mode):
            made = copy.deepcopy(module, compat.unsharded_memo(module))
        for part in made.modules():
            for hooks in (part._forward_pre_hooks, part._forward_hooks):
                hooks.clear()
        _drop_adapters(made)
        return made

    @contextmanager
    def computing_constants(self, computes: bool = True) -> Iterator[None]:
        """Compute what depends on no weight, input or random number, since user code may keep it."""
        before, self._computes_constants = self._computes_constants, computes
        try:
            yield
        finally:
            self._computes_constants = before

    def _dispatch(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Replace `FakeTensorMode.dispatch`."""
        if self.has_ended:
            raise RuntimeError(LEFTOVER_ERROR)
        kwargs = kwargs or {}
        if not self._computes_constants or not isinstance(func, OpOverload):
            return FakeTensorMode.dispatch(self.mode, func, types, args, kwargs)
        with_data = self._with_data(func, args, kwargs)
        if with_data is not None and func.overloadpacket in LIFTING:
            return self._compute(func, with_data, kwargs)
        with self.computing_constants(False):  # to find shapes, torch calls further operators
            try:
                output = self._without_data(func, types, args, kwargs)
            except Exception:
                if with_data is None:
                    raise
                return self._compute(func, with_data, kwargs)  # the shape may depend on the data
        if with_data is not None and _can_hold_data(output):
            try:
                return self._compute(func, with_data, kwargs)
            except Exception:  # for instance, the device does not exist or is out of memory
                pass
        self._unknown.update(_memory(tensor) for tensor in _written(func, args, kwargs) if _is_plain(tensor))
        return output

    def _without_data(self, func: OpOverload, types: Sequence[type], args: Any, kwargs: Any) -> Any:
        """Run an operator for its shapes, on fake tensors only: with some real ones torch computes, even in place."""

        def of_tensor(tensor: Tensor) -> Tensor:
            return self.mode.from_tensor(tensor, static_shapes=True) if type(tensor) in KINDS else tensor

        if func.overloadpacket not in LIFTING:
            args, kwargs = rebuilt(tuple(args), of_tensor), rebuilt(dict(kwargs), of_tensor)
        return FakeTensorMode.dispatch(self.mode, func, types, args, kwargs)

    def _with_data(self, func: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any] | None:
        """The arguments with which to compute an operator that creates a constant; None for any other operator."""
        given, written = list(args), list(_written(func, args, kwargs))
        if torch.Tag.nondeterministic_seeded in func.tags and (not written or kwargs.get("generator") is not None):
            return None  # in-place operators do run: else nothing would mark the entries as meaningless
        if func.overloadpacket in SHAPED and isinstance(given[0], FakeTensor):
            like = given[0]
            if not _can_hold_data(like):
                return None
            given[0] = torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device=like.device)
        if not all(
            _is_plain(tensor) and _memory(tensor) not in self._unknown for tensor in tensors_in((given, kwargs))
        ):
            return None
        return given if all(_memory(tensor) in self._own for tensor in written) else None

    def _compute(self, func: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        before = set() if func.overloadpacket in LIFTING else {_memory(each) for each in tensors_in((args, kwargs))}
        output = func(*args, **kwargs)
        self._own.update({_memory(made) for made in tensors_in(output) if _is_plain(made)} - before)
        return output


def _drop_adapters(module: nn.Module) -> None:
    """Replace adapters, which come and go, by the layers below them."""
    for part in module.modules():
        for name, child in part.named_children():
            if compat.is_adapter(child):
                setattr(part, name, child.base_layer)


def _can_hold_data(output: Any) -> bool:
    """True if an output is small, and not on the meta device: a kept meta constant would later silently do nothing."""
    made = tensors_in(output)
    is_small = sum(tensor.numel() * tensor.itemsize for tensor in made) <= LARGEST
    return is_small and all(tensor.device.type != "meta" for tensor in made)


def _is_plain(tensor: Tensor) -> bool:
    """True for a plain strided tensor that holds data and is not a weight."""
    is_real = type(tensor) is Tensor and tensor.layout is torch.strided and not tensor.is_meta
    return is_real and not tensor.requires_grad


def _memory(tensor: Tensor) -> StorageWeakRef:
    return StorageWeakRef(tensor.untyped_storage())


def _written(func: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[Tensor]:
    """Yield the tensors that an operator writes to."""
    for number, argument in enumerate(func._schema.arguments if func._schema.is_mutable else ()):
        if argument.alias_info is not None and argument.alias_info.is_write:
            yield from tensors_in(args[number] if number < len(args) else kwargs.get(argument.name))
