"""Number and width of the heads of an attention module, from its attributes, its config and its projections.

`discovery` and `trial` call `count_heads`, which tries one strategy after another.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from torch import Tensor, nn

from betahook.models import materialise
from betahook.models.families import FUSED, HEAD_DIM, HEADS, SEPARATE, facts
from betahook.models.projections import features_of

QUERIES, KEYS = zip(*SEPARATE, strict=True)

Size = tuple[int | None, int | None]
"""Number of query heads and the width d_k of each; None for one that is unknown."""


def count_heads(module: nn.Module) -> tuple[int, int] | None:
    """Number of query heads and the width d_k of each, or None if no strategy finds both."""
    sizes = (strategy(module) for strategy in STRATEGIES)
    return next(((heads, head_dim) for heads, head_dim in sizes if heads and head_dim), None)


def stated(module: nn.Module) -> Size:
    """Both numbers as the module states them."""
    return _heads(module), _first(module, HEAD_DIM)


def config_heads(module: nn.Module) -> Size:
    """Heads from the config with d_k from the module, if both fit the query projection, which a gate may widen."""
    heads, head_dim = _first(_config(module), HEADS), _first(module, HEAD_DIM)
    width = _width(module, QUERIES)
    fits = not (heads and head_dim and width) or width % (heads * head_dim) == 0
    return heads if fits else None, head_dim


def heads_in_query(module: nn.Module) -> Size:
    """As many heads of the module's d_k as fit into its query projection."""
    width, head_dim = _width(module, QUERIES), _first(module, HEAD_DIM)
    return width and head_dim and width // head_dim, head_dim


def config_only(module: nn.Module) -> Size:
    """Both numbers from the config, unless the module states its heads itself."""
    config = _config(module)
    return None if _heads(module) else _first(config, HEADS), _first(config, HEAD_DIM)


def shared_width(module: nn.Module) -> Size:
    """The module's heads, each with its share of the width of the query, fused (a third), key or embedding."""
    heads, query, fused = _heads(module), _width(module, QUERIES), _width(module, FUSED)
    # A pooling head has a learned query and projects the keys only.
    width = query or fused or _width(module, KEYS) or _first(module, ["embed_dim"])
    shares = 3 * heads if heads and fused and not query else heads
    return heads, width // shares if width and shares and width % shares == 0 else None


def from_scale(module: nn.Module) -> tuple[int, int] | None:
    """The module's heads, and the d_k for which its scale is 1/√d_k: a last resort, for user-defined classes."""
    heads, scale = _heads(module), getattr(module, "scale", None)
    if not heads or not isinstance(scale, float) or not scale > 0:
        return None
    head_dim = round(scale**-2)
    return (heads, head_dim) if head_dim > 1 and math.isclose(head_dim**-0.5, scale, rel_tol=1e-6) else None


STRATEGIES = (stated, config_heads, heads_in_query, config_only, shared_width)
"""In the order in which they are tried. Those after `stated` see modules that lack one of the numbers, or both."""


def missing(module: nn.Module) -> str:
    """Explain which size attributes the module lacks."""
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
    """Value of the first of these attributes that is a positive integer."""
    values = (getattr(owner, name, None) for name in names)
    return next((value for value in values if isinstance(value, int) and value > 0), None)


def _width(module: nn.Module, names: Iterable[str]) -> int | None:
    """Output width of the first of these projections that the module has."""
    for projection in (getattr(module, name, None) for name in names):
        if isinstance(projection, nn.Module) and isinstance(materialise.stored(projection), Tensor):
            return features_of(projection)
    return None
