"""Bake beta into the weights, so that the model needs betahook no longer.

Logits are linear in the query, so a factor on beta is the same factor on whatever is the last learned, linear thing
that the query passes. Names do not tell which that is: each place that may be it is tried on the input of the model's
last forward, and must give the outputs of the hooked module.
"""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from betahook.hook import Hook
from betahook.layers import ATTRIBUTE, AttentionLayer
from betahook.models.projections import Part

logger = logging.getLogger(__name__)

NORMS = ("q_norm", "q_layernorm", "q_b_norm", "query_layernorm", "query_norm")
"""Norms of the query between its projection and the scores."""
SHARDING = {"FSDPModule", "FullyShardedDataParallel"}
"""Classes of modules whose weights, written to while they are whole, would come back from the shards: FSDP 2 and 1."""
CLIPS = ("clip_qkv",)
"""Bounds on the entries of q: an input that stays within them would hide them."""


class FoldError(ValueError):
    """Beta cannot be folded exactly into a layer; the message says why and what to do."""


@dataclass(frozen=True)
class _Place:
    """Weights that scale the query.

    Attributes:
        parts: of parameters; of a norm that all heads share, those of one head.
        offset: what the module adds to the entries of the first part, 1 in norms whose factor is `1 + w`.
    """

    parts: list[Part]
    offset: float = 0.0

    def scaled(self, gain: Tensor, error: float = 0.0) -> list[Tensor]:
        """New values of the parts, for the factors `gain [heads]`; every entry is off by a relative `error`."""
        values = []
        generator = torch.Generator().manual_seed(0)
        for index, entries in enumerate(self.read()):
            offset = self.offset if index == 0 else 0.0
            factor = gain[: len(entries), None, None].to(entries.device)
            if error:
                signs = 2 * torch.randint(2, entries.shape, generator=generator) - 1
                factor = factor * (1 + error * signs.to(entries.device))
            values.append(((entries.double() + offset) * factor - offset).to(entries.dtype))
        return values

    def read(self) -> list[Tensor]:
        return [part.read() for part in self.parts]

    def write(self, values: list[Tensor]) -> None:
        for part, value in zip(self.parts, values, strict=True):
            part.write(value)
        torch.clear_autocast_cache()  # a forward under autocast would go on with its copy of the old values


@torch.no_grad()
def fold(model: nn.Module | Hook) -> None:
    """Bake the current beta of a hooked model into its weights and detach: a plain model with the same outputs.

    Checks itself before anything is written: the model runs once more on the input of its last forward, in evaluation
    mode, and every layer must give the same output from its folded weights. Warns where a controller was still bringing
    beta to where it wants it.

    Args:
        model: a hooked model, or its hook.

    Raises:
        FoldError: a layer has no exact fold, its new weights would not be finite, or the model does not run again.
            Nothing is changed, the hook stays attached.
        ValueError: the model is not hooked, or has several hooks.
        TypeError: `model` is neither a module nor a hook.
    """
    hook = model if isinstance(model, Hook) else _only_hook(model)
    if not hook.attached:
        raise ValueError("fold() on a detached hook: beta is the model's own, there is nothing to fold")
    gains = {layer: layer.current_gain.double() for layer in hook.layers.values()}
    for layer, gain in gains.items():
        if bool(gain.isnan().any()):
            raise _refusal(layer, "its own beta is unknown before the first forward; run one")
    changed = [layer for layer, gain in gains.items() if bool((gain != 1).any())]
    if changed:
        _refuse_sharded(hook.model, changed[0])
    places = {layer: list(_places(layer, gains[layer])) for layer in changed}
    if changed:
        _refuse_shared(hook.model, places)
        _refuse_adapters(hook.model, model if isinstance(model, nn.Module) else hook.model, changed[0])
        _refuse_infinite(places, gains)
        _keep_exact(hook, places, gains)
    for layer, (place, *_) in places.items():
        place.write(place.scaled(gains[layer]))
    if any(controller.is_in_transition() for controller in hook.controllers):
        logger.warning(
            "fold() after %d steps, in the warm-up or the rise of %s, while beta is on its way: train for some hundred "
            "steps more, or without a rise, Search(rise=False)",
            hook.steps,
            hook.controllers,
        )
    hook.detach()


def _only_hook(model: nn.Module) -> Hook:
    if not isinstance(model, nn.Module):
        raise TypeError(f"fold() takes a hooked model or its hook; got {type(model).__name__}")
    layers = (getattr(module, ATTRIBUTE, None) for module in model.modules())
    hooks = {layer.hook for layer in layers if isinstance(layer, AttentionLayer)}
    if not hooks:
        raise ValueError(f"{type(model).__name__} is not hooked: call betahook.attach(model) first")
    if len(hooks) > 1:
        raise ValueError(
            f"{type(model).__name__} has {len(hooks)} hooks, of parts of it: fold each, betahook.fold(hook)"
        )
    return hooks.pop()


def _places(layer: AttentionLayer, gain: Tensor) -> Iterator[_Place]:
    """Where the query may take a factor: its norms, then its projection."""
    module = layer.module
    for name in CLIPS:
        if getattr(module, name, None) is not None:
            raise _refusal(layer, "it clips q, k and v after the projection")
    for norm in (getattr(module, name, None) for name in NORMS):
        weight, bias = getattr(norm, "weight", None), getattr(norm, "bias", None)
        if not isinstance(weight, nn.Parameter) or weight.numel() not in (layer.head_dim, layer.heads * layer.head_dim):
            continue
        if weight.numel() == layer.head_dim and not bool((gain == gain[0]).all()):
            raise _refusal(layer, "its query norm is shared by all heads, whose betas differ")
        parameters = [p for p in (weight, bias) if isinstance(p, nn.Parameter)]
        _refuse_unwritable(layer, *parameters)
        rows = torch.arange(weight.numel(), device=weight.device).view(-1, layer.head_dim)
        parts = [Part(p, p.detach().view(-1, 1), rows) for p in parameters]
        yield _Place(parts)
        yield _Place(parts, offset=1.0)
    if layer.projections is None:
        raise _refusal(layer, "its query projection has no known form")
    query = layer.projections[0]
    _refuse_unwritable(layer, query.stored)
    yield _Place(list(query.parts()))


def _refuse_sharded(model: nn.Module, layer: AttentionLayer) -> None:
    """Not by the look of the weights: those of a model that FSDP 2 shards as one unit stay whole after a forward."""
    kinds = {kind.__name__ for module in model.modules() for kind in type(module).__mro__}
    if SHARDING & kinds or any(hasattr(parameter, "ds_id") for parameter in model.parameters()):  # DeepSpeed's ZeRO-3
        reason = (
            "its weights are sharded over ranks. Save the whole model, beta goes beside the weights, and in one "
            "process load it, betahook.restore(model, folder) and fold"
        )
        raise _refusal(layer, reason)


def _refuse_unwritable(layer: AttentionLayer, *parameters: Any) -> None:
    """Numbers can be written to plain floating-point tensors only."""
    for parameter in parameters:
        if not isinstance(parameter, nn.Parameter):
            raise _refusal(layer, "its query weight is made of others in every forward; fold the whole, plain model")
        if parameter.is_meta or type(parameter.data) is not Tensor:
            kind = "offloaded, on the meta device" if parameter.is_meta else f"a {type(parameter.data).__name__}"
            raise _refusal(layer, f"its query weight is {kind}; fold the whole, plain model on one device")
        if not parameter.is_floating_point():
            raise _refusal(layer, f"its query weight is of {parameter.dtype}; dequantise it first")


def _refuse_shared(model: nn.Module, places: dict[AttentionLayer, list[_Place]]) -> None:
    """A weight with another user has one value for both."""
    lists = (nn.ModuleList, nn.ModuleDict)  # which call none of what they hold
    callers = Counter(child for m in model.modules() if not isinstance(m, lists) for child in m.children())
    attention = {layer.module for layer in places}  # has one beta, whoever calls it
    users: Counter[int] = Counter()
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            users[id(parameter)] += 1 if module in attention else max(1, callers[module])
    for layer, candidates in places.items():
        if any(users[id(part.parameter)] > 1 for place in candidates for part in place.parts):
            raise _refusal(layer, "another module shares its query weight, which cannot hold two factors")


def _refuse_adapters(hooked: nn.Module, given: nn.Module, layer: AttentionLayer) -> None:
    """What an adapter saves leaves out the weights below it; learned prompts may stand around the hooked model."""
    for name, module in hooked.named_modules():
        if hasattr(module, "base_layer"):
            reason = (
                f"{name} is wrapped by an adapter, saved without the weights below; merge that first, "
                "merged = model.merge_and_unload(), betahook.fold(merged)"
            )
            raise _refusal(layer, reason)
    for module in given.modules():
        if getattr(getattr(module, "active_peft_config", None), "is_prompt_learning", False):
            raise _refusal(layer, "the model learns prompts, which are saved without the weights below")


def _refuse_infinite(places: dict[AttentionLayer, list[_Place]], gains: dict[AttentionLayer, Tensor]) -> None:
    for layer, candidates in places.items():
        values = (value for place in candidates for value in place.scaled(gains[layer]))
        if not all(bool(value.isfinite().all()) for value in values):
            raise _refusal(layer, "a folded weight would be NaN or infinite; beta or the weight is not finite")


def _keep_exact(hook: Hook, places: dict[AttentionLayer, list[_Place]], gains: dict[AttentionLayer, Tensor]) -> None:
    """Run the model on its last input and leave the places of each layer that are exact, at least one."""
    if hook.last_input is None:
        raise FoldError("fold() checks itself on the input of the model's last forward, and there was none; run one")
    called = set()

    def check(layer: AttentionLayer, module: nn.Module, args: tuple[Any, ...], kwargs: Any, output: Any) -> None:
        called.add(layer)
        # A cache that the model makes by itself is full by now.
        again = [None if hasattr(value, "get_seq_length") else value for value in args]
        options = {name: None if hasattr(value, "get_seq_length") else value for name, value in kwargs.items()}
        # Not through `__call__`: the module's hooks, of which this is one, do not run again.
        run = partial(module.forward, *again, **options)
        try:
            places[layer] = [place for place in places[layer] if _is_exact(layer, place, gains[layer], run)]
        except RuntimeError as error:
            raise _refusal(layer, f"it does not run twice on one input ({error})") from error
        if not places[layer]:
            if _has_effect(layer, gains[layer], run):
                reason = (
                    "its output is not that of a scaled query projection or norm. Probably the query is used outside "
                    "the scores too, as in some relative position biases"
                )
                raise _refusal(layer, reason)
            reason = "its output on the input of the last forward does not depend on beta; run one where it does"
            raise _refusal(layer, reason)

    args, kwargs = hook.last_input
    kwargs = {**kwargs, "use_cache": False} if "use_cache" in kwargs else kwargs
    with _rehearsal(hook), ExitStack() as handles:
        for layer in places:
            handle = layer.module.register_forward_hook(partial(check, layer), with_kwargs=True)
            handles.callback(handle.remove)
        try:
            hook.model(*args, **kwargs)
        except FoldError:
            raise
        except Exception as error:
            reason = f"{type(hook.model).__name__} does not run again on the input of its last forward"
            raise FoldError(f"cannot fold beta: {reason} ({type(error).__name__}: {error})") from error
    for layer in places:
        if layer not in called:
            gone = "the model has lost this module since attach(); detach and attach again"
            idle = "the last forward of the model did not use it; run one that does"
            raise _refusal(layer, idle if layer.module in hook.model.modules() else gone)


def _has_effect(layer: AttentionLayer, gain: Tensor, run: Callable[[], Any]) -> bool:
    """Whether the output depends on beta at all. It does not, for example, where every query sees a single key."""
    outputs = []
    for factors in (torch.ones_like(gain), _far(gain)):
        with layer.acting(factors):
            outputs.append(run())
    return _distance(*outputs) > 0


def _far(gain: Tensor) -> Tensor:
    """Factors that are far from 1 and from those of the layer."""
    return gain / gain.max() / 2


def _is_exact(layer: AttentionLayer, place: _Place, gain: Tensor, run: Callable[[], Any]) -> bool:
    """Whether scaling a place does what the gain does: that of the layer, and one far from 1."""
    kept = place.read()

    def run_with(values: list[Tensor]) -> Any:
        place.write(values)
        try:
            with layer.acting(torch.ones_like(gain)):
                return run()
        finally:
            place.write(kept)

    plain = run_with(kept)
    for factors in (_far(gain), gain):
        with layer.acting(factors):
            expected = run()
        actual = run_with(place.scaled(factors))
        error = _distance(actual, expected)
        effect = math.inf if factors is gain else _distance(plain, expected)
        if not error < effect / 4:
            return False
        precision = _precision([expected, kept])
        if error <= max(1e-5, precision / 4) * _norm(expected):
            continue
        rounding = _distance(actual, run_with(place.scaled(factors, precision)))
        if not error <= 4 * rounding:
            return False
    return True


@contextmanager
def _rehearsal(hook: Hook) -> Iterator[None]:
    """Evaluation mode, without caches, compilation and measuring; everything is as it was afterwards."""
    training = [module for module in hook.model.modules() if module.training]
    configs = {id(c): c for c in (getattr(m, "config", None) for m in hook.model.modules()) if c is not None}
    with ExitStack() as stack:
        stack.enter_context(hook.pause())
        stack.enter_context(torch.compiler.set_stance("force_eager"))
        for config in configs.values():
            if getattr(config, "use_cache", False) is True:
                config.use_cache = False
                stack.callback(setattr, config, "use_cache", True)
        for module in training:
            stack.callback(setattr, module, "training", True)
        hook.model.eval()
        yield


def _tensors(output: Any) -> Iterator[Tensor]:
    """The floating-point tensors in nested tuples, lists and dictionaries."""
    if isinstance(output, Tensor) and output.is_floating_point():
        yield output
    elif isinstance(output, dict):
        yield from _tensors(list(output.values()))
    elif isinstance(output, tuple | list):
        for part in output:
            yield from _tensors(part)


def _distance(one: Any, other: Any) -> float:
    """Norm of the difference of two outputs; what is NaN or infinite in both alike does not count."""
    total = 0.0
    for a, b in zip(_tensors(one), _tensors(other), strict=True):
        alike = (a == b) | (a.isnan() & b.isnan())
        total += float((a.double() - b.double()).masked_fill(alike, 0).square().sum())
    return math.sqrt(total)


def _norm(output: Any) -> float:
    """Of what is finite in an output."""
    finite = (tensor.masked_fill(~tensor.isfinite(), 0).double() for tensor in _tensors(output))
    return math.sqrt(sum(float(tensor.square().sum()) for tensor in finite))


def _precision(nested: Any) -> float:
    """Relative spacing of the numbers in nested tensors; that of the coarsest dtype."""
    return max((torch.finfo(tensor.dtype).eps for tensor in _tensors(nested)), default=0.0)


def _refusal(layer: AttentionLayer, reason: str) -> FoldError:
    return FoldError(
        f"cannot fold beta into {layer.name} ({type(layer.module).__name__}): {reason}. "
        "Or keep the hook: save_pretrained() writes beta beside the weights, betahook.restore() brings it back"
    )
