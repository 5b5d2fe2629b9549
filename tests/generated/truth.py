"""The truth about a generated module under any beta, in float64, from its recipe; nothing here knows betahook."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from generated.attention import LOW, GeneratedAttention


@dataclass(frozen=True)
class Truth:
    """What a module computes; all but the output are of each softmax, `[batch, heads, queries, keys]`.

    Attributes:
        output: of the module.
        scores: raw, without the model's own scale and without biases.
        weights: what the softmax makes of the logits, a sink included.
        allowed: boolean, the pairs that are not masked, the same for all.
    """

    output: Tensor
    scores: list[Tensor]
    weights: list[Tensor]
    allowed: Tensor


def own_beta(module: GeneratedAttention, queries: int) -> Tensor:
    """The model's own beta of each head, `[heads]`."""
    own = torch.full((module.num_heads,), module.root(queries), dtype=torch.float64)
    return (own * _temperature(module).flatten()).detach()


def of(module: GeneratedAttention, x: Tensor, beta: Tensor) -> Truth:
    """The truth for an input `[batch, queries, features]` and a `beta [heads]`."""
    recipe, queries = module.recipe, x.shape[1]
    q, k, v = module.prepared(x)
    batch, keys = len(x), k.shape[2]
    factor = module.temperatures.exp() if recipe.spread_temperatures else torch.ones(1, dtype=torch.float64)
    factor = factor * module.gates(x) if recipe.gate else factor
    raw = [product * factor for product in _raw(module, q, k, x)]
    bias = _bias_of_products(module, q, x, factor) if recipe.products == "bias" else 0.0
    masked = module.masked(queries) if recipe.mask else torch.zeros(queries, keys, dtype=torch.bool)
    padded = module.padded(batch, keys)[:, None, None] & torch.tensor(recipe.padding is not None)
    weights = []
    for scores in raw:
        logits = scores * beta.view(-1, 1, 1) + bias
        if recipe.order == "mask first":
            logits = _hidden(_hidden(logits, masked, recipe.mask), padded, recipe.padding)
        if recipe.cap == "tanh":
            logits = 3.0 * torch.tanh(logits / 3.0)
        elif recipe.cap == "clamp":
            logits = logits.clamp(-2.0, 2.0)
        if recipe.bias is not None:
            logits = logits + module.bias(queries)
        if recipe.order == "mask last":
            logits = _hidden(_hidden(logits, masked, recipe.mask), padded, recipe.padding)
        if recipe.sink:
            sink = module.sink[None] if recipe.sink == "column" else torch.zeros(1, 1, 1, 1, dtype=logits.dtype)
            logits = torch.cat([logits, sink.expand(batch, module.num_heads, queries, 1)], -1)
        rows = torch.softmax(logits, -1)
        weights.append(rows)
    a = weights[0] if len(weights) == 1 else weights[0] - 0.5 * weights[1]
    a = a[..., :-1] if recipe.sink else a
    output = module.out(module.afterwards(a) @ v, x)
    allowed = (~(masked | padded)).expand_as(raw[0])
    return Truth(output, [scores.detach() for scores in raw], [rows.detach() for rows in weights], allowed)


def _raw(module: GeneratedAttention, q: Tensor, k: Tensor, x: Tensor) -> list[Tensor]:
    """The scores of each softmax."""
    kind, queries, keys = module.recipe.products, q.shape[2], k.shape[2]
    if kind in ("sum", "differential"):
        a, b = module.second(x)
        return [q @ k.mT + a @ b.mT] if kind == "sum" else [q @ k.mT, a @ b.mT]
    if kind == "position first":
        return [q @ (k + module.places(keys)).mT]
    if kind.startswith("relative"):
        places = module.places(queries + keys - 1)[0]
        rows = [
            torch.einsum("bhd,hjd->bhj", q[:, :, i], places[:, queries - 1 - i :][:, :keys]) for i in range(queries)
        ]
        return [q @ k.mT + torch.stack(rows, 2)]
    return [q @ k.mT]


def _bias_of_products(module: GeneratedAttention, q: Tensor, x: Tensor, factor: Tensor) -> Tensor:
    """The product with a parameter, a bias on which the model's own scale acts and beta does not."""
    recipe, queries = module.recipe, x.shape[1]
    keys, root = queries + recipe.further, module.root(queries)
    power = {"query": 1, "both": 0.5, "key": 0}.get(recipe.scale, 1)
    bias: Tensor = q.detach() @ module.relative[:keys].mT * root**power * factor
    return bias * _temperature(module)


def _temperature(module: GeneratedAttention) -> Tensor:
    """The temperature that a module learns, `[heads or 1, 1, 1]`."""
    kind = module.recipe.temperature
    if module.recipe.spread_temperatures:
        return torch.ones(1, 1, 1, dtype=torch.float64)
    if kind == "learned":
        return module.temperature.exp().view(1, 1, 1)
    return module.temperatures.exp() if kind in ("by head", "at most") else torch.ones(1, 1, 1, dtype=torch.float64)


def _hidden(logits: Tensor, masked: Tensor, kind: str | None) -> Tensor:
    """Logits behind a mask, which those of some hundreds may overcome."""
    if kind in ("add 1e4", "swin"):
        return logits + LOW[kind] * masked
    return logits.masked_fill(masked, -1e30)
