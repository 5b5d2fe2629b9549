"""Contexts for running a model again: evaluation mode, preserved random state, full precision, no compiled code."""

from __future__ import annotations

import random
import sys
import threading
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from typing import Any

import torch
from torch import Tensor, nn

from betahook import compat


@contextmanager
def evaluating(module: nn.Module) -> Iterator[None]:
    """Switch to evaluation mode; afterwards restore the mode of every submodule."""
    with ExitStack() as stack:
        for part in module.modules():
            stack.callback(setattr, part, "training", part.training)
        module.eval()
        yield


class RandomState:
    """The state of all random number generators that a module may draw from.

    These are torch's on the CPU and on the devices of the module, Python's, numpy's if it is loaded, and generators
    that the module or a part of it holds. To find the latter, every attribute of every part is looked at.
    """

    def __init__(self, module: nn.Module) -> None:
        self._devices = {parameter.device for parameter in module.parameters()}
        self._generators = list(_generators(module))

    @contextmanager
    def preserved(self, tensors: Iterable[Tensor] = ()) -> Iterator[None]:
        """Restore the random state when the context ends, also on the devices of `tensors`."""
        devices = self._devices.union(tensor.device for tensor in tensors)
        with ExitStack() as stack:
            for generator in (random, sys.modules.get("numpy.random"), *self._generators):
                _keep_state(generator, stack)
            for kind in ("cuda", "xpu"):
                of_kind = [device for device in devices if device.type == kind]
                stack.enter_context(torch.random.fork_rng(of_kind, device_type=kind))
            if any(device.type == "mps" for device in devices):  # MPS has one state, which fork_rng cannot read
                stack.callback(torch.mps.set_rng_state, torch.mps.get_rng_state())
            yield


def _generators(module: nn.Module) -> Iterator[Any]:
    """Yield the random generators in attributes of a module and its parts, directly or in a list or dictionary."""
    for part in module.modules():
        for value in vars(part).values():
            each = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else [value]
            yield from filter(_is_generator, each)


def _is_generator(value: Any) -> bool:
    if isinstance(value, torch.Generator | random.Random):
        return not isinstance(value, random.SystemRandom)  # it has no state
    return type(value).__module__.startswith("numpy.random")


def _keep_state(generator: Any, stack: ExitStack) -> None:
    """Restore the state of a generator, or of a module with a global generator, when the stack is closed."""
    if hasattr(generator, "get_state"):  # torch's, and numpy's global one
        stack.callback(generator.set_state, generator.get_state())
    elif hasattr(generator, "getstate"):  # Python's
        stack.callback(generator.setstate, generator.getstate())
    elif hasattr(generator, "bit_generator"):  # numpy's
        stack.callback(setattr, generator.bit_generator, "state", generator.bit_generator.state)


@contextmanager
def full_precision() -> Iterator[None]:
    """Compute float32 products and convolutions in float32, not in TF32 or bfloat16; afterwards restore the choice."""
    cudnn, parts = torch.backends.cudnn, _float32_parts()
    with ExitStack() as stack:
        for part in parts:
            stack.callback(_set_precision, part, part.fp32_precision)
        # These older switches must agree with the parts, and raise if the choice was made for the parts alone.
        with suppress(RuntimeError):
            stack.callback(torch.set_float32_matmul_precision, torch.get_float32_matmul_precision())
        with suppress(RuntimeError):
            stack.callback(setattr, cudnn, "allow_tf32", cudnn.allow_tf32)
        torch.set_float32_matmul_precision("highest")
        cudnn.allow_tf32 = False
        for part in parts:
            part.fp32_precision = "ieee"
        yield


def _float32_parts() -> list[Any]:
    """The parts of `torch.backends` that have a float32 precision of their own; none before torch 2.9."""
    names = ("cuda", "matmul"), ("cudnn", "conv"), ("cudnn", "rnn"), ("mkldnn", "matmul"), ("mkldnn", "conv")
    parts = (getattr(getattr(torch.backends, owner), name, None) for owner, name in names)
    return [part for part in parts if hasattr(part, "fp32_precision")]


def _set_precision(part: Any, precision: str) -> None:
    """Restore the precision of a part of `torch.backends`: inherited, if that is the same."""
    part.fp32_precision = "none"
    if part.fp32_precision != precision:
        part.fp32_precision = precision


def eagerly() -> AbstractContextManager[None]:
    """Return a context in which compiled functions run eagerly."""
    return _eager if compat.has_compiled() else nullcontext()


class _Eager(AbstractContextManager[None]):
    """The stance `force_eager`, from the first context entered to the last one left.

    All threads share one stance. If each context restored the stance that it found, two that overlap could leave
    `force_eager` behind, and nothing compiled would run again.
    """

    def __init__(self) -> None:
        self._lock, self._users = threading.Lock(), 0
        self._stance: AbstractContextManager[None] = nullcontext()

    def __enter__(self) -> None:
        with self._lock:
            if self._users == 0:
                self._stance = torch.compiler.set_stance("force_eager")
                self._stance.__enter__()
            self._users += 1

    def __exit__(self, *error: Any) -> None:
        with self._lock:
            self._users -= 1
            if self._users == 0:
                self._stance.__exit__(*error)


_eager = _Eager()
