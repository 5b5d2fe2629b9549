"""Modes for a while, of a model that is run again: evaluation, random numbers, full precision, no compiled code."""

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
    """Evaluation mode; afterwards every module inside is in the mode that it was in."""
    with ExitStack() as stack:
        for part in module.modules():
            stack.callback(setattr, part, "training", part.training)
        module.eval()
        yield


class RandomState:
    """The state of the random numbers that a module draws.

    They are those of torch on the CPU and on the devices of the module, of Python, of numpy where it is loaded, and of
    generators that the module or a part of it holds. To find these takes a look at every attribute of every part.
    """

    def __init__(self, module: nn.Module) -> None:
        self._devices = {parameter.device for parameter in module.parameters()}
        self._generators = list(_generators(module))

    @contextmanager
    def kept(self, tensors: Iterable[Tensor] = ()) -> Iterator[None]:
        """Let the numbers that come next be drawn, and afterwards come again, also on the devices of the tensors."""
        devices = self._devices.union(tensor.device for tensor in tensors)
        with ExitStack() as stack:
            for generator in (random, sys.modules.get("numpy.random"), *self._generators):
                _keep_state(generator, stack)
            for kind in ("cuda", "xpu"):
                of_kind = [device for device in devices if device.type == kind]
                stack.enter_context(torch.random.fork_rng(of_kind, device_type=kind))
            if any(device.type == "mps" for device in devices):  # has one state, which fork_rng cannot ask for
                stack.callback(torch.mps.set_rng_state, torch.mps.get_rng_state())
            yield


def _generators(module: nn.Module) -> Iterator[Any]:
    """The random generators among the attributes of a module and its parts, and in lists and dictionaries of them."""
    for part in module.modules():
        for value in vars(part).values():
            each = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else [value]
            yield from filter(_is_generator, each)


def _is_generator(value: Any) -> bool:
    if isinstance(value, torch.Generator | random.Random):
        return not isinstance(value, random.SystemRandom)  # which has no state
    return type(value).__module__.startswith("numpy.random")


def _keep_state(generator: Any, stack: ExitStack) -> None:
    """Give a generator, or what has a global one, back its state when the stack is closed."""
    if hasattr(generator, "get_state"):  # of torch, and numpy's global ones
        stack.callback(generator.set_state, generator.get_state())
    elif hasattr(generator, "getstate"):  # of Python
        stack.callback(generator.setstate, generator.getstate())
    elif hasattr(generator, "bit_generator"):  # of numpy
        stack.callback(setattr, generator.bit_generator, "state", generator.bit_generator.state)


@contextmanager
def full_precision() -> Iterator[None]:
    """Float32 products and convolutions in float32, not in TF32 or bfloat16; afterwards as it was chosen."""
    cudnn, parts = torch.backends.cudnn, _float32_parts()
    with ExitStack() as stack:
        for part in parts:
            stack.callback(_set_precision, part, part.fp32_precision)
        # These switches must agree with the parts, and raise where the choice was made for the parts alone.
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
    """The parts of `torch.backends` that have a float32 precision of their own, of which torch before 2.9 has none."""
    names = ("cuda", "matmul"), ("cudnn", "conv"), ("cudnn", "rnn"), ("mkldnn", "matmul"), ("mkldnn", "conv")
    parts = (getattr(getattr(torch.backends, owner), name, None) for owner, name in names)
    return [part for part in parts if hasattr(part, "fp32_precision")]


def _set_precision(part: Any, precision: str) -> None:
    """Give a part of `torch.backends` back its precision: what it inherits, where that is the same."""
    part.fp32_precision = "none"
    if part.fp32_precision != precision:
        part.fp32_precision = precision


def eagerly() -> AbstractContextManager[None]:
    """Return a context in which compiled functions run as they are written."""
    return _eager if compat.has_compiled() else nullcontext()


class _Eager(AbstractContextManager[None]):
    """The stance `force_eager`, from the first that enters to the last that leaves.

    All threads share one stance. If each put back the one that it found, those of two that overlap would end in
    `force_eager`, and nothing compiled would run again.
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
