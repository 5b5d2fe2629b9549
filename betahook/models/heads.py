"""Counting the heads of an attention module: `count_heads` asks one strategy after another; `discovery` calls it."""

from __future__ import annotations

import math
from collections.abc import Iterable

from torch import Tensor, nn

from betahook.models import materialise
from betahook.models.families import FUSED, HEAD_DIM, HEADS, SEPARATE, facts
from betahook.models.projections import features_of

QUERIES, KEYS = zip(*SEPARATE, strict=True)

Size = tuple[int | None, int | None]
"""Number of query heads, and the width d_k of each; None for what is not known."""


def count_heads(module: nn.Module) -> tuple[int, int] | None:
    """Number of query heads and width d_k of each, or None where the module does not tell."""
    sizes = (strategy(module) for strategy in STRATEGIES)
    return next(((heads, head_dim) for heads, head_dim in sizes if heads and head_dim), None)


def stated(module: nn.Module) -> Size:
    """Both numbers as the module states them."""
    return _heads(module), _first(module, HEAD_DIM)


def config_heads(module: nn.Module) -> Size:
    """The heads of the config with the module's d_k, if they fit into the query projection, which a gate widens."""
    heads, head_dim = _first(_config(module), HEADS), _first(module, HEAD_DIM)
    width = _width(module, QUERIES)
    misfit = heads and head_dim and width and width % (heads * head_dim)
    return None if misfit else heads, head_dim


def heads_in_query(module: nn.Module) -> Size:
    """As many heads of the module's d_k as its query projection has room for."""
    width, head_dim = _width(module, QUERIES), _first(module, HEAD_DIM)
    return width and head_dim and width // head_dim, head_dim


def config_only(module: nn.Module) -> Size:
    """Both numbers as the config states them, unless the module states its heads."""
    config = _config(module)
    return None if _heads(module) else _first(config, HEADS), _first(config, HEAD_DIM)


def shared_width(module: nn.Module) -> Size:
    """The module's heads share the width of its query, of a third of what is fused, of its keys or of its embedding."""
    heads, query, fused = _heads(module), _width(module, QUERIES), _width(module, FUSED)
    # A pooling head has a learned query, and a projection of the keys only.
    width = query or fused or _width(module, KEYS) or _first(module, ["embed_dim"])
    shares = 3 * heads if heads and fused and not query else heads
    return heads, width // shares if width and shares and width % shares == 0 else None


def from_scale(module: nn.Module) -> tuple[int, int] | None:
    """The module's heads, and the d_k that its scale is one over the root of: a last resort, in classes of users."""
    heads, scale = _heads(module), getattr(module, "scale", None)
    if not heads or not isinstance(scale, float) or not scale > 0:
        return None
    head_dim = round(scale**-2)
    return (heads, head_dim) if head_dim > 1 and math.isclose(head_dim**-0.5, scale, rel_tol=1e-6) else None


STRATEGIES = (stated, config_heads, heads_in_query, config_only, shared_width)
"""In the order in which they are asked. Those after `stated` see modules that lack one of the numbers, or both."""


def missing(module: nn.Module) -> str:
    """Tell in words what a module does not say of its size."""
    heads, head_dim = stated(module)
    if heads:
        return f"it does not say how wide its {heads} heads are: set its attribute head_dim before attach"
    if head_dim:
        return f"it does not say how many heads of {head_dim} it has: set its attribute num_heads before attach"
    return (
        "it says neither how many heads it has nor how wide they are: set its attributes num_heads and head_dim before "
        "attach"
    )


def _config(module: nn.Module) -> object:
    return getattr(module, "config", None) or getattr(module, "cfg", None)


def _heads(module: nn.Module) -> int | None:
    return facts(module).heads or _first(module, HEADS)


def _first(owner: object, names: Iterable[str]) -> int | None:
    """The first of these attributes that is a positive number."""
    values = (getattr(owner, name, None) for name in names)
    return next((value for value in values if isinstance(value, int) and value > 0), None)


def _width(module: nn.Module, names: Iterable[str]) -> int | None:
    """Width of what the first of these projections returns."""
    for projection in (getattr(module, name, None) for name in names):
        if isinstance(projection, nn.Module) and isinstance(materialise.stored(projection), Tensor):
            return features_of(projection)
    return None
