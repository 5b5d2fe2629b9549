"""Run a hooked model again on its last input, and compare its outputs.

`fold` and the clipping of weights verify themselves in this way, and the audit measures correlations in such a run.
Afterwards the model, its hook and the random state are as they were, whatever happens.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from betahook.measure.dtypes import sum_dtype, to_sum_dtype
from betahook.models import materialise
from betahook.models.modes import RandomState, eagerly, evaluating, full_precision
from betahook.models.side_effects import undone_in_attributes
from betahook.models.torch_calls import copied
from betahook.tap.last_call import LastCall

CHUNK = 2**24
"""Number of entries of an output compared at once, since logits may be large and their differences take float64."""


ELSEWHERE = "on another rank, whose error says why"
"""Words in a message for an error that this rank did not raise."""


class Hooked(Protocol):
    """The parts of a `Hook` that are needed to run its model again."""

    model: nn.Module
    last_call: LastCall

    def pause(self) -> AbstractContextManager[None]: ...


@contextmanager
def without_side_effects(hook: Hooked) -> Iterator[None]:
    """Set evaluation mode and full precision, without caches, compilation and measuring; restore all afterwards."""
    configs = {id(c): c for c in (getattr(m, "config", None) for m in hook.model.modules()) if c is not None}
    with ExitStack() as stack:
        stack.enter_context(hook.pause())
        stack.callback(setattr, hook.last_call, "input", hook.last_call.input)
        stack.enter_context(eagerly())
        stack.enter_context(full_precision())  # else a check could not distinguish errors from TF32 rounding
        for config in configs.values():
            if getattr(config, "use_cache", False) is True:
                config.use_cache = False
                stack.callback(setattr, config, "use_cache", True)
        stack.enter_context(evaluating(hook.model))
        yield


def run_model(hook: Hooked) -> list[Tensor]:
    """Run the last call again without a cache, and return the floating-point tensors of its output."""
    return [tensor.clone() for tensor in tensors(_output(hook))]  # an output may be a weight itself


def failure_message(hook: Hooked, error: Exception | None) -> str:
    """Return a message that the last call does not run again; `error` is of this rank, None of another rank."""
    found = ELSEWHERE if error is None else f"{type(error).__name__}: {error}"
    return f"{type(hook.last_call.module).__name__} does not run again on the input of its last forward ({found})"


def loss(hook: Hooked) -> Tensor:
    """Run the last call again and return its loss, a scalar.

    NaN if it returns none, had no input or does not run again: one rank alone must not leave the others waiting.
    """
    found = None
    if hook.last_call.input is not None:
        with suppress(Exception):  # the model may raise anything; `fold` reports it
            found = loss_in(_output(hook))
    device = next(hook.model.parameters()).device
    return found.detach().mean().float() if isinstance(found, Tensor) else torch.full((), math.nan, device=device)


def loss_in(output: Any) -> Any:
    """Return the loss in the output of a model; None if there is none.

    It is the attribute or key `loss`, the only scalar of a pair such as `logits, loss`, or the output itself. A scalar
    among more tensors may be something else, such as the temperature of CLIP.
    """
    if isinstance(output, Tensor) or (type(output) in (tuple, list) and len(output) == 2):
        parts = [output] if isinstance(output, Tensor) else output
        scalars = [part for part in parts if isinstance(part, Tensor) and part.dim() == 0 and part.is_floating_point()]
        return scalars[0] if len(scalars) == 1 else None
    try:
        found = getattr(output, "loss", None)
    except Exception:  # a KeyError, e.g., of a mapping that looks up attributes among its keys
        found = None
    return output.get("loss") if not isinstance(found, Tensor) and isinstance(output, Mapping) else found


def _output(hook: Hooked) -> Any:
    module, given = hook.last_call.module, hook.last_call.input
    assert given is not None
    args, kwargs = given
    kwargs = {**kwargs, "use_cache": False} if "use_cache" in kwargs else kwargs
    with RandomState(hook.model).preserved(), undone_in_attributes(hook.model), ExitStack() as afterwards:
        afterwards.callback(materialise.reshard, hook.model)  # the caller may write to its weights
        args, kwargs = copied((args, kwargs))
        return module(*args, **kwargs)


def tensors(output: Any, depth: int = 8) -> Iterator[Tensor]:
    """Yield the floating-point tensors in nested tuples, lists, dictionaries and objects."""
    if isinstance(output, Tensor):
        if output.is_floating_point():
            yield from output.unbind() if output.is_nested else [output]
        return
    parts = output if isinstance(output, tuple | list) else getattr(output, "__dict__", {}).values()
    parts = output.values() if isinstance(output, dict) else parts
    for part in parts if depth and not isinstance(output, nn.Module | type) else ():
        yield from tensors(part, depth - 1)


def distances(one: Sequence[Any], other: Sequence[Any]) -> Tensor:
    """Return the norm of the difference of each pair of outputs, `[pairs]`, float64 on the CPU.

    NaN if shapes differ; entries that are NaN in both, or the same infinity, do not count.
    """
    return torch.tensor([_distance(a, b) for a, b in zip(one, other, strict=True)], dtype=torch.double, device="cpu")


def _distance(one: Any, other: Any) -> float:
    total = 0.0
    for a, b in zip(tensors(one), tensors(other), strict=True):
        if a.shape != b.shape:  # e.g. of an output of random length
            return math.nan
        for x, y in zip(a.reshape(-1).split(CHUNK), b.reshape(-1).split(CHUNK), strict=True):
            alike = (x == y) | (x.isnan() & y.isnan())
            total += float((to_sum_dtype(x) - to_sum_dtype(y)).masked_fill(alike, 0).square().sum())
    return math.sqrt(total)


def norms(outputs: Sequence[Any]) -> Tensor:
    """Return the norm of the finite entries of each output, `[outputs]`, float64 on the CPU."""
    return torch.tensor([_norm(output) for output in outputs], dtype=torch.double, device="cpu")


def _norm(output: Any) -> float:
    finite = (tensor.nan_to_num(0, 0, 0) for tensor in tensors(output))
    return math.hypot(*(float(torch.linalg.vector_norm(tensor, dtype=sum_dtype(tensor.device))) for tensor in finite))


def coarsest_eps(nested: Any) -> float:
    """Return the machine epsilon of the coarsest dtype among nested tensors; 0 without tensors."""
    return max((torch.finfo(tensor.dtype).eps for tensor in tensors(nested)), default=0.0)
