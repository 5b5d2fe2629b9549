"""A trial of an attention module that does not state its heads: its own forward, on tensors that hold no data.

`discovery` calls `run`. The module is copied without its weights' data, so nothing is computed, no random number is
drawn, and the module stays as it is. How many scores come to the softmax, and how wide the query is, tells the size.
"""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from betahook import compat
from betahook.models.code import PRODUCTS, SOFTMAXES
from betahook.models.torch_calls import Call, tensors_in

BATCH, LENGTH = 3, 7
"""Of the trial's input, where any length does; no size of a model is likely to be a multiple of both."""


@dataclass(frozen=True)
class Trial:
    """The result of a trial that ran.

    Attributes:
        size: the query heads and d_k of the first attention in it; None if there was none.
    """

    size: tuple[int, int] | None


def run(module: nn.Module) -> Trial | None:
    """Run the forward of a module for what it shows; None if it does not run on a made-up input.

    Each required argument is `[batch, length, width]`, but for masks, which are None.
    """
    with compat.without_data() as copied, torch.no_grad():
        try:
            arguments = [
                name for name, each in inspect.signature(module.forward).parameters.items() if _is_required(each)
            ]
            module = copied(module)
        except Exception:  # code of others: whatever it raises, there is no trial
            return None
        for length, width in itertools.product(_lengths(module), _widths(module)):
            watch = _Watch(BATCH * length)
            try:
                _try(module, arguments, (BATCH, length, width), watch)
            except Exception:  # another size may fit
                if watch.size is None:
                    continue
            return Trial(watch.size)
    return None


def _try(module: nn.Module, arguments: list[str], shape: tuple[int, ...], watch: _Watch) -> None:
    like = next(module.parameters())
    x = torch.zeros(shape, dtype=like.dtype, device=like.device)
    watch.activations[x] = 0
    with watch:
        module.forward(*(None if "mask" in name else x for name in arguments))


def _is_required(parameter: inspect.Parameter) -> bool:
    positional = parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD)
    return positional and parameter.default is parameter.empty


def _lengths(module: nn.Module) -> list[int]:
    """Lengths that an input of the module may have: any, or else those of its masks and numbers that it states."""
    of_masks = (mask.shape[-1] for mask in module.buffers() if mask.dim() > 1 and mask.shape[-1] == mask.shape[-2])
    stated = (value for value in vars(module).values() if type(value) is int and value > 1)
    return list(dict.fromkeys([LENGTH, *of_masks, *stated]))[:4]


def _widths(module: nn.Module) -> list[int]:
    """Widths that an input of the module may have, those of its first layers first."""
    found: dict[int, None] = {}
    for part in module.modules():
        width, weight = getattr(part, "in_features", None), getattr(part, "weight", None)
        if isinstance(width, int):
            found[width] = None
        elif isinstance(weight, Tensor) and weight.dim() > 0:
            found[weight.shape[0]] = None  # a norm, or a Conv1D of transformers
        for own in part.parameters(recurse=False):
            found.update(dict.fromkeys(own.shape))
    return list(found)[:6]


class _Watch(TorchFunctionMode):
    """Follows products of activations to a softmax, and that to a further product; `tokens` of all sequences."""

    def __init__(self, tokens: int) -> None:
        super().__init__()
        self.tokens = tokens
        self.activations: Any = compat.WeakIdKeyDictionary()  # to the entries of a query, 0 for what is no score
        self.weights: Any = compat.WeakIdKeyDictionary()  # to the size of the attention that made them
        self.size: tuple[int, int] | None = None

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        call = Call(func, args, kwargs or {})
        if call.name == "multi_head_attention_forward":
            with self:
                return compat.multi_head_attention_forward()(*args, **call.kwargs)
        output = call.run()
        if call.name == "scaled_dot_product_attention":
            self._settle(call.tensors[0].numel(), call.tensors[0].shape[-1])
        parts, moving = list(tensors_in(output)), [x for x in call.tensors if x in self.activations]
        if call.name in SOFTMAXES and parts and moving:
            self._weigh(call, parts[0])
            return output
        weights = next((self.weights[x] for x in call.tensors if x in self.weights), None)
        if call.name in PRODUCTS and weights is not None:
            self.size, weights = self.size or weights, None
        query = max((self.activations[x] for x in moving), default=0)
        if call.name in PRODUCTS:
            query = max(x.numel() for x in call.tensors) if len(moving) > 1 else 0
        for part in parts:
            if moving:
                self.activations[part] = query
            if weights is not None:
                self.weights[part] = weights
        return output

    def _weigh(self, call: Call, output: Tensor) -> None:
        """Note what a softmax of scores makes."""
        scores = call.operands[0]
        self.activations[output] = 0
        query = self.activations.get(scores, 0)
        rows, left = divmod(scores.numel(), scores.shape[call.dim])
        if query and not left and not rows % self.tokens and not query % rows:
            self.weights[output] = rows // self.tokens, query // rows

    def _settle(self, entries: int, head_dim: int) -> None:
        """Note the size of an attention that takes its softmax itself."""
        if entries % (self.tokens * head_dim) == 0:
            self.size = self.size or (entries // (self.tokens * head_dim), head_dim)
