"""The attention layers of a model: found by looking at their code, addressed as slices of flat tensors."""

from __future__ import annotations

import inspect
import math
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, NoReturn

import torch
from torch import Tensor, nn

from betahook import scores, statistics, theory, weights
from betahook.masks import Mask
from betahook.statistics import Statistics
from betahook.weights import Projection

if TYPE_CHECKING:
    from betahook.hook import Hook

HEADS = ("num_heads", "num_attention_heads", "n_heads", "n_head")
HEAD_DIM = ("qk_head_dim", "head_dim", "attention_head_size", "key_value_proj_dim", "head_size")


def calls_interface(kind: type[nn.Module]) -> bool:
    """Whether a method of a module class asks transformers for its attention function."""
    for cls in kind.__mro__:
        if cls is nn.Module:
            return False
        for member in vars(cls).values():
            code = getattr(inspect.unwrap(member) if callable(member) else None, "__code__", None)
            if code is not None and "get_interface" in code.co_names:
                return True
    return False


def unreached(model: nn.Module, reached: set[nn.Module]) -> list[str]:
    """Names of the modules whose class is called attention, but which the interface does not reach."""
    inside = {module for owner in reached for module in owner.modules()}
    return [
        f"{name or 'the model'} ({type(module).__name__})"
        for name, module in model.named_modules()
        if re.search("attention|attn", type(module).__name__, re.IGNORECASE)
        and module not in inside
        and not any(part in reached for part in module.modules())
    ]


def count_heads(module: nn.Module) -> tuple[int, int] | None:
    """Number of query heads and width d_k of each, or None where the module does not say."""

    def first(owner: object, names: tuple[str, ...]) -> int | None:
        found = (getattr(owner, name, None) for name in names)
        return next((value for value in found if isinstance(value, int) and value > 0), None)

    heads, head_dim = first(module, HEADS), first(module, HEAD_DIM)
    projection = next((p for p in (getattr(module, q, None) for q, _ in weights.SEPARATE) if p is not None), None)
    size = getattr(projection, "out_features", None)
    if heads is None and head_dim is not None:
        # The config knows about gated projections, which are wider than heads * d_k; but not every module has one.
        heads = first(getattr(module, "config", None), HEADS)
        if isinstance(size, int) and (heads is None or size % (heads * head_dim)):
            heads = size // head_dim
    if heads is not None and head_dim is None and isinstance(size, int):
        head_dim = size // heads
    return None if heads is None or head_dim is None else (heads, head_dim)


@dataclass
class State:
    """Everything that changes while a model trains, flat over all heads of all layers.

    Attributes:
        beta: float32 `[heads]`, the inverse temperature; NaN stands for the model's own.
        beta_default: float32 `[heads]`, the model's own; NaN until the first forward.
        probe: float32 `[heads]`, zeros that require grad; its gradient is the sensitivity (see `tap.ScaleQuery`).
        table: the sums since the last step, see `betahook.statistics`.
        measuring: whether this step is one of those that are measured.
        in_evaluation: whether forwards in evaluation mode are measured too.
    """

    beta: Tensor
    beta_default: Tensor
    probe: Tensor
    table: Tensor
    measuring: bool = True
    in_evaluation: bool = False

    @classmethod
    def create(cls, heads: int, device: torch.device, in_evaluation: bool) -> State:
        unknown = torch.full((heads,), torch.nan, device=device)
        probe = torch.zeros(heads, device=device, requires_grad=True)
        table = statistics.empty(heads, device)
        return cls(unknown.clone(), unknown, probe, table, in_evaluation=in_evaluation)

    def to(self, device: torch.device) -> None:
        """Follow the model to another device."""
        self.beta, self.beta_default, self.table = (
            tensor.to(device) for tensor in (self.beta, self.beta_default, self.table)
        )
        gradient = self.probe.grad
        self.probe = self.probe.detach().to(device).requires_grad_()
        if gradient is not None:
            self.probe.grad = gradient.to(device)

    @property
    def current_beta(self) -> Tensor:
        """`[heads]`, beta as it acts: the model's own where none was set."""
        return torch.where(self.beta.isnan(), self.beta_default, self.beta)

    def collect(self) -> Tensor:
        """The table with the sensitivity in it."""
        table = self.table.clone()
        if self.probe.grad is not None:
            table[statistics.ROW["sensitivity"]] = self.probe.grad
        return table

    def reset(self) -> None:
        """Start a new step."""
        self.table.zero_()
        self.probe.grad = None


class AttentionLayer:
    """One attention layer of a hooked model.

    Attributes:
        name: as in `model.named_modules()`.
        module: the attention module.
        heads: number of query heads.
        head_dim: d_k.
        hook: the hook that the layer belongs to; it lives as long as the hooked model, whoever else holds it.
    """

    hook: Hook

    def __init__(self, name: str, module: nn.Module, heads: int, head_dim: int, state: State, start: int) -> None:
        self.name = name
        self.module = module
        self.heads = heads
        self.head_dim = head_dim
        self._state = state
        self._slice = slice(start, start + heads)

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        """A copy would leave the tap without its hook, and beta with it."""
        raise TypeError(
            "a hooked model cannot be copied or pickled: fold() or detach() first, or copy its state_dict() and "
            "that of its hook"
        )

    def __repr__(self) -> str:
        return f"AttentionLayer({self.name!r}, heads={self.heads}, head_dim={self.head_dim})"

    @property
    def projections(self) -> tuple[Projection, Projection] | None:
        """Where W_q and W_k are now, adapters come and go; None where the module keeps them in no known form."""
        return weights.locate(self.module, self.heads, self.head_dim)

    @property
    def beta_default(self) -> float | None:
        """The inverse temperature that the model itself applies; None before the first forward."""
        value = self._state.beta_default[self._slice][0].item()
        return None if value != value else value

    @property
    def beta(self) -> float | Tensor | None:
        """The inverse temperature in force: a float, or a tensor `[heads]` where the heads differ.

        None before the first forward if none was set: the model's own is known only then. Assign a positive number,
        or a tensor of `heads` positive numbers, to set it.
        """
        values = self._state.current_beta[self._slice].detach().cpu()
        if bool((values == values[0]).all()):
            return values[0].item()
        return None if bool(values.isnan().all()) else values

    @beta.setter
    def beta(self, value: float | Tensor) -> None:
        new = torch.as_tensor(value, dtype=torch.float32).detach()
        if new.shape not in ((), (1,), (self.heads,)):
            raise ValueError(
                f"beta of {self.name!r} must be a number or a tensor of {self.heads} numbers, one a head; "
                f"got a tensor of shape {list(new.shape)}"
            )
        if not bool((new.isfinite() & (new > 0)).all()):
            raise ValueError(f"beta of {self.name!r} must be positive and finite; got {value}")
        self._state.beta[self._slice] = new.to(self._state.beta.device)

    @property
    def statistics(self) -> Statistics:
        """Statistics of all forwards since the last `hook.step()`, pooled over the heads; scalar tensors."""
        table = self._table()
        return Statistics.from_table(statistics.pool(table, torch.tensor([self.heads], device=table.device)))[0]

    @property
    def head_statistics(self) -> Statistics:
        """The same for each head; tensors `[heads]`."""
        return Statistics.from_table(self._table())

    def _table(self) -> Tensor:
        table = self._state.collect()
        self.weigh(table, gather=False)
        return table[:, self._slice]

    @property
    def current_gain(self) -> Tensor:
        """`beta / beta_default`, `[heads]`: 1 where beta is the model's own, NaN where that is not known yet."""
        beta, default = self._state.beta[self._slice], self._state.beta_default[self._slice]
        return torch.where(beta.isnan(), 1.0, beta / default)

    @contextmanager
    def acting(self, gain: Tensor) -> Iterator[None]:
        """Let another `beta / beta_default` `[heads]` act for a while."""
        state, kept = self._state, self._state.beta
        state.beta = kept.clone()
        state.beta[self._slice] = (gain * state.beta_default[self._slice]).to(kept)
        try:
            yield
        finally:
            state.beta = kept

    # What follows is called by the tap.

    @property
    def measuring(self) -> bool:
        """Whether a forward of the module is to be recorded now."""
        return self._state.measuring and (self.module.training or self._state.in_evaluation)

    def gain(self, scaling: float, device: torch.device) -> Tensor:
        """`beta / beta_default` as `[heads, 1, 1]`, exactly 1 where none was set; notes the model's own `scaling`."""
        state = self._state
        if state.beta.device.type == "cpu" and device.type != "cpu":
            state.to(device)
        with torch.no_grad():
            # A quotient of two tensors: dividing by a Python number may multiply by its rounded reciprocal.
            state.beta_default[self._slice].fill_(scaling)
            return self.current_gain.to(device).view(-1, 1, 1)

    @property
    def probe(self) -> Tensor:
        return self._state.probe[self._slice]

    @torch.no_grad()
    def record(
        self, query: Tensor, key: Tensor, mask: Mask, *, position_bias: Tensor | None, softcap: float | None
    ) -> None:
        """Add one attention call; `query [batch, heads, queries, d_k]` and `key` as the score product gets them."""
        query, key = query.detach(), key.detach()
        of_query, of_key = scores.components(query, mask.queries), scores.components(key, mask.keys)
        beta = self._state.current_beta[self._slice].to(query.device)
        rows = scores.row_sums(query, key, mask, beta, position_bias=position_bias, softcap=softcap)
        exact = scores.score_sums(query, key, mask, of_query.mean, of_key.mean)
        sums = scores.choose(exact, rows.scores, mask)
        groups = self.heads // key.shape[1]
        key_mean, key_variance = (x.repeat_interleave(groups, 0) for x in (of_key.mean, of_key.variance))
        independent = theory.independent_variance(of_query.mean, of_query.variance, key_mean, key_variance)
        pairs = sums.pairs
        self._add(
            pairs=pairs,
            exact_pairs=pairs * scores.is_exact(mask, query.shape[2]),
            score=sums.score,
            score_square=sums.score_square,
            rows=rows.rows,
            entropy=rows.entropy,
            query_mean_square=pairs * of_query.mean.square().mean(-1),
            query_variance=pairs * of_query.variance.mean(-1),
            key_mean_square=pairs * key_mean.square().mean(-1),
            key_variance=pairs * key_variance.mean(-1),
            independent_variance=pairs * independent,
            max_score=rows.max_score,
        )

    @torch.no_grad()
    def record_input(self, inputs: Tensor, of: str) -> None:
        """Add the entries that enter the projection of the `of` "query" or "key"."""
        flat = scores.at_least_float32(inputs.detach().flatten())
        self._add(
            **{
                f"{of}_inputs": torch.full((), flat.numel(), device=flat.device),
                f"{of}_input": flat.sum(),
                f"{of}_input_square": torch.dot(flat, flat),
            }
        )

    @torch.no_grad()
    def weigh(self, table: Tensor, *, gather: bool = True) -> None:
        """Write the sums of the entries of W_q and W_k into the columns of this layer of `table`.

        Weights out of reach are left out, as are sharded ones unless `gather`, for which every rank must call this.
        """
        for of, projection in zip(("query", "key"), self.projections or (), strict=False):
            if projection.obstacle is not None or (projection.is_sharded and not gather):
                continue
            sums = weights.entry_sums(projection.entries)
            for name, value in zip((f"{of}_weights", f"{of}_weight", f"{of}_weight_square"), sums, strict=True):
                table[statistics.ROW[name], self._slice] = value.repeat_interleave(self.heads // len(value)).to(table)

    def _add(self, **values: Tensor) -> None:
        statistics.add(self._state.table[:, self._slice], values)


class Layers(Mapping[str, AttentionLayer]):
    """The hooked layers by module name."""

    def __init__(self, layers: list[AttentionLayer]) -> None:
        self._layers = {layer.name: layer for layer in layers}

    def __getitem__(self, name: str) -> AttentionLayer:
        if name not in self._layers:
            raise KeyError(f"no hooked layer is called {name!r}; there are {', '.join(self._layers)}")
        return self._layers[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._layers)

    def __len__(self) -> int:
        return len(self._layers)


@dataclass(frozen=True)
class Units:
    """What has one beta: every layer, or every head. A unit is a run of heads in the flat tensors.

    Attributes:
        lengths: heads in each unit, `[units]`.
        heads: their sum.
        head_dim: d_k, `[units]`.
        query_width, key_width: d_x of the two projections, `[units]`; NaN where they were not found.
    """

    lengths: Tensor
    heads: int
    head_dim: Tensor
    query_width: Tensor
    key_width: Tensor

    @classmethod
    def of(cls, layers: Layers, *, per_head: bool, device: torch.device) -> Units:
        rows = []
        for layer in layers.values():
            widths = [p.width for p in layer.projections] if layer.projections else [math.nan, math.nan]
            rows += (
                layer.heads * [[1, layer.head_dim, *widths]] if per_head else [[layer.heads, layer.head_dim, *widths]]
            )
        lengths, head_dim, query_width, key_width = torch.tensor(rows, dtype=torch.float32, device=device).T
        heads = sum(layer.heads for layer in layers.values())
        return cls(lengths.long(), heads, head_dim, query_width, key_width)

    def first(self, values: Tensor) -> Tensor:
        """`[heads] -> [units]`, the value of the first head of each."""
        return values[self.lengths.cumsum(0) - self.lengths]

    def spread(self, values: Tensor) -> Tensor:
        """`[units] -> [heads]`."""
        return values.repeat_interleave(self.lengths, output_size=self.heads)

    def observe(self, table: Tensor) -> Statistics:
        """Statistics of each unit from sums over all heads, `[quantities, heads]`."""
        return Statistics.from_table(statistics.pool(table, self.lengths))

    def projected_variances(self, observed: Statistics) -> tuple[Tensor, Tensor]:
        """Variance of a component of q, and of k, that the weights and their input predict, `[units]` each."""
        return (
            theory.projected_variance(self.query_width, observed.input_std_q, observed.weight_std_q),
            theory.projected_variance(self.key_width, observed.input_std_k, observed.weight_std_k),
        )

    def predicted_std(self, observed: Statistics) -> Tensor:
        """What W_q, W_k and their inputs predict, `[units]`; see `theory.weights_std`."""
        return theory.weights_std(self.head_dim, *self.projected_variances(observed))
