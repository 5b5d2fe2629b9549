"""Scaling of single heads by their weights: the rows of parameters that take a factor on the scores, and its power.

For `betahook.step.clipping`, `find_scalings` reads it off a module, without a forward, so that a layer without such
weights is refused when attached. Where scores `q . k` take a factor, q and k take its square root each, unless several
query heads share a key: then q takes all of it. For `betahook.keep`, `query_weights` and `learned_norm` are the places
that may hold beta, on the side of q alone. Weights that FSDP 2 or a mesh shards are scaled where they are, each rank
its rows. Nothing here reads a value back to the host.
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
    """The weights of an attention module take no factor; the message is the reason, in words."""


@dataclass(frozen=True)
class Rows:
    """Rows of a weight that belong to heads.

    Attributes:
        head: int64 `[rows]`, the head of each; `heads` for a row that belongs to none.
        exponent: float32 `[rows]`, the power of the head's factor that a row takes.
        heads: how many there are.
    """

    head: Tensor
    exponent: Tensor
    heads: int
    _copies: dict[torch.device, tuple[Tensor, Tensor]] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    @classmethod
    def of(cls, rows: Tensor, exponent: Tensor | float, total: int) -> Rows:
        """Describe `rows [heads, rows of one head]` of `total`; `exponent` broadcasts to one head's."""
        heads, each = rows.shape
        head = torch.full((total,), heads, device="cpu")
        head[rows.flatten()] = torch.arange(heads, device="cpu").repeat_interleave(each)
        exponents = torch.ones(total, device="cpu")
        exponents[rows.flatten()] = torch.as_tensor(exponent, device="cpu").expand(heads, each).flatten()
        return cls(head, exponents, heads)

    def spread(self, factors: Tensor) -> Tensor:
        """Return the factor of each row, `[heads] -> [rows]`: exactly 1 for rows of no head, and where it is 1."""
        if (device := factors.device) not in self._copies:  # once: the host waits for a copy, and `Clip` always asks
            self._copies[device] = self.head.to(device), self.exponent.to(device)
        head, exponent = self._copies[device]
        return torch.cat([factors, factors.new_ones(1)])[head] ** exponent


@dataclass(frozen=True)
class Weight:
    """A parameter by its name, since sharding puts another one in its place.

    Attributes:
        module: the module that owns it.
        name: in that module.
        rows: what its entries along `axes` belong to.
        axes: those of its rows, in order: 1 where the module stores it as `[in, out]`.
        offset: what the module adds to its entries, 1 in norms whose factor is `1 + w`.
    """

    module: nn.Module
    name: str
    rows: Rows
    axes: tuple[int, ...] = (0,)
    offset: float = 0.0

    @property
    def stored(self) -> nn.Parameter:
        """The parameter as it is now, wherever its numbers are.

        Raises:
            NoScalingError: it is made of others.
        """
        parameter = materialise.stored(self.module, self.name)
        if not isinstance(parameter, nn.Parameter):
            reason = "its weight, or its bias, is made of others in every forward"
            raise NoScalingError(f"{reason} (remove the parametrization or pruning first)")
        return parameter

    @property
    def parameter(self) -> nn.Parameter:
        """The parameter as it is now, to write to.

        Raises:
            NoScalingError: it is made of others, or its numbers are elsewhere.
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
        """Multiply the rows of each head, in place, by their power of its factor; `factors [heads]`."""
        weight = self.parameter.detach()
        self._multiply(weight, self._by_row(self.rows.spread(factors), weight))

    def blur(self, error: float, generator: torch.Generator) -> None:
        """Move each entry of the heads' rows up or down by a relative `error`, in place, as the generator says."""
        weight = self.parameter.detach()
        signs = 2 * torch.randint(2, weight.shape, generator=generator, device="cpu") - 1
        of_heads = self._by_row(self.rows.head < self.rows.heads, signs)
        self._multiply(weight, (1 + error * signs * of_heads).to(weight.device))

    def stays_finite(self, factors: Tensor) -> Tensor:
        """True if no entry on this rank would be NaN or infinite after `scale`, boolean `[]`."""
        weight = self.parameter.detach()
        by_row = materialise.replicated_like(self._by_row(self.rows.spread(factors), weight), weight)
        return materialise.local((weight * by_row).to(weight.dtype)).isfinite().all()

    def _by_row(self, values: Tensor, weight: Tensor) -> Tensor:
        """Values of rows, in a shape and on a device in which they meet these rows of the weight."""
        return values.view(self._sizes(weight)).to(weight.device)

    def _sizes(self, weight: Tensor) -> list[int]:
        """The shape of the rows of the weight: 1 along all other axes."""
        return [size if axis in self.axes else 1 for axis, size in enumerate(weight.shape)]

    def _multiply(self, weight: Tensor, factors: Tensor) -> None:
        factors = materialise.replicated_like(factors, weight)
        if self.offset:
            # In this form a factor of 1 keeps every bit.
            weight.copy_(weight * factors + self.offset * (factors - 1))
        else:
            weight.mul_(factors)


@dataclass(frozen=True)
class Scaling:
    """Weights of an attention module that together take a whole factor on its scores.

    Attributes:
        weights: all of them.
        as_one: True if all heads share one of them: they can take a common factor only.
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
        """Refuse weights that cannot be written to now, as `parameters` does."""
        _ = self.parameters

    def scale(self, factors: Tensor) -> None:
        """Multiply the scores by `factors [heads]`; where heads share a weight, all by the smallest of them."""
        factors = factors.amin().expand_as(factors) if self.as_one else factors
        for weight in self.weights:
            weight.scale(factors)
        torch.clear_autocast_cache()  # a forward under autocast would go on with its copy of the old values

    @contextmanager
    def kept(self) -> Iterator[None]:
        """After a while, put every bit of the parameters back."""
        kept = [(parameter.detach(), parameter.detach().clone()) for parameter in {*self.parameters}]
        try:
            yield
        finally:
            for parameter, values in kept:
                parameter.copy_(values)
            torch.clear_autocast_cache()

    @contextmanager
    def scaled(self, factors: Tensor, error: float = 0.0, seed: int = 0) -> Iterator[None]:
        """Scale for a while, each entry off by a relative `error`; afterwards every bit is as it was."""
        with self.kept():
            self.scale(factors)
            generator = torch.Generator().manual_seed(seed)
            for weight in self.weights if error else ():
                weight.blur(error, generator)
            yield


def find_scalings(module: nn.Module, pair: Pair | None, heads: int, head_dim: int) -> Iterator[Scaling]:
    """Find the weights of an attention module that a factor on its scores goes into.

    Mostly the first; only a run shows where it has to be one of the others, which are on the side of q alone.

    Raises:
        NoScalingError: there are none, or they take no factor.
    """
    if pair is None:
        raise NoScalingError("its query and key projections have no known form, or FSDP 1 shards them")
    if any(getattr(module, name, None) is not None for name in families.QUERY_CLIPS):
        raise NoScalingError("it clips q, k and v behind their projections")
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
        # The components of q that meet a part of k which all heads share, as in MLA, take all of the factor.
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
    """The weights that make the query: first with the biases that may be its own, though no projection has them."""
    projections = [query, *added_queries(module, query)]  # one, or one of each sequence that attends
    weights = [weight for each in projections for weight in of_linear(each, exponent)]
    if biases := list(_query_biases(module, heads, head_dim, exponent)):
        yield [*weights, *biases]
    yield weights


def _query_biases(module: nn.Module, heads: int, head_dim: int, exponent: Tensor | float) -> Iterator[Weight]:
    """Parameters of the attention itself that have the name and the size of a bias of its query."""
    size = heads * head_dim
    for name in families.QUERY_BIASES:
        bias = getattr(module, name, None)
        if isinstance(bias, nn.Parameter) and bias.shape[-1:] == (size,) and bias.numel() == size:
            rows = Rows.of(torch.arange(size, device="cpu").view(heads, -1), exponent, size)
            yield Weight(module, name, rows, axes=(bias.dim() - 1,))


def _rows(projection: Projection) -> Tensor:
    """The rows of q, or of k, in their weight, `[heads, rows of one head]`; also of one on the meta device."""
    stored = projection.stored
    if not stored.is_meta and (obstacle := projection.obstacle) is not None:
        raise NoScalingError(f"its weight is {obstacle}")
    if not materialise.is_whole(stored, projection.module):
        raise NoScalingError(f"its weight is quantised, packed in a {type(stored).__name__}")
    return projection.rows


def of_linear(projection: Projection, exponent: Tensor | float) -> Iterator[Weight]:
    """The weight and the bias of a projection, and the weights by which its adapters add to its output."""
    features = _rows(projection)
    rows = Rows.of(features, exponent, projection.features)
    biases = [(projection.module, projection.bias, projection.bias_offset)]
    if magnitudes := compat.magnitudes(projection.adapter):  # of DoRA, where the norms of the weight cancel
        yield from (Weight(magnitude, "weight", rows) for magnitude in magnitudes)
    else:
        yield Weight(projection.module, projection.weight, rows, axes=projection.axes)
        for up in compat.adapter_outputs(projection.adapter):
            yield Weight(up, "weight", rows)
            biases.append((up, "bias", 0))
    for owner, name, offset in biases:
        if name is not None and isinstance(bias := getattr(owner, name, None), Tensor):
            total = max(bias.numel(), int(features.max()) + offset + 1)  # a shorter one is refused when it is read
            yield Weight(owner, name, Rows.of(features + offset, exponent, total), axes=tuple(range(bias.dim())))


@dataclass(frozen=True)
class Norm:
    """A norm that learns an entry for each component of one head, or of all, under a name of its own."""

    module: nn.Module
    name: str = "weight"

    @property
    def tensors(self) -> list[Tensor]:
        """Its weight and, where it has one, its bias."""
        both = (getattr(self.module, each, None) for each in (self.name, "bias"))
        return [x for x in both if isinstance(x, Tensor)]

    @property
    def size(self) -> int:
        """Number of its entries."""
        return self.tensors[0].numel()

    def weights(self, head_dim: int, exponent: float, offset: float | None = None) -> list[Weight]:
        """Its weight and its bias; one that all heads share is that of the first. None as offset: run it alone."""
        total, rows_of_head = len(self.tensors[0]), 1 if self.tensors[0].dim() == 2 else head_dim
        rows = Rows.of(torch.arange(total, device="cpu").view(-1, rows_of_head), exponent, total)
        offset = _offset(self.module, self.name) if offset is None else offset
        bias = [Weight(self.module, "bias", rows)] if len(self.tensors) > 1 else []
        return [Weight(self.module, self.name, rows, offset=offset), *bias]


def learned_norm(module: nn.Module, name: str, heads: int, head_dim: int) -> Norm | None:
    """The norm of this name; None if its weight has no entry for each component, of one head or of all."""
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
    """The norms of the queries of further sequences in joint attention."""
    norms = (learned_norm(module, name, heads, head_dim) for name in families.ADDED_QUERY_NORMS)
    return [norm for norm in norms if norm is not None]


@torch.no_grad()
def _offset(norm: nn.Module, name: str) -> float:
    """The number that a norm adds to its weight, 0 or 1: seen from what it returns for weights of 0, 1 and 2."""
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
