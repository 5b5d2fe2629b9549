"""Where W_q and W_k of an attention module are, and the spread of their entries.

transformers has no convention, but few variations: two projections side by side, or one fused projection whose rows
are all of q, then all of k, then all of v, or else q, k, v of the first head, then of the second, and so on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

SEPARATE = (
    ("q_proj", "k_proj"),
    ("query", "key"),
    ("q", "k"),
    ("q_lin", "k_lin"),
    ("linear_q", "linear_k"),
    ("Wq", "Wk"),
    ("wq", "wk"),
    ("to_q", "to_k"),
)
FUSED = ("c_attn", "qkv_proj", "qkv", "Wqkv", "query_key_value")
INTERLEAVED = {"GPTNeoXAttention", "PersimmonAttention"}
"""Classes whose fused projection holds q, k and v of one head after another."""
INSIDE = ("linear", "base_layer")
"""Attributes under which a wrapper module keeps the linear module that owns the weight; the second is an adapter's."""


@dataclass(frozen=True)
class Projection:
    """The part of a linear module that makes q, or k.

    Attributes:
        module: the module that owns the weight and sees the input.
        select: the rows that belong to q or k, out of the weight `[out, d_x]`, as a view `[heads, d_k, d_x]`.
        wrapped: whether an adapter stands between the attention module and `module` and adds to what it returns.
    """

    module: nn.Module
    select: Callable[[Tensor], Tensor]
    wrapped: bool = False

    @property
    def weight(self) -> Tensor:
        """W_q or W_k, `[heads, d_k, d_x]`, detached; a view of the parameter."""
        return self.select(matrix(self.module).detach())

    def parts(self) -> Iterator[tuple[nn.Parameter, Tensor]]:
        """Weight and, where there is one, bias: each with the view `[heads, d_k, d_x or 1]` of its rows of q or k."""
        weight, bias = self.module.weight, getattr(self.module, "bias", None)
        assert isinstance(weight, nn.Parameter)
        yield weight, self.weight
        if isinstance(bias, nn.Parameter):
            yield bias, self.select(bias.detach()[:, None])


def matrix(module: nn.Module) -> Tensor:
    """The weight of a linear module as `[out, in]`; `Conv1D` of transformers stores it the other way round."""
    weight = module.weight
    assert isinstance(weight, Tensor)
    return weight.mT if type(module).__name__ == "Conv1D" else weight


def locate(module: nn.Module, heads: int, head_dim: int) -> tuple[Projection, Projection] | None:
    """The query and key projections of an attention module, or None where they are not of a known form."""

    def rows(start: int, count: int) -> Callable[[Tensor], Tensor]:
        return lambda weight: weight[start : start + count * head_dim].unflatten(0, (count, head_dim))

    def interleaved(part: int) -> Callable[[Tensor], Tensor]:
        return lambda weight: weight.unflatten(0, (heads, 3, head_dim))[:, part]

    for names in SEPARATE:
        query, key = (_linear(getattr(module, name, None)) for name in names)
        if query is not None and key is not None:
            # A gated query projection has further rows behind those of each head.
            adapted = hasattr(getattr(module, names[0]), "base_layer")
            return (
                Projection(query, lambda weight: weight.unflatten(0, (heads, -1))[:, :head_dim], adapted),
                Projection(key, lambda weight: weight.unflatten(0, (-1, head_dim))),
            )
    for name in FUSED:
        fused = _linear(getattr(module, name, None))
        if fused is None:
            continue
        size = matrix(fused).shape[0]
        adapted = hasattr(getattr(module, name), "base_layer")
        cross = _linear(getattr(module, "q_attn", None))
        if cross is not None:  # GPT-2's cross-attention: q apart, k and v fused
            return Projection(cross, rows(0, heads), hasattr(module.q_attn, "base_layer")), Projection(
                fused, rows(0, heads)
            )
        if _interleaved(module) and size == 3 * heads * head_dim:
            return Projection(fused, interleaved(0), adapted), Projection(fused, interleaved(1))
        key_heads = (size // head_dim - heads) // 2
        if key_heads > 0 and (heads + 2 * key_heads) * head_dim == size:
            return Projection(fused, rows(0, heads), adapted), Projection(fused, rows(heads * head_dim, key_heads))
    return None


def _interleaved(module: nn.Module) -> bool:
    name = type(module).__name__
    return name in INTERLEAVED or (name == "GPTBigCodeAttention" and not module.multi_query)


def _linear(module: object) -> nn.Module | None:
    """The module that owns the matrix of a projection, itself or the one it wraps."""
    if not isinstance(module, nn.Module):
        return None
    weight = getattr(module, "weight", None)
    if isinstance(weight, Tensor):
        return module if weight.dim() == 2 else None
    return next((inner for name in INSIDE if (inner := _linear(getattr(module, name, None))) is not None), None)


def entry_sums(weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Number, sum and sum of squares of the entries per head: `[heads, d_k, d_x]` to three times `[heads]`."""
    flat = weight.flatten(1).to(torch.promote_types(weight.dtype, torch.float32))
    return torch.full_like(flat[:, 0], flat.shape[1]), flat.sum(1), torch.linalg.vecdot(flat, flat)
