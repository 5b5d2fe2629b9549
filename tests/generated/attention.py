"""The attention module of a recipe, written in the many ways in which people write it."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
import torch.utils.checkpoint
from torch import nn

LOW = {"add inf": float("-inf"), "add 1e4": -1e4, "add min": torch.finfo(torch.float64).min / 4, "swin": -200.0}
"""What is added to a masked logit."""


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
"""What is made of the weights, `[batch, heads, queries, keys]`."""


class GeneratedAttention(nn.Module):
    """The attention of a recipe; `[batch, heads, tokens, d]` is the canonical layout, others are of the recipe."""

    def __init__(self, recipe, width=4):
        super().__init__()
        self.recipe, self.num_heads, self.head_dim = recipe, recipe.heads, width
        self.features = features = recipe.heads * width
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
            of_keys = features // 2 if recipe.shared_keys else features
            self.q_proj = nn.Linear(features, features)
            self.k_proj, self.v_proj = nn.Linear(features, of_keys), nn.Linear(features, of_keys)
        self.further = nn.ModuleList(nn.Linear(features, features) for _ in range(2))
        self.positions = nn.Parameter(torch.randn(24, features))
        self.relative = nn.Parameter(torch.randn(24, width))
        self.temperature = nn.Parameter(torch.tensor(0.3))
        self.temperatures = nn.Parameter(torch.linspace(-0.5, 0.5, recipe.heads)[:, None, None])
        self.table = nn.Parameter(torch.randn(recipe.heads, 16, 16))
        self.sink = nn.Parameter(torch.randn(recipe.heads, 1, 1))
        self.mixing = nn.Parameter(torch.randn(recipe.heads, recipe.heads))
        self.mixer = nn.Linear(recipe.heads, recipe.heads)
        self.mixing_conv = nn.Conv2d(recipe.heads, recipe.heads, 1)
        self.norm = nn.LayerNorm(width)
        if recipe.norm == "each":
            self.q_norm, self.k_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.by_component = nn.Parameter(torch.randn(width))
        self.gate = nn.Linear(features, features)
        self.row_gate = nn.Linear(features, recipe.heads)
        self.normal = nn.Softmax(dim=-1)
        self.memory = nn.Parameter(torch.randn(2, recipe.heads, 3, width))
        self.register_buffer("cache", torch.randn(2, recipe.heads, 3, width))

    # What the truth has in common: projections, norms, rotations, biases, and what happens behind the softmax.

    def split(self, x):
        return x.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)

    def project(self, x, source):
        kind, heads = self.recipe.projection, self.num_heads
        inputs = (x, source, source)
        if kind == "fused" and source is x:
            return self.qkv(x).reshape(*x.shape[:2], 3, heads, -1).permute(2, 0, 3, 1, 4).unbind(0)
        if kind.startswith("fused"):
            return tuple(self.split(self.qkv(t).chunk(3, -1)[index]) for index, t in enumerate(inputs))
        if kind == "per head":
            return tuple(
                torch.stack([layer(t) for layer in layers], 1) for t, layers in zip(inputs, self.lists, strict=True)
            )
        if kind == "einsum":
            return tuple(torch.einsum("bnc,hcd->bhnd", t, table) for t, table in zip(inputs, self.tables, strict=True))
        if kind == "conv":
            return tuple(
                conv(t.mT).view(len(x), heads, -1, t.shape[1]).mT for t, conv in zip(inputs, self.convs, strict=True)
            )
        layers = self.q_proj, self.k_proj, self.v_proj
        return tuple(self.split(layer(t)) for t, layer in zip(inputs, layers, strict=True))

    def source(self, x):
        """The tokens that keys are made of."""
        return torch.cat([x[:, :2] + 1, x], 1) if self.recipe.source == "cross" else x

    def lengthened(self, tokens, index):
        """Keys or values with those of earlier or learned tokens in front."""
        if self.recipe.source not in ("cache", "memory"):
            return tokens
        return torch.cat([getattr(self, self.recipe.source)[index].expand(len(tokens), -1, -1, -1), tokens], 2)

    def prepared(self, x):
        q, k, v = self.project(x, self.source(x))
        kind = self.recipe.norm
        if kind == "l2":
            q, k = F.normalize(q, dim=-1), F.normalize(k, dim=-1)
        elif kind == "layer":
            q, k = self.norm(q), self.norm(k)
        elif kind == "each":
            q, k = self.q_norm(q), self.k_norm(k)
        elif kind == "scale":
            q = q * self.by_component
        elif kind == "rms":
            q, k = (t * torch.rsqrt(t.pow(2).mean(-1, keepdim=True) + 1e-6) for t in (q, k))
        if self.recipe.rotary:
            q, k = self.rotated(q), self.rotated(k)
        if self.recipe.shared_keys == "repeat":
            k, v = (t.repeat_interleave(2, 1) for t in (k, v))
        elif self.recipe.shared_keys == "expand":
            k, v = (t[:, :, None].expand(-1, -1, 2, -1, -1).flatten(1, 2) for t in (k, v))
        return q, self.lengthened(k, 0), self.lengthened(v, 1)

    def rotated(self, t):
        angles = torch.arange(t.shape[-2], dtype=t.dtype)[:, None] * torch.tensor([1.0, 0.1], dtype=t.dtype)
        cos, sin = (torch.cat([a, a], -1) for a in (angles.cos(), angles.sin()))
        return t * cos + torch.cat([-t[..., 2:], t[..., :2]], -1) * sin

    def second(self, x):
        """Further queries and keys."""
        first, second = self.further
        return self.split(first(x)), self.lengthened(self.split(second(self.source(x))), 0)

    def places(self, keys):
        return self.split(self.further[1](self.positions[:keys])[None])

    def root(self, queries):
        return self.head_dim**-0.5 * (math.log(queries) if self.recipe.temperature == "log n" else 1)

    def masked(self, queries):
        return torch.ones(queries, queries + self.recipe.further, dtype=torch.bool).triu(1 + self.recipe.further)

    def padded(self, batch, keys):
        """The keys that are padding, boolean `[batch, keys]`: up to two at the end."""
        return torch.arange(keys) >= keys - (torch.arange(batch) % 3)[:, None]

    def bias(self, queries):
        """`[1, heads, queries, keys]`."""
        keys = queries + self.recipe.further
        if self.recipe.bias == "table":
            return self.table[None, :, :queries, :keys]
        if self.recipe.bias == "by head":
            return self.table[None, :, :1, :1].expand(1, -1, queries, keys)
        distance = (torch.arange(queries)[:, None] + self.recipe.further - torch.arange(keys)).abs()
        slopes = torch.linspace(1, 60, self.num_heads, dtype=self.table.dtype)[:, None, None]
        return -(slopes * distance)[None]

    def afterwards(self, a):
        return AFTERWARDS[self.recipe.after](self, a)

    def gates(self, x):
        return torch.sigmoid(self.row_gate(x)).transpose(1, 2)[..., None]

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
        recipe, queries, batch = self.recipe, x.shape[1], len(x)
        q, k, v = self.prepared(x)
        root = self.root(queries)
        if recipe.scale == "query":
            q = q * root
        elif recipe.scale == "both":
            q, k = q * root**0.5, root**0.5 * k
        elif recipe.scale == "key":
            k = k * root
        if recipe.fused:
            return self.out(self.back(self.fused(q, k, v), batch), x)
        size = 2 if recipe.loop else queries
        a = torch.cat([self.rows(q, k, x, slice(start, start + size)) for start in range(0, queries, size)], 2)
        a = self.afterwards(a)
        if recipe.values == "einsum":
            values = torch.einsum("bhij,bhjd->bhid", a, v)
        elif recipe.values == "bmm":
            values = torch.bmm(a.flatten(0, 1), v.flatten(0, 1)).unflatten(0, (batch, -1))
        else:
            values = a @ v
        return self.out(values, x)

    def rows(self, q, k, x, rows):
        """The weights of some queries."""
        first = self.back(self.normalise(self.scores(q, k, x, rows)), len(x))
        if self.recipe.products != "differential":
            return first
        return first - 0.5 * self.back(self.normalise(self.scores(*self.second(x), x, rows)), len(x))

    def scores(self, q, k, x, rows):
        """The logits of some queries, in the layout of the recipe."""
        recipe, queries = self.recipe, x.shape[1]
        scores = self.products(q[:, :, rows], k, x, rows)
        if recipe.gate:
            scores = scores * self.laid(self.gates(x)[:, :, rows])
        scores = self.scaled(scores, queries, len(x))
        if recipe.order == "mask first":
            scores = self.mask(scores, x, rows)
        if recipe.cap == "tanh":
            scores = 3.0 * torch.tanh(scores / 3.0)
        elif recipe.cap == "clamp":
            scores = scores.clamp(-2.0, 2.0)
        if recipe.unknown is not None:
            scores = {"sigmoid": torch.sigmoid, "square": torch.square, "softplus": F.softplus}.get(
                recipe.unknown, lambda t: t.cumsum(-1)
            )(scores)
        if recipe.bias is not None:
            scores = scores + self.laid(self.bias(queries)[:, :, rows].expand(len(x), -1, -1, -1))
        if recipe.order == "mask last":
            scores = self.mask(scores, x, rows)
        return self.shifted(scores)

    def fused(self, q, k, v):
        recipe, queries, keys = self.recipe, q.shape[2], k.shape[2]
        masked = self.masked(queries) if recipe.mask else torch.zeros(queries, keys, dtype=torch.bool)
        if recipe.padding:
            masked = (masked | self.padded(len(q), keys)[:, None, None]).expand(len(q), self.num_heads, -1, -1)
        mask, causal = None, False
        if recipe.bias is not None:
            mask = self.laid(self.bias(queries).expand(len(q), -1, -1, -1).masked_fill(masked, float("-inf")))
        elif recipe.padding:
            mask = self.laid(~masked)
        elif recipe.mask == "fill" and not recipe.further:
            causal = True
        elif recipe.mask in LOW:
            mask = torch.zeros(queries, keys, dtype=q.dtype).masked_fill(masked, LOW[recipe.mask])
        elif recipe.mask is not None:
            mask = ~masked
        return F.scaled_dot_product_attention(
            *(self.laid(t) for t in (q, k, v)),
            attn_mask=mask,
            is_causal=causal,
            scale=1.0 if recipe.scaled_before else self.root(queries),
        )

    def products(self, q, k, x, rows):
        recipe, keys = self.recipe, k.shape[2]
        if recipe.products == "sum":
            further, of_keys = self.second(x)
            return self.product(q, k) + self.product(further[:, :, rows], of_keys)
        if recipe.products == "position first":
            position = self.product(q, self.places(keys).expand(len(x), -1, -1, -1))
            return self.product(q, k) + position
        if recipe.products.startswith("relative"):
            return self.product(q, k) + self.by_distance(q, keys)
        if recipe.products == "bias":
            return self.product(q, k) + self.laid(q.detach() @ self.relative[:keys].mT)
        if recipe.products == "cat":
            half = keys // 2
            return torch.cat([self.product(q, k[..., :half, :]), self.product(q, k[..., half:, :])], -1)
        if recipe.products == "chunks":
            return torch.cat([self.product(part, k) for part in q.split(2, -2)], -2)
        if recipe.products == "heads":
            return torch.cat([self.product(q[:, h : h + 1], k[:, h : h + 1]) for h in range(self.num_heads)], 1)
        if recipe.products == "buffer":
            pieces = self.product(q, k)
            scores = torch.zeros_like(pieces)
            scores[..., : keys // 2] = pieces[..., : keys // 2]
            scores[..., keys // 2 :] = pieces[..., keys // 2 :]
            return scores
        return self.product(q, k)

    def by_distance(self, q, keys):
        """Products with a position for each distance, moved to the keys at that distance."""
        queries = q.shape[2]
        products = self.product(q, self.places(queries + keys - 1).expand(len(q), -1, -1, -1))
        if self.recipe.products == "relative gather":
            distance = torch.arange(keys) - torch.arange(queries)[:, None] + queries - 1
            return products.gather(-1, distance.expand(*products.shape[:-2], -1, -1))
        leading, distances = products.shape[:-2], products.shape[-1]
        padded = torch.cat([products.new_zeros(*leading, queries, 1), products], -1)
        moved = padded.reshape(*leading, distances + 1, queries)[..., 1:, :].reshape(*leading, queries, distances)
        return moved[..., :keys]

    def scaled(self, scores, queries, batch):
        recipe, root = self.recipe, self.root(queries)
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
            scores = scores * self.over_heads(self.temperatures.exp(), batch)
        elif recipe.temperature == "at most":
            scores = self.over_heads(self.temperatures.clamp(max=math.log(100)).exp(), batch) * scores
        return scores

    def over_heads(self, numbers, batch):
        """A number for each head, `[heads, 1, 1]`, in the layout of the recipe."""
        layout = self.recipe.layout
        if layout == "flat":
            return numbers.repeat(batch, 1, 1)
        if layout == "heads first":
            return numbers.repeat_interleave(batch, 0)
        return numbers[:, None] if layout == "hbnd" else numbers

    def mask(self, scores, x, rows):
        """Mask later keys, and padding."""
        kind, masked = self.recipe.mask, self.masked(x.shape[1])[rows]
        if kind == "fill":
            scores = scores.masked_fill(masked, float("-inf"))
        elif kind == "where":
            scores = torch.where(masked, torch.tensor(-1e9, dtype=scores.dtype), scores)
        elif kind == "setitem":
            scores = scores.clone()
            scores[..., masked] = float("-inf")
        elif kind == "multiply":
            kept = (~masked).to(scores.dtype)
            scores = scores * kept - 1e9 * (1 - kept)
        elif kind is not None:
            scores = scores + torch.zeros(masked.shape, dtype=scores.dtype).masked_fill(masked, LOW[kind])
        kind = self.recipe.padding
        if kind is None:
            return scores
        padded = self.padded(len(x), masked.shape[1])[:, None, None].expand(-1, self.num_heads, -1, -1)
        if kind == "fill":
            return scores.masked_fill(self.laid(padded), float("-inf"))
        low = -1e4 if kind == "add 1e4" else torch.finfo(scores.dtype).min / 4
        return scores + self.laid(padded.to(scores.dtype) * low)

    def shifted(self, scores):
        kind = self.recipe.shift
        if kind == "max":
            return scores - scores.max(-1, keepdim=True).values
        if kind == "amax":
            return scores - scores.amax(-1, keepdim=True)
        if kind == "detached":
            return scores - scores.detach().max(dim=-1, keepdim=True)[0]
        infinite = ("add inf", "fill", "setitem", "add min")
        if kind == "mean" and self.recipe.mask not in infinite and self.recipe.padding not in ("fill", "add"):
            return scores - scores.mean(-1, keepdim=True)
        return scores

    def normalise(self, scores):
        recipe = self.recipe
        if recipe.sink == "column":
            leading = scores.numel() // (self.num_heads * scores.shape[-2] * scores.shape[-1])
            sink = self.laid(self.sink[None].expand(leading, -1, scores.shape[-2], 1))
            scores = torch.cat([scores, sink], -1)
        elif recipe.sink == "zero":
            nothing = scores.new_zeros(*scores.shape[:-1], 1)
            scores = F.pad(scores, (0, 1)) if recipe.softmax == "method" else torch.cat([scores, nothing], -1)
        if recipe.exponential:
            weights = (scores - scores.amax(-1, keepdim=True)).exp()
            weights = weights / weights.sum(-1, keepdim=True)
        elif recipe.softmax == "method":
            weights = scores.softmax(-1)
        elif recipe.softmax == "module":
            weights = self.normal(scores)
        elif recipe.softmax == "float":
            weights = F.softmax(scores, dim=-1, dtype=torch.float64).to(scores.dtype)
        elif recipe.softmax == "named":
            weights = torch.softmax(input=scores, dim=-1)
        elif recipe.softmax == "log":
            weights = F.log_softmax(scores, -1).exp()
        else:
            weights = F.softmax(scores, dim=-1)
        return weights[..., :-1] if recipe.sink else weights

    def product(self, q, k):
        layout = self.recipe.layout
        if layout in ("flat", "heads first"):
            left, right = self.laid(q), self.laid(k)
            if self.recipe.scale == "alpha":
                nothing = torch.zeros(1, 1, 1, dtype=q.dtype)
                return torch.baddbmm(nothing, left, right.mT, beta=0)
            return torch.bmm(left, right.mT)
        if layout == "matrices":
            return torch.mm(q[0, 0], k[0, 0].t()) if self.recipe.values == "bmm" else q[0, 0] @ k[0, 0].T
        if layout == "bnhd":
            return torch.einsum("bihd,bjhd->bhij", q.transpose(1, 2), k.transpose(1, 2))
        if layout == "einsum":
            return torch.einsum("bhid,bhjd->bhij", q, k)
        if layout == "dots":
            return torch.einsum("...id,...jd->...ij", q, k)
        return torch.matmul(self.laid(q), self.laid(k).transpose(-1, -2))

    def laid(self, t):
        """A canonical tensor in the layout of the recipe."""
        layout = self.recipe.layout
        if layout == "flat":
            return t.flatten(0, 1)
        if layout == "heads first":
            return t.transpose(0, 1).flatten(0, 1)
        if layout == "hbnd":
            return t.transpose(0, 1)
        if layout == "windows":
            return t.unflatten(0, (-1, self.recipe.windows))
        return t[0, 0] if layout == "matrices" else t

    def back(self, t, batch):
        """A tensor in the layout of the recipe, as a canonical one."""
        layout = self.recipe.layout
        if layout == "flat":
            return t.unflatten(0, (batch, -1))
        if layout == "heads first":
            return t.unflatten(0, (-1, batch)).transpose(0, 1)
        if layout == "hbnd":
            return t.transpose(0, 1)
        if layout == "matrices":
            return t[None, None]
        return t.flatten(0, 1) if layout == "windows" else t
