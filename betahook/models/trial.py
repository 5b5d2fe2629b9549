"""A trial run of an attention module whose code does not tell enough: its forward, on tensors that hold no data.

`discovery` calls `run`. The module is copied without its weights' data, so nothing is computed but constants, which
the code may keep, and the module stays as it is. How many scores come to the softmax, and how wide the query is, tells
the number of heads and d_k; the features that the query and the key are made of tell the rows of W_q and W_k.
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
from betahook.models.labels import Labels, MadeOf, features_of_heads
from betahook.models.places import ModuleCall, Place, places_of
from betahook.models.torch_calls import Call, summed_axes, tensors_in
from betahook.models.without_data import WithoutData, without_data

BATCH, LENGTH = 3, 7
"""Of the trial's input, where any length does; no size of a model is likely to be a multiple of both."""

SIDE, SIDES = 9, ({"H", "W"}, {"h", "w"}, {"height", "width"})
"""Of a picture whose tokens come as a sequence, and pairs of arguments for it; a convolution may take strides of 8."""
BOTH_SIDES = {"size", "feat_size", "hw_shape"}
"""Arguments for both at once."""

CONTEXTS = {
    *("context", "cond", "encoder_hidden_states", "memory", "y"),
    *("key_value_states", "kv", "key", "value"),
}
"""Arguments for what queries look at, which may be of another width than they; without one, a second argument may."""

POSITIONAL = inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD
Fixed: TypeAlias = dict[str, int | tuple[int, int] | None]
"""The values of arguments in each trial, by their names."""


@dataclass(frozen=True)
class Outcome:
    """The result of a trial that ran.

    Attributes:
        attends: True if there was an attention.
        size: the query heads and d_k of the first one; None if it does not show them.
        places: those of W_q and W_k of that attention, with as many heads as the module states, or, where these are not
            those of the query, of that size; None where q or k is not what one projection returned, or where another
            attention in the forward, as that of the next head in a loop, has other ones.
    """

    attends: bool = False
    size: tuple[int, int] | None = None
    places: tuple[Place, Place] | None = None


@dataclass(frozen=True)
class Attention:
    """The product that makes scores.

    Attributes:
        size: the query heads and d_k; None where the product does not tell.
        labels: those of q and k, each None where it has none.
        components: the axes of q, and of k, along which their components lie.
    """

    size: tuple[int, int] | None
    labels: tuple[Tensor | None, ...] = (None, None)
    components: tuple[tuple[int, ...], tuple[int, ...]] = ((-1,), (-1,))


def run(module: nn.Module) -> Outcome | None:
    """Run the forward of a module for what it shows; None if it does not run on a made-up input.

    Each required argument is `[batch, length, width]`, or what a convolution in the module takes: `[batch, channels,
    length]`, a picture or a video. Masks and biases are None, or, where that does not run, masks `[batch, length,
    length]`; sides of a picture are numbers. Where none of that runs, what queries look at is of another width.
    """
    # Compiled code would read the memory of tensors that have none, and crash.
    with modes.eagerly(), without_data() as trial, torch.no_grad(), blinded(module):
        try:
            parameters = inspect.signature(module.forward).parameters
            module = trial.copied(module)
        except Exception:  # code of others: whatever it raises, there is no trial
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
    """The result of a forward, for a module without data."""
    if watch.found is None:
        return Outcome()
    sizes = (size for size in (count_heads(module), watch.found.size) if size is not None)
    places = (_places(module, watch, size) for size in sizes)
    return Outcome(True, watch.found.size, next((found for found in places if found is not None), None))


def _first(watches: Iterable[_Watch | None]) -> _Watch | None:
    """The first forward that ran to its end, without an attention or with one of known size; or else the first one."""
    stopped = unclear = None
    for watch in watches:
        if watch is None:
            continue
        if watch.found is None:
            return stopped or watch
        if watch.found.size is not None:
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
    """Run the forward on an input of a shape; None if it does not take one.

    A mask is given as each of `masks`, and `[batch, tokens, width]` as each of `contexts`, names to widths.
    """
    numbers = (buffer for buffer in module.buffers() if buffer.is_floating_point())  # for one that is quantised
    like = next(itertools.chain(module.parameters(), numbers, [torch.empty(0)]))
    watch = _Watch(BATCH * tokens)
    try:
        x = torch.zeros(shape, dtype=like.dtype, device=like.device)
        others = {name: x.new_zeros(BATCH, tokens, width) for name, width in contexts.items()}
        for each in (x, *others.values()):
            watch.activations[each] = _Activation()
        mask = torch.ones(BATCH, tokens, tokens, dtype=torch.bool, device=like.device)
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
    """The values of those required arguments that are no input."""
    fixed: Fixed = {name: None for name in names if "mask" in name or "bias" in name}
    for pair in SIDES:
        if pair.issubset(names):
            fixed |= dict.fromkeys(pair, SIDE)
    return fixed | dict.fromkeys(BOTH_SIDES.intersection(names), (SIDE, SIDE))


def _places(module: nn.Module, watch: _Watch, size: tuple[int, int]) -> tuple[Place, Place] | None:
    """The places of W_q and W_k, for so many heads and such a d_k, if they are those of every attention."""
    made_of = [_made_of(each, size) for each in watch.attentions]
    query, key = places_of(module, made_of, watch.labels.linears, watch.calls)
    return (query, key) if query and key and len(query.rows) == size[0] else None


def _made_of(found: Attention, size: tuple[int, int]) -> MadeOf:
    """The features that q and k of an attention are made of, for so many heads and such a d_k."""
    query, key = (
        None if labels is None else features_of_heads(labels, components, *size, BATCH)
        for labels, components in zip(found.labels, found.components, strict=True)
    )
    return query, key


def _shapes(module: nn.Module, *, is_picture: bool) -> Iterator[tuple[tuple[int, ...], int]]:
    """Shapes that an input of the module may have, the likeliest first, and how many tokens a sequence then has."""
    length, *others = [SIDE**2, SIDE**2 + 1] if is_picture else _lengths(module)  # one more for a class token
    widths = _widths(module)
    for width in widths:
        yield (BATCH, length, width), length
    for axes, kind in enumerate((nn.Conv1d, nn.Conv2d, nn.Conv3d), 1):
        for width in widths if any(isinstance(part, kind) for part in module.modules()) else ():
            yield (BATCH, width, *(LENGTH for _ in range(axes))), LENGTH**axes
            if kind is nn.Conv2d:  # of each picture of a video
                yield (BATCH, width, LENGTH, LENGTH, LENGTH), LENGTH**3
    for length, width in itertools.product(others, widths):
        yield (BATCH, length, width), length


def _lengths(module: nn.Module) -> list[int]:
    """Lengths that an input of the module may have: any, or else those of its masks and numbers that it states."""
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
    """Knowledge of an activation.

    Attributes:
        factors: the two activations that it is the product of, or was made of by a product. One of them may be a
            projection of parameters, as of learned queries.
        summed: the axes of each that this product sums over; None where they are not known.
        learned: one of the factors is such a projection.
    """

    factors: tuple[Tensor, ...] = ()
    learned: bool = False
    summed: tuple[tuple[int, ...], tuple[int, ...]] | None = None


class _Watch(TorchFunctionMode):
    """Follows products of activations to a softmax, and that to a further product.

    Attributes:
        tokens: of all sequences in the module's input.
        labels: the features that entries are made of.
        calls: of the module and of its parts.
        attentions: in their order, one for each product with weights.
        ended: the forward came to its end: else its input may have had another shape than the module takes.
    """

    def __init__(self, tokens: int) -> None:
        super().__init__()
        self.tokens = tokens
        self.calls: dict[nn.Module, list[ModuleCall]] = {}
        self.attentions: list[Attention] = []
        self.ended = False
        self.activations = ByTensor[_Activation]()
        self.labels = Labels(lambda tensor: tensor not in self.activations, compat.untransformed)
        self.weights = ByTensor[Attention]()  # that made them

    @property
    def found(self) -> Attention | None:
        """The first attention."""
        return self.attentions[0] if self.attentions else None

    def note_call(self, module: nn.Module, args: Sequence[Any], output: Any = None) -> None:
        """Note what a module was called with, and what it returned."""
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
        if func is torch.equal:  # which asks for data
            return call.args[0] is call.args[1]
        output = call.run()
        if call.name == "scaled_dot_product_attention":
            self._settle(*call.tensors[:2])
        parts, moving = tensors_in(output), [x for x in call.tensors if x in self.activations]
        # A part of a softmax that is written out.
        is_exponential = call.name == "exp" and any(self.activations[x].factors for x in moving)
        if (call.name in SOFTMAXES or is_exponential) and parts and moving:
            self._weigh(call.operands[0], -1 if is_exponential else call.dim, parts[0])
            return output
        weights = next((self.weights[x] for x in call.tensors if x in self.weights), None)
        if call.name in PRODUCTS and weights is not None:
            self.attentions.append(weights)
            weights = None
        made = self._made(call, moving)
        if call.name == "__setitem__" and weights is not None:
            self.weights[call.args[0]] = replace(weights, size=None)  # perhaps those of some heads only
        for part in parts:
            if moving:
                self.activations[part] = made
            if weights is not None:
                self.weights[part] = weights
        self.labels.note(call, output)
        return output

    def _made(self, call: Call, moving: list[Tensor]) -> _Activation:
        """Knowledge of what a function makes of activations."""
        if call.name in PRODUCTS:
            factors = tuple(call.tensors[-2:])
            if all(x in self.activations or self.labels.get(x) is not None for x in factors):
                return _Activation(factors, len(moving) < 2, summed_axes(call))
            return _Activation()
        return max((self.activations[x] for x in moving), key=_rank, default=_Activation())

    def _weigh(self, scores: Tensor, dim: int, output: Tensor) -> None:
        """Note what a softmax of scores makes."""
        self.activations[output] = _Activation()
        made = self.activations.get(scores) or _Activation()
        if made.factors and made.summed is not None:
            head_dim = math.prod(made.factors[0].shape[axis] for axis in made.summed[0])
            size = self._size(scores.numel() // scores.shape[dim], head_dim, made.factors[0])
            self.weights[output] = Attention(size, tuple(map(self.labels.get, made.factors)), made.summed)
        elif made.factors:
            self.weights[output] = Attention(None)

    def _settle(self, query: Tensor, key: Tensor) -> None:
        """Note the size of an attention that takes its softmax itself."""
        size = self._size(query.numel() // query.shape[-1], query.shape[-1], query)
        self.attentions.append(Attention(size, (self.labels.get(query), self.labels.get(key))))

    def _size(self, rows: int, head_dim: int, query: Tensor) -> tuple[int, int] | None:
        """The heads that have so many rows, and d_k; None with more or fewer queries than tokens."""
        heads, left = divmod(rows, self.tokens * self.labels.streams(query, self.tokens // BATCH))
        return None if left else (heads, head_dim)


def _rank(known: _Activation) -> tuple[bool, bool, int]:
    """Products before all else, those with learned positions last; then by the entries of the larger factor."""
    return bool(known.factors), not known.learned, max((x.numel() for x in known.factors), default=0)
