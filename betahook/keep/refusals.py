"""Reasons not to fold beta into a layer that can be found without running the model.

`fold` calls `refuse` before it writes anything; `foresee` looks ahead before training. A refusal is a function that
returns a reason, or None if it does not apply; the lists at the end hold those of the model and those of a layer, in
the order of the checks. None of them writes to the model.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from betahook import compat
from betahook.hook import Hook
from betahook.keep.candidates import find_candidates, overlap, query_norms
from betahook.layer import AttentionLayer, gain_lost_by, query_projection
from betahook.measure.ranks import ranges_over_ranks
from betahook.models import materialise
from betahook.models.discovery import shown_name
from betahook.models.families import QUERY_CLIPS
from betahook.models.projections import KNOWN_FORMS, Projection, separate
from betahook.models.scaling import NoScalingError, Scaling
from betahook.state.left_alone import LEFT_ALONE_ELSEWHERE


class FoldError(ValueError):
    """Beta cannot be folded exactly into a layer; the message says why and what to do."""


@dataclass(frozen=True)
class FoldPlan:
    """A fold that is still to be done: the input of all its checks.

    Attributes:
        hook: the hook of the model.
        given: the model passed to `fold`, which may contain the hooked model or be a part of it.
        gains: the factors `[heads]`, in the dtype of sums, of the layers whose beta is not the model's own, or was not
            until the layer lost it; may be empty.
        has_weights: False if only the shapes of the weights may be looked at.
    """

    hook: Hook
    given: nn.Module
    gains: dict[AttentionLayer, Tensor]
    has_weights: bool = True
    _places: dict[AttentionLayer, list[Scaling]] = field(default_factory=dict, init=False, repr=False)

    def places(self, layer: AttentionLayer) -> list[Scaling]:
        """Return the places where a layer may take its factor; under adapters, only those saved with the adapters.

        Raises:
            NoScalingError: a weight at one of them cannot be written to.
        """
        if layer not in self._places:
            found = [(place, self._is_saved(place)) for place in find_candidates(layer)]
            # The first place is a query norm, if there is one: it would undo a factor that goes into any other.
            self._places[layer] = [place for place, saved in found if found[0][1] and saved]
        return self._places[layer]

    def _is_saved(self, place: Scaling) -> bool:
        """Return True if the weights of a place are saved; raise if they cannot be written to, saved or not."""
        parameters = place.parameters if self.has_weights else [weight.stored for weight in place.weights]
        return self.adapted is None or set(map(id, parameters)) <= self.adapted.keys()

    @cached_property
    def adapted(self) -> dict[int, str] | None:
        """The parameters that are saved with adapters: parameter id to name of its adapter; None without adapters."""
        return None if self.adapters is None else compat.parameters_of_adapters(self.hook.model)

    @cached_property
    def adapters(self) -> str | None:
        """The reason why adapters must be merged first, and how to do it; None without adapters."""
        adapters = (name for name, module in self.hook.model.named_modules() if compat.is_adapter(module))
        if (name := next(adapters, None)) is None:
            return None
        merge = "merged = model.merge_and_unload(), betahook.fold(merged)"
        if hasattr(self.hook.model, "fuse_lora"):  # a model of diffusers
            merge = "model.fuse_lora(), model.unload_lora(), betahook.fold(model)"
        return f"{name} is wrapped by an adapter, saved without the weights below; merge that first, {merge}"

    @cached_property
    def is_sharded(self) -> bool:
        """True if each rank holds only a part of the weights, so that every rank must take part in the fold."""
        sharded = any(materialise.is_sharded(parameter) for parameter in self.hook.model.parameters())
        return sharded or any(compat.is_fsdp2(module) for module in self.modules)

    def pooled(self, norms: Tensor) -> Tensor:
        """Return the norms of this rank's outputs or, if the model is sharded, of the outputs of all ranks together."""
        if not self.is_sharded:
            return norms
        squares = norms.square().to(next(iter(self.gains)).current_gain.device)
        torch.distributed.all_reduce(squares)
        return squares.sqrt().cpu()

    def ranges(self, numbers: Sequence[int]) -> list[tuple[int, int]]:
        """Return the minimum and the maximum of each number, over all ranks if the model is sharded."""
        if not self.is_sharded:
            return [(number, number) for number in numbers]
        return ranges_over_ranks(numbers, next(iter(self.gains)).current_gain.device)

    def is_on_any_rank(self, here: bool) -> bool:
        """Return True if something holds on this rank or, if the model is sharded, on any rank."""
        return self.ranges([int(here)]) != [(0, 0)]

    @cached_property
    def modules(self) -> dict[nn.Module, str]:
        """All modules, of the hooked model and the given one, with their names."""
        return {module: name for model in (self.given, self.hook.model) for name, module in model.named_modules()}

    @cached_property
    def users(self) -> Counter[int]:
        """Number of uses of each parameter, by its id: one for each caller of a module that holds it."""
        lists = (nn.ModuleList, nn.ModuleDict)  # containers, which do not call their children
        callers = Counter(child for m in self.modules if not isinstance(m, lists) for child in m.children())
        attention = {layer.module for layer in self.gains}  # called from several places, it still has one beta
        users: Counter[int] = Counter()
        for module in self.modules:
            for parameter in module.parameters(recurse=False):
                users[id(parameter)] += 1 if module in attention else max(1, callers[module])
        return users

    @cached_property
    def tensors(self) -> dict[int, list[tuple[nn.Module, str, Tensor]]]:
        """Parameters and buffers, with their modules and names, by the address of their storage."""
        tensors: dict[int, list[tuple[nn.Module, str, Tensor]]] = defaultdict(list)
        for module, path in self.modules.items():
            for name, tensor in chain(module.named_parameters(recurse=False), module.named_buffers(recurse=False)):
                if type(tensor) in (nn.Parameter, Tensor) and tensor.layout is torch.strided and not tensor.is_meta:
                    address = tensor.untyped_storage().data_ptr()
                    tensors[address].append((module, f"{path}.{name}".removeprefix("."), tensor))
        return tensors

    def error(self, reason: str, layer: AttentionLayer | None = None, *, can_keep: bool = True) -> FoldError:
        """Make the error for a layer, or a model, without an exact fold; if `can_keep`, advise to keep the hook."""
        keep = "save hook.state_dict() beside model.state_dict(), hook.load_state_dict() brings beta back"
        if hasattr(self.hook.model, "save_pretrained"):
            keep = "save_pretrained() writes beta beside the weights, betahook.restore() brings it back"
        where = "" if layer is None else f" into {shown_name(layer.name)} ({type(layer.module).__name__})"
        return FoldError(f"cannot fold beta{where}: {reason}{f'. Or keep the hook: {keep}' if can_keep else ''}")


def refuse(plan: FoldPlan) -> None:
    """Raise an error for the first refusal that applies: first those of the model, then those of its layers."""
    if (reason := _first(MODEL_REFUSALS, plan)) is not None:
        raise plan.error(reason, next(iter(plan.gains)))
    for of_layer in LAYER_REFUSALS:
        for layer in plan.gains:
            if (reason := of_layer(plan, layer)) is not None:
                raise plan.error(reason, layer)


def foresee(hook: Hook, *, from_weights: bool) -> dict[AttentionLayer, str]:
    """Return the layers whose beta could not be folded after training, each with the reason.

    Betas are assumed to have moved, and to differ between heads if each head has its own. Only the refusals of
    the model and the `BETA_INDEPENDENT_REFUSALS` are checked: a fold may find further reasons. `from_weights` is False
    for a model on the meta device, whose weights cannot be looked at.
    """
    layers = hook.layers.values()
    factors = partial(torch.linspace, 2.0, 2.0 + hook.settings.per_head, dtype=torch.float64, device="cpu")
    plan = FoldPlan(hook, hook.model, {layer: factors(layer.heads) for layer in layers}, from_weights)
    of_model = _first(MODEL_REFUSALS, plan)
    reasons = {layer: of_model or _first(BETA_INDEPENDENT_REFUSALS, plan, layer) for layer in layers}
    return {layer: reason for layer, reason in reasons.items() if reason is not None}


def _first(refusals: Iterable[Callable[..., str | None]], *given: Any) -> str | None:
    """Return the reason of the first refusal that applies; None if none does."""
    return next((reason for refusal in refusals if (reason := refusal(*given)) is not None), None)


def weights_are_sharded(plan: FoldPlan) -> str | None:
    """Refuse FSDP 1 and ZeRO-3: unlike under FSDP 2 and tensor parallelism, a shard does not show which part it is."""
    if not any(map(materialise.is_in_parts, plan.hook.model.parameters())):
        return None
    return (
        "its weights are sharded over ranks. Save the whole model, which saves beta beside the weights; then, in a "
        "single process, load it, call betahook.restore(model, folder), run a forward and fold"
    )


def adapter_is_saved_alone(plan: FoldPlan, layer: AttentionLayer) -> str | None:
    """Refuse a layer whose factor would go into weights below an adapter, which are not saved with it."""
    return None if plan.adapters is None or plan.places(layer) else plan.adapters


def other_adapters_lack_beta(plan: FoldPlan, layer: AttentionLayer) -> str | None:
    """Refuse several adapters: each has weights of its own, and only those of the active one would take beta."""
    if plan.adapted is None:
        return None
    of_places = {plan.adapted[id(weight.stored)] for place in plan.places(layer) for weight in place.weights}
    others = ", ".join(sorted(set(plan.adapted.values()) - of_places))
    reason = f"the adapters that are not active ({others}) would keep the model's own beta"
    return f"{reason}. Delete them first, with model.delete_adapter(name)" if others else None


def prompts_are_saved_alone(plan: FoldPlan) -> str | None:
    """Refuse learned prompts, perhaps of a model around the hooked one: they are saved without its weights."""
    learned = any(compat.learns_prompts(module) for module in plan.given.modules())
    return "the model learns prompts, which are saved without the weights below" if learned else None


def beta_is_unknown(plan: FoldPlan, layer: AttentionLayer) -> str | None:
    """Refuse a layer whose beta was set before a forward showed the model's own."""
    unknown = bool(plan.gains[layer].isnan().any())
    return "its own beta is unknown before the first forward; run one" if unknown else None


def beta_is_lost(plan: FoldPlan, layer: AttentionLayer) -> str | None:
    """Refuse a layer that was trained with a beta that no longer acts, since the layer is now left alone."""
    gain = gain_lost_by(layer)
    if not plan.is_on_any_rank(gain != 1):
        return None
    size = "" if gain == 1 else f", {gain:.3g} times the model's own,"  # it still acts on this rank
    return (
        f"it is left alone ({layer.refusal or LEFT_ALONE_ELSEWHERE}), and its beta{size} no longer acts. "
        "Give it the processor or forward that it was trained with, and run one. To do without this beta: layer = "
        f"hook.layers[{layer.name!r}]; layer.head_beta = layer.head_beta_default"
    )


def query_is_clipped(plan: FoldPlan, layer: AttentionLayer) -> str | None:
    """Refuse a layer that clips its query: the bounds would act on the query after scaling, not before."""
    clips = any(getattr(layer.module, name, None) is not None for name in QUERY_CLIPS)
    return "it clips q, k and v after the projection. Exclude the layer with attach(layers=...)" if clips else None


def betas_differ(plan: FoldPlan, layer: AttentionLayer) -> bool:
    """Return True if the heads need different factors, which no weight shared by all heads can hold."""
    gain = plan.gains[layer]
    return bool((gain != gain[0]).any())


def norm_is_shared_by_heads(plan: FoldPlan, layer: AttentionLayer) -> str | None:
    """Refuse heads with different betas under one query norm."""
    shared = any(norm.size == layer.head_dim for norm, *_ in query_norms(layer))
    reason = "its query norm is shared by all heads, whose betas differ. Attach with per_head=False"
    return reason if shared and betas_differ(plan, layer) else None


def projection_is_unknown(plan: FoldPlan, layer: AttentionLayer) -> str | None:
    """Refuse a layer whose weight rows for q are not known."""
    return f"its query projection has no known form. {KNOWN_FORMS}" if query_projection(layer) is None else None


def scaled_projection(layer: AttentionLayer) -> Projection | None:
    """Return W_q if the factor goes into it; None if a norm takes it, or if W_q is unknown or quantised."""
    query = query_projection(layer)
    return None if query is None or query_norms(layer) or not query.stored.is_floating_point() else query


def projection_is_shared_by_heads(plan: FoldPlan, layer: AttentionLayer) -> str | None:
    """Refuse heads with different betas under one weight, which projects the input of each head separately."""
    query = scaled_projection(layer)
    shared = query is not None and len(query.rows) == 1 < layer.heads
    reason = "its query projection is shared by all heads, whose betas differ. Attach with per_head=False"
    return reason if shared and betas_differ(plan, layer) else None


def weight_makes_keys(plan: FoldPlan, layer: AttentionLayer) -> str | None:
    """Refuse rows that produce both queries and keys: a factor on them would act twice."""
    query, key = scaled_projection(layer), layer.projections and layer.projections[1]
    if query is None or key is None or query.stored is not key.stored:
        return None
    shared = bool(torch.isin(query.rows, key.rows).any())
    reason = "its query weight makes its keys too, where beta would act a second time"
    return f"{reason}. Exclude the layer with attach(layers=...)" if shared else None


def projections_are_copied(plan: FoldPlan, layer: AttentionLayer) -> str | None:
    """Refuse fused projections of diffusers: the separate weights are kept too, and a saved model loads those."""
    query = scaled_projection(layer)
    kept = separate(layer.module, layer.heads, layer.head_dim) if hasattr(layer.module, "fuse_projections") else None
    copied = query is not None and kept is not None and query.stored is not kept[0].stored
    reason = "beside its fused projection it keeps separate ones, which would keep the model's own beta"
    return f"{reason}. Call model.unfuse_qkv_projections(), run a forward and fold" if copied else None


def weight_takes_no_factor(plan: FoldPlan, layer: AttentionLayer) -> str | None:
    """Refuse weights that are computed in every forward, offloaded, sharded or quantised."""
    try:
        plan.places(layer)
    except NoScalingError as error:
        return f"{error}; {plan.adapters or 'fold the whole, dequantised model on one device'}"
    return None


def weight_is_shared(plan: FoldPlan, layer: AttentionLayer) -> str | None:
    """Refuse a weight that another module, or another caller, uses too: it has one value for both."""
    shared = any(plan.users[id(parameter)] > 1 for parameter in _parameters(plan, layer))
    reason = "another module shares its query weight, which cannot hold two factors"
    return f"{reason}. Exclude the layer with attach(layers=...)" if shared else None


def memory_is_shared(plan: FoldPlan, layer: AttentionLayer) -> str | None:
    """Refuse a query weight that overlaps in memory with a parameter or buffer outside of its attention module.

    Overlaps within the module show when `verification` runs it.
    """
    own = set(layer.module.modules())
    for weight in map(materialise.local, _parameters(plan, layer)):
        for module, name, tensor in plan.tensors[weight.untyped_storage().data_ptr()]:
            if module not in own and overlap(weight, tensor):
                return f"{name} lies in the memory of its query weight, which cannot hold two factors; give it a copy"
    return None


def _parameters(plan: FoldPlan, layer: AttentionLayer) -> Iterator[nn.Parameter]:
    return (parameter for place in plan.places(layer) for parameter in place.parameters)


def weight_would_overflow(plan: FoldPlan, layer: AttentionLayer) -> str | None:
    """Refuse weights that would leave the range of their dtype, or that were not finite before."""
    weights = [weight for place in plan.places(layer) for weight in place.weights]
    finite = [weight.stays_finite(plan.gains[layer]) for weight in weights]
    overflow = plan.is_on_any_rank(not all(finite))
    is_narrow = any(weight.parameter.dtype == torch.float16 for weight in weights)
    wider = ", call model.float() and run a forward" if is_narrow else ""
    reason = f"a folded weight would be NaN or infinite; look at the weight{wider}, or lower hook.layers[name].beta"
    return reason if overflow else None


MODEL_REFUSALS: list[Callable[[FoldPlan], str | None]] = [weights_are_sharded, prompts_are_saved_alone]
BETA_INDEPENDENT_REFUSALS: list[Callable[[FoldPlan, AttentionLayer], str | None]] = [
    query_is_clipped,
    norm_is_shared_by_heads,
    projection_is_unknown,
    projection_is_shared_by_heads,
    weight_makes_keys,
    projections_are_copied,
    weight_takes_no_factor,
    adapter_is_saved_alone,
    other_adapters_lack_beta,
]
"""Refusals that apply whatever the value of beta, and that can be checked before the first forward."""
LAYER_REFUSALS: list[Callable[[FoldPlan, AttentionLayer], str | None]] = [
    beta_is_lost,
    beta_is_unknown,
    *BETA_INDEPENDENT_REFUSALS,
    weight_is_shared,  # from here on, all weights are known to be readable
    memory_is_shared,
    weight_would_overflow,
]
