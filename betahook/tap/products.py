"""The second tap: attention that computes its scores by hand, or asks torch for them, instead of transformers.

While such a module runs, every torch function that it calls passes through `ScoreProducts`. The first product of two
activations is the score product, since the values come after the softmax: its left operand is multiplied by
`beta / beta_default`. From there the scores are followed to the softmax, through whatever moves, scales, masks or
biases them. The factors on the way make the model's own beta, and the softmax shows which pairs are allowed.
"""

from __future__ import annotations

import functools
import itertools
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from numbers import Real
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakIdKeyDictionary

from betahook.layers import AttentionLayer
from betahook.measure import masks
from betahook.measure.masks import Band, Mask
from betahook.tap import contraction
from betahook.tap.contraction import Contraction
from betahook.tap.gain import is_recording, scale_query
from betahook.tap.override import Override

MULTIPLY = {"mul", "mul_", "multiply", "__mul__", "__rmul__", "__imul__"}
DIVIDE = {"div", "div_", "divide", "true_divide", "__truediv__", "__itruediv__"}
ADD = {"add", "add_", "__add__", "__radd__", "__iadd__", "sub", "sub_", "__sub__", "__isub__"}
# ruff: noqa: SIM905, a list of names would take a line for each.
MOVE = set(
    "view reshape transpose permute swapaxes swapdims movedim moveaxis flatten unflatten squeeze unsqueeze t "
    "expand expand_as view_as reshape_as __getitem__ select narrow split chunk unbind gather index_select "
    "take_along_dim flip roll as_strided unfold cat concat concatenate stack pad repeat repeat_interleave tile "
    "neg __neg__".split()
)
"""Linear functions: what they do to the logits they do to the scores."""
KEEP = set(
    "to float half bfloat16 type type_as contiguous clone dropout masked_fill masked_fill_ where clamp clamp_ "
    "clamp_min clamp_max clip tanh nan_to_num max maximum tril triu".split()
)
"""Functions after which an element still stems from the same score, whatever has become of it."""
FOLLOWED = MULTIPLY | DIVIDE | ADD | MOVE | KEEP
PROPERTIES = {Tensor.T.__get__, Tensor.mT.__get__}  # type: ignore[attr-defined]
"""Those that transpose. The getters of all properties are called `__get__`, so these are known by identity."""
IN_PLACE = {"__imul__", "__itruediv__", "__iadd__", "__isub__", "__setitem__"}


@dataclass(frozen=True)
class Trace:
    """What is known of a tensor.

    Attributes:
        kind: "operand", an activation times `factor`; "scores", which equal `factor * value + bias` with
            `value = prescale * q . k`; or "weights", what comes out of a softmax.
        factor: see `kind`; a number, a 0-dim tensor or one that broadcasts over heads.
        value: the scores in the layout that they have by now, without masks and biases; None where nobody asks.
        prescale: the factors that the operands of the product carried.
        operands: q and k of the product without these factors, of the first of several.
    """

    kind: Literal["operand", "scores", "weights"]
    factor: float | Tensor = 1.0
    value: Tensor | None = None
    prescale: float | Tensor = 1.0
    operands: tuple[Tensor, Tensor] | None = None

    def scaled(self) -> Trace:
        """The same with the factor moved into the value."""
        value = None if self.value is None else self.value * self.factor
        return replace(self, factor=1.0, value=value, prescale=self.prescale * self.factor)


def connect(layer: AttentionLayer) -> Override:
    """Watch every forward of the layer's module; the handle undoes it."""
    forward = layer.module.forward

    # No hooks: torch runs none after a KeyboardInterrupt, and a mode that stays acts on everything that follows.
    @functools.wraps(forward)
    def watched(*args: Any, **kwargs: Any) -> Any:
        if not handle.active:  # a wrapper that came later, such as that of Accelerate, goes on calling this
            return forward(*args, **kwargs)
        with ScoreProducts(layer):
            try:
                return forward(*args, **kwargs)
            except contraction.UnknownHeadsError as error:
                raise ValueError(
                    f"{layer.name}: {error}. Detach betahook, or leave this layer out with layers=..."
                ) from error

    # Left out of compiled graphs: torch fails to compile what the mode does in `nn.MultiheadAttention`.
    handle = Override(layer.module, "forward", torch.compiler.disable(watched))
    return handle


def keep_padding(model: nn.Module, layers: Iterable[AttentionLayer]) -> list[Override]:
    """Let torch's encoders around the layers take a padded batch as it is; the handles undo it.

    In evaluation they pack it into a nested tensor, which `nn.MultiheadAttention` takes on its fast path only, and that
    no hook sees. At padded positions they now return what they do in training, instead of zeros.
    """
    attention = {layer.module for layer in layers}
    return [
        Override(encoder, "use_nested_tensor", False)
        for encoder in model.modules()
        if isinstance(encoder, nn.TransformerEncoder) and not attention.isdisjoint(encoder.modules())
    ]


class ScoreProducts(TorchFunctionMode):
    """Scales and follows the score products in one forward of one attention module."""

    def __init__(self, layer: AttentionLayer) -> None:
        super().__init__()
        self._layer = layer
        self._known = layer.facts
        self._recording = is_recording(layer)
        self._products = 0
        self._traces = WeakIdKeyDictionary()
        if layer.facts.temperature is not None:
            layer.note_default(layer.facts.temperature(layer.module))

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        name = "transpose" if func in PROPERTIES else func.__name__
        if name in contraction.NAMES:
            return self._multiply_matrices(func, args, kwargs)
        if name == "softmax":
            return self._softmax(func, *args, **kwargs)
        if name == "scaled_dot_product_attention":
            return self._fused(func, *args, **kwargs)
        if name == "multi_head_attention_forward":
            with self:
                return _multi_head_attention()(*args, **kwargs)
        if name == "__setitem__":
            return self._assign(func, *args)
        if name in FOLLOWED:
            return self._follow(name, func, args, kwargs)
        return func(*args, **kwargs)

    def _multiply_matrices(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        product = contraction.read(func, args, kwargs)
        traces = [self._trace(tensor) for tensor in _tensors((args, kwargs))]
        if product is None or not self._is_score_product(product):
            output = func(*args, **kwargs)
            if any(trace is not None and trace.kind == "scores" for trace in traces):
                # A linear map of scores, as of those against segment embeddings in XLNet.
                self._note(output, self._moved(func, args, kwargs))
            return output
        layer = self._layer
        folded = product.equation is not None and product.equation == self._known.folded
        axis = product.head_axis(layer.heads, "flat" if folded else self._known.product_axis)
        # The values, not seen yet, may ask for a gradient where q and k do not; a product into a buffer has none.
        others = itertools.chain([product.right], () if "out" in kwargs else layer.module.parameters())
        query = contraction.on_heads(
            product.left, axis, layer.heads, lambda left, axis: scale_query(layer, left, others, axis)
        )
        output = product.run(query)
        factors = self._factor(product.left), self._factor(product.right)
        value = operands = None
        if self._recording:
            with torch.no_grad():  # a checkpointed forward must save as much for its backward as its recomputation
                value = product.alone(query) if product.biased else output.detach()
                left, right = product.tokens(axis, layer.heads)
                operands = _divided(left, factors[0]), _divided(right, factors[1])
        self._note(output, Trace("scores", product.alpha, value, factors[0] * factors[1], operands))
        return output

    def _is_score_product(self, product: Contraction) -> bool:
        """Whether this is a product of activations, and one that makes scores."""
        known, operands = self._known, (product.left, product.right)
        # Where torch takes the softmax, products before it make its bias.
        if self._layer.route == "torch" or product.size == 1:
            return False
        if any((t := self._trace(x)) is not None and t.kind != "operand" for x in operands):
            return False
        learned = any(isinstance(x, nn.Parameter) for x in operands)
        if known.every_product:
            return not learned or product.size == self._layer.head_dim
        if learned:
            return False
        self._products += 1
        return self._products == known.skipped_products + 1

    def _softmax(self, func: Callable[..., Any], input: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        output: Tensor = func(input, *args, **kwargs)
        trace = self._trace(input)
        self._note(output, Trace("weights"))
        if trace is None or trace.kind != "scores":
            return output
        self._products = 0
        layer = self._layer
        if self._known.temperature is None:
            layer.note_default(trace.factor * trace.prescale)
        if trace.value is not None:
            dim = kwargs.get("dim", kwargs.get("axis", args[0] if args else -1))
            scores, logits = (x.detach().movedim(dim, -1) for x in (trace.value, input))
            bias = logits - scores * trace.factor
            scores, logits, bias = (
                contraction.scores_by_head(x, layer.heads, self._known.score_axis) for x in (scores, logits, bias)
            )
            assert trace.operands is not None
            layer.record_pairs(scores, logits, bias > masks.MASKED, trace.operands, trace.prescale)
        return output

    def _fused(
        self,
        func: Callable[..., Tensor],
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        **options: Any,
    ) -> Tensor:
        """Follow `torch.nn.functional.scaled_dot_product_attention`."""
        layer = self._layer
        heads, axis = layer.heads, contraction.axis_of(query.shape[:-2], layer.heads, self._known.product_axis)
        of_query, of_key = self._factor(query), self._factor(key)
        layer.note_default(of_query * of_key * (query.shape[-1] ** -0.5 if scale is None else scale))
        if self._recording:
            raw = _divided(query.detach(), of_query), _divided(key.detach(), of_key)
            q, k = (contraction.batched(x, axis, heads) for x in raw)
            q, k = (x.expand(max(len(q), len(k)), *x.shape[1:]) for x in (q, k))  # one may be the same for all
            mask = Mask(Band(None, 0 if is_causal else None))
            if attn_mask is not None:
                first = max(len(query), len(key))
                pairs = attn_mask.detach().expand(first, *query.shape[1:-1], key.shape[-2])
                mask = masks.from_tensor(contraction.batched(pairs, axis, heads), Band())
            layer.record(q, k, mask, position_bias=None, softcap=None)
        query = contraction.on_heads(
            query, axis, heads, lambda query, axis: scale_query(layer, query, (key, value), axis)
        )
        return func(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, **options)

    def _follow(self, name: str, func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Run a function and note what it makes of the tensors that are followed."""
        operands = contraction.operands(args, kwargs)
        trace = self._trace(operands[0])
        if (
            trace is not None
            and trace.value is not None
            and (name in IN_PLACE or (name.endswith("_") and name[0] != "_"))
        ):
            # The value may share the memory that is about to change.
            self._note(operands[0], replace(trace, value=trace.value.clone()))
        with torch.no_grad():
            derived = self._derive(name, func, args, kwargs, operands)
        output = func(*args, **kwargs)
        self._note(output, derived)
        return output

    def _derive(
        self,
        name: str,
        func: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        operands: list[Any],
    ) -> Trace | list[Trace] | None:
        traces = [trace for tensor in _tensors((args, kwargs)) if (trace := self._trace(tensor)) is not None]
        if name in MULTIPLY | DIVIDE:
            return _scaled(name in DIVIDE, *((x, self._trace(x)) for x in operands[:2]))
        if not traces or (name == "max" and sum(isinstance(x, Tensor) for x in operands) < 2):
            return None  # a maximum over scores is none of them
        if name in MOVE:
            if self._trace(operands[0]) is None and not isinstance(operands[0], (list, tuple)):
                return None  # only the shape of a followed tensor was used
            return self._moved(func, args, kwargs)
        if name in ADD:
            return _added(traces, others=2 - len(traces) if all(isinstance(x, Tensor) for x in operands[:2]) else 0)
        if name == "where" and len(traces) == 2:
            return self._moved(func, args, kwargs)
        return traces[0] if name == "where" or self._trace(operands[0]) is not None else None

    @torch.no_grad()
    def _moved(
        self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> Trace | list[Trace] | None:
        """What a linear function makes of followed tensors, and perhaps others."""
        traces = [trace for tensor in _tensors((args, kwargs)) if (trace := self._trace(tensor)) is not None]
        first, alone = traces[0], len(traces) == 1
        if any(trace.kind != first.kind for trace in traces):
            return None
        if first.kind != "scores":
            return first if all(_same(trace.factor, first.factor) for trace in traces) else None
        # Several may have different factors, which only values can take in.
        first = first if alone else first.scaled()
        if first.value is None:
            return first

        def value(tensor: Tensor) -> Tensor:
            trace = self._trace(tensor)
            found = None if trace is None else trace.value if alone else trace.scaled().value
            return tensor.detach() if found is None else found

        moved = func(*_replaced(args, value), **_replaced(dict(kwargs), value))
        parts = [moved] if isinstance(moved, Tensor) else moved
        return [replace(first, value=part) for part in parts]

    def _assign(self, func: Callable[..., Any], target: Tensor, index: Any, source: Any) -> None:
        """Follow `target[index] = source`."""
        into, trace = self._trace(target), self._trace(source)
        func(target, index, source)
        if trace is None or trace.kind != "scores":
            return
        trace = trace.scaled()
        if trace.value is not None:
            before = None if into is None else into.scaled().value
            value = torch.zeros_like(target, requires_grad=False) if before is None else before
            value[index] = trace.value
            trace = replace(trace, value=value)
        self._note(target, trace)

    def _trace(self, tensor: Any) -> Trace | None:
        return self._traces.get(tensor) if isinstance(tensor, Tensor) else None

    def _factor(self, operand: Tensor) -> float | Tensor:
        trace = self._trace(operand)
        return 1.0 if trace is None else trace.factor

    def _note(self, output: Any, trace: Trace | list[Trace] | None) -> None:
        if trace is None:
            return
        parts = [output] if isinstance(output, Tensor) else list(output)
        traces = trace if isinstance(trace, list) else [trace] * len(parts)
        for part, of_part in zip(parts, traces, strict=True):
            if of_part.value is not None and of_part.value.shape != part.shape:
                of_part = replace(of_part, value=of_part.value.expand(part.shape))
            self._traces[part] = of_part


def _scaled(divide: bool, left: tuple[Any, Trace | None], right: tuple[Any, Trace | None]) -> Trace | None:
    """The trace of `left * right`, or of `left / right`."""
    if not divide and left[1] is None and (right[1] is not None or _number(left[0]) is not None):
        left, right = right, left
    (tensor, trace), (factor, other) = left, right
    number = _number(factor)
    # One number times another is a number still: it is read where it meets an activation.
    if other is not None or (trace is None and (number is None or _number(tensor) is not None)):
        return None
    trace = Trace("operand") if trace is None else trace
    if trace.kind == "weights" or (trace.kind == "operand" and number is None):
        return trace  # a rotation, say; it is linear, and what it does to the spread belongs to the operand
    if number is None:
        if not isinstance(factor, Tensor) or factor.shape[-2:] != (1, 1):
            return trace  # a mask
        number = factor.detach()
    return replace(trace, factor=trace.factor / number if divide else trace.factor * number)


def _divided(tensor: Tensor, factor: float | Tensor) -> Tensor:
    """`tensor / factor`, without a copy where that is the tensor itself."""
    return tensor if isinstance(factor, float) and factor == 1 else tensor / factor


def _number(factor: Any) -> float | Tensor | None:
    """A factor that is the same for all: a number, or a tensor of one element, without its axes. None for any other."""
    if isinstance(factor, Tensor):
        return factor.detach().reshape(()) if factor.numel() == 1 else None
    return float(factor) if isinstance(factor, Real) else None  # one of numpy would not multiply a tensor


def _added(traces: list[Trace], others: int) -> Trace | None:
    """The trace of a sum of followed tensors and of `others` that are not."""
    first, *rest = traces
    if first.kind == "operand":
        return None if others or any(t.kind != "operand" or not _same(t.factor, first.factor) for t in rest) else first
    if not rest or any(t.kind != first.kind for t in rest):
        return first
    first, second = first.scaled(), rest[0].scaled()
    if first.value is None or second.value is None:
        return first
    return replace(first, value=first.value + second.value)


def _same(a: float | Tensor, b: float | Tensor) -> bool:
    """Whether two factors are known to be equal; tensors are not read for that."""
    return a is b or (not isinstance(a, Tensor) and not isinstance(b, Tensor) and a == b)


def _tensors(nested: Any) -> Iterator[Tensor]:
    if isinstance(nested, Tensor):
        yield nested
    elif isinstance(nested, (list, tuple)):
        for item in nested:
            yield from _tensors(item)
    elif isinstance(nested, Mapping):
        yield from _tensors(list(nested.values()))


def _replaced(nested: Any, value: Callable[[Tensor], Tensor]) -> Any:
    """The same arguments, with the value of each followed tensor in its place."""
    if isinstance(nested, Tensor):
        return value(nested) if nested.is_floating_point() else nested
    if isinstance(nested, (list, tuple)) and any(True for _ in _tensors(nested)):
        return type(nested)(_replaced(item, value) for item in nested)
    if isinstance(nested, dict):
        return {name: _replaced(item, value) for name, item in nested.items()}
    return nested


def _multi_head_attention() -> Callable[..., Any]:
    """`F.multi_head_attention_forward` without its first lines, which would hand it to the mode again and again."""
    original = F.multi_head_attention_forward
    names = {**original.__globals__, "has_torch_function": lambda tensors: False}
    copy = types.FunctionType(original.__code__, names, original.__name__, original.__defaults__)
    copy.__kwdefaults__ = original.__kwdefaults__
    return copy
