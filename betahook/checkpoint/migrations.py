"""Converters of a hook's state from older formats to the present one.

`betahook.checkpoint.schema` checks the result. On a damaged state, a converter may raise a ValueError and no other
error. The names in this file are those of the old formats and never change.
"""

from __future__ import annotations

import ast
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

_WEIGHT_ROWS_2 = (
    *("query_weights", "query_weight", "query_weight_square"),
    *("key_weights", "key_weight", "key_weight_square"),
)
_TABLE_ROWS_2 = (
    *("pairs", "exact_pairs", "score", "score_square", "rows", "entropy"),
    *("queries", "query_mean_square", "query_variance", "keys", "key_mean_square", "key_variance"),
    *("independent_variance", "query_inputs", "query_input", "query_input_square"),
    *("key_inputs", "key_input", "key_input_square", *_WEIGHT_ROWS_2, "sensitivity", "max_score", "max_logit"),
)
_MOMENT_ROWS_2 = ("query_sum", "query_square", "key_sum", "key_square")


def from_version_2(given: dict[str, Any]) -> dict[str, Any]:
    """Convert the format of version 0.1: unnamed rows, sums of W_q and W_k in the table, controllers as their repr."""
    state = {name: value for name, value in given.items() if not str(name).startswith("controllers.")}
    table, recent = (_rows(given, name, _TABLE_ROWS_2) for name in ("table", "recent"))
    moments = _rows(given, "moments", _MOMENT_ROWS_2)
    kept = [row for row in _TABLE_ROWS_2 if row not in _WEIGHT_ROWS_2]
    weights = ("query_count", "query_sum", "query_square", "key_count", "key_sum", "key_square")
    return {
        **state,
        "table": torch.stack([table[row] for row in kept]),
        "recent": torch.stack([recent[row] for row in kept]),
        "weights": torch.stack([recent[row] for row in _WEIGHT_ROWS_2]),
        "moments": torch.stack(list(moments.values())),
        "rows": {"table": kept, "recent": kept, "weights": list(weights), "moments": list(_MOMENT_ROWS_2)},
        "nonfinite_since": torch.zeros(table["pairs"].shape, dtype=torch.int64, device=table["pairs"].device),
        "alerts_step": 0,
        "warned_of_nonfinite": False,
        "warned_of_unreached": False,
        "controllers": _controllers(given),
    }


def _rows(given: dict[str, Any], name: str, names: tuple[str, ...]) -> dict[str, Tensor]:
    values = given.get(name)
    if not isinstance(values, Tensor) or values.dim() != 2 or len(values) != len(names):
        found = list(values.shape) if isinstance(values, Tensor) else type(values).__name__
        raise ValueError(f"the state is incomplete: {name} should have the shape [{len(names)}, heads], got {found}")
    return dict(zip(names, values, strict=True))


def _controllers(given: dict[str, Any]) -> list[dict[str, Any]]:
    entries = given.get("controllers")
    if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
        raise ValueError(f"the state is incomplete: controllers should be a list of dictionaries, got {entries!r}")
    controllers = []
    for index, entry in enumerate(entries):
        name, options = _call(entry.get("rule"))
        prefix = f"controllers.{index}."  # in a file; in memory, the entry holds the state
        stored = {str(key).removeprefix(prefix): x for key, x in given.items() if str(key).startswith(prefix)}
        controllers.append({"class": name, "options": options, "state": entry.get("state", stored)})
    return controllers


def _call(rule: object) -> tuple[str, dict[str, Any]]:
    """Return the class name and the options in the repr of a controller, such as `Search(window=10, ...)`."""
    name, _, arguments = str(rule).partition("(")
    try:
        call = ast.parse(f"options({arguments}", mode="eval").body
        if not isinstance(rule, str) or not isinstance(call, ast.Call) or call.args:
            raise ValueError("it is not a call with options by name")
        options = {str(keyword.arg): ast.literal_eval(keyword.value) for keyword in call.keywords}
    except (SyntaxError, ValueError) as error:
        raise ValueError(f"the state is damaged: {rule!r} is not a controller ({error})") from error
    return name, {key: list(value) if isinstance(value, tuple) else value for key, value in options.items()}


MIGRATIONS: dict[int, Callable[[dict[str, Any]], dict[str, Any]]] = {2: from_version_2}
"""Version of the schema to the converter from it."""
