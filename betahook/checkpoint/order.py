"""The order of the layers in the tensors of a state: that of the modules when it was saved."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

BY_LAYER = ("condition", "condition_since")
"""Tensors with an entry for each layer instead of each head."""
BY_COMPONENT = ("moments", "recent_moments")
"""Tensors with `head_dim` entries for each head; any other has one."""


def reordered(state: dict[str, Any], head_dims: Mapping[str, int]) -> dict[str, Any]:
    """Return a state from `schema.match` with its layers in another order.

    Args:
        state: its `layers` are in the order of its tensors.
        head_dims: d_k of the same layers, in the order that is wanted.
    """
    heads: dict[str, int] = state["layers"]
    if list(heads) == list(head_dims):
        return state
    of_layers = _places(dict.fromkeys(heads, 1), head_dims)
    of_heads = _places(heads, head_dims)
    of_components = _places({name: count * head_dims[name] for name, count in heads.items()}, head_dims)
    places = {**dict.fromkeys(BY_LAYER, of_layers), **dict.fromkeys(BY_COMPONENT, of_components)}
    tensors = {name: value for name, value in state.items() if isinstance(value, Tensor)}
    of_units = of_heads if state["options"]["per_head"] else of_layers
    return {
        **state,
        **{name: value[..., places.get(name, of_heads)] for name, value in tensors.items()},
        "layers": {name: heads[name] for name in head_dims},
        "order": list(head_dims),
        "controllers": [
            {**entry, "state": {name: value[of_units] for name, value in entry["state"].items()}}
            for entry in state["controllers"]
        ],
    }


def _places(widths: Mapping[str, int], names: Mapping[str, object]) -> Tensor:
    """Return where the entries of the layers lie now, in the order of `names`, from how many entries each has."""
    now = torch.arange(sum(widths.values()), device="cpu").split(list(widths.values()))
    by_name = dict(zip(widths, now, strict=True))
    return torch.cat([by_name[name] for name in names])
