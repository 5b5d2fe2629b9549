"""The attention layers of a model, addressed as slices of flat tensors."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NoReturn

import torch
from torch import Tensor

from betahook import theory
from betahook.measure import components, scores, statistics
from betahook.measure.dense import pair_sums
from betahook.measure.masks import Mask
from betahook.measure.rows import RowSums, choose, is_exact, row_sums
from betahook.measure.scores import Components
from betahook.measure.statistics import Statistics
from betahook.models import projections
from betahook.models.discovery import Found
from betahook.models.families import facts
from betahook.models.projections import Projection

if TYPE_CHECKING:
    from betahook.hook import Hook

ATTRIBUTE = "_betahook"
"""Where a hooked module keeps its `AttentionLayer`."""


@dataclass
class State:
    """Everything that changes while a model trains, flat over all heads of all layers.

    Forward and `hook.step()` write into the same tensors all the time: a CUDA graph knows them by their addresses.

    Attributes:
        beta: float32 `[heads]`, the inverse temperature; NaN stands for the model's own.
        beta_default: float32 `[heads]`, the model's own; NaN until the first forward.
        probe: float32 `[heads]`, zeros that require grad; its gradient is the sensitivity (see `gain.ScaleQuery`).
        table: the sums since the last step, see `betahook.measure.statistics`.
        moments: those of q and k, `[4, sum of widths]`, see `betahook.measure.components`.
        widths: `[heads]`, d_k of each.
        measuring: whether this step is one of those that are measured.
        paused: whether neither forwards nor their backwards are measured.
        in_evaluation: whether forwards in evaluation mode are measured too.
        seen: whether any attention of the model has passed the tap.
        recorded: whether any has been measured.
    """

    beta: Tensor
    beta_default: Tensor
    probe: Tensor
    table: Tensor
    moments: Tensor
    widths: Tensor
    measuring: bool = True
    paused: bool = False
    in_evaluation: bool = False
    seen: bool = False
    recorded: bool = False

    @classmethod
    def create(cls, widths: list[int], device: torch.device, in_evaluation: bool) -> State:
        """The state of `len(widths)` heads; `widths` holds d_k of each."""
        heads = len(widths)
        unknown = torch.full((heads,), torch.nan, dtype=torch.float32, device=device)
        return cls(
            beta=unknown.clone(),
            beta_default=unknown,
            probe=torch.zeros(heads, dtype=torch.float32, device=device, requires_grad=True),
            table=statistics.empty(heads, device),
            moments=components.empty(sum(widths), device),
            widths=torch.tensor(widths, device=device),
            in_evaluation=in_evaluation,
        )

    @torch.inference_mode(False)
    def to(self, device: torch.device) -> None:
        """Follow the model to another device."""
        self.beta, self.beta_default, self.table, self.moments, self.widths = (
            tensor.to(device) for tensor in (self.beta, self.beta_default, self.table, self.moments, self.widths)
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
            table[statistics.ROW["sensitivity"]] = self.probe.grad.detach()
        return table

    def reset(self) -> None:
        """Start a new step."""
        self.table.zero_()
        self.moments.zero_()
        self.probe.grad = None


class AttentionLayer:
    """One attention layer of a hooked model.

    Attributes:
        name: as in `model.named_modules()`, without what wrappers add to that.
        module: the attention module.
        heads: number of query heads.
        head_dim: d_k.
        route: where the module's scores come from, see `betahook.models.discovery.Found`.
        facts: what is known of the module's class.
        hook: the hook that the layer belongs to; it lives as long as the hooked model, whoever else holds it.
    """

    hook: Hook

    def __init__(self, name: str, found: Found, state: State, start: int, component: int) -> None:
        """Of the layer whose heads begin at `start`, and their components at `component`, in the flat tensors."""
        self.name = name
        self.module = found.module
        self.heads = found.heads
        self.head_dim = found.head_dim
        self.route = found.route
        self.facts = facts(found.module)
        self._state = state
        self._slice = slice(start, start + found.heads)
        self._components = slice(component, component + found.heads * found.head_dim)
        # Where this rank writes: to all of that, unless other ranks compute the other heads.
        self._here, self._components_here, self._parts = self._slice, self._components, 1

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
        return projections.locate(self.module, self.heads, self.head_dim)

    @property
    def remarks(self) -> list[str]:
        """What of this layer is not measured, or not as one would think, in words."""
        remarks = [self.facts.remark] if self.facts.remark else []
        if self.projections is None:
            remarks.append("W_q and W_k have no known form, their std is not measured")
        return remarks

    @property
    def obstacles(self) -> list[str]:
        """Why the std of W_q or W_k is out of reach now, in words."""
        return [
            f"the std of {name} is not measured, it is {projection.obstacle}"
            for name, projection in zip(("W_q", "W_k"), self.projections or (), strict=False)
            if projection.obstacle is not None
        ]

    @property
    def beta_default(self) -> float:
        """The inverse temperature that the model itself applies, a number like `beta`; NaN before the first forward."""
        return self._mean_over_heads(self._state.beta_default)

    @property
    def head_beta_default(self) -> Tensor:
        """The inverse temperature that the model itself applies to each head, `[heads]`, float32 on the CPU."""
        return self._state.beta_default[self._slice].to("cpu", copy=True)

    @property
    def beta(self) -> float:
        """The inverse temperature; the geometric mean where the heads differ. Assign a number to set it.

        A number is that of all heads, also where the model's own differ. NaN before the first forward if none was set:
        the model's own is known only then. In force until `detach`; after it, what it was.
        """
        return self._mean_over_heads(self._state.current_beta)

    @beta.setter
    def beta(self, value: float) -> None:
        new = torch.as_tensor(value, dtype=torch.float32)
        if new.numel() != 1:
            raise ValueError(
                f"beta of {self.name!r} must be one number, got a tensor of shape {list(new.shape)}; assign a number "
                "for each head to head_beta"
            )
        self._set_beta(new.flatten(), value)

    @property
    def head_beta(self) -> Tensor:
        """The inverse temperature of each head, `[heads]`, float32 on the CPU. Assign such a tensor to set it."""
        return self._state.current_beta[self._slice].cpu()

    @head_beta.setter
    def head_beta(self, value: Tensor) -> None:
        new = torch.as_tensor(value, dtype=torch.float32)
        if new.shape != (self.heads,):
            raise ValueError(
                f"head_beta of {self.name!r} must be {self.heads} numbers, one a head; got a tensor of shape "
                f"{list(new.shape)}"
            )
        self._set_beta(new, value)

    def _set_beta(self, new: Tensor, given: object) -> None:
        if not bool((new.isfinite() & (new > 0)).all()):
            raise ValueError(f"beta of {self.name!r} must be positive and finite; got {given}")
        if self.route != "interface" and math.isnan(self.beta_default):
            raise RuntimeError(
                f"beta of {self.name!r} cannot be set before the first forward: only that shows the model's own, by "
                "which this module scales its scores itself. Run a forward first"
            )
        self._state.beta[self._slice] = new.detach().to(self._state.beta.device)

    def _mean_over_heads(self, values: Tensor) -> float:
        return float(statistics.geometric_mean(values[self._slice].cpu(), torch.tensor([self.heads], device="cpu")))

    @property
    def statistics(self) -> Statistics:
        """Statistics of all forwards since the last `hook.step()`, pooled over the heads; scalar tensors.

        Of this rank alone: its batches and, under tensor parallelism, its heads.
        """
        table = self._table()
        return Statistics.from_table(statistics.pool(table, torch.tensor([self.heads], device=table.device)))[0]

    @property
    def head_statistics(self) -> Statistics:
        """The same for each head; tensors `[heads]`."""
        return Statistics.from_table(self._table())

    def _table(self) -> Tensor:
        table = self._state.collect()
        components.describe(table, self._state.moments, self._state.widths)
        self.write_weight_sums(table)
        return table[:, self._slice]

    @property
    def current_gain(self) -> Tensor:
        """`beta / beta_default`, `[heads]`: 1 where beta is the model's own, NaN where that is not known yet."""
        return _gain(self._state.beta[self._slice], self._state.beta_default[self._slice])

    @contextmanager
    def acting(self, gain: Tensor) -> Iterator[None]:
        """Let another `beta / beta_default` `[heads]` act for a while."""
        beta, default = (values[self._slice] for values in (self._state.beta, self._state.beta_default))
        kept = beta.clone()
        beta.copy_(gain * default)
        try:
            yield
        finally:
            beta.copy_(kept)

    # What follows is called by the tap.

    @property
    def measuring(self) -> bool:
        """Whether a forward of the module is to be recorded now."""
        state = self._state
        return state.measuring and not state.paused and (self.module.training or state.in_evaluation)

    @property
    def paused(self) -> bool:
        """Whether the backward of a forward that runs now shall give no sensitivity."""
        return self._state.paused

    @torch.no_grad()
    def note_default(self, beta: float | Tensor) -> None:
        """Remember the inverse temperature that the model itself applies: one, or one a head."""
        self._state.seen = True
        own = self._state.beta_default[self._slice]
        own.copy_(beta.flatten()) if isinstance(beta, Tensor) else own.fill_(beta)

    def follow(self, device: torch.device) -> None:
        """Go where the model went."""
        if self._state.beta.device.type == "cpu" and device.type != "cpu":
            self._state.to(device)

    def select_local_heads(self, heads: int) -> bool:
        """Point the layer at the heads that this rank computes; False if a query of so many is none of this layer.

        Under tensor parallelism a rank has one of as many equal runs of heads as there are ranks, in their order.
        """
        if heads == self._here.stop - self._here.start:
            return True
        mesh = getattr(self.projections[0].stored, "device_mesh", None) if self.projections else None
        if mesh is None or heads * mesh.size(mesh.ndim - 1) != self.heads:
            return False
        first = mesh.get_local_rank(mesh.ndim - 1) * heads  # the innermost dimension, further out data is parallel
        self._here = _part(self._slice, first, heads)
        self._components_here = _part(self._components, first * self.head_dim, heads * self.head_dim)
        self._parts = self.heads // heads
        return True

    def local_gain(self, default: float | Tensor | None) -> Tensor:
        """`current_gain` of the heads that this rank computes.

        By the `default` that the call shows where it is a number: compiled graphs may compute the gain once more in the
        backward, when the layers after this one have written theirs into the tensor of all defaults.
        """
        beta, noted = self._state.beta[self._here], self._state.beta_default[self._here]
        return _gain(beta, torch.full_like(beta, default) if isinstance(default, float) else noted)

    @property
    def probe(self) -> Tensor:
        """Zeros whose gradient is the sensitivity, of the heads that this rank computes.

        Scaled by the number of tensor-parallel ranks: the reduction takes the mean over all ranks, and only one of them
        computes a head.
        """
        probe = self._state.probe[self._here]
        return probe if self._parts == 1 else self._parts * probe

    @torch.no_grad()
    def record(
        self, query: Tensor, key: Tensor, mask: Mask, *, position_bias: Tensor | None, softcap: float | None
    ) -> None:
        """Add one attention call; `query [batch, heads, queries, d_k]` and `key` as the score product gets them."""
        if query.numel() == 0 or key.numel() == 0:
            return
        query, key = query.detach(), key.detach()
        of_query = scores.components(query, mask.queries)
        beta = self._state.current_beta[self._here].to(query.device)
        with scores.no_autocast(query.device):
            sampled = row_sums(query, key, mask, beta, position_bias=position_bias, softcap=softcap)
            exact, of_key = scores.score_sums(query, key, mask, of_query.mean)
        sums = replace(sampled, scores=choose(exact, sampled.scores, mask))
        self._add_sums(sums, is_exact(mask, query.shape[2]), of_query, of_key)

    @torch.no_grad()
    def record_pairs(
        self,
        raw: Tensor,
        logits: Tensor,
        allowed: Tensor,
        operands: tuple[Tensor, Tensor],
        prescale: float | Tensor,
    ) -> None:
        """Add one attention whose scores exist: `raw`, `logits` and `allowed` are `[batch, heads, queries, keys]`.

        `operands` are q and k, `[1, heads, tokens, d_k]`. `raw` carries the factor `prescale`, which is no part of a
        score, and the gain.
        """
        if raw.numel() == 0:
            return
        gain = self.current_gain.to(raw.device).view(-1, 1, 1)
        sums = pair_sums(raw / (prescale * gain), logits, allowed)
        of_query, of_key = (
            scores.components(tokens, _valid(allowed.any(axis), tokens))
            for tokens, axis in zip(operands, (-1, -2), strict=True)
        )
        self._add_sums(sums, True, of_query, of_key)

    @torch.no_grad()
    def record_input(self, inputs: Tensor, *of: str) -> None:
        """Add the entries that enter the projection of the `of` "query", "key" or both."""
        # A DTensor under tensor parallelism, the same on all ranks.
        inputs = inputs.to_local() if hasattr(inputs, "to_local") else inputs
        self.follow(inputs.device)
        flat = scores.at_least_float32(inputs.detach().flatten())
        sums = {
            "inputs": torch.full((), flat.numel(), device=flat.device),
            "input": flat.sum(),
            "input_square": torch.dot(flat, flat),
        }
        self._add(**{f"{which}_{name}": value for which in of for name, value in sums.items()})

    @torch.no_grad()
    def write_weight_sums(self, table: Tensor, *, sharded: bool = False) -> None:
        """Write the sums of the entries of W_q and W_k, as they are now, into the columns of this layer of `table`.

        Of weights that are whole, or else of those that are sharded, for which every rank must call this; what is out
        of reach is left out.
        """
        for of, projection in zip(("query", "key"), self.projections or (), strict=False):
            if projection.is_sharded is not sharded or projection.obstacle is not None:
                continue
            sums = projections.entry_sums(projection.entries)
            for name, value in zip((f"{of}_weights", f"{of}_weight", f"{of}_weight_square"), sums, strict=True):
                table[statistics.ROW[name], self._slice] = value.repeat_interleave(self.heads // len(value)).to(table)

    @torch.no_grad()
    def spectral_ratio(self) -> Tensor:
        """The larger `theory.spectral_ratio` of W_q and W_k, a scalar; NaN where they are out of reach.

        Every rank must call this, to gather what is sharded.
        """
        projections = self.projections
        if projections is None or any(projection.obstacle for projection in projections):
            return self._state.beta.new_full((), math.nan)
        query, key = (theory.spectral_ratio(projection.entries.flatten(0, 1)) for projection in projections)
        return torch.maximum(query, key)

    def _add_sums(self, sums: RowSums, exact: bool | Tensor, query: Components, key: Components) -> None:
        """Add the sums of one attention call and, unless its d_k is another than the module says, those of q and k."""
        self._state.recorded = True
        pairs, tokens = sums.scores.pairs, {}
        if query.mean.shape[1] == self.head_dim:
            components.add(self._state.moments[:, self._components_here], query, key)
            tokens = {"queries": query.count, "keys": key.count}
        self._add(
            pairs=pairs,
            exact_pairs=pairs * exact,
            score=sums.scores.score,
            score_square=sums.scores.score_square,
            rows=sums.rows,
            entropy=sums.entropy,
            max_score=sums.max_score,
            max_logit=sums.max_score * self._state.current_beta[self._here].to(sums.max_score),
            **tokens,
        )

    def _add(self, **values: Tensor) -> None:
        statistics.add(self._state.table[:, self._here], values)


def _gain(beta: Tensor, default: Tensor) -> Tensor:
    return torch.where(beta.isnan(), 1.0, beta / default)


def _part(whole: slice, first: int, count: int) -> slice:
    return slice(whole.start + first, whole.start + first + count)


def _valid(seen: Tensor, tokens: Tensor) -> Tensor | None:
    """`[batch, heads, tokens]` as `[1, tokens]` for tokens `[1, heads, tokens, d_k]`; None where they do not match."""
    flat = seen[:, 0].flatten()[None]
    return flat if flat.shape[1] == tokens.shape[2] else None


class Layers(Mapping[str, AttentionLayer]):
    """The hooked layers by module name."""

    def __init__(self, layers: list[AttentionLayer]) -> None:
        self._layers = {layer.name: layer for layer in layers}

    def __getitem__(self, name: str) -> AttentionLayer:
        if name not in self._layers:
            raise KeyError(f"no hooked layer is called {name!r}; there are {', '.join(self._layers)}")
        return self._layers[name]

    def __repr__(self) -> str:
        return "\n".join(map(repr, self.values()))

    def __iter__(self) -> Iterator[str]:
        return iter(self._layers)

    def __len__(self) -> int:
        return len(self._layers)
