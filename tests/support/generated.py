"""Random attention modules made of the building blocks that people use, and the truth about each in float64.

A `Recipe` says what a module does; `Generated` does it in the many ways of writing it, `truth` computes the same from
the recipe alone, for any beta. Neither knows betahook.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
import torch.utils.checkpoint
from torch import nn


def top_three(a):
    values, indices = a.topk(3, -1)
    return torch.zeros_like(a).scatter(-1, indices, values)


AFTERWARDS = {
    None: lambda module, a: a,
    "normalise": lambda module, a: F.normalize(a, p=1, dim=-1),
    "square": lambda module, a: a.square() / a.square().sum(-1, keepdim=True),
    "detach": lambda module, a: a.detach(),
    "double": lambda module, a: a.double().to(a.dtype),
    "one minus": lambda module, a: 1 - a,
    "relu": lambda module, a: F.relu(a - 0.1),
    "topk": lambda module, a: top_three(a),
    "linear heads": lambda module, a: module.mixer(a.permute(0, 2, 3, 1)).permute(0, 3, 1, 2),
    "conv heads": lambda module, a: module.mixing_conv(a),
    "einsum heads": lambda module, a: torch.einsum("bhij,hg->bgij", a, module.mixing),
    "mask": lambda module, a: a.masked_fill(a < 0.05, 0.0),
    "dropout": lambda module, a: F.dropout(a, 0.0, module.training),
    "sort": lambda module, a: a.sort(-1, descending=True).values,
    "scaled": lambda module, a: a * 0.5 + 0.1,
    "gate": lambda module, a: a * torch.sigmoid(module.temperatures),
    "second norm": lambda module, a: (a / (1e-6 + a.sum(-2, keepdim=True))).softmax(-1),
}
"""What is made of the weights."""

BLOCKS = {
    "projection": ["separate", "fused", "fused einops", "per head", "einsum", "conv"],
    "layout": ["bhnd", "flat", "heads first", "bnhd", "hbnd", "einsum", "dots", "windows"],
    "norm": [None, None, "l2", "layer", "rms"],
    "rotary": [False, False, True],
    "scale": ["scores", "query", "both", "key", "in place", "divide", "tensor", "alpha"],
    "temperature": [None, None, None, "learned", "by head", "log n"],
    "mask": [None, "fill", "where", "add inf", "add 1e4", "add min", "multiply", "swin", "setitem"],
    "bias": [None, None, "table", "alibi", "by head"],
    "order": ["mask last", "mask first"],
    "cap": [None, None, None, "tanh", "clamp"],
    "shift": [None, None, "max", "amax", "detached", "mean"],
    "products": ["one", "one", "one", "sum", "position first", "differential", "cat", "chunks", "buffer", "bias"],
    "sink": [None, None, None, "column"],
    "softmax": ["function", "method", "module", "float", "named"],
    "after": [None, None, *AFTERWARDS],
    "values": ["matmul", "einsum", "bmm"],
    "output": [None, None, "gate", "product", "norm"],
    "fused": [False] * 5 + [True],
    "checkpoint": [False] * 14 + ["reentrant", "not reentrant"],
    "unknown": [None] * 24 + ["sigmoid", "square", "cumsum", "softplus"],
}
"""What a module is drawn from, by the name of a field of `Recipe`."""


@dataclass(frozen=True)
class Recipe:
    """One attention module."""

    seed: int
    heads: int
    batch: int
    length: int
    parts: dict = field(default_factory=dict)

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return self.parts[name]

    @classmethod
    def draw(cls, seed):
        draw = random.Random(seed)
        parts = {name: draw.choice(choices) for name, choices in BLOCKS.items()}
        heads = draw.choice([1, 2, 4])
        if parts["fused"]:
            parts.update(products="one", cap=None, sink=None, shift=None, after=None, unknown=None, temperature=None)
            if parts["layout"] in ("bnhd", "einsum", "dots"):
                parts["layout"] = "bhnd"
        if parts["sink"]:
            parts["shift"] = None  # which is no term that all see alike, then
        if parts["cap"]:
            parts["order"] = "mask last"  # a cap would lift what is masked
        if parts["products"] in ("sum", "position first", "differential") and parts["scale"] in (
            "query",
            "both",
            "key",
        ):
            parts["scale"] = "scores"  # of all products alike
        # What coincides is what a size cannot tell apart.
        batch = draw.choice([2, heads, 3])
        if parts["layout"] == "windows":
            parts["windows"] = draw.choice([2, heads])
        return cls(seed, heads, batch, draw.choice([6, 8]), parts)

    @property
    def plain(self):
        """True for a softmax over beta * q . k plus terms, of which at least 80 % are to be supported."""
        return self.unknown is None and not self.checkpoint

    def __repr__(self):
        return f"Recipe({self.seed}: {self.heads} heads, batch {self.batch}, {self.parts})"


class GeneratedAttention(nn.Module):
    """The attention of a recipe."""

    def __init__(self, recipe, width=4):
        super().__init__()
        self.recipe, self.num_heads, self.head_dim = recipe, recipe.heads, width
        features = recipe.heads * width
        self.features = features
        kind = recipe.projection
        if kind.startswith("fused"):
            self.qkv = nn.Linear(features, 3 * features)
        elif kind == "per head":
            self.lists = nn.ModuleList(
                nn.ModuleList(nn.Linear(features, width) for _ in range(recipe.heads)) for _ in range(3)
            )
        elif kind == "einsum":
            self.tables = nn.ParameterList(nn.Parameter(torch.randn(recipe.heads, features, width)) for _ in range(3))
        elif kind == "conv":
            self.convs = nn.ModuleList(nn.Conv1d(features, features, 1) for _ in range(3))
        else:
            self.q_proj, self.k_proj, self.v_proj = (nn.Linear(features, features) for _ in range(3))
        self.further = nn.ModuleList(nn.Linear(features, features) for _ in range(2))
        self.positions = nn.Parameter(torch.randn(16, features))
        self.relative = nn.Parameter(torch.randn(16, width))
        self.temperature = nn.Parameter(torch.tensor(0.3))
        self.temperatures = nn.Parameter(torch.linspace(-0.5, 0.5, recipe.heads)[:, None, None])
        self.table = nn.Parameter(torch.randn(recipe.heads, 16, 16))
        self.sink = nn.Parameter(torch.randn(recipe.heads, 1, 1))
        self.mixing = nn.Parameter(torch.randn(recipe.heads, recipe.heads))
        self.mixer = nn.Linear(recipe.heads, recipe.heads)
        self.mixing_conv = nn.Conv2d(recipe.heads, recipe.heads, 1)
        self.norm = nn.LayerNorm(width)
        self.gate = nn.Linear(features, features)
        self.normal = nn.Softmax(dim=-1)

    # What the truth shares: projections, norms and rotations, and what happens behind the softmax.

    def split(self, x):
        return x.unflatten(-1, (self.num_heads, -1)).transpose(1, 2)

    def project(self, x):
        kind, heads = self.recipe.projection, self.num_heads
        if kind == "fused":
            return self.qkv(x).reshape(*x.shape[:2], 3, heads, -1).permute(2, 0, 3, 1, 4).unbind(0)
        if kind == "fused einops":
            return tuple(self.split(part) for part in self.qkv(x).chunk(3, -1))
        if kind == "per head":
            return tuple(torch.stack([layer(x) for layer in layers], 1) for layers in self.lists)
        if kind == "einsum":
            return tuple(torch.einsum("bnc,hcd->bhnd", x, table) for table in self.tables)
        if kind == "conv":
            return tuple(conv(x.mT).view(len(x), heads, -1, x.shape[1]).mT for conv in self.convs)
        return tuple(self.split(layer(x)) for layer in (self.q_proj, self.k_proj, self.v_proj))

    def prepared(self, x):
        q, k, v = self.project(x)
        if self.recipe.norm == "l2":
            q, k = F.normalize(q, dim=-1), F.normalize(k, dim=-1)
        elif self.recipe.norm == "layer":
            q, k = self.norm(q), self.norm(k)
        elif self.recipe.norm == "rms":
            q, k = (t * torch.rsqrt(t.pow(2).mean(-1, keepdim=True) + 1e-6) for t in (q, k))
        if self.recipe.rotary:
            angles = torch.arange(q.shape[-2], dtype=q.dtype)[:, None] * torch.tensor([1.0, 0.1], dtype=q.dtype)
            cos, sin = (torch.cat([t, t], -1) for t in (angles.cos(), angles.sin()))
            q, k = (t * cos + torch.cat([-t[..., 2:], t[..., :2]], -1) * sin for t in (q, k))
        return q, k, v

    def second(self, x):
        return tuple(self.split(layer(x)) for layer in self.further)

    def places(self, length):
        return self.split(self.further[1](self.positions[:length])[None])

    def root(self, length):
        return self.head_dim**-0.5 * (math.log(length) if self.recipe.temperature == "log n" else 1)

    def masked(self, length):
        return torch.ones(length, length, dtype=torch.bool).triu(1)

    def bias(self, length):
        """Canonical, `[1, heads, length, length]`."""
        if self.recipe.bias == "table":
            return self.table[None, :, :length, :length]
        distance = (torch.arange(length)[:, None] - torch.arange(length)).abs().to(self.table.dtype)
        slopes = torch.linspace(1, 60, self.num_heads, dtype=self.table.dtype)[:, None, None]
        if self.recipe.bias == "by head":
            return self.table[None, :, :1, :1].expand(1, -1, length, length)
        return -(slopes * distance)[None]

    def afterwards(self, a):
        """What is made of the weights, `[batch, heads, length, length]`."""
        return AFTERWARDS[self.recipe.after](self, a)

    def out(self, values, x):
        merged = values.transpose(1, 2).flatten(2)
        if self.recipe.output == "gate":
            return merged * torch.sigmoid(self.gate(x))
        if self.recipe.output == "product":
            return torch.softmax(self.gate(x), -1) * merged + (merged @ merged.mT.detach()) @ merged * 0.01
        if self.recipe.output == "norm":
            return F.layer_norm(merged, merged.shape[-1:])
        return merged

    # The module as it is written.

    def forward(self, x):
        if self.recipe.checkpoint:
            reentrant = self.recipe.checkpoint == "reentrant"
            return torch.utils.checkpoint.checkpoint(self.attend, x, use_reentrant=reentrant)
        return self.attend(x)

    def attend(self, x):
        recipe = self.recipe
        whole = x
        q, k, v = self.prepared(x)
        length, batch = x.shape[1], len(x)
        if recipe.scale == "query":
            q = q * self.root(length)
        elif recipe.scale == "both":
            q, k = q * self.root(length) ** 0.5, self.root(length) ** 0.5 * k
        elif recipe.scale == "key":
            k = k * self.root(length)
        if recipe.fused:
            return self.out(self.back(self.fused(q, k, v, length), batch), whole)
        if recipe.products == "differential":
            first, second = self.scores(q, k, x), self.scores(*self.second(x), x)
            a = self.back(self.normalise(first), batch) - 0.5 * self.back(self.normalise(second), batch)
        else:
            a = self.back(self.normalise(self.scores(q, k, x)), batch)
        a = self.afterwards(a)
        if recipe.values == "einsum":
            values = torch.einsum("bhij,bhjd->bhid", a, v)
        elif recipe.values == "bmm":
            values = torch.bmm(a.flatten(0, 1), v.flatten(0, 1)).unflatten(0, (batch, -1))
        else:
            values = a @ v
        return self.out(values, whole)

    def scores(self, q, k, x):
        """The logits, in the layout of the recipe."""
        recipe, length = self.recipe, x.shape[1]
        scores = self.products(q, k, x)
        scores = self.scaled(scores, length)
        if recipe.order == "mask first":
            scores = self.mask(scores, length)
        if recipe.cap == "tanh":
            scores = 3.0 * torch.tanh(scores / 3.0)
        elif recipe.cap == "clamp":
            scores = scores.clamp(-2.0, 2.0)
        if recipe.unknown is not None:
            scores = {"sigmoid": torch.sigmoid, "square": torch.square, "softplus": F.softplus}.get(
                recipe.unknown, lambda t: t.cumsum(-1)
            )(scores)
        if recipe.bias is not None:
            scores = scores + self.laid(self.bias(length).expand(len(x), -1, -1, -1))
        if recipe.order == "mask last":
            scores = self.mask(scores, length)
        return self.shifted(scores)

    def fused(self, q, k, v, length):
        recipe, masked, mask = self.recipe, self.masked(length), None
        if recipe.bias is not None:
            mask = self.bias(length).expand(len(q), -1, -1, -1)
            mask = self.laid(mask.masked_fill(masked, float("-inf")) if recipe.mask else mask)
        elif recipe.mask in ("where", "multiply", "setitem"):
            mask = ~masked
        elif recipe.mask not in (None, "fill"):
            mask = self.mask(torch.zeros(length, length, dtype=q.dtype), length)
        return F.scaled_dot_product_attention(
            *(self.laid(t) for t in (q, k, v)),
            attn_mask=mask,
            is_causal=recipe.mask == "fill" and mask is None,
            scale=1.0 if recipe.scale in ("query", "both", "key") else self.root(length),
        )

    def products(self, q, k, x):
        recipe, length = self.recipe, x.shape[1]
        if recipe.products == "sum":
            scores = self.product(q, k) + self.product(*self.second(x))
        elif recipe.products == "position first":
            position = self.product(q, self.places(length).expand(len(x), -1, -1, -1))
            scores = self.product(q, k) + position
        elif recipe.products == "bias":
            scores = self.product(q, k) + self.laid(q.detach() @ self.relative[:length].mT)
        elif recipe.products == "cat":
            half = length // 2
            scores = torch.cat([self.product(q, k[..., :half, :]), self.product(q, k[..., half:, :])], -1)
        elif recipe.products == "chunks":
            scores = torch.cat([self.product(part, k) for part in q.split(2, -2)], -2)
        elif recipe.products == "buffer":
            pieces = self.product(q, k)
            scores = torch.zeros_like(pieces)
            scores[..., : length // 2] = pieces[..., : length // 2]
            scores[..., length // 2 :] = pieces[..., length // 2 :]
        else:
            scores = self.product(q, k)
        return scores

    def scaled(self, scores, length):
        recipe, root = self.recipe, self.root(length)
        if recipe.scale in ("scores", "alpha"):
            scores = scores * root
        elif recipe.scale == "in place":
            scores *= root
        elif recipe.scale == "divide":
            scores = scores / (1 / root)
        elif recipe.scale == "tensor":
            scores = scores / torch.tensor([1 / root], dtype=scores.dtype)
        if recipe.temperature == "learned":
            scores = scores * self.temperature.exp()
        elif recipe.temperature == "by head":
            scores = scores * self.by_head(scores)
        return scores

    def by_head(self, scores):
        temperatures, batch = (
            self.temperatures.exp(),
            scores.numel() // (self.num_heads * scores.shape[-2] * scores.shape[-1]),
        )
        layout = self.recipe.layout
        if layout == "flat":
            return temperatures.repeat(batch, 1, 1)
        if layout == "heads first":
            return temperatures.repeat_interleave(batch, 0)
        if layout == "hbnd":
            return temperatures[:, None]
        return temperatures

    def mask(self, scores, length):
        kind, masked = self.recipe.mask, self.masked(length)
        if kind == "fill":
            return scores.masked_fill(masked, float("-inf"))
        if kind == "where":
            return torch.where(masked, torch.tensor(-1e9, dtype=scores.dtype), scores)
        if kind == "setitem":
            scores = scores.clone()
            scores[..., masked] = float("-inf")
            return scores
        if kind == "multiply":
            kept = (~masked).to(scores.dtype)
            return scores * kept - 1e9 * (1 - kept)
        low = {"add inf": float("-inf"), "add 1e4": -1e4, "add min": torch.finfo(scores.dtype).min / 4, "swin": -200.0}
        if kind is None:
            return scores
        return scores + torch.zeros(length, length, dtype=scores.dtype).masked_fill(masked, low[kind])

    def shifted(self, scores):
        kind = self.recipe.shift
        if kind == "max":
            return scores - scores.max(-1, keepdim=True).values
        if kind == "amax":
            return scores - scores.amax(-1, keepdim=True)
        if kind == "detached":
            return scores - scores.detach().max(dim=-1, keepdim=True)[0]
        if kind == "mean" and self.recipe.mask not in ("add inf", "fill", "setitem", "add min"):
            return scores - scores.mean(-1, keepdim=True)
        return scores

    def normalise(self, scores):
        recipe = self.recipe
        if recipe.sink:
            sink = self.laid(self.sink[None].expand(self.rows(scores), -1, scores.shape[-2], 1))
            scores = torch.cat([scores, sink], -1)
        if recipe.softmax == "method":
            weights = scores.softmax(-1)
        elif recipe.softmax == "module":
            weights = self.normal(scores)
        elif recipe.softmax == "float":
            weights = F.softmax(scores, dim=-1, dtype=torch.float64).to(scores.dtype)
        elif recipe.softmax == "named":
            weights = torch.softmax(input=scores, dim=-1)
        else:
            weights = F.softmax(scores, dim=-1)
        return weights[..., :-1] if recipe.sink else weights

    def rows(self, scores):
        return scores.numel() // (self.num_heads * scores.shape[-2] * scores.shape[-1])

    def product(self, q, k):
        layout = self.recipe.layout
        if layout in ("flat", "heads first"):
            left, right = self.laid(q), self.laid(k)
            if self.recipe.scale == "alpha":
                nothing = torch.zeros(1, 1, 1, dtype=q.dtype)
                return torch.baddbmm(nothing, left, right.mT, beta=0)
            return torch.bmm(left, right.mT)
        if layout == "bnhd":
            return torch.einsum("bihd,bjhd->bhij", q.transpose(1, 2), k.transpose(1, 2))
        if layout == "einsum":
            return torch.einsum("bhid,bhjd->bhij", q, k)
        if layout == "dots":
            return torch.einsum("...id,...jd->...ij", q, k)
        return torch.matmul(self.laid(q), self.laid(k).transpose(-1, -2))

    def laid(self, t):
        """`[batch, heads, ...]` in the layout of the recipe."""
        layout = self.recipe.layout
        if layout == "flat":
            return t.flatten(0, 1)
        if layout == "heads first":
            return t.transpose(0, 1).flatten(0, 1)
        if layout == "hbnd":
            return t.transpose(0, 1)
        if layout == "windows":
            return t.unflatten(0, (-1, self.recipe.windows))
        return t

    def back(self, t, batch):
        layout = self.recipe.layout
        if layout == "flat":
            return t.unflatten(0, (batch, -1))
        if layout == "heads first":
            return t.unflatten(0, (-1, batch)).transpose(0, 1)
        if layout == "hbnd":
            return t.transpose(0, 1)
        return t.flatten(0, 1) if layout == "windows" else t

    # The truth.

    def default(self, length):
        """The model's own beta of each head, `[heads]`."""
        own = torch.full((self.num_heads,), self.root(length), dtype=torch.float64)
        if self.recipe.temperature == "learned":
            own = own * self.temperature.detach().exp()
        elif self.recipe.temperature == "by head":
            own = own * self.temperatures.detach().exp().flatten()
        return own

    def unscaled(self, q, length):
        """The product with a parameter, a bias on which the model's own scale acts and beta does not."""
        recipe = self.recipe
        carried = self.root(length) ** {"query": 1, "both": 0.5}.get(recipe.scale, 0)
        further = q.detach() @ self.relative[:length].mT * carried
        if recipe.scale not in ("query", "both", "key"):
            further = further * self.root(length)
        if recipe.temperature == "learned":
            further = further * self.temperature.exp()
        elif recipe.temperature == "by head":
            further = further * self.temperatures.exp()
        return further

    def hidden(self, logits, masked):
        """Logits behind a mask, which those of some hundreds may overcome."""
        low = {"add 1e4": -1e4, "swin": -200.0}.get(self.recipe.mask)
        return logits.masked_fill(masked, -1e30) if low is None else logits + low * masked

    def truth(self, x, beta):
        """Output for a `beta [heads]`, raw scores `[batch, heads, length, length]` of each softmax, and their pairs."""
        recipe, length = self.recipe, x.shape[1]
        q, k, v = self.prepared(x)
        if recipe.products == "sum":
            a, b = self.second(x)
            raw = [q @ k.mT + a @ b.mT]
        elif recipe.products == "position first":
            raw = [q @ k.mT + q @ self.places(length).mT]
        elif recipe.products == "differential":
            a, b = self.second(x)
            raw = [q @ k.mT, a @ b.mT]
        else:
            raw = [q @ k.mT]
        further = self.unscaled(q, length) if recipe.products == "bias" else 0.0
        masked = self.masked(length) if recipe.mask else torch.zeros(length, length, dtype=torch.bool)
        weights = []
        for scores in raw:
            logits = scores * beta.view(-1, 1, 1) + further
            logits = self.hidden(logits, masked) if recipe.order == "mask first" else logits
            if recipe.cap == "tanh":
                logits = 3.0 * torch.tanh(logits / 3.0)
            elif recipe.cap == "clamp":
                logits = logits.clamp(-2.0, 2.0)
            if recipe.bias is not None:
                logits = logits + self.bias(length)
            if recipe.order == "mask last":
                logits = self.hidden(logits, masked)
            if recipe.sink:
                logits = torch.cat([logits, self.sink[None].expand(len(x), -1, length, 1)], -1)
            rows = torch.softmax(logits, -1)
            weights.append(rows[..., :-1] if recipe.sink else rows)
        a = weights[0] if len(weights) == 1 else weights[0] - 0.5 * weights[1]
        output = self.out(self.afterwards(a) @ v, x)
        return output, [scores.detach() for scores in raw], ~masked.expand_as(raw[0])
