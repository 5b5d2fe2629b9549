"""Scale the scores of single heads through weights: which rows of which parameters take a factor, and to what power.

For `betahook.step.clipping`, `find_scalings` derives them from a module without a forward, so that a layer without
such weights is refused on attach. To scale `q . k`, q and k each take the square root of the factor, unless several
query heads share a key: then q takes all of it. For `betahook.keep`, `query_weights` and `learned_norm` give the places
that may hold beta, on the query side alone. Weights sharded by FSDP 2 or a device mesh are scaled in place, each rank
its own rows. Nothing here reads a value back to the host.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import chain

import torch
from torch import Tensor, nn

from betahook import compat
from betahook.models import families, materialise
from betahook.models.projections import Pair, Projection, added_queries


class NoScalingError(ValueError):
    """The weights of an attention module cannot take a factor; the message gives the reason."""


@dataclass(frozen=True)
class Rows:
    """Assignment of the rows of a weight to heads.

    Attributes:
        head: int64 `[rows]`, the head of each row; `heads` for a row that belongs to none.
        exponent: float32 `[rows]`, the power to which a row takes its head's factor.
        heads: number of heads.
    """

    head: Tensor
    exponent: Tensor
    heads: int
    _copies: dict[torch.device, tuple[Tensor, Tensor]] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    @classmethod
    def of(cls, rows: Tensor, exponent: Tensor | float, total: int) -> Rows:
        """Assign `rows [heads, rows of one head]`, of `total` rows; `exponent` broadcasts to `[rows of one head]`."""
        heads, each = rows.shape
        head = torch.full((total,), heads, device="cpu")
        head[rows.flatten()] = torch.arange(heads, device="cpu").repeat_interleave(each)
        exponents = torch.ones(total, device="cpu")
        exponents[rows.flatten()] = torch.as_tensor(exponent, device="cpu").expand(heads, each).flatten()
        return cls(head, exponents, heads)

    def spread(self, factors: Tensor) -> Tensor:
        """Return the factor of each row, `[heads] -> [rows]`: exactly 1 for rows of no head and for factors of 1."""
        if (device := factors.device) not in self._copies:  # once, not in every step: the host waits for a copy
            self._copies[device] = self.head.to(device), self.exponent.to(device)
        head, exponent = self._copies[device]
        return torch.cat([factors, factors.new_ones(1)])[head] ** exponent


@dataclass(frozen=True)
class Weight:
    """A parameter, referred to by its name, since sharding replaces the object.

    Attributes:
        module: the module that owns it.
        name: its name in the module.
        rows: the heads that its rows belong to.
        axes: the axes along which its rows lie, in order: 1 if the module stores it as `[in, out]`.
        offset: the number that the module adds to its entries, 1 in norms whose factor is `1 + w`.
    """

    module: nn.Module
    name: str
    rows: Rows
    axes: tuple[int, ...] = (0,)
    offset: float = 0.0

    @property
    def stored(self) -> nn.Parameter:
        """The parameter as it is now, even if its data is elsewhere.

        Raises:
            NoScalingError: it is computed from other parameters.
        """
        parameter = materialise.stored(self.module, self.name)
        if not isinstance(parameter, nn.Parameter):
            reason = "its weight, or its bias, is computed from other parameters in every forward"
            raise NoScalingError(f"{reason} (remove the parametrization or pruning first)")
        return parameter

    @property
    def parameter(self) -> nn.Parameter:
        """The parameter as it is now, to write to.

        Raises:
            NoScalingError: it is computed from other parameters, or it is offloaded, sharded or quantised.
        """
        parameter = self.stored
        if parameter.is_meta:
            raise NoScalingError("its weight is offloaded, on the meta device outside the forward")
        if compat.is_zero3(parameter):
            raise NoScalingError("its weight is sharded outside the forward, by ZeRO-3")
        if not parameter.is_floating_point() or not materialise.is_plain(parameter):
            raise NoScalingError(f"its weight is quantised, a {type(parameter.data).__name__} of {parameter.dtype}")
        if parameter.dim() <= self.axes[-1] or math.prod(self._sizes(parameter)) != len(self.rows.head):
            raise NoScalingError("its weight has another shape outside the forward, as FSDP 1 leaves it")
        return parameter

    def scale(self, factors: Tensor) -> None:
        """Multiply the rows of each head in place by its factor, to the power of each row; `factors [heads]`."""
        weight = self.parameter.detach()
        self._multiply(weight, self._by_row(self.rows.spread(factors), weight))

    def blur(self, error: float, generator: torch.Generator) -> None:
        """Perturb each entry of the heads' rows in place by a relative `error`, up or down as the generator draws."""
        weight = self.parameter.detach()
        signs = 2 * torch.randint(2, weight.shape, generator=generator, device="cpu") - 1
        of_heads = self._by_row(self.rows.head < self.rows.heads, signs)
        self._multiply(weight, (1 + error * signs * of_heads).to(weight.device))

    def stays_finite(self, factors: Tensor) -> Tensor:
        """True if `scale` would leave every entry on this rank finite; boolean `[]`."""
        weight = self.parameter.detach()
        by_row = materialise.replicated_like(self._by_row(self.rows.spread(factors), weight), weight)
        return materialise.local((weight * by_row).to(weight.dtype)).isfinite().all()

    def _by_row(self, values: Tensor, weight: Tensor) -> Tensor:
        """Reshape values `[rows]` so that they broadcast along the rows of the weight, on its device."""
        return values.view(self._sizes(weight)).to(weight.device)

    def _sizes(self, weight: Tensor) -> list[int]:
        """Shape of one value per row of the weight: 1 along all axes but those of the rows."""
        return [size if axis in self.axes else 1 for axis, size in enumerate(weight.shape)]

    def _multiply(self, weight: Tensor, factors: Tensor) -> None:
        factors = materialise.replicated_like(factors, weight)
        if self.offset:
            # In this form, a factor of 1 preserves every bit.
            weight.copy_(weight * factors + self.offset * (factors - 1))
        else:
            weight.mul_(factors)


@dataclass(frozen=True)
class Scaling:
    """Weights of an attention module that, scaled together, apply a factor to its scores.

    Attributes:
        weights: all of them.
        as_one: True if all heads share one of them, so that they can only take a common factor.
    """

    weights: Sequence[Weight]
    as_one: bool = False

    @property
    def parameters(self) -> list[nn.Parameter]:
        """The parameters as they are now.

        Raises:
            NoScalingError: one of them cannot be written to.
        """
        return [weight.parameter for weight in self.weights]

    def check(self) -> None:
        """Raise `NoScalingError` if a weight cannot be written to now, as `parameters` does."""
        _ = self.parameters

    def scale(self, factors: Tensor) -> None:
        """Multiply the scores by `factors [heads]`; heads that share a weight all take the smallest factor."""
        factors = factors.amin().expand_as(factors) if self.as_one else factors
        for weight in self.weights:
            weight.scale(factors)
        torch.clear_autocast_cache()  # a forward under autocast would continue to use its copy of the old values

    @contextmanager
    def preserved(self) -> Iterator[None]:
        """Restore every bit of the parameters when the context ends."""
        before = [(parameter.detach(), parameter.detach().clone()) for parameter in {*self.parameters}]
        try:
            yield
        finally:
            for parameter, values in before:
                parameter.copy_(values)
            torch.clear_autocast_cache()

    @contextmanager
    def scaled(self, factors: Tensor, error: float = 0.0, seed: int = 0) -> Iterator[None]:
        """Scale within the context, each entry off by a relative `error`; then restore every bit."""
        with self.preserved():
            self.scale(factors)
            generator = torch.Generator().manual_seed(seed)
            for weight in self.weights if error else ():
                weight.blur(error, generator)
            yield


def find_scalings(module: nn.Module, pair: Pair | None, heads: int, head_dim: int) -> Iterator[Scaling]:
    """Yield the weights of an attention module that may take a factor on its scores, the likeliest first.

    The first are mostly right; only a run shows if later ones are needed. The last are on the query side alone.

    Raises:
        NoScalingError: there are none, or they cannot take a factor.
    """
    if pair is None:
        raise NoScalingError("its query and key projections have no known form, or FSDP 1 shards them")
    if any(getattr(module, name, None) is not None for name in families.QUERY_CLIPS):
        raise NoScalingError("it clips q, k and v after their projections")
    query, key = pair
    key_rows = _rows(key)
    key_heads, unshared = key_rows.shape
    names = zip(families.QUERY_NORMS, families.KEY_NORMS, strict=True)
    norms = ((learned_norm(module, q, heads, head_dim), learned_norm(module, k, key_heads, head_dim)) for q, k in names)
    norm, other = next((pair for pair in norms if pair[0] is not None), (None, None))
    if norm is not None:
        of_query = [norm, *added_query_norms(module, heads, head_dim)]
        as_one = any(each.size == head_dim for each in of_query)
        if other is not None and len(of_query) == 1 and (other.size == head_dim if as_one else key_heads == heads):
            yield Scaling([*norm.weights(head_dim, 0.5), *other.weights(head_dim, 0.5)], as_one)
        yield Scaling([weight for each in of_query for weight in each.weights(head_dim, 1.0)], as_one)
    elif key_heads == heads and not any(getattr(module, name, None) is not None for name in families.KEY_NORMS):
        # Components of q that are multiplied by a part of k shared by all heads, as in MLA, take the whole factor.
        exponent = torch.ones(head_dim, device="cpu")
        exponent[:unshared] = 0.5
        of_key = list(of_linear(key, 0.5))
        yield from (
            Scaling([*of_query, *of_key]) for of_query in query_weights(module, query, heads, head_dim, exponent)
        )
    yield from map(Scaling, query_weights(module, query, heads, head_dim, 1.0))


def query_weights(
    module: nn.Module, query: Projection, heads: int, head_dim: int, exponent: Tensor | float
) -> Iterator[Sequence[Weight]]:
    """Yield the weights that produce the query, first with biases that the module itself holds for it, then without."""
    projections = [query, *added_queries(module, query)]  # one, or one per sequence in joint attention
    weights = [weight for each in projections for weight in of_linear(each, exponent)]
    if biases := list(_query_biases(module, heads, head_dim, exponent)):
        yield [*weights, *biases]
    yield weights


def _query_biases(module: nn.Module, heads: int, head_dim: int, exponent: Tensor | float) -> Iterator[Weight]:
    """Yield parameters of the attention itself that have the name and the size of a query bias."""
    size = heads * head_dim
    for name in families.QUERY_BIASES:
        bias = getattr(module, name, None)
        if isinstance(bias, nn.Parameter) and bias.shape[-1:] == (size,) and bias.numel() == size:
            rows = Rows.of(torch.arange(size, device="cpu").view(heads, -1), exponent, size)
            yield Weight(module, name, rows, axes=(bias.dim() - 1,))


def _rows(projection: Projection) -> Tensor:
    """Numbers of the rows of q, or of k, `[heads, rows of one head]`, even of a weight on the meta device."""
    stored = projection.stored
    if not stored.is_meta and (obstacle := projection.obstacle) is not None:
        raise NoScalingError(f"its weight is {obstacle}")
    if not materialise.is_whole(stored, projection.module):
        raise NoScalingError(f"its weight is quantised, packed in a {type(stored).__name__}")
    return projection.rows


def of_linear(projection: Projection, exponent: Tensor | float) -> Iterator[Weight]:
    """Yield the weight and the bias of a projection, and those by which its adapters add to its output."""
    features = _rows(projection)
    rows = Rows.of(features, exponent, projection.features)
    biases = [(projection.module, projection.bias, projection.bias_offset)]
    if magnitudes := compat.magnitudes(projection.adapter):  # DoRA, where a factor on the weight itself cancels
        yield from (Weight(magnitude, "weight", rows) for magnitude in magnitudes)
    else:
        yield Weight(projection.module, projection.weight, rows, axes=projection.axes)
        for up in compat.adapter_outputs(projection.adapter):
            yield Weight(up, "weight", rows)
            biases.append((up, "bias", 0))
    for owner, name, offset in biases:
        if name is not None and isinstance(bias := getattr(owner, name, None), Tensor):
            total = max(bias.numel(), int(features.max()) + offset + 1)  # a shorter bias is refused on access
            yield Weight(owner, name, Rows.of(features + offset, exponent, total), axes=tuple(range(bias.dim())))


@dataclass(frozen=True)
class Norm:
    """A norm that learns one entry per component of one head, or of all heads, in the parameter `name`."""

    module: nn.Module
    name: str = "weight"

    @property
    def tensors(self) -> list[Tensor]:
        """Its weight and, if it has one, its bias."""
        both = (getattr(self.module, each, None) for each in (self.name, "bias"))
        return [x for x in both if isinstance(x, Tensor)]

    @property
    def size(self) -> int:
        """Number of entries of its weight."""
        return self.tensors[0].numel()

    def weights(self, head_dim: int, exponent: float, offset: float | None = None) -> list[Weight]:
        """Its weight and bias, as the first head's if all heads share them; an offset of None is found by a run."""
        total, rows_of_head = len(self.tensors[0]), 1 if self.tensors[0].dim() == 2 else head_dim
        rows = Rows.of(torch.arange(total, device="cpu").view(-1, rows_of_head), exponent, total)
        offset = _offset(self.module, self.name) if offset is None else offset
        bias = [Weight(self.module, "bias", rows)] if len(self.tensors) > 1 else []
        return [Weight(self.module, self.name, rows, offset=offset), *bias]


def learned_norm(module: nn.Module, name: str, heads: int, head_dim: int) -> Norm | None:
    """The norm of this name; None unless its weight has one entry per component, of one head or of all."""
    norm = getattr(module, name, None)
    if not isinstance(norm, nn.Module):
        return None
    own = [each for each, _ in norm.named_parameters(recurse=False) if each != "bias"]
    learned = own[0] if len(own) == 1 else "weight"  # or "scale", as in torchtune
    weight = getattr(norm, learned, None)
    if not isinstance(weight, Tensor):
        return None
    return Norm(norm, learned) if weight.shape in ((head_dim,), (heads * head_dim,), (heads, head_dim)) else None


def added_query_norms(module: nn.Module, heads: int, head_dim: int) -> list[Norm]:
    """The query norms of further sequences in joint attention."""
    norms = (learned_norm(module, name, heads, head_dim) for name in families.ADDED_QUERY_NORMS)
    return [norm for norm in norms if norm is not None]


@torch.no_grad()
def _offset(norm: nn.Module, name: str) -> float:
    """The number that a norm adds to its weight, 0 or 1, found from its outputs for weights of 0, 1 and 2."""
    state = dict(chain(norm.named_parameters(), norm.named_buffers()))
    on_cpu = {each: torch.zeros(tensor.shape, device="cpu") for each, tensor in state.items()}
    weight = on_cpu[name]
    tokens = torch.linspace(-1, 2, weight.numel(), device="cpu").view(1, *weight.shape)
    try:
        zero, one, two = (
            torch.func.functional_call(norm, {**on_cpu, name: weight + value}, (tokens,)) for value in (0, 1, 2)
        )
    except (TypeError, ValueError, RuntimeError) as error:
        raise NoScalingError(f"its {type(norm).__name__} does not run alone ({error})") from error
    for offset in (0.0, 1.0):
        parts = zero - offset * (one - zero), two - 2 * one + zero
        if all(torch.allclose(part, torch.zeros_like(part), atol=1e-4) for part in parts):
            return offset
    raise NoScalingError(f"the output of its {type(norm).__name__} is not proportional to its weight")
