"""Scaling of single heads' scores by their weights: which rows of which parameters take which power of a factor.

`find_scaling` reads it off a module, without a forward, so that a layer without such weights is refused when attached;
`betahook.step.clipping` checks it on the model and writes. Where scores `q . k` take a factor, q and k take its square
root each, unless several query heads share a key: then q takes all of it. Nothing here reads a value back to the host.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain

import torch
from torch import Tensor, nn

from betahook import compat
from betahook.models import families, materialise
from betahook.models.projections import Projection, locate


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
        head, exponent = self.head.to(factors.device), self.exponent.to(factors)
        return torch.cat([factors, factors.new_ones(1)])[head] ** exponent


@dataclass(frozen=True)
class Weight:
    """A parameter by its name, since sharding puts another one in its place.

    Attributes:
        module: the module that owns it.
        name: in that module.
        rows: what its entries along `axis` belong to.
        axis: of its rows, 1 where the module stores it as `[in, out]`.
        offset: what the module adds to its entries, 1 in norms whose factor is `1 + w`.
    """

    module: nn.Module
    name: str
    rows: Rows
    axis: int = 0
    offset: float = 0.0

    @property
    def parameter(self) -> nn.Parameter:
        """The parameter as it is now.

        Raises:
            NoScalingError: it is made of others, or its numbers are elsewhere.
        """
        parameter = getattr(self.module, self.name)
        if not isinstance(parameter, nn.Parameter):
            raise NoScalingError("its weight is made of others in every forward")
        if compat.is_zero3(parameter) or parameter.is_meta:
            raise NoScalingError("its weight is elsewhere outside the forward, offloaded or sharded by ZeRO-3")
        if not parameter.is_floating_point() or not materialise.is_plain(parameter):
            raise NoScalingError(f"its weight is quantised, a {type(parameter.data).__name__} of {parameter.dtype}")
        if parameter.dim() <= self.axis or parameter.shape[self.axis] != len(self.rows.head):
            raise NoScalingError("its weight has another shape outside the forward, as FSDP 1 leaves it")
        return parameter

    def scale(self, factors: Tensor) -> None:
        """Multiply the rows of each head, in place, by their power of its factor; `factors [heads]`."""
        weight = self.parameter.detach()
        shape = [1] * weight.dim()
        shape[self.axis] = -1
        by_row = materialise.replicated_like(self.rows.spread(factors).view(shape).to(weight.device), weight)
        if self.offset:
            # In this form a factor of 1 keeps every bit.
            weight.copy_(weight * by_row + self.offset * (by_row - 1))
        else:
            weight.mul_(by_row)


@dataclass(frozen=True)
class Scaling:
    """All weights of an attention module that a factor on its scores goes into.

    Attributes:
        weights: those.
        as_one: True if all heads share one of them: they can take a common factor only.
    """

    weights: Sequence[Weight]
    as_one: bool

    def check(self) -> None:
        """Refuse weights that cannot be written to now.

        Raises:
            NoScalingError: one of them.
        """
        for weight in self.weights:
            _ = weight.parameter

    def scale(self, factors: Tensor) -> None:
        """Multiply the scores by `factors [heads]`; where heads share a weight, all by the smallest of them."""
        factors = factors.amin().expand_as(factors) if self.as_one else factors
        for weight in self.weights:
            weight.scale(factors)


def find_scaling(module: nn.Module, heads: int, head_dim: int) -> Scaling:
    """Find the weights of an attention module that a factor on its scores goes into.

    Raises:
        NoScalingError: there are none, or they take no factor.
    """
    pair = locate(module, heads, head_dim)
    if pair is None:
        raise NoScalingError("its query and key projections have no known form, or FSDP 1 shards them")
    if any(getattr(module, name, None) is not None for name in families.QUERY_CLIPS):
        raise NoScalingError("it clips q, k and v behind their projections")
    query, key = pair
    key_rows = _rows(key)
    key_heads, unshared = key_rows.shape
    names = zip(families.QUERY_NORMS, families.KEY_NORMS, strict=True)
    norms = ((_learned(module, q, heads, head_dim), _learned(module, k, key_heads, head_dim)) for q, k in names)
    norm, other = next((pair for pair in norms if pair[0] is not None), (None, None))
    if norm is None:
        normed = any(getattr(module, name, None) is not None for name in families.KEY_NORMS)
        both = key_heads == heads and not normed
        # The components of q that meet a part of k which all heads share, as in MLA, take all of the factor.
        exponent = torch.ones(head_dim, device="cpu")
        exponent[: unshared if both else 0] = 0.5
        return Scaling([*_of_linear(query, exponent), *(_of_linear(key, 0.5) if both else [])], as_one=False)
    as_one = norm.size == head_dim
    if other is not None and (other.size == head_dim if as_one else key_heads == heads):
        return Scaling([*norm.weights(heads, head_dim, 0.5), *other.weights(heads, head_dim, 0.5)], as_one)
    return Scaling(norm.weights(heads, head_dim, 1.0), as_one)


def _rows(projection: Projection) -> Tensor:
    """The rows of q, or of k, in their weight, `[heads, rows of one head]`."""
    if projection.obstacle is not None:
        raise NoScalingError(f"its weight is {projection.obstacle}")
    total = len(projection.matrix)
    return projection.select(torch.arange(total, device="cpu")[:, None]).squeeze(-1)


def _of_linear(projection: Projection, exponent: Tensor | float) -> Iterator[Weight]:
    """The weight and the bias of a projection, and what its adapters make its output from."""
    module, prefix = projection.module, projection.prefix
    rows = Rows.of(_rows(projection), exponent, len(projection.matrix))
    yield Weight(module, f"{prefix}weight", rows, axis=int(type(module).__name__ in families.TRANSPOSED))
    owners = [(module, f"{prefix}bias")]
    for up in () if projection.adapter is None else compat.adapter_outputs(projection.adapter):
        yield Weight(up, "weight", rows)
        owners.append((up, "bias"))
    for owner, name in owners:
        if isinstance(getattr(owner, name, None), Tensor):
            yield Weight(owner, name, rows)


@dataclass(frozen=True)
class _Norm:
    """A norm that learns `size` entries, one for each component of one head or of all."""

    module: nn.Module
    size: int

    def weights(self, heads: int, head_dim: int, exponent: float) -> list[Weight]:
        """Its weight and its bias; one that all heads share is that of the first."""
        head = torch.arange(self.size, device="cpu") // head_dim
        rows = Rows(head, torch.full((self.size,), exponent, device="cpu"), heads)
        biased = isinstance(getattr(self.module, "bias", None), Tensor)
        weight = Weight(self.module, "weight", rows, offset=_offset(self.module))
        return [weight, *([Weight(self.module, "bias", rows)] if biased else [])]


def _learned(module: nn.Module, name: str, heads: int, head_dim: int) -> _Norm | None:
    """The norm of this name, if it learns an entry for each component, of one head or of all."""
    norm = getattr(module, name, None)
    weight = getattr(norm, "weight", None)
    if not isinstance(norm, nn.Module) or not isinstance(weight, Tensor) or weight.dim() != 1:
        return None
    return _Norm(norm, weight.numel()) if weight.numel() in (head_dim, heads * head_dim) else None


@torch.no_grad()
def _offset(norm: nn.Module) -> float:
    """The number that a norm adds to its weight, 0 or 1: seen from what it returns for weights of 0, 1 and 2."""
    state = dict(chain(norm.named_parameters(), norm.named_buffers()))
    on_cpu = {name: torch.zeros(tensor.shape, device="cpu") for name, tensor in state.items()}
    tokens = torch.linspace(-1, 2, on_cpu["weight"].numel(), device="cpu")[None]
    try:
        zero, one, two = (
            torch.func.functional_call(norm, {**on_cpu, "weight": on_cpu["weight"] + value}, (tokens,))
            for value in (0, 1, 2)
        )
    except (TypeError, ValueError, RuntimeError) as error:
        raise NoScalingError(f"its {type(norm).__name__} does not run alone ({error})") from error
    for offset in (0.0, 1.0):
        parts = zero - offset * (one - zero), two - 2 * one + zero
        if all(torch.allclose(part, torch.zeros_like(part), atol=1e-4) for part in parts):
            return offset
    raise NoScalingError(f"the output of its {type(norm).__name__} is not proportional to its weight")
