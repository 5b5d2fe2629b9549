"""What the attention of an unhooked model really computes, seen from below: by the operations that torch runs.

Nothing here knows transformers or betahook. Every product of two activations is a candidate score product. Its result
gets a shadow: for each element, in float64, the raw score it came from and the factor that was put on it since. The
shadow follows the memory, so views need no rule; arithmetic, copies and rearrangements have one below; anything else
ends it. A softmax whose input has a shadow is an attention, and belongs to the innermost module that held both.
"""

from __future__ import annotations

import functools
import math
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

aten = torch.ops.aten

MASKED = -87.0
"""A pair counts as masked where so much or more is taken off its logit: its share of the row is below float32."""


@dataclass
class Softmax:
    """One softmax over scores. The tensors have the shape of its input; float64.

    Attributes:
        score: raw scores `q . k` of the first of the products that were added up, NaN where there is none.
        factor: what the score was multiplied by on the way.
        others: the sum of the further products, factors included; 0 where there are none.
        logits: what the softmax received.
        prescale: numbers by which q or k were multiplied as a whole before the product, multiplied together.
        dim: the axis of the softmax.
    """

    score: Tensor
    factor: Tensor
    others: Tensor
    logits: Tensor
    prescale: float
    dim: int = -1

    @property
    def bias(self) -> Tensor:
        """What was added to the scaled scores: further products, biases and mask, `-inf` included."""
        return self.logits - self.factor * self.score

    @property
    def allowed(self) -> Tensor:
        """The pairs that the attention may use."""
        return self.bias > MASKED

    @property
    def entropies(self) -> Tensor:
        """The entropy in nats of each row that has an allowed pair, flat; all that the softmax got is a part of it."""
        return torch.special.entr(self.logits.softmax(self.dim)).sum(self.dim)[self.allowed.any(self.dim)]


@dataclass
class Attention:
    """All that one module computed during the watched forward."""

    calls: list[Softmax] = field(default_factory=list)

    def _pool(self, choose: Callable[[Softmax], Tensor]) -> Tensor:
        return torch.cat([choose(call)[call.allowed] for call in self.calls])

    @property
    def scores(self) -> Tensor:
        """The raw scores of all allowed pairs, flat: of the first product."""
        return self._pool(lambda call: call.score)

    @property
    def whole_scores(self) -> Tensor:
        """The same of the sum of all products, in units of the first."""
        return self._pool(lambda call: call.score + call.others / call.factor)

    @property
    def std(self) -> float:
        return self.scores.std(correction=0).item()

    @property
    def entropy(self) -> float:
        """The mean entropy of all rows, in nats."""
        return torch.cat([call.entropies for call in self.calls]).mean().item()

    @property
    def factors(self) -> list[float]:
        """The different factors between score and logit, sorted; more than one where heads differ."""
        return sorted({float(f"{value:.6g}") for value in self._pool(lambda call: call.factor).unique().tolist()})

    @property
    def prescale(self) -> float:
        """What q and k had been multiplied by before the product."""
        return self.calls[0].prescale

    @property
    def is_sum(self) -> bool:
        """Whether further products are added to the scores."""
        return bool((self._pool(lambda call: call.others) != 0).any())


Terms = list[tuple[Tensor, Tensor]]
"""Score and factor of each of the products that are added up in a tensor."""

PRODUCTS = {aten.bmm, aten.baddbmm, aten.mm}
LINEAR = {aten.mul: lambda factor, other: factor * other, aten.div: lambda factor, other: factor / other}
KEPT = {
    aten.clone,
    aten._to_copy,
    aten.masked_fill,
    aten.where,
    aten.tanh,
    aten.clamp,
    aten.clamp_min,
    aten.maximum,
    aten.lift_fresh,
    aten.tril,
}
"""Operations after which every element still stands for the same score."""
MOVED = {
    aten.cat,
    aten.stack,
    aten.constant_pad_nd,
    aten.index,
    aten._unsafe_index,
    aten.index_select,
    aten.gather,
    aten.repeat,
    aten.roll,
    aten.flip,
    aten.slice_scatter,
    aten.select_scatter,
    aten._reshape_copy,
}
"""Operations that put elements elsewhere, and do the same to their shadows."""
IN_PLACE = {
    aten.mul_: aten.mul,
    aten.div_: aten.div,
    aten.add_: aten.add,
    aten.sub_: aten.sub,
    aten.masked_fill_: aten.masked_fill,
    aten.copy_: aten.clone,
    aten.clamp_: aten.clamp,
    aten.tril_: aten.tril,
}


def _key(tensor: Tensor) -> int:
    """The memory that a tensor lives in."""
    return tensor.untyped_storage()._cdata


def _tensors(values: Any) -> list[Tensor]:
    """The tensors among the arguments of an operation."""
    nested = [value if isinstance(value, (list, tuple)) else [value] for value in values]
    return [value for part in nested for value in part if isinstance(value, Tensor)]


@dataclass
class _Shadow:
    """What is known of one piece of memory that holds scores.

    Attributes:
        size: its length in elements.
        stack: the modules inside which the product was taken.
        prescale: see `Softmax`.
        terms: score and factor of each product, flat.
    """

    size: int
    stack: list[nn.Module]
    prescale: float
    terms: Terms = field(default_factory=list)


class _Shadows(TorchDispatchMode):
    """Keeps the shadows, and reports every softmax over shadowed memory."""

    def __init__(self, model: nn.Module, report: Callable[[Softmax, list[nn.Module]], None], stack: list[nn.Module]):
        super().__init__()
        self.report, self.stack = report, stack
        self.alive = [*model.parameters(), *model.buffers()]  # freed memory would lend its address to another tensor
        self.weights = {_key(tensor) for tensor in self.alive}
        self.memory: dict[int, _Shadow] = {}
        self.scalars: dict[int, float] = {}

    def __torch_dispatch__(self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        packet = function._overloadpacket
        if packet is aten._softmax:
            self._softmax(*args[:2])
        result = function(*args, **kwargs)
        if isinstance(result, Tensor) and result.is_floating_point():
            self._follow(packet, result, args, kwargs)
        return result

    def sdpa(self, query: Tensor, key: Tensor, mask: Tensor | None, causal: bool, scale: float | None) -> None:
        """Report a fused attention, its logits in float64."""
        if query.dim() > 3:
            key = key.repeat_interleave(query.shape[-3] // key.shape[-3], -3)
        score = query.double() @ key.double().mT
        factor = query.shape[-1] ** -0.5 if scale is None else scale
        logits = score * factor
        if causal:
            logits = logits.masked_fill(torch.ones(score.shape[-2:], dtype=torch.bool).triu(1), -math.inf)
        if mask is not None:
            logits = logits.masked_fill(~mask, -math.inf) if mask.dtype == torch.bool else logits + mask.double()
        prescale = self._scalar(query) * self._scalar(key)
        zeros = torch.zeros_like(score)
        self.report(Softmax(score, zeros + factor, zeros, logits, prescale), self.stack)

    def _softmax(self, logits: Tensor, dim: int) -> None:
        terms = self._terms(logits)
        if not terms or bool(terms[0][0].isnan().all()):
            return
        (score, factor), *rest = terms
        others = sum(((s * f).nan_to_num(0) for s, f in rest), torch.zeros_like(score))
        shadow = self.memory[_key(logits)]
        call = Softmax(score.clone(), factor.clone(), others, logits.detach().double(), shadow.prescale, dim)
        self.report(call, [a for a, b in zip(shadow.stack, self.stack, strict=False) if a is b])

    def _terms(self, tensor: Any) -> Terms:
        """The shadow of a tensor, as views of its shape."""
        shadow = self.memory.get(_key(tensor)) if isinstance(tensor, Tensor) else None
        if shadow is None:
            return []
        layout = tensor.size(), tensor.stride(), tensor.storage_offset()
        return [(s.as_strided(*layout), f.as_strided(*layout)) for s, f in shadow.terms]

    def _scalar(self, tensor: Tensor) -> float:
        return self.scalars.get(_key(tensor), 1.0)

    def _write(self, result: Tensor, terms: Terms, stack: list[nn.Module], prescale: float) -> None:
        """Give memory that was just written its shadow."""
        self.alive.append(result)
        size = result.untyped_storage().nbytes() // result.element_size()
        shadow = self.memory.setdefault(_key(result), _Shadow(size, stack, prescale))
        nothing = (torch.full((), math.nan, dtype=torch.float64), torch.ones((), dtype=torch.float64))
        while len(shadow.terms) < len(terms):
            score, factor = (filler.repeat(size) for filler in nothing)
            shadow.terms.append((score, factor))
        for index, views in enumerate(self._terms(result)):
            for view, values in zip(views, terms[index] if index < len(terms) else nothing, strict=True):
                view.copy_(values.expand(view.shape))

    def _follow(self, packet: Any, result: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        tensors = _tensors(args)
        if packet in PRODUCTS:
            left, right = args[-2:]
            if not {_key(left), _key(right)} & self.weights:
                factor = torch.tensor(float(kwargs.get("alpha", 1)), dtype=torch.float64)
                before = self._terms(args[0]) if packet is aten.baddbmm else []
                terms = [(left.double() @ right.double(), factor), *before]
                self._write(result, terms, list(self.stack), self._scalar(left) * self._scalar(right))
            return
        source = next((self.memory[_key(t)] for t in tensors if _key(t) in self.memory), None)
        if source is None:
            self._follow_operand(packet, result, tensors, args)
            return
        in_place, packet = packet in IN_PLACE, IN_PLACE.get(packet, packet)
        terms = self._arithmetic(packet, args, kwargs)
        if terms is None and packet in MOVED:
            terms = self._moved(packet, args, kwargs)
        if terms is not None:
            self._write(result, terms, source.stack, source.prescale)
        elif in_place:
            self._write(result, [], source.stack, source.prescale)

    def _follow_operand(self, packet: Any, result: Tensor, tensors: list[Tensor], args: tuple[Any, ...]) -> None:
        """Outside of scores: know a weight that was moved, and the number by which all of a tensor was multiplied."""
        packet = IN_PLACE.get(packet, packet)
        key = _key(result)
        if tensors and (packet in KEPT or packet in MOVED) and _key(tensors[0]) in self.weights:
            self.alive.append(result)
            self.weights.add(key)
        elif packet in LINEAR or packet in KEPT or packet in MOVED or packet in (aten.add, aten.sub, aten.neg):
            held = [self._scalar(tensor) for tensor in tensors if tensor.dim() and tensor.is_floating_point()]
            if packet in LINEAR:
                numbers = [x.item() if isinstance(x, Tensor) and x.dim() == 0 else x for x in args[:2]]
                held += [x for x in numbers if isinstance(x, (int, float))]
                prescale = functools.reduce(LINEAR[packet], held) if 0 not in held else 1.0
            else:
                prescale = held[0] if len(set(held)) == 1 else 1.0
            if prescale != 1:
                self.alive.append(result)
                self.scalars[key] = prescale

    def _arithmetic(self, packet: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Terms | None:
        """The terms of what an element-wise operation returns; None where it leaves no scores."""
        if packet in (aten.add, aten.sub):
            sign = float(kwargs.get("alpha", 1)) * (-1 if packet is aten.sub else 1)
            return [*self._terms(args[0]), *((s, f * sign) for s, f in self._terms(args[1]))]
        if packet in LINEAR:
            terms, other = self._terms(args[0]), args[1]
            if not terms and packet is aten.mul:
                terms, other = self._terms(args[1]), args[0]
            if not terms or self._terms(other):
                return None
            number = other.double() if isinstance(other, Tensor) else other
            return [(s, LINEAR[packet](f, number)) for s, f in terms]
        if packet is aten.clone:
            return self._terms(_tensors(args)[-1])  # of copy_, the second one
        if packet is aten.where and all(self._terms(tensor) for tensor in args[1:]):
            return self._moved(packet, args, kwargs)
        if packet in KEPT:
            return next(terms for tensor in _tensors(args) if (terms := self._terms(tensor)))
        return None

    def _moved(self, packet: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Terms:
        """Do to the shadows what was done to the tensors; what has none becomes NaN."""
        depth = max(len(self._terms(tensor)) for tensor in _tensors(args))

        def shadow(value: Any, term: int, part: int, filler: float) -> Any:
            if isinstance(value, (list, tuple)):
                return [shadow(item, term, part, filler) for item in value]
            if not isinstance(value, Tensor) or not value.is_floating_point():
                return value
            terms = self._terms(value)
            return terms[term][part] if term < len(terms) else value.double() * 0 + filler

        def move(term: int, part: int, filler: float) -> Tensor:
            arguments = [shadow(value, term, part, filler) for value in args]
            if packet is aten.constant_pad_nd:
                arguments = [*arguments[:2], filler]
            moved: Tensor = packet(*arguments, **kwargs)
            return moved

        return [(move(term, 0, math.nan), move(term, 1, 1.0)) for term in range(depth)]


class _Fused(TorchFunctionMode):
    """Sees `scaled_dot_product_attention` before torch picks a kernel for it, hiding its inside from the shadows."""

    def __init__(self, shadows: _Shadows):
        super().__init__()
        self.shadows = shadows

    def __torch_function__(self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if function is nn.functional.multi_head_attention_forward:
            # Written in Python: look inside, past the check that would bring it here again.
            with self, mock.patch("torch.nn.functional.has_torch_function", return_value=False):
                return function(*args, **kwargs)
        if function is not nn.functional.scaled_dot_product_attention:
            return function(*args, **kwargs)
        query, key, _, mask, _, causal, scale = _sdpa_arguments(*args, **kwargs)
        with torch.utils._python_dispatch._disable_current_modes():
            self.shadows.sdpa(query.detach(), key.detach(), mask, causal, scale)
            return function(*args, **kwargs)


def _sdpa_arguments(query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False):
    return query, key, value, attn_mask, dropout_p, is_causal, scale


@contextmanager
def watch(model: nn.Module) -> Iterator[dict[str, Attention]]:
    """Every attention of the forwards inside, by the name of its module."""
    names = {module: name for name, module in model.named_modules()}
    found: dict[str, Attention] = defaultdict(Attention)
    stack: list[nn.Module] = []

    def report(call: Softmax, held: list[nn.Module]) -> None:
        owner = next((names[module] for module in reversed(held) if module in names), "")
        found[owner].calls.append(call)

    def leave(module: nn.Module, args: Any, output: Any) -> None:
        stack.pop()

    shadows = _Shadows(model, report, stack)
    fast = torch.backends.mha.get_fastpath_enabled()
    with ExitStack() as undo:
        undo.callback(torch.backends.mha.set_fastpath_enabled, fast)
        torch.backends.mha.set_fastpath_enabled(False)
        undo.callback(register_module_forward_pre_hook(lambda module, args: stack.append(module)).remove)
        undo.callback(register_module_forward_hook(leave, always_call=True).remove)
        undo.enter_context(torch.no_grad())
        undo.enter_context(shadows)
        undo.enter_context(_Fused(shadows))
        yield found
