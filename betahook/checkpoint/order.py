"""The order of layers in the tensors of a state, which is that of the modules when it was saved.

`schema` reorders a loaded state by these functions; `pretrained` cuts out the layers of a part of the model.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

BY_LAYER = ("condition", "condition_since")
"""Tensors with an entry for each layer instead of each head."""
BY_COMPONENT = ("moments", "recent_moments")
"""Tensors with `head_dim` entries for each head; any other has one."""


def of_layers(state: dict[str, Any], names: Sequence[str], head_dims: Mapping[str, int]) -> dict[str, Any]:
    """Return the state with only some of its layers, or with all of them in another order.

    Args:
        state: in the present format, with its `layers` in the order of its tensors.
        names: the layers to return, in order.
        head_dims: d_k of all layers of the state.
    """
    heads: dict[str, int] = state["layers"]
    if list(heads) == list(names):
        return state
    by_layer, by_head = _indices(dict.fromkeys(heads, 1), names), _indices(heads, names)
    by_component = _indices({name: count * head_dims[name] for name, count in heads.items()}, names)
    indices = {**dict.fromkeys(BY_LAYER, by_layer), **dict.fromkeys(BY_COMPONENT, by_component)}
    tensors = {name: value for name, value in state.items() if isinstance(value, Tensor)}
    by_unit = by_head if state["options"]["per_head"] else by_layer
    return {
        **state,
        **{name: value[..., indices.get(name, by_head)] for name, value in tensors.items()},
        "layers": {name: heads[name] for name in names},
        "order": list(names),
        "controllers": [
            {**entry, "state": {name: value[by_unit] for name, value in entry["state"].items()}}
            for entry in state["controllers"]
        ],
    }


def is_in(name: str, path: str) -> bool:
    """Return True if a layer is the module at this path or lies inside it; the path of the whole model is empty."""
    return not path or f"{name}.".startswith(f"{path}.")


def of_part(state: dict[str, Any], path: str, head_dims: Mapping[str, int]) -> dict[str, Any]:
    """Return the state of the layers inside the module at a path, with names relative to it; see `of_layers`."""
    part = of_layers(state, [name for name in state["layers"] if is_in(name, path)], head_dims)
    layers = {name.removeprefix(path).removeprefix("."): heads for name, heads in part["layers"].items()}
    return {**part, "layers": layers, "order": list(layers)}


def _indices(widths: Mapping[str, int], names: Sequence[str]) -> Tensor:
    """Return the indices at which the entries of the layers lie now, in the order of `names`; `widths` counts them.

    With `widths={"a": 2, "b": 1}` and `names=["b", "a"]`, these are `[2, 0, 1]`.
    """
    now = torch.arange(sum(widths.values()), device="cpu").split(list(widths.values()))
    by_name = dict(zip(widths, now, strict=True))
    return torch.cat([by_name[name] for name in names])
