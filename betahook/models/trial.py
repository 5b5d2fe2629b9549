"""Trial run of an attention module whose code does not say enough: its forward, on tensors without data.

`discovery` calls `run`. The module is copied without the data of its weights, so only constants, which user code may
keep, are computed, and the module itself is not changed. The number of scores that reach the softmax and the width of
the query give the number of heads and d_k; the features that make up q and k give the rows of W_q and W_k.
"""

from __future__ import annotations

import inspect
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook
from torch.overrides import TorchFunctionMode

from betahook import compat
from betahook.models import modes
from betahook.models.by_tensor import ByTensor
from betahook.models.code import PRODUCTS, SOFTMAXES
from betahook.models.guards import blinded, is_handed_over
from betahook.models.heads import count_heads
from betahook.models.labels import FeaturePair, Labels, features_of_heads
from betahook.models.places import ModuleCall, Place, places_of
from betahook.models.torch_calls import Call, summed_axes, tensors_in
from betahook.models.without_data import WithoutData, without_data

BATCH, LENGTH = 3, 7
"""Sizes of the trial's input if any length will do; no size of a model is likely to be a multiple of both."""

SIDE, SIDES = 9, ({"H", "W"}, {"h", "w"}, {"height", "width"})
"""Side of an image given as a sequence of tokens, enough for a convolution of stride 8, and argument pairs for it."""
BOTH_SIDES = {"size", "feat_size", "hw_shape"}
"""Arguments that take both sides as one tuple."""

CONTEXTS = {
    *("context", "cond", "encoder_hidden_states", "memory", "y"),
    *("key_value_states", "kv", "key", "value"),
}
"""Arguments that may be the source of the keys, with a width of its own; failing these, a sole second argument is."""

POSITIONAL = inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD
Fixed: TypeAlias = dict[str, int | tuple[int, int] | None]
"""Values of arguments that are the same in each trial, by name."""


@dataclass(frozen=True)
class Outcome:
    """The result of a trial that ran.

    Attributes:
        attends: True if the forward contains an attention.
        size: number of query heads and d_k of the first attention; None if they cannot be determined.
        places: places of W_q and W_k, divided into heads as the module states or, if that does not fit the query, as
            `size` says. None if q or k is not the output of one projection, or if the attentions in the forward
            disagree, for instance because each head in a loop has weights of its own.
    """

    attends: bool = False
    size: tuple[int, int] | None = None
    places: tuple[Place, Place] | None = None


@dataclass(frozen=True)
class ScoreProduct:
    """A product that computes scores, on its own or inside a fused attention function.

    Attributes:
        size: number of query heads and d_k; None if the product does not determine them.
        labels: labels of q and of k, each None if there are none.
        components: axes of q, and of k, along which their components lie.
    """

    size: tuple[int, int] | None
    labels: tuple[Tensor | None, ...] = (None, None)
    components: tuple[tuple[int, ...], tuple[int, ...]] = ((-1,), (-1,))


def run(module: nn.Module) -> Outcome | None:
    """Run the forward of a module to see what it computes; None if it runs on no made-up input.

    Each required argument is `[batch, length, width]`, or the input of a convolution in the module: `[batch, channels,
    length]`, an image or a video. Masks and biases are None; if that fails, masks are `[batch, length, length]`. Sides
    of an image are integers. If all of that fails, the source of the keys gets a width of its own.
    """
    # Compiled code would crash, reading memory that tensors without data do not have.
    with modes.eagerly(), without_data() as trial, torch.no_grad(), blinded(module):
        try:
            parameters = inspect.signature(module.forward).parameters
            module = trial.copied(module)
        except Exception:  # user code may raise anything; then there is no trial
            return None
        names = [name for name, each in parameters.items() if each.kind in POSITIONAL and each.default is each.empty]
        fixed, masks = _fixed(names), [name for name in parameters if "mask" in name]
        shapes = [*_shapes(module, is_picture=any(fixed.values()))]
        masked = [[], masks] if masks else [[]]
        others = [name for name in names[1:] if name not in fixed]
        contexts = [name for name in parameters if name in CONTEXTS] or (others if len(others) == 1 else [])
        looked_at = [{}, *(dict.fromkeys(contexts, width) for width in _widths(module) if contexts)]
        forms = itertools.product(looked_at, masked, shapes)
        watch = _first(_try(trial, module, names, fixed, widths, given, *shape) for widths, given, shape in forms)
        with compat.untransformed():
            return None if watch is None else _outcome(module, watch)


def _outcome(module: nn.Module, watch: _Watch) -> Outcome:
    """The outcome of a forward of a module copied without data."""
    if watch.found is None:
        return Outcome()
    sizes = (size for size in (count_heads(module), watch.found.size) if size is not None)
    places = (_places(module, watch, size) for size in sizes)
    return Outcome(True, watch.found.size, next((found for found in places if found is not None), None))


def _first(watches: Iterable[_Watch | None]) -> _Watch | None:
    """Choose the most telling forward: the first that ended and had an attention of known size.

    Failing that, one that stopped after such an attention, or one with an attention of unknown size, in that order. A
    forward without an attention ends the search, unless an earlier one had an attention: only some inputs may attend.
    """
    stopped = unclear = None
    for watch in filter(None, watches):
        if watch.found is None and unclear is None:
            return watch
        if watch.found is not None and watch.found.size is not None:
            if watch.ended:
                return watch
            stopped = stopped or watch
        unclear = unclear or watch
    return stopped or unclear


def _try(
    trial: WithoutData,
    module: nn.Module,
    names: list[str],
    fixed: Fixed,
    contexts: Mapping[str, int],
    masks: list[str],
    shape: tuple[int, ...],
    tokens: int,
) -> _Watch | None:
    """Run the forward on an input of a given shape; None if it fails before any attention.

    Each argument named in `masks` receives a mask, each in `contexts` a tensor `[batch, tokens, width]` of its width.
    """
    weights = [*module.parameters(), *(buffer for buffer in module.buffers() if buffer.is_floating_point())]
    # The integers of quantised weights do not have the dtype of activations.
    numbers = (x.dtype for x in weights if x.dtype.is_floating_point or x.dtype.is_complex)
    watch = _Watch(BATCH * tokens)
    try:
        x = torch.zeros(shape, dtype=next(numbers, None), device=weights[0].device if weights else None)
        others = {name: x.new_zeros(BATCH, tokens, width) for name, width in contexts.items()}
        for each in (x, *others.values()):
            watch.activations[each] = _Activation()
        mask = torch.ones(BATCH, tokens, tokens, dtype=torch.bool, device=x.device)
        given = fixed | others | dict.fromkeys(masks, mask)
        inputs = [given.pop(name, x) for name in names]
        watch.note_call(module, inputs)
        with watch, register_module_forward_hook(watch.note_call), trial.computing_constants():
            module.forward(*inputs, **given)
        watch.ended = True
    except Exception:  # another shape may fit
        return None if watch.found is None else watch
    return watch


def _fixed(names: list[str]) -> Fixed:
    """Values of required arguments that are not inputs: None for masks and biases, numbers for sides of an image."""
    fixed: Fixed = {name: None for name in names if "mask" in name or "bias" in name}
    for pair in SIDES:
        if pair.issubset(names):
            fixed |= dict.fromkeys(pair, SIDE)
    return fixed | dict.fromkeys(BOTH_SIDES.intersection(names), (SIDE, SIDE))


def _places(module: nn.Module, watch: _Watch, size: tuple[int, int]) -> tuple[Place, Place] | None:
    """Places of W_q and W_k, for a number of heads and d_k, if all attentions in the forward share them."""
    features = [_feature_pair(each, size) for each in watch.attentions]
    query, key = places_of(module, features, watch.labels.linears, watch.calls)
    return (query, key) if query and key and len(query.rows) == size[0] else None


def _feature_pair(product: ScoreProduct, size: tuple[int, int]) -> FeaturePair:
    """Features of q and k in a product, for a number of heads and d_k."""
    query, key = (
        None if labels is None else features_of_heads(labels, components, *size, BATCH)
        for labels, components in zip(product.labels, product.components, strict=True)
    )
    return query, key


def _shapes(module: nn.Module, *, is_picture: bool) -> Iterator[tuple[tuple[int, ...], int]]:
    """Yield shapes that an input of the module may have, likeliest first, each with its tokens per sequence."""
    length, *others = [SIDE**2, SIDE**2 + 1] if is_picture else _lengths(module)  # one more for a class token
    widths = _widths(module)
    for width in widths:
        yield (BATCH, length, width), length
    for axes, kind in enumerate((nn.Conv1d, nn.Conv2d, nn.Conv3d), 1):
        for width in widths if any(isinstance(part, kind) for part in module.modules()) else ():
            yield (BATCH, width, *(LENGTH for _ in range(axes))), LENGTH**axes
            if kind is nn.Conv2d:  # a video, convolved image by image
                yield (BATCH, width, LENGTH, LENGTH, LENGTH), LENGTH**3
    for length, width in itertools.product(others, widths):
        yield (BATCH, length, width), length


def _lengths(module: nn.Module) -> list[int]:
    """Lengths that an input of the module may have: `LENGTH`, the sizes of its masks, and its integer attributes."""
    of_masks = (mask.shape[-1] for mask in module.buffers() if mask.dim() > 1 and mask.shape[-1] == mask.shape[-2])
    stated = (value for value in vars(module).values() if type(value) is int and value > 1)
    return list(dict.fromkeys([LENGTH, *of_masks, *stated]))[:4]


def _widths(module: nn.Module) -> list[int]:
    """Widths that an input of the module may have, those of its first layers first."""
    found: dict[int, None] = {}
    for part in module.modules():
        width, weight = getattr(part, "in_features", getattr(part, "in_channels", None)), getattr(part, "weight", None)
        if isinstance(width, int):
            found[width] = None
        elif isinstance(weight, Tensor) and weight.dim() > 0:
            found[weight.shape[0]] = None  # a norm, or a Conv1D of transformers
        for own in part.parameters(recurse=False):
            found.update(dict.fromkeys(own.shape))
    return list(found)[:6]


@dataclass(frozen=True)
class _Activation:
    """Record of how an activation was computed.

    Attributes:
        factors: the two factors of the product that the activation is, or is derived from; empty if there is none. One
            of them may be a projection of parameters, for instance of learned queries.
        learned: True if one of the factors is such a projection.
        summed: axes of each factor that the product sums over; None if they are unknown.
    """

    factors: tuple[Tensor, ...] = ()
    learned: bool = False
    summed: tuple[tuple[int, ...], tuple[int, ...]] | None = None


class _Watch(TorchFunctionMode):
    """Mode that follows products of activations to a softmax, and the attention weights to a further product.

    Attributes:
        tokens: number of tokens in all sequences of the module's input.
        labels: labels of entries by their features.
        calls: calls of the module and of its parts.
        attentions: the products that computed scores, in order, one for each product with attention weights.
        ended: True if the forward ran to its end; otherwise the module may not take an input of this shape.
    """

    def __init__(self, tokens: int) -> None:
        super().__init__()
        self.tokens = tokens
        self.calls: dict[nn.Module, list[ModuleCall]] = {}
        self.attentions: list[ScoreProduct] = []
        self.ended = False
        self.activations = ByTensor[_Activation]()
        self.labels = Labels(lambda tensor: tensor not in self.activations, compat.untransformed)
        self.weights = ByTensor[ScoreProduct]()  # for attention weights, the product of their scores

    @property
    def found(self) -> ScoreProduct | None:
        """The first attention; None if there is none."""
        return self.attentions[0] if self.attentions else None

    def note_call(self, module: nn.Module, args: Sequence[Any], output: Any = None) -> None:
        """Record the arguments and the output of a call of a module."""
        self.calls.setdefault(module, []).append((args, output))

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        call = Call(func, args, kwargs or {})
        if func is F.multi_head_attention_forward:
            with self:
                return compat.multi_head_attention_forward()(*args, **call.kwargs)
        if is_handed_over(func):
            raise NotImplementedError("a function that hands itself over to modes hides what it computes")
        if func is torch.equal:  # it needs data
            return call.args[0] is call.args[1]
        output = call.run()
        if call.name == "scaled_dot_product_attention":
            self._note_fused_attention(*call.tensors[:2])
        parts, moving = tensors_in(output), [x for x in call.tensors if x in self.activations]
        # The exponential in a softmax written by hand.
        is_exponential = call.name == "exp" and any(self.activations[x].factors for x in moving)
        if (call.name in SOFTMAXES or is_exponential) and parts and moving:
            self._note_softmax(call.operands[0], -1 if is_exponential else call.dim, parts[0])
            return output
        weights = next((self.weights[x] for x in call.tensors if x in self.weights), None)
        if call.name in PRODUCTS and weights is not None:
            self.attentions.append(weights)
            weights = None
        made = self._made(call, moving)
        if call.name == "__setitem__" and weights is not None:
            self.weights[call.args[0]] = replace(weights, size=None)  # perhaps the weights of only some heads
        for part in parts:
            if moving:
                self.activations[part] = made
            if weights is not None:
                self.weights[part] = weights
        self.labels.note(call, output)
        return output

    def _made(self, call: Call, moving: list[Tensor]) -> _Activation:
        """Record how a function computes its output from activations."""
        if call.name in PRODUCTS:
            factors = tuple(call.tensors[-2:])
            if all(x in self.activations or self.labels.get(x) is not None for x in factors):
                return _Activation(factors, len(moving) < 2, summed_axes(call))
            return _Activation()
        return max((self.activations[x] for x in moving), key=_rank, default=_Activation())

    def _note_softmax(self, scores: Tensor, dim: int, output: Tensor) -> None:
        """Record the output of a softmax as attention weights, if its input is a product of activations."""
        self.activations[output] = _Activation()
        made = self.activations.get(scores) or _Activation()
        if made.factors and made.summed is not None:
            head_dim = math.prod(made.factors[0].shape[axis] for axis in made.summed[0])
            size = self._size(scores.numel() // scores.shape[dim], head_dim, made.factors[0])
            self.weights[output] = ScoreProduct(size, tuple(map(self.labels.get, made.factors)), made.summed)
        elif made.factors or scores in self.weights:  # those of a log_softmax
            self.weights[output] = self.weights.get(scores) or ScoreProduct(None)

    def _note_fused_attention(self, query: Tensor, key: Tensor) -> None:
        """Record the product inside an attention function that includes the softmax."""
        size = self._size(query.numel() // query.shape[-1], query.shape[-1], query)
        self.attentions.append(ScoreProduct(size, (self.labels.get(query), self.labels.get(key))))

    def _size(self, rows: int, head_dim: int, query: Tensor) -> tuple[int, int] | None:
        """Number of heads, from the number of score rows, and d_k; None if queries and tokens differ in number."""
        heads, left = divmod(rows, self.tokens * self.labels.count_streams(query, self.tokens // BATCH))
        return None if left else (heads, head_dim)


def _rank(known: _Activation) -> tuple[bool, bool, int]:
    """Sort key: products rank highest, among them those without learned factors, then those with a large factor."""
    return bool(known.factors), not known.learned, max((x.numel() for x in known.factors), default=0)
