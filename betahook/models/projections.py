"""Where W_q and W_k of an attention module are, and the spread of their entries.

transformers has no convention, but few variations: two projections side by side, or one fused projection whose rows
are all of q, then all of k, then all of v, or else q, k, v of the first head, then of the second, and so on. Latent
attention (MLA) projects down and up again: its W_q and W_k are the rows of the projections up, and W_k lacks the few
components of k that turn with the position, which all heads share and no projection up makes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from betahook.models import materialise

SEPARATE = (
    ("q_proj", "k_proj"),
    ("query", "key"),
    ("q", "k"),
    ("q_lin", "k_lin"),
    ("linear_q", "linear_k"),
    ("Wq", "Wk"),
    ("wq", "wk"),
    ("to_q", "to_k"),
    ("query_proj", "key_proj"),
    ("project_q", "project_k"),
    ("projection_query", "projection_key"),
    ("q_head", "k_head"),
)
FUSED = ("c_attn", "qkv_proj", "qkv", "Wqkv", "query_key_value", "in_proj", "att_proj")
INTERLEAVED = {
    "BloomAttention",
    "DisentangledSelfAttention",
    "GPTNeoXAttention",
    "GPTNeoXJapaneseAttention",
    "PersimmonAttention",
}
"""Classes whose fused projection holds q, k and v of one head after another."""
WRAPPED = ("linear", "base_layer")
"""Attributes under which a wrapper module keeps the linear module that owns the weight; the second is an adapter's."""


@dataclass(frozen=True)
class Part:
    """Those rows of a parameter that belong to q or k.

    Attributes:
        parameter: a weight or a bias.
        whole: all of it, as a view `[out, columns]`.
        rows: which rows, `[heads, d_k]`; those of one head need not lie side by side with those of the next.
    """

    parameter: nn.Parameter
    whole: Tensor
    rows: Tensor

    def read(self) -> Tensor:
        """A copy of the entries, `[heads, d_k, columns]`."""
        return self.whole[self.rows]

    def write(self, entries: Tensor) -> None:
        """Set them."""
        self.whole[self.rows] = entries


@dataclass(frozen=True)
class Projection:
    """The part of a linear map that makes q, or k.

    Attributes:
        module: the module that owns the weight and sees the input.
        select: takes the rows that belong to q or k out of the weight `[out, d_x]`, as `[heads, d_k, d_x]`.
        adapter: what stands between the attention module and `module` and adds to what that returns, if anything does.
        prefix: of the names "weight" and "bias" in the module.
        argument: which of the module's positional arguments is the input.
    """

    module: nn.Module
    select: Callable[[Tensor], Tensor]
    adapter: nn.Module | None = None
    prefix: str = ""
    argument: int = 0

    @property
    def stored(self) -> Tensor:
        """The weight that holds W_q or W_k, as the module stores it."""
        stored = getattr(self.module, f"{self.prefix}weight")
        assert isinstance(stored, Tensor)
        return stored

    @property
    def width(self) -> int:
        """d_x."""
        width = getattr(self.module, "in_features", None)  # what is quantised may be stored in another shape
        return width if isinstance(width, int) else _out_by_in(self.module, self.stored).shape[1]

    @property
    def obstacle(self) -> str | None:
        """Why `entries` is out of reach, None where it is not."""
        return materialise.obstacle(self.stored, self.module, self.adapter)

    @property
    def is_sharded(self) -> bool:
        """Whether every rank must take part in reading `entries`."""
        return materialise.is_sharded(self.stored)

    @property
    def entries(self) -> Tensor:
        """W_q or W_k as it acts, `[heads, d_k, d_x]` in floating point: gathered, dequantised, with its adapter."""
        return self.select(_out_by_in(self.module, materialise.read(self.stored, self.module, self.adapter)))

    def parts(self) -> Iterator[Part]:
        """W_q or W_k in the weight and, where there is one, in the bias."""
        weight, bias = self.stored, getattr(self.module, f"{self.prefix}bias", None)
        assert isinstance(weight, nn.Parameter)
        whole = _out_by_in(self.module, weight.detach())
        rows = self.select(torch.arange(len(whole), device=whole.device)[:, None]).squeeze(-1)
        yield Part(weight, whole, rows)
        if isinstance(bias, nn.Parameter):
            yield Part(bias, bias.detach()[:, None], rows)


def matrix(module: nn.Module) -> Tensor:
    """The weight of a linear module as `[out, in]`; `Conv1D` of transformers stores it the other way round."""
    weight = module.weight
    assert isinstance(weight, Tensor)
    return _out_by_in(module, weight)


def _out_by_in(module: nn.Module, weight: Tensor) -> Tensor:
    return weight.mT if type(module).__name__ == "Conv1D" else weight


def locate(module: nn.Module, heads: int, head_dim: int) -> tuple[Projection, Projection] | None:
    """The query and key projections of an attention module, or None where they are not of a known form."""

    def rows(start: int, count: int) -> Callable[[Tensor], Tensor]:
        return lambda weight: weight[start : start + count * head_dim].unflatten(0, (count, head_dim))

    def interleaved(part: int) -> Callable[[Tensor], Tensor]:
        return lambda weight: weight.unflatten(0, (heads, 3, head_dim))[:, part]

    def projection(name: str, select: Callable[[Tensor], Tensor]) -> Projection | None:
        child = getattr(module, name, None)
        linear = _linear(child)
        return None if linear is None else Projection(linear, select, child if hasattr(child, "base_layer") else None)

    if isinstance(module, nn.MultiheadAttention):
        if module.in_proj_weight is None:  # q, k and v have other widths, and a weight each
            return None
        whole = Projection(module, rows(0, heads), prefix="in_proj_")
        return whole, replace(whole, select=rows(heads * head_dim, heads), argument=1)
    for query_name, key_name in SEPARATE:
        # A gated query projection has further rows behind those of each head.
        query = projection(query_name, lambda weight: weight.unflatten(0, (heads, -1))[:, :head_dim])
        key = projection(key_name, lambda weight: weight.unflatten(0, (-1, head_dim)))
        if query is not None and key is not None:
            return query, key
    unturned = getattr(module, "qk_nope_head_dim", None)
    latent = projection("kv_b_proj", lambda weight: weight.unflatten(0, (heads, -1))[:, :unturned])
    query = projection("q_b_proj", rows(0, heads)) or projection("q_proj", rows(0, heads))
    if unturned is not None and latent is not None and query is not None:
        return query, latent
    for name in FUSED:
        fused = projection(name, rows(0, heads))
        if fused is None:
            continue
        size = getattr(fused.module, "out_features", None) or matrix(fused.module).shape[0]
        cross = projection("q_attn", rows(0, heads))
        if cross is not None:  # GPT-2's cross-attention: q apart, k and v fused
            return cross, fused
        if type(module).__name__ == "CodeGenAttention":  # q, v and k of each of four shards
            return replace(fused, select=_sharded(heads, head_dim, 0)), replace(
                fused, select=_sharded(heads, head_dim, 2)
            )
        if getattr(module, "new_decoder_architecture", False):  # Falcon: the queries of a group, its key, its value
            groups = module.num_kv_heads
            assert isinstance(groups, int)
            return replace(fused, select=_grouped(groups, head_dim, slice(-2))), replace(
                fused, select=_grouped(groups, head_dim, slice(-2, -1))
            )
        if _interleaved(module) and size == 3 * heads * head_dim:
            return replace(fused, select=interleaved(0)), replace(fused, select=interleaved(1))
        key_heads = (size // head_dim - heads) // 2
        if key_heads > 0 and (heads + 2 * key_heads) * head_dim == size:
            return fused, replace(fused, select=rows(heads * head_dim, key_heads))
    return None


def _interleaved(module: nn.Module) -> bool:
    name = type(module).__name__
    return name in INTERLEAVED or (name in ("GPTBigCodeAttention", "FalconAttention") and not module.multi_query)


def _sharded(heads: int, head_dim: int, part: int) -> Callable[[Tensor], Tensor]:
    return lambda weight: weight.unflatten(0, (4, 3, heads // 4, head_dim))[:, part].flatten(0, 1)


def _grouped(groups: int, head_dim: int, part: slice) -> Callable[[Tensor], Tensor]:
    return lambda weight: weight.unflatten(0, (groups, -1, head_dim))[:, part].flatten(0, 1)


def _linear(module: object) -> nn.Module | None:
    """The module that owns the matrix of a projection, itself or the one it wraps."""
    if not isinstance(module, nn.Module):
        return None
    # Inside first: an adapter shows the weight of what it wraps as its own, but not how that is stored.
    inner = next((inner for name in WRAPPED if (inner := _linear(getattr(module, name, None))) is not None), None)
    weight = getattr(module, "weight", None)
    return module if inner is None and isinstance(weight, Tensor) and weight.dim() == 2 else inner


def entry_sums(weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Number, sum and sum of squares of the entries per head: `[heads, d_k, d_x]` to three times `[heads]`."""
    # In place, in float32 or better, and along memory: a copy of a transposed weight takes longer than its sums.
    dtype = torch.promote_types(weight.dtype, torch.float32)
    along = 1 if weight.stride(1) == 1 else 2
    total = weight.sum(2, dtype=dtype).sum(1)
    square = torch.linalg.vector_norm(weight, dim=along, dtype=dtype).square().sum(1)
    return torch.full_like(total, weight[0].numel()), total, square
