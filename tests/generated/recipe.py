"""The building blocks of attention modules, and how one of each is drawn."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

BLOCKS: dict[str, list[Any]] = {
    "projection": ["separate", "separate", "fused", "fused chunks", "per head", "einsum", "conv"],
    "shared keys": [None, None, "repeat", "expand"],
    "source": ["self", "self", "self", "cache", "memory", "cross"],
    "layout": ["bhnd", "bhnd", "flat", "heads first", "bnhd", "hbnd", "einsum", "dots", "windows"],
    "norm": [None, None, "l2", "layer", "rms", "each", "scale"],
    "rotary": [False, False, True],
    "scale": ["scores", "query", "both", "key", "in place", "divide", "tensor", "alpha"],
    "temperature": [None, None, None, "learned", "by head", "at most", "log n"],
    "mask": [None, "fill", "where", "add inf", "add 1e4", "add min", "multiply", "swin", "setitem"],
    "padding": [None, None, None, "fill", "add", "add 1e4"],
    "bias": [None, None, "table", "alibi", "by head"],
    "order": ["mask last", "mask first"],
    "cap": [None, None, None, "tanh", "clamp"],
    "gate": [None] * 7 + ["rows"],
    "shift": [None, None, "max", "amax", "detached", "mean"],
    "products": [
        *("one", "one", "one", "one", "sum", "position first", "differential", "cat", "chunks", "buffer", "bias"),
        *("relative shift", "relative gather", "heads"),
    ],
    "loop": [False] * 9 + [True],
    "sink": [None, None, None, "column", "zero"],
    "softmax": ["function", "method", "module", "float", "named", "log"],
    "after": [
        *(None, None, None, "normalise", "square", "detach", "double", "one minus", "relu", "topk", "linear heads"),
        *("conv heads", "einsum heads", "mask", "dropout", "sort", "scaled", "gate", "second norm"),
    ],
    "values": ["matmul", "einsum", "bmm"],
    "output": [None, None, "gate", "product", "norm"],
    "fused": [False] * 5 + [True],
    "checkpoint": [False] * 22 + ["reentrant", "not reentrant"],
    "unknown": [None] * 24 + ["sigmoid", "square", "cumsum", "softplus"],
    "exponential": [False] * 39 + [True],
}
"""What a module is drawn from, by the name of a field of `Recipe`."""

ONE_PRODUCT = {"sum", "position first", "differential", "relative shift", "relative gather"}
"""Further products beside q . k, which are to have the same scale."""
FURTHER_TOKENS = {"cache": 3, "memory": 3, "cross": 2}
"""Keys beyond those of the queries' own tokens."""


@dataclass(frozen=True)
class Recipe:
    """One attention module, and the sizes of its input."""

    seed: int
    heads: int
    batch: int
    length: int
    parts: dict[str, Any] = field(default_factory=dict)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self.parts[name]

    @classmethod
    def draw(cls, seed: int) -> Recipe:
        """Draw a module; what is impossible together is drawn apart."""
        draw = random.Random(seed)
        parts = {name.replace(" ", "_"): draw.choice(choices) for name, choices in BLOCKS.items()}
        heads, windows = draw.choice([1, 2, 4]), 1
        batch = draw.choice([2, heads, 3])  # what coincides is what a size cannot tell apart
        length = draw.choice([4, 6, 8])
        if parts["fused"]:
            parts.update(_fused(parts))
        if parts["projection"] != "separate" or heads == 1:
            parts["shared_keys"] = None
        if parts["sink"]:
            parts["shift"] = None  # which the sink would have to share
        if parts["cap"]:
            parts["order"] = "mask last"  # a cap would lift what is masked
        if parts["products"] in ONE_PRODUCT and parts["scale"] in ("query", "both", "key"):
            parts["scale"] = "scores"
        if parts["loop"] and parts["products"].startswith("relative"):
            parts["products"] = "one"
        if parts["products"] == "heads" and parts["layout"] not in ("bhnd", "einsum", "dots"):
            parts["products"] = "one"
        if parts["layout"] == "windows":
            windows = draw.choice([2, heads])
        elif heads == 1 and draw.random() < 0.3:
            batch, parts["layout"] = 1, "matrices"
            parts["temperature"] = parts["temperature"] if parts["temperature"] == "log n" else None
            if parts["fused"] or parts["products"] == "heads":
                parts["layout"] = "bhnd"
        return cls(seed, heads, batch, length, {**parts, "windows": windows})

    @property
    def plain(self) -> bool:
        """True for a softmax over beta * q . k plus terms, of which at least 80 % are to be supported."""
        return self.unknown is None

    @property
    def further(self) -> int:
        """How many keys more than queries there are."""
        return FURTHER_TOKENS.get(self.source, 0)

    @property
    def spread_temperatures(self) -> bool:
        """True if the temperatures of the heads are a tensor over batch and heads, which is a part of the scores."""
        by_head = self.temperature in ("by head", "at most")
        return by_head and self.layout in ("flat", "heads first") and self.batch * self.heads > 1

    @property
    def scaled_before(self) -> bool:
        """True if the model's own scale is in q or k before their product."""
        return self.scale in ("query", "both", "key")

    def __repr__(self) -> str:
        return f"Recipe({self.seed}: {self.heads} heads, batch {self.batch}, length {self.length}, {self.parts})"


def _fused(parts: dict[str, Any]) -> dict[str, Any]:
    """What becomes of some parts where torch takes the softmax."""
    plain = ("cap", "sink", "shift", "after", "unknown", "temperature", "gate", "loop", "exponential")
    layout = "bhnd" if parts["layout"] in ("bnhd", "einsum", "dots") else parts["layout"]
    changed = {**dict.fromkeys(plain), "products": "one", "layout": layout}
    if parts["bias"] or parts["padding"]:  # all masks are one, behind which no logit counts
        changed.update({name: parts[name] and "fill" for name in ("mask", "padding")})
    return changed
