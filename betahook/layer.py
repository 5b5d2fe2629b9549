"""`AttentionLayer`, a hooked layer as users see it: beta to read and set, statistics, and remarks in words.

`Hook` makes one per attention module and keeps them in `Layers`; reports and checks read them.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, KeysView, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from betahook import theory
from betahook.measure import weights
from betahook.measure.groups import HeadGroups, LayerSize
from betahook.measure.statistics import ROW, Statistics
from betahook.models.classifiers import classify
from betahook.models.code import names_used
from betahook.models.discovery import AttentionModule, shown_name
from betahook.models.projections import Pair, Projection, not_located
from betahook.state.gains import gain_of
from betahook.state.left_alone import lost_gain, refusal_anywhere
from betahook.state.ranges import HeadRange
from betahook.state.state import LARGEST_BETA, SMALLEST_BETA, State, is_beta, set_beta

NAMED = 4
"""Number of layers that an error names at most; it counts the others."""


class AttentionLayer:
    """One attention layer of a hooked model.

    Attributes:
        name: as in `model.named_modules()`, without the parts that wrappers add.
        module: the attention module.
        heads: number of query heads.
        head_dim: d_k.
    """

    __slots__ = ("_attention", "_head_range", "_state", "head_dim", "heads", "module", "name")  # a typo raises

    def __init__(self, name: str, attention: AttentionModule, state: State, head_range: HeadRange) -> None:
        self.name = name
        self.module = attention.module
        self.heads = attention.heads
        self.head_dim = attention.head_dim
        self._attention = attention
        self._state = state
        self._head_range = head_range

    def __repr__(self) -> str:
        return f"AttentionLayer({self.name!r}, heads={self.heads}, head_dim={self.head_dim}, beta={self.beta:.4g})"

    @property
    def beta_default(self) -> float:
        """The model's own inverse temperature, averaged over heads as `beta` is; NaN before the first forward pass."""
        return float(self._state.layers.geometric_mean(self._state.beta_default)[self._head_range.layer])

    @property
    def head_beta_default(self) -> Tensor:
        """The model's own inverse temperature for each head, `[heads]`, float32 on the CPU."""
        return self._state.beta_default[self._head_range.heads].to("cpu", copy=True)

    @property
    def beta(self) -> float:
        """The inverse temperature, or its geometric mean if heads differ. Assign a number to set it.

        The number applies to all heads, even if the model's own values differ. Before the first forward pass, which
        shows the model's own, it is NaN if none was set. After `detach` it keeps its last value but has no effect.

        Raises:
            ValueError: on assignment: the value is not positive and finite, or not a single number.
            TypeError: on assignment: the value is not a number.
            RuntimeError: on assignment: the hook is detached; the layer scales its scores itself and no forward pass
                has reached it; or the layer is left alone and the value is not the model's own.
        """
        return float(self._state.layers.geometric_mean(self._state.current_beta)[self._head_range.layer])

    @beta.setter
    def beta(self, value: float) -> None:
        new = _as_tensor(self.name, value)
        if new.numel() != 1:
            raise ValueError(
                f"beta of {self.name!r} must be one number, got a tensor of shape {list(new.shape)}; assign a number "
                "for each head to head_beta"
            )
        self._set_beta(new.flatten(), value)

    @property
    def head_beta(self) -> Tensor:
        """The inverse temperature of each head, `[heads]`, float32 on the CPU. Assign such a tensor to set it.

        The result is a copy: `layer.head_beta[0] = 2.0` changes nothing. Assignment raises the same errors as for
        `beta`, and a ValueError for another shape.
        """
        return self._state.current_beta[self._head_range.heads].cpu()

    @head_beta.setter
    def head_beta(self, value: Tensor) -> None:
        new = _as_tensor(self.name, value)
        if new.shape != (self.heads,):
            raise ValueError(
                f"head_beta of {self.name!r} must be {self.heads} numbers, one a head; got a tensor of shape "
                f"{list(new.shape)}"
            )
        self._set_beta(new, value)

    def _set_beta(self, new: Tensor, given: object) -> None:
        _check_new(self, new, given)
        set_beta(self._state, self._head_range, new)

    @property
    def statistics(self) -> Statistics:
        """Statistics of all forward passes since the sums were last pooled, over all heads, as scalar tensors.

        `hook.step()` pools the sums when a controller is due, and every `interval` steps, in which each layer is
        measured once, see `betahook.attach`. Until another forward pass is measured, these are the statistics of the
        last pooling, count included. The sensitivity covers the backward passes since the last step, or that pooling if
        there were none. Before pooling, only this rank counts: its batches and, if tensor-parallel, its heads.
        """
        return self._groups.observe(*self._state.latest_of(self._head_range))[0]

    @property
    def head_statistics(self) -> Statistics:
        """The same statistics for each head, as tensors `[heads]`."""
        return self._groups.by_head().observe(*self._state.latest_of(self._head_range))

    @property
    def _groups(self) -> HeadGroups:
        return HeadGroups.of([size_of(self._attention)], self._state.device)

    @property
    def weight_std_q(self) -> float:
        """Population std of the entries of the current W_q, adapters included; NaN if it cannot be read."""
        return float(self._weight_std.query[self._head_range.layer])

    @property
    def weight_std_k(self) -> float:
        """Population std of the entries of the current W_k, adapters included; NaN if it cannot be read."""
        return float(self._weight_std.key[self._head_range.layer])

    @property
    def _weight_std(self) -> weights.WeightStd:
        self.read_weights()
        return self._state.layers.weight_std(self._state.weights)

    @property
    def projections(self) -> Pair | None:
        """The current W_q and W_k; None if they could not be located."""
        return self._attention.projections

    @property
    def refusal(self) -> str | None:
        """The reason why betahook leaves the layer alone, on this rank or any other; None if it does not."""
        return refusal_anywhere(self._state, self._head_range)

    @property
    def remarks(self) -> list[str]:
        """Remarks on quantities that are not measured in this layer, and on other surprises."""
        remarks = [self._attention.facts.remark] if self._attention.facts.remark else []
        if self.refusal is not None:
            remarks.append(f"left alone, {self.refusal}")
        if self.projections is None:
            remarks.append(not_located(self.module))
        elif (reason := self._attention.input_obstacle) is not None:
            remarks.append(
                f"the input of W_q and W_k is not measured, since {reason}, and the score std that it predicts is not "
                "known"
            )
        return remarks

    @property
    def obstacles(self) -> list[str]:
        """Sentences that explain why the std of W_q or W_k cannot be read now."""
        names: dict[str, list[str]] = {}
        for name, projection in zip(("W_q", "W_k"), self.projections or (), strict=False):
            if projection.obstacle is not None:
                names.setdefault(projection.obstacle, []).append(name)
        return [
            f"the std of {' and '.join(each)} is not measured, {'it is' if len(each) == 1 else 'they are'} {obstacle}"
            for obstacle, each in names.items()
        ]

    @property
    def current_gain(self) -> Tensor:
        """`beta / beta_default`, `[heads]`: 1 where beta is the model's own, NaN where that is not known yet."""
        return gain_of(*(values[self._head_range.heads] for values in (self._state.beta, self._state.beta_default)))

    @contextmanager
    def acting(self, gain: Tensor) -> Iterator[None]:
        """Apply `gain [heads]` instead of `beta / beta_default` within a context; 1 is the model's own beta."""
        beta, default = (values[self._head_range.heads] for values in (self._state.beta, self._state.beta_default))
        kept, acts = beta.clone(), self._state.beta_acts
        beta.copy_(torch.where(gain == 1, torch.nan, gain * default))
        self._state.beta_acts = True
        try:
            yield
        finally:
            beta.copy_(kept)
            self._state.beta_acts = acts

    @torch.no_grad()
    def read_weights(self, *, sharded: bool = False) -> None:
        """Update the state from the current W_q and W_k, or with `sharded` from sharded ones only, on all ranks."""
        if (projections := self.projections) is None:  # no longer located
            self._state.weights[:, self._head_range.heads].zero_()
        for side, projection in enumerate(projections or ()):
            if projection.is_sharded is not sharded:
                continue
            sums = self._state.weights[3 * side : 3 * side + 3, self._head_range.heads]
            if projection.obstacle is not None:
                sums.zero_()
                continue
            by_head = weights.entry_sums(projection.entries)
            # In grouped-query attention, several query heads share the W_k of one key head.
            sums.copy_(by_head.repeat_interleave(self.heads // by_head.shape[1], 1))

    @torch.no_grad()
    def spectral_ratio(self) -> Tensor:
        """Return the larger `theory.spectral_ratio` of W_q and W_k, a scalar; NaN if they cannot be read.

        Every rank must call this, since sharded weights are gathered.
        """
        projections = self.projections
        if projections is None or any(projection.obstacle for projection in projections):
            return self._state.beta.new_full((), math.nan)
        query, key = (theory.spectral_ratio(projection.entries.flatten(0, 1)) for projection in projections)
        return torch.maximum(query, key)


def query_projection(layer: AttentionLayer) -> Projection | None:
    """Return the current W_q of a layer even if W_k could not be located; None if W_q could not."""
    return layer._attention.query_projection


def gain_lost_by(layer: AttentionLayer) -> float:
    """Return the `beta / beta_default` that acted until a layer was left alone; 1 if that was the model's own beta."""
    return lost_gain(layer._state, layer._head_range)


def has_one_key(layer: AttentionLayer) -> bool:
    """Return True if each row had only one key in the last pooling that measured the layer."""
    pairs, flat = (layer._state.recent[ROW[name], layer._head_range.heads] for name in ("pairs", "flat_entropy"))
    return bool(((pairs > 0) & (flat == 0)).all())


def size_of(attention: AttentionModule) -> LayerSize:
    """Return the sizes of an attention module; the widths are NaN if its projections could not be located."""
    widths = (float(projection.width) for projection in attention.projections or ())
    return LayerSize(attention.heads, attention.head_dim, *widths)


class Layers(Mapping[str, AttentionLayer]):
    """The hooked layers by module name."""

    def __init__(self, layers: Sequence[AttentionLayer]) -> None:
        self._layers = {layer.name: layer for layer in layers}
        self._are_read = False

    def __getitem__(self, name: str) -> AttentionLayer:
        if name not in self._layers:
            first, others = [name or f"'' ({shown_name(name)})" for name in self][:NAMED], len(self) - NAMED
            more = f" and {others} more" if others > 0 else ""
            raise KeyError(f"no hooked layer is called {name!r}; there are {', '.join(first)}{more}")
        return self._layers[name]

    def __repr__(self) -> str:
        return "\n".join(map(repr, self.values()))

    def __iter__(self) -> Iterator[str]:
        return iter(self._layers)

    def keys(self) -> KeysView[str]:
        """Return the names as a view whose repr shows only them."""
        return self._layers.keys()

    def __len__(self) -> int:
        return len(self._layers)

    @property
    def are_adapted(self) -> bool:
        """True if any beta differs from the model's own, or did until its layer was left alone. Reads the device."""
        return any(bool((layer.current_gain != 1).any()) or gain_lost_by(layer) != 1 for layer in self.values())

    @property
    def use_interface(self) -> bool:
        """True if any layer uses the attention interface of transformers."""
        return any(layer._attention.route == "interface" for layer in self.values())

    @property
    def replaced(self) -> set[str]:
        """Names of layers whose class used the attention interface of transformers at `attach` and no longer does."""
        names = functools.cache(names_used)
        asked = {name: layer.module for name, layer in self.items() if layer._attention.route == "interface"}
        return {name for name, module in asked.items() if classify(module, names).route != "interface"}

    def spectral_ratio(self) -> Tensor:
        """Return the largest ratio of the layers not frozen, or else of all; NaN if any is. Every rank must call."""
        trained = [layer for layer in self.values() if not layer._attention.is_frozen]
        ratios = [layer.spectral_ratio() for layer in trained or self.values()]
        return torch.stack([ratio.to(ratios[0]) for ratio in ratios]).max()

    def read_weights(self, which: range | None = None, *, sharded: bool = False) -> None:
        """Read W_q and W_k of all layers, or of those with an index in `which`; do nothing for a model on meta."""
        parameters = (parameter for layer in self.values() for parameter in layer.module.parameters())
        if self._are_read or all(parameter.is_meta for parameter in parameters):
            return
        for index, layer in enumerate(self.values()):
            if which is None or index in which:
                layer.read_weights(sharded=sharded)

    @contextmanager
    def reading_once(self) -> Iterator[None]:
        """Read W_q and W_k now and not again within a context, for several reports on one step."""
        self.read_weights()
        self._are_read = True
        try:
            yield
        finally:
            self._are_read = False


def _check_new(layer: AttentionLayer, new: Tensor, given: object) -> None:
    """Refuse a value that is not a valid beta, or that the layer cannot take now."""
    if layer._state.is_detached:
        raise RuntimeError(f"beta of {layer.name!r} cannot be set, its hook is detached: attach to the model again")
    if layer.refusal is not None and bool((new != layer.head_beta_default).any()):
        raise RuntimeError(f"beta of {layer.name!r} cannot be set, the layer is left alone: {layer.refusal}")
    if not bool(is_beta(new).all()):
        bounds = f", outside of {SMALLEST_BETA:g} to {LARGEST_BETA:g}" if bool((new > 0).all()) else ""
        unknown = ", and the model's own is known only after a forward" if math.isnan(layer.beta_default) else ""
        raise ValueError(f"beta of {layer.name!r} must be positive and finite; got {given}{bounds}{unknown}")
    if layer._attention.route != "interface" and math.isnan(layer.beta_default):
        others = " of this module, which no forward of the model has called so far" if layer._state.seen else ""
        raise RuntimeError(
            f"beta of {layer.name!r} cannot be set before the first forward{others}: this module scales its scores "
            "itself, so only a forward shows the model's own beta. Run one first"
        )


def _as_tensor(name: str, value: object) -> Tensor:
    try:
        if torch.as_tensor(value, device="cpu").dtype is torch.bool:
            raise TypeError("True and False are no numbers")
        return torch.as_tensor(value, dtype=torch.float32, device="cpu")
    except (TypeError, ValueError, RuntimeError) as error:
        raise TypeError(f"beta of {name!r} must be a number, or a tensor of one a head; got {value!r}") from error
